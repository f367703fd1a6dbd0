"""The formula that chooses a way through a prefill layer: what it counts, and that it chooses as measured."""

import pytest

from mla_fp8.prefill.costs import COSTS, DEFAULT, LayerShape, count_keys, for_heads, predict


def layer_shape(tokens, heads, topk, window, entries):
    return LayerShape(
        num_tokens=tokens, num_q_heads=heads, topk=topk, window_size=window, num_entries=entries,
        num_window_rows=tokens + window - 1 if window else 0, num_keys=tokens * (topk + window),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("tokens", [64, 8192])
def test_windows_alone_have_a_price_of_their_own_and_go_through_the_workspace(tokens, heads):
    shape = layer_shape(tokens, heads, 0, 128, 0)
    got, c = predict(shape, "sm90"), COSTS["sm90"]
    assert got["whole"] == pytest.approx(
        tokens * 128 * for_heads(c.window_key, heads) + (tokens + 127) * c.row
    )
    assert min(got, key=got.__getitem__) == "whole"


@pytest.mark.parametrize("costs", [*COSTS.items(), ("unknown", DEFAULT)], ids=lambda x: x[0])
def test_the_formula_counts_rows_keys_and_bookkeeping(costs):
    arch, c = costs
    shape = LayerShape(
        num_tokens=10, num_q_heads=65, topk=30, window_size=20, num_entries=1000, num_window_rows=29,
        num_keys=400,
    )  # fmt: skip
    keys, (most, workspace) = 400, c.workspace_key[-1]
    from_pages = keys * for_heads(c.paged_key, 65) + 10 * for_heads(c.paged_token, 65)
    got = predict(shape, arch)
    assert most == 64 and got["direct"] == pytest.approx(from_pages + c.look_up)
    assert got["whole"] == pytest.approx(2 * keys * workspace + 1029 * c.row)
    find = c.select + (1000 + 500) * c.reference
    assert got["selected"] == pytest.approx(2 * keys * workspace + (300 + 29) * c.row + find)


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


def crossings(topk, window, ratio, table):
    """`table`: by heads and tokens, the K of context where `direct` is fastest; at half of it `whole` is."""
    for (heads, tokens), first in table.items():
        for context, fastest in [(first, "direct"), (first // 2, "whole")]:
            yield topk, window, ratio, heads, tokens, context << 10, fastest


@pytest.mark.parametrize(
    "topk, window, ratio, heads, tokens, context, fastest",
    [
        *crossings(
            512, 128, 4,
            {(8, 64): 16, (16, 64): 32, (32, 64): 64, (32, 512): 256, (32, 2048): 1024, (32, 8192): 2048,
             (64, 64): 128, (64, 512): 1024, (64, 2048): 4096},
        ),
        *crossings(
            2048, 0, 1,
            {(32, 64): 16, (32, 512): 64, (32, 2048): 256, (32, 8192): 1024,
             (64, 64): 64, (64, 512): 256, (64, 2048): 1024, (64, 8192): 4096},
        ),
        (512, 128, 4, 8, 512, 4096, "direct"),
        (512, 128, 4, 16, 512, 4096, "direct"),
        (2048, 0, 1, 16, 64, 4096, "direct"),
        (512, 128, 4, 64, 8192, 1 << 22, "whole"),
    ],
)  # fmt: skip
def test_crossings_that_the_document_names(topk, window, ratio, heads, tokens, context, fastest):
    """docs/prefill_strategies.md, V4-Flash and V3.2 on an H200."""
    nanoseconds = predict(layer_shape(tokens, heads, topk, window, context // ratio), "sm90")
    assert min(nanoseconds, key=nanoseconds.__getitem__) == fastest


V32, V4 = (2048, 0), (1024, 128)


@pytest.mark.parametrize(
    "tokens, kind, entries, heads, whole, direct",
    [
        (256, V32, 128, 32, 189.64, 121.26),
        (256, V32, 128, 64, 195.94, 168.53),
        (256, V32, 128, 128, 297.31, 338.54),
        (256, V4, 32, 32, 78.22, 77.75),
        (256, V4, 32, 64, 83.35, 113.25),
        (256, V4, 32, 128, 147.17, 187.25),
        (8192, (512, 128), 32, 32, 1024.01, 1271.24),  # `direct`: of the kernel, which is the layer
        (8192, V32, 32, 64, 3740.59, 5631.00),
        (8192, V32, 128, 64, 4490.02, 6205.96),
        (8192, (512, 128), 8, 64, 1133.72, 2130.05),
        (8192, (512, 128), 32, 64, 1241.36, 2191.14),
    ],
)
def test_the_formula_takes_what_was_measured_to_be_faster(tokens, kind, entries, heads, whole, direct):
    """Pairs of `layer` and `layer bf16` rows of bench_sparse_prefill on an H200; entries in K, us."""
    got = predict(layer_shape(tokens, heads, *kind, entries << 10), "sm90")
    assert min(got, key=got.__getitem__) == ("whole" if whole < direct else "direct")
    assert got["whole"] == pytest.approx(1e3 * whole, rel=0.15)
    assert got["direct"] == pytest.approx(1e3 * direct, rel=0.15)
