"""merge_topk against the specification, and against one rank that has all entries."""

import emulation
import pytest
import torch
from error_cases import check_refused
from index_cases import ints

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("merge_topk")
INF, NAN = float("inf"), float("nan")


def lists(device, ranks=3, rows=5, k=40, levels=None):
    """Entries of rows, dealt to ranks: scores of few levels if there are any, and the end of some lists."""
    positions = torch.rand(rows, ranks * k).argsort(1).int()
    scores = torch.randn(rows, ranks * k) if levels is None else torch.randint(levels, (rows, ranks * k)) / 2
    positions, scores = (x.view(rows, ranks, k).transpose(0, 1).contiguous() for x in (positions, scores))
    for rank in range(ranks):
        end = int(torch.randint(k + 1, ()))
        scores[rank, rank % rows, end:], positions[rank, rank % rows, end:] = -INF, -1
    return scores.to(device), positions.to(device)


def check(scores, positions, **options):
    got = mla_fp8.merge_topk(scores, positions, **options)
    want = reference.merge_topk(scores, positions, **options)
    for name, x, y in zip(("positions", "lens"), got, want, strict=True):
        assert x.dtype is torch.int32 and torch.equal(x, y), name
    return got


@pytest.mark.parametrize("levels", [None, 1, 3])
@pytest.mark.parametrize("topk", [1, 7, 40, 100, 150])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_best_of_all_ranks(ranks, topk, levels, device):
    scores, positions = lists(device, ranks, levels=levels)
    check(scores, positions, topk=topk)
    for rank in range(ranks):
        check(scores, positions[rank], topk=topk, rank=rank)


@pytest.mark.parametrize("interleave", [1, 4, 1 << 16])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_number_their_own_entries(ranks, interleave, device):
    scores, positions = lists(device, ranks)
    positions[0, 0, 0] = (1 << 31) - 1  # beyond int32 if there are several ranks
    check(scores, positions, topk=40, interleave=interleave)
    for rank in range(ranks):
        check(scores, positions[rank], topk=40, rank=rank, interleave=interleave)


@pytest.mark.parametrize("k, topk", [(512, 512), (2048, 2048), (4096, 4096), (3000, 1023)])
def test_long_lists(k, topk, device):
    check(*lists(device, 2, 2, k), topk=topk)
    check(*lists(device, 4, 1, k, levels=9), topk=topk)


def test_infinities_nans_and_zeros_of_either_sign(device):
    values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, NAN, -INF, 3e38], device=device)
    scores = values[torch.randint(10, (4, 3, 30), device=device)]
    positions = torch.rand(3, 120, device=device).argsort(1).int().view(3, 4, 30).transpose(0, 1)
    for topk in (1, 20, 90, 120):
        check(scores, positions, topk=topk)
        check(scores, positions[2].contiguous(), topk=topk, rank=2)


def test_candidates_that_come_twice(device):
    """Whatever a caller gives, the call ends and has one result."""
    scores = torch.ones(2, 3, 64, device=device)
    positions = torch.full((2, 3, 64), 5, dtype=torch.int32, device=device)
    positions[1, :, ::2] = 9
    for topk in (1, 33, 96, 100, 200):
        check(scores, positions, topk=topk)


