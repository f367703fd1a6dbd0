"""Layouts of caches of index keys, read from csrc/common/index_layout.h through the library."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from .layout import expect_sizes

__all__ = ["INDEX_LAYOUTS", "IndexLayout"]


@dataclass(frozen=True)
class IndexLayout:
    """The byte format of a cache of index keys: one row of the table in ``csrc/common/index_layout.h``.

    A cache is ``[num_pages, page_bytes(page_size)]`` uint8, or the engines' view of that memory,
    ``[num_pages, page_size, 1, bytes_per_entry]``. ``index_fp8`` has 128 e4m3fn and a float32 per entry,
    ``index_fp4`` 128 e2m1 and a ue8m0 per 32 of them. ``id`` is append-only.
    """

    name: str
    value_bytes: int
    scale_bytes: int
    amax_floor: float
    id: int  # the `layout` argument of torch.ops.mla_fp8.*

    @property
    def bytes_per_entry(self) -> int:
        """Values and scales of one index key."""
        return self.value_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of ``page_size`` entries."""
        return page_size * self.bytes_per_entry

    def empty(self, num_pages: int, page_size: int, device: torch.device | str) -> torch.Tensor:
        """An uninitialised cache, ``[num_pages, page_bytes]`` uint8."""
        expect_sizes("IndexLayout", num_pages, page_size)
        return torch.empty(num_pages, self.page_bytes(page_size), dtype=torch.uint8, device=device)

    def views(self, index_cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Aliases of a ``[num_pages, page_bytes]`` cache: values and scales, ``[num_pages, page_size, n]``.

        ``index_fp8``: e4m3fn of 128 and float32 of 1; ``index_fp4``: uint8 of 64 and of 4. The engines' view
        of a cache will do. ValueError for a cache of other pages or of another layout's dtype.
        """
        self._expect_pages(index_cache, page_size)
        index_cache = index_cache.view(torch.uint8)

        def field(offset: int, num_bytes: int) -> torch.Tensor:
            shape, strides = (len(index_cache), page_size, num_bytes), (index_cache.stride(0), num_bytes, 1)
            return index_cache.as_strided(shape, strides, index_cache.storage_offset() + offset)

        values = field(0, self.value_bytes)
        scales = field(page_size * self.value_bytes, self.scale_bytes)
        if self.value_bytes == INDEX_DIM:
            return values.view(torch.float8_e4m3fn), scales.view(torch.float32)
        return values, scales

    def _expect_pages(self, index_cache: torch.Tensor, page_size: int) -> None:
        numbers = torch.float8_e4m3fn if self.value_bytes == INDEX_DIM else torch.float4_e2m1fn_x2
        got = [*index_cache.shape]
        rows = ([self.page_bytes(page_size)], [page_size, 1, self.bytes_per_entry])
        if index_cache.dtype not in (torch.uint8, torch.int8, numbers) or got[1:] not in rows:
            raise ValueError(
                f"IndexLayout.views: index_cache must be uint8, int8 or {numbers} with pages of "
                f"{self.page_bytes(page_size)} bytes ({page_size} entries of layout {self.name}), got "
                f"{index_cache.dtype} of shape {got}"
            )


def _read_table() -> tuple[Mapping[str, IndexLayout], int]:
    header, *rows = (line.split() for line in torch.ops.mla_fp8.index_layout_table().splitlines())
    if header != ["name", "value_bytes", "scale_bytes", "amax_floor", "index_dim"]:
        raise ImportError(f"mla_fp8: the library's index layouts have columns {header}; rebuild the package")
    layouts = {
        name: IndexLayout(name, int(value), int(scale), float(floor), i)
        for i, (name, value, scale, floor, _) in enumerate(rows)
    }
    return MappingProxyType(layouts), int(rows[0][-1])


INDEX_LAYOUTS, INDEX_DIM = _read_table()


def get_index_layout(layout: str | IndexLayout) -> IndexLayout:
    """The layout of that name. Raises ValueError, listing the known names, if there is none."""
    if isinstance(layout, IndexLayout):
        return layout
    if not isinstance(layout, str) or layout not in INDEX_LAYOUTS:
        raise ValueError(f"mla_fp8: layout must be one of {', '.join(INDEX_LAYOUTS)}, got {layout!r}")
    return INDEX_LAYOUTS[layout]
