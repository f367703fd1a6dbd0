"""What only the CUDA kernels have: variants, splits, a portable fallback, graph replay."""

from dataclasses import replace

import pytest
import torch
from sparse_cases import V4_SCOPES, Case, all_layouts, make_case, packed_layouts

from mla_fp8 import KV_LAYOUTS
from mla_fp8.testing import assert_as_accurate_as, assert_within_flash_mla_tolerance

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")


def assert_right(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    exact, _, exact_lse = case.expected()
    assert_as_accurate_as(out, case.rounded(), exact)
    assert_within_flash_mla_tolerance(out, lse, exact, exact_lse)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# Batch and heads choose the kernel variant and the splits: from one row over 16 CTAs to several rows per SM.
@packed_layouts
@pytest.mark.parametrize("num_q_heads", [5, 16, 32, 64, 100])
@pytest.mark.parametrize("num_tokens", [1, 9, 40, 150])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_plan(layout, num_tokens, num_q_heads, batch_invariant):
    case = make_case(
        layout,
        "cuda",
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        topk=1000,
        num_slots=3000,
        extra=V4_SCOPES,
    )
    assert_right(case, *case.decode(batch_invariant=batch_invariant))


# FlashMLA's production set, and 32 heads over clusters of 8.
@pytest.mark.parametrize(
    "layout, num_tokens, num_q_heads, page_size, topk, extra",
    [
        ("dsv32", 4, 128, 64, 2048, None),
        ("dsv32", 148, 128, 64, 2048, None),
        ("dsv32", 8, 32, 64, 2048, None),
        *(
            ("dsv4", num_tokens, heads, 256, 128, {"topk": topk, "page_size": page_size})
            for num_tokens, heads, topk, page_size in [
                (4, 64, 512, 64),
                (128, 64, 512, 64),
                (512, 64, 512, 64),
                (256, 128, 1024, 64),
                (512, 64, 1024, 2),
            ]
        ),
    ],
)
def test_production_shapes(layout, num_tokens, num_q_heads, page_size, topk, extra):
    case = make_case(
        KV_LAYOUTS[layout], "cuda", num_tokens=num_tokens, num_q_heads=num_q_heads, page_size=page_size,
        topk=topk, num_slots=20000, extra=extra,
    )  # fmt: skip
    out, lse = case.decode()
    some = slice(0, 24)
    assert_right(case.tokens(some), out[some], lse[some])
    again = case.decode()
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    few = case.tokens(slice(num_tokens - 4, num_tokens))
    assert_right(few, out[-4:], lse[-4:])


# Enough rows and heads of bf16 go to prefill's kernel.
@pytest.mark.parametrize("name", ["bf16", "bf16_512"])
@pytest.mark.parametrize("extra", [None, V4_SCOPES], ids=["one cache", "two caches"])
@pytest.mark.parametrize("num_q_heads", [33, 64, 128])
@pytest.mark.parametrize("num_tokens", [64, 80, 300])
@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_many_rows_of_bf16(name, extra, num_q_heads, num_tokens, page_size):
    case = make_case(
        KV_LAYOUTS[name],
        "cuda",
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        topk=300,
        num_slots=3000,
        page_size=page_size,
        extra=extra,
    )
    out, lse = case.decode()
    assert_right(case, out, lse)
    gap = lambda x: torch.nn.functional.pad(x, (0, 64))[:, :-64]  # noqa: E731
    apart = replace(case, scopes=[replace(s, kv_cache=gap(s.kv_cache)) for s in case.scopes])
    for got, want in zip(apart.decode(), (out, lse), strict=True):
        assert torch.equal(got, want)


@all_layouts
@pytest.mark.parametrize("heads", [16, 32, 64])  # of a CTA
@pytest.mark.parametrize("num_q_heads, splits", [(1, 1), (16, 5), (40, 1), (128, 3)])
def test_the_portable_kernel(layout, num_q_heads, splits, heads):
    case = make_case(layout, "cuda", num_q_heads=num_q_heads, topk=333, num_slots=1000, extra=V4_SCOPES)
    out, _, lse = case.run_by("portable", heads=heads, splits=splits)
    assert_right(case, out, lse)


@pytest.mark.parametrize("room", [0, 1, 3.5, 32, 100])  # parts of the keys
def test_the_portable_kernel_splits_as_far_as_the_workspace_has_room(room):
    layout = KV_LAYOUTS["dsv4_fnuz"]  # no GPU has another kernel for it
    case = make_case(layout, "cuda", num_tokens=2, topk=1000, num_slots=2000)
    workspace = torch.full((int(room * 2 * 16 * 514),), float("nan"), device="cuda")
    out = torch.full((2, 16, 512), float("nan"), device="cuda").bfloat16()
    lse = torch.full((2, 16), float("nan"), device="cuda")
    torch.ops.mla_fp8.sparse_decode_out(
        *case.arguments(), **case.op_options(), out=out, lse=lse, workspace=workspace if room else None
    )
    assert_right(case, out, lse)
    assert workspace.isnan().all() == (room < 2)


def test_more_tokens_than_a_grid_dimension_or_a_scheduler_holds():
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", num_tokens=70_000, num_q_heads=2, topk=6)
    out, lse = case.decode()
    for some in (slice(0, 64), slice(69_900, 70_000)):
        assert_right(case.tokens(some), out[some], lse[some])


@packed_layouts
@pytest.mark.parametrize("num_tokens", [2, 200])
def test_replays_follow_changed_indices_and_lengths(layout, num_tokens):
    """A captured launch reads lengths and indices when it runs."""
    options = {"num_tokens": num_tokens, "topk": 500, "num_slots": 2000, "extra": V4_SCOPES}
    case = make_case(layout, "cuda", **options)
    other = make_case(layout, "cuda", **options)
    case.decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.decode()
    for _ in range(3):
        out.fill_(float("nan")), lse.fill_(float("nan"))
        graph.replay()
        want = case.decode()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        for mine, theirs in zip(case.scopes, other.scopes, strict=True):
            mine.indices.copy_(theirs.indices.roll(1, 0))
            mine.length.copy_(theirs.length.roll(1, 0) // 2)
            mine.kv_cache.copy_(theirs.kv_cache)
        case.q.copy_(other.q.roll(1, 0))


def test_back_to_back_launches_do_not_overtake_each_other():
    """Launches overlap their starts with the end of the one before: each must still see its results."""
    case = make_case(KV_LAYOUTS["bf16_512"], "cuda", num_tokens=40, num_q_heads=8, topk=64, sink=False)
    want_q = case.q
    for _ in range(20):  # the output of one is the query of the next
        want_q = replace(case, q=want_q).decode()[0]
        torch.cuda.synchronize()
    q = case.q
    for _ in range(20):
        q = replace(case, q=q).decode()[0]
    assert torch.equal(q, want_q)


@pytest.mark.parametrize("num_tokens, num_q_heads", [(133, 64), (144, 64), (144, 16), (160, 32)])
def test_two_launches_of_one_call_are_ordered_with_what_is_before_and_behind(num_tokens, num_q_heads):
    """Such batches end in a wave that would be mostly empty: its queries go first, the others do not wait.
    The output of a call is the query of the next: nobody reads it before both launches have ended."""
    shape = {"num_tokens": num_tokens, "num_q_heads": num_q_heads, "topk": 2048, "num_slots": 20000}
    case = make_case(KV_LAYOUTS["dsv4"], "cuda", **shape, sink=False)
    last = slice(num_tokens - 4, None)
    calls, eager, q = 6, [], case.q
    for _ in range(calls):
        out, lse = replace(case, q=q).decode()
        torch.cuda.synchronize()
        assert_right(replace(case, q=q).tokens(last), out[last], lse[last])
        eager.append(out)
        q = out
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            outs.append(replace(case, q=outs[-1] if outs else case.q).decode()[0])
    for _ in range(10):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out, expected in zip(outs, eager, strict=True))
