"""The kernels of this package."""

from typing import Any

import torch

from ..layout import KVLayout

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_ops = torch.ops.mla_fp8


def sparse_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, *, layout: KVLayout, **options: Any
) -> Pair:
    return _ops.sparse_decode(q, kv_cache, indices, layout=layout.id, **options)  # type: ignore[no-any-return]


def sparse_prefill_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, indices: torch.Tensor, *, layout: KVLayout, **options: Any
) -> Triple:
    return _ops.sparse_prefill_paged(q, kv_cache, indices, layout=layout.id, **options)  # type: ignore[no-any-return]


def sparse_prefill_window(
    q: torch.Tensor, kv_cache: torch.Tensor, *geometry: torch.Tensor, layout: KVLayout, **options: Any
) -> Triple:
    return _ops.sparse_prefill_window(q, kv_cache, *geometry, layout=layout.id, **options)  # type: ignore[no-any-return]


def sparse_prefill(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, **options: Any) -> Triple:
    return _ops.sparse_prefill(q, kv, indices, **options)  # type: ignore[no-any-return]
