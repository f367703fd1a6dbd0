"""DeepGEMM's functions of the lightning indexer over :func:`mla_fp8.index_logits`, argument for argument.

``import mla_fp8.compat.deep_gemm as deep_gemm``. Any number of drafts and up to 64 heads; no schedule is
needed, so the one that callers make and pass on is not looked at. Logits are always clean: -inf where a row
sees no key. A NaN key or scale makes a NaN logit, where DeepGEMM makes it 0. Whoever selects afterwards saves
the logits with :func:`mla_fp8.index_topk`, which takes the same tensors.

``fp8_fp4_*`` take queries as a pair (q, scales), in FP4, or in FP8 with None. Errors have the callers' names
of arguments.
"""

import torch

from ..index_layout import INDEX_LAYOUTS
from ..ops.index_logits import index_logits, index_logits_ragged
from ._names import also_named, caller_names

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
]

Queries = tuple[torch.Tensor, torch.Tensor | None]
_PAGED = caller_names(
    index_cache="kv_cache", page_table="block_table", seq_lens="context_lens", row_lens="context_lens",
    width="max_context_len", q_scale="q[1]",
)  # fmt: skip
_RAGGED = caller_names(
    k="kv[0]", k_scale="kv[1]", k_start="cu_seq_len_k_start", k_end="cu_seq_len_k_end", q_scale="q[1]"
)


def get_num_sms() -> int:
    """Multiprocessors of the current GPU; 1 without one."""
    if not torch.cuda.is_available():
        return 1
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    """``[num_sms + 1, 2]`` int32, as the schedule of DeepGEMM; zeros, as nothing here needs one."""
    del block_kv
    _no_indices("get_paged_mqa_logits_metadata", indices)
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


@_PAGED
def fp8_fp4_paged_mqa_logits(
    q: Queries,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> torch.Tensor:
    """``[batch * next_n, max_context_len]`` logits over pages, computed in float32.

    q: ``[batch, next_n, heads, 128]`` e4m3fn and None, with kv_cache ``[num_pages, page_size, 1, 132]``; or
    ``[batch, next_n, heads, 64]`` e2m1 and its ue8m0 scales ``[batch, next_n, heads]`` int32, with kv_cache
    ``[num_pages, page_size, 1, 68]``. weights ``[batch * next_n, heads]`` float32. context_lens ``[batch]``:
    tokens with all drafts, of which draft j sees all but the last next_n - 1 - j; or ``[batch, next_n]``:
    what each draft sees. ValueError for ``indices``.
    """
    del schedule_meta, clean_logits
    name = "fp8_fp4_paged_mqa_logits"
    _no_indices(name, indices)
    values, scales = _queries(name, q)
    if values.dim() != 4 or kv_cache.dim() != 4:
        raise RuntimeError(
            "mla_fp8.compat.deep_gemm: q and kv_cache must have 4 dimensions, got "
            f"{list(values.shape)} and {list(kv_cache.shape)}"
        )
    layout = INDEX_LAYOUTS["index_fp8" if scales is None else "index_fp4"]
    per_row = context_lens.dim() == 2
    lens = context_lens.flatten().contiguous()  # DeepGEMM takes a slice of a buffer
    logits = index_logits(
        values, weights, kv_cache, block_table, None if per_row else lens,
        layout=layout, page_size=kv_cache.shape[1], width=max_context_len,
        q_scale=None if scales is None else scales.flatten(0, 1), row_lens=lens if per_row else None,
        next_n=values.shape[1],
    )  # fmt: skip
    return logits.to(logits_dtype)


@also_named(fused_kv_cache="kv_cache")
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: None = None,
) -> torch.Tensor:
    """:func:`fp8_fp4_paged_mqa_logits` of FP8. Older versions call kv_cache ``fused_kv_cache``."""
    return fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits,
        logits_dtype, indices,
    )  # fmt: skip


@_RAGGED
def fp8_fp4_mqa_logits(
    q: Queries,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``[rows, keys]`` logits; row r sees keys cu_seq_len_k_start[r] .. cu_seq_len_k_end[r] - 1.

    q: ``[rows, heads, 128]`` e4m3fn and None, with kv ``[keys, 128]`` e4m3fn and ``[keys]`` float32; or
    ``[rows, heads, 64]`` e2m1 and its ue8m0 scales ``[rows, heads]`` int32, with kv ``[keys, 64]`` e2m1 and
    ``[keys]`` int32. weights ``[rows, heads]`` float32. With ``max_seqlen_k`` the logits are ``[rows,
    max_seqlen_k]``, each row's from its first key on.
    """
    del clean_logits
    values, scales = _queries("fp8_fp4_mqa_logits", q)
    keys, key_scales = kv
    start, end = cu_seq_len_k_start.contiguous(), cu_seq_len_k_end.contiguous()
    key_scales = key_scales.flatten() if key_scales.dtype.itemsize == 4 else key_scales
    logits = index_logits_ragged(values, weights, keys, key_scales, start, end, q_scale=scales)
    if max_seqlen_k:
        column = start.clamp_min(0)[:, None] + torch.arange(max_seqlen_k, device=start.device)
        seen = column < end.clamp_max(len(keys))[:, None]
        logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        logits = logits.gather(1, torch.where(seen, column, len(keys)))
    return logits.to(logits_dtype)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """:func:`fp8_fp4_mqa_logits` of FP8."""
    return fp8_fp4_mqa_logits(
        (q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, logits_dtype
    )


def _queries(function: str, q: Queries) -> Queries:
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise ValueError(
            f"{function}: q must be a pair of queries and their scales or None, got {type(q).__name__}"
        )
    return q[0], q[1]


def _no_indices(function: str, indices: None) -> None:
    if indices is not None:
        raise ValueError(f"{function}: indices must be None, got {type(indices).__name__}")
