"""vLLM's four ops of HiSparse, by the names and argument order of ``torch.ops._C_cache_ops``.

Contracts are vLLM 0.33's. ``host_cache`` is [host rows, width] in pinned memory, ``hot_cache`` [blocks, block
size, width]. Rows are those of a layout whose scales lie within a row; which one follows from their bytes,
and only these matter here. Ours differ where vLLM's say nothing: a row of more than ``max_union_rows``
entries is -1 behind them, and of two runs of rows with one state the second is padding. Bad input raises the
op's RuntimeError, with the caller's names.
"""

import torch

from ..layout import KV_LAYOUTS
from ..ops.copy_host_rows import copy_host_rows
from ..ops.forget_rows import forget_rows
from ..ops.resolve_hot_rows import resolve_hot_rows
from ._names import caller_names

__all__ = [
    "hisparse_gather_compact",
    "hisparse_gather_plan",
    "hisparse_invalidate_written_slots",
    "hisparse_resolve_residency",
]

# By the bytes of a row: the first layout with as many that has its scales within the row.
_BY_BYTES = {x.bytes_per_token: x for x in reversed([*KV_LAYOUTS.values()]) if x.page_align == 1}
_MAX_DRAFTS = 64
PLAN = ("swap_host_physical_rows", "swap_device_physical_rows", "swap_counts")

_RESOLVE = {
    "entries": "global_indices", "hot_entries": "device_global_indices", "hot_order": "lru_slots",
    "host_page_table": "source_block_table", "host_page_size": "source_block_size",
    "hot_page_table": "hot_block_table", "hot_page_size": "hot_cache.shape[1]",
    "resident_page_table": "resident_block_table", "row_to_request": "request_ids",
    "state_rows": "request_state_indices", "counters": "stats", "next_n": "max_union_rows // top_k",
    "out_hot_rows": "hot_indices", "out_miss_host_rows": "swap_host_physical_rows",
    "out_miss_hot_rows": "swap_device_physical_rows", "out_miss_counts": "swap_counts",
    "out_attention_rows": "attention_indices", "attention_page_stride": "attention_block_stride",
    "out_lens": "valid_counts",
}  # fmt: skip


