"""Sparse prefill by CTAs that go from item to item, in blocks of 64 keys: bf16 rows, 17 to 128 heads; pages
of `dsv4`, 65 to 128 heads, in pairs of CTAs."""

from dataclasses import replace

import pytest
import torch
from assertions import assert_attention, assert_same
from row_cases import changed, compacted
from sparse_cases import Case, make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")
row_layouts = pytest.mark.parametrize("name", ["bf16", "bf16_512"])

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows_case(name: str, **shape) -> Case:
    return make_case(KV_LAYOUTS[name], "cuda", page_size=1, num_slots=3000, **shape)


def prefill(case: Case, rows: torch.Tensor | None = None) -> Results:
    scope, outs = case.scopes[0], case.nan_outputs()
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    torch.ops.mla_fp8.sparse_prefill_out(
        case.q, scope.rows if rows is None else rows, scope.indices, **options, **outs
    )
    return tuple(outs.values())


def spread(num_tokens: int, count: int = 24) -> torch.Tensor:
    """The first eight, which are the odd ones, and some others."""
    return torch.cat([torch.arange(8), torch.randint(8, num_tokens, (count,))]).cuda()


@row_layouts
@pytest.mark.parametrize("num_q_heads", [17, 32, 64, 100, 128])
@pytest.mark.parametrize("topk", [1, 63, 64, 65, 128, 129, 192, 640])
def test_any_number_of_blocks_and_heads(name, num_q_heads, topk):
    case = rows_case(name, num_tokens=420, num_q_heads=num_q_heads, topk=topk)
    results = prefill(case)
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(420))
    assert_same(prefill(case), results)


@row_layouts
@pytest.mark.parametrize("num_q_heads", [24, 64, 128])
def test_items_of_every_length_follow_each_other(name, num_q_heads):
    """0 to 5 blocks: Q and rows of an item arrive while others of another number of blocks are multiplied."""
    case = rows_case(name, num_tokens=2000, num_q_heads=num_q_heads, topk=320)
    length = torch.randint(0, 6, (2000,), device="cuda", dtype=torch.int32) * 64
    case.scopes[0].length.copy_(torch.where(torch.rand(2000, device="cuda") < 0.5, length, length + 1))
    results = prefill(case)
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(2000, 64))
    assert_same(prefill(case), results)


@row_layouts
@pytest.mark.parametrize("num_q_heads", [17, 64, 128])
@pytest.mark.parametrize("topk, extra_topk", [(1, 1), (64, 64), (70, 71), (130, 640), (640, 5)])
def test_two_caches_in_any_pages(name, num_q_heads, topk, extra_topk):
    """Where the keys of one cache end and those of the other begin: between blocks and inside of them."""
    extra = {"topk": extra_topk, "page_size": 61, "num_slots": 700}
    shape = {"num_tokens": 420, "num_q_heads": num_q_heads, "topk": topk, "num_slots": 3000}
    case = make_case(KV_LAYOUTS[name], "cuda", **shape, extra=extra)
    results = case.prefill_into_nan()
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(420))
    assert_same(case.prefill_into_nan(), results)


@row_layouts
def test_pages_are_rows(name):
    """The same keys in the same order, and so the same bits, whatever pages hold them."""
    case = make_case(KV_LAYOUTS[name], "cuda", num_tokens=200, num_q_heads=64, topk=300, num_slots=3000)
    want, scope = prefill(case), case.scopes[0]
    assert_same(case.prefill_into_nan(), want)
    gap = torch.nn.functional.pad(scope.kv_cache, (0, 64))[:, :-64]
    apart = replace(case, scopes=[replace(scope, kv_cache=gap)])
    assert_same(apart.prefill_into_nan(), want)


@row_layouts
def test_logits_that_grow_from_block_to_block(name):
    """Weights are relative to a base that is common to the blocks; here it moves by 2^8 and more, twice."""
    case = rows_case(name, num_tokens=300, num_q_heads=64, topk=1000)
    scope = case.scopes[0]
    scope.rows.nan_to_num_(0.0)
    scope.rows[:, 0] = torch.linspace(0, 0.5, len(scope.rows), device="cuda")
    case.q[..., 0] = 80
    ordered = scope.indices.clamp(-1, len(scope.rows)).sort(1).values
    case = replace(case, scopes=[replace(scope, indices=ordered, length=None)])
    for scaled in (case, replace(case, sm_scale=-case.sm_scale)):
        assert_attention(scaled, prefill(scaled), slice(8, 40))


@row_layouts
def test_a_first_block_without_keys(name):
    case = rows_case(name, num_tokens=200, num_q_heads=64, topk=256)
    case.scopes[0].indices[:, :70] = -1
    case.scopes[0].indices[::3, 70:192] = 1 << 30
    assert_attention(case, prefill(case), spread(200))


