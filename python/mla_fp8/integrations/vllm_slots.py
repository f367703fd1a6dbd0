"""Slots that index_topk, or the merge of ranks, finds beside the positions, for the layers of vLLM that
attend to them: decode of DeepSeek V3.2 and GLM-5 then has no kernel that converts positions.

The indexer (vllm_indexer.py) offers what it chose. The layer that has it takes the offer before it attends
(``record_logical_topk_ready``, which vLLM calls in between), for itself and for all layers of its index
group. An offer that nobody takes at once is void, and so is one of rows that vLLM moves. Attention
(vllm_sparse.py) uses slots of as many rows as it has, by the page table that it has; else vLLM converts. Off
until vllm_layer.py has found a layer with that order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "mla_fp8_slots"  # of an index group
_state = SimpleNamespace(on=False, offered=None)


@dataclass(frozen=True)
class Slots:
    slots: Tensor  # [rows, topk]
    table: tuple[int, ...]
    lens: Tensor | None = None  # [rows], where ranks have a part of the keys each


def switch(on: bool) -> None:
    _state.on, _state.offered = on, None


def room(positions: Tensor, page_table: Tensor, page_size: int) -> Tensor | None:
    """``out_slots`` for ``positions [rows, topk]`` of decode, offered to the layer that chooses; or None."""
    _state.offered = None
    if not _state.on:
        return None
    slots = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    _state.offered = Slots(slots, _key(page_table, page_size))
    return slots


def offer_of_rank(slots: Tensor, lens: Tensor, page_table: Tensor, page_size: int) -> None:
    """A rank's own slots of decode, to the layer that chooses."""
    _state.offered = Slots(slots, _key(page_table, page_size), lens) if _state.on else None


def wanted() -> bool:
    """Whether a layer may take what is offered."""
    return bool(_state.on)


def void(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Around what moves rows of positions behind the choice."""
    _state.offered = None
    return original(*args, **options)


def take(group: Any, layer: int) -> None:
    """What was offered since the last layer, for all of ``group``, by its layer with the indexer: the first.

    The others leave it. vLLM's conversion is for a whole group as well, and by its first layer: all of them
    have to attend to slots from here, or none.
    """
    if _state.on and group is not None and layer == 0 and group.has_indexer:
        setattr(group, _ATTRIBUTE, _state.offered)
        _state.offered = None


def of(group: Any, rows: int, page_table: Tensor, page_size: int) -> Tensor | None:
    """The slots of a step's ``rows``, or None where they are not known."""
    chosen = _taken(group, rows, page_table, page_size)
    return None if chosen is None or chosen.lens is not None else chosen.slots


def of_rank(group: Any, rows: int, page_table: Tensor, page_size: int) -> tuple[Tensor, Tensor] | None:
    """(slots, lens) that a rank has of a step's ``rows``, or None."""
    chosen = _taken(group, rows, page_table, page_size)
    return None if chosen is None or chosen.lens is None else (chosen.slots, chosen.lens)


def _taken(group: Any, rows: int, page_table: Tensor, page_size: int) -> Slots | None:
    chosen: Slots | None = getattr(group, _ATTRIBUTE, None)
    if chosen is None or len(chosen.slots) != rows or chosen.table != _key(page_table, page_size):
        return None
    if group.num_layers == 1:
        setattr(group, _ATTRIBUTE, None)  # nobody else reads them: their memory is free for others
    return chosen


def _key(page_table: Tensor, page_size: int) -> tuple[int, ...]:
    """The same for the same pages: vLLM hands one table to all layers of a kind, or its first rows."""
    return page_table.data_ptr(), page_table.stride(0), page_size
