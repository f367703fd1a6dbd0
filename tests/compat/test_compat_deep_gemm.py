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
    with pytest.raises(RuntimeError, match="q and fused_kv_cache must have 4 dimensions, got"):
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


def test_parameters_are_named_as_the_engines_name_them():
    names = list(inspect.signature(deep_gemm.fp8_paged_mqa_logits).parameters)
    assert names[:3] == ["q", "fused_kv_cache", "weights"] and names[-1] == "clean_logits"
