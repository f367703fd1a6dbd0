"""`sparse_prefill_window` over all entries of each query's past, by a page table in place of indices."""

from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_attention, assert_same
from sparse_cases import INT_MAX, INT_MIN, all_layouts, mixed_pairs
from window_cases import few_heads_on_cpu, make_entries_case, paged_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

OPS = torch.ops.mla_fp8
RAGGED = {"query_lens": [1, 0, 5, 3, 40], "seq_lens": [9, 4, 5, 2, 300]}  # one shorter than its queries


def test_slots_of_entries():
    """By hand: requests of 2 and 3 queries, pages of 2; lengths past the table, negative, and in it."""
    table = torch.tensor([[4, -1], [0, 3]], dtype=torch.int32)
    starts, lens = torch.tensor([3, 5, 8], dtype=torch.int32), torch.tensor([3, 9, -1, 3, INT_MAX, 2]).int()
    slots = reference.entry_slots(table, starts, lens, num_tokens=6, page_size=2)
    assert slots.tolist() == [
        [8, 9, -1, -1], [8, 9, -1, -1], [-1] * 4, [0, 1, 6, -1], [0, 1, 6, 7], [-1] * 4,
    ]  # fmt: skip


@all_layouts
@pytest.mark.parametrize("num_q_heads", [1, 8, 40])
def test_agrees_with_float64_over_poisoned_caches(layout, num_q_heads, device):
    case = make_entries_case(layout, device, num_q_heads=num_q_heads, room=2, **RAGGED)
    assert_attention(case.case, case.run())


@mixed_pairs
def test_entries_of_another_layout(layout, extra_layout, device):
    case = make_entries_case(layout, device, extra_layout=extra_layout, **RAGGED)
    assert_attention(case.case, case.run())


@paged_layouts
@pytest.mark.parametrize("ratio, page_size", [(1, 1), (3, 61), (128, 2)])
def test_any_ratio_and_page_size(layout, ratio, page_size, device):
    case = make_entries_case(layout, device, ratio=ratio, page_size=page_size, num_q_heads=5, **RAGGED)
    assert_attention(case.case, case.run())


@paged_layouts
def test_the_keys_of_index_rows_give_what_the_rows_give(layout, device):
    """The same slots listed one by one: by rounding, and in the CPU's kernel bit by bit."""
    case = make_entries_case(layout, device, **RAGGED)
    by_index = replace(case, entry_pages=None)
    for got, want in zip(case.run(), by_index.run(), strict=True):
        if device == "cpu":
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


@paged_layouts
@pytest.mark.parametrize("num_q_heads", [1, 5, 8, 12, 16, 24, 64, 100])
@pytest.mark.parametrize("ratio", [4, 128])
@few_heads_on_cpu
@pytest.mark.sampled(3)
def test_many_queries(layout, num_q_heads, ratio, device):
    """Tiles with the end of one request and the beginning of the next, and with other numbers of entries."""
    query_lens = [3, 700, 1, 2, 1500, 0, 333]
    case = make_entries_case(
        layout, device, query_lens=query_lens, seq_lens=[50, 700, 1, 600, 2000, 9, 300], ratio=ratio,
        window_size=128, num_q_heads=num_q_heads,
    )  # fmt: skip
    some = torch.randperm(sum(query_lens), device=device)[:40]
    edges = torch.tensor([0, 2, 3, 4, 702, 703, 704, 705, 706, 2205, 2206, 2538, 2540], device=device)
    got = case.run()
    assert_attention(case.case, got, torch.cat([edges, some]))
    for _ in emulation.runs(2)[1:]:
        assert_same(case.run(), got)


