"""What only the CUDA prefill kernels have: many rows or few, several rows in a CTA at once."""

from dataclasses import replace

import pytest
import torch
from assertions import assert_attention, assert_same
from sparse_cases import V4_SCOPES, all_layouts, make_case, packed_layouts

import mla_fp8
from mla_fp8 import KV_LAYOUTS

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# From one row on many SMs to many on each; the last three always take the kernel for many.
@packed_layouts
@pytest.mark.parametrize("num_q_heads", [5, 16, 32, 100])
@pytest.mark.parametrize("num_tokens", [1, 9, 300, 1100, 2500])
def test_any_number_of_rows(layout, num_tokens, num_q_heads):
    case = make_case(
        layout,
        "cuda",
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        topk=300,
        num_slots=3000,
        extra=V4_SCOPES,
    )
    results = case.prefill_into_nan()
    assert all(not t.isnan().any() for t in results)
    spread = torch.randperm(num_tokens, device="cuda")[:24]
    some = torch.cat([torch.arange(min(8, num_tokens), device="cuda"), spread])
    assert_attention(case, results, some)
    assert_same(case.prefill_into_nan(), results)


@all_layouts
@pytest.mark.parametrize("num_q_heads", [8, 16, 32])
@pytest.mark.parametrize("page_size", [1, 64])
def test_rows_of_every_length(layout, num_q_heads, page_size):
    """Neighbours in a CTA have 0 to 200 keys: they begin and end at different times."""
    case = make_case(
        layout,
        "cuda",
        num_tokens=2200,
        num_q_heads=num_q_heads,
        topk=200,
        num_slots=3000,
        page_size=page_size,
    )
    case.scopes[0].length.copy_(torch.randint(0, 201, (2200,)))
    results = case.prefill_into_nan()
    assert all(not t.isnan().any() for t in results)
    assert_attention(case, results, torch.randperm(2200, device="cuda")[:64])
    assert_same(case.prefill_into_nan(), results)


@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
@pytest.mark.parametrize("num_q_heads", [8, 16, 64, 128])
def test_workspace_form_with_many_rows(name, num_q_heads):
    case = make_case(
        KV_LAYOUTS[name],
        "cuda",
        num_tokens=2200,
        num_q_heads=num_q_heads,
        topk=192,
        num_slots=3000,
        page_size=1,
    )
    scope = case.scopes[0]
    results = mla_fp8.sparse_prefill(
        case.q, scope.rows, scope.indices, sm_scale=case.sm_scale, attn_sink=case.attn_sink,
        topk_length=scope.length,
    )  # fmt: skip
    assert_attention(case, results, torch.randperm(2200, device="cuda")[:32])


@pytest.mark.parametrize("num_q_heads", [8, 16, 32, 64])
@pytest.mark.parametrize(
    "layout, topk, extra",
    [
        ("dsv32", 2048, None),
        ("dsv4", 128, {"topk": 512, "page_size": 64}),
        ("dsv4", 128, {"topk": 1024, "page_size": 2}),
        ("dsv4", 128, None),
    ],
)
def test_production_shapes(layout, topk, extra, num_q_heads):
    case = make_case(
        KV_LAYOUTS[layout], "cuda", num_tokens=4096, num_q_heads=num_q_heads, topk=topk, num_slots=20000,
        page_size=256 if layout == "dsv4" else 64, extra=extra,
    )  # fmt: skip
    results = case.prefill_into_nan()
    assert_attention(case, results, torch.randperm(4096, device="cuda")[:24])
    assert_same(case.prefill_into_nan(), results)


@pytest.mark.parametrize("num_q_heads", [8, 16, 32])
def test_a_row_does_not_depend_on_its_place_or_its_neighbours(num_q_heads):
    """Among as many rows, so that the kernel is the same."""
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", num_tokens=2200, num_q_heads=num_q_heads, extra=V4_SCOPES)
    whole = case.prefill()
    order = torch.randperm(2200, device="cuda")
    assert_same(case.tokens(order).prefill(), tuple(t[order] for t in whole))
    order[1100:] = order[0]
    assert_same(case.tokens(order).prefill(), tuple(t[order] for t in whole))


def test_more_than_a_million_rows():
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", num_tokens=1_100_000, num_q_heads=1, topk=3)
    results = case.prefill()
    for some in (slice(0, 64), slice(1_099_900, 1_100_000)):
        assert_attention(case, results, some)


@pytest.mark.parametrize("num_tokens", [2, 2200])
def test_replays_follow_changed_indices_and_lengths(num_tokens):
    options = {"num_tokens": num_tokens, "num_q_heads": 8, "topk": 300, "num_slots": 2000, "extra": V4_SCOPES}
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", **options)
    other = make_case(KV_LAYOUTS["dsv4"], "cuda", **options)
    case.prefill()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.prefill()
    for _ in range(2):
        for t in results:
            t.fill_(float("nan"))
        graph.replay()
        assert_same(results, case.prefill())
        for mine, theirs in zip(case.scopes, other.scopes, strict=True):
            mine.indices.copy_(theirs.indices.roll(1, 0))
            mine.length.copy_(theirs.length.roll(1, 0) // 2)
            mine.kv_cache.copy_(theirs.kv_cache)
        case.q.copy_(other.q.roll(1, 0))


@pytest.mark.parametrize("num_q_heads, padded", [(5, 8), (12, 16), (20, 32)])
def test_heads_of_one_variant_keep_their_bits_next_to_padding(num_q_heads, padded):
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", num_tokens=2200, num_q_heads=num_q_heads, extra=V4_SCOPES)
    q = torch.zeros(2200, padded, 512, device="cuda").bfloat16()
    q[:, :num_q_heads] = case.q
    sink = torch.full((padded,), -float("inf"), device="cuda")
    sink[:num_q_heads] = case.attn_sink
    wide = replace(case, q=q, attn_sink=sink).prefill()
    assert_same(tuple(t[:, :num_q_heads] for t in wide), case.prefill())
