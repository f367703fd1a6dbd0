"""Attention over a hot buffer: behind the copies that :func:`resolve_hot_rows` planned, or beside them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .layout import HEAD_DIM_V, KVLayout, get_layout
from .ops.copy_host_rows import copy_host_rows
from .ops.merge_partial_states import merge_partial_states
from .ops.sparse_decode import sparse_decode

__all__ = ["decode_hot_rows"]


def decode_hot_rows(
    q: Tensor,
    host_cache: Tensor,
    hot_cache: Tensor,
    hot_rows: Tensor,
    miss_host_rows: Tensor,
    miss_hot_rows: Tensor,
    miss_counts: Tensor,
    *,
    layout: str | KVLayout,
    host_page_size: int,
    hot_page_size: int,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_page_size: int | None = None,
    hit_rows: Tensor | None = None,
    wait: bool = True,
    next_n: int = 1,
    hit_stream: torch.cuda.Stream | None = None,
    max_blocks: int = 16,
) -> tuple[Tensor, Tensor]:
    """Copy what :func:`resolve_hot_rows` planned, and attend to the hot buffer.

    Experimental. By default attention waits for the copies: :func:`copy_host_rows`, then
    :func:`sparse_decode`. Without waiting it attends to what is there while rows are copied on another
    stream, then to the copied rows, and joins both. Each part is rounded to bfloat16, and bits depend on
    which rows were there.

    Args:
        q: As in :func:`sparse_decode`.
        host_cache: As in :func:`copy_host_rows`, of one layer.
        hot_cache: Written.
        hot_rows: [num_tokens, k] int32, as the next three of :func:`resolve_hot_rows`.
        miss_host_rows: [num_tokens, k].
        miss_hot_rows: [num_tokens, k] int32.
        miss_counts: [num_tokens] int32.
        layout: Of all caches.
        host_page_size: Rows of a page.
        hot_page_size: Rows of a page.
        sm_scale: A logit is sm_scale * (q . k).
        attn_sink: [num_q_heads] float32, an extra logit without a value.
        extra_kv_cache: A second cache, in the same softmax: such as V4's window.
        extra_indices: [num_tokens, extra_topk] int32, of the second cache.
        extra_page_size: Rows of a page of the second cache.
        hit_rows: [num_tokens, k] int32, as ``out_hit_rows`` of :func:`resolve_hot_rows`. With ``wait=False``
            alone.
        wait: Whether attention waits for the copies.
        next_n: As in the call that planned. Only ``wait=False`` looks at it.
        hit_stream: Of attention to ``hit_rows``, by default one of PyTorch's pool. It begins behind what is
            on the caller's stream, which waits for its end.
        max_blocks: As in :func:`copy_host_rows`.

    Returns:
        (out, lse), as :func:`sparse_decode`. What a row held before it was copied reaches neither.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`copy_host_rows` and :func:`sparse_decode`. ValueError
            for ``wait=False`` without ``hit_rows``.
    """
    rows: dict[str, Any] = {"layout": get_layout(layout), "page_size": hot_page_size, "sm_scale": sm_scale}
    extra: dict[str, Any] = {
        "extra_kv_cache": extra_kv_cache,
        "extra_indices": extra_indices,
        "extra_page_size": extra_page_size,
    }

    def copy() -> None:
        copy_host_rows(
            host_cache, hot_cache, miss_host_rows, miss_hot_rows, miss_counts, layout=layout,
            host_page_size=host_page_size, hot_page_size=hot_page_size, max_blocks=max_blocks,
        )  # fmt: skip

    if wait:
        copy()
        return sparse_decode(q, hot_cache, hot_rows, attn_sink=attn_sink, **rows, **extra)

    if hit_rows is None:
        raise ValueError("mla_fp8.decode_hot_rows: expected hit_rows with wait=False, got none")
    outs = q.new_empty((2, *q.shape[:2], HEAD_DIM_V))
    lses = q.new_empty(outs.shape[:3], dtype=torch.float32)
    first: dict[str, Any] = {"out": outs[0], "lse": lses[0]}
    second: dict[str, Any] = {"out": outs[1], "lse": lses[1]}
    with _beside(hit_stream, copy, q.device):
        sparse_decode(q, hot_cache, hit_rows, **rows, **extra, **first)
    # Of a request's only row the misses are its plan.
    late, lengths = (
        (miss_hot_rows, miss_counts) if next_n == 1 else (hot_rows.masked_fill(hit_rows >= 0, -1), None)
    )
    sparse_decode(q, hot_cache, late, topk_length=lengths, **rows, **second)
    return merge_partial_states(outs, lses, attn_sink=attn_sink)


@contextmanager
def _beside(
    stream: torch.cuda.Stream | None, first: Callable[[], None], device: torch.device
) -> Iterator[None]:
    """Beside ``first``, on another stream of a GPU. ``first`` begins first: attention leaves it no SM."""
    if device.type != "cuda":
        yield
        first()
        return
    here, beside = torch.cuda.current_stream(device), stream or torch.cuda.Stream(device)
    ready = here.record_event()
    first()
    beside.wait_event(ready)
    with torch.cuda.stream(beside):
        yield
    here.wait_stream(beside)