@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
@pytest.mark.parametrize(
    "query_lens, shortest", [([700], 1100), ([6] * 40, 1100), ([6] * 40, 90)], ids=["one", "forty", "short"]
)
def test_tiles_of_neighbours(name, query_lens, shortest, device):
    """On sm_90 175 tiles, 43 of which are a wave of their own, and a tile for each request."""
    lens = [shortest + n for n in range(len(query_lens))]
    case = make_entries_case(
        KV_LAYOUTS[name], device, query_lens=query_lens, seq_lens=lens, ratio=1, window_size=128,
        num_q_heads=16, padding=0,
    )  # fmt: skip
    edges = torch.tensor(
        [0, 5, 6, 100, 233, 239] + [527, 528, 529, 699] * (sum(query_lens) > 699), device=device
    )
    got = case.run()
    assert_attention(case.case, got, edges)
    for _ in emulation.runs(2)[1:]:
        assert_same(case.run(), got)


@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
@pytest.mark.parametrize("query_len", [5, 700])
def test_lengths_are_the_querys_own(name, query_len, device):
    """Any order of them: none, all, more than there are, and neighbours that share few."""
    lens = torch.tensor([0, 7, INT_MAX, 3, INT_MIN, 200, 1], device=device).int()
    num_tokens = 2 * query_len + 2
    lens = lens[torch.randint(len(lens), (num_tokens,), device=device)]
    case = make_entries_case(
        KV_LAYOUTS[name], device, query_lens=[query_len] * 2, seq_lens=[900, 800], num_q_heads=8, lens=lens
    )
    assert_attention(case.case, case.run(), slice(query_len - 5, query_len + 5))


@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
@pytest.mark.parametrize("num_q_heads", [8, 24, 64])
@few_heads_on_cpu
def test_nan_reaches_those_queries_only_that_attend_to_it(name, num_q_heads, device):
    """An entry that closes within a tile is none of the queries' before it."""
    layout, ratio = KV_LAYOUTS[name], 4
    case = make_entries_case(
        layout, device, query_lens=[700, 7], seq_lens=[800, 40], ratio=ratio, page_size=1, window_size=10,
        num_q_heads=num_q_heads, padding=0,
    )  # fmt: skip
    table, scope = case.entry_pages, case.case.scopes[1]
    table.copy_(torch.randperm(table.numel(), device=device).view_as(table))
    case.geometry[0].copy_(torch.arange(case.geometry[0].numel(), device=device).view_as(case.geometry[0]))
    for cache in case.case.scopes:
        cache.kv_cache.zero_()
    want = case.run()
    entry = 120
    latent = torch.full((1, 512), float("nan"), device=device).bfloat16()
    slot = table[0, entry][None].long()
    mla_fp8.quantize_kv(latent, slot, scope.kv_cache, layout=layout, page_size=1)
    got = case.run()
    reached = torch.zeros(707, dtype=torch.bool, device=device)
    reached[:700] = torch.arange(100, 800, device=device) + 1 >= (entry + 1) * ratio
    assert got[0][reached].isnan().all() and got[2][reached].isnan().all()
    for a, b in zip(got, want, strict=True):  # a kernel may give the keys of some queries one exponent
        one_code = 2**-7 if a.dtype == torch.bfloat16 else 2**-20
        torch.testing.assert_close(a[~reached], b[~reached], rtol=one_code, atol=0)


@pytest.mark.parametrize("query_len", [4, 900])
@pytest.mark.parametrize("name", ["dsv4", "bf16_512"])
def test_hostile_geometry_gives_finite_rows(name, query_len, device):
    """No value of the tables or the lengths reaches memory that it should not."""
    case = make_entries_case(
        KV_LAYOUTS[name], device, query_lens=[query_len] * 3, seq_lens=[1000] * 3, num_q_heads=8
    )
    for scope in case.case.scopes:
        scope.kv_cache.zero_()
    values = torch.tensor([INT_MIN, -5, 0, 3, INT_MAX], device=device).int()
    _, starts, lens = case.geometry
    for _ in range(20):
        for x in (starts, lens, case.entry_pages, case.case.scopes[1].length):
            x.copy_(values[torch.randint(5, x.shape, device=device)])
        out, max_logits, lse = case.run()
        assert (out == 0).all() and not lse.isnan().any() and not max_logits.isnan().any()


