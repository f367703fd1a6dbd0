"""KV cache layouts, read from csrc/common/kv_layout.h through the library."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["KV_LAYOUTS", "KVLayout"]

_DTYPES = {
    "bf16": torch.bfloat16,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "f32": torch.float32,
    "ue8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
    "e2m1": torch.float4_e2m1fn_x2,
}


def expect_sizes(owner: str, num_pages: int, page_size: int) -> None:
    """ValueError for a cache that cannot be."""
    for name, least, got in (("num_pages", 0, num_pages), ("page_size", 1, page_size)):
        if got < least:
            raise ValueError(f"mla_fp8.{owner}.empty: {name} must be at least {least}, got {got}")


@dataclass(frozen=True)
class KVLayout:
    """The byte format of a latent KV cache: one row of the table in ``csrc/common/kv_layout.h``.

    ``id`` is the ``layout`` of ``torch.ops.mla_fp8.*``. Numbers are append-only, so what ``torch.export``
    saved stays right.

    A cache is ``[num_pages, page_bytes(page_size)]`` uint8, or FlashMLA's view of it (``flash_mla_view``).
    ``extra_of`` names the layouts of a first cache beside which attention reads this one, apart from its own.

    A token has ``nope_dim`` values in ``nope_format``, a scale per ``tile_dim`` of them, and ``rope_dim``
    values in ``rope_format``. A page, whose size is a multiple of ``page_align``, has one every
    ``token_stride`` bytes: nope first, rope ``rope_offset`` bytes on. The ``scale_bytes`` of a token lie
    between if ``scale_inline``, else behind all tokens of the page. Writers raise a tile's largest magnitude
    to ``amax_floor`` and its scale to ``scale_floor``.

    ``scale_format``: ``"none"``; ``"per_layer"``, the ops' ``scale``; or stored with tokens, ``"f32"`` and
    ``"ue8m0"`` as powers of two, ``"e4m3"`` as any value.
    """

    name: str
    nope_dim: int
    rope_dim: int
    nope_format: str
    rope_format: str
    scale_format: str
    scale_inline: int
    tile_dim: int
    amax_floor: float
    scale_floor: float
    page_align: int
    scale_bytes: int
    rope_offset: int
    token_stride: int
    bytes_per_token: int
    head_dim_v: int
    extra_of: tuple[str, ...]
    id: int  # the `layout` argument of torch.ops.mla_fp8.*

    @property
    def head_dim_qk(self) -> int:
        """Elements of the latent: nope, then rope."""
        return self.nope_dim + self.rope_dim

    @property
    def num_tiles(self) -> int:
        """Stored scales per token."""
        return self.nope_dim // self.tile_dim if self.tile_dim else 0

    @property
    def fp8_dtype(self) -> torch.dtype | None:
        """The dtype of nope, None for the bf16 and FP4 layouts."""
        return _DTYPES[self.nope_format] if self.nope_format.startswith("e4m3") else None

    @property
    def nope_bytes(self) -> int:
        """Bytes of nope per token."""
        return self.nope_dim * {"bf16": 4, "e2m1": 1}.get(self.nope_format, 2) // 2

    @property
    def needs_scale(self) -> bool:
        """Whether the ops take (and require) a per-layer ``scale``."""
        return self.scale_format == "per_layer"

    @property
    def extra_only(self) -> bool:
        """Whether attention reads it as the second cache of a call only."""
        return self.nope_format == "e2m1"

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of ``page_size`` tokens, padding included."""
        return -(-page_size * self.bytes_per_token // self.page_align) * self.page_align

    def empty(self, num_pages: int, page_size: int, device: torch.device | str) -> torch.Tensor:
        """An uninitialised cache, ``[num_pages, page_bytes]`` uint8."""
        expect_sizes("KVLayout", num_pages, page_size)
        return torch.empty(num_pages, self.page_bytes(page_size), dtype=torch.uint8, device=device)

    def flash_mla_view(self, kv_cache: torch.Tensor, page_size: int) -> torch.Tensor:
        """The cache as FlashMLA takes it: ``[num_pages, page_size, 1, bytes_per_token]``, same memory.

        ValueError for a cache of other pages.
        """
        expect_pages("mla_fp8.KVLayout.flash_mla_view: kv_cache", self, kv_cache, page_size)
        shape = (len(kv_cache), page_size, 1, self.bytes_per_token)
        strides = (kv_cache.stride(0), self.bytes_per_token, self.bytes_per_token, 1)
        return kv_cache.as_strided(shape, strides)

    def views(
        self, kv_cache: torch.Tensor, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Aliases (nope, scale, rope) of a ``[num_pages, page_bytes]`` cache, or of the engines' views of it.

        Each is ``[num_pages, page_size, n]``; ``scale`` has n = 0 where the layout stores none, ``nope`` one
        element for two values of e2m1. ValueError for a cache of other pages.
        """
        expect_pages("mla_fp8.KVLayout.views: kv_cache", self, kv_cache, page_size)
        kv_cache = kv_cache.view(torch.uint8)

        def field(offset: int, stride: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
            shape, strides = (len(kv_cache), page_size, num_bytes), (kv_cache.stride(0), stride, 1)
            return kv_cache.as_strided(shape, strides, kv_cache.storage_offset() + offset).view(dtype)

        nope, rope = _DTYPES[self.nope_format], _DTYPES[self.rope_format]
        nope_bytes = self.nope_bytes
        scale = _DTYPES.get(self.scale_format, torch.float32)
        scale_at = nope_bytes if self.scale_inline else page_size * self.token_stride
        scale_stride = self.token_stride if self.scale_inline else self.scale_bytes
        if not self.num_tiles:
            scale_at, scale_stride = 0, self.token_stride
        return (
            field(0, self.token_stride, nope_bytes, nope),
            field(scale_at, scale_stride, self.num_tiles * scale.itemsize, scale),
            field(self.rope_offset, self.token_stride, self.rope_dim * rope.itemsize, rope),
        )


_BYTES = (torch.uint8, torch.int8)


def wrong_dtype(layout: KVLayout, kv_cache: torch.Tensor) -> str | None:
    """What is wrong with the dtype of a cache, if anything: bytes may be of any layout, numbers have to be of
    a format that the layout has."""
    held = [_DTYPES[layout.nope_format]]
    held += [_DTYPES[layout.rope_format]] if layout.rope_dim else []
    held += [_DTYPES["e4m3"]] if layout.scale_format == "e4m3" else []
    if kv_cache.dtype in (*_BYTES, *held):
        return None
    names = " or ".join(str(dtype) for dtype in dict.fromkeys((*_BYTES, *held)))
    return f"must have dtype {names} for layout {layout.name}, got {kv_cache.dtype}"


def expect_pages(what: str, layout: KVLayout, kv_cache: torch.Tensor, page_size: int) -> None:
    """ValueError for a cache whose pages are not ``page_size`` rows, or whose dtype is of another layout: it
    would be read as what it is not."""
    if wrong := wrong_dtype(layout, kv_cache):
        raise ValueError(f"{what} {wrong}")
    shape, itemsize = kv_cache.shape, kv_cache.element_size()
    if kv_cache.dim() == 2:
        fits = shape[1] * itemsize == layout.page_bytes(page_size)
    else:
        row = (shape[1], shape[-1] * itemsize) if kv_cache.dim() in (3, 4) else None
        fits = row == (page_size, layout.bytes_per_token)
    if not fits:
        raise ValueError(
            f"{what} must have pages of {layout.page_bytes(page_size)} bytes ({page_size} rows of layout "
            f"{layout.name}), got {kv_cache.dtype} of shape {[*shape]}"
        )


def _read_table() -> Mapping[str, KVLayout]:
    header, *rows = (line.split() for line in torch.ops.mla_fp8.kv_layout_table().splitlines())
    columns = fields(KVLayout)[:-1]
    if header != [f.name for f in columns]:
        raise ImportError(f"mla_fp8: the library's layout table has columns {header}; rebuild the package")
    kinds: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str}
    kinds[tuple[str, ...]] = lambda v: () if v == "-" else tuple(v.split(","))
    parsed = [[kinds[f.type](v) for f, v in zip(columns, row, strict=True)] for row in rows]
    return MappingProxyType({values[0]: KVLayout(*values, id=i) for i, values in enumerate(parsed)})  # type: ignore[misc]


KV_LAYOUTS: Mapping[str, KVLayout] = _read_table()  # read-only
HEAD_DIM_V = next(iter(KV_LAYOUTS.values())).head_dim_v  # of every layout
_BY_ID = tuple(KV_LAYOUTS.values())
_ROWS = [layout for layout in KV_LAYOUTS.values() if layout.nope_format == "bf16"]


def get_layout(layout: "str | KVLayout | None") -> KVLayout:
    """The layout of that name. Raises ValueError, listing the known names, if there is none."""
    if isinstance(layout, KVLayout):
        return layout
    if not isinstance(layout, str) or layout not in KV_LAYOUTS:
        raise ValueError(
            f"mla_fp8: layout must be one of {', '.join(KV_LAYOUTS)}, got {layout!r} "
            "(mla_fp8.resolve_kv_cache_dtype says which one an engine's kv_cache_dtype means)"
        )
    return KV_LAYOUTS[layout]


def row_layout(q: torch.Tensor) -> KVLayout:
    """The layout of bf16 rows that ``q`` can attend to; the first one if there is none."""
    # Compared, not looked up: a size that the compiler does not know has no hash.
    last = q.shape[-1] if isinstance(q, torch.Tensor) and q.dim() else 0
    return next((layout for layout in _ROWS if layout.head_dim_qk == last), _ROWS[0])


def layout_of_id(number: int) -> KVLayout:
    """The layout that ``torch.ops.mla_fp8.*`` knows by this number."""
    return _BY_ID[number]
