"""The sparse attention calls of the ``flash_mla`` package, on any device, head count and page size we have.

Its conventions: lse is a natural logarithm and **+inf** where nothing is attended (our ops give -inf); decode
returns it as [batch, heads, seq]; inputs may have any strides. What our ops read in place is not copied.
Bad input raises ValueError, or the RuntimeError of the op (:func:`mla_fp8.sparse_decode`,
:func:`mla_fp8.sparse_prefill`), with the caller's names.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .._arguments import need_tensors
from .._inference import refuse_gradients
from ..dispatch import attend, selected_on
from ..layout import HEAD_DIM_V, KV_LAYOUTS, KVLayout
from ._names import caller_names

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# The names of SGLang's fork. Rows of 528 bytes are of three formats: V41, V32_NO_ROPE, and V4.1's of FlashMLA
# itself since its release of 2026-09-30, which we do not have. So they have to be named.
_FORMATS = {
    name: KV_LAYOUTS[layout]
    for name, layout in {"V32": "dsv32", "V4": "dsv4", "V41": "dsv41", "V32_NO_ROPE": "dsv32_nope"}.items()
}
_ALIGNMENT = 16  # bytes, of the rows that our ops read
_ANY = -1  # of a shape
_FOUR, _PAGES = (_ANY,) * 4, (_ANY, _ANY, 1, _ANY)
_INF, _NAN = float("inf"), float("nan")
# Errors of ops with FlashMLA's shapes. The call is then made again: with copies, or it names what is wrong.
_REFUSED = (RuntimeError, ValueError, TypeError, AttributeError)
_DECODE, _PREFILL = "mla_fp8.flash_mla_with_kvcache", "mla_fp8.flash_mla_sparse_fwd"


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
        raise ValueError(f"{_DECODE}: indices must be a tensor (dense decode is not here), got None")
    if causal or not is_fp8_kvcache or head_dim_v != HEAD_DIM_V:
        _expect(_DECODE, "causal", False, causal)
        _expect(_DECODE, "is_fp8_kvcache", True, is_fp8_kvcache)
        _expect(_DECODE, "head_dim_v", HEAD_DIM_V, head_dim_v)
    if not torch.compiler.is_compiling():
        results = _decode_as_given(
            q, k_cache, kv_format, extra_k_cache, indices, softmax_scale, topk_length, attn_sink,
            extra_indices_in_kvcache, extra_topk_length, query_groups, shared_keys,
        )  # fmt: skip
        if results is not None:
            return results
    _expect_tensors(_DECODE, q=q, k_cache=k_cache, indices=indices)
    _expect_shape(_DECODE, "q", q, _FOUR)
    _expect_shape(_DECODE, "k_cache", k_cache, _PAGES)
    batch, s_q, heads, head_dim = q.shape
    layout = _layout(head_dim, _row_bytes(k_cache), kv_format)
    given: dict[str, Any] = {
        "q": q.flatten(0, 1), "kv_cache": k_cache,
        "indices": _per_token("indices", indices, batch, s_q), "layout": layout,
        "page_size": k_cache.shape[1], "sm_scale": head_dim**-0.5 if softmax_scale is None else softmax_scale,
    }  # fmt: skip
    if topk_length is not None:
        given["topk_length"] = _lengths("topk_length", topk_length, batch, s_q)
    if attn_sink is not None:
        given["attn_sink"] = attn_sink
    if extra_indices_in_kvcache is not None:
        given["extra_indices"] = _per_token("extra_indices_in_kvcache", extra_indices_in_kvcache, batch, s_q)
    if extra_topk_length is not None:
        given["extra_topk_length"] = _lengths("extra_topk_length", extra_topk_length, batch, s_q)
    if extra_k_cache is not None:
        _expect_shape(_DECODE, "extra_k_cache", extra_k_cache, _PAGES)
        given["extra_kv_cache"], given["extra_page_size"] = extra_k_cache, extra_k_cache.shape[1]
        given["extra_layout"] = _extra_layout(layout, _row_bytes(extra_k_cache))
    if query_groups != 1 or shared_keys is not None:
        given["query_groups"], given["shared_keys"] = query_groups, shared_keys
    out, lse = _attend_to_pages(given)
    return out.view(batch, s_q, heads, HEAD_DIM_V), lse.view(batch, s_q, heads).mT


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
    if d_v != HEAD_DIM_V:
        _expect(_PREFILL, "d_v", HEAD_DIM_V, d_v)
    if not torch.compiler.is_compiling():
        results = _prefill_as_given(q, kv, indices, sm_scale, attn_sink, topk_length)
        if results is not None:
            return results
    _expect_tensors(_PREFILL, q=q, kv=kv, indices=indices)
    _expect_shape(_PREFILL, "q", q, (_ANY, _ANY, _ANY))
    _expect_shape(_PREFILL, "kv", kv, (_ANY, 1, q.shape[2]))
    _expect_shape(_PREFILL, "indices", indices, (q.shape[0], 1, _ANY))
    given = {
        "q": q, "kv": kv.squeeze(1), "indices": indices.squeeze(1), "sm_scale": sm_scale,
        "attn_sink": attn_sink, "topk_length": topk_length,
    }  # fmt: skip
    out, max_logits, lse = attend(
        "sparse_prefill", _converted(_PREFILL, given), "native", out=None, lse=None, workspace=None,
        max_logits=True,
    )  # fmt: skip
    return out, max_logits, _as_flash_mla_has(lse)


def _decode_as_given(
    q: torch.Tensor, k_cache: torch.Tensor, kv_format: str | None, extra: torch.Tensor | None,
    indices: torch.Tensor, softmax_scale: float | None, topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None, *others: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """The results by an op with FlashMLA's shapes; None where something is wrong, or in a form that the op
    does not take: arguments are looked at, and copied, then."""
    try:
        refuse_gradients("sparse_decode", q=q, kv_cache=k_cache, attn_sink=attn_sink, extra_kv_cache=extra)
        _, _, heads, head_dim = q.shape
        row_bytes = k_cache.shape[-1] * k_cache.element_size()
        extra_bytes = None if extra is None else extra.shape[-1] * extra.element_size()
        found = _layouts(q.device, heads, head_dim, row_bytes, kv_format, extra_bytes)
        if found is None:
            return None
        layout, extra_layout = found
        scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        extra_indices, extra_topk_length, query_groups, shared_keys = others
        out, lse = torch.ops.mla_fp8._flash_mla_decode(
            q, k_cache, indices, layout, scale, topk_length, attn_sink, extra, extra_indices,
            extra_topk_length, extra_layout, query_groups, shared_keys,
        )  # fmt: skip
        return out, _as_flash_mla_has(lse)
    except _REFUSED:
        return None


def _prefill_as_given(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float,
    attn_sink: torch.Tensor | None, topk_length: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """As :func:`_decode_as_given`, of prefill."""
    try:
        refuse_gradients("sparse_prefill", q=q, kv=kv, attn_sink=attn_sink)
        _, heads, head_dim = q.shape
        if not _has_prefill(q.device, heads, head_dim):
            return None
        out, max_logits, lse = torch.ops.mla_fp8._flash_mla_prefill(
            q, kv, indices, sm_scale, attn_sink, topk_length
        )
        return out, max_logits, _as_flash_mla_has(lse)
    except _REFUSED:
        return None


@functools.lru_cache(maxsize=4096)
def _layouts(
    device: torch.device, heads: int, head_dim: int, row_bytes: int, kv_format: str | None,
    extra_bytes: int | None,
) -> tuple[int, int | None] | None:  # fmt: skip
    """Ids of the caches' layouts, None for a second that is the first; None if the device lacks the op.
    ValueError if no kernel reads them."""
    if _lacks_ops(device):
        return None
    first = second = _layout(head_dim, row_bytes, kv_format)
    features: tuple[str, ...] = ()
    if extra_bytes is not None:
        second, features = _extra_layout(first, extra_bytes), ("two caches",)
    name = first.name if second is first else f"{first.name} + {second.name}"
    selected_on("sparse_decode", device, name, heads, features, "native")
    return first.id, None if second is first else second.id


@functools.lru_cache(maxsize=4096)
def _has_prefill(device: torch.device, heads: int, head_dim: int) -> bool:
    """Whether the device has the op. ValueError if no kernel reads such rows."""
    if _lacks_ops(device):
        return False
    rows = KV_LAYOUTS["bf16_512" if head_dim == HEAD_DIM_V else "bf16"]
    selected_on("sparse_prefill", device, rows.name, heads, (), "native")
    return True


def _lacks_ops(device: torch.device) -> bool:
    """Whether FlashMLA's shapes are not for the library of this device (csrc/registration.h)."""
    return device.type == "cuda" and torch.version.hip is not None


