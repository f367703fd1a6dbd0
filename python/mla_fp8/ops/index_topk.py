from collections.abc import Mapping
from typing import Any

import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..arch import num_processors
from ..index_layout import IndexLayout
from .index_logits import flat_queries, over_pages

__all__ = ["index_topk", "index_topk_counters", "index_topk_ragged", "index_topk_workspace"]

Chosen = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def index_topk_workspace(
    num_rows: int,
    *,
    topk: int,
    device: torch.device | str,
    num_candidates: int = 0,
    num_positions: int = 0,
) -> int:
    """Size of the ``workspace`` that :func:`index_topk` and its siblings need with the caller's buffers.

    Experimental.

    Args:
        num_rows: Rows of q.
        topk: Entries that are chosen for each row.
        device: Where the call runs.
        num_candidates: Columns of ``candidate_blocks``, if there are any.
        num_positions: Where blocks are published: columns of ``page_table`` times ``page_size``, or rows of
            ``k``.

    Returns:
        A number of bytes, which does not depend on the lengths; 0 on a CPU.

    Raises:
        RuntimeError: For numbers out of range, or a GPU that is not there.
    """
    processors = num_processors(device)
    sizes = {"num_candidates": num_candidates, "num_positions": num_positions}
    size = call_op("index_topk_workspace", num_rows, topk, max(processors, 1), **sizes)
    return size if processors else 0


def index_topk_counters(device: torch.device | str) -> int:
    """Size of the ``counters`` that :func:`index_topk` takes, whatever the rows are.

    Experimental.

    Args:
        device: Where the call runs.

    Returns:
        A number of int32 entries; 0 on a CPU.

    Raises:
        RuntimeError: For a GPU that is not there.
    """
    processors = num_processors(device)
    return call_op("index_topk_counters", processors) if processors else 0


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor | None,
    *,
    layout: str | IndexLayout,
    page_size: int,
    topk: int,
    q_scale: torch.Tensor | None = None,
    row_lens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    next_n: int = 1,
    compress_ratio: int = 1,
    pin_first: int = 0,
    pin_last: int = 0,
    candidate_blocks: torch.Tensor | None = None,
    block_size: int = 8,
    slot_page_table: torch.Tensor | None = None,
    slot_page_size: int | None = None,
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Chosen:
    """Choose the ``topk`` best entries of each row by :func:`index_logits`, exactly, without logits.

    Experimental. The order is total: the first ``pin_first`` and the last ``pin_last`` entries that a row
    sees, then larger logits, NaN last; equal ones by position, the lower first. An entry of no page is never
    chosen. A row that sees fewer than ``topk`` gets them all. The choice is that of the device's own
    index_logits, whatever other rows and pages are.

    Args:
        q: As in :func:`index_logits`, and so are all that are not listed here.
        topk: At most 4096.
        pin_first: First entries that are always chosen.
        pin_last: Last entries that are always chosen.
        candidate_blocks: [num_rows, n] or [num_requests, n] int32: rows choose, and pins do, among the
            entries of these blocks, as of :func:`index_topk_blocks`. Block b has the positions from
            ``b * block_size`` on. Any order; a repeated block counts once, one that the row does not see not.
        block_size: Entries of a block: 8.
        slot_page_table: [num_requests, pages] int32, of the cache whose slots are wanted; by default
            ``page_table``.
        slot_page_size: Rows of a page there.
        out_positions: [num_rows, topk] int32, any row stride; with ``out_lens``.
        out_slots: [num_rows, topk] int32. Without it none are found.
        out_lens: [num_rows] int32.
        out_scores: [num_rows, topk] float32: logits of the positions, then -inf.
        workspace: uint8, of :func:`index_topk_workspace` bytes, with ``out_positions`` on a GPU; holds
            anything. One call at a time uses it: two streams need two.
        counters: int32, of :func:`index_topk_counters` entries, with ``workspace``: ``torch.zeros`` once, as
            each call leaves zeros; zero them again if a call did not end. One call at a time uses them.
            Without them a call on Hopper takes up to 1 us more.

    Returns:
        (positions, slots, lens). Positions ascend, then -1. A slot is ``page_table[request, p // page_size] *
        page_size + p % page_size``, -1 where there is no page. lens says how many there are. They are
        ``indices`` and ``topk_length`` of :func:`sparse_decode`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for one buffer without the
            other.
    """
    refuse_gradients("index_topk", q=q, weights=weights, q_scale=q_scale)
    inputs = (flat_queries(q), weights, index_cache, page_table, seq_lens)
    pages = over_pages(layout, page_size, q_scale, row_lens, query_start_loc, next_n, compress_ratio)
    options: dict[str, object] = {
        **pages,
        "topk": topk,
        "pin_first": pin_first,
        "pin_last": pin_last,
        "candidate_blocks": candidate_blocks,
        "block_size": block_size,
        "slot_page_table": slot_page_table,
        "slot_page_size": slot_page_size,
    }
    results = {"out_positions": out_positions, "out_lens": out_lens}
    return choose(  # type: ignore[no-any-return]
        "index_topk", inputs, options, results, out_slots, out_scores, workspace, counters
    )


