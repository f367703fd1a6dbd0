import pytest
import torch
from kv_cache_cases import (
    INT64,
    POISON,
    all_layouts,
    lazy_cache,
    page_sizes,
    poisoned_cache,
    whole_buffer,
)
from norm_rope_cases import (
    MAX_POS,
    assert_same_bf16,
    expected_q,
    insert_case,
    positions_of,
    rope_tables,
    values,
)

import mla_fp8
from mla_fp8 import KV_LAYOUTS, layer_reference

NUM_PAGES = 7
V4, V41, V32, NOPE = (KV_LAYOUTS[name] for name in ("dsv4", "dsv41", "dsv32", "dsv32_nope"))


def check_k(arguments, layout, page_size, device, gap=0):
    """The op and the specification write the same bytes, and neither touches another one."""
    options = {"layout": layout, "page_size": page_size}
    kv_cache = poisoned_cache(layout, NUM_PAGES, page_size, device, gap=gap)
    expected = poisoned_cache(layout, NUM_PAGES, page_size, "cpu")
    on_cpu = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    layer_reference.k_norm_rope_insert(**on_cpu, kv_cache=expected, **options)
    assert mla_fp8.k_norm_rope_insert(**arguments, kv_cache=kv_cache, **options) is None
    assert torch.equal(kv_cache.cpu(), expected)
    gaps = whole_buffer(kv_cache).view(len(kv_cache), kv_cache.stride(0))[:, kv_cache.shape[1] :]
    assert (gaps == POISON).all()
    return expected


def check_qk(q, arguments, layout, device, *, norm_q, num_heads=None, out_q=None, page_size=64):
    options = {"layout": layout, "page_size": page_size}
    on_cpu = {k: x.cpu() if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}
    want = expected_q(q.cpu(), on_cpu, norm_q, num_heads or q.shape[1])
    expected = check_k(arguments, layout, page_size, device)
    kv_cache = poisoned_cache(layout, NUM_PAGES, page_size, device)
    got = mla_fp8.qk_norm_rope_insert(
        q, **arguments, kv_cache=kv_cache, **options, norm_q=norm_q, num_heads=num_heads, out_q=out_q
    )
    assert torch.equal(kv_cache.cpu(), expected)
    assert_same_bf16(got.cpu(), want)
    return got


@all_layouts
@page_sizes
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_bytes_are_those_of_norm_rope_and_quantize_kv(layout, page_size, num_tokens, device):
    check_k(insert_case(layout, device, num_tokens, NUM_PAGES * page_size), layout, page_size, device, gap=64)


@all_layouts
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.sampled(5)
def test_many_tokens_with_any_weight(layout, weight, dtype, device):
    check_k(insert_case(layout, device, 150, NUM_PAGES * 64, weight=weight, dtype=dtype), layout, 64, device)


@pytest.mark.parametrize("form", ["halves", "alternating", "apart"])
@pytest.mark.parametrize("half", [0, 4, 16, 32, 36, 128])
@pytest.mark.parametrize("layout", [V4, V41, KV_LAYOUTS["bf16_512"]], ids=lambda x: x.name)
def test_any_number_of_dims_and_any_form_of_the_tables(layout, half, form, device):
    arguments = insert_case(layout, device, 40, NUM_PAGES * 64, half=half, form=form)
    check_k(arguments, layout, 64, device)


@pytest.mark.parametrize("norm_q", [True, False])
@pytest.mark.parametrize("heads, num_heads", [(1, None), (8, None), (13, 16), (16, 64)])
@pytest.mark.parametrize("layout", [V4, V41, V32, NOPE], ids=lambda x: x.name)
def test_heads_are_normed_rotated_and_padded(layout, heads, num_heads, norm_q, device):
    arguments = insert_case(layout, device, 25, NUM_PAGES * 64)
    q = values(25, heads, 512, device=device)
    got = check_qk(q, arguments, layout, device, norm_q=norm_q, num_heads=num_heads)
    assert got.is_contiguous() and (got[:, heads:] == 0).all()


