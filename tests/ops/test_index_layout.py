"""Golden numbers: a failure here means that existing caches of index keys can no longer be read."""

import pytest
import torch

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS
from mla_fp8.index_layout import get_index_layout

FROZEN = {"index_fp8": (0, 128, 4, 1e-4), "index_fp4": (1, 64, 4, 6 * 2.0**-126)}
PAGE_BYTES = {"index_fp8": [132, 8448, 16896, 33792], "index_fp4": [68, 4352, 8704, 17408]}


def test_every_number_is_frozen():
    found = {
        x.name: (x.id, x.value_bytes, x.scale_bytes, pytest.approx(x.amax_floor, rel=1e-7, abs=0.0))
        for x in INDEX_LAYOUTS.values()
    }
    assert found == FROZEN
    for name, layout in INDEX_LAYOUTS.items():
        assert [layout.page_bytes(p) for p in (1, 64, 128, 256)] == PAGE_BYTES[name]


@pytest.mark.parametrize("name, value, scale", [
    ("index_fp8", (8448 + 3 * 128, 128), (8448 + 64 * 128 + 3 * 4, 4)),
    ("index_fp4", (4352 + 3 * 64, 64), (4352 + 64 * 64 + 3 * 4, 4)),
])  # fmt: skip
def test_fields_lie_where_they_always_did(name, value, scale):
    """Entry 3 of the second page of 64."""
    layout = INDEX_LAYOUTS[name]
    cache = layout.empty(3, 64, "cpu")
    for view, (offset, size) in zip(layout.views(cache, 64), (value, scale), strict=True):
        entry = view[1, 3]
        assert entry.data_ptr() - cache.data_ptr() == offset and entry.nbytes == size


def test_an_unknown_name_lists_the_known_ones():
    assert get_index_layout("index_fp8") is INDEX_LAYOUTS["index_fp8"]
    with pytest.raises(ValueError, match="layout must be one of index_fp8, index_fp4, got 'dsv4'"):
        mla_fp8.quantize_index_k(
            torch.zeros(1, 128), torch.zeros(1), torch.zeros(1), layout="dsv4", page_size=1
        )
