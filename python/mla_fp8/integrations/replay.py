"""What the indexer chose, for whoever asks: recorded, or replaced by a list that is played back.

A hook is ``hook(layer, positions, requests)``, called behind the choice of each layer that chooses, on the
stream of the step:

==========  =============================================================================================
layer       the engine's name of the attention layer, in SGLang its number
positions   [rows, topk] int32, of the request, ascending, then -1; of V4 entries. The engine's own memory:
            ``record`` copies what it wants to keep, ``play`` writes over it
requests    [rows] int32, which request of the step a row is of; what pads a graph is -1 or a row of any
==========  =============================================================================================

A CUDA graph repeats what the hooks did at its capture: copies between tensors that stay. Set them before the
engine captures. Off, a layer pays one comparison on the host.

vLLM: layers of DeepSeek V3.2 and GLM-5 by our backend, of V4 with mla_fp8_flash_mla. SGLang: V3.2 with
deterministic inference; without it SGLang's own capture (--enable-return-indexer-topk) records.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

__all__ = ["play", "record"]

Hook = Callable[[str, Tensor, Tensor], Any]
_hooks = SimpleNamespace(record=None, play=None)


def record(hook: Hook | None) -> None:
    """Hands every choice to ``hook``; None: to nobody."""
    _hooks.record = hook


def play(hook: Hook | None) -> None:
    """Lets ``hook`` write over every choice; None: choices stay the indexer's."""
    _hooks.play = hook


def wanted() -> bool:
    return _hooks.record is not None or _hooks.play is not None


def chosen(layer: str, positions: Tensor, requests: Tensor) -> bool:
    """A layer's choice. Returns whether a hook may have replaced it. Recorded is what attention gets."""
    played = _hooks.play is not None
    if played:
        _hooks.play(layer, positions, requests)
    if _hooks.record is not None:
        _hooks.record(layer, positions, requests)
    return played
