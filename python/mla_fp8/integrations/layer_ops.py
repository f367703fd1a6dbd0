"""The ops around attention in engines, in place of the engines' own. Off unless the engine's list of plug-ins
names ``mla_fp8_layer_ops``: roundings differ (vllm_layer.py, sglang_layer.py, compat/vllm.py,
compat/sglang_layer.py).

Layers of DeepSeek V3.2 and GLM-5 between their projections (vllm_layer.py, sglang_layer.py), and functions
of DeepSeek V4 and V4.1 that engines have in Python. SGLang's compressors of ratio 1 and 2 stay its own, as
they round rows through FP4; so do both engines' of V4, whose states ours does not read.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .. import probes
from ..compat import sglang_layer as for_sglang
from ..compat import vllm as for_vllm
from ..layout import HEAD_DIM_V, KV_LAYOUTS
from . import sglang_layer, vllm_layer
from .flash_mla_calls import take_over
from .hooks import Given, Op, hook, register_in_sglang
from .log import say_once

NAME = "mla_fp8_layer_ops"
_LAYERS = "mla_fp8 takes over the layers of DeepSeek V3.2 and GLM-5, but for what a layer refuses"


def _why_not_epilogue(given: Given) -> str | None:
    return "scales packed for Blackwell" if given.get("tma_aligned_scales") else None


def _why_not_latents(given: Given) -> str | None:
    return "rows of other ranks" if given.get("prev_rows") is not None else None


def _why_not_insert(given: Given) -> str | None:
    cache = given["kv_cache"]
    packed = cache.dtype.itemsize == 1 and not cache.dtype.is_floating_point
    ours = not packed or cache.shape[-1] == KV_LAYOUTS["dsv4"].bytes_per_token
    return None if ours else f"rows of {cache.shape[-1]} bytes"


def _why_not_q(given: Given) -> str | None:
    dims = given["q_input"].shape[-1]
    return None if dims == HEAD_DIM_V else f"heads of {dims} dims"


def _why_not_k(given: Given) -> str | None:
    layout = given.get("layout", "v4")
    return None if layout in ("v4", "v41") else f"rows of layout {layout}"


VLLM: dict[str, dict[str, Op]] = {
    "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant": {
        "fused_inv_rope_fp8_quant": (for_vllm.fused_inv_rope_fp8_quant, _why_not_epilogue),
    },
    "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache": {
        "fused_save_compress_norm": (for_vllm.fused_save_compress_norm, _why_not_latents),
        "rope_quant_insert": (for_vllm.rope_quant_insert, _why_not_insert),
    },
}
SGLANG: dict[str, dict[str, Op]] = {
    "sglang.kernels.ops.attention.dsv4.norm_rope": {
        "fused_q_norm_rope": (for_sglang.fused_q_norm_rope, _why_not_q),
        "fused_k_norm_rope_flashmla": (for_sglang.fused_k_norm_rope_flashmla, _why_not_k),
        "fused_rope_inplace": (for_sglang.fused_rope_inplace, lambda given: None),
    },
}


def register_vllm() -> None:
    """Entry point of vLLM: takes over what it has of :data:`VLLM`, and layers."""
    _take_over(VLLM)
    reason = vllm_layer.why_not()
    if reason:
        say_once(f"mla_fp8: layers of DeepSeek V3.2 and GLM-5 stay vLLM's: {reason}")
    elif vllm_layer.take_over():
        say_once(_LAYERS)


def register_sglang() -> None:
    """Entry point of SGLang: takes over what it has of :data:`SGLANG`, and layers."""
    _take_over(SGLANG)
    reason = sglang_layer.why_not()
    if reason:
        say_once(f"mla_fp8: layers of DeepSeek V3.2 and GLM-5 stay SGLang's: {reason}")
        return
    register_in_sglang(sglang_layer.HOOKS)
    say_once(_LAYERS)


def why_not(module: str, name: str, ours: Callable[..., Any]) -> str | None:
    """Why the engine's function cannot be ours, or None."""
    reason = probes.why_not_call({module: {name: ()}})
    return reason or probes.why_not_replace(getattr(import_module(module), name), ours)


def _take_over(modules: dict[str, dict[str, Op]]) -> None:
    """Re-entrant. What an engine does not have, or has with other parameters, stays as it is, and is said."""
    for module, functions in modules.items():
        for name, (ours, elsewhere) in functions.items():
            reason = why_not(module, name, ours)
            if reason:
                say_once(f"mla_fp8: {module}.{name} stays the engine's: {reason}")
            elif take_over(import_module(module), {name: hook(ours, elsewhere)}):
                say_once(f"mla_fp8 serves {module}.{name}")
