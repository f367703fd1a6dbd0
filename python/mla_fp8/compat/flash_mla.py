"""The sparse attention calls of the ``flash_mla`` package, on any device, head count and page size we have.

Its conventions: lse is a natural logarithm and **+inf** where nothing is attended (our ops give -inf); decode
returns it as [batch, heads, seq]; inputs may have any strides. What our ops read in place is not copied.
Bad input raises ValueError, or RuntimeError from the op (:func:`mla_fp8.sparse_decode`,
:func:`mla_fp8.sparse_prefill`) under its own argument names.
"""

from dataclasses import dataclass

import torch

from .._arguments import expect_tensors, need_tensors
from ..layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout
from ..ops.sparse_decode import sparse_decode
from ..ops.sparse_prefill import sparse_prefill

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# The names of SGLang's fork. Rows of 528 bytes are of three formats: V41, V32_NO_ROPE, and V4.1's of FlashMLA
# itself since its release of 2026-09-30, which we do not have. So they have to be named.
_FORMATS = {
    name: KV_LAYOUTS[layout]
    for name, layout in {"V32": "dsv32", "V4": "dsv4", "V41": "dsv41", "V32_NO_ROPE": "dsv32_nope"}.items()
}
_ALIGNMENT = 16  # bytes, of the rows that our ops read


@dataclass
class FlashMLASchedMeta:
    """A schedule that stays empty: our kernels plan within each call, so one may serve any shapes."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """The (metadata, None) that callers pass to :func:`flash_mla_with_kvcache`. Arguments are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    kv_format: str | None = None,
    *,
    query_groups: int = 1,
    shared_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode from a packed FP8 cache. Returns ``(out, lse)``.

    ===========  =====================================  ===================  ===============================
    q            [batch, s_q, heads, 576 or 512]        bf16                 576 reads dsv32, 512 the others
    k_cache      [num_pages, page_size, 1, row bytes]   uint8, int8 or e4m3  any page stride
    indices      [batch, s_q, topk]                     int32                slots; outside: masked
    topk_length  [batch]                                int32                only the first n indices count
    attn_sink    [heads]                                fp32                 not part of lse
    extra_*      a second cache, its indices and lengths, in the same softmax: V4.1's FP4 rows by their size
    kv_format    that of k_cache, as SGLang names them: V32, V4 (by default by its size), V41, V32_NO_ROPE
    out          [batch, s_q, heads, 512]               bf16                 0 where nothing is attended
    lse          [batch, heads, s_q]                    fp32                 +inf if nothing
    ===========  =====================================  ===================  ===============================

    ``query_groups`` and ``shared_keys`` are not FlashMLA's: see :func:`mla_fp8.sparse_decode`. With
    ``query_groups=s_q`` the queries of a request share the keys that they have in common. Nobody but the
    caller can say whether they have enough: a gain from four fifths on, a loss with few.

    V41 has the scales of a page behind all of its rows. FlashMLA itself has had each row's scales behind the
    row since its release of 2026-09-30 (SGLang: V41_NEW), with as many bytes; there is no layout for that.
    So rows of 528 bytes without a ``kv_format`` raise ValueError.

    ``softmax_scale`` is ``q.shape[-1] ** -0.5`` by default. ``block_table``, ``cache_seqlens``,
    ``tile_scheduler_metadata`` and ``num_splits`` are not looked at. Dense decode (``indices`` None, or
    ``causal``) and bf16 caches are refused with ValueError.
    """
    if indices is None:
        raise ValueError(
            "flash_mla_with_kvcache: indices must be a tensor (dense decode is not here), got None"
        )
    name = "flash_mla_with_kvcache"
    need_tensors(name, q=q, k_cache=k_cache, indices=indices)
    expect_tensors(
        name, attn_sink=attn_sink, extra_k_cache=extra_k_cache, topk_length=topk_length,
        extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length,
    )  # fmt: skip
    _expect(name, "causal", False, causal)
    _expect(name, "is_fp8_kvcache", True, is_fp8_kvcache)
    _expect(name, "head_dim_v", HEAD_DIM_V, head_dim_v)
    _expect_shape(name, [None] * 4, q=q)
    _expect_shape(name, [None, None, 1, None], k_cache=k_cache, extra_k_cache=extra_k_cache)
    batch, s_q, heads, head_dim = q.shape
    per_query = {"indices": indices, "extra_indices_in_kvcache": extra_indices_in_kvcache}
    _expect_shape(name, [batch, s_q, None], **per_query)
    _expect_shape(name, [batch], topk_length=topk_length, extra_topk_length=extra_topk_length)
    extra_indices = extra_indices_in_kvcache
    if extra_indices is not None:
        extra_indices = index_rows(extra_indices.flatten(0, 1))
    layout = _layout(head_dim, k_cache, kv_format)
    out, lse = sparse_decode(
        aligned(q.flatten(0, 1)),
        k_cache,
        index_rows(indices.flatten(0, 1)),
        layout=layout,
        page_size=k_cache.shape[1],
        sm_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        topk_length=_per_token(topk_length, s_q),
        attn_sink=None if attn_sink is None else attn_sink.contiguous(),
        extra_kv_cache=extra_k_cache,
        extra_indices=extra_indices,
        extra_topk_length=_per_token(extra_topk_length, s_q),
        extra_page_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_layout=None if extra_k_cache is None else _extra_layout(layout, extra_k_cache),
        query_groups=query_groups,
        shared_keys=shared_keys,
        backend="native",
    )
    return out.view(batch, s_q, heads, HEAD_DIM_V), _empty_is_plus_inf(lse).view(batch, s_q, heads).mT


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill from bf16 rows. Returns ``(out, max_logits, lse)``.

    ===========  =========================  =====  ==========================================
    q            [s_q, heads, 576 or 512]   bf16
    kv           [s_kv, 1, 576 or 512]      bf16   V is the first 512 columns
    indices      [s_q, 1, topk]             int32  rows; outside [0, s_kv): masked
    attn_sink    [heads]                    fp32   not part of lse and max_logits
    topk_length  [s_q]                      int32  only the first n indices count
    out          [s_q, heads, 512]          bf16   0 where nothing is attended
    max_logits   [s_q, heads]               fp32   largest sm_scale * q.k, -inf if nothing
    lse          [s_q, heads]               fp32   +inf if nothing
    ===========  =========================  =====  ==========================================
    """
    need_tensors("flash_mla_sparse_fwd", q=q, kv=kv, indices=indices)
    expect_tensors("flash_mla_sparse_fwd", attn_sink=attn_sink, topk_length=topk_length)
    _expect("flash_mla_sparse_fwd", "d_v", HEAD_DIM_V, d_v)
    _expect_shape("flash_mla_sparse_fwd", [None] * 3, q=q)
    _expect_shape("flash_mla_sparse_fwd", [None, 1, q.shape[2]], kv=kv)
    _expect_shape("flash_mla_sparse_fwd", [q.shape[0], 1, None], indices=indices)
    out, max_logits, lse = sparse_prefill(
        aligned(q),
        aligned(kv[:, 0]),
        index_rows(indices[:, 0]),
        sm_scale=sm_scale,
        attn_sink=None if attn_sink is None else attn_sink.contiguous(),
        topk_length=None if topk_length is None else topk_length.contiguous(),
        backend="native",
    )
    return out, max_logits, _empty_is_plus_inf(lse)


