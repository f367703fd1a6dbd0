"""Whole layer steps inside a CUDA graph: captured once, replayed with other lengths, slots and data."""

import pytest
import torch
from prefill_cases import Chunk, make_chunk
from sparse_cases import make_case

import mla_fp8
from mla_fp8 import KV_LAYOUTS, LayerCaches, PrefillWorkspace, workspace_rows
from mla_fp8.backends.table import Problem
from mla_fp8.dispatch import select
from mla_fp8.prefill import STRATEGIES
from mla_fp8.testing import assert_within_flash_mla_tolerance

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")

LENGTHS = [  # of the requests, and of their chunks; the first are the largest
    ([90, 40, 30, 33], [20, 10, 4, 9]),
    ([61, 5, 2, 17], [13, 5, 2, 4]),
    ([90, 12, 0, 33], [1, 10, 0, 9]),
]


def capture(step):
    """The graph of ``step``, and what it returns; warmed up on a side stream as PyTorch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def same_memory(target, source) -> None:
    """Copies what a replay reads: lengths and the bytes of both caches."""
    for a, b in zip(target, source, strict=True):
        a.copy_(b)


@pytest.mark.parametrize("kind", ["window alone", "selected entries", "all entries"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_captured_prefill_layer_serves_other_lengths(strategy, kind):
    seq_lens, query_lens = LENGTHS[0]
    chunk = make_chunk("dsv4", "cuda", seq_lens=seq_lens, query_lens=query_lens)
    layer = chunk.layer(entries=kind != "window alone")
    topk_indices = chunk.topk_indices if kind == "selected entries" else None
    workspace = PrefillWorkspace(512, "cuda")
    workspace.reserve(
        workspace_rows(seq_lens, query_lens, window_size=chunk.window, compress_ratio=chunk.ratio)
    )
    graph, results = capture(lambda: chunk.attend(chunk.build(workspace), layer, topk_indices, strategy))
    lengths = (chunk.seq_lens_device, chunk.query_lens_device)
    for seq_lens, query_lens in LENGTHS[1:]:
        now: Chunk = chunk
        now.set_lengths(seq_lens, query_lens)
        fresh = now.layer(entries=kind != "window alone")
        same_memory(lengths, (now.seq_lens_device, now.query_lens_device))
        same_memory(stores(layer), stores(fresh))
        now.q.normal_()
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        live = sum(query_lens)
        want = now.expected(fresh, topk_indices)
        assert_within_flash_mla_tolerance(results[0][:live], results[2][:live], want[0], want[2])
        assert (results[0][live:] == 0).all() and results[2][live:].isneginf().all()


def stores(layer: LayerCaches) -> list[torch.Tensor]:
    return [cache.data for cache in (layer.entries, layer.window) if cache]


def test_a_chunk_cache_of_a_capture_is_stale_once_the_graph_is_replayed():
    chunk = make_chunk("dsv4", "cuda")
    layer, workspace = chunk.layer(), PrefillWorkspace(512, "cuda")
    workspace.reserve(1000)
    kept = []

    def step():
        kept.append(chunk.build(workspace))
        return chunk.attend(kept[-1], layer, chunk.topk_indices)

    graph, _ = capture(step)
    graph.replay()
    with pytest.raises(RuntimeError, match="build and use must be inside the same CUDA graph capture"):
        chunk.attend(kept[-1], layer, chunk.topk_indices)


@pytest.mark.parametrize("backend", ["native", "flashmla_kv"])
@pytest.mark.parametrize("layout", ["dsv32", "dsv4"])
@pytest.mark.parametrize("num_q_heads", [8, 64])
def test_a_captured_decode_layer_serves_other_lengths_slots_and_tokens(backend, layout, num_q_heads):
    """A step stores the new tokens' latents, then attends."""
    try:
        select(Problem("sparse_decode", "sm90", layout, num_q_heads), backend)
    except ValueError as reason:
        pytest.skip(str(reason))
    fmt, cases = KV_LAYOUTS[layout], []
    for seed in range(3):
        torch.manual_seed(seed)
        cases.append(make_case(fmt, "cuda", num_q_heads=num_q_heads))
    static = cases[0]
    s, size = static.scopes[0], static.scopes[0].page_size
    slots = torch.arange(6, device="cuda")
    latent = s.rows[:6].clone()

    def step():
        mla_fp8.quantize_kv(latent, slots, s.kv_cache, layout=fmt, page_size=size)
        return static.decode(backend=backend)

    graph, results = capture(step)
    for case in cases[1:]:
        new = case.scopes[0]
        chosen = new.rows.isfinite().all(1).nonzero().flatten()[:6]
        empty = new.kv_cache.clone()
        empty.view(torch.uint8)[:, :] = new.kv_cache
        same_memory(
            (static.q, s.kv_cache, s.indices, s.length, static.attn_sink, slots, latent),
            (case.q, empty, new.indices, new.length, case.attn_sink, chosen, new.rows[chosen]),
        )
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        want = case.expected()
        assert_within_flash_mla_tolerance(*results, want[0], want[2])
