import torch

from .._arguments import call_op
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout, layout_of_id

__all__ = ["dequantize_kv", "dequantize_kv_paged"]


def dequantize_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather slots of a paged cache as bf16 rows.

    A value is e4m3 * scale in float32, rounded once to bf16. Rope of ``dsv32`` and ``dsv4`` is bit-exact.

    Args:
        kv_cache: As in :func:`quantize_kv`.
        slots: [n] int64 or int32: page * page_size + row. A slot outside the cache gives zeros.
        layout: Of the cache.
        page_size: Rows of a page.
        scale: As in :func:`quantize_kv`.
        out: [n, head_dim_qk] bfloat16, any row stride.

    Returns:
        [n, head_dim_qk] bfloat16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`.
    """
    refuse_gradients("dequantize_kv", kv_cache=kv_cache, scale=scale, out=out)
    layout = get_layout(layout)
    options = {"layout": layout.id, "page_size": page_size, "scale": scale}
    if out is None:
        return call_op("dequantize_kv", kv_cache, slots, **options)  # type: ignore[no-any-return]
    call_op("dequantize_kv_out", kv_cache, slots, **options, out=out)
    return out


def dequantize_kv_paged(
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    num_rows: int | None = None,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the last tokens of each request as bf16 rows, by its pages.

    Position ``seq_lens[r] - gather_lens[r] + j`` of request r goes to row ``row_offsets[r] + j``. Rows
    outside the result are dropped. Requests may not share rows.

    Args:
        kv_cache: As in :func:`quantize_kv`.
        page_table: [num_requests, max_pages] int32. A page outside the cache gives zeros.
        seq_lens: [num_requests] int32: tokens that are cached.
        gather_lens: [num_requests] int32: how many of these to gather, the last ones.
        row_offsets: [num_requests] int32: the first row of each request in the result.
        layout: Of the cache.
        page_size: Rows of a page.
        num_rows: Of a new result, where rows of no request are zero.
        scale: As in :func:`quantize_kv`.
        out: [num_rows, head_dim_qk] bfloat16, any row stride, in place of ``num_rows``. Rows of no request
            stay.

    Returns:
        [num_rows, head_dim_qk] bfloat16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`quantize_kv`. ValueError for both or neither of
            ``num_rows`` and ``out``.
    """
    refuse_gradients("dequantize_kv_paged", kv_cache=kv_cache, scale=scale, out=out)
    layout = get_layout(layout)
    tensors = (kv_cache, page_table, seq_lens, gather_lens, row_offsets)
    options = {"layout": layout.id, "page_size": page_size, "scale": scale}
    if (num_rows is None) == (out is None):
        got = "neither" if out is None else "both"
        raise ValueError(f"mla_fp8.dequantize_kv_paged: expected exactly one of num_rows and out, got {got}")
    if out is None:
        return call_op("dequantize_kv_paged", *tensors, **options, num_rows=num_rows)  # type: ignore[no-any-return]
    call_op("dequantize_kv_paged_out", *tensors, **options, out=out)
    return out


@fake("dequantize_kv")
def _(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: int,
    page_size: int,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return kv_cache.new_empty((slots.shape[0], _head_dim_qk(layout)), dtype=torch.bfloat16)


@fake("dequantize_kv_paged")
def _(
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    row_offsets: torch.Tensor,
    *,
    layout: int,
    page_size: int,
    num_rows: int,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    return kv_cache.new_empty((num_rows, _head_dim_qk(layout)), dtype=torch.bfloat16)


fake_returns_nothing("dequantize_kv_out", "dequantize_kv_paged_out")


def _head_dim_qk(layout: int) -> int:
    return layout_of_id(layout).head_dim_qk
