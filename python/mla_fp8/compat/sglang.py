"""SGLang's helpers of the sparse prefill of DeepSeek V3.2 and V4, by its names and argument order.

Public versions differ: ``total_swa`` of build_swa_token_ids is optional, as the older ones lack it, and
``query_pos`` of combine_topk_swa_indices, the third argument in newer ones, is taken by keyword only.
``dequantize_k_cache_paged`` was the name of two functions in two modules; newer versions, and this module,
tell them apart by the model. Bad input raises the op's RuntimeError, with the caller's names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._arguments import need_tensors
from ..layout import KV_LAYOUTS, KVLayout
from ..ops.build_swa_token_ids import build_swa_token_ids as _build_swa_token_ids
from ..ops.combine_topk_swa_indices import combine_topk_swa_indices as _combine_topk_swa_indices
from ..ops.combine_topk_swa_indices import combined_width
from ..ops.dequantize_kv import dequantize_kv
from ..prefill.checks import expect_lengths
from ..prefill.lengths import bounded_lengths
from ._names import caller_names
from .sglang_hisparse import (
    copy_cache_planned_mla,
    load_cache_to_device_buffer_dsv4_mla,
    load_cache_to_device_buffer_mla,
    transfer_cache_dsv4_mla,
)

_GATHER = caller_names(kv_cache="quant_k_cache", slots="page_table_1_flattened")

__all__ = [
    "CompressedGather",
    "SparsePrefillChunkCache",
    "build_swa_token_ids",
    "combine_topk_swa_indices",
    "copy_cache_planned_mla",
    "dequantize_k_cache_paged",
    "dequantize_k_cache_paged_dsa",
    "dequantize_k_cache_paged_dsv4",
    "dsv4_kv_layouts",
    "load_cache_to_device_buffer_dsv4_mla",
    "load_cache_to_device_buffer_mla",
    "transfer_cache_dsv4_mla",
]

# SGLang's names of the layouts of V4 and V4.1 (its KVLayout).
LAYOUTS = {"v4": "dsv4", "v41": "dsv41", "v41_fp4": "dsv41_fp4"}


def dsv4_kv_layouts(
    kv_layout: str = "v4", compressed_layout: str = "auto", *, compress_ratio: int = 0
) -> tuple[KVLayout, KVLayout]:
    """(of the window, of a layer's compressed entries) by SGLang's switches for DeepSeek V4 and V4.1.

    ``kv_layout`` is SGLANG_DSV4_KV_LAYOUT, ``v4`` or ``v41`` (its ``auto`` looks at the GPU and at FlashMLA:
    here it has to be said). ``compressed_layout`` is SGLANG_DSV4_COMPRESSED_KV_LAYOUT: ``fp8`` as the window,
    ``fp4``, or ``auto``: V4.1's entries of 1 or 2 tokens in FP4. ValueError for any other.
    """
    if kv_layout not in ("v4", "v41"):
        raise ValueError(f"dsv4_kv_layouts: kv_layout must be v4 or v41, got {kv_layout!r}")
    if compressed_layout not in ("auto", "fp8", "fp4"):
        raise ValueError(
            f"dsv4_kv_layouts: compressed_layout must be auto, fp8 or fp4, got {compressed_layout!r}"
        )
    by_ratio = compressed_layout == "auto" and kv_layout == "v41" and compress_ratio in (1, 2)
    entries = "v41_fp4" if by_ratio or compressed_layout == "fp4" else kv_layout
    return KV_LAYOUTS[LAYOUTS[kv_layout]], KV_LAYOUTS[LAYOUTS[entries]]


@_GATHER
def dequantize_k_cache_paged(
    quant_k_cache: torch.Tensor,
    page_table_1_flattened: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
    layout: str = "v4",
) -> torch.Tensor:
    """Gather tokens of a cache of V4 or V4.1 as bf16, [num_tokens, 1, 512]: :func:`mla_fp8.dequantize_kv`.

    ``layout`` is SGLang's name: v4, v41 or v41_fp4. ``quant_k_cache`` is [num_pages, page bytes], typed as
    any one-byte dtype or bf16, and ``page_table_1_flattened`` int32 or int64 token ids: page * page_size +
    row, zeros outside the cache. ``out`` may be a slice of a larger workspace; it is returned.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"dequantize_k_cache_paged: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}"
        )
    ours = KV_LAYOUTS[LAYOUTS[layout]]
    if quant_k_cache.dtype is torch.bfloat16:  # SGLang's pool of bytes
        quant_k_cache = quant_k_cache.view(torch.uint8)
    if out is not None and (out.dim() != 3 or out.shape[1] != 1):
        raise ValueError(
            f"dequantize_k_cache_paged: out must have shape [num_tokens, 1, {ours.head_dim_qk}], "
            f"got {[*out.shape]}"
        )
    rows = None if out is None else out[:, 0]
    result = dequantize_kv(quant_k_cache, page_table_1_flattened, layout=ours, page_size=page_size, out=rows)
    return result[:, None] if out is None else out


