import pytest
import torch
from error_cases import check_refused, misaligned
from norm_rope_cases import MAX_POS, assert_same_bf16, positions_of, rope_tables, values

import mla_fp8
from mla_fp8 import layer_reference


def case(num_tokens, heads, device, *, half=32, form="halves", dim=512, dtype=torch.int64):
    """(o, cos, sin, positions); o is a slice of a result with more heads."""
    o = values(num_tokens, heads + 3, dim, device=device)[:, 1 : heads + 1]
    return o, *rope_tables(device, half, form=form), positions_of(num_tokens, device, dtype)


def on_cpu(arguments):
    return [x.cpu() for x in arguments]


def bits(x):
    return x.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("form", ["halves", "alternating", "apart"])
@pytest.mark.parametrize("half", [0, 4, 32, 36, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 45])
@pytest.mark.parametrize("dim", [512, 576, 256])
def test_bits_are_the_specifications(num_tokens, half, dim, form, device):
    arguments = case(num_tokens, 5, device, half=half, form=form, dim=dim)
    want = layer_reference.inverse_rope(*on_cpu(arguments))
    got = mla_fp8.inverse_rope(*arguments)
    assert got.is_contiguous()
    assert_same_bf16(got.cpu(), want)
    out = torch.full((num_tokens, 9, dim), 7.0, device=device).bfloat16()
    assert mla_fp8.inverse_rope(*arguments, out=out[:, 2:7]) is not None
    assert_same_bf16(out[:, 2:7].cpu(), want)
    assert (out[:, :2] == 7).all() and (out[:, 7:] == 7).all()


@pytest.mark.parametrize("half", [0, 32])
def test_in_place(half, device):
    o, *rest = case(40, 6, device, half=half)
    want = layer_reference.inverse_rope(*on_cpu((o, *rest)))
    assert mla_fp8.inverse_rope(o, *rest, out=o) is o
    assert_same_bf16(o.cpu(), want)


@pytest.mark.parametrize("offset", [0, 8])
def test_a_large_result_has_the_bits_of_its_parts(offset, device):
    """On a CPU 34 MB go past the caches, if they lie on cache lines, and 11 do not."""
    o, cos, sin, at = case(528, 64, device)
    want = torch.cat([mla_fp8.inverse_rope(o[i : i + 176], cos, sin, at[i : i + 176]) for i in (0, 176, 352)])
    out = torch.empty(o.numel() + offset, device=device).bfloat16()[offset:].view(o.shape)
    mla_fp8.inverse_rope(o, cos, sin, at, out=out)
    assert torch.equal(bits(out), bits(want))


