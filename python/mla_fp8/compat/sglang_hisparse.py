"""SGLang's functions of HiSparse, by the names and argument order of ``sglang.kernels.ops.kvcache.hisparse``.

Contracts are SGLang 0.5.23's; the speculative form, whose state is another, is not here. Hot rows and host
rows are one per position: ``device_buffer_locs`` and ``host_cache_locs`` say where. Ours differ where those
of SGLang say nothing: a negative position is -1 in long requests, too. Another kernel copies than looks up.
Bad input raises the op's RuntimeError, with the caller's names.
"""

import torch

from ..layout import KV_LAYOUTS, KVLayout
from ..ops.copy_host_rows import copy_host_rows, copy_rows_at
from ..ops.resolve_hot_rows import resolve_hot_rows
from ._names import caller_names

__all__ = [
    "copy_cache_planned_mla",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "transfer_cache_dsv4_mla",
]

_BY_BYTES = {x.bytes_per_token: x for x in reversed([*KV_LAYOUTS.values()]) if x.page_align == 1}
_DSV4, _DSV4_PAGE = KV_LAYOUTS["dsv4"], 64
DSV4_SIZES = (_DSV4.bytes_per_token, _DSV4.page_bytes(_DSV4_PAGE))
_NAMES = {
    "entries": "top_k_tokens", "hot_entries": "device_buffer_tokens", "hot_order": "lru_slots",
    "host_page_table": "host_cache_locs", "hot_page_table": "device_buffer_locs",
    "row_to_request": "req_pool_indices", "entry_lens": "seq_lens", "num_valid_rows": "num_real_reqs",
    "out_hot_rows": "top_k_device_locs", "out_miss_host_rows": "miss_src", "out_miss_hot_rows": "miss_dst",
    "out_miss_counts": "miss_count", "host_rows": "miss_src", "hot_rows": "miss_dst", "counts": "miss_count",
    "host_caches": "host_cache", "hot_caches": "device_buffer",
}  # fmt: skip


def knows_rows(row_bytes: int) -> bool:
    return row_bytes in _BY_BYTES


def _pages(cache: torch.Tensor, item_size_bytes: int, is_dsv4: bool) -> tuple[torch.Tensor, KVLayout, int]:
    """The cache as [pages, bytes], its layout, and the rows of a page."""
    flat = cache.view(torch.uint8) if cache.dim() == 2 else cache.flatten(1).view(torch.uint8)
    if is_dsv4:
        return flat.view(-1, _DSV4.page_bytes(_DSV4_PAGE)), _DSV4, _DSV4_PAGE
    if not knows_rows(item_size_bytes):
        raise ValueError(f"item_size_bytes must be one of {sorted(_BY_BYTES)}, got {item_size_bytes}")
    return flat.view(-1, item_size_bytes), _BY_BYTES[item_size_bytes], 1


@caller_names(**_NAMES)
def _load(
    top_k_tokens: torch.Tensor, device_buffer_tokens: torch.Tensor, host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor, host_cache: torch.Tensor, device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor,
    lru_slots: torch.Tensor, item_size_bytes: int, hot_buffer_size: int, num_real_reqs: torch.Tensor | None,
    plan: tuple[torch.Tensor | None, ...], skip_io: bool, is_dsv4: bool,
) -> None:  # fmt: skip
    host, layout, page_size = _pages(host_cache, item_size_bytes, is_dsv4)
    device, _, _ = _pages(device_buffer, item_size_bytes, is_dsv4)
    rows, k = top_k_tokens.shape
    source, target, counts = plan
    if source is None or target is None or counts is None:
        source, target = torch.empty((2, rows, k), dtype=torch.int32, device=top_k_tokens.device)
        counts = torch.empty(rows, dtype=torch.int32, device=top_k_tokens.device)
    planned = (source[:, :k], target[:, :k], counts)
    resolve_hot_rows(
        top_k_tokens, device_buffer_tokens[:, :hot_buffer_size], lru_slots[:, :hot_buffer_size],
        host_cache_locs, device_buffer_locs[:, : hot_buffer_size + 1],
        num_host_rows=len(host) * page_size,
        by_entry=True,
        row_to_request=req_pool_indices,
        entry_lens=seq_lens,
        num_valid_rows=num_real_reqs,
        out_hot_rows=top_k_device_locs[:, :k],
        out_miss_host_rows=planned[0],
        out_miss_hot_rows=planned[1],
        out_miss_counts=counts,
    )  # fmt: skip
    if not skip_io:
        copy_host_rows(
            host, device, *planned, layout=layout, host_page_size=page_size, hot_page_size=page_size
        )