@pytest.mark.parametrize("dim", [64, 72, 192, 576, 1024])
def test_a_slice_of_q_with_the_rotated_dims_alone(dim, device):
    arguments = insert_case(V32, device, 25, NUM_PAGES * 64)
    wide = values(25, 5, dim + 128, device=device)
    q = wide[..., 128:]
    check_qk(q, arguments, V32, device, norm_q=False, num_heads=7)
    other = wide.clone()
    check_qk(q, arguments, V32, device, norm_q=False, out_q=other[..., 128:])
    assert torch.equal(other[..., :128], wide[..., :128])


@pytest.mark.parametrize("norm_q", [True, False])
@pytest.mark.parametrize("half", [0, 32])
def test_in_place(norm_q, half, device):
    """Padding around the heads keeps its bytes; heads of unknown positions become zeros as a whole."""
    arguments = insert_case(V4, device, 31, NUM_PAGES * 64, half=half)
    wide = values(31, 9, 512, device=device)
    q, before = wide[:, 1:7], wide.clone()
    want = expected_q(q, arguments, norm_q, 6)
    kv_cache = poisoned_cache(V4, NUM_PAGES, 64, device)
    options = {"layout": V4, "page_size": 64, "norm_q": norm_q, "kv_cache": kv_cache}
    assert mla_fp8.qk_norm_rope_insert(q, **arguments, **options, out_q=q) is q
    assert_same_bf16(q, want)
    assert torch.equal(wide[:, 7:], before[:, 7:]) and torch.equal(wide[:, :1], before[:, :1])


def test_rows_past_the_slot_mapping_are_padding_but_their_heads_are_made(device):
    arguments = insert_case(V4, device, 40, NUM_PAGES * 64)
    arguments["kv"][11:] = float("nan")
    arguments["slot_mapping"] = arguments["slot_mapping"][:11].contiguous()
    check_qk(values(40, 4, 512, device=device), arguments, V4, device, norm_q=True)
    arguments["slot_mapping"] = arguments["slot_mapping"][:0]
    check_qk(values(40, 4, 512, device=device), arguments, V4, device, norm_q=False)


def test_a_latent_without_rope_in_rows_with_a_place_for_it(device):
    arguments = insert_case(V32, device, 20, NUM_PAGES * 64, half=0)
    assert arguments["k_rope"] is None
    cache = check_k(arguments, V32, 64, device)
    slots = arguments["slot_mapping"].cpu()
    rows = mla_fp8.dequantize_kv(cache, slots, layout=V32, page_size=64)
    stored = (slots >= 0) & (slots < NUM_PAGES * 64)
    assert (rows[:, 512:] == 0).all() and rows[stored][:, :512].any(1).all()