def test_it_undoes_the_rotation(device):
    q = torch.randn(50, 4, 512, device=device).bfloat16()
    cos, sin = rope_tables(device)
    at = torch.arange(50, device=device)
    turned = layer_reference.rotated(q, cos, sin, at)
    back = mla_fp8.inverse_rope(turned, cos, sin, at)
    assert torch.equal(back[..., :448], q[..., :448]) and (turned - q).abs().max() > 1
    assert ((back - q).float().abs() <= 2.0**-7 * q.float().abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("heads, num_groups", [(8, 1), (16, 2), (6, 3), (5, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64])
def test_codes_and_scales_are_the_specifications(num_tokens, heads, num_groups, tile, power_of_two, device):
    arguments = case(num_tokens, heads, device)
    options = {"num_groups": num_groups, "tile": tile, "power_of_two": power_of_two}
    want, want_scale = layer_reference.inverse_rope_quantize(*on_cpu(arguments), **options)
    got, got_scale = mla_fp8.inverse_rope_quantize(*arguments, **options)
    assert torch.equal(bits(got), bits(want)) and torch.equal(bits(got_scale), bits(want_scale))

    dim = heads // num_groups * 512
    out = torch.full((num_tokens, num_groups + 1, dim + 64), 3, dtype=torch.uint8, device=device)
    scale = torch.full((num_tokens, num_groups, dim // tile, 2), 7.0, device=device)
    views = (out.view(torch.float8_e4m3fn)[:, 1:, :dim], scale[..., 0])
    mla_fp8.inverse_rope_quantize(*arguments, **options, out=views[0], out_scale=views[1])
    assert torch.equal(bits(views[0]), bits(want)) and torch.equal(bits(views[1]), bits(want_scale))
    assert (out[:, :1] == 3).all() and (out[..., dim:] == 3).all() and (scale[..., 1] == 7).all()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_every_magnitude_as_the_largest_of_a_tile(power_of_two, device):
    largest = torch.arange(0x7F80, dtype=torch.int16, device=device).view(
        torch.bfloat16
    )  # 0 to the last finite one
    o = torch.zeros(len(largest) // 64, 4, 512, device=device).bfloat16()
    tiles = o.view(-1, 32)
    tiles[:, 5], tiles[:, 9], tiles[:, 30] = largest, -largest, largest / 3
    arguments = o, *rope_tables(device, 0), positions_of(len(o), device, torch.int64)
    options = {"num_groups": 2, "tile": 32, "power_of_two": power_of_two}
    want = layer_reference.inverse_rope_quantize(*on_cpu(arguments), **options)
    got = mla_fp8.inverse_rope_quantize(*arguments, **options)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 41])
def test_results_are_laid_out_for_the_grouped_projection(num_tokens, device):
    arguments = case(num_tokens, 16, device)
    values, scales = mla_fp8.inverse_rope_quantize(*arguments, num_groups=2)
    padded = -(-num_tokens // 4) * 4
    assert values.shape == (num_tokens, 2, 4096) and values.transpose(0, 1).is_contiguous()
    assert scales.shape == (num_tokens, 2, 32) and scales.stride()[1:] == (32 * padded, padded)
    assert scales.stride(0) == 1 or num_tokens == 1
    whole = scales.as_strided((2, 32, padded), (32 * padded, padded, 1))
    assert (whole[..., num_tokens:] == 0).all() and (whole[..., :num_tokens] > 0).all()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_the_values_come_back(power_of_two, device):
    """From the data that the test kept, in float64: half of an e4m3 step of the tile's largest."""
    o, cos, sin, at = case(60, 8, device)
    at %= MAX_POS
    codes, scale = mla_fp8.inverse_rope_quantize(o, cos, sin, at, num_groups=1, power_of_two=power_of_two)
    c, s = cos[at].double()[:, None], sin[at].double()[:, None]
    a, b = o[..., 448::2].double(), o[..., 449::2].double()
    back = torch.stack([a * c + b * s, b * c - a * s], -1).flatten(2)
    exact = torch.cat([o[..., :448].double(), back], -1).view(60, 32, 128)
    got = codes.double().view(60, 32, 128) * scale.double().view(60, 32, 1)
    amax = exact.abs().amax(-1, keepdim=True)
    assert ((got - exact).abs() <= amax * (1 / (14 if power_of_two else 28) + 2.0**-8) + 1e-9).all()
    if power_of_two:
        assert (scale.frexp().mantissa == 0.5).all()


def test_nan_and_inf_stay_their_own_elements_affair(device):
    o, *rest = case(20, 2, device)
    o[:, 0, 5], o[:, 0, 130], o[:, 1, 7] = float("nan"), float("inf"), -float("inf")
    for power_of_two in (True, False):
        options = {"num_groups": 1, "power_of_two": power_of_two}
        want, want_scale = layer_reference.inverse_rope_quantize(*on_cpu((o, *rest)), **options)
        got, got_scale = mla_fp8.inverse_rope_quantize(o, *rest, **options)
        assert torch.equal(bits(got), bits(want)) and torch.equal(bits(got_scale), bits(want_scale))
        known = ((rest[2] >= 0) & (rest[2] < MAX_POS)).cpu()
        assert got.cpu().float()[known].isnan().sum() == known.sum() and got_scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_unknown_position_gives_zeros(dtype, device):
    o, cos, sin, at = case(200, 3, device, dtype=dtype)
    o[:] = o.nan_to_num() + 1
    unknown = (at < 0) | (at >= MAX_POS)
    got = mla_fp8.inverse_rope(o, cos, sin, at)
    assert unknown.sum() == 5 and (got[unknown] == 0).all() and got[~unknown].any(-1).all()
    codes, scale = mla_fp8.inverse_rope_quantize(o, cos, sin, at, num_groups=3)
    assert (codes.float()[unknown] == 0).all() and (scale[unknown] == 2.0**-42).all()


def test_results_do_not_depend_on_the_batch(device):
    o, cos, sin, at = case(30, 8, device)
    together = mla_fp8.inverse_rope_quantize(o, cos, sin, at, num_groups=2)
    for t in (0, 11, 29):
        alone = mla_fp8.inverse_rope_quantize(o[t : t + 1], cos, sin, at[t : t + 1], num_groups=2)
        for x, y in zip(alone, together, strict=True):
            assert torch.equal(bits(x), bits(y[t : t + 1]))


def test_offsets_past_2_to_the_31():
    """Heads that lie far apart."""
    far = torch.empty(2**30 + 2048, dtype=torch.bfloat16)
    o = far.as_strided((1, 2, 512), (1024, 2**30 + 1024, 1))
    o.copy_(torch.randn(1, 2, 512))
    table = rope_tables("cpu")
    at = torch.tensor([17])
    assert_same_bf16(mla_fp8.inverse_rope(o, *table, at), mla_fp8.inverse_rope(o.clone(), *table, at))


def error_case(device):
    return {
        "o": torch.randn(5, 8, 512, device=device).bfloat16(),
        "cos": torch.ones(9, 32, device=device),
        "sin": torch.ones(9, 32, device=device),
        "positions": torch.arange(5, device=device),
    }


GROUPED = {"num_groups": 2, "tile": 128}
HEADS_ERRORS = [
    ("o", lambda x: x.float(), "o must have dtype torch.bfloat16, got torch.float32"),
    ("o", lambda x: x[0], "o must have shape [*, *, *], got [8, 512]"),
    ("o", misaligned, "o must be 16-byte aligned, got an address that is 2 past"),
    ("o", lambda x: x[..., :56], "o must have a multiple of 8 as its last dimension, at least 64"),
    ("o", lambda x: x.mT.contiguous().mT, "o must have stride 1 in its last dimension, got 8"),
    ("cos", lambda x: x[:, :3], "sin must have shape [9, 3], got [9, 32]"),
    ("sin", lambda x: x.double(), "sin must have dtype torch.float32, got torch.float64"),
    ("positions", lambda x: x[:4], "positions must have shape [5], got [4]"),
    (
        "positions",
        lambda x: x.float(),
        "positions must have dtype torch.int64 or torch.int32, got torch.float32",
    ),
]
GROUP_ERRORS = [
    ("num_groups", lambda x: 3, "num_groups must divide 8 (the heads of o), got 3"),
    ("num_groups", lambda x: 0, "num_groups must divide 8 (the heads of o), got 0"),
    ("tile", lambda x: 64, "tile must be 32 or 128, got 64"),
    ("o", lambda x: x[..., :448], "o must have a multiple of 128 (the tile) as its last dimension, got 448"),
]


@pytest.mark.parametrize("argument, spoil, message", HEADS_ERRORS)
def test_bad_arguments_are_refused(argument, spoil, message, device):
    arguments = error_case(device)
    arguments[argument] = spoil(arguments[argument])
    out = torch.full((5, 8, 512), 7.0, device=device).bfloat16()
    check_refused(mla_fp8.inverse_rope, arguments | {"out": out}, f"mla_fp8.inverse_rope: {message}")
    message = f"mla_fp8.inverse_rope_quantize: {message}"
    check_refused(mla_fp8.inverse_rope_quantize, arguments | GROUPED, message)


@pytest.mark.parametrize("argument, spoil, message", GROUP_ERRORS)
def test_bad_groups_and_tiles_are_refused(argument, spoil, message, device):
    arguments = error_case(device) | GROUPED
    arguments[argument] = spoil(arguments[argument])
    check_refused(mla_fp8.inverse_rope_quantize, arguments, f"mla_fp8.inverse_rope_quantize: {message}")


def test_bad_buffers_are_refused(device):
    arguments = error_case(device)
    out = torch.full((5, 8, 512), 7.0, device=device).bfloat16()
    o = arguments["o"]
    for spoilt, message in (
        (out.float(), "out must have dtype torch.bfloat16, got torch.float32"),
        (out[:, :4], "out must have shape [5, 8, 512], got [5, 4, 512]"),
        (misaligned(out), "out must be 16-byte aligned"),
        (out[:, :1].expand(-1, 8, -1), "out must not overlap itself"),
        (o.flatten().as_strided((5, 8, 512), (4096, 512, 1))[:, :8].view(40, 512)[:5, None].expand(5, 8, 512),
         "out must not overlap itself"),
    ):  # fmt: skip
        check_refused(mla_fp8.inverse_rope, arguments | {"out": spoilt}, message)
    codes = torch.zeros(5, 2, 2048, device=device).to(torch.float8_e4m3fn)
    scale = torch.zeros(5, 2, 16, device=device)
    grouped = arguments | GROUPED | {"out": codes, "out_scale": scale}
    for name, spoilt, message in (
        ("out", codes.view(torch.uint8), "out must have dtype torch.float8_e4m3fn, got torch.uint8"),
        ("out", codes[:, :1], "out must have shape [5, 2, 2048], got [5, 1, 2048]"),
        ("out", codes[:1].expand(5, -1, -1), "out must not overlap itself, got stride 0 in dimension 0"),
        ("out_scale", scale.double(), "out_scale must have dtype torch.float32, got torch.float64"),
        ("out_scale", scale[..., :4], "out_scale must have shape [5, 2, 16], got [5, 2, 4]"),
        ("out_scale", scale[:, :, :1].expand(-1, -1, 16), "out_scale must not overlap itself, got stride 0"),
    ):
        check_refused(mla_fp8.inverse_rope_quantize, grouped | {name: spoilt}, message)
    message = "expected all of out, out_scale or none, got no out_scale"
    check_refused(mla_fp8.inverse_rope_quantize, grouped | {"out_scale": None}, message, ValueError)
