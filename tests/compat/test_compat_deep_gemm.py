"""DeepGEMM's calls of the indexer, as vLLM and SGLang make them, give the logits that its tests define."""

import importlib.util
import inspect

import pytest
import torch
from index_cases import ints, quantized_queries, random_problem

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS
from mla_fp8 import index_reference as reference
from mla_fp8.compat import deep_gemm

pytestmark = pytest.mark.op("index_logits")
PAGE = 64


def paged_call(device, lens, next_n, heads=64):
    """The arguments, and the problem that they state."""
    problem = random_problem(device, lens, heads=heads, next_n=next_n, page_size=PAGE)
    batch, pages = problem.page_table.shape
    cache = problem.index_cache.view(-1, PAGE, 1, INDEX_LAYOUTS["index_fp8"].bytes_per_entry)
    q = problem.q.view(torch.uint8).view(batch, next_n, heads, 128).view(torch.float8_e4m3fn)
    plan = deep_gemm.get_paged_mqa_logits_metadata(problem.seq_lens, PAGE, 132)
    return problem, (q, cache, problem.weights, problem.seq_lens, problem.page_table, plan, pages * PAGE)


@pytest.mark.parametrize("next_n", [1, 2, 3, 6])
@pytest.mark.parametrize("heads", [8, 32, 64])
def test_paged_logits_of_drafts(next_n, heads, device):
    """DeepGEMM's own reference: draft j of a context c sees the keys 0 .. c - next_n + j."""
    problem, arguments = paged_call(device, [700, 64, 130], next_n, heads)
    got = deep_gemm.fp8_paged_mqa_logits(*arguments, clean_logits=True)
    assert torch.equal(got, problem.logits())
    for row in range(3 * next_n):
        seen = [700, 64, 130][row // next_n] - next_n + row % next_n + 1
        assert torch.isfinite(got[row, :seen]).all() and (got[row, seen:] == -torch.inf).all()


def test_lengths_of_each_draft(device):
    problem, arguments = paged_call(device, [700, 300], 2)
    lens = ints([[5, 300], [0, 299]], device)
    got = deep_gemm.fp8_paged_mqa_logits(*arguments[:3], lens, *arguments[4:])
    problem.seq_lens, problem.options = None, {"next_n": 2, "row_lens": lens.flatten()}
    assert torch.equal(got, problem.logits())
    assert [(row > -torch.inf).sum().item() for row in got] == [5, 300, 0, 299]


def test_logits_of_gathered_keys(device):
    q, scale = quantized_queries(torch.randn(20, 32, 128, device=device))
    k = torch.randn(300, 128, device=device).to(torch.float8_e4m3fn)
    k_scale, weights = torch.rand(300, device=device), torch.randn(20, 32, device=device) * scale
    start, end = ints(torch.arange(20), device), ints(torch.arange(20) * 15, device)
    got = deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, start, end)
    want = reference.logits_of(q, weights, k, k_scale, None)
    for row in range(20):
        inside = slice(row, max(15 * row, row))
        torch.testing.assert_close(got[row, inside].double(), want[row, inside], rtol=2e-3, atol=2e-2)
        assert (got[row] > -torch.inf).sum() == max(15 * row - row, 0)
    (choice,), *_ = mla_fp8.index_topk_ragged(
        q[9:10], weights[9:10], k, k_scale, start[9:10], end[9:10], topk=50
    )
    assert torch.equal(choice, got[9, 9:135].topk(50).indices.sort().values.int())


def test_the_schedule_has_deep_gemms_shape(device):
    plan = deep_gemm.get_paged_mqa_logits_metadata(ints([5, 6], device), PAGE, 132)
    assert plan.shape == (133, 2) and plan.dtype is torch.int32


def test_a_cache_without_its_dimensions_is_refused():
    _, arguments = paged_call("cpu", [100], 1)
    with pytest.raises(RuntimeError, match="q and kv_cache must have 4 dimensions, got"):
        deep_gemm.fp8_paged_mqa_logits(arguments[0], arguments[1].flatten(1), *arguments[2:])


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="needs DeepGEMM")
@pytest.mark.parametrize("next_n", [1, 2])
def test_finite_logits_have_deep_gemms_bits(next_n):
    import deep_gemm as theirs  # noqa: PLC0415

    _, (q, cache, weights, lens, table, _, width) = paged_call("cuda", [4096, 64, 130], next_n)
    table = table.clamp(0, len(cache) - 1)
    rows = lens[:, None] - next_n + 1 + torch.arange(next_n, device="cuda").int()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    plan = theirs.get_paged_mqa_logits_metadata(rows, PAGE, sms)
    want = theirs.fp8_paged_mqa_logits(q, cache, weights, rows, table, plan, width, clean_logits=False)
    got = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lens, table, None, width)
    seen = got > -torch.inf
    assert torch.equal(got[seen], want[:, :width][seen])


def test_parameters_are_named_as_deep_gemm_names_them():
    """Of its bindings; engines pass by position, or the cache by its older name."""
    options = ["clean_logits", "logits_dtype", "indices"]
    for function in (deep_gemm.fp8_paged_mqa_logits, deep_gemm.fp8_fp4_paged_mqa_logits):
        names = ["q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta"]
        assert [*inspect.signature(function).parameters] == [*names, "max_context_len", *options]
    for function in (deep_gemm.fp8_mqa_logits, deep_gemm.fp8_fp4_mqa_logits):
        names = ["q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits"]
        assert [*inspect.signature(function).parameters] == [*names, "max_seqlen_k", "logits_dtype"]


