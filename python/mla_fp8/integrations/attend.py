"""Attention as engines call it: into their tensors, on our kernels, with no other kernel around them."""

from typing import Any

from torch import Tensor

from ..arch import arch_of
from ..compat.flash_mla import aligned, index_rows
from ..layout import KVLayout
from ..ops.sparse_decode import plan_shared_keys, sparse_decode
from ..ops.sparse_prefill import sparse_prefill, sparse_prefill_window
from . import same_bits
from .drafts import ALONE, Group

__all__ = ["over_pages", "over_rows", "over_windows"]


def over_pages(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    layout: KVLayout,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    group: Group = ALONE,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of :func:`mla_fp8.sparse_decode`, and its arguments; ``out`` is written in place.

    Prompts, too: over pages its plan is that of :func:`mla_fp8.sparse_prefill_paged` for them.
    """
    q, indices = aligned(q), index_rows(indices)
    batch_invariant = batch_invariant or same_bits.on()
    if group.queries > 1 and not batch_invariant and _knows_shared_keys(q):
        options |= {"query_groups": group.queries, "query_start_loc": group.starts}
        if group.layers is not None:
            options["shared_keys"] = _shared_lists(q, kv_cache, indices, layout, group, options)
    return sparse_decode(
        q, kv_cache, indices, layout=layout, **options, out=out, batch_invariant=batch_invariant,
        backend="native",
    )  # fmt: skip


def over_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    out: Tensor | None = None,
    max_logits: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """(out, lse) of :func:`mla_fp8.sparse_prefill`, or (out, max_logits, lse), written into ``out``.

    With batch_invariant there are no largest logits: None.
    """
    q, kv, indices = aligned(q), aligned(kv), index_rows(indices)
    if same_bits.on():
        options |= {"batch_invariant": True, "return_max_logits": False}
        out, lse = sparse_prefill(q, kv, indices, **options, out=out, backend="native")
        return (out, None, lse) if max_logits else (out, lse)  # type: ignore[return-value]
    return sparse_prefill(q, kv, indices, **options, out=out, return_max_logits=max_logits, backend="native")


def over_windows(
    q: Tensor, kv_cache: Tensor, *geometry: Tensor, layout: KVLayout, out: Tensor, **options: Any
) -> None:
    """:func:`mla_fp8.sparse_prefill_window`; ``out`` is written in place."""
    sparse_prefill_window(
        aligned(q), kv_cache, *geometry, layout=layout, **options, out=out, return_max_logits=False,
        batch_invariant=same_bits.on(), backend="native",
    )  # fmt: skip


def _knows_shared_keys(q: Tensor) -> bool:
    return arch_of(q.device.type, q.device.index) in ("cpu", "sm90")


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
    names = ("topk_length", "extra_indices", "extra_topk_length", "query_start_loc")
    tensors: dict[str, Any] = {name: options.get(name) for name in names}
    shapes = (indices.shape, layout.name, *given.values())
    shapes += tuple(None if x is None else x.shape for x in tensors.values())
    return group.layers.lists(shapes, lambda: plan_shared_keys(indices, layout=layout, **given, **tensors))