def test_without_pairs_positions_and_tables_are_not_looked_at(device):
    arguments = insert_case(NOPE, device, 20, NUM_PAGES * 64)
    arguments["positions"].fill_(INT64.min)
    empty = torch.empty(0, 0, device=device)
    check_k(arguments | {"cos": empty, "sin": empty}, NOPE, 64, device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_no_position_reads_outside_the_table(dtype, device):
    """Its rows before and behind are NaN."""
    arguments = insert_case(V4, device, 300, 8 * 64, dtype=dtype)
    arguments["positions"] = positions_of(300, device, dtype)
    for name in ("cos", "sin"):
        whole = torch.full((MAX_POS + 2, 32), float("nan"), device=device)
        whole[1:-1] = arguments[name]
        arguments[name] = whole[1:-1]
    q = values(300, 3, 512, device=device)
    kv_cache = poisoned_cache(V4, 8, 64, device)
    got = mla_fp8.qk_norm_rope_insert(q, **arguments, kv_cache=kv_cache, layout=V4, page_size=64, norm_q=True)
    assert not got.isnan().any()
    unknown = (arguments["positions"] < 0) | (arguments["positions"] >= MAX_POS)
    assert unknown.sum() == 5 and (got[unknown] == 0).all() and got[~unknown].any(-1).all()
    slots = arguments["slot_mapping"][unknown]
    slots = slots[(slots >= 0) & (slots < 8 * 64)]
    assert len(slots)
    for slot in slots.tolist():
        nope, _, _ = V4.views(kv_cache, 64)
        assert (nope.view(torch.uint8)[slot // 64, slot % 64] == POISON).all()


def test_an_empty_table_knows_no_position(device):
    arguments = insert_case(V4, device, 5, 64)
    arguments |= {name: arguments[name][:0] for name in ("cos", "sin")}
    kv_cache = poisoned_cache(V4, 1, 64, device)
    q = values(5, 2, 512, device=device)
    got = mla_fp8.qk_norm_rope_insert(
        q, **arguments, kv_cache=kv_cache, layout=V4, page_size=64, norm_q=False
    )
    assert (got == 0).all() and (kv_cache == POISON).all()


def test_rows_that_norm_exactly(device):
    """x = +-2^k with eps 0 has norm +-1 whatever the order of the sum: the outside judge of the norm."""
    signs = torch.randint(0, 2, (64, 512), device=device) * 2.0 - 1
    x = (signs * torch.exp2(torch.randint(-20, 20, (64, 1), device=device).float())).bfloat16()
    arguments = insert_case(V41, device, 64, 128) | {"kv": x, "eps": 0.0}
    arguments["positions"] %= MAX_POS
    arguments["slot_mapping"] = torch.randperm(128, device=device)[:64]
    kv_cache = poisoned_cache(V41, 2, 64, device)
    q = mla_fp8.qk_norm_rope_insert(
        x[:, None], **arguments, kv_cache=kv_cache, layout=V41, page_size=64, norm_q=True
    )
    assert torch.equal(q[:, 0, :448].float(), signs[:, :448])
    at = arguments["positions"]
    cos, sin = (arguments[name][at].double() for name in ("cos", "sin"))
    weighted = (signs * arguments["kv_weight"].float())[:, 448:].double()
    a, b = weighted[:, 0::2], weighted[:, 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1)
    exact = torch.cat([(signs * arguments["kv_weight"].float())[:, :448].double(), turned], 1)
    rows = mla_fp8.dequantize_kv(kv_cache, arguments["slot_mapping"], layout=V41, page_size=64)
    amax = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    assert ((rows.double() - exact).abs() <= amax / 14 + 2e-3).all()


def test_normed_heads_have_mean_square_one(device):
    """Against float64: a normed head has mean square 1 and keeps its direction."""
    arguments = insert_case(V4, device, 50, 64)
    cos, sin = rope_tables(device)
    arguments |= {"cos": cos, "sin": sin, "positions": torch.arange(50, device=device)}
    q = torch.randn(50, 4, 512, device=device).bfloat16()
    kv_cache = poisoned_cache(V4, 1, 64, device)
    got = mla_fp8.qk_norm_rope_insert(q, **arguments, kv_cache=kv_cache, layout=V4, page_size=64, norm_q=True)
    torch.testing.assert_close(
        got.double().square().mean(-1), torch.ones_like(q[..., 0]).double(), atol=4e-3, rtol=0
    )
    exact = q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    a, b = exact[..., 448::2], exact[..., 449::2]
    c, s = cos[:50, None].double(), sin[:50, None].double()
    want = torch.cat([exact[..., :448], torch.stack([a * c - b * s, a * s + b * c], -1).flatten(2)], -1)
    assert ((got.double() - want).abs() <= 2.0**-7 * want.abs() + 2.0**-6).all()


def test_nan_and_inf_are_the_specifications(device):
    arguments = insert_case(V4, device, 30, NUM_PAGES * 64)
    rows = torch.arange(30, device=device)
    arguments["kv"][rows[:10], 3 + 7 * rows[:10]] = float("nan")
    arguments["kv"][rows[10:20], 3 + 7 * rows[10:20]] = float("inf")
    arguments["kv"][20:] = 3e38
    q = arguments["kv"][:, None].repeat(1, 2, 1)
    check_qk(q, arguments, V4, device, norm_q=True)
    check_qk(q, arguments | {"kv_weight": None}, V4, device, norm_q=False)


def test_results_do_not_depend_on_the_batch(device):
    arguments = insert_case(V4, device, 60, NUM_PAGES * 64)
    q = values(60, 5, 512, device=device)
    options = {"layout": V4, "page_size": 64, "norm_q": True}
    together = mla_fp8.qk_norm_rope_insert(
        q, **arguments, kv_cache=poisoned_cache(V4, NUM_PAGES, 64, device), **options
    )
    for t in range(0, 60, 7):
        one = {
            key: x[t : t + 1] if key in ("kv", "positions", "slot_mapping") else x
            for key, x in arguments.items()
        }
        alone = mla_fp8.qk_norm_rope_insert(
            q[t : t + 1], **one, kv_cache=poisoned_cache(V4, NUM_PAGES, 64, device), **options
        )
        assert_same_bf16(alone, together[t : t + 1])


@pytest.mark.parametrize("layout", [V4, V32], ids=lambda x: x.name)
def test_offsets_past_2_to_the_31(layout, device):
    kv_cache = lazy_cache(layout, 64, device)
    arguments = insert_case(layout, device, 32, 64)
    arguments["positions"] %= MAX_POS
    arguments["slot_mapping"] = (len(kv_cache) - 1) * 64 + torch.arange(32, device=device)
    kv_cache[-2:] = POISON
    options = {"layout": layout, "page_size": 64}
    mla_fp8.k_norm_rope_insert(**arguments, kv_cache=kv_cache, **options)
    small = poisoned_cache(layout, 1, 64, device)
    arguments["slot_mapping"] = torch.arange(32, device=device)
    mla_fp8.k_norm_rope_insert(**arguments, kv_cache=small, **options)
    assert torch.equal(kv_cache[-1:], small) and (kv_cache[-2] == POISON).all()


def test_the_callers_flush_denormal_mode_changes_nothing():
    arguments = insert_case(V4, "cpu", 100, 128)
    arguments["kv"] = (torch.randn(100, 512) * torch.logspace(-40, -20, 100)[:, None]).bfloat16()
    arguments["kv_weight"] = torch.full((512,), 1e-20)
    want = poisoned_cache(V4, 2, 64, "cpu")
    mla_fp8.k_norm_rope_insert(**arguments, kv_cache=want, layout=V4, page_size=64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        got = poisoned_cache(V4, 2, 64, "cpu")
        mla_fp8.k_norm_rope_insert(**arguments, kv_cache=got, layout=V4, page_size=64)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("offset", [0, 8])
def test_a_large_result_has_the_bits_of_its_parts(offset, device):
    """Heads that are not normed go past the caches on a CPU: 34 MB on cache lines, but not 11."""
    n, options = 528, {"layout": V41, "page_size": 64, "norm_q": False}
    arguments = insert_case(V41, device, n, 9 * 64)
    q, kv_cache = values(n, 64, 512, device=device), poisoned_cache(V41, 9, 64, device)
    per_token = ("kv", "positions", "slot_mapping")

    def part(i: int) -> torch.Tensor:
        own = {key: x[i : i + 176] if key in per_token else x for key, x in arguments.items()}
        return mla_fp8.qk_norm_rope_insert(q[i : i + 176], **own, kv_cache=kv_cache, **options)

    want = torch.cat([part(i) for i in (0, 176, 352)])
    out = torch.empty(q.numel() + offset, device=device).bfloat16()[offset:].view(q.shape)
    mla_fp8.qk_norm_rope_insert(q, **arguments, kv_cache=kv_cache, **options, out_q=out)
    assert_same_bf16(out.cpu(), want.cpu())