def _expect(function: str, what: str, want: object, got: object) -> None:
    if got != want:
        raise ValueError(f"{function}: {what} must be {want}, got {got}")


def _expect_shape(function: str, want: list[int | None], **tensors: torch.Tensor | None) -> None:
    """None in ``want`` is any size."""
    for name, x in tensors.items():
        if x is not None and (
            x.dim() != len(want) or any(w not in (None, n) for w, n in zip(want, x.shape, strict=True))
        ):
            shape = ", ".join("*" if w is None else str(w) for w in want)
            raise ValueError(f"{function}: {name} must have shape [{shape}], got {[*x.shape]}")


def _layout(head_dim: int, k_cache: torch.Tensor, kv_format: str | None) -> KVLayout:
    """That of the name or, without one, the only one with the size of the cache's rows."""
    if kv_format not in (None, *_FORMATS):
        raise ValueError(
            f"flash_mla_with_kvcache: kv_format must be None or one of {', '.join(_FORMATS)}, "
            f"got {kv_format!r}"
        )
    possible = _FORMATS.values() if kv_format is None else (_FORMATS[kv_format],)
    row_bytes = k_cache.shape[-1] * k_cache.element_size()
    found = {
        name: layout
        for name, layout in _FORMATS.items()
        if layout in possible and (head_dim, row_bytes) == (layout.head_dim_qk, layout.bytes_per_token)
    }
    if len(found) > 1:
        raise ValueError(
            f"flash_mla_with_kvcache: kv_format must be {' or '.join(found)} for rows of {row_bytes} bytes, "
            "got None (V4.1's rows of FlashMLA since 2026-09-30, vLLM 0.33 and SGLang's V41_NEW are neither)"
        )
    if found:
        return next(iter(found.values()))
    known = " or ".join(dict.fromkeys(f"{x.head_dim_qk} with {x.bytes_per_token} bytes" for x in possible))
    raise ValueError(
        f"flash_mla_with_kvcache: head_dim of q and the bytes of a row of k_cache must be {known}, "
        f"got {head_dim} with {row_bytes} bytes"
    )


def _extra_layout(first: KVLayout, extra_k_cache: torch.Tensor) -> KVLayout:
    """Of those that may stand next to the first cache's, the one with the size of the second one's rows."""
    row_bytes = extra_k_cache.shape[-1] * extra_k_cache.element_size()
    possible = [first, *(x for x in KV_LAYOUTS.values() if first.name in x.extra_of)]
    for layout in possible:
        if row_bytes == layout.bytes_per_token:
            return layout
    known = " or ".join(f"{x.bytes_per_token} ({x.name})" for x in possible)
    raise ValueError(
        f"flash_mla_with_kvcache: a row of extra_k_cache must have {known} bytes next to {first.name}, "
        f"got {row_bytes}"
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied unless its last dimension is contiguous and its rows start at multiples of 16 bytes."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    # PyTorch aligns storages. An offset into one cannot be traced: in compiled code that is left to the op.
    offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
    if x.stride(-1) == 1 and all(n * x.element_size() % _ALIGNMENT == 0 for n in (offset, *steps)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def index_rows(indices: torch.Tensor) -> torch.Tensor:
    return indices if indices.stride(-1) == 1 else indices.contiguous()


def _per_token(length: torch.Tensor | None, s_q: int) -> torch.Tensor | None:
    return None if length is None else length[:, None].expand(-1, s_q).flatten().contiguous()


def _empty_is_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse.isneginf(), float("inf"))