@row_layouts
def test_strides(name):
    case = rows_case(name, num_tokens=150, num_q_heads=64, topk=200)
    want, scope = prefill(case), case.scopes[0]
    wide_q = torch.full((150, 66, case.q.shape[2] + 24), float("nan"), device="cuda").bfloat16()
    wide_q[:, 1:65, 8:-16] = case.q
    wide_rows = torch.full((len(scope.rows), scope.rows.shape[1] + 8), float("nan"), device="cuda").bfloat16()
    wide_rows[:, 8:] = scope.rows
    wide_indices = torch.nn.functional.pad(scope.indices, (3, 2))[:, 3:-2]
    outs = torch.full((150, 70, 520), float("nan"), device="cuda").bfloat16()
    strided = replace(case, q=wide_q[:, 1:65, 8:-16])
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    max_logits, lse = torch.empty_like(want[1]), torch.empty_like(want[2])
    torch.ops.mla_fp8.sparse_prefill_out(
        strided.q, wide_rows[:, 8:], wide_indices, **options, out=outs[:, 2:66, 8:], max_logits=max_logits,
        lse=lse,
    )  # fmt: skip
    assert_same((outs[:, 2:66, 8:], max_logits, lse), want)
    outs[:, 2:66, 8:] = float("nan")
    assert outs.isnan().all()


@row_layouts
def test_heads_do_not_see_each_other(name):
    case = rows_case(name, num_tokens=140, num_q_heads=128, topk=300)
    want = prefill(case)
    few = replace(case, q=case.q[:, :40], attn_sink=case.attn_sink[:40])
    assert_same(prefill(few), tuple(t[:, :40] for t in want))
    case.q[:, 40:] = float("nan")
    assert_same(tuple(t[:, :40] for t in prefill(case)), tuple(t[:, :40] for t in want))


@pytest.mark.parametrize(
    "name, num_q_heads, topk", [("bf16", 128, 2048), ("bf16_512", 64, 512), ("bf16_512", 128, 1024)]
)
def test_production_shapes(name, num_q_heads, topk):
    case = rows_case(name, num_tokens=4096, num_q_heads=num_q_heads, topk=topk)
    results = prefill(case)
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(4096))
    for _ in range(4):
        assert_same(prefill(case), results)


@row_layouts
def test_replays_follow_changed_indices_and_lengths(name):
    shape = {"num_tokens": 200, "num_q_heads": 64, "topk": 400}
    case, other = rows_case(name, **shape), rows_case(name, **shape)
    mine, theirs = case.scopes[0], other.scopes[0]
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": mine.length}
    run = lambda: mla_fp8.sparse_prefill(case.q, mine.rows, mine.indices, **options)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(2):
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        assert_same(results, run())
        mine.rows.copy_(theirs.rows)
        mine.indices.copy_(theirs.indices.roll(1, 0))
        mine.length.copy_(theirs.length.roll(1, 0))


def pages_case(**shape) -> Case:
    return make_case(KV_LAYOUTS["dsv4"], "cuda", page_size=61, num_slots=3000, **shape)


@pytest.mark.parametrize("num_q_heads", [65, 100, 128])
@pytest.mark.parametrize("num_tokens", [33, 420])
@pytest.mark.parametrize(
    "topk, extra_topk", [(1, 0), (63, 0), (65, 0), (640, 0), (64, 64), (70, 71), (130, 640)]
)
def test_pairs(num_q_heads, num_tokens, topk, extra_topk):
    extra = {"topk": extra_topk, "page_size": 2, "num_slots": 700} if extra_topk else None
    case = pages_case(num_tokens=num_tokens, num_q_heads=num_q_heads, topk=topk, extra=extra)
    results = case.prefill_into_nan()
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(num_tokens))
    for _ in range(3):
        assert_same(case.prefill_into_nan(), results)
    out, lse = case.decode()
    assert torch.equal(out, results[0]) and torch.equal(lse, results[2])


@pytest.mark.parametrize("num_q_heads", [80, 128])
def test_pairs_and_items_of_every_length(num_q_heads):
    case = pages_case(num_tokens=2000, num_q_heads=num_q_heads, topk=320)
    length = torch.randint(0, 6, (2000,), device="cuda", dtype=torch.int32) * 64
    case.scopes[0].length.copy_(torch.where(torch.rand(2000, device="cuda") < 0.5, length, length + 1))
    results = case.prefill_into_nan()
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, spread(2000, 64))
    for _ in range(20):
        assert_same(case.prefill_into_nan(), results)


def test_pairs_have_the_bits_of_dequantised_rows():
    """Of rows without holes, where both have the same keys in a block."""
    case = changed(pages_case(num_tokens=1000, num_q_heads=128, topk=1024), compacted)
    scope = case.scopes[0]
    rows = mla_fp8.dequantize_kv(
        scope.kv_cache, torch.arange(len(scope.rows), device="cuda"), layout=case.layout, page_size=61
    )
    options = {"sm_scale": case.sm_scale, "attn_sink": case.attn_sink, "topk_length": scope.length}
    want = mla_fp8.sparse_prefill(case.q, rows, scope.indices, **options)
    for _ in range(10):
        assert_same(case.prefill_into_nan(), want)
