"""SGLang with --enable-deterministic-inference (same_bits.py): its refusal and the ways of prompts.

=============  ==========================================================================================
refusal        SGLang knows no deterministic `dsa` and `dsv4`: the two are put in its lists
prompts        V3.2: over FP8 pages (`flashmla_kv`) in place of a bf16 copy, never dense; V4: never a copy
indexer        sglang_indexer.py, whether SGLANG_PLUGINS names it or not
=============  ==========================================================================================

Positions ascend, so attention adds in the same order, which SGLang's top-k does not keep.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from .. import probes
from . import same_bits, sglang_indexer

_CHOICES = "sglang.srt.arg_groups.choices"
_LISTS = ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
_BACKENDS = ("dsa", "dsv4")
_V32_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_V4_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"


def lift_refusal() -> None:
    """Re-entrant. The lists are read only where deterministic inference is asked for."""
    choices = import_module(_CHOICES)
    for name in _LISTS:
        known = getattr(choices, name)
        known.extend(x for x in _BACKENDS if x not in known)


def set_dsa_prefill_impl(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    if same_bits.on():
        self.supports_mha_one_shot = False
        if self.dsa_kv_cache_store_fp8 and self.dsa_prefill_impl in ("flashmla_sparse", "flashmla_auto"):
            self.dsa_prefill_impl, self.enable_auto_select_prefill_impl = "flashmla_kv", False
    return original(self, *args, **options)


def use_sparse_prefill(original: Callable[..., bool], self: Any, *args: Any, **options: Any) -> bool:
    return not same_bits.on() and original(self, *args, **options)


HOOKS: dict[str, Callable[..., Any]] = {
    f"{_V32_BACKEND}.set_dsa_prefill_impl": set_dsa_prefill_impl,
    f"{_V4_BACKEND}._use_sparse_prefill": use_sparse_prefill,
}


def why_not() -> str | None:
    """Why this mode of SGLang cannot be served, or None."""
    needs: dict[str, dict[str, tuple[str, ...]]] = {_CHOICES: dict.fromkeys(_LISTS, ())}
    for target in HOOKS:
        module, name, method = target.rsplit(".", 2)
        needs.setdefault(module, {})[f"{name}.{method}"] = ()
    reason = probes.why_not_call(needs)
    return reason or sglang_indexer.why_not("V3.2") or sglang_indexer.why_not("V4")