@caller_names(
    kv_cache="k_cache", extra_kv_cache="extra_k_cache", extra_indices="extra_indices_in_kvcache",
    sm_scale="softmax_scale", page_size="k_cache", extra_page_size="extra_k_cache",
)  # fmt: skip
def _attend_to_pages(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attend(
        "sparse_decode", _converted(_DECODE, given), "native", out=None, lse=None, workspace=None
    )
    return out, _as_flash_mla_has(lse)


def _as_flash_mla_has(lse: torch.Tensor) -> torch.Tensor:
    """+inf where nothing is attended, in place; NaN and everything finite stay."""
    return lse.nan_to_num_(_NAN, _INF, _INF)


def _converted(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """Copies of what the op would not read in place."""
    for name, convert in _CONVERT.items():
        if given.get(name) is not None:
            _expect_tensors(function, **{name: given[name]})
            given[name] = convert(given[name])
    return given


def _per_token(name: str, x: torch.Tensor, batch: int, s_q: int) -> torch.Tensor:
    """``x [batch, s_q, n]`` with a row for each query token."""
    if not _is(x, 3) or x.size(0) != batch or x.size(1) != s_q:
        _expect_shape(_DECODE, name, x, (batch, s_q, _ANY))
    return x.flatten(0, 1)


def _lengths(name: str, x: torch.Tensor, batch: int, s_q: int) -> torch.Tensor:
    """``x [batch]`` for each query token."""
    if not _is(x, 1) or x.size(0) != batch:
        _expect_shape(_DECODE, name, x, (batch,))
    return x if s_q == 1 else x.repeat_interleave(s_q)


def _expect(function: str, what: str, want: object, got: object) -> None:
    if got != want:
        raise ValueError(f"{function}: {what} must be {want}, got {got}")


def _row_bytes(cache: torch.Tensor) -> int:
    return cache.shape[-1] * cache.element_size()


def _is(x: object, dim: int) -> bool:
    """Whether it is a tensor of so many dimensions; the functions below say what is wrong with one."""
    return isinstance(x, torch.Tensor) and x.dim() == dim


def _expect_tensors(function: str, **tensors: object) -> None:
    for x in tensors.values():
        if not isinstance(x, torch.Tensor):
            need_tensors(function.removeprefix("mla_fp8."), **tensors)


def _expect_shape(function: str, name: str, x: torch.Tensor, want: tuple[int, ...]) -> None:
    """_ANY in ``want`` is any size."""
    _expect_tensors(function, **{name: x})
    if x.dim() != len(want) or any(w not in (_ANY, n) for w, n in zip(want, x.shape, strict=True)):
        known = ", ".join("*" if w == _ANY else str(w) for w in want)
        raise ValueError(f"{function}: {name} must have shape [{known}], got {[*x.shape]}")


def _layout(head_dim: int, row_bytes: int, kv_format: str | None) -> KVLayout:
    """That of the name or, without one, the only one with the size of the cache's rows."""
    if kv_format not in (None, *_FORMATS):
        raise ValueError(
            f"{_DECODE}: kv_format must be None or one of {', '.join(_FORMATS)}, got {kv_format!r}"
        )
    possible = _FORMATS.values() if kv_format is None else (_FORMATS[kv_format],)
    found = {
        name: layout
        for name, layout in _FORMATS.items()
        if layout in possible and (head_dim, row_bytes) == (layout.head_dim_qk, layout.bytes_per_token)
    }
    if len(found) > 1:
        raise ValueError(
            f"{_DECODE}: kv_format must be {' or '.join(found)} for rows of {row_bytes} bytes, got None "
            "(V4.1's rows of FlashMLA since 2026-09-30, vLLM 0.33 and SGLang's V41_NEW are neither)"
        )
    if found:
        return next(iter(found.values()))
    known = " or ".join(dict.fromkeys(f"{x.head_dim_qk} with {x.bytes_per_token} bytes" for x in possible))
    raise ValueError(
        f"{_DECODE}: head_dim of q and the bytes of a row of k_cache must be {known}, "
        f"got {head_dim} with {row_bytes} bytes"
    )


def _extra_layout(first: KVLayout, row_bytes: int) -> KVLayout:
    """Of those that may stand next to the first cache's, the one with the size of the second one's rows."""
    possible = [first, *(x for x in KV_LAYOUTS.values() if first.name in x.extra_of)]
    for layout in possible:
        if row_bytes == layout.bytes_per_token:
            return layout
    known = " or ".join(f"{x.bytes_per_token} ({x.name})" for x in possible)
    raise ValueError(
        f"{_DECODE}: a row of extra_k_cache must have {known} bytes next to {first.name}, got {row_bytes}"
    )


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied unless its last dimension is contiguous and its rows start at multiples of 16 bytes."""
    # PyTorch aligns storages. An offset into one cannot be traced: in compiled code that is left to the op.
    itemsize = x.element_size()
    if torch.compiler.is_compiling() or x.storage_offset() * itemsize % _ALIGNMENT == 0:
        if x.is_contiguous() and x.shape[-1] * itemsize % _ALIGNMENT == 0:
            return x
        steps = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
        if x.stride(-1) == 1 and all(n * itemsize % _ALIGNMENT == 0 for n in steps):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def index_rows(indices: torch.Tensor) -> torch.Tensor:
    return indices if indices.stride(-1) == 1 else indices.contiguous()


_CONVERT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("q", "kv"), aligned),
    **dict.fromkeys(("indices", "extra_indices"), index_rows),
    **dict.fromkeys(("topk_length", "extra_topk_length", "attn_sink"), torch.Tensor.contiguous),
}
