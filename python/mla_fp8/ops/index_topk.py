import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..arch import num_processors
from ..index_layout import IndexLayout, get_index_layout
from .index_logits import flat_queries

__all__ = ["index_topk", "index_topk_counters", "index_topk_ragged", "index_topk_workspace"]

Chosen = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def index_topk_workspace(num_rows: int, *, topk: int, device: torch.device | str) -> int:
    """Size of the ``workspace`` that :func:`index_topk` needs with the caller's buffers.

    Experimental.

    Args:
        num_rows: Rows of q.
        topk: Entries that are chosen for each row.
        device: Where the call runs.

    Returns:
        A number of bytes, which does not depend on the context; 0 on a CPU.

    Raises:
        RuntimeError: For numbers out of range, or a GPU that is not there.
    """
    processors = num_processors(device)
    size = call_op("index_topk_workspace", num_rows, topk, max(processors, 1))
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
    slot_page_table: torch.Tensor | None = None,
    slot_page_size: int | None = None,
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
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
        slot_page_table: [num_requests, pages] int32, of the cache whose slots are wanted; by default
            ``page_table``.
        slot_page_size: Rows of a page there.
        out_positions: [num_rows, topk] int32, any row stride; with ``out_lens``.
        out_slots: [num_rows, topk] int32. Without it none are found.
        out_lens: [num_rows] int32.
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
    options = {
        "layout": get_index_layout(layout).id,
        "page_size": page_size,
        "q_scale": q_scale,
        "row_lens": row_lens,
        "query_start_loc": query_start_loc,
        "next_n": next_n,
        "compress_ratio": compress_ratio,
        "topk": topk,
        "pin_first": pin_first,
        "pin_last": pin_last,
        "slot_page_table": slot_page_table,
        "slot_page_size": slot_page_size,
    }
    out = _buffers("index_topk", out_positions, out_slots, out_lens, workspace, counters)
    if out is None:
        return call_op("index_topk", *inputs, **options)  # type: ignore[no-any-return]
    call_op("index_topk_out", *inputs, **options, **out)
    assert out_positions is not None and out_lens is not None  # for mypy
    return out_positions, out_slots, out_lens


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
    out_positions: torch.Tensor | None = None,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
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
    }
    out = _buffers("index_topk_ragged", out_positions, out_slots, out_lens, workspace, counters)
    if out is None:
        return call_op("index_topk_ragged", *inputs, **options)  # type: ignore[no-any-return]
    call_op("index_topk_ragged_out", *inputs, **options, **out)
    assert out_positions is not None and out_lens is not None  # for mypy
    return out_positions, out_slots, out_lens


def _buffers(
    op: str,
    positions: torch.Tensor | None,
    slots: torch.Tensor | None,
    lens: torch.Tensor | None,
    workspace: torch.Tensor | None,
    counters: torch.Tensor | None,
) -> dict[str, torch.Tensor | None] | None:
    """The arguments of the _out twin; None if the caller wants new tensors."""
    if positions is not None and lens is not None:
        return {
            "out_positions": positions, "out_slots": slots, "out_lens": lens, "workspace": workspace,
            "counters": counters,
        }  # fmt: skip
    needed = {"out_positions": positions, "out_lens": lens}
    if any(x is not None for x in (positions, slots, lens, workspace, counters)):
        missing = " and no ".join(name for name, buffer in needed.items() if buffer is None)
        raise ValueError(
            f"mla_fp8.{op}: expected out_positions and out_lens with any buffer of the caller's, "
            f"got no {missing}"
        )
    return None


@fake("index_topk")
def _(
    q: torch.Tensor, *tensors: object, topk: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = q.shape[0]
    positions, slots = (q.new_empty((rows, topk), dtype=torch.int32) for _ in range(2))
    return positions, slots, q.new_empty((rows,), dtype=torch.int32)


@fake("index_topk_ragged")
def _(
    q: torch.Tensor, *tensors: object, topk: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = q.shape[0]
    positions, slots = (q.new_empty((rows, topk), dtype=torch.int32) for _ in range(2))
    return positions, slots, q.new_empty((rows,), dtype=torch.int32)


fake_returns_nothing("index_topk_out", "index_topk_ragged_out")
