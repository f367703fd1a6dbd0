import torch

from .._arguments import expect_tensors
from .._fake import fake, fake_returns_nothing
from .._inference import refuse_gradients
from ..layout import KVLayout, get_layout, layout_of_id


def dequantize_kv(
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: str | KVLayout,
    page_size: int,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather ``slots`` of a paged cache as bf16 rows.

    ========  =======================  =================  ================================================
    kv_cache  [num_pages, page_bytes]  uint8 (or a view)  see :class:`mla_fp8.KVLayout`
    slots     [n]                      int64 or int32     page * page_size + row; outside the cache: zeros
    scale     one element              fp32               the layer's scale: ``fp8_e4m3*`` only
    out       [n, head_dim_qk]         bf16               optional; any row stride (a slice of a workspace)
    ========  =======================  =================  ================================================

    value = e4m3 * scale in float32, rounded once to bf16; rope of ``dsv32`` and ``dsv4`` is bit-exact.
    Returns ``out``. Raises RuntimeError naming the argument, what was expected and what came.
    """
    expect_tensors("dequantize_kv", scale=scale)
    refuse_gradients("dequantize_kv", kv_cache=kv_cache, scale=scale, out=out)
    layout = get_layout(layout)
    options = {"layout": layout.id, "page_size": page_size, "scale": scale}
    if out is None:
        return torch.ops.mla_fp8.dequantize_kv(kv_cache, slots, **options)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.dequantize_kv_out(kv_cache, slots, **options, out=out)
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
    """Gather the last ``gather_lens[r]`` tokens of each request as bf16 rows, without materialising slots.

    ===========  =========================  =================  ========================================
    kv_cache     [num_pages, page_bytes]    uint8 (or a view)  see :class:`mla_fp8.KVLayout`
    page_table   [num_requests, max_pages]  int32              pages outside the cache give zeros
    seq_lens     [num_requests]             int32              tokens cached
    gather_lens  [num_requests]             int32              how many of the last ones to gather
    row_offsets  [num_requests]             int32              first row of the request in ``out``
    scale        one element                fp32               ``fp8_e4m3*`` only
    out          [num_rows, head_dim_qk]    bf16               optional, any row stride
    ===========  =========================  =================  ========================================

    Position ``seq_lens[r] - gather_lens[r] + j`` of request r goes to row ``row_offsets[r] + j``. Rows
    outside ``out`` are dropped; rows of no request keep what ``out`` held, and are zero when ``num_rows``
    is given instead. Exactly one of ``num_rows`` and ``out`` is required (ValueError). Requests may not
    share rows.
    """
    expect_tensors("dequantize_kv_paged", scale=scale)
    refuse_gradients("dequantize_kv_paged", kv_cache=kv_cache, scale=scale, out=out)
    layout = get_layout(layout)
    tensors = (kv_cache, page_table, seq_lens, gather_lens, row_offsets)
    options = {"layout": layout.id, "page_size": page_size, "scale": scale}
    if (num_rows is None) == (out is None):
        got = "neither" if out is None else "both"
        raise ValueError(f"mla_fp8.dequantize_kv_paged: expected exactly one of num_rows and out, got {got}")
    if out is None:
        return torch.ops.mla_fp8.dequantize_kv_paged(*tensors, **options, num_rows=num_rows)  # type: ignore[no-any-return]
    torch.ops.mla_fp8.dequantize_kv_paged_out(*tensors, **options, out=out)
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