def index_topk_ragged(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    k_start: torch.Tensor,
    k_end: torch.Tensor,
    *,
    topk: int,
    q_scale: torch.Tensor | None = None,
    k_slots: torch.Tensor | None = None,
    pin_first: int = 0,
    pin_last: int = 0,
    candidate_blocks: torch.Tensor | None = None,
    block_size: int = 8,
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
    out_scores: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> Chosen:
    """Do :func:`index_topk` over the keys of :func:`index_logits_ragged`.

    Experimental.

    Args:
        q: As in :func:`index_logits_ragged`, and so are ``weights``, ``k``, ``k_scale``, ``k_start``,
            ``k_end`` and ``q_scale``.
        topk: As in :func:`index_topk`, and so are all that are not listed here.
        k_slots: [num_keys] int32 or int64: the slot of each key (-1 for what int32 does not hold), in place
            of its number.
        candidate_blocks: [num_rows, n] int32. Positions count from ``k_start``, and so do blocks.

    Returns:
        (positions, slots, lens) as :func:`index_topk`. Positions count from ``k_start`` (clamped), slots are
        ``k_slots[k_start + position]``.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`index_topk`.
    """
    refuse_gradients("index_topk_ragged", q=q, weights=weights, k=k, k_scale=k_scale, q_scale=q_scale)
    inputs = (q, weights, k, k_scale, k_start, k_end)
    options = {
        "topk": topk,
        "q_scale": q_scale,
        "k_slots": k_slots,
        "pin_first": pin_first,
        "pin_last": pin_last,
        "candidate_blocks": candidate_blocks,
        "block_size": block_size,
    }
    results = {"out_positions": out_positions, "out_lens": out_lens}
    return choose(  # type: ignore[no-any-return]
        "index_topk_ragged", inputs, options, results, out_slots, out_scores, workspace, counters
    )


def choose(
    op: str,
    inputs: tuple[object, ...],
    options: Mapping[str, object],
    results: dict[str, torch.Tensor | None],
    out_slots: torch.Tensor | None,
    out_scores: torch.Tensor | None,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> Any:
    """The op into new tensors, or its _out twin into the caller's: ``results``, positions first."""
    more = {"out_slots": out_slots, "out_scores": out_scores, "workspace": workspace, "counters": counters}
    if all(buffer is not None for buffer in results.values()):
        call_op(f"{op}_out", *inputs, **options, **results, **more)
        positions, *others = results.values()
        return positions, out_slots, *others
    if any(x is not None for x in (*results.values(), *more.values())):
        missing = " and no ".join(name for name, buffer in results.items() if buffer is None)
        raise ValueError(
            f"mla_fp8.{op}: expected {' and '.join(results)} with any buffer of the caller's, "
            f"got no {missing}"
        )
    return call_op(op, *inputs, **options)


def new_results(q: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positions, slots = (q.new_empty((q.shape[0], topk), dtype=torch.int32) for _ in range(2))
    return positions, slots, q.new_empty((q.shape[0],), dtype=torch.int32)


def _new_results(
    q: torch.Tensor, *tensors: object, topk: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return new_results(q, topk)


for _op in ("index_topk", "index_topk_ragged"):
    fake(_op)(_new_results)
    fake_returns_nothing(f"{_op}_out")
