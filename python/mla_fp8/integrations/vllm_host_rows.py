"""HiSparse of DeepSeek V3.2 and GLM-5 in vLLM stores the rows that vLLM stores without it.

Without HiSparse, vLLM's kernel of norms and RoPE rounds a latent from float32 to the FP8 values of its row.
With it that kernel rounds to bf16, and another kernel rounds this to FP8: some values become their
neighbours, and tokens others. Here the first kernel stores the row in both cases, at the place in the page on
the GPU where the second would; that has nothing to do. Rows of draft models stay vLLM's.

Taken over with mla_fp8_hisparse (hisparse.py), and where the engine promises the same bits (same_bits.py).
"""

import weakref
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .. import probes
from .flash_mla_calls import around, take_over
from .log import say_once

MODULE = "vllm.models.deepseek_v32.attention"
LAYER = "DeepseekV32Attention"
_KERNEL, _STORE = "fused_norm_rope", "update_kv_cache"
_NEEDS: probes.Needs = {
    MODULE: {
        _KERNEL: ("positions", "kv_rms_norm_w", "slot_mapping", "mla_kv_cache", "kv_c_out"),
        f"{LAYER}.{_STORE}": ("kv_c_normed",),
        "get_forward_context": (),
    },
    "vllm.v1.hisparse.runtime": {
        "HiSparseCacheHandle.bind_cache": ("slot_mapping",), "HiSparseCacheHandle.write_target": (),
        "PagedCacheView": ("cache",),
    },
}  # fmt: skip
_state = SimpleNamespace(layers=weakref.WeakValueDictionary(), stored=None)


def take_over_stores() -> None:
    """Re-entrant; says why not where this vLLM lacks what it builds on."""
    reason = probes.why_not_call(_NEEDS)
    if reason:
        say_once(f"mla_fp8: rows of HiSparse are rounded twice, as in vLLM: {reason}")
        return
    module = import_module(MODULE)
    layer = getattr(module, LAYER)
    take_over(module, {_KERNEL: fused_norm_rope})
    setattr(layer, _STORE, around(getattr(layer, _STORE), update_kv_cache))


def fused_norm_rope(original: Any, *args: Any, **options: Any) -> Any:
    given = dict(zip(probes.parameters(original) or (), args, strict=False)) | options
    _state.stored = None
    cache = _cache(given)
    if cache is None:
        return original(*args, **options)
    slots = cache.slot_mapping[: len(given["positions"])]  # -1 behind the tokens of the step
    result = original(**given | {"slot_mapping": slots, "mla_kv_cache": cache.view.cache})
    _state.stored = given["kv_c_out"]
    return result


def update_kv_cache(original: Any, self: Any, kv_c_normed: Tensor, *args: Any, **options: Any) -> None:
    if kv_c_normed is not _state.stored:
        original(self, kv_c_normed, *args, **options)
    _state.stored = None


def _cache(given: dict[str, Any]) -> Any:
    """HiSparse's cache of the layer that calls, if its rows are to be stored, and not by this call yet."""
    if given.get("mla_kv_cache") is not None or given.get("slot_mapping") is None:
        return None
    if given.get("kv_c_out") is None:
        return None
    cache = _cache_of_layer(given["kv_rms_norm_w"])
    if cache is None or cache.view is None or cache.dummy_batch or cache.draft_layer:
        return None
    return cache


def _cache_of_layer(weight: Tensor) -> Any:
    """That of the layer whose norm of latents has this weight."""
    layer = _state.layers.get(id(weight))
    if layer is None or layer.kv_a_layernorm.weight is not weight:
        layers = import_module(MODULE).get_forward_context().no_compile_layers.values()
        of_kind = [x for x in layers if getattr(x, "hisparse_cache", None) is not None]
        _state.layers.update((id(x.kv_a_layernorm.weight), x) for x in of_kind)
        layer = _state.layers.get(id(weight))
    return None if layer is None else layer.hisparse_cache
