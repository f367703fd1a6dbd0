"""DeepGEMM's functions of the lightning indexer over :func:`mla_fp8.index_logits`, argument for argument.

``import mla_fp8.compat.deep_gemm as deep_gemm``. Any number of drafts and up to 64 heads; no schedule is
needed, so the one that callers make and pass on is not looked at. Logits are always clean: -inf where a row
sees no key. A NaN key or scale makes a NaN logit, where DeepGEMM makes it 0. Whoever selects afterwards saves
the logits with :func:`mla_fp8.index_topk`, which takes the same tensors.
"""

import torch

from ..index_layout import INDEX_LAYOUTS
from ..ops.index_logits import index_logits, index_logits_ragged

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

_LAYOUT = INDEX_LAYOUTS["index_fp8"]


def get_paged_mqa_logits_metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """``[num_sms + 1, 2]`` int32, as the schedule of DeepGEMM; zeros, as nothing here needs one."""
    del block_kv
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    fused_kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """``[batch * next_n, max_context_len]`` float32 logits over pages.

    q ``[batch, next_n, heads, 128]`` e4m3fn, fused_kv_cache ``[num_pages, page_size, 1, 132]``, weights
    ``[batch * next_n, heads]`` float32. context_lens ``[batch]``: tokens with all drafts, of which draft j
    sees all but the last next_n - 1 - j; or ``[batch, next_n]``: what each draft sees.
    """
    del schedule_meta, clean_logits
    if q.dim() != 4 or fused_kv_cache.dim() != 4:
        raise RuntimeError(
            "mla_fp8.compat.deep_gemm: q and fused_kv_cache must have 4 dimensions, got "
            f"{list(q.shape)} and {list(fused_kv_cache.shape)}"
        )
    per_row = context_lens.dim() == 2
    return index_logits(
        q,
        weights,
        fused_kv_cache,
        block_table,
        None if per_row else context_lens,
        layout=_LAYOUT,
        page_size=fused_kv_cache.shape[1],
        width=max_context_len,
        row_lens=context_lens.flatten() if per_row else None,
        next_n=q.shape[1],
    )


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
) -> torch.Tensor:
    """``[rows, keys]`` float32 logits; row r sees keys cu_seq_len_k_start[r] .. cu_seq_len_k_end[r] - 1.

    q ``[rows, heads, 128]`` e4m3fn, kv: ``[keys, 128]`` e4m3fn and ``[keys]`` float32, weights
    ``[rows, heads]`` float32.
    """
    del clean_logits
    keys, scales = kv
    return index_logits_ragged(q, weights, keys, scales.flatten(), cu_seq_len_k_start, cu_seq_len_k_end)
