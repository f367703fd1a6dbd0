"""FlashMLA's calls inside an engine, served by our ops where we have them, by the original where not.

No kernel converts what engines drop: lse and max_logits are those of our ops (natural logarithms, -inf where
nothing is attended), and None where the original's are of base 2.
"""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .. import probes
from ..layout import KV_LAYOUTS, KVLayout
from . import attend, drafts
from .log import say_once

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
_LAYOUTS = {(x.head_dim_qk, x.bytes_per_token): x for x in (KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"])}
_V41, _V41_FP4 = KV_LAYOUTS["dsv41"], KV_LAYOUTS["dsv41_fp4"]
NOPE = KV_LAYOUTS["dsv32_nope"]  # of as many bytes as V4.1's rows: its name alone tells them apart
FORMATS = (None, "V32", "V4", "V32_NO_ROPE")  # of kv_format: names of the layouts that we have
_v41_rows = SimpleNamespace(on=False)
_NOT_LOOKED_AT = {"block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "use_legacy"}
# Parameters that only the original can serve, if they are given.
_ELSEWHERE = ("causal", "descale_q", "descale_k")
KNOWN_DECODE = {*_NOT_LOOKED_AT, *_ELSEWHERE, "is_fp8_kvcache"}
KNOWN_PREFILL = {"use_legacy", "d_v"}


def read_v41_rows(on: bool) -> None:
    """On, if the engine stores V4.1's own rows: then rows of 528 bytes without a ``kv_format`` are these."""
    _v41_rows.on = on


def reads_v41_rows() -> bool:
    return bool(_v41_rows.on)


def decode(
    q: Tensor,
    k_cache: Tensor,
    head_dim_v: int,
    softmax_scale: float | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
    kv_format: str | None = None,
) -> Pair:
    """flash_mla_with_kvcache: a sparse call on packed FP8 caches."""
    assert indices is not None  # why_not_ours
    batch, s_q, heads, head_dim = q.shape
    options: dict[str, Any] = {}
    layout = _layout(q, k_cache, kv_format)
    assert layout is not None  # why_not_ours
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        options = {
            "extra_kv_cache": extra_k_cache, "extra_layout": _extra_layout(layout, extra_k_cache),
            "extra_indices": extra_indices_in_kvcache.flatten(0, 1),
            "extra_topk_length": _per_row(extra_topk_length, s_q), "extra_page_size": extra_k_cache.shape[1],
        }  # fmt: skip
    result, lse = attend.over_pages(
        q.flatten(0, 1),
        k_cache,
        indices.flatten(0, 1),
        layout=layout,
        page_size=k_cache.shape[1],
        sm_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        topk_length=_per_row(topk_length, s_q),
        attn_sink=attn_sink,
        out=None if out is None else out.view(batch * s_q, heads, head_dim_v),
        batch_invariant=enable_batch_invariant,
        group=drafts.of_call(batch, s_q),
        **options,
    )
    return result.view(batch, s_q, heads, head_dim_v), lse.view(batch, s_q, heads).mT


def prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> Triple:
    """flash_mla_sparse_fwd."""
    out, max_logits, lse = attend.over_rows(
        q, kv[:, 0], indices[:, 0], sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length, out=out,
        max_logits=True,
    )  # fmt: skip
    return out, max_logits, lse


def why_not_ours(given: dict[str, Any]) -> str | None:
    """Why a call of flash_mla_with_kvcache is not ours, or None. ``given``: its arguments by name."""
    asked = [name for name in _ELSEWHERE if given.get(name) is not None and given[name] is not False]
    if given.get("indices") is None or asked:
        return "dense decode" if not asked else ", ".join(asked)
    kv_format = given.get("kv_format")
    if kv_format not in FORMATS and not (kv_format == "V41" and reads_v41_rows()):
        return f"kv_format {kv_format}"
    q, k_cache = given["q"], given["k_cache"]
    layout = _layout(q, k_cache, kv_format)
    if not given.get("is_fp8_kvcache") or layout is None:
        return "head_dim {} with rows of {} bytes".format(*_row(q, k_cache))
    extra = given.get("extra_k_cache")
    if extra is not None and _extra_layout(layout, extra) is None:
        return f"entries of {_row_bytes(extra)} bytes beside rows of {_row_bytes(k_cache)}"
    return None


def around_decode(original: Callable[..., Pair], *args: Any, **options: Any) -> Pair:
    """flash_mla_with_kvcache, by us or, said once, by the original."""
    given = _by_name(original, args, options)
    reason = why_not_ours(given)
    if reason:
        say_once(f"mla_fp8: {original.__name__} stays FlashMLA's for {reason}")
        return original(*args, **options)
    return decode(**{name: value for name, value in given.items() if name not in KNOWN_DECODE})


def around_prefill(original: Callable[..., Triple], *args: Any, **options: Any) -> Triple:
    """flash_mla_sparse_fwd."""
    given = _by_name(original, args, options)
    return prefill(**{name: value for name, value in given.items() if name not in KNOWN_PREFILL})


def around_prefill_base_2(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The same where statistics have base 2, as SGLang's legacy kernel, which drops them."""
    if not _by_name(original, args, options).get("use_legacy", True):
        say_once(f"mla_fp8: {original.__name__} stays FlashMLA's for use_legacy=False")
        return original(*args, **options)
    return around_prefill(original, *args, **options)[0], None, None


def take_over(module: Any, hooks: dict[str, Callable[..., Any]]) -> bool:
    """Wraps functions of ``module``, also where other modules have imported them by name.

    Re-entrant; returns whether anything was left to do.
    """
    done = False
    for name, hook in hooks.items():
        original = getattr(module, name)
        wrapped = around(original, hook)
        if wrapped is not original:
            done = True
            for holder in [module, *sys.modules.values()]:
                if getattr(holder, "__dict__", {}).get(name) is original:
                    setattr(holder, name, wrapped)
    return done


def around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook(original, ...)`` in place of ``original(...)``. Re-entrant."""
    if getattr(original, "taken_over_by_mla_fp8", False):
        return original

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return hook(original, *args, **options)

    wrapped.taken_over_by_mla_fp8 = True  # type: ignore[attr-defined]
    return wrapped


def _by_name(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(probes.parameters(function) or (), args, strict=False)) | options


def _layout(q: Tensor, k_cache: Tensor, kv_format: str | None) -> KVLayout | None:
    row = _row(q, k_cache)
    if kv_format == "V32_NO_ROPE":
        return NOPE if row == (NOPE.head_dim_qk, NOPE.bytes_per_token) else None
    if reads_v41_rows() and row == (_V41.head_dim_qk, _V41.bytes_per_token):
        return _V41
    return _LAYOUTS.get(row)


def _extra_layout(first: KVLayout, extra: Tensor) -> KVLayout | None:
    """That of entries next to rows of ``first``."""
    possible = (first, _V41_FP4) if first is _V41 else (first,)
    return next((x for x in possible if x.bytes_per_token == _row_bytes(extra)), None)


def _row(q: Tensor, k_cache: Tensor) -> tuple[int, int]:
    return q.shape[-1], _row_bytes(k_cache)


def _row_bytes(cache: Tensor) -> int:
    return cache.shape[-1] * cache.element_size()


def _per_row(length: Tensor | None, s_q: int) -> Tensor | None:
    """Lengths per request as lengths per row."""
    return length if length is None or s_q == 1 else length.repeat_interleave(s_q)
