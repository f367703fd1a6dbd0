"""The specification in plain PyTorch, behind the same signatures: for checking, not for serving."""

from typing import Any

import torch

from .. import reference
from ..layout import KVLayout
from .native import Pair, Triple


def sparse_prefill_paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    layout: KVLayout,
    page_size: int,
    sm_scale: float,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_kv_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_page_size: int | None = None,
    scale: torch.Tensor | None = None,
) -> Triple:
    def rows(cache: torch.Tensor, size: int) -> torch.Tensor:
        return reference.dequantize_cache(cache, layout=layout, page_size=size, scale=scale)

    scopes = [(rows(kv_cache, page_size), indices, topk_length)]
    if extra_kv_cache is not None and extra_indices is not None and extra_page_size is not None:
        scopes.append((rows(extra_kv_cache, extra_page_size), extra_indices, extra_topk_length))
    return reference.sparse_attention(q, scopes, sm_scale=sm_scale, attn_sink=attn_sink)


def sparse_prefill_window(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    window_size: int,
    **options: Any,
) -> Triple:
    slots = reference.window_slots(
        page_table, query_start_loc, seq_lens, num_tokens=len(q), page_size=page_size, window_size=window_size
    )
    return sparse_prefill_paged(q, kv_cache, slots, page_size=page_size, **options)


def sparse_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    batch_invariant: bool = False,
    **options: Any,
) -> Pair:
    out, _, lse = sparse_prefill_paged(q, kv_cache, indices, **options)
    return out, lse


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    *,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> Triple:
    scopes = [(kv, indices, topk_length)]
    return reference.sparse_attention(q, scopes, sm_scale=sm_scale, attn_sink=attn_sink)
