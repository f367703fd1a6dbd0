"""Golden numbers. The byte formats are frozen: a failure here means existing caches can no longer be read."""

import pytest
import torch

from mla_fp8 import INDEX_LAYOUTS, KV_LAYOUTS
from mla_fp8.layout import get_layout

# The columns of KVLayout, in its order.
FROZEN = """
dsv32             512 64 e4m3fn   bf16     f32       1 128 0.0    0.0001 1   16 528  656  656  512
dsv4              448 64 e4m3fn   bf16     ue8m0     0 64  0.0001 0.0    576 8  448  576  584  512
fp8_e4m3          512 64 e4m3fn   e4m3fn   per_layer 0 0   0.0    0.0    1   0  512  576  576  512
fp8_e4m3_512      448 64 e4m3fn   e4m3fn   per_layer 0 0   0.0    0.0    1   0  448  512  512  512
bf16              512 64 bf16     bf16     none      0 0   0.0    0.0    1   0  1024 1152 1152 512
bf16_512          448 64 bf16     bf16     none      0 0   0.0    0.0    1   0  896  1024 1024 512
dsv32_fnuz        512 64 e4m3fnuz bf16     f32       1 128 0.0    0.0001 1   16 528  656  656  512
dsv4_fnuz         448 64 e4m3fnuz bf16     ue8m0     0 64  0.0001 0.0    576 8  448  576  584  512
fp8_e4m3_fnuz     512 64 e4m3fnuz e4m3fnuz per_layer 0 0   0.0    0.0    1   0  512  576  576  512
fp8_e4m3_512_fnuz 448 64 e4m3fnuz e4m3fnuz per_layer 0 0   0.0    0.0    1   0  448  512  512  512
dsv41             512 0  e4m3fn   bf16     ue8m0     0 32  0.0    0.0001 512 16 512  512  528  512
dsv32_nope        512 0  e4m3fn   bf16     f32       1 128 0.0    0.0001 1   16 528  528  528  512
dsv41_fp4         512 0  e2m1     bf16     e4m3      0 16  0.0    0.001953125 256 32 256 256 288  512
"""
ROWS = [line.split() for line in FROZEN.split("\n") if line]
EXTRA_OF = {"dsv4": ("dsv4_fnuz",), "dsv41_fp4": ("dsv4", "dsv41")}  # the column that follows

PAGE_BYTES = {  # page size 1, 2, 64, 128, 256
    "dsv32": [656, 1312, 41984, 83968, 167936],
    "dsv4": [1152, 1728, 37440, 74880, 149760],
    "fp8_e4m3": [576, 1152, 36864, 73728, 147456],
    "fp8_e4m3_512": [512, 1024, 32768, 65536, 131072],
    "bf16": [1152, 2304, 73728, 147456, 294912],
    "bf16_512": [1024, 2048, 65536, 131072, 262144],
    "dsv41": [1024, 1536, 33792, 67584, 135168],
    "dsv32_nope": [528, 1056, 33792, 67584, 135168],
    "dsv41_fp4": [512, 768, 18432, 36864, 73728],
}


def test_the_layouts_and_their_ids_are_frozen():
    """Ids are append-only, as exported programs hold them: a new layout is a row at the end of FROZEN."""
    assert list(KV_LAYOUTS) == [row[0] for row in ROWS]
    assert [layout.id for layout in KV_LAYOUTS.values()] == list(range(len(ROWS)))


def test_nobody_can_change_the_table_of_layouts():
    for table in (KV_LAYOUTS, INDEX_LAYOUTS):
        with pytest.raises(TypeError, match="does not support item assignment"):
            table["mine"] = next(iter(table.values()))


@pytest.mark.parametrize("id", range(len(ROWS)), ids=[row[0] for row in ROWS])
def test_every_number_of_a_layout_is_frozen(id):
    layout = KV_LAYOUTS[ROWS[id][0]]
    columns = [name for name in layout.__dataclass_fields__ if name != "id"]
    values = [getattr(layout, name) for name in columns]
    frozen = [*ROWS[id], str(EXTRA_OF.get(layout.name, ()))]
    assert layout.extra_only == (layout.name == "dsv41_fp4")
    assert dict(zip(columns, map(str, values), strict=True)) == dict(zip(columns, frozen, strict=True))
    assert layout.id == id
    assert layout.head_dim_qk == (
        512 if any(part in layout.name for part in ("512", "dsv4", "nope")) else 576
    )


@pytest.mark.parametrize("name", KV_LAYOUTS)
def test_page_bytes_are_frozen(name):
    got = [KV_LAYOUTS[name].page_bytes(page_size) for page_size in (1, 2, 64, 128, 256)]
    assert got == PAGE_BYTES[name.removesuffix("_fnuz")]


