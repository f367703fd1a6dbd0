"""``batch_invariant=True``: a query's bits are those of its own keys, in any batch, chunk and op.

docs/guide/same_bits.md has a table of the pairs; each yes there is a test here or in core/test_plan.py.
"""

from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_same
from index_cases import random_problem
from prefill_cases import LAYERS, make_chunk
from sparse_cases import V4_SCOPES, Case, all_layouts, make_case, mixed_pairs
from window_cases import make_entries_case, make_window_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS

HEADS = (5, 8, 16, 32, 64, 128)
SAME = {"batch_invariant": True, "return_max_logits": False}
# On Hopper; elsewhere the width of a list counts, but on a CPU.
OF_ANY_WIDTH = [KV_LAYOUTS[name] for name in ("dsv32", "dsv4", "dsv41")]
any_width = pytest.mark.parametrize("layout", OF_ANY_WIDTH, ids=lambda x: x.name)
few_heads_on_cpu = pytest.mark.only(
    lambda device, heads, **_: device == "cuda" or (heads in (5, 16, 64)) or emulation.executes()
)


def decode(case: Case, **changes) -> tuple[torch.Tensor, ...]:
    return case.decode(batch_invariant=True, **changes)


def several(layout, device, heads, extra=V4_SCOPES, topk=300) -> Case:
    return make_case(layout, device, num_tokens=9, num_q_heads=heads, topk=topk, num_slots=700, extra=extra)


def joined(parts) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.cat, zip(*parts, strict=True)))


@all_layouts
@pytest.mark.parametrize("heads", HEADS)
@few_heads_on_cpu
def test_alone_in_any_batch_and_at_any_place(layout, heads, device):
    case = several(layout, device, heads)
    want = decode(case)
    assert_same(joined(decode(case.tokens(slice(i, i + 1))) for i in range(9)), want)
    count = 300 if device == "cuda" else 30  # on Hopper other kernels and numbers of CTAs
    order = torch.randint(9, (count,), device=device)
    assert_same(decode(case.tokens(order)), tuple(x[order] for x in want))


@mixed_pairs
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_two_layouts_alone_and_in_any_batch(layout, extra_layout, heads, device):
    case = several(layout, device, heads, extra=V4_SCOPES | {"layout": extra_layout})
    want = decode(case)
    order = torch.randint(9, (200 if device == "cuda" else 20,), device=device)
    assert_same(decode(case.tokens(order)), tuple(x[order] for x in want))
    assert_same(case.tokens(order).prefill(**SAME), tuple(x[order] for x in want))


@all_layouts
@pytest.mark.parametrize("heads", HEADS)
@few_heads_on_cpu
def test_a_prefill_chunk_of_any_size_has_the_bits_of_decode(layout, heads, device):
    case = several(layout, device, heads)
    want = decode(case)
    for size in (1, 2, 4, 9):
        parts = [case.tokens(slice(i, i + size)).prefill(**SAME) for i in range(0, 9, size)]
        assert_same(joined(parts), want)
    count = 700 if device == "cuda" else 30  # on Hopper a walk or tiles without batch_invariant
    order = torch.randint(9, (count,), device=device)
    assert_same(case.tokens(order).prefill(**SAME), tuple(x[order] for x in want))


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
def test_rows_of_a_workspace_have_the_bits_of_pages_of_bf16(name, heads, device):
    case = several(KV_LAYOUTS[name], device, heads, extra=None)
    case = replace(case, scopes=[make_one_row_pages(case)])
    want = decode(case)
    scope = case.scopes[0]
    order = torch.randint(9, (500 if device == "cuda" else 20,), device=device)
    got = mla_fp8.sparse_prefill(
        case.q[order], scope.rows, scope.indices[order], sm_scale=case.sm_scale, attn_sink=case.attn_sink,
        topk_length=scope.length[order], **SAME,
    )  # fmt: skip
    assert_same(got, tuple(x[order] for x in want))


def make_one_row_pages(case: Case):
    scope = case.scopes[0]
    return replace(scope, kv_cache=scope.rows, page_size=1)


