"""A layer's entries in host memory, and on the device a hot buffer for each request."""

import torch
from torch import Tensor

from ... import copy_host_rows, resolve_hot_rows, store_host_rows
from ...layout import KVLayout
from .pages import Pages


class HotBuffer:
    """``num_hot`` slots for each request, a page of ``data`` each; what holds nothing is NaN."""

    def __init__(self, layout: KVLayout, page_size: int, pages: Pages, num_hot: int) -> None:
        self.layout, self.page_size, self.num_hot, self.pages = layout, page_size, num_hot, pages
        requests, device = len(pages.page_table), pages.page_table.device
        self.host = layout.empty(pages.num_pages, page_size, "cpu")
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.data = layout.empty(requests, num_hot, device).fill_(0xFF)
        self._held = torch.full((requests, num_hot), -1, dtype=torch.int32, device=device)
        self._order = torch.arange(num_hot, dtype=torch.int16, device=device).repeat(requests, 1)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)  # entries found, entries loaded

    def store(self, cache: Tensor, slots: Tensor) -> None:
        """New entries of the paged cache."""
        store_host_rows(
            cache, self.host, slots, slots, layout=self.layout, host_page_size=self.page_size,
            hot_page_size=self.page_size,
        )  # fmt: skip

    def load(self, positions: Tensor, request: Tensor) -> Tensor:
        """Rows of ``data`` with the chosen entries, [num_tokens, k], of a token of each request."""
        plan = resolve_hot_rows(
            positions, self._held, self._order, self.pages.page_table, counters=self.counters,
            num_host_rows=self.pages.num_pages * self.page_size, host_page_size=self.page_size,
            row_to_request=request,
        )  # fmt: skip
        copy_host_rows(
            self.host, self.data, *plan[1:], layout=self.layout, host_page_size=self.page_size,
            hot_page_size=self.num_hot,
        )  # fmt: skip
        return plan[0]
