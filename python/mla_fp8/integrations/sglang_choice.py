"""What prompts of DeepSeek V3.2 and GLM-5 attend to in SGLang, as its top-k wrote it (sglang_layer.py).
SGLang fills a tensor of [tokens, topk] with -1 and copies the choice there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import sglang_indexer


class _Choice:
    """In place of the tensor that SGLang writes its choice into, by rows from the first on: keeps what is
    written."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def __setitem__(self, rows: slice, chosen: Tensor) -> None:
        self.parts.append(chosen)

    def whole(self, num_rows: int, topk: int, device: torch.device) -> Tensor:
        """int32 [num_rows, topk], -1 in rows that nobody wrote."""
        if len(self.parts) == 1 and len(self.parts[0]) == num_rows:
            return self.parts[0].int()
        none = torch.empty(0, topk, dtype=torch.int32, device=device)
        chosen = torch.cat([none, *self.parts]).int()
        return torch.nn.functional.pad(chosen, (0, 0, 0, num_rows - len(chosen)), value=-1)


def get_topk_ragged(
    original: Callable[..., Tensor], self: Any, enable_dual_stream: bool, forward_batch: Any, layer_id: int,
    q_fp8: Tensor, weights: Tensor, metadata: Any, topk_result: Tensor | None = None,
) -> Tensor:  # fmt: skip
    given = self, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata
    if topk_result is not None or sglang_indexer.serves():
        return original(*given, topk_result)
    choice = _Choice()
    original(*given, choice)
    return choice.whole(len(q_fp8), self.index_topk, q_fp8.device)