@pytest.mark.parametrize("seq_lens", [[1, 2], [40, 3]])
def test_no_entries_and_no_pages(seq_lens, device):
    """Contexts shorter than the ratio have a table without columns."""
    case = make_entries_case(
        KV_LAYOUTS["bf16_512"], device, query_lens=[1, 2], seq_lens=seq_lens, ratio=64, num_q_heads=8
    )
    assert case.entry_pages.shape == (2, 0)
    assert_attention(case.case, case.run())


def test_opcheck_and_out_form(device):
    case = make_entries_case(KV_LAYOUTS["dsv4"], device, **RAGGED)
    outs, want = case.case.nan_outputs(), case.run()
    OPS.sparse_prefill_window_out(*case.arguments(), **case.op_options(), **outs)
    assert_same(list(outs.values()), want)
    for num_q_heads in (8, 16, 32, 64):
        case = make_entries_case(KV_LAYOUTS["dsv4"], device, **RAGGED | {"num_q_heads": num_q_heads})
        outs, want = case.case.nan_outputs() | {"max_logits": None}, case.run()
        OPS.sparse_prefill_window_out(*case.arguments(), **case.op_options(), **outs)
        assert_same([outs["out"], outs["lse"]], want[::2])
    torch.library.opcheck(OPS.sparse_prefill_window.default, case.arguments(), case.op_options())


def test_reference_backend_agrees(device):
    case = make_entries_case(KV_LAYOUTS["dsv4"], device, query_lens=[3], seq_lens=[40])
    case.geometry[0].clamp_(0, 0)  # the reference follows no hostile page
    case.entry_pages.clamp_(0, 0)
    for scope in case.case.scopes:
        scope.kv_cache.zero_()
    for got, want in zip(case.run(), case.run(backend="reference"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)


TOGETHER = "extra_kv_cache, extra_page_table, extra_page_size and extra_topk_length must be given together"
ERRORS = [
    ("extra_page_table", lambda t: t.long(), "extra_page_table must have dtype torch.int32, got torch.int64"),
    ("extra_page_table", lambda t: t[1:], r"extra_page_table must have shape \[5, \*\], got \[4, \d+\]"),
    ("extra_page_table", lambda t: t.T, "extra_page_table must have"),
    (
        "extra_topk_length",
        lambda t: t.long(),
        "extra_topk_length must have dtype torch.int32, got torch.int64",
    ),
    ("extra_topk_length", lambda t: t[1:], r"extra_topk_length must have shape \[51\], got \[50\]"),
    ("extra_topk_length", lambda _: None, TOGETHER + ", got a cache, a page size, no lengths"),
    ("extra_kv_cache", lambda _: None, TOGETHER + ", got no cache, a page size, lengths"),
    ("extra_page_size", lambda _: None, TOGETHER + ", got a cache, no page size, lengths"),
    ("extra_indices", lambda _: torch.zeros(51, 3).int(), "extra_indices must be None with extra_page_table"),
]


@pytest.mark.parametrize("name, change, message", ERRORS, ids=[f"{e[0]}-{i}" for i, e in enumerate(ERRORS)])
def test_wrong_arguments_are_named_and_nothing_is_written(name, change, message, device):
    case = make_entries_case(KV_LAYOUTS["dsv4"], device, **RAGGED)
    names = ("q", "kv_cache", "page_table", "query_start_loc", "seq_lens")
    arguments = dict(zip(names, case.arguments(), strict=True)) | case.op_options()
    arguments[name] = change(arguments[name])
    outs = case.case.nan_outputs()
    with pytest.raises(RuntimeError, match=message):
        OPS.sparse_prefill_window_out(**arguments, **outs)
    assert all(t.isnan().all() for t in outs.values())
    if "must have" not in message:  # the wrapper says the same of what it sees first
        options = case.options() | {name: change(case.options()[name])}
        with pytest.raises(RuntimeError, match=message):
            mla_fp8.sparse_prefill_window(*case.arguments(), **options)
