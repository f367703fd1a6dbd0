"""The engines' switches for the same bits in any batch: VLLM_BATCH_INVARIANT=1 in vLLM,
``--enable-deterministic-inference`` in SGLang. Our plug-ins obey them; there is none to name for it.

=============  ==========================================================================================
attention      ``batch_invariant=True`` in every call (attend.py); drafts go alone
prompts        straight from the pages, by the plan of decode: no bf16 copy, no dense attention of short ones
indexer        :func:`mla_fp8.index_topk`, whether a plug-in names it or not
=============  ==========================================================================================

What the engines refuse in this mode is lifted where we attend (vllm_same_bits.py,
sglang.py).
"""

import sys
from types import SimpleNamespace

from . import log

_switch = SimpleNamespace(on=None)


def asked() -> bool:
    """Whether the engine of this process is told to, as far as it has read its arguments."""
    vllm, sglang = sys.modules.get("vllm.envs"), sys.modules.get("sglang.srt.environ")
    if vllm is not None and getattr(vllm, "VLLM_BATCH_INVARIANT", False):
        return True
    return bool(sglang is not None and sglang.envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get())


def on() -> bool:
    """The same, known from the first call of attention on, and said then."""
    if _switch.on is None:
        _switch.on = asked()
        if _switch.on:
            log.say_once(
                "mla_fp8: the same bits in any batch: attention by batch_invariant, prompts from the pages "
                "as decode, index_topk where the indexer is ours"
            )
    return bool(_switch.on)


def switch(to: bool | None) -> None:
    """For tests; None: as the engine says."""
    _switch.on = to