@all_layouts
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_windows_by_their_geometry_have_the_bits_of_decode(layout, heads, device):
    """And of entries by index, whichever requests and queries come before."""
    shape = {"query_lens": [3, 40, 1, 9], "seq_lens": [50, 200, 1, 9], "window_size": 33, "page_size": 16}
    window = make_window_case(layout, device, num_q_heads=heads, extra=V4_SCOPES, padding=0, **shape)
    want = decode(window.case)
    assert_same(window.run(**SAME), want)
    table, _, lens = window.geometry
    last = replace(window, case=window.case.tokens(slice(3 + 25, 3 + 40)))  # of the second request
    last = replace(last, geometry=(table[1:2], torch.tensor([0, 15], device=device).int(), lens[1:2]))
    assert_same(last.run(**SAME), tuple(x[28:43] for x in want))


@any_width
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_all_entries_by_their_pages_have_the_bits_of_decode(layout, heads, device):
    """However many pages a table has room for."""
    shape = {"query_lens": [3, 40, 1, 9], "seq_lens": [50, 200, 1, 9], "window_size": 33, "page_size": 16}
    entries = make_entries_case(layout, device, num_q_heads=heads, padding=0, **shape)
    want = decode(entries.case)
    assert_same(entries.run(**SAME), want)
    if emulation.executes(emulation.AMPERE):
        return  # the width counts there
    wide = torch.nn.functional.pad(entries.entry_pages, (0, 400), value=-1)
    assert_same(replace(entries, entry_pages=wide).run(**SAME), want)


@any_width
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("topk", [20, 70, 130, 200, 300, 600])
@few_heads_on_cpu
@pytest.mark.sampled(4)
def test_the_width_of_a_list_does_not_count(layout, heads, topk, device):
    if emulation.executes(emulation.AMPERE):
        pytest.skip("on Hopper and CPUs")
    case = several(layout, device, heads, topk=topk, extra=None)
    want = decode(case)
    (scope,) = case.scopes
    for more in (1, 64, 2000):
        indices = torch.nn.functional.pad(scope.indices, (0, more), value=-1)
        length = scope.length.where(scope.length < topk, topk) if more == 64 else None
        if length is None:  # holes in front
            known = torch.arange(topk, device=device) < scope.length[:, None]
            indices = torch.nn.functional.pad(scope.indices.where(known, -1), (more, 0), value=-1)
        assert_same(decode(replace(case, scopes=[replace(scope, indices=indices, length=length)])), want)


