import time
from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_attention
from sparse_cases import INT_MAX, INT_MIN, V4_SCOPES, all_layouts, packed_layouts
from window_cases import WindowCase, few_heads_on_cpu, make_window_case, paged_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

OPS = torch.ops.mla_fp8


def check(window: WindowCase, which: torch.Tensor | slice = slice(None)) -> None:
    assert_attention(window.case, window.run(), which)


def test_slots_of_windows():
    """By hand: a request of 5 tokens with 2 queries, one of 2 with 3 (its first has no position)."""
    table = torch.tensor([[4, 2, 9], [7, -1, 3]], dtype=torch.int32)
    starts, lens = torch.tensor([3, 5, 8], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32)
    slots = reference.window_slots(table, starts, lens, num_tokens=6, page_size=2, window_size=3)
    assert slots.tolist() == [[9, 4, 5], [4, 5, 18], [-1] * 3, [14, -1, -1], [14, 15, -1], [-1] * 3]


RAGGED = {"query_lens": [1, 0, 5, 3, 40], "seq_lens": [9, 4, 5, 2, 300]}  # one shorter than its queries


@all_layouts
@pytest.mark.parametrize("num_q_heads", [1, 8, 16, 40])
def test_agrees_with_float64_over_poisoned_caches(layout, num_q_heads, device):
    check(make_window_case(layout, device, num_q_heads=num_q_heads, **RAGGED))


@packed_layouts
@pytest.mark.parametrize("page_size", [1, 61, 256])
@pytest.mark.parametrize("window_size", [1, 2, 64, 128, 500])
def test_any_window_and_page_size(layout, window_size, page_size, device):
    check(make_window_case(layout, device, window_size=window_size, page_size=page_size, **RAGGED))


@packed_layouts
def test_window_and_selected_entries_are_one_softmax(layout, device):
    check(make_window_case(layout, device, extra=V4_SCOPES, **RAGGED))


@paged_layouts
@pytest.mark.parametrize("num_q_heads", [1, 5, 8, 12, 32, 64, 100])
@pytest.mark.parametrize("extra", [None, V4_SCOPES], ids=["window only", "two caches"])
@few_heads_on_cpu
@pytest.mark.sampled(3)
def test_many_queries(layout, num_q_heads, extra, device):
    query_lens = [3, 700, 1, 2, 1500, 0, 333]
    window = make_window_case(
        layout, device, query_lens=query_lens, seq_lens=[50, 700, 1, 600, 2000, 9, 300], window_size=128,
        page_size=64, num_q_heads=num_q_heads, extra=extra,
    )  # fmt: skip
    some = torch.randperm(sum(query_lens), device=device)[:40]
    edges = torch.tensor([0, 2, 3, 4, 702, 703, 704, 705, 706, 2205, 2206, 2538, 2540], device=device)
    check(window, torch.cat([edges, some]))


@paged_layouts
@pytest.mark.parametrize("num_q_heads", [8, 16, 64])
@pytest.mark.parametrize("window_size", [1, 3, 100, 128, 200])
@few_heads_on_cpu
@pytest.mark.sampled(5)
def test_windows_of_any_size_of_many_requests(layout, window_size, num_q_heads, device):
    """Requests of 0 to 9 queries, some with fewer tokens than those, and holes in their pages."""
    requests = 60 if emulation.executes() else 450
    query_lens = torch.randint(0, 10, (requests,)).tolist()
    more = torch.randint(-3, 90, (requests,)).tolist()
    seq_lens = [max(n + m, 1) for n, m in zip(query_lens, more, strict=True)]
    window = make_window_case(
        layout,
        device,
        query_lens=query_lens,
        seq_lens=seq_lens,
        window_size=window_size,
        num_q_heads=num_q_heads,
    )
    check(window, torch.randperm(sum(query_lens), device=device)[:120])


@packed_layouts
def test_no_requests_and_no_tokens(layout, device):
    window = make_window_case(layout, device, query_lens=[], seq_lens=[], padding=3)
    out, max_logits, lse = window.run()
    assert (out == 0).all() and lse.isneginf().all() and max_logits.isneginf().all()
    window = make_window_case(layout, device, query_lens=[0], seq_lens=[5], padding=0)
    assert window.run()[0].shape == (0, 16, 512)