dequantize_k_cache_paged_dsv4 = dequantize_k_cache_paged


@_GATHER
def dequantize_k_cache_paged_dsa(
    quant_k_cache: torch.Tensor, page_table_1_flattened: torch.Tensor, group_size: int = 128
) -> torch.Tensor:
    """Gather tokens of a ``dsv32`` cache as bf16, [num_tokens, 1, 576]. See :func:`mla_fp8.dequantize_kv`.

    ``quant_k_cache`` is [num_tokens, 1, row bytes] or [num_pages, page_size, 1, row bytes] e4m3fn, its pages
    at any distance, and ``group_size`` the elements of a scale: 128.
    """
    layout = KV_LAYOUTS["dsv32"]
    if group_size != layout.tile_dim:
        raise ValueError(f"dequantize_k_cache_paged: group_size must be {layout.tile_dim}, got {group_size}")
    shape = [*quant_k_cache.shape]
    if len(shape) not in (3, 4) or shape[-2:] != [1, layout.bytes_per_token]:
        raise ValueError(
            "dequantize_k_cache_paged: quant_k_cache must have shape [num_tokens, 1, "
            f"{layout.bytes_per_token}] or [num_pages, page_size, 1, {layout.bytes_per_token}], got {shape}"
        )
    pages = quant_k_cache[:, None] if len(shape) == 3 else quant_k_cache
    slots = page_table_1_flattened
    return dequantize_kv(pages, slots, layout=layout, page_size=pages.shape[1])[:, None]


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    compressed_base: torch.Tensor,
    swa_base: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    out_indices: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
    *,
    query_pos: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mla_fp8.combine_topk_swa_indices`; either buffer may be given alone.

    ``out_indices`` need not hold -1 beforehand: whole rows are written.
    """
    need_tensors("combine_topk_swa_indices", topk_indices=topk_indices)
    num_tokens = topk_indices.shape[0]
    if out_indices is None and out_lens is not None:
        out_indices = out_lens.new_empty((num_tokens, combined_width(topk, window_size)))
    elif out_indices is not None and out_lens is None:
        out_lens = out_indices.new_empty((num_tokens,))
    return _combine_topk_swa_indices(
        topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base,
        window_size=window_size, compress_ratio=compress_ratio, topk=topk, query_pos=query_pos,
        out_indices=out_indices, out_lens=out_lens,
    )  # fmt: skip


@caller_names(window_size="swa_window", capacity="total_swa")
def build_swa_token_ids(
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa: torch.Tensor,
    swa_window: int,
    total_swa: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`mla_fp8.build_swa_token_ids`: (token ids, first positions, gather lengths, offsets).

    ``total_swa``, the number of token ids, comes from lengths that the caller knows on the host. Without it,
    as in older versions of SGLang, it is read from the device, which waits for it.
    """
    if total_swa is None:
        gathered = torch.minimum(seq_lens, extend_seq_lens.long() + (swa_window - 1)).clamp_min(0)
        total_swa = int(gathered.sum())
    return _build_swa_token_ids(
        seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa,
        window_size=swa_window, capacity=total_swa,
    )  # fmt: skip


@dataclass
class CompressedGather:
    """One compressed cache in the workspace: which tokens it holds, and where each request begins."""

    flat_token_ids: torch.Tensor
    compressed_base: torch.Tensor
    swa_base: torch.Tensor
    combined_indices: torch.Tensor | None = None
    combined_lens: torch.Tensor | None = None


@dataclass
class SparsePrefillChunkCache:
    """SGLang's chunk cache (as of 0.5.23) over our ops: it hands out indices and leaves attention to SGLang.

    :class:`mla_fp8.SparsePrefillChunkCache` is ours, with attention and without SGLang's metadata.
    """

    num_reqs: int
    num_qo_tokens: int
    max_seq_len: int
    swa_window_size: int
    swa_page_size: int
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_pos: torch.Tensor
    swa_token_ids: torch.Tensor
    swa_first_pos: torch.Tensor
    swa_gather_lens: torch.Tensor
    swa_offsets: torch.Tensor
    seq_lens_cpu: list[int]
    c0_combined_indices: torch.Tensor = field(init=False)
    c0_combined_lens: torch.Tensor = field(init=False)
    compressed: dict[int, CompressedGather] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        query_pos: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
        full_to_swa: torch.Tensor,
        swa_window_size: int,
        swa_page_size: int,
        num_qo_tokens: int,
        max_seq_len: int,
        total_swa: int,
        request_window_layout: None = None,
        seq_lens_cpu: Sequence[int] | None = None,
    ) -> "SparsePrefillChunkCache":
        """Without ``seq_lens_cpu`` the lengths are read from the device, which waits for it.

        A length on the device that is negative counts as 0, a ``seq_len`` above that of ``seq_lens_cpu`` as
        that one. ``request_window_layout``, of SGLang's own window buffers, has to be None (ValueError).
        """
        if request_window_layout is not None:
            raise ValueError(
                "mla_fp8.compat.sglang.SparsePrefillChunkCache: request_window_layout must be None"
            )
        if seq_lens_cpu is None:
            seq_lens_cpu = seq_lens.clamp_min(0).tolist()
        name = "mla_fp8.compat.sglang.SparsePrefillChunkCache"
        seq_lens_cpu = expect_lengths(name, "seq_lens_cpu", seq_lens_cpu, len(seq_lens))
        seq_lens = bounded_lengths(seq_lens, seq_lens_cpu)
        query_lens = bounded_lengths(query_lens, [num_qo_tokens] * len(query_lens))
        ids, first_pos, gather_lens, offsets = build_swa_token_ids(
            seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa, swa_window_size, total_swa
        )
        # Past total_swa there is no row: a request that has no room for its window has none.
        swa = ids, first_pos, gather_lens.where(offsets[1:] <= len(ids), 0), offsets
        cache = cls(
            len(seq_lens), num_qo_tokens, max_seq_len, swa_window_size, swa_page_size, seq_lens,
            torch.nn.functional.pad(query_lens.cumsum(0).clamp_max(num_qo_tokens), (1, 0)).int(),
            query_pos, *swa, seq_lens_cpu=seq_lens_cpu,
        )  # fmt: skip
        no_topk, no_base = query_pos.new_empty(num_qo_tokens, 0), torch.zeros_like(seq_lens)
        cache.c0_combined_indices, cache.c0_combined_lens = cache._combine(
            no_topk, CompressedGather(ids, no_base, offsets[:-1]), compress_ratio=1
        )
        return cache

    def layer_inputs(
        self, compress_ratio: int, core_attn_metadata: Any, c_page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(flat_token_ids, combined_indices, combined_lens) from SGLang's attention metadata."""
        if compress_ratio == 128:
            gather = self.ensure_c128(core_attn_metadata.sparse_page_indices(128))
        else:
            gather = self.ensure_compressed(compress_ratio, core_attn_metadata.page_table, c_page_size)
            raw_indices = core_attn_metadata.sparse_raw_indices(compress_ratio)
            self.combine_compressed(compress_ratio, raw_indices[: self.num_qo_tokens])
        assert gather.combined_indices is not None and gather.combined_lens is not None  # for mypy
        return gather.flat_token_ids, gather.combined_indices, gather.combined_lens

    def ensure_c128(self, c128_page_indices: torch.Tensor) -> CompressedGather:
        """``c128_page_indices[q, j]``: the slot of entry j for query q, -1 beyond its past.

        The last query of a request sees all of its entries.
        """
        if 128 not in self.compressed:
            longest = max(self.max_seq_len // 128, 1)
            if longest > c128_page_indices.shape[1]:
                raise ValueError(
                    "mla_fp8.compat.sglang.SparsePrefillChunkCache: c128_page_indices must have at least "
                    f"{longest} columns, got "
                    f"{c128_page_indices.shape[1]}"
                )
            last = (self.query_start_loc[1:] - 1).clamp_min(0).long()
            slots = self._rows_of_queries("c128_page_indices", c128_page_indices)[:, :longest][last]
            base = torch.arange(self.num_reqs, dtype=torch.int32, device=slots.device) * longest
            swa_base = self.num_reqs * longest + self.swa_offsets[:-1]
            gather = CompressedGather(slots.flatten().clamp_min(0).int(), base, swa_base)
            every = torch.arange(longest, dtype=torch.int32, device=slots.device)
            gather.combined_indices, gather.combined_lens = self._combine(
                every.expand(self.num_qo_tokens, -1).contiguous(), gather, compress_ratio=128
            )
            self.compressed[128] = gather
        return self.compressed[128]

    def ensure_compressed(
        self, compress_ratio: int, page_table: torch.Tensor, c_page_size: int
    ) -> CompressedGather:
        """``page_table`` is [num_qo_tokens, max_pages]: a request's queries have equal rows."""
        if compress_ratio not in self.compressed:
            lengths = [n // compress_ratio for n in self.seq_lens_cpu]
            if max(lengths, default=0) > page_table.shape[1] * c_page_size:
                raise ValueError(
                    f"mla_fp8.compat.sglang.SparsePrefillChunkCache: page_table must reach {max(lengths)} "
                    "entries of "
                    f"c{compress_ratio}, got {page_table.shape[1]} pages of {c_page_size}"
                )
            ends = (self.seq_lens // compress_ratio).cumsum(0).int()
            base = ends - self.seq_lens // compress_ratio
            row = torch.arange(sum(lengths), dtype=torch.int32, device=ends.device)
            request = torch.searchsorted(ends, row, right=True).clamp_max(self.num_reqs - 1)
            pages = self._rows_of_queries("page_table", page_table)
            query = self.query_start_loc[request].clamp_max(len(pages) - 1)
            pos = row - base[request]
            slot = pages[query, pos // c_page_size] * c_page_size + pos % c_page_size
            self.compressed[compress_ratio] = CompressedGather(
                slot.clamp_min(0).int(), base, sum(lengths) + self.swa_offsets[:-1]
            )
        return self.compressed[compress_ratio]

    def _rows_of_queries(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """A row for each query, and a row of no slot for a chunk without queries."""
        if len(table) < self.num_qo_tokens:
            raise ValueError(
                f"SparsePrefillChunkCache: {name} must have at least {self.num_qo_tokens} rows, "
                f"got {len(table)}"
            )
        return table if len(table) else table.new_full((1, table.shape[1]), -1)

    def combine_compressed(
        self, compress_ratio: int, sparse_raw_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, lengths) of a layer whose indexer chose these request-local entries."""
        gather = self.compressed[compress_ratio]
        gather.combined_indices, gather.combined_lens = self._combine(
            sparse_raw_indices, gather, compress_ratio,
            out_indices=gather.combined_indices, out_lens=gather.combined_lens,
        )  # fmt: skip
        return gather.combined_indices, gather.combined_lens

    def _combine(
        self,
        topk_indices: torch.Tensor,
        gather: CompressedGather,
        compress_ratio: int,
        out_indices: torch.Tensor | None = None,
        out_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if out_indices is None or out_lens is None:
            width = combined_width(topk_indices.shape[1], self.swa_window_size)
            out_indices = topk_indices.new_empty((self.num_qo_tokens, width))
            out_lens = topk_indices.new_empty((self.num_qo_tokens,))
        return _combine_topk_swa_indices(
            topk_indices, self.query_start_loc, self.seq_lens, self.swa_gather_lens,
            gather.compressed_base, gather.swa_base,
            window_size=self.swa_window_size, compress_ratio=compress_ratio, topk=topk_indices.shape[1],
            query_pos=self.query_pos, compressed_lens=self.seq_lens // compress_ratio,
            out_indices=out_indices, out_lens=out_lens,
        )  # fmt: skip
