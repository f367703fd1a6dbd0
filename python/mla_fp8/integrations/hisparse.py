"""HiSparse in engines: what finds and copies rows of caches in host memory, in place of the engines' kernels.
Off unless the engine's list of plug-ins names ``mla_fp8_hisparse``.

State, streams and events stay the engine's, and so does every call that ours does not know: it works on the
same state. vLLM finds its kernels in ``torch.ops``, SGLang compiles its own at first use. DeepSeek V3.2 and
GLM-5 in both, in SGLang V4's entries of ratio 4. SGLang's form for drafts stays its own. vLLM's rows become
those that it stores without HiSparse (vllm_host_rows.py).
"""

import inspect
from importlib import import_module

import torch
from torch import Tensor

from .. import probes
from ..compat import sglang_hisparse as for_sglang
from ..compat import vllm_hisparse as for_vllm
from . import vllm_host_rows
from .flash_mla_calls import take_over
from .hooks import Given, Op, hook, register_in_sglang
from .log import say_once

NAME = "mla_fp8_hisparse"
_AMD = "these ops have no kernels for AMD GPUs"
_RUNTIME = "vllm.v1.hisparse.runtime"
_KERNELS = "sglang.kernels.ops.kvcache.hisparse"


def _why_not_rows(given: Given) -> str | None:
    cache: Tensor = given["host_cache"]
    row_bytes = cache.shape[-1] * cache.element_size()
    return None if for_vllm.knows_rows(row_bytes) else f"rows of {row_bytes} bytes"


def _why_not_resolve(given: Given) -> str | None:
    if given["miss_mask"] is not None or given["resolved_global_indices"] is not None:
        return "a mask of misses, or entries by slot"
    if any(given[name] is None for name in for_vllm.PLAN):
        return "calls without a plan of copies"
    pages = (given["resident_block_size"], given["resident_null_block"])
    if given["resident_block_table"] is not None and pages != (given["hot_cache"].shape[1], 0):
        return f"resident blocks of {pages[0]} rows, of which {pages[1]} is none"
    return None


def _why_not_item(given: Given) -> str | None:
    if given.get("is_dsv4_layout"):
        return _why_not_entries(given)
    size = given["item_size_bytes"]
    return None if for_sglang.knows_rows(size) else f"rows of {size} bytes"


def _why_not_entries(given: Given) -> str | None:
    cache: Tensor = given["host_cache"]
    sizes = (given["item_size_bytes"], cache.shape[-1] * cache.element_size())
    return None if sizes == for_sglang.DSV4_SIZES else "entries of {} bytes in pages of {}".format(*sizes)


def _never(given: Given) -> str | None:
    return None


VLLM: dict[str, Op] = {
    "hisparse_resolve_residency": (for_vllm.hisparse_resolve_residency, _why_not_resolve),
    "hisparse_gather_compact": (for_vllm.hisparse_gather_compact, _why_not_rows),
    "hisparse_gather_plan": (for_vllm.hisparse_gather_plan, _why_not_rows),
    "hisparse_invalidate_written_slots": (for_vllm.hisparse_invalidate_written_slots, _never),
}
SGLANG: dict[str, Op] = {
    "load_cache_to_device_buffer_mla": (for_sglang.load_cache_to_device_buffer_mla, _why_not_item),
    "load_cache_to_device_buffer_dsv4_mla": (
        for_sglang.load_cache_to_device_buffer_dsv4_mla, _why_not_entries,
    ),
    "copy_cache_planned_mla": (for_sglang.copy_cache_planned_mla, _why_not_item),
    "transfer_cache_dsv4_mla": (for_sglang.transfer_cache_dsv4_mla, _never),
}  # fmt: skip
HOOKS = {f"{_KERNELS}.{name}": hook(*op) for name, op in SGLANG.items()}


def register_vllm() -> None:
    """Entry point of vLLM: takes over its ops, all of them or none. Re-entrant."""
    reason = why_not_vllm()
    if reason:
        say_once(f"mla_fp8: HiSparse stays vLLM's: {reason}")
        return
    take_over(torch.ops._C_cache_ops, {name: hook(*op) for name, op in VLLM.items()})
    vllm_host_rows.take_over_stores()
    say_once("mla_fp8 finds and copies the rows of HiSparse, but for what a call refuses")


def register_sglang() -> None:
    """Entry point of SGLang: registers hooks, all of them or none."""
    reason = why_not_sglang()
    if reason:
        say_once(f"mla_fp8: HiSparse stays SGLang's: {reason}")
        return
    register_in_sglang(HOOKS)
    say_once(
        "mla_fp8 finds and copies the rows of HiSparse, but for what a call refuses. SGLang's own: the "
        "form for drafts, MiniMax M3"
    )


def why_not_vllm() -> str | None:
    """Why the ops of this vLLM cannot be ours, or None. A compiled op is compared by its schema."""
    reason = probes.why_not_call({"vllm._custom_ops": {}, _RUNTIME: {"HiSparseRuntime": ()}})
    if reason:
        return reason
    if torch.version.hip:
        return _AMD
    for name, (ours, _) in VLLM.items():
        op = getattr(torch.ops._C_cache_ops, name, None)
        if op is None:
            return f"it has no op {name}"
        taken = [argument.name for argument in inspect.unwrap(op).default._schema.arguments]
        if taken != probes.parameters(ours):
            return f"{name} takes {', '.join(taken)} (another version)"
    return None


def why_not_sglang() -> str | None:
    """Why the functions of this SGLang cannot be ours, or None."""
    reason = probes.why_not_call({_KERNELS: dict.fromkeys(SGLANG, ())})
    if reason:
        return reason
    if torch.version.hip:
        return _AMD
    for name, (ours, _) in SGLANG.items():
        reason = probes.why_not_replace(getattr(import_module(_KERNELS), name), ours)
        if reason:
            return f"{name} {reason}"
    return None