@pytest.mark.parametrize("cache", ["kv_cache", "fused_kv_cache"])
def test_every_argument_by_its_name(cache, device):
    problem, (q, pages, weights, lens, table, _, width) = paged_call(device, [700, 64], 2)
    plan = deep_gemm.get_paged_mqa_logits_metadata(lens, PAGE, deep_gemm.get_num_sms(), indices=None)
    given = {
        "q": q, cache: pages, "weights": weights, "context_lens": lens, "block_table": table,
        "schedule_meta": plan, "max_context_len": width, "clean_logits": True, "indices": None,
    }  # fmt: skip
    want = problem.logits()
    assert torch.equal(deep_gemm.fp8_paged_mqa_logits(**given), want)
    rounded = deep_gemm.fp8_paged_mqa_logits(**given, logits_dtype=torch.bfloat16)
    assert rounded.dtype is torch.bfloat16 and torch.equal(rounded, want.bfloat16())
    with pytest.raises(ValueError, match="indices must be None, got Tensor"):
        deep_gemm.fp8_paged_mqa_logits(**(given | {"indices": lens}))


@pytest.mark.parametrize("next_n", [1, 2])
def test_lengths_may_be_a_slice_of_a_buffer(next_n, device):
    """vLLM #40987."""
    _, arguments = paged_call(device, [700, 300], next_n)
    lens = ints([[5, 300], [0, 299]], device)[:, :next_n].contiguous()
    want = deep_gemm.fp8_paged_mqa_logits(*arguments[:3], lens, *arguments[4:])
    buffer = torch.full((5, 9), -7, dtype=torch.int32, device=device)
    buffer[:2, :next_n] = lens
    got = deep_gemm.fp8_paged_mqa_logits(*arguments[:3], buffer[:2, :next_n], *arguments[4:])
    assert torch.equal(got, want)
    if next_n == 1:
        got = deep_gemm.fp8_paged_mqa_logits(*arguments[:3], buffer[:2, 0], *arguments[4:])
        assert torch.equal(got, want)


def gathered(device, rows=20, keys=300):
    q, scale = quantized_queries(torch.randn(rows, 32, 128, device=device))
    k = torch.randn(keys, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, 32, device=device) * scale
    return q, (k, torch.rand(keys, device=device)), weights


@pytest.mark.parametrize("width", [1, 64, 300])
def test_compressed_logits_begin_at_each_rows_first_key(width, device):
    q, kv, weights = gathered(device)
    start, end = ints(torch.arange(20) * 15 - 9, device), ints(torch.arange(20) * 15 + 40, device)
    end[3], start[5] = -(2**31), 2**31 - 1
    whole = deep_gemm.fp8_mqa_logits(q, kv, weights, start, end, clean_logits=True, max_seqlen_k=0)
    got = deep_gemm.fp8_mqa_logits(q, kv, weights, start, end, False, max_seqlen_k=width)
    assert got.shape == (20, width)
    for row, (a, b) in enumerate(zip(start.clamp_min(0).tolist(), end.clamp_max(300).tolist(), strict=True)):
        want = whole[row, a:b][:width]
        assert torch.equal(got[row, : len(want)], want) and got[row, len(want) :].isneginf().all()


def test_fp4_queries_and_keys(device):
    """As the ops have them, whose numbers other tests hold against the reference."""
    byte = lambda *shape: torch.randint(0, 256, shape, device=device).byte()  # noqa: E731
    scale = lambda *shape: torch.randint(120, 130, (*shape, 4), device=device).byte()  # noqa: E731
    q, q_scale, weights = byte(6, 32, 64), scale(6, 32), torch.randn(6, 32, device=device)
    k, k_scale = byte(50, 64), scale(50)
    start, end = ints([0, 3, 10, 0, 49, 50], device), ints([50, 9, 10, 1, 50, 50], device)
    want = mla_fp8.index_logits_ragged(q, weights, k, k_scale, start, end, q_scale=q_scale)
    packed = (q, q_scale.view(torch.int32)[..., 0]), (k, k_scale.view(torch.int32)[..., 0])
    assert torch.equal(deep_gemm.fp8_fp4_mqa_logits(*packed, weights, start, end), want)
    cache = byte(4, PAGE * 68)
    cache[:, PAGE * 64 :] = 127
    lens, table = ints([200, 130], device), ints([[0, 3, 1, 2], [2, 1, 3, 0]], device)
    want = mla_fp8.index_logits(
        q,
        weights,
        cache,
        table,
        lens,
        layout="index_fp4",
        page_size=PAGE,
        width=256,
        q_scale=q_scale,
        next_n=3,
    )
    queries = q.view(2, 3, 32, 64), packed[0][1].view(2, 3, 32)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(
        queries, cache.view(4, PAGE, 1, 68), weights, lens, table, None, 256
    )
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="q must be a pair of queries and their scales or None, got Tensor"):
        deep_gemm.fp8_fp4_mqa_logits(q, packed[1], weights, start, end)
