"""Entry points that vLLM and SGLang load in each of their processes, whether anybody asked for them or not.

So they import neither torch nor mla_fp8, whose GPU library takes time and memory. Those of
:mod:`mla_fp8.integrations` are imported once the engine's list of plug-ins names them. vLLM's backend needs
no list: its path is left where vLLM looks backends up, and imported when somebody chooses it.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

NAME, BACKEND = "MLA_FP8", "mla_fp8.integrations.vllm.SparseBackend"
UNUSED = "mla_fp8 is installed; SGLANG_PLUGINS=mla_fp8 makes SGLang use it"
_REGISTRY = "vllm.v1.attention.backends.registry"


def vllm() -> None:
    """Offers the backend as MLA_FP8, from vLLM 0.31 on, and as CUSTOM; or logs why not. Re-entrant.

    A name that another package has stays that package's.
    """
    try:
        registry = import_module(_REGISTRY)
        refused = [reason for name in (NAME, "CUSTOM") if (reason := _why_not_offer(registry, name))]
    except (ImportError, AttributeError) as error:
        refused = [f"{_REGISTRY} is not as expected ({error})", ""]
    if len(refused) == 2:  # of both
        reason = "; ".join(filter(None, refused))
        logging.getLogger("mla_fp8").warning("mla_fp8 is not offered to vLLM as a backend: %s", reason)


def _why_not_offer(registry: Any, name: str) -> str | None:
    """Offers the backend by this name, or says why not."""
    backends = registry.AttentionBackendEnum
    member = backends.__members__.get(name)
    if member is None:
        if not hasattr(backends, "register"):
            return f"vLLM before 0.31 has no {name}"
        registry.register_backend(name, BACKEND)
        # In a process that is spawned vLLM unpickles its configuration before it loads plug-ins.
        backends[name].__reduce_ex__ = lambda protocol: (vllm_backend, (name,))
        return None
    path = member.get_path() if member.value or member.is_overridden() else BACKEND
    if path != BACKEND:
        return f"{name} is {path} already"
    registry.register_backend(member, BACKEND)
    return None


def vllm_backend(name: str) -> Any:
    """vLLM's member of that name, in whatever process. ValueError from vLLM if there is none."""
    vllm()
    return import_module(_REGISTRY).AttentionBackendEnum[name]


def named_in_vllm() -> list[str]:
    """What VLLM_PLUGINS names; nothing without vLLM."""
    try:
        return import_module("vllm.envs").VLLM_PLUGINS or []
    except ImportError:
        return []


def named_in_sglang() -> list[str]:
    """What SGLANG_PLUGINS names; nothing without SGLang."""
    try:
        names = import_module("sglang.srt.environ").envs.SGLANG_PLUGINS.get() or ""
    except ImportError:
        return []
    return [name.strip() for name in names.split(",")]


def _entry_point(named: Callable[[], list[str]], name: str, module: str, register: str) -> Callable[[], None]:
    def load() -> None:
        if name in named():
            getattr(import_module(f"mla_fp8.integrations.{module}"), register)()
        elif name == "mla_fp8":
            logging.getLogger("sglang.mla_fp8").info(UNUSED)

    return load


vllm_flash_mla = _entry_point(named_in_vllm, "mla_fp8_flash_mla", "vllm", "register_flash_mla_calls")
vllm_query_groups = _entry_point(named_in_vllm, "mla_fp8_query_groups", "vllm", "register_query_groups")
vllm_layer_ops = _entry_point(named_in_vllm, "mla_fp8_layer_ops", "layer_ops", "register_vllm")
vllm_index_topk = _entry_point(named_in_vllm, "mla_fp8_index_topk", "vllm_indexer", "register")
vllm_hisparse = _entry_point(named_in_vllm, "mla_fp8_hisparse", "hisparse", "register_vllm")
vllm_context_parallel = _entry_point(
    named_in_vllm, "mla_fp8_context_parallel", "vllm_context_parallel", "register"
)

sglang = _entry_point(named_in_sglang, "mla_fp8", "sglang", "register")
sglang_query_groups = _entry_point(named_in_sglang, "mla_fp8_query_groups", "sglang", "register_query_groups")
sglang_layer_ops = _entry_point(named_in_sglang, "mla_fp8_layer_ops", "layer_ops", "register_sglang")
sglang_index_topk = _entry_point(named_in_sglang, "mla_fp8_index_topk", "sglang_indexer", "register")
sglang_hisparse = _entry_point(named_in_sglang, "mla_fp8_hisparse", "hisparse", "register_sglang")
sglang_context_parallel = _entry_point(
    named_in_sglang, "mla_fp8_context_parallel", "sglang_context_parallel", "register"
)
sglang_v41_rows = _entry_point(named_in_sglang, "mla_fp8_v41_rows", "sglang_v41_rows", "register")
