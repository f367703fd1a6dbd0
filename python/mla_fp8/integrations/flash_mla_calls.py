"""FlashMLA's calls inside an engine, served by our ops where we have them, by the original where not."""

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..compat import flash_mla
from ..layout import KV_LAYOUTS

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
_ROWS = {(x.head_dim_qk, x.bytes_per_token) for x in (KV_LAYOUTS["dsv32"], KV_LAYOUTS["dsv4"])}
_OURS = (  # arguments of flash_mla_with_kvcache that we look at; block tables and schedules do not matter
    "softmax_scale", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length",
    "extra_topk_length",
)  # fmt: skip
_ELSEWHERE = ("causal", "descale_q", "descale_k", "kv_format", "out")  # what only the original can do
_NAMES = (
    "q",
    "k_cache",
    "block_table",
    "cache_seqlens",
    "head_dim_v",
    "tile_scheduler_metadata",
    "num_splits",
)


def decode(original: Callable[..., Pair], *args: Any, **options: Any) -> Pair:
    """flash_mla_with_kvcache: sparse calls on packed FP8 caches are ours."""
    given = dict(zip(_NAMES, args, strict=False)) | options
    q, k_cache = given["q"], given["k_cache"]
    rows = (q.shape[-1], k_cache.shape[-1] * k_cache.element_size())
    elsewhere = any(given.get(name) not in (None, False) for name in _ELSEWHERE)
    sparse = given.get("indices") is not None and given.get("is_fp8_kvcache", False)
    if len(args) > len(_NAMES) or elsewhere or not sparse or rows not in _ROWS:
        return original(*args, **options)
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, None, None, given["head_dim_v"], None, is_fp8_kvcache=True,
        **{name: given[name] for name in _OURS if name in given},
    )  # fmt: skip


def prefill(original: Callable[..., Triple], *args: Any, **options: Any) -> Triple:
    """flash_mla_sparse_fwd, natural logarithms."""
    if options.pop("out", None) is not None:
        raise ValueError("flash_mla_sparse_fwd: out must be None, as this package allocates it")
    options.pop("use_legacy", None)
    return flash_mla.flash_mla_sparse_fwd(*args, **options)


def prefill_base_2(original: Callable[..., Triple], *args: Any, **options: Any) -> Triple:
    """The same as sgl-kernel and SGLang's interface have it: max_logits and lse in base 2."""
    if not options.get("use_legacy", True):
        return original(*args, **options)
    out, max_logits, lse = prefill(original, *args, **options)
    return out, max_logits / math.log(2), lse / math.log(2)


def take_over(module: Any, hooks: dict[str, Callable[..., Any]]) -> None:
    """Wraps functions of ``module``, also where other modules have imported them by name. Re-entrant."""
    for name, hook in hooks.items():
        original = getattr(module, name)
        if getattr(original, "taken_over_by_mla_fp8", False):
            continue

        @functools.wraps(original)
        def wrapped(
            *args: Any,
            original: Callable[..., Any] = original,
            hook: Callable[..., Any] = hook,
            **options: Any,
        ) -> Any:
            return hook(original, *args, **options)

        wrapped.taken_over_by_mla_fp8 = True  # type: ignore[attr-defined]
        for holder in [module, *sys.modules.values()]:
            if getattr(holder, "__dict__", {}).get(name) is original:
                setattr(holder, name, wrapped)