def test_the_parts_of_the_ranks_are_the_whole(device):
    scores, positions = lists(device, 4)
    want, lens = mla_fp8.merge_topk(scores, positions, topk=64)
    parts = [mla_fp8.merge_topk(scores, positions[r], topk=64, rank=r) for r in range(4)]
    assert torch.equal(sum(part[1] for part in parts), lens)
    together = torch.cat([part[0] for part in parts], 1).sort(1, descending=True).values[:, :64]
    assert torch.equal(together.sort(1).values, want.sort(1).values)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_that_index_their_own_entries_choose_what_one_rank_chooses(world_size, interleave, device):
    """Ties too: index keys are few, so many entries have one score."""
    layout, page, topk, n = mla_fp8.INDEX_LAYOUTS["index_fp8"], 16, 64, 700
    few = torch.randn(40, 128, device=device).bfloat16()
    keys = few[torch.randint(40, (n,), device=device)]
    q = torch.randn(3, 16, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.rand(3, 16, device=device)
    number = torch.arange(n, device=device)
    owner = number // interleave % world_size
    bytes_of = torch.ops.mla_fp8.index_topk_workspace(3, topk, emulation.num_processors(str(device)))

    def choose(own):
        pages = -(-n // page)
        cache = layout.empty(num_pages=pages, page_size=page, device=device)
        slots = torch.arange(len(own), device=device)
        mla_fp8.quantize_index_k(keys[own], slots, cache, layout=layout, page_size=page)
        table = torch.arange(pages, dtype=torch.int32, device=device).expand(3, -1).contiguous()
        scores = torch.full((3, topk), NAN, device=device)
        positions, lens = (torch.full(s, 7, dtype=torch.int32, device=device) for s in ((3, topk), (3,)))
        mla_fp8.index_topk(
            q, weights, cache, table, ints([len(own)] * 3, device), layout=layout, page_size=page, topk=topk,
            out_positions=positions, out_slots=positions.clone(), out_lens=lens, out_scores=scores,
            workspace=torch.empty(bytes_of, dtype=torch.uint8, device=device),
        )  # fmt: skip
        return scores, positions

    want, parts = choose(number)[1], [choose(number[owner == r]) for r in range(world_size)]
    scores, positions = map(torch.stack, zip(*parts, strict=True))
    got, lens = mla_fp8.merge_topk(scores, positions, topk=topk, interleave=interleave)
    assert torch.equal(got, want) and (lens == topk).all()


def test_strides_and_buffers_of_the_caller(device):
    scores, positions = lists(device)
    want = mla_fp8.merge_topk(scores, positions, topk=30)
    wide = torch.full((5, 36), 1 << 30, dtype=torch.int32, device=device)
    lens = torch.full((5,), 1 << 30, dtype=torch.int32, device=device)
    rows_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (scores, positions)]
    got = mla_fp8.merge_topk(*rows_first, topk=30, out_positions=wide[:, :30], out_lens=lens)
    assert all(map(torch.equal, got, want)) and (wide[:, 30:] == 1 << 30).all()


def test_a_captured_call_sees_new_candidates(device):
    if device == "cpu":
        pytest.skip("graphs are CUDA's")
    scores, positions = lists(device)
    out = {"out_positions": positions.new_empty(5, 30), "out_lens": positions.new_empty(5)}
    mla_fp8.merge_topk(scores, positions, topk=30, **out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_fp8.merge_topk(scores, positions, topk=30, **out)
    for _ in range(3):
        for x, new in zip((scores, positions), lists(device), strict=True):
            x.copy_(new)
        graph.replay()
        want = reference.merge_topk(scores, positions, topk=30)
        assert all(map(torch.equal, out.values(), want))


def test_no_rows_and_no_candidates(device):
    scores, positions = lists(device)
    check(scores[:, :0], positions[:, :0], topk=3)
    check(scores[..., :0], positions[..., :0], topk=3)
    check(scores, torch.full_like(positions, -1), topk=3)
    check(torch.full_like(scores, -INF), positions[1], topk=3, rank=1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scores": torch.zeros(2, 3)}, "scores must have shape [*, *, *], got [2, 3]"),
        ({"scores": torch.zeros(2, 3, 4).half()}, "scores must have dtype torch.float32, got torch.float16"),
        ({"positions": torch.zeros(3, 4).int()}, "positions must have shape [2, 3, 4], got [3, 4]"),
        ({"rank": 1}, "positions must have shape [3, 4], got [2, 3, 4]"),
        ({"rank": 2, "positions": torch.zeros(3, 4).int()}, "rank must be in [0, 1], got 2"),
        ({"topk": 4097}, "topk must be in [1, 4096], got 4097"),
        ({"interleave": 0}, "interleave must be a power of two of at most 65536, got 0"),
        ({"interleave": 3}, "interleave must be a power of two of at most 65536, got 3"),
        ({"interleave": 1 << 17}, "interleave must be a power of two of at most 65536, got 131072"),
        ({"topk": 0}, "topk must be in [1, 4096], got 0"),
        ({"scores": torch.zeros(2, 1, 4097), "positions": torch.zeros(2, 1, 4097).int()},
         "scores must have at most 4096 columns, got 4097"),
        ({"scores": torch.zeros(257, 1, 1), "positions": torch.zeros(257, 1, 1).int()},
         "scores must be of 1 to 256 ranks, got 257"),
        ({"out_positions": torch.zeros(3, 4).int(), "out_lens": ints([0] * 3, "cpu")},
         "out_positions must have shape [3, 2], got [3, 4]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(changes, message):
    given = {"scores": torch.zeros(2, 3, 4), "positions": torch.zeros(2, 3, 4).int(), "topk": 2}
    check_refused(mla_fp8.merge_topk, given | changes, f"mla_fp8.merge_topk: {message}")
