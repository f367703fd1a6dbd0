"""An emulated GPU's kernels write the bytes of the CPU kernels, where those are a contract to the bit."""

import emulation
import pytest
import torch
from compress_cases import KIND_IDS, KINDS, Layer
from kv_cache_cases import POISON, all_layouts, poisoned_cache
from norm_rope_cases import insert_case, values

from mla_fp8 import KV_LAYOUTS

pytestmark = pytest.mark.device(emulation.executes(), "an emulated GPU (`make machine`)")


@pytest.fixture
def both():
    """The ops of the two libraries."""
    return emulation.cpu_ops, torch.ops.mla_fp8


def same(got, want):
    return torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, want)))


@all_layouts
@pytest.mark.parametrize("norm_q", [True, False])
def test_qk_norm_rope_insert(both, layout, norm_q):
    arguments, q = insert_case(layout, "cpu", 40, 3 * 61), values(40, 5, 512, device="cpu")
    results = []
    for ops in both:
        cache = poisoned_cache(layout, 3, 61, "cpu", gap=-layout.page_bytes(61) % 16)
        out = ops.qk_norm_rope_insert(
            q, **arguments, kv_cache=cache, layout=layout.id, page_size=61, norm_q=norm_q, num_heads=7
        )
        results.append((out, cache))
    assert all(same(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_inverse_rope_quantize(both, tile, power_of_two):
    arguments, o = insert_case(KV_LAYOUTS["dsv4"], "cpu", 40, 64), values(40, 8, 512, device="cpu")
    rest = [arguments[name] for name in ("cos", "sin", "positions")]
    options = {"num_groups": 2, "tile": tile, "power_of_two": power_of_two}
    results = [ops.inverse_rope_quantize(o, *rest, **options) for ops in both]
    assert all(same(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("round_pooled", [True, False])
@pytest.mark.parametrize("ratio, online", KINDS, ids=KIND_IDS)
@pytest.mark.parametrize("lens", [[1] * 9, [300], [2, 131, 0, 140, 7], [5000]], ids=str)
def test_compress_kv(both, lens, ratio, online, round_pooled):
    if len(lens) == 1 and lens[0] > 1000 and ratio > 4:
        pytest.skip("takes an emulator long")
    layer, n, num = Layer(ratio, online, "cpu", round_pooled=round_pooled), sum(lens), len(lens)
    rows = layer.rows(n)
    rows[::7, :4], rows[3::11, 9] = float("nan"), -float("inf")
    held = layer.new_state(num + 1, 5)
    held = None if held is None else torch.rand_like(held)
    starts = torch.tensor([2, *lens]).cumsum(0).int()
    start_pos = torch.randint(0, 200, (num,), dtype=torch.int32)
    slots, states = torch.arange(n), torch.randperm(num + 1)[:num]
    results = []
    for ops in both:
        state = None if held is None else held.clone()
        cache, latent = layer.new_cache(n).fill_(POISON), torch.full((n, 512), 7.0).bfloat16()
        ops.compress_kv(
            rows, starts, start_pos, state, states, slot_mapping=slots, kv_cache=cache, **layer.constants,
            ratio=ratio, layout=layer.layout.id, page_size=layer.page_size, eps=1e-6, online=online,
            round_pooled=round_pooled, out_latent=latent,
        )  # fmt: skip
        results.append((latent.nan_to_num(), cache, torch.zeros(1) if state is None else state.nan_to_num()))
    assert all(same(*pair) for pair in zip(*results, strict=True))
