"""SGLang's helpers of the sparse prefill of DeepSeek V4, by its names and argument order.

Public versions differ: ``total_swa`` of build_swa_token_ids is optional, as the older ones lack it, and
``query_pos`` of combine_topk_swa_indices, the third argument in newer ones, is taken by keyword only.
Bad input raises RuntimeError from the op, under our argument names.
"""

import torch

from ..layout import KV_LAYOUTS
from ..ops.build_swa_token_ids import build_swa_token_ids as _build_swa_token_ids
from ..ops.combine_topk_swa_indices import combine_topk_swa_indices as _combine_topk_swa_indices
from ..ops.combine_topk_swa_indices import combined_width
from ..ops.dequantize_kv import dequantize_kv


def dequantize_k_cache_paged(
    quant_k_cache: torch.Tensor,
    page_table_1_flattened: torch.Tensor,
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather tokens of a ``dsv4`` cache as bf16, [num_tokens, 1, 512]. See :func:`mla_fp8.dequantize_kv`.

    ``quant_k_cache`` is [num_pages, page bytes], typed as any one-byte dtype or bf16, and
    ``page_table_1_flattened`` int32 or int64 token ids: page * page_size + row, zeros outside the cache.
    ``out`` may be a slice of a larger workspace; it is returned.
    """
    layout = KV_LAYOUTS["dsv4"]
    if out is not None and (out.dim() != 3 or out.shape[1] != 1):
        raise ValueError(
            f"dequantize_k_cache_paged: out must have shape [num_tokens, 1, {layout.head_dim_qk}], "
            f"got {[*out.shape]}"
        )
    rows = None if out is None else out[:, 0]
    result = dequantize_kv(
        quant_k_cache, page_table_1_flattened, layout=layout, page_size=page_size, out=rows
    )
    return result[:, None] if out is None else out


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
        gathered = torch.minimum(seq_lens, extend_seq_lens + (swa_window - 1)).clamp_min(0)
        total_swa = int(gathered.sum())
    return _build_swa_token_ids(
        seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa,
        window_size=swa_window, capacity=total_swa,
    )  # fmt: skip