@pytest.mark.parametrize(
    "name, nope, scale, rope",  # byte of the second token of the second page of 64, and the field's width
    [
        ("dsv32", (41984 + 656, 512), (41984 + 656 + 512, 16), (41984 + 656 + 528, 128)),
        ("dsv4", (37440 + 576, 448), (37440 + 64 * 576 + 8, 7), (37440 + 576 + 448, 128)),
        ("fp8_e4m3", (36864 + 576, 512), None, (36864 + 576 + 512, 64)),
        ("fp8_e4m3_512", (32768 + 512, 448), None, (32768 + 512 + 448, 64)),
        ("bf16", (73728 + 1152, 1024), None, (73728 + 1152 + 1024, 128)),
        ("bf16_512", (65536 + 1024, 896), None, (65536 + 1024 + 896, 128)),
        ("dsv41", (33792 + 512, 512), (33792 + 64 * 512 + 16, 16), None),
        ("dsv32_nope", (33792 + 528, 512), (33792 + 528 + 512, 16), None),
        ("dsv41_fp4", (18432 + 256, 256), (18432 + 64 * 256 + 32, 32), None),
    ],
)
@pytest.mark.parametrize("twin", ["", "_fnuz"])
def test_fields_lie_where_they_always_did(name, nope, scale, rope, twin):
    layout = KV_LAYOUTS.get(name + twin)
    if layout is None:
        assert name.startswith("bf16") or rope is None
        return
    kv_cache = layout.empty(3, 64, "cpu")
    for view, where in zip(layout.views(kv_cache, 64), (nope, scale, rope), strict=True):
        if where is None:
            assert view.numel() == 0
            continue
        field = view[1, 1]
        assert field.data_ptr() - kv_cache.data_ptr() == where[0]
        assert field.numel() * field.element_size() == where[1]


@pytest.mark.parametrize("name", KV_LAYOUTS)
def test_a_cache_of_any_dtype_has_the_same_fields(name):
    """Engines type a cache of bf16 rows as bf16, and may keep other things between its pages."""
    layout = KV_LAYOUTS[name]
    pages = torch.randint(256, (4, layout.page_bytes(6) + 64), dtype=torch.uint8)[1:, :-64]
    numbers = [layout.fp8_dtype] if layout.fp8_dtype else []
    dtypes = [torch.int8, *numbers] + [torch.bfloat16] * (
        layout.rope_format == "bf16" and layout.rope_dim > 0
    )
    for typed in (pages.view(dtype) for dtype in dtypes):
        for view, same in zip(layout.views(typed, 6), layout.views(pages, 6), strict=True):
            assert view.dtype == same.dtype and view.shape == same.shape and view.stride() == same.stride()
            assert view.storage_offset() == same.storage_offset()


def test_flash_mla_view_is_the_same_memory():
    layout = KV_LAYOUTS["dsv4"]
    wide = torch.zeros(3, 37440 + 64, dtype=torch.uint8)
    kv_cache = wide[:, :37440]
    view = layout.flash_mla_view(kv_cache, 64)
    assert view.shape == (3, 64, 1, 584) and view.data_ptr() == kv_cache.data_ptr()
    assert view.stride() == (37440 + 64, 584, 584, 1)


@pytest.mark.parametrize("view", ["views", "flash_mla_view"])
def test_a_cache_of_other_pages_has_no_views(view):
    """Fewer rows to a page than it has would be read as those of another one."""
    layout = KV_LAYOUTS["dsv4"]
    pages = layout.empty(3, 64, "cpu")
    wrong = [(pages, 32), (pages, 128), (pages[0], 64), (layout.flash_mla_view(pages, 64), 32)]
    wrong.append((KV_LAYOUTS["dsv41"].empty(3, 64, "cpu"), 64))
    for kv_cache, page_size in wrong:
        message = rf"KVLayout.{view}: kv_cache must have pages of {layout.page_bytes(page_size)} bytes"
        with pytest.raises(ValueError, match=message):
            getattr(layout, view)(kv_cache, page_size)


@pytest.mark.parametrize("layout", [KV_LAYOUTS["dsv4"], INDEX_LAYOUTS["index_fp8"]])
def test_a_cache_that_cannot_be_is_refused(layout):
    assert layout.empty(0, 1, "cpu").shape == (0, layout.page_bytes(1))
    for sizes, named in (
        ((-1, 64), "num_pages must be at least 0, got -1"),
        ((2, 0), "page_size must be at"),
    ):
        with pytest.raises(ValueError, match=named):
            layout.empty(*sizes, "cpu")


def test_a_layout_is_found_by_name_or_given_as_it_is():
    assert get_layout("dsv4") is KV_LAYOUTS["dsv4"] is get_layout(KV_LAYOUTS["dsv4"])
    with pytest.raises(ValueError, match=r"layout must be one of dsv32, dsv4, .*dsv41_fp4, got 'dsv5'"):
        get_layout("dsv5")
