"""vLLM: `--attention-backend CUSTOM` runs models with sparse MLA (DeepSeek V3.2, GLM-5) on our kernels.

Entry points of the group ``vllm.general_plugins``:

``mla_fp8``            offers the backend; it takes every head count as it is. The cache is bf16 or
                       `--kv-cache-dtype fp8_ds_mla` ("fp8" would give a custom backend a plain cache).
``mla_fp8_flash_mla``  takes over FlashMLA's sparse calls in vLLM, which is how DeepSeek V4 gets here: its
                       layers know vLLM's own backends only. Does nothing unless VLLM_PLUGINS names it.

vLLM's interface changes between releases: what we build on is probed, and said if it is not there.
"""

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from ..compat import flash_mla
from ..reference import HEAD_DIM_V
from . import flash_mla_calls

_LOGGER = logging.getLogger(__name__)
SEEN = "the main branch of autumn 2026 (flashmla_sparse.py of 008a0c3)"

_BACKEND = "vllm.v1.attention.backends.mla.flashmla_sparse"
_REGISTRY = "vllm.v1.attention.backends.registry"
_CALLS = "vllm.v1.attention.ops.flashmla"
Needs = dict[str, dict[str, tuple[str, ...]]]  # module: {attribute: parameters that it must have}
_NEEDS: Needs = {
    _REGISTRY: {"register_backend": ("backend", "class_path"), "AttentionBackendEnum.CUSTOM": ()},
    _BACKEND: {
        "FlashMLASparseBackend.get_impl_cls": (),
        "FlashMLASparseImpl._compute_fp8_decode_padded_heads": ("num_heads",),
        "FlashMLASparseImpl._fp8_flash_mla_kernel": (
            "q", "kv_c_and_k_pe_cache", "topk_indices", "kernel_metadata",
        ),
        "FlashMLASparseImpl._bf16_flash_mla_kernel": (
            "q", "kv_c_and_k_pe_cache", "topk_indices", "topk_length", "actual_num_heads",
        ),
    },
}  # fmt: skip
_CALLS_NEED: Needs = {
    _CALLS: {"flash_mla_with_kvcache": ("indices",), "flash_mla_sparse_fwd": ("topk_length",)}
}


def register() -> None:
    """Entry point: offers the backend, or logs why not. Re-entrant, never raises for a missing vLLM."""
    reason = why_not(_NEEDS)
    if reason:
        _LOGGER.warning("mla_fp8 is not offered to vLLM as a backend: %s", reason)
        return
    registry = import_module(_REGISTRY)
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, f"{__name__}.SparseBackend")


def register_flash_mla_calls() -> None:
    """Entry point: takes over FlashMLA's sparse calls if VLLM_PLUGINS names ``mla_fp8_flash_mla``."""
    reason = why_not(_CALLS_NEED)
    if reason:
        _LOGGER.warning("mla_fp8 does not take over FlashMLA's calls in vLLM: %s", reason)
    elif "mla_fp8_flash_mla" in (import_module("vllm.envs").VLLM_PLUGINS or ()):
        hooks: dict[str, Callable[..., Any]] = {
            "flash_mla_with_kvcache": flash_mla_calls.decode,
            "flash_mla_sparse_fwd": flash_mla_calls.prefill,
        }
        flash_mla_calls.take_over(import_module(_CALLS), hooks)


def why_not(needs: Needs) -> str | None:
    """The first thing that this vLLM lacks of what we build on, or None."""
    for name, attributes in needs.items():
        try:
            module = import_module(name)
        except Exception as error:
            return f"{name} cannot be imported ({type(error).__name__}: {error})"
        for path, parameters in attributes.items():
            found: Any = module
            for part in path.split("."):
                found = getattr(found, part, None)
            missing = [p for p in parameters if found is None or p not in inspect.signature(found).parameters]
            if found is None or missing:
                what = f"{path} without {', '.join(missing)}" if found is not None else f"no {path}"
                version = getattr(import_module("vllm"), "__version__", "of unknown version")
                return f"vLLM {version} has {what}; the adapter was written for {SEEN}"
    return None


def __getattr__(name: str) -> Any:
    """``SparseBackend``, made of vLLM's class when vLLM asks for it."""
    if name != "SparseBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = backend = _make_backend()
    return backend


def _make_backend() -> type:
    theirs = import_module(_BACKEND)

    class SparseImpl(theirs.FlashMLASparseImpl):  # type: ignore[misc, name-defined]
        """vLLM's FlashMLA layer with our kernels: no padding of heads."""

        @staticmethod
        def _compute_fp8_decode_padded_heads(num_heads: int) -> int:
            return num_heads

        def _fp8_flash_mla_kernel(
            self, q: Tensor, kv_c_and_k_pe_cache: Tensor, topk_indices: Tensor, kernel_metadata: object
        ) -> tuple[Tensor, Tensor]:
            return flash_mla.flash_mla_with_kvcache(
                q, kv_c_and_k_pe_cache.unsqueeze(-2), None, None, HEAD_DIM_V, None,
                softmax_scale=self.softmax_scale, is_fp8_kvcache=True, indices=topk_indices,
            )  # fmt: skip

        def _bf16_flash_mla_kernel(
            self,
            q: Tensor,
            kv_c_and_k_pe_cache: Tensor,
            topk_indices: Tensor,
            topk_length: Tensor | None = None,
            actual_num_heads: int | None = None,
        ) -> tuple[Tensor, Tensor]:
            kv = kv_c_and_k_pe_cache.view(-1, 1, kv_c_and_k_pe_cache.shape[-1])
            out, _, lse = flash_mla.flash_mla_sparse_fwd(
                q[:, :actual_num_heads], kv, topk_indices.view(len(q), 1, -1), self.softmax_scale,
                topk_length=topk_length,
            )  # fmt: skip
            return out, lse

    class SparseBackend(theirs.FlashMLASparseBackend):  # type: ignore[misc, name-defined]
        supported_kv_cache_dtypes = ("auto", "bfloat16", "fp8_ds_mla")

        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            return SparseImpl

        @classmethod
        def supports_compute_capability(cls, capability: Any) -> bool:
            return bool(capability.major >= 8)

    return SparseBackend
