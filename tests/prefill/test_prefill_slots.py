"""Slots that the tables or the caches of a chunk do not hold, and caches that differ from layer to layer."""

import pytest
import torch
from prefill_cases import LAYERS, all_strategies, assert_right, make_chunk

import mla_fp8
from mla_fp8 import LayerCaches


@all_strategies
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("seed", range(3))
def test_slots_that_the_tables_do_not_hold_are_masked_in_every_way(strategy, kind, seed, device):
    """A page that is not there, or is beyond the cache, is no vector of zeros: not even in a workspace."""
    entries, window, indexed = LAYERS[kind]
    chunk = make_chunk("dsv4", device)
    layer = chunk.layer(entries=entries, window=window)
    chunk.lose_slots(seed)
    topk_indices = chunk.topk_indices if indexed else None
    cache = chunk.build()
    for _ in range(2):  # the second time from what the chunk keeps
        got = chunk.attend(cache, layer, topk_indices, strategy)
        assert_right(got, chunk.expected(layer, topk_indices))


@all_strategies
def test_what_a_cache_does_not_hold_is_masked_for_that_layer_alone(strategy, device):
    """The second layer's caches have fewer pages; the tables of the chunk are the same."""
    chunk = make_chunk("dsv4", device)
    layer, cache = chunk.layer(), chunk.build()
    few = mla_fp8.PagedCache(layer.entries.data[:4], layer.entries.page_size)
    short = LayerCaches(**vars(layer) | {"entries": few, "window": None})
    for one, topk_indices in [(layer, chunk.topk_indices), (short, None), (layer, None), (short, None)]:
        lost = (chunk.page_table >= 4).repeat_interleave(few.page_size, 1).cpu()
        chunk.lost_entries = lost if one is short else torch.zeros_like(lost)
        got = chunk.attend(cache, one, topk_indices, strategy)
        assert_right(got, chunk.expected(one, topk_indices))


@all_strategies
def test_a_layer_with_a_window_is_refused_by_a_chunk_without(strategy, device):
    """Its workspace has no row of the window: attention to nothing is what it would be."""
    chunk = make_chunk("dsv4", device)
    layer, cache = chunk.layer(), chunk.build(window_size=0)
    for refused in (chunk.attend, lambda *arguments: cache.predict(chunk.q, layer)):
        with pytest.raises(ValueError, match="window_size must be positive for a layer with a window, got 0"):
            refused(cache, layer, chunk.topk_indices, strategy)


@all_strategies
def test_entries_of_one_ratio_in_pages_of_two_sizes(strategy, device):
    """One chunk, two layers: the slots of the one are not those of the other."""
    chunk = make_chunk("dsv4", device)
    cache, small = chunk.build(), chunk.layer(window=False)
    large = LayerCaches(**vars(small) | {"entries": chunk.entry_cache(2 * small.entries.page_size)})
    for layer in (small, large, small):
        got = chunk.attend(cache, layer, chunk.topk_indices, strategy)
        assert_right(got, chunk.expected(layer, chunk.topk_indices))


@all_strategies
def test_a_table_without_pages_has_no_entries(strategy, device):
    chunk = make_chunk("dsv4", device)
    layer = chunk.layer()
    want = chunk.attend(chunk.build(), layer, torch.full_like(chunk.topk_indices, -1), strategy)
    chunk.page_table = chunk.page_table[:, :0]
    for a, b in zip(chunk.attend(chunk.build(), layer, chunk.topk_indices, strategy), want, strict=True):
        assert torch.equal(a, b)


def test_a_table_of_other_requests_is_refused(device):
    chunk = make_chunk("dsv4", device)
    table = chunk.page_table
    for chunk.page_table in (table[:-1], table[0], table.long()):
        with pytest.raises(
            ValueError, match=r"page_table must be torch.int32 of shape \[6, \*\] on .*, got torch"
        ):
            chunk.build()
