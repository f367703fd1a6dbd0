"""Buffers of ``index_topk_out`` and its siblings for callers in an engine, who have none at hand."""

from typing import Any

import torch
from torch import Tensor

from .ops.index_topk import index_topk_counters, index_topk_workspace

_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}  # of device and stream; the last one stays 0


def index_buffers(rows: int, topk: int, device: torch.device, **sizes: int) -> dict[str, Any]:
    """``out_lens``, ``workspace`` and ``counters`` for a call on the current stream.

    ``sizes``: ``num_candidates`` or ``num_positions`` of :func:`mla_fp8.index_topk_workspace`.
    """
    size = index_topk_workspace(rows, topk=topk, device=device, **sizes)
    return {
        "out_lens": torch.empty(rows, dtype=torch.int32, device=device),
        "workspace": torch.empty(size, dtype=torch.uint8, device=device) if size else None,
        "counters": counters(device),
    }


def counters(device: torch.device) -> Tensor | None:
    """What index_topk counts with, of the current stream: calls of one stream come one after the other.

    A graph that is captured before its stream has any gets none: it would fill them at each replay.
    """
    if device.type == "cpu":
        return None
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS and not torch.cuda.is_current_stream_capturing():
        _COUNTERS[key] = torch.zeros(index_topk_counters(device) + 1, dtype=torch.int32, device=device)
    return _COUNTERS.get(key)


def one_page(device: torch.device) -> Tensor:
    """[1, 1] int32: the page table of a request whose only page is 0."""
    kept = counters(device)
    return torch.zeros((1, 1), dtype=torch.int32, device=device) if kept is None else kept[-1:, None]
