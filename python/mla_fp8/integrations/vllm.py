"""vLLM: sparse MLA models (DeepSeek V3.2, GLM-5, DeepSeek V4 and V4.1) on our kernels.

Entry points of the group ``vllm.general_plugins``, which mla_fp8_plugins loads:

``mla_fp8``            offers a backend: `--attention-backend MLA_FP8`: DeepSeek V3.2 and GLM-5. Every head
                       count as it is, caches as of FLASHMLA_SPARSE: bf16, or FP8 (`--kv-cache-dtype fp8`).
``mla_fp8_flash_mla``  takes over FlashMLA's sparse calls, and of the layers of DeepSeek V4 and V4.1 the
                       padding of heads and prefill with few of them: these layers know vLLM's own backends
                       only. Does nothing unless VLLM_PLUGINS names it.
``mla_fp8_query_groups`` lets the drafts of a request share keys in the calls of the former two (drafts.py).
                       Off unless VLLM_PLUGINS names it.
``mla_fp8_index_topk`` takes over the indexer's logits and top-k (vllm_indexer.py). As the former.
``mla_fp8_context_parallel`` serves decode context parallelism (vllm_context_parallel.py). As the former.
``mla_fp8_layer_ops``  takes over ops around attention (layer_ops.py). As the former.

Tested with vLLM 0.30 to 0.33. What we build on is probed; an engine without it is refused with the reason.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .. import probes
from . import drafts, flash_mla_calls, log, vllm_same_bits, vllm_sparse, vllm_v4

_LOGGER = logging.getLogger(__name__)
_CALLS = "vllm.v1.attention.ops.flashmla"
_NEEDS: probes.Needs = {
    "vllm.logger": {"init_logger": ("name",)},
    vllm_sparse.MODULE: {
        "FlashMLASparseBackend.get_impl_cls": (),
        "FlashMLASparseBackend.get_name": (),
        "HiSparseMLAIndexGroup": (),
        "FlashMLASparseImpl._convert_logical_to_physical_topk": (
            "logical_topk_indices", "attn_metadata", "block_stride_rows", "return_valid_counts",
        ),
        "triton_convert_req_index_to_global_index": (
            "req_id", "block_table", "token_indices", "BLOCK_SIZE", "NUM_TOPK_TOKENS", "return_valid_counts",
        ),
    },
}  # fmt: skip
_HOOKS: dict[str, tuple[Callable[..., Any], Callable[..., Any], set[str]]] = {
    "flash_mla_with_kvcache": (
        flash_mla_calls.around_decode, flash_mla_calls.decode, flash_mla_calls.KNOWN_DECODE,
    ),
    "flash_mla_sparse_fwd": (
        flash_mla_calls.around_prefill, flash_mla_calls.prefill, flash_mla_calls.KNOWN_PREFILL,
    ),
}  # fmt: skip


def register_flash_mla_calls() -> None:
    """Entry point: takes over FlashMLA's sparse calls, or logs why not."""
    reason = why_not_calls()
    if reason:
        _LOGGER.warning("mla_fp8 does not take over FlashMLA's calls in vLLM%s: %s", _version(), reason)
        return
    hooks = {name: hook for name, (hook, *_) in _HOOKS.items()}
    if not flash_mla_calls.take_over(import_module(_CALLS), hooks):
        return
    layers = {model: vllm_v4.why_not(model) for model in vllm_v4.MODULES}
    for model, refused in layers.items():
        if not refused:
            vllm_v4.take_over(model)
            vllm_same_bits.prepare(model)
        if not vllm_v4.why_not(model, vllm_v4.REPLAY):
            vllm_v4.take_over(model, vllm_v4.REPLAY)
    said = "heads as they are, prefill of few heads straight from the pages"
    log.logger().info(
        "mla_fp8 serves FlashMLA's sparse calls; %s",
        "; ".join(f"the layer of {model}: {refused or said}" for model, refused in layers.items()),
    )


def register_query_groups() -> None:
    """Entry point: drafts of a request go as a group. Re-entrant."""
    if drafts.switched_on():
        return
    drafts.switch(True)
    layers = {model: vllm_v4.why_not(model, vllm_v4.DRAFTS) for model in vllm_v4.MODULES}
    for model, refused in layers.items():
        if not refused:
            vllm_v4.take_over(model, vllm_v4.DRAFTS)
    log.logger().info(
        "mla_fp8: the drafts of a request go as a group where the plan takes it, of V3.2; %s",
        "; ".join(f"of {model}{f' not: {refused}' if refused else ''}" for model, refused in layers.items()),
    )


def why_not() -> str | None:
    """Why this vLLM cannot use our backend, or None."""
    reason = probes.why_not_call(_NEEDS)
    if reason:
        return reason
    theirs = import_module(vllm_sparse.MODULE)
    return probes.why_not_override(
        theirs.FlashMLASparseImpl, vllm_sparse.SparseImpl
    ) or probes.why_not_override(theirs.FlashMLASparseBackend, vllm_sparse.SparseBackend)


def why_not_calls() -> str | None:
    """Why FlashMLA's calls in this vLLM cannot be ours, or None."""
    reason = probes.why_not_call({_CALLS: dict.fromkeys(_HOOKS, ()), "vllm.logger": {"init_logger": ()}})
    if reason:
        return reason
    for name, (_, ours, known) in _HOOKS.items():
        reason = probes.why_not_replace(getattr(import_module(_CALLS), name), ours, known)
        if reason:
            return f"{name} {reason}"
    return None


def _version() -> str:
    try:
        return f" {import_module('vllm').__version__}"
    except Exception:
        return ""


def __getattr__(name: str) -> Any:
    """``SparseBackend``, made of vLLM's class when vLLM asks for it.

    ImportError for a vLLM without what it builds on.
    """
    if name != "SparseBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = why_not()
    if reason:
        raise ImportError(f"mla_fp8 cannot be an attention backend of vLLM{_version()}: {reason}")
    globals()[name] = backend = vllm_sparse.make_backend(__name__)
    return backend
