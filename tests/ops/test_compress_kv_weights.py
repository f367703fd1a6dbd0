"""compress_kv where scores are -inf: such a token has no weight, in both forms."""

import pytest
import torch
from compress_cases import EPS, Layer, chain, same_bits


@pytest.mark.parametrize("masked", [1, 2, 3, 17, 127])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("has_ape", [False, True])
def test_a_score_of_minus_infinity_has_no_weight(online, where, masked, has_ape, device):
    """Of some dims, in one call and token by token: the softmax of the others, from float64."""
    layer = Layer(128, online, device)
    layer.constants["norm_weight"] = torch.ones(512, device=device)
    if not has_ape:
        layer.constants["ape"] = None
    rows = layer.rows(256)
    hidden = slice(128, 128 + masked) if where == "first" else slice(256 - masked, 256)
    rows[hidden, 512 : 512 + 300] = -torch.inf
    latents, _, _ = chain(layer, rows, [256], [0], most=1)
    values, scores = rows[128:].double().split(512, 1)
    scores = scores if layer.constants["ape"] is None else scores + layer.constants["ape"]
    mean = (scores.softmax(0) * values).sum(0).bfloat16().double()
    want = mean / (mean.square().mean() + EPS).sqrt()
    assert ((latents[255].double() - want).abs() <= 2.0**-6 * want.abs() + 1e-4).all()
    by_token, _, _ = chain(layer, rows, [1] * 256, [0] * 256, most=1)
    assert same_bits(by_token, latents)


@pytest.mark.parametrize("online", [False, True])
def test_a_block_without_any_weight_is_nan_and_no_other(online, device):
    layer = Layer(128, online, device)
    rows = layer.rows(384)
    clean, _, _ = chain(layer, rows, [384], [0], most=1)
    rows[128:256, 512 + 7] = -torch.inf
    for cuts in ([384], [1] * 384):
        latents, _, _ = chain(layer, rows, cuts, [0] * len(cuts), most=1)
        assert latents[255].isnan().all()
        assert same_bits(latents[[127, 383]], clean[[127, 383]])
