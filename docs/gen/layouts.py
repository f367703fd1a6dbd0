"""docs/reference/layouts.md: the byte maps of all cache layouts, from the tables in the library."""

import svg

from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS, IndexLayout, KVLayout

INTRODUCTION = """\
<!-- written by docs/gen/layouts.py from csrc/common/kv_layout.h -->
# Layouts

A layout says which bytes of a cache hold which values of a token. [Caches](../guide/caches.md) says which to
choose.

A cache is `[num_pages, page_bytes]` bytes. Pages may lie apart, at multiples of 16 bytes. A token is row `r`
of a page, and its slot is `page * page_size + r`. Offsets are in bytes; `P` is the page size.

A value is its stored number times the scale of its tile, or of its layer. Here `nope` and `rope` name two
ways of storing, not what a model rotates: V4.1 rotates the last 64 values of `dsv41`, which are all `nope`.

Scales that are powers of two are the smallest that is at least amax / (largest value), with the floors named
below. A layout with `_fnuz` has the bytes of the one without it, in e4m3fnuz. V4.1's rows in [another
arrangement](../guide/caches.md#choose-a-layout) of as many bytes are none of these layouts.

| layout | also | head_dim_qk | bytes per token | scales | page of 64 tokens |
|---|---|---|---|---|---|
"""
SCALES = {
    "none": "none",
    "per_layer": "one float32 per layer, outside the cache",
    "f32": "float32 per {0} values, a power of two",
    "ue8m0": "ue8m0 (an exponent) per {0} values",
    "e4m3": "e4m3fn per {0} values",
}


def twin(layout: KVLayout) -> KVLayout | None:
    """The same bytes in e4m3fnuz; an error if they are not the same."""
    other = KV_LAYOUTS.get(f"{layout.name}_fnuz")
    if other is not None and [x.replace("fnuz", "fn") for x in map(str, fields(other))] != [
        *map(str, fields(layout))
    ]:
        raise SystemExit(f"docs/gen/layouts.py: {other.name} has other bytes than {layout.name}")
    return other


def summary(layout: KVLayout) -> str:
    also = f"`{other.name}`" if (other := twin(layout)) else ""
    scales = SCALES[layout.scale_format].format(layout.tile_dim)
    numbers = f"{layout.head_dim_qk} | {layout.bytes_per_token} | {scales} | {layout.page_bytes(64)}"
    return f"| `{layout.name}` | {also} | {numbers} |"


def fields(layout: KVLayout) -> list[tuple[str, int, str]]:
    """(offset, length, content) of each part of a token, in the order of the bytes."""
    nope_bytes = layout.nope_bytes
    rope_bytes = layout.token_stride - layout.rope_offset
    token = f"{layout.token_stride} r"
    parts = [
        (token, nope_bytes, f"nope, {layout.nope_dim} x {layout.nope_format}"),
        (f"{token} + {layout.rope_offset}", rope_bytes, f"rope, {layout.rope_dim} x {layout.rope_format}"),
    ]
    parts = [part for part in parts if part[1]]
    if layout.num_tiles:
        pad = layout.scale_bytes - layout.num_tiles * (4 if layout.scale_format == "f32" else 1)
        content = f"scales, {layout.num_tiles} x {layout.scale_format}" + (
            f", {pad} byte of 0" if pad else ""
        )
        if layout.scale_inline:
            parts.insert(1, (f"{token} + {nope_bytes}", layout.scale_bytes, content))
        else:
            parts.append((f"{layout.token_stride} P + {layout.scale_bytes} r", layout.scale_bytes, content))
    return parts


def byte_map(layout: KVLayout) -> str:
    rows = [f"| {offset} | {length} | {content} |" for offset, length, content in fields(layout)]
    notes = []
    if layout.page_align > 1:
        notes.append(f"A page is padded to a multiple of {layout.page_align} bytes.")
    if layout.nope_format == "e2m1":
        notes.append(
            "Element 2k is the low half of byte k. For the second cache of a call only. The scale is the "
            f"e4m3 nearest to amax / 6 (nearest even), from {layout.scale_floor:g} to 448, codes are nearest "
            "to the quotients by it. NaN in a tile makes its scale NaN and its codes 0."
        )
    elif layout.num_tiles:
        if layout.amax_floor:
            notes.append(f"amax is at least {layout.amax_floor:g}.")
        if layout.scale_floor:
            notes.append(f"The scale is at least {layout.scale_floor:g} before it is rounded up.")
    table = ["| offset in page | bytes | content |", "|---|---|---|", *rows]
    return "\n".join([f"## {layout.name}", "", *table, *([""] if notes else []), *notes])


INDEX = """\
# Index keys

Caches of index keys (`mla_fp8.INDEX_LAYOUTS`, `csrc/common/index_layout.h`): in a page of P entries all
values, then all scales; no padding. Element 2i of e2m1 is the low nibble of byte i, scale i of ue8m0 is that
of elements 32 i .. 32 i + 31.

| layout | bytes per entry | offset of the values of row r | content | offset of its scales | content |
|---|---|---|---|---|---|
"""
INDEX_VALUES = {"index_fp8": ("128 x e4m3fn", "1 x f32"), "index_fp4": ("128 x e2m1", "4 x ue8m0")}


def index_row(layout: IndexLayout) -> str:
    values, scales = INDEX_VALUES[layout.name]
    at = f"{layout.value_bytes} P + {layout.scale_bytes} r"
    number = layout.bytes_per_entry
    return f"| `{layout.name}` | {number} | {layout.value_bytes} r | {values} | {at} | {scales} |"


def document() -> str:
    layouts = [layout for layout in KV_LAYOUTS.values() if not layout.name.endswith("_fnuz")]
    maps = "\n\n".join(byte_map(layout) for layout in layouts)
    index = INDEX + "\n".join(map(index_row, INDEX_LAYOUTS.values()))
    return INTRODUCTION + "\n".join(map(summary, layouts)) + "\n\n" + maps + "\n\n" + index + "\n"


def chart() -> str:
    """Bytes of a cached token or entry in one layer, of the models that a layout is for."""
    models = {
        "V3.2, GLM-5: a token in a layer": ("bf16", "dsv32", "fp8_e4m3"),
        "V4, V4.1: a token or entry in a layer": ("bf16_512", "dsv4", "dsv41", "fp8_e4m3_512", "dsv41_fp4"),
    }
    groups = {
        title: {name: float(KV_LAYOUTS[name].bytes_per_token) for name in names}
        for title, names in models.items()
    }
    index = {layout.name: float(layout.bytes_per_entry) for layout in INDEX_LAYOUTS.values()}
    groups["Index keys: a token or entry in a layer"] = index
    return svg.bars("Memory of a cache, by layout", "bytes; bf16 and bf16_512 are without FP8", groups)


def images() -> dict[str, str]:
    return {"cache_memory.svg": chart()}


def files() -> dict[str, str]:
    return {"docs/reference/layouts.md": document()}