@caller_names(**_RESOLVE)
def hisparse_resolve_residency(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    hot_block_table: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    device_global_indices: torch.Tensor,
    lru_slots: torch.Tensor,
    request_state_indices: torch.Tensor | None,
    region_stride: int,
    max_union_rows: int,
    miss_mask: torch.Tensor | None,
    stats: torch.Tensor | None,
    attention_indices: torch.Tensor | None,
    attention_block_stride: int,
    request_ids: torch.Tensor | None,
    source_block_table: torch.Tensor | None,
    source_block_size: int,
    resolved_global_indices: torch.Tensor | None,
    valid_counts: torch.Tensor | None,
    swap_host_physical_rows: torch.Tensor | None,
    swap_device_physical_rows: torch.Tensor | None,
    swap_counts: torch.Tensor | None,
    resident_block_table: torch.Tensor | None,
    resident_block_size: int,
    resident_null_block: int,
) -> None:
    """:func:`mla_fp8.resolve_hot_rows` into the caller's buffers.

    Blocks of the host below 1 are none, and so are resident ones: ``resident_null_block`` is 0. Raises
    ValueError for another, for resident blocks of another size than hot ones, for ``miss_mask`` and
    ``resolved_global_indices``, which vLLM does not ask for, and without the three ``swap`` buffers.
    """
    if miss_mask is not None or resolved_global_indices is not None:
        name = "resolved_global_indices" if miss_mask is None else "miss_mask"
        raise ValueError(f"hisparse_resolve_residency: {name} must be None, got a tensor")
    if swap_host_physical_rows is None or swap_device_physical_rows is None or swap_counts is None:
        raise ValueError("hisparse_resolve_residency: expected all swap buffers, got None for one")
    num_hot, block = device_global_indices.shape[-1], hot_cache.shape[1]
    if region_stride != num_hot:
        raise ValueError(
            f"hisparse_resolve_residency: region_stride must be {num_hot}, the columns of "
            f"device_global_indices, got {region_stride}"
        )
    if resident_block_table is not None and (resident_block_size, resident_null_block) != (block, 0):
        raise ValueError(
            f"hisparse_resolve_residency: resident blocks must have {block} rows and 0 for none, got "
            f"{resident_block_size} and {resident_null_block}"
        )
    top_k = max(global_indices.shape[-1], 1)
    resolve_hot_rows(
        global_indices, device_global_indices, lru_slots,
        source_block_table, hot_block_table, resident_block_table,
        num_host_rows=host_cache.shape[0],
        host_page_size=source_block_size if source_block_table is not None else 1,
        hot_page_size=block,
        first_page=1,
        row_to_request=request_ids,
        next_n=1 if request_ids is None else min(max(max_union_rows // top_k, 1), _MAX_DRAFTS),
        state_rows=request_state_indices,
        counters=stats,
        out_hot_rows=hot_indices,
        out_miss_host_rows=swap_host_physical_rows,
        out_miss_hot_rows=swap_device_physical_rows,
        out_miss_counts=swap_counts,
        out_attention_rows=attention_indices,
        attention_page_stride=attention_block_stride,
        out_lens=valid_counts,
    )  # fmt: skip


def knows_rows(row_bytes: int) -> bool:
    return row_bytes in _BY_BYTES


_COPY = caller_names(
    host_caches="host_cache", hot_caches="hot_cache", host_rows="global_indices", hot_rows="hot_indices"
)


def _copy(
    host_cache: torch.Tensor, hot_cache: torch.Tensor, host_rows: torch.Tensor, hot_rows: torch.Tensor,
    counts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    row_bytes = host_cache.shape[-1] * host_cache.element_size()
    if not knows_rows(row_bytes):
        raise ValueError(f"host_cache must have rows of {sorted(_BY_BYTES)} bytes, got {row_bytes}")
    copy_host_rows(
        host_cache, hot_cache, host_rows, hot_rows, counts, layout=_BY_BYTES[row_bytes], host_page_size=1,
        hot_page_size=hot_cache.shape[1],
    )  # fmt: skip


@_COPY
def hisparse_gather_compact(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    miss_global_indices: torch.Tensor,
    miss_hot_indices: torch.Tensor,
    miss_counts: torch.Tensor,
) -> None:
    """:func:`mla_fp8.copy_host_rows` of the rows that ``hisparse_resolve_residency`` planned."""
    _copy(host_cache, hot_cache, miss_global_indices, miss_hot_indices, miss_counts)


@_COPY
def hisparse_gather_plan(
    host_cache: torch.Tensor,
    hot_cache: torch.Tensor,
    global_indices: torch.Tensor,
    hot_indices: torch.Tensor,
    miss_mask: torch.Tensor,
    request_state_indices: torch.Tensor | None,
    attention_indices: torch.Tensor | None,
    attention_block_stride: int,
) -> None:
    """The same of rows that a mask names, as prompts are staged; allocates.

    ``attention_indices`` are ``hot_indices`` with blocks ``attention_block_stride`` rows apart.
    """
    if request_state_indices is not None:
        hot_indices = hot_indices.where(request_state_indices[:, None] >= 0, -1)
    if attention_indices is not None:
        size = hot_cache.shape[1]
        apart = hot_indices // size * attention_block_stride + hot_indices % size
        attention_indices.copy_(apart.where(hot_indices >= 0, -1))
    _copy(host_cache, hot_cache, global_indices, hot_indices.where(miss_mask != 0, -1))


@caller_names(
    entries="written_slots", hot_entries="device_global_indices", row_to_request="req_id_per_token",
    state_rows="request_state_indices",
)  # fmt: skip
def hisparse_invalidate_written_slots(
    device_global_indices: torch.Tensor,
    request_state_indices: torch.Tensor,
    req_id_per_token: torch.Tensor,
    written_slots: torch.Tensor,
) -> None:
    """:func:`mla_fp8.forget_rows` of the slots that tokens were written to."""
    forget_rows(
        written_slots,
        device_global_indices,
        row_to_request=req_id_per_token,
        state_rows=request_state_indices,
    )
