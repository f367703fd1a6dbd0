"""The caches of one layer, as a chunk cache takes them."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..layout import KV_LAYOUTS, KVLayout, expect_pages, get_layout
from .checks import expect_at_least, expect_kind

__all__ = ["LayerCaches", "PagedCache"]


class PagedCache(NamedTuple):
    """The pages of one cache, ``data`` [num_pages, page_bytes], with ``page_size`` rows each."""

    data: Tensor
    page_size: int

    @property
    def num_slots(self) -> int:
        """Rows of all pages."""
        return self.data.shape[0] * self.page_size


@dataclass(frozen=True)
class LayerCaches:
    """The caches of one layer: ``entries`` (one for ``compress_ratio`` tokens), ``window``, or both.

    Args:
        layout: Of both caches, but for ``entries_layout``.
        compress_ratio: Tokens that an entry stands for; 0: no entries.
        entries: V4's compressed entries, or with ratio 1 all tokens.
        window: The last tokens, all of which a query attends to.
        scale: 1 element, float32, for ``fp8_e4m3*`` layouts alone.
        entries_layout: Of ``entries``, where it is another.

    Raises:
        TypeError: For what is no :class:`PagedCache`.
        ValueError: For entries without a ratio, a ratio without entries, or neither cache; two layouts that
            no call reads together; pages of another layout.
    """

    layout: str | KVLayout
    compress_ratio: int = 0
    entries: PagedCache | None = None
    window: PagedCache | None = None
    scale: Tensor | None = None
    entries_layout: str | KVLayout | None = None

    def __post_init__(self) -> None:
        layout, of_entries = get_layout(self.layout), self.layout_of_entries
        if of_entries != layout and layout.name not in of_entries.extra_of:
            allowed = [x.name for x in KV_LAYOUTS.values() if layout == x or layout.name in x.extra_of]
            raise ValueError(
                f"mla_fp8.LayerCaches: entries_layout must be {' or '.join(allowed)} with layout "
                f"{layout.name}, "
                f"got {of_entries.name}"
            )
        _expect_cache("entries", self.entries, of_entries)
        _expect_cache("window", self.window, layout)
        if (self.entries is None) == (self.compress_ratio > 0) or self.compress_ratio < 0:
            raise ValueError(
                "mla_fp8.LayerCaches: compress_ratio must be positive with entries and 0 without, got "
                f"{self.compress_ratio} {'without' if self.entries is None else 'with'} entries"
            )
        if self.entries is None and self.window is None:
            raise ValueError("mla_fp8.LayerCaches: expected entries, window or both, got neither")

    @property
    def layout_of_entries(self) -> KVLayout:
        """``entries_layout``, or the layout of both caches."""
        return get_layout(self.layout if self.entries_layout is None else self.entries_layout)

    @property
    def layout_name(self) -> str:
        """Of the caches that there are, as ``SparseCall.layout_name``."""
        layouts = [get_layout(self.layout)] if self.window else []
        layouts += [self.layout_of_entries] if self.entries else []
        return " + ".join(dict.fromkeys(layout.name for layout in layouts))

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


def _expect_cache(name: str, cache: PagedCache | None, layout: KVLayout) -> None:
    if cache is None:
        return
    if not isinstance(cache, PagedCache):
        raise TypeError(
            f"mla_fp8.LayerCaches: {name} must be a PagedCache(data, page_size) or None, got "
            f"{type(cache).__name__}"
        )
    expect_kind("mla_fp8.LayerCaches", f"{name}.data", cache.data, Tensor)
    expect_at_least("mla_fp8.LayerCaches", f"{name}.page_size", cache.page_size, 1)
    expect_pages(f"mla_fp8.LayerCaches: {name}.data", layout, cache.data, cache.page_size)
