"""The scratch rows of sparse prefill, and how many a layer needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import KV_LAYOUTS
from .checks import check_strategy, expect_at_least, expect_lengths

__all__ = ["PrefillWorkspace", "workspace_rows"]

STRATEGIES = ("whole", "selected", "direct")


class PrefillWorkspace:
    """Scratch rows for one stream, owned by the caller; a CUDA graph needs one of its own.

    Args:
        head_dim_qk: Of the layers' layouts: 512 or 576.
        device: Where the rows are.

    Raises:
        ValueError: For another number.
    """

    def __init__(self, head_dim_qk: int, device: torch.device | str) -> None:
        known = sorted({layout.head_dim_qk for layout in KV_LAYOUTS.values()})
        if head_dim_qk not in known:
            raise ValueError(
                f"mla_fp8.PrefillWorkspace: head_dim_qk must be {' or '.join(map(str, known))}, got "
                f"{head_dim_qk!r}"
            )
        self._rows = torch.empty((0, head_dim_qk), dtype=torch.bfloat16, device=device)
        self.chunk: object = None  # that may use it

    @property
    def capacity(self) -> int:
        """Rows that it holds now."""
        return len(self._rows)

    def reserve(self, num_rows: int) -> Tensor:
        """``[num_rows, head_dim_qk]`` bf16, uninitialised. Grows at least by half, never inside a graph."""
        if num_rows > self.capacity:
            if capturing():
                raise RuntimeError(
                    f"mla_fp8.PrefillWorkspace: expected {num_rows} rows to be reserved before the capture "
                    "of a CUDA "
                    f"graph, got {self.capacity}; see workspace_rows()"
                )
            size = (max(num_rows, self.capacity * 3 // 2), self._rows.shape[1])
            self._rows = self._rows.new_empty(0)  # first give the old one back
            self._rows = self._rows.new_empty(size)
        return self._rows[:num_rows]


def workspace_rows(
    seq_lens_host: Sequence[int],
    query_lens_host: Sequence[int],
    *,
    window_size: int,
    compress_ratio: int,
    topk: int | None = None,
    strategy: str = "whole",
) -> int:
    """Find how many workspace rows one layer needs.

    Args:
        seq_lens_host: Tokens of each request, those of the chunk too.
        query_lens_host: Tokens of the chunk.
        window_size: Tokens of a window; 0: none.
        compress_ratio: Tokens that an entry stands for; 0: no entries.
        topk: Chosen entries of a token; None: all of its past.
        strategy: ``"whole"``, ``"selected"`` or ``"direct"``, which needs none.

    Returns:
        A number of rows, for ``PrefillWorkspace.reserve``.

    Raises:
        ValueError: For negative numbers, or unequal numbers of lengths.
    """
    name = "mla_fp8.workspace_rows"
    check_strategy(strategy, STRATEGIES)
    seq_lens_host = expect_lengths(name, "seq_lens_host", seq_lens_host)
    query_lens_host = expect_lengths(name, "query_lens_host", query_lens_host, len(seq_lens_host))
    expect_at_least(name, "window_size", window_size, 0)
    expect_at_least(name, "compress_ratio", compress_ratio, 0)
    if topk is not None:
        expect_at_least(name, "topk", topk, 0)
    if strategy == "direct":
        return 0
    entries = num_entries(seq_lens_host, compress_ratio)
    if strategy == "selected" and topk is not None:
        entries = min(entries, sum(query_lens_host) * topk)
    return entries + num_window_rows(seq_lens_host, query_lens_host, window_size)


def num_entries(seq_lens_host: Sequence[int], ratio: int) -> int:
    return sum(n // ratio for n in seq_lens_host) if ratio else 0


def num_window_rows(seq_lens_host: Sequence[int], query_lens_host: Sequence[int], window_size: int) -> int:
    """Tokens that the windows reach. A request without queries still counts its window, as the op does."""
    if not window_size:
        return 0
    lengths = zip(seq_lens_host, query_lens_host, strict=True)
    return sum(min(n, queries + window_size - 1) for n, queries in lengths)


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