@pytest.mark.parametrize("num_q_heads", [8, 64])
@pytest.mark.parametrize("query_len", [4, 900])
@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
@few_heads_on_cpu
def test_hostile_geometry_gives_finite_rows(name, query_len, num_q_heads, device):
    """No value of query_start_loc or seq_lens reaches memory that it should not."""
    layout = KV_LAYOUTS[name]
    lens = {"query_lens": [query_len] * 3, "seq_lens": [1000] * 3}
    window = make_window_case(layout, device, num_q_heads=num_q_heads, **lens)
    window.case.scopes[0].kv_cache.zero_()
    values = torch.tensor([INT_MIN, -5, 0, 3, INT_MAX], device=device).int()
    for _ in range(20):
        _, starts, lens = window.geometry
        starts.copy_(values[torch.randint(5, starts.shape, device=device)])
        lens.copy_(values[torch.randint(5, lens.shape, device=device)])
        out, max_logits, lse = window.run()
        assert (out == 0).all() and not lse.isnan().any() and not max_logits.isnan().any()


def test_a_query_does_not_see_the_other_requests(device):
    layout = KV_LAYOUTS["dsv4"]
    window = make_window_case(layout, device, query_lens=[6, 7, 3], seq_lens=[60, 70, 30], num_q_heads=8)
    want = window.run()
    window.case.scopes[0].kv_cache.copy_(window.case.scopes[0].kv_cache)
    table, starts, lens = window.geometry
    changed = replace(window, geometry=(table.clone(), starts, lens.clone()))
    changed.geometry[0][0] = changed.geometry[0][2] = -1
    changed.geometry[2][2] = 3
    for got, expected in zip(changed.run(), want, strict=True):
        assert torch.equal(got[6:13], expected[6:13])


@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
@pytest.mark.parametrize("num_q_heads", [8, 24, 100])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.only(lambda device, num_q_heads, **_: device != "cpu" or num_q_heads <= 24)
def test_nan_reaches_those_queries_only_that_attend_to_it(name, num_q_heads, page_size, device):
    """A key or a head of Q: neither the neighbours before nor those after it, tile or ring. Of emulated GPUs
    only Hopper has either; the others' queries are alone."""
    count = 1100 if not emulation.executes() or emulation.hopper() else 250
    positions, of_q = {1100: ((400, 403, 700, 1199), 905), 250: ((140, 143, 200, 349), 190)}[count]
    window = make_window_case(
        KV_LAYOUTS[name], device, query_lens=[count, 7], seq_lens=[count + 100, 40], window_size=40,
        page_size=page_size, num_q_heads=num_q_heads, padding=0,
    )  # fmt: skip
    table, _, _ = window.geometry
    case, scope = window.case, window.case.scopes[0]
    table.copy_(torch.randperm(table.numel(), device=device).view_as(table))
    scope.kv_cache.zero_()
    want = window.run()
    for position in positions:
        page = table[0, position // page_size]
        slot = page * page_size + position % page_size
        latent = torch.full((1, 512), float("nan"), device=device).bfloat16()
        mla_fp8.quantize_kv(
            latent, slot[None].long(), scope.kv_cache, layout=case.layout, page_size=page_size
        )
    case.q[of_q, 3] = float("nan")
    got = window.run()
    position = torch.arange(100, count + 100, device=device)
    reached = torch.zeros(count + 7, dtype=torch.bool, device=device)
    for p in positions:
        reached[:count] |= (position >= p) & (position < p + 40)
    assert got[0][reached].isnan().all() and got[2][reached].isnan().all()
    reached[of_q] = True
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a[~reached], b[~reached])
    assert got[0][of_q, 3].isnan().all() and torch.equal(got[0][of_q, 4:], want[0][of_q, 4:])


