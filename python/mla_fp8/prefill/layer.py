"""The caches of one layer, as a chunk cache takes them."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..layout import KVLayout, get_layout


class PagedCache(NamedTuple):
    data: Tensor  # [num_pages, page_bytes]
    page_size: int

    @property
    def num_slots(self) -> int:
        return self.data.shape[0] * self.page_size


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer: ``entries`` (one for ``compress_ratio`` tokens), ``window``, or both."""

    layout: str | KVLayout
    compress_ratio: int = 0  # 0: no entries
    entries: PagedCache | None = None
    window: PagedCache | None = None
    scale: Tensor | None = None  # of the layer: fp8_e4m3* only

    def __post_init__(self) -> None:
        get_layout(self.layout)
        for name, cache in (("entries", self.entries), ("window", self.window)):
            if cache is not None and not isinstance(cache, PagedCache):
                raise ValueError(
                    f"LayerCaches: {name} must be a PagedCache(data, page_size) or None, "
                    f"got {type(cache).__name__}"
                )
        if (self.entries is None) == (self.compress_ratio > 0) or self.compress_ratio < 0:
            raise ValueError(
                "LayerCaches: compress_ratio must be positive with entries and 0 without, got "
                f"{self.compress_ratio} {'without' if self.entries is None else 'with'} entries"
            )
        if self.entries is None and self.window is None:
            raise ValueError("LayerCaches: expected entries, window or both, got neither")

    @property
    def geometry(self) -> tuple[int | None, ...]:
        """What the slots of a chunk's rows, and which of them exist, depend on."""
        entries, window = self.entries, self.window
        return (
            self.compress_ratio,
            entries and entries.page_size,
            entries and entries.num_slots,
            window and window.num_slots,
        )
