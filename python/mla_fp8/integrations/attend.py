"""Attention as engines call it: into their tensors, on our kernels, with no other kernel around them."""

from typing import Any

import torch
from torch import Tensor

from ..arch import arch_of
from ..compat.flash_mla import aligned, index_rows
from ..layout import HEAD_DIM_V, KVLayout
from ..ops.sparse_decode import plan_shared_keys, shared_keys_shape, sparse_attention_workspace
from .drafts import ALONE, Group

# From here on a batch is a prompt: `sparse_prefill_paged` is the faster op. On an H200, dsv32, top-k 2048,
# 256 rows take 87 us with 16 heads and 122 with 32; `sparse_decode` takes 105 and 118.
PREFILL_ROWS, PREFILL_HEADS = 256, 16
# Decode on Hopper has use for a workspace from so many heads on, where so many CTAs of each token, of at most
# so many heads each, are on the GPU at once (csrc/cuda/sparse_attention/plan_parts.h).
MEETING_HEADS, MEETING_CTAS, CTA_HEADS = 17, 2, 64


def is_prefill(num_rows: int, num_heads: int) -> bool:
    """Whether :func:`over_pages` takes the op for prompts."""
    return num_rows >= PREFILL_ROWS and num_heads <= PREFILL_HEADS


def over_pages(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    layout: KVLayout,
    extra_layout: KVLayout | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    group: Group = ALONE,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`mla_fp8.sparse_decode`, and its arguments; ``out`` is written in place."""
    if extra_layout not in (None, layout):
        options["extra_layout"] = extra_layout.id
    q, indices = aligned(q), index_rows(indices)
    out, lse = _outputs(q, out)
    floats = _floats(q, batch_invariant, decodes=not is_prefill(*q.shape[:2]))
    if group.queries > 1 and not batch_invariant and _has_own_kernels(q):
        options |= {"query_groups": group.queries}
        if group.layers is None:
            floats = max(floats, _floats_of_lists(q, indices, group, options.get("extra_indices")))
        else:
            options["shared_keys"] = _shared_lists(q, kv_cache, indices, layout, group, options)
    options |= {"layout": layout.id, "out": out, "lse": lse, "workspace": _workspace(q, floats)}
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
    options |= {"out": out, "max_logits": max_logits, "lse": lse, "workspace": _workspace(q, _floats(q))}
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
        workspace=_workspace(q, _floats(q, all_entries="extra_page_table" in options)),
    )


def _has_own_kernels(q: Tensor) -> bool:
    """Kernels which mostly need no workspace to share a token's keys, and know lists of shared keys."""
    return arch_of(q.device.type, q.device.index) in ("cpu", "sm90")


def _floats_of_lists(q: Tensor, indices: Tensor, group: Group, extra_indices: Tensor | None) -> int:
    tiles, words = shared_keys_shape(indices, group.queries, q.shape[1], extra_indices)
    return tiles * words


def _shared_lists(
    q: Tensor, kv_cache: Tensor, indices: Tensor, layout: KVLayout, group: Group, options: dict[str, Any]
) -> Tensor:
    """What :func:`mla_fp8.plan_shared_keys` makes once for layers with the same slots."""
    assert group.layers is not None
    given: dict[str, Any] = {
        "query_groups": group.queries,
        "num_q_heads": q.shape[1],
        "num_slots": len(kv_cache) * options["page_size"],
    }
    extra = options.get("extra_kv_cache")
    if extra is not None:
        given["extra_num_slots"] = len(extra) * options["extra_page_size"]
    tensors: dict[str, Any] = {
        name: options.get(name) for name in ("topk_length", "extra_indices", "extra_topk_length")
    }
    shapes = (indices.shape, layout.name, *given.values())
    shapes += tuple(None if x is None else x.shape for x in tensors.values())
    return group.layers.lists(shapes, lambda: plan_shared_keys(indices, layout=layout, **given, **tensors))


def _floats(
    q: Tensor, batch_invariant: bool = False, all_entries: bool = False, decodes: bool = False
) -> int:
    """Of what lets several CTAs share a token's keys; 0 where kernels need nothing for that."""
    if q.device.type == "cpu":
        return 0
    tokens, heads = q.shape[:2]
    may_meet = decodes and heads >= MEETING_HEADS
    has_own = _has_own_kernels(q) and not all_entries
    if has_own and not may_meet:
        return 0
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    if has_own and MEETING_CTAS * tokens * -(-heads // CTA_HEADS) > sms:
        return 0
    return sparse_attention_workspace(tokens, num_q_heads=heads, num_sms=sms, batch_invariant=batch_invariant)


def _workspace(q: Tensor, floats: int) -> Tensor | None:
    return torch.empty(floats, dtype=torch.float32, device=q.device) if floats else None


def _outputs(q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    return q.new_empty(*q.shape[:2], HEAD_DIM_V) if out is None else out, lse
