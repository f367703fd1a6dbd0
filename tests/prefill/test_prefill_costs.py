"""The formula that chooses a way through a prefill layer: what it counts, and that it chooses as measured."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mla_fp8.prefill.costs import COSTS, Costs, LayerShape, count_keys, for_heads, predict

sys.path.insert(0, str(Path(__file__).parents[2] / "docs/gen"))
import prices


def layer_shape(tokens, heads, topk, window, entries):
    return LayerShape(
        num_tokens=tokens, num_q_heads=heads, topk=topk, window_size=window, num_entries=entries,
        num_window_rows=tokens + window - 1 if window else 0, num_keys=tokens * (topk + window),
    )  # fmt: skip


@pytest.fixture
def round_prices(monkeypatch):
    """Prices that nobody measured, so that sums can be done by hand."""
    costs = Costs(
        row=2, reference=0.5, select=1000, look_up=7, workspace_key=((16, 1), (64, 3)),
        window_key=((64, 10),), paged_key=((16, 4), (128, 5)), paged_token=((128, 100),),
    )  # fmt: skip
    monkeypatch.setitem(COSTS, "made up", costs)


def test_the_formula_counts_rows_keys_and_bookkeeping(round_prices):
    shape = LayerShape(
        num_tokens=10, num_q_heads=65, topk=30, window_size=20, num_entries=1000, num_window_rows=29,
        num_keys=400,
    )  # fmt: skip
    assert predict(shape, "made up") == {
        "whole": 400 * 3 * 2 + (1000 + 29) * 2,  # 65 heads are two blocks of 64
        "selected": 400 * 3 * 2 + (300 + 29) * 2 + 1000 + (1000 + 10 * 50) * 0.5,
        "direct": 400 * 5 + 10 * 100 + 7,
    }


def test_neighbours_in_groups_cost_less_or_go_alone(round_prices, monkeypatch):
    monkeypatch.setitem(COSTS, "made up", replace(COSTS["made up"], grouped_key=((16, 1),), grouped=5000))
    shape, many = layer_shape(10, 8, 30, 20, 1000), layer_shape(1000, 8, 30, 20, 1000)
    for given, in_groups in ((shape, 10 * 50 * 4 + 10 * 100), (many, 1000 * 50 * 1 + 5000)):
        alone, grouped = (predict(replace(given, grouped=x), "made up") for x in (False, True))
        assert alone.pop("direct") == given.num_tokens * (50 * 4 + 100) + 7
        assert grouped.pop("direct") == in_groups + 7
        assert alone == grouped


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_groups_are_priced_below_queries_alone_where_tiles_are_full(heads):
    shape = layer_shape(8192, heads, 512, 128, 1 << 20)
    alone, grouped = (predict(replace(shape, grouped=x), "sm90")["direct"] for x in (False, True))
    assert 0.6 * alone < grouped < 0.98 * alone
    assert predict(replace(shape, grouped=True), "sm80")["direct"] == predict(shape, "sm80")["direct"]


def test_windows_alone_have_a_price_of_their_own(round_prices):
    shape = layer_shape(6, 8, 0, 128, 0)
    assert predict(shape, "made up") == {
        "whole": 6 * 128 * 10 + 133 * 2,
        "selected": 6 * 128 * 10 + 133 * 2 + 1000 + 6 * 128 * 0.5,
        "direct": 6 * 128 * 4 + 6 * 100 + 7,
    }


def test_a_gpu_that_nobody_measured_has_hoppers_prices():
    shape = layer_shape(64, 16, 512, 128, 4096)
    assert predict(shape, "sm80") == predict(shape, "sm90") != predict(shape, "cpu")


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_windows_alone_go_through_the_workspace(tokens, heads):
    got = predict(layer_shape(tokens, heads, 0, 128, 0), "sm90")
    assert min(got, key=got.__getitem__) == "whole"


@pytest.mark.parametrize("ratio", [0, 1, 4, 128])
@pytest.mark.parametrize("topk, window", [(0, 12), (10, 0), (10, 12), (2048, 128)])
def test_keys_are_counted_as_far_as_each_token_reaches(ratio, topk, window):
    lengths = [(90, 20), (7, 7), (30, 0), (1, 1), (0, 0), (33, 9), (5000, 4999), (3, 4)]
    want = 0
    for n, queries in lengths:
        for reach in range(max(n - queries, 0) + 1, n + 1):
            want += min(reach // ratio, topk) if ratio else 0
            want += min(reach, window)
    assert count_keys(lengths, ratio, topk, window) == want


def test_prices_are_those_of_the_next_kernel_and_of_blocks_of_the_largest():
    prices = ((8, 1.0), (16, 2.0), (64, 5.0))
    heads = {1: 1.0, 8: 1.0, 9: 2.0, 17: 5.0, 64: 5.0, 65: 10.0, 128: 10.0, 129: 15.0}
    assert {n: for_heads(prices, n) for n in heads} == heads


PAIRS = list(prices.pairs())


@pytest.mark.parametrize(
    ("whole", "direct"), PAIRS, ids=lambda m: f"h{m.heads} t{m.tokens} {m.topk}+{m.window} of {m.rows >> 10}K"
)
def test_the_formula_takes_what_was_measured_to_be_faster(whole, direct):
    """Layers that bench_sparse_prefill measured in both ways on an H200. Two runs differ by up to 3 %."""
    got, measured = predict(whole.shape, "sm90"), {"whole": whole.ns, "direct": direct.ns}
    assert measured[min(got, key=got.__getitem__)] <= 1.03 * min(measured.values())
    assert got["whole"] == pytest.approx(whole.ns, rel=0.15)
    assert got["direct"] == pytest.approx(direct.ns, rel=0.15)


def test_enough_layers_were_measured_in_both_ways():
    assert len(PAIRS) >= 10 and {whole.heads for whole, _ in PAIRS} == {32, 64, 128}


def test_few_new_tokens_over_a_long_context_are_not_worth_a_workspace():
    for heads in (8, 16, 32, 64):
        few = predict(layer_shape(64, heads, 512, 128, (1 << 20) // 4), "sm90")
        many = predict(layer_shape(8192, heads, 512, 128, (1 << 14) // 4), "sm90")
        assert min(few, key=few.__getitem__) == "direct"
        assert (min(many, key=many.__getitem__) == "whole") == (heads > 16)


def test_a_fit_finds_the_prices_that_times_were_made_from():
    keys, tokens = [1e5, 4e5, 1e6, 3e6], [256.0, 256.0, 4096.0, 4096.0]
    times = [0.3 * k + 70 * t for k, t in zip(keys, tokens, strict=True)]
    columns = [list(pair) for pair in zip(keys, tokens, strict=True)]
    assert prices.fit(columns, times) == pytest.approx([0.3, 70])
    less = [0.3 * k - 70 * t for k, t in zip(keys, tokens, strict=True)]
    (key, token), alone = prices.fit(columns, less), prices.fit([[k] for k in keys], less)
    assert token == 0 and key == pytest.approx(alone[0])
