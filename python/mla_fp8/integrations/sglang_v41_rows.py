"""SGLang on Hopper: DeepSeek V4.1's own rows, ``dsv41`` of the window and ``dsv41_fp4`` of entries.

SGLang chooses them on SM100 alone, and V4's on Hopper, where FlashMLA has no kernel for others. Off unless
SGLANG_PLUGINS names ``mla_fp8_v41_rows`` besides ``mla_fp8``, whose hooks then read them. SGLang's own
kernels write them: they compile for Hopper, where FP4 codes come from CUDA's conversion in software.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from mla_fp8_plugins import named_in_sglang

from .. import probes
from ..compat.sglang import LAYOUTS
from ..layout import KV_LAYOUTS
from . import flash_mla_calls, sglang
from .hooks import register_in_sglang
from .log import say_once

NAME = "mla_fp8_v41_rows"
_LOGGER = logging.getLogger("sglang.mla_fp8")
_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_ROWS = "sglang.kernels.ops.attention.dsv4.kv_layout"
_ENVIRON = "sglang.srt.environ"
CHOICE = f"{_POOL}.select_dsv4_kv_layout"
_NEEDS: dict[str, dict[str, tuple[str, ...]]] = {
    _POOL: {"select_dsv4_kv_layout": (), "get_exec": (), "get_platform": ()},
    _ROWS: {"KVLayout.V41": (), "KVLayout.V41_FP4": ()},
    _ENVIRON: {"envs.SGLANG_DSV4_KV_LAYOUT.is_set": (), "envs.SGLANG_DSV4_COMPRESSED_KV_LAYOUT": ()},
}
_PAGE_SIZES = {"v41": (256,), "v41_fp4": (256, 128)}  # of the window; of entries of 1 and 2 tokens


def _select_dsv4_kv_layout(original: Callable[[], Any]) -> Any:
    """What SGLANG_DSV4_KV_LAYOUT=v41 chooses on SM100, unless that is v4. Asked before a pool is made."""
    envs, pool = import_module(_ENVIRON).envs, import_module(_POOL)
    rows = envs.SGLANG_DSV4_KV_LAYOUT.get().lower() if envs.SGLANG_DSV4_KV_LAYOUT.is_set() else "v41"
    kernel = pool.get_exec().kernel
    if not pool.get_platform().is_sm90:
        say_once(f"{NAME}: the GPU is no Hopper GPU: rows are as SGLang chooses them")
        return original()
    if rows == "v4" or kernel.dsv4_attn_backend in ("trtllm", "flashmla_mega"):
        return original()
    if rows == "v41_new":
        raise ValueError(
            f"{NAME}: SGLANG_DSV4_KV_LAYOUT=v41_new has each row's scales behind the row, which mla_fp8 does "
            "not read: take v41"
        )
    flash_mla_calls.read_v41_rows(True)
    return import_module(_ROWS).KVLayout.V41, envs.SGLANG_DSV4_COMPRESSED_KV_LAYOUT.get().lower()


def register() -> None:
    """Entry point: SGLang's pools have V4.1's rows, or it says why not."""
    reason = why_not()
    if reason:
        _LOGGER.warning("%s is not used in SGLang: %s", NAME, reason)
        return
    register_in_sglang({CHOICE: _select_dsv4_kv_layout})
    window, entry = (KV_LAYOUTS[LAYOUTS[name]].bytes_per_token for name in _PAGE_SIZES)
    _LOGGER.info(
        "mla_fp8: DeepSeek V4.1's own rows: %d bytes of the window, %d of entries of 1 and 2 tokens; query "
        "heads as they are. SGLang's own: what writes them.",
        window,
        entry,
    )


def why_not() -> str | None:
    """The first thing that keeps SGLang from these rows here, or None."""
    if "mla_fp8" not in named_in_sglang():
        return "SGLANG_PLUGINS has to name mla_fp8, too, which reads these rows"
    reason = sglang.why_not() or sglang.why_not_methods("V4") or probes.why_not_call(_NEEDS)
    if reason:
        return reason
    reason = probes.why_not_replace(import_module(_POOL).select_dsv4_kv_layout, _select_dsv4_kv_layout)
    if reason:
        return f"select_dsv4_kv_layout {reason}"
    theirs = import_module(_ROWS).KVLayout
    for name, page_sizes in _PAGE_SIZES.items():
        own = KV_LAYOUTS[LAYOUTS[name]]
        if any(theirs(name).page_bytes(n) != own.page_bytes(n) for n in page_sizes):
            return f"its rows of {name} have another size"
    return None
