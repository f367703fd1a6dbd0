"""Neighbours in a prompt that choose mostly the same entries: results, and which way is taken."""

from dataclasses import replace

import pytest
import torch
from prefill_cases import LAYERS, all_strategies, assert_right, make_chunk

import mla_fp8
from mla_fp8.prefill.costs import COSTS
from mla_fp8.prefill.ways import fills_tiles

GROUP = 8


@pytest.fixture
def groups(monkeypatch):
    """query_groups of each call straight from the pages."""
    seen, original = [], mla_fp8.prefill.ways.sparse_prefill_paged

    def listening(*args, **options):
        seen.append(options["query_groups"])
        return original(*args, **options)

    monkeypatch.setattr(mla_fp8.prefill.ways, "sparse_prefill_paged", listening)
    return seen


def clustered(device):
    """A chunk whose neighbours choose nearly the same entries; on a GPU enough of them for sharing to pay."""
    lengths = [1024 if device == "cuda" else 150, 77]
    chunk = make_chunk(
        "dsv4", device, seq_lens=lengths, query_lens=[lengths[0] - 21, 30], window=24, topk=96, num_q_heads=8,
        max_len=1024,
    )  # fmt: skip
    rows = chunk.topk_indices[::GROUP].repeat_interleave(GROUP, 0)[: len(chunk.topk_indices)].clone()
    rows[torch.rand(rows.shape, device=device) < 0.05] = -1
    return chunk, rows


@all_strategies
@pytest.mark.parametrize("kind", LAYERS)
def test_groups_change_no_result(kind, strategy, groups, device):
    entries, window, indexed = LAYERS[kind]
    chunk, rows = clustered(device)
    layer, cache = chunk.layer(entries=entries, window=window), chunk.build()
    topk_indices = rows if indexed else None
    got = chunk.attend(cache, layer, topk_indices, strategy, query_groups=GROUP)
    assert_right(got, chunk.expected(layer, topk_indices))
    alone = chunk.attend(cache, layer, topk_indices, strategy)
    assert groups == ([GROUP, 1] if strategy == "direct" else [])
    if device == "cpu" or strategy != "direct":
        assert all(torch.equal(a, b) for a, b in zip(got, alone, strict=True))


def test_auto_prices_groups_that_fill_tiles(groups, device, monkeypatch):
    """With prices by which only a group makes the pages the fastest way."""
    chunk, rows = clustered(device)
    layer, cache = chunk.layer(), chunk.build()
    arch = mla_fp8.prefill.chunk.arch_of(chunk.q.device.type, chunk.q.device.index)
    prices = replace(COSTS["cpu"], paged_key=((128, 1000.0),), grouped_key=((32, 0.001),), grouped=1.0)
    monkeypatch.setitem(COSTS, arch, prices)
    for query_groups, predicted in ((1, "alone"), (GROUP - 1, "alone"), (GROUP, "grouped")):
        chunk.attend(cache, layer, rows, query_groups=query_groups)
        direct = cache.predict(chunk.q, layer, rows, query_groups=query_groups)["direct"]
        assert (direct < 1e6) == (predicted == "grouped")
    assert groups == [GROUP]


@pytest.mark.parametrize(
    "heads, group, layout, backend, full",
    [
        (8, 8, "dsv4", "auto", True), (8, 7, "dsv4", "auto", False), (16, 4, "dsv4", "native", True),
        (32, 2, "dsv4", "auto", True), (32, 1, "dsv4", "auto", False), (12, 8, "dsv4", "auto", False),
        (64, 2, "dsv4", "auto", False), (8, 8, "dsv41", "auto", False), (8, 8, "dsv4", "reference", False),
    ],
)  # fmt: skip
def test_which_groups_fill_tiles(heads, group, layout, backend, full):
    chunk = make_chunk(layout, "cpu")
    assert fills_tiles(chunk.layer(), torch.empty(4, heads, 512), group, backend) == full


@pytest.mark.parametrize("query_groups", [0, -3, 65537])
def test_a_group_that_is_none_is_refused_in_every_way(query_groups):
    chunk = make_chunk("dsv4", "cpu")
    layer, cache = chunk.layer(), chunk.build()
    message = rf"query_groups must be in \[1, 65536\], got {query_groups}"
    for strategy in ("auto", "whole", "direct"):
        with pytest.raises(ValueError, match=message):
            chunk.attend(cache, layer, chunk.topk_indices, strategy, query_groups=query_groups)
    with pytest.raises(ValueError, match=message):
        cache.predict(chunk.q, layer, chunk.topk_indices, query_groups=query_groups)
