"""The address arithmetic of common/kv_layout.h over its whole range."""

import itertools

import _mla_fp8_core as core
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

all_layouts = pytest.mark.parametrize("layout", core.KV_LAYOUTS, ids=lambda layout: layout.name)


def records(layout, row, page_size):
    """(begin, end) of everything the token in `row` owns."""
    token, scale = layout.token_offset(row), layout.scale_offset(row, page_size)
    spans = [(token, token + layout.nope_bytes)]
    if layout.rope_dim:
        spans.append((token + layout.rope_offset, token + layout.rope_offset + layout.rope_bytes))
    if layout.num_tiles:
        spans.append((scale, scale + layout.scale_bytes))
    return spans


@all_layouts
@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 256])
def test_records_tile_the_page_without_overlap(layout, page_size):
    owners = np.zeros(layout.page_bytes(page_size), np.int64)
    for row in range(page_size):
        for begin, end in records(layout, row, page_size):
            assert 0 <= begin < end <= len(owners)
            owners[begin:end] += 1
    used = page_size * layout.bytes_per_token
    assert (owners[:used] == 1).all() and (owners[used:] == 0).all()


@all_layouts
@given(page_size=st.integers(1, 2**33))
def test_a_page_is_its_tokens_rounded_up(layout, page_size):
    page_bytes = layout.page_bytes(page_size)
    assert page_bytes % layout.page_align == 0
    assert 0 <= page_bytes - page_size * layout.bytes_per_token < layout.page_align


@all_layouts
@given(data=st.data())
def test_records_stay_apart_and_inside_past_2_to_the_40_bytes(layout, data):
    page_size = data.draw(st.integers(1, 2**33) | st.sampled_from([1, 2**22, 2**31 - 1, 2**31, 2**33]))
    edges = [0, page_size - 1, page_size // 2, min(page_size - 1, 2**31 // layout.token_stride)]
    row = data.draw(st.integers(0, page_size - 1) | st.sampled_from(edges))
    other = data.draw(st.integers(0, page_size - 1) | st.just(min(row + 1, page_size - 1)))
    page_bytes = layout.page_bytes(page_size)
    spans = sorted({*records(layout, row, page_size), *records(layout, other, page_size)})
    assert len(spans) == len(records(layout, row, page_size)) * (1 if row == other else 2)
    assert spans[0][0] >= 0 and spans[-1][1] <= page_bytes
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@all_layouts
def test_vector_loads_are_aligned(layout):
    """16-byte loads of nope and rope, 8-byte loads of scales, from any row of any page."""
    assert layout.token_stride % 16 == 0 and layout.rope_offset % 16 == 0
    for page_size in (1, 2, 61, 64):
        assert layout.page_bytes(page_size) % 16 == 0
        for row in range(page_size if layout.num_tiles else 0):
            assert layout.scale_offset(row, page_size) % 8 == 0


@all_layouts
def test_derived_sizes_are_consistent(layout):
    assert layout.nope_dim + layout.rope_dim == layout.head_dim_qk
    if layout.num_tiles:
        assert layout.num_tiles * layout.tile_dim == layout.nope_dim
        assert layout.num_tiles * layout.scale_itemsize <= layout.scale_bytes
    else:
        assert layout.scale_bytes == 0