def load_cache_to_device_buffer_mla(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lru_slots: torch.Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """:func:`mla_fp8.resolve_hot_rows` by position, then :func:`mla_fp8.copy_host_rows`.

    Rows are contiguous, of ``item_size_bytes``. Without a plan's buffers it allocates them. ``page_size`` and
    ``block_size`` say nothing here.
    """
    _load(
        top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer,
        top_k_device_locs, req_pool_indices, seq_lens, lru_slots, item_size_bytes, hot_buffer_size,
        num_real_reqs, (miss_src, miss_dst, miss_count), skip_io, False,
    )  # fmt: skip


def load_cache_to_device_buffer_dsv4_mla(
    top_k_tokens: torch.Tensor,
    device_buffer_tokens: torch.Tensor,
    host_cache_locs: torch.Tensor,
    device_buffer_locs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    top_k_device_locs: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    lru_slots: torch.Tensor,
    item_size_bytes: int,
    num_top_k: int,
    hot_buffer_size: int,
    page_size: int = 1,
    block_size: int = 256,
    num_real_reqs: torch.Tensor | None = None,
    miss_src: torch.Tensor | None = None,
    miss_dst: torch.Tensor | None = None,
    miss_count: torch.Tensor | None = None,
    skip_io: bool = False,
) -> None:
    """:func:`load_cache_to_device_buffer_mla` for V4's entries: padded pages of 64 rows on both sides."""
    _load(
        top_k_tokens, device_buffer_tokens, host_cache_locs, device_buffer_locs, host_cache, device_buffer,
        top_k_device_locs, req_pool_indices, seq_lens, lru_slots, item_size_bytes, hot_buffer_size,
        num_real_reqs, (miss_src, miss_dst, miss_count), skip_io, True,
    )  # fmt: skip


@caller_names(**_NAMES)
def copy_cache_planned_mla(
    *,
    miss_src: torch.Tensor,
    miss_dst: torch.Tensor,
    miss_count: torch.Tensor,
    num_real_reqs: torch.Tensor,
    host_cache: torch.Tensor,
    device_buffer: torch.Tensor,
    item_size_bytes: int,
    num_blocks: int = 4,
    block_size: int = 1024,
    is_dsv4_layout: bool = False,
    skip_io: bool = False,
) -> None:
    """:func:`mla_fp8.copy_host_rows` of a plan, for a layer that shares it.

    As many threads as asked for: ``num_blocks`` of ``block_size`` are blocks of 512 here.
    """
    if skip_io:
        return
    host, layout, page_size = _pages(host_cache, item_size_bytes, is_dsv4_layout)
    device, _, _ = _pages(device_buffer, item_size_bytes, is_dsv4_layout)
    copy_host_rows(
        host, device, miss_src, miss_dst, miss_count, num_real_reqs, layout=layout, host_page_size=page_size,
        hot_page_size=page_size, max_blocks=max(num_blocks * block_size // 512, 1),
    )  # fmt: skip


@caller_names(
    from_addresses="src_ptrs", to_addresses="dst_ptrs", from_rows="src_indices", to_rows="dst_indices"
)
def transfer_cache_dsv4_mla(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    block_size: int = 1024,
) -> None:
    """Rows of V4 in padded pages of 64, of every layer, between memories that are known by address alone.

    ``src_ptrs`` and ``dst_ptrs`` are [layers] uint64 on the GPU, indices [n] int64. Addresses and rows are
    taken at the caller's word, as SGLang's are; a negative row is skipped.
    """
    copy_rows_at(src_ptrs, dst_ptrs, src_indices, dst_indices, layout=_DSV4, page_size=_DSV4_PAGE)
