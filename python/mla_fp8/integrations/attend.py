"""Attention as engines call it: into their tensors, on our kernels, with no other kernel around them."""

from typing import Any

import torch
from torch import Tensor

from ..arch import arch_of
from ..compat.flash_mla import aligned, index_rows
from ..layout import HEAD_DIM_V, KVLayout
from ..ops.sparse_decode import sparse_attention_workspace

# From here on a batch is a prompt: `sparse_prefill_paged` is the faster op. On an H200, dsv32, top-k 2048,
# 256 rows take 87 us with 16 heads and 122 with 32; `sparse_decode` takes 105 and 118.
PREFILL_ROWS, PREFILL_HEADS = 256, 16


def is_prefill(num_rows: int, num_heads: int) -> bool:
    """Whether :func:`over_pages` takes the op for prompts."""
    return num_rows >= PREFILL_ROWS and num_heads <= PREFILL_HEADS


def over_pages(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    layout: KVLayout,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`mla_fp8.sparse_decode`, and its arguments; ``out`` is written in place."""
    q, indices = aligned(q), index_rows(indices)
    out, lse = _outputs(q, out)
    options |= {"layout": layout.id, "out": out, "lse": lse, "workspace": _workspace(q, batch_invariant)}
    if is_prefill(*q.shape[:2]) and not batch_invariant:
        torch.ops.mla_fp8.sparse_prefill_paged_out(q, kv_cache, indices, **options, max_logits=None)
    else:
        torch.ops.mla_fp8.sparse_decode_out(q, kv_cache, indices, **options, batch_invariant=batch_invariant)
    return out, lse


def over_rows(
    q: Tensor, kv: Tensor, indices: Tensor, *, out: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, max_logits, lse) of :func:`mla_fp8.sparse_prefill`; ``out`` is written in place."""
    q, kv, indices = aligned(q), aligned(kv), index_rows(indices)
    out, lse = _outputs(q, out)
    max_logits = torch.empty_like(lse)
    options |= {"out": out, "max_logits": max_logits, "lse": lse, "workspace": _workspace(q)}
    torch.ops.mla_fp8.sparse_prefill_out(q, kv, indices, **options)
    return out, max_logits, lse


def over_windows(
    q: Tensor, kv_cache: Tensor, *geometry: Tensor, layout: KVLayout, out: Tensor, **options: Any
) -> None:
    """:func:`mla_fp8.sparse_prefill_window`; ``out`` is written in place."""
    q = aligned(q)
    _, lse = _outputs(q, out)
    torch.ops.mla_fp8.sparse_prefill_window_out(
        q,
        kv_cache,
        *geometry,
        layout=layout.id,
        **options,
        out=out,
        max_logits=None,
        lse=lse,
        workspace=_workspace(q),
    )


def _workspace(q: Tensor, batch_invariant: bool = False) -> Tensor | None:
    """What lets several CTAs share a token's keys; None where kernels need none for that."""
    if arch_of(q.device.type, q.device.index) in ("cpu", "sm90"):
        return None
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    tokens, heads = q.shape[:2]
    elements = sparse_attention_workspace(
        tokens, num_q_heads=heads, num_sms=sms, batch_invariant=batch_invariant
    )
    return torch.empty(elements, dtype=torch.float32, device=q.device)


def _outputs(q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:2], HEAD_DIM_V) if out is None else out, lse