@pytest.mark.parametrize("layout", [KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"]], ids=lambda x: x.name)
@pytest.mark.parametrize("heads", [8, 16])
def test_draft_rows_and_rows_that_pad_a_graph(layout, heads, device):
    case = several(layout, device, heads)
    want = decode(case)
    assert_same(decode(case, query_groups=3), want)
    padded = case.tokens(torch.arange(16, device=device) % 9)
    for scope in padded.scopes:
        scope.indices[9:], scope.length[9:] = -1, 0
    padded.q[9:] = float("nan")
    assert_same(tuple(x[:9] for x in decode(padded)), want)


@pytest.mark.parametrize("heads, padded", [(1, 8), (13, 16), (17, 32), (40, 64), (65, 128)])
def test_heads_that_pad_a_rank(heads, padded, device):
    """Up to the next of 8, 16, 32 and 64 heads, and above 64; in a prompt as well."""
    case = make_case(KV_LAYOUTS["dsv4"], device, num_q_heads=heads, extra=V4_SCOPES)
    q = torch.nn.functional.pad(case.q, (0, 0, 0, padded - heads))
    sink = torch.nn.functional.pad(case.attn_sink, (0, padded - heads), value=-float("inf"))
    wide = replace(case, q=q, attn_sink=sink)
    for got in (decode(wide), wide.prefill(**SAME)):
        assert_same(tuple(x[:, :heads] for x in got), decode(case))


def test_heads_of_other_ranks_on_a_cpu():
    case = make_case(KV_LAYOUTS["dsv4"], "cpu", num_q_heads=128, extra=V4_SCOPES)
    want = decode(case)
    for heads in (8, 16, 64):
        rank = replace(case, q=case.q[:, 8 : 8 + heads], attn_sink=case.attn_sink[8 : 8 + heads])
        assert_same(decode(rank), tuple(x[:, 8 : 8 + heads] for x in want))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("layout", ["dsv4", "dsv41+dsv41_fp4"])
def test_a_token_of_a_chunk_has_its_bits_in_any_chunk(layout, kind, device):
    """The last requests alone, and with a longer one before them."""
    entries, window, indexed = LAYERS[kind]
    chunk = make_chunk(layout, device, num_q_heads=8)
    layer = chunk.layer(entries=entries, window=window)
    topk_indices = chunk.topk_indices if indexed else None
    if layer.layout_name == "dsv41_fp4":
        pytest.skip("no call reads it alone")
    if kind == "all entries" and "+" in layout and (device == "cuda" or emulation.executes()):
        with pytest.raises(ValueError, match="topk_indices must be given with batch_invariant"):
            chunk.attend(chunk.build(), layer, topk_indices, batch_invariant=True)
        return
    out, lse = chunk.attend(chunk.build(), layer, topk_indices, batch_invariant=True)
    first = chunk.query_lens[0]
    rest = mla_fp8.SparsePrefillChunkCache(
        mla_fp8.PrefillWorkspace(512, device), chunk.seq_lens_device[1:], chunk.query_lens_device[1:],
        chunk.page_table[1:],
        *((chunk.req_pool_indices[1:], chunk.req_to_token, chunk.full_to_swa) if chunk.window else ()),
        window_size=chunk.window, seq_lens_host=chunk.seq_lens[1:], query_lens_host=chunk.query_lens[1:],
    )  # fmt: skip
    again = rest.attend(
        chunk.q[first:], layer, topk_indices[first:] if indexed else None, sm_scale=chunk.sm_scale,
        attn_sink=chunk.attn_sink, batch_invariant=True,
    )  # fmt: skip
    assert_same(again, (out[first:], lse[first:]))


@pytest.mark.parametrize("strategy", ["whole", "selected"])
def test_a_chunk_refuses_ways_with_other_bits(strategy, device):
    chunk = make_chunk("dsv4", device)
    with pytest.raises(ValueError, match=f"strategy must be auto or direct .* got '{strategy}'"):
        chunk.attend(chunk.build(), chunk.layer(), chunk.topk_indices, strategy, batch_invariant=True)


@pytest.mark.op("index_topk")
@pytest.mark.parametrize("heads", [16, 64])
def test_the_indexer_chooses_by_the_row_alone(heads, device):
    """Alone and as the last draft of a request; test_index_topk.py: over the keys of a chunk."""
    problem = random_problem(device, [700, 64, 1025, 300], heads=heads, next_n=3)
    positions, *_ = problem.topk(128)
    _, _, cache, table, lens = problem.tensors
    for row in range(12):
        one = {"layout": problem.layout, "page_size": problem.page_size, "topk": 128}
        request, draft = divmod(row, 3)
        seen = lens[request : request + 1] - 2 + draft
        rows = slice(row, row + 1)
        alone = mla_fp8.index_topk(
            problem.q[rows], problem.weights[rows], cache, table[request : request + 1], seen, **one
        )
        assert torch.equal(alone[0], positions[rows])


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
@pytest.mark.parametrize("heads", [8, 64])
def test_a_replayed_graph_and_other_streams_have_the_bits(heads):
    case = several(KV_LAYOUTS["dsv4"], "cuda", heads)
    want = decode(case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert_same(decode(case), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode(case)
    got[0].zero_()
    graph.replay()
    assert_same(got, want)


def test_what_is_refused(device):
    case = make_case(KV_LAYOUTS["dsv4"], device)
    with pytest.raises(ValueError, match="return_max_logits must be False with batch_invariant"):
        case.prefill(batch_invariant=True)
    outs = case.nan_outputs()
    with pytest.raises(RuntimeError, match="max_logits must be None with batch_invariant, got a tensor"):
        torch.ops.mla_fp8.sparse_prefill_paged_out(
            *case.arguments(), **case.op_options(), **outs, batch_invariant=True
        )
    assert all(x.isnan().all() for x in outs.values())
    many = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device).expand(1 << 20, 1, 512)
    none = torch.empty(1 << 20, 0, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="q must have fewer than 1048576 tokens with batch_invariant"):
        mla_fp8.sparse_decode(
            many, case.scopes[0].kv_cache, none, layout="dsv4", page_size=case.scopes[0].page_size,
            sm_scale=1.0, batch_invariant=True,
        )  # fmt: skip
