"""SGLang: FlashMLA's sparse calls and the gathers before them run on our kernels, for DeepSeek V3.2 and V4.

Entry point ``mla_fp8`` of the group ``sglang.srt.plugins``. SGLang loads every plugin that is installed; this
one does nothing unless SGLANG_PLUGINS names it. Calls that we do not have (dense decode, the V4.1 formats) go
to SGLang's own functions. Written for SGLang 0.5.23; what it builds on is probed, and said if not there.
"""

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ..compat import sglang as ours
from ..layout import KV_LAYOUTS
from . import flash_mla_calls

_LOGGER = logging.getLogger(__name__)
_CALLS = "sglang.kernels.ops.attention.flash_mla_interface"
_V32 = "sglang.kernels.ops.attention.dsa.dequant_k_cache"
_V4 = "sglang.kernels.ops.attention.dsv4.dequant_k_cache"


def _dequantize_v4(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    if options.get("layout", args[4] if len(args) > 4 else "v4") != "v4":
        return original(*args, **options)
    options.pop("layout", None)
    return ours.dequantize_k_cache_paged_dsv4(*args[:4], **options)


def _dequantize_v32(original: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    cache = options.get("quant_k_cache", args[0] if args else None)
    if cache is None or cache.shape[-1] != KV_LAYOUTS["dsv32"].bytes_per_token:  # without rope
        return original(*args, **options)
    return ours.dequantize_k_cache_paged_dsa(*args, **options)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_CALLS}.flash_mla_with_kvcache": flash_mla_calls.decode,
    f"{_CALLS}.flash_mla_sparse_fwd": flash_mla_calls.prefill_base_2,
    f"{_V32}.dequantize_k_cache_paged_dsa": _dequantize_v32,
    f"{_V4}.dequantize_k_cache_paged_dsv4": _dequantize_v4,
}
_PARAMETERS = {
    f"{_CALLS}.flash_mla_with_kvcache": ("indices", "extra_k_cache", "kv_format", "use_legacy"),
    f"{_CALLS}.flash_mla_sparse_fwd": ("attn_sink", "topk_length", "use_legacy"),
    f"{_V32}.dequantize_k_cache_paged_dsa": ("quant_k_cache", "page_table_1_flattened", "group_size"),
    f"{_V4}.dequantize_k_cache_paged_dsv4": ("quant_k_cache", "page_size", "out", "layout"),
}


def register() -> None:
    """Entry point: registers the hooks if SGLANG_PLUGINS names ``mla_fp8``, or logs why not."""
    reason = why_not()
    if reason:
        _LOGGER.warning("mla_fp8 is not used in SGLang: %s", reason)
        return
    named = import_module("sglang.srt.environ").envs.SGLANG_PLUGINS.get() or ""
    if "mla_fp8" not in [name.strip() for name in named.split(",")]:
        _LOGGER.info("mla_fp8 is installed; SGLANG_PLUGINS=mla_fp8 makes SGLang use it")
        return
    registry = import_module("sglang.srt.plugins.hook_registry")
    for target, hook in HOOKS.items():
        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)


def why_not() -> str | None:
    """The first thing that this SGLang lacks of what we build on, or None."""
    try:
        registry = import_module("sglang.srt.plugins.hook_registry")
        if not hasattr(registry, "HookRegistry") or not hasattr(registry.HookType, "AROUND"):
            return f"{_version()} has no HookRegistry with AROUND hooks"
        for target, parameters in _PARAMETERS.items():
            module, _, name = target.rpartition(".")
            found = getattr(import_module(module), name, None)
            if found is None:
                return f"{_version()} has no {target}; the adapter was written for 0.5.23"
            missing = [p for p in parameters if p not in inspect.signature(found).parameters]
            if missing:
                return f"{_version()} has {target} without {', '.join(missing)}; written for 0.5.23"
    except Exception as error:
        return f"it cannot be imported ({type(error).__name__}: {error})"
    return None


def _version() -> str:
    return f"SGLang {getattr(import_module('sglang'), '__version__', 'of unknown version')}"