def test_opcheck_and_out_form(device):
    window = make_window_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES, **RAGGED)
    want = window.run()
    outs = window.case.nan_outputs()
    options = window.op_options() | {"workspace": window.case.workspace()}
    OPS.sparse_prefill_window_out(*window.arguments(), **options, **outs)
    for got, expected in zip(outs.values(), want, strict=True):
        assert torch.equal(got, expected)
    outs = window.case.nan_outputs() | {"max_logits": None}
    OPS.sparse_prefill_window_out(*window.arguments(), **options, **outs)
    assert torch.equal(outs["out"], want[0]) and torch.equal(outs["lse"], want[2])
    torch.library.opcheck(OPS.sparse_prefill_window.default, window.arguments(), window.op_options())


def test_reference_backend_agrees(device):
    window = make_window_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES, query_lens=[3], seq_lens=[40])
    window.geometry[0].clamp_(0, 0)  # the reference follows no hostile page
    window.case.scopes[0].kv_cache.zero_()
    scope = window.case.scopes[1]
    scope.kv_cache.zero_()
    for got, want in zip(window.run(), window.run(backend="reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("window_size, reaches", [(2**31 - 1, True), (2**63 - 1, True), (2**30, False)])
def test_a_length_that_is_garbage_costs_no_more_than_its_pages(window_size, reaches, device):
    """2**31 positions one by one take seconds for each token."""
    window = make_window_case(KV_LAYOUTS["dsv4"], device, query_lens=[1], seq_lens=[48], padding=0)
    (table, starts, lens), q = window.geometry, window.case.q
    garbage, known = torch.full_like(lens, INT_MAX), table.shape[1] * window.case.scopes[0].page_size
    window.run()[2].cpu()  # whatever a first call loads
    begin = time.perf_counter()
    got = mla_fp8.sparse_prefill_window(
        q, window.arguments()[1], table, starts, garbage, **window.options() | {"window_size": window_size}
    )
    got[2].cpu()
    assert time.perf_counter() - begin < 1
    want = mla_fp8.sparse_prefill_window(  # all positions that the table knows, from the query behind them
        q, window.arguments()[1], table, starts, torch.full_like(lens, known),
        **window.options() | {"window_size": known},
    )  # fmt: skip
    for x, nothing, everything in zip(got, (0.0, -torch.inf, -torch.inf), want, strict=True):
        assert torch.equal(x, everything) if reaches else (x == nothing).all()


ERRORS = [
    ("page_table", lambda t: t.long(), "page_table must have dtype torch.int32, got torch.int64"),
    ("page_table", lambda t: t[0], r"page_table must have shape \[\*, \*\], got \[\d+\]"),
    ("query_start_loc", lambda t: t[1:], r"query_start_loc must have shape \[6\], got \[5\]"),
    ("seq_lens", lambda t: t.long(), "seq_lens must have dtype torch.int32, got torch.int64"),
    ("window_size", lambda _: 0, "window_size must be at least 1, got 0"),
    ("page_size", lambda _: 0, "page_size must be in"),
    ("q", lambda t: t.half(), "q must have dtype torch.bfloat16, got torch.float16"),
    ("extra_indices", lambda _: None, "extra_kv_cache, extra_indices and extra_page_size must be given"),
]


def test_a_second_cache_without_its_keys_is_told_both_ways_to_name_them(device):
    case = make_window_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES, **RAGGED)
    options = case.options() | {"extra_indices": None, "extra_topk_length": None}
    with pytest.raises(
        RuntimeError, match=r"got a cache, no indices \(and no extra_page_table\), a page size"
    ):
        mla_fp8.sparse_prefill_window(*case.arguments(), **options)


@pytest.mark.parametrize("name, change, message", ERRORS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ERRORS)])
def test_wrong_arguments_are_named_and_nothing_is_written(name, change, message, device):
    window = make_window_case(KV_LAYOUTS["dsv4"], device, extra=V4_SCOPES, **RAGGED)
    names = ("q", "kv_cache", "page_table", "query_start_loc", "seq_lens")
    arguments = dict(zip(names, window.arguments(), strict=True)) | window.op_options()
    outs = window.case.nan_outputs()
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_prefill_window_out(**arguments, **outs)
    assert all(t.isnan().all() for t in outs.values())
