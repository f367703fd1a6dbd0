"""V4.1's two levels: blocks that one layer publishes, and the choice among their entries in others."""

from typing import Any

import emulation
import pytest
import torch
from index_cases import Problem, constant_keys_problem, fp4_queries, ints, random_problem

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op(
    "index_topk", "index_topk_blocks", "index_topk_ragged", "index_topk_ragged_blocks"
)

NAN, INF = float("nan"), float("inf")
HOSTILE = (-1, -(1 << 31), (1 << 31) - 1, 1 << 24, 1 << 21)


def present(problem: Problem) -> list[torch.Tensor]:
    return [x >= 0 for x in problem.slots()]


def assert_consumed(problem: Problem, blocks: torch.Tensor, topk: int, **pins: int) -> None:
    """Positions, slots, lens and scores are those of a sort of all logits among the blocks' entries."""
    rows, device = len(problem.q), problem.q.device
    lists = blocks if len(blocks) == rows else blocks[[max(r, 0) for r, _ in problem.rows()]]
    logits = problem.logits()
    seen = reference.in_blocks(present(problem), lists)
    want, lens = reference.index_topk(logits, seen, topk=topk, **pins)
    requests = [request for request, _ in problem.rows()]
    out: dict[str, Any] = {
        "out_positions": torch.full((rows, topk), 7, dtype=torch.int32, device=device),
        "out_slots": torch.full((rows, topk), 7, dtype=torch.int32, device=device),
        "out_lens": torch.full((rows,), 7, dtype=torch.int32, device=device),
        "out_scores": torch.full((rows, topk), 7.0, device=device),
    }
    if emulation.is_cuda(str(device)):
        sms = emulation.num_processors(str(device))
        size = torch.ops.mla_fp8.index_topk_workspace(rows, topk, sms, num_candidates=blocks.shape[1])
        out["workspace"] = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    problem.topk(topk, candidate_blocks=blocks, **pins, **out)
    assert torch.equal(out["out_lens"], lens)
    assert torch.equal(out["out_positions"], want)
    assert torch.equal(
        out["out_slots"], reference.slots_of(want, problem.page_table, requests, problem.page_size)
    )
    torch.testing.assert_close(
        out["out_scores"], reference.scores_of(logits, want), rtol=0, atol=0, equal_nan=True
    )


def assert_published(problem: Problem, topk: int, num_blocks: int) -> torch.Tensor:
    options = problem.keywords | {"topk": topk, "num_blocks": num_blocks}
    *chosen, blocks = mla_fp8.index_topk_blocks(*problem.tensors, **options)
    assert all(map(torch.equal, chosen, problem.want_topk(topk)))
    assert torch.equal(
        blocks, reference.best_blocks(problem.logits(), present(problem), num_blocks=num_blocks)
    )
    return blocks


def some_blocks(problem: Problem, n: int, lists: int) -> torch.Tensor:
    """Random ones, more than there are, some twice, in any order, and some that are none."""
    most = -(-problem.width // 8) + 3
    blocks = torch.randint(0, most, (lists, n))
    blocks[:, : len(HOSTILE)] = torch.tensor(HOSTILE)
    blocks[:, len(HOSTILE) : len(HOSTILE) + n // 4] = blocks[:, -(n // 4) :]
    return blocks[:, torch.randperm(n)].int().to(problem.q.device)


ORDERS = {
    "random": torch.randn(1500),
    "all equal": torch.ones(1500),
    "all zero behind relu": torch.zeros(1500),
    "two values": torch.randint(2, (1500,)).float(),
    "ascending": torch.arange(1500.0),
    "some NaN": torch.randn(1500).where(torch.rand(1500) > 0.2, NAN),
    "mostly -inf": torch.randn(1500).where(torch.rand(1500) < 0.02, -INF),
    "mostly NaN": torch.randn(1500).where(torch.rand(1500) < 0.02, NAN),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [20, 120])
def test_logits_of_all_kinds(order, n, device):
    problem = constant_keys_problem(device, ORDERS[order])
    assert_consumed(problem, some_blocks(problem, n, 1), 128)
    blocks = assert_published(problem, 128, n)
    assert_consumed(problem, blocks, 128)


@pytest.mark.parametrize("heads", [5, 16, 32, 64])
@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_random_keys_of_both_layouts(heads, layout, device):
    problem = random_problem(device, [1500, 700, 64, 65, 0, 1, 7, 8, 9], heads=heads, layout=layout)
    assert_consumed(problem, some_blocks(problem, 60, 9), 128)
    assert_consumed(problem, assert_published(problem, 128, 40), 128)


def test_fp4_queries(device):
    problem = random_problem(device, [900, 300], heads=32, layout="index_fp4", next_n=2)
    problem.q, scale = fp4_queries(torch.randn(4, 32, 128, device=device))
    problem.options["q_scale"] = scale
    assert_consumed(problem, some_blocks(problem, 60, 4), 64)
    assert_published(problem, 64, 30)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", [2, 3, 4, 5, 6, 7, 8])
def test_drafts_have_lists_of_their_own_or_their_requests(next_n, heads, device):
    problem = random_problem(device, [1200, 3, 700], heads=heads, next_n=next_n)
    rows = 3 * next_n
    assert_consumed(problem, some_blocks(problem, 80, rows), 100)
    assert_consumed(problem, some_blocks(problem, 80, 3), 100)
    blocks = assert_published(problem, 100, 60)
    assert_consumed(problem, blocks, 100)


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 100, 128])
@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_pages_of_any_size_with_gaps_between_them(page_size, layout, device):
    problem = random_problem(device, [777, 300], page_size=page_size, gap=64, layout=layout, heads=32)
    assert_consumed(problem, some_blocks(problem, 60, 2), 100)
    assert_published(problem, 100, 40)


@pytest.mark.parametrize("pins", [(0, 5), (5, 0), (16, 100), (2000, 0), (1 << 40, 1 << 40)])
def test_pins_choose_among_the_same_entries(pins, device):
    first, last = pins
    problem = random_problem(device, [900, 20, 400], heads=32, next_n=2)
    assert_consumed(problem, some_blocks(problem, 70, 6), 64, pin_first=first, pin_last=last)


def test_absent_pages_are_never_chosen_nor_published(device):
    problem = random_problem(device, [640, 640, 640], heads=16)
    problem.page_table[0, 2], problem.page_table[0, 5] = -1, len(problem.index_cache)
    problem.page_table[1, :] = -(1 << 31)
    problem.page_table[2, 9] = -1  # the newest block is published
    every = torch.arange(80, dtype=torch.int32, device=device).expand(3, -1)
    assert_consumed(problem, every, 100)
    blocks = assert_published(problem, 100, 100)
    assert blocks[1].tolist() == [79] + [-1] * 99 and (blocks[2] == 79).any()


def test_rows_found_by_query_start_loc(device):
    start = ints([5, 7, 7, 12, 14], device)
    problem = random_problem(device, [390, 50, 700, 1], num_rows=12, query_start_loc=start, heads=32)
    assert_consumed(problem, some_blocks(problem, 50, 12), 40)
    assert_consumed(problem, some_blocks(problem, 50, 4), 40)
    blocks = assert_published(problem, 40, 30)
    assert (blocks[9:] == -1).all()


def test_all_blocks_are_the_plain_call(device):
    problem = random_problem(device, [1500, 700, 300, 5], heads=32, next_n=2)
    every = torch.randperm(-(-problem.width // 8)).int().to(device).expand(8, -1)
    assert all(map(torch.equal, problem.topk(128, candidate_blocks=every), problem.topk(128)))


@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_rows_with_all_of_their_blocks_beside_rows_without_one(layout, device):
    """No row sees more blocks than a list has places, so their keys come as those of a plain call."""
    problem = random_problem(device, [1499] * 7 + [700, 8], heads=32, layout=layout)
    problem.page_table[6, 3] = -1
    blocks = torch.stack([torch.randperm(200) for _ in range(9)])  # 188 are seen
    for row, missing in ((1, 0), (2, 100), (3, 187)):
        blocks[row, blocks[row] == missing] = -1
    blocks[4] = torch.cat([torch.arange(5, 188), torch.full((17,), 187)])  # as many, of them some twice
    blocks[5, blocks[5] == 186] = 1 << 24
    assert_consumed(problem, blocks.int().to(device), 300)
    assert_consumed(problem, blocks.int().to(device), 300, pin_first=9, pin_last=9)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("next_n", [1, 2, 4])
@pytest.mark.parametrize("page_size", [64, 48])
def test_short_rows_beside_long_ones(page_size, next_n, heads, device):
    """Lists of requests 0, 3 and 4 have places for all of their blocks, those of the others have not."""
    lens = [300, 1100, 2500, 40, 963]
    problem = random_problem(device, lens, heads=heads, next_n=next_n, page_size=page_size)
    problem.page_table[3, 0] = -1
    assert_consumed(problem, some_blocks(problem, 121, 5 * next_n), 100)
    assert_consumed(problem, some_blocks(problem, 121, 5), 500)
    row_lens = torch.randint(-1, 964, (5 * next_n,)).int().to(device)
    problem = random_problem(device, lens, heads=heads, next_n=next_n, row_lens=row_lens)
    assert_consumed(problem, some_blocks(problem, 121, 5 * next_n), 100, pin_last=3)


def test_no_candidates_leave_nothing(device):
    problem = random_problem(device, [300, 40], heads=16)
    for blocks in (torch.empty(2, 0), torch.full((2, 9), -1), torch.full((2, 9), 1000)):
        positions, slots, lens = problem.topk(64, candidate_blocks=blocks.int().to(device))
        assert (positions == -1).all() and (slots == -1).all() and not lens.any()


def test_a_row_does_not_depend_on_others_lists(device):
    """Rows whose lists are read together: other blocks of the others change nothing."""
    problem = random_problem(device, [1000], heads=32, next_n=4)
    blocks = some_blocks(problem, 60, 4)
    want = problem.topk(64, candidate_blocks=blocks)
    for row in range(4):
        others = some_blocks(problem, 60, 4)
        others[row] = blocks[row]
        got = problem.topk(64, candidate_blocks=others)
        assert all(torch.equal(x[row], y[row]) for x, y in zip(got, want, strict=True))


def test_entries_outside_of_candidates_are_never_read(device):
    problem = random_problem(device, [1000, 130], heads=32)
    blocks = some_blocks(problem, 40, 2)
    before = [x.clone() for x in problem.topk(64, candidate_blocks=blocks)]
    seen = reference.in_blocks(present(problem), blocks)
    used = torch.cat([slots[mask] for slots, mask in zip(problem.slots(), seen, strict=True)]).long()
    values, scales = problem.layout.views(problem.index_cache, problem.page_size)
    unused = torch.ones(values.shape[0] * values.shape[1], dtype=torch.bool, device=device)
    unused[used] = False
    unused = unused.view(values.shape[:2])
    values.view(torch.uint8)[unused] = 0x7F
    scales[unused] = NAN
    assert all(map(torch.equal, problem.topk(64, candidate_blocks=blocks), before))


def ragged(device: str, n: int, rows: int, heads: int = 32, fp4: bool = False) -> tuple[torch.Tensor, ...]:
    q = torch.randn(rows, heads, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, heads, device=device)
    if fp4:
        k = torch.randint(0, 256, (n, 64), dtype=torch.uint8, device=device)
        return q, weights, k, torch.randint(120, 128, (n, 4), dtype=torch.uint8, device=device)
    k = torch.randn(n, 128, device=device).to(torch.float8_e4m3fn)
    return q, weights, k, torch.rand(n, device=device)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("align", [1, 8])
def test_gathered_keys(align, fp4, device):
    """Rows of several requests, whose keys begin anywhere."""
    begins = [0, 0, 0, 0, 0, 300, 300, 300, 901, 901, 1400, 1499, 1500]
    start = ints([begin // align * align for begin in begins], device)
    end = ints([290, 291, 292, 293, 294, 900, 901, 905, 1380, 1500, 1500, 1500, 1500], device)
    tensors = (*ragged(device, 1500, len(start), fp4=fp4), start, end)
    logits = mla_fp8.index_logits_ragged(*tensors)
    ranges = list(zip(start.tolist(), end.tolist(), strict=True))
    width = max(stop - begin for begin, stop in ranges)
    own = torch.full((len(ranges), width), -INF, device=device)
    for row, (begin, stop) in enumerate(ranges):
        own[row, : stop - begin] = logits[row, begin:stop]
    seen = [torch.ones(stop - begin, dtype=torch.bool, device=device) for begin, stop in ranges]
    *chosen, blocks = mla_fp8.index_topk_ragged_blocks(*tensors, topk=64, num_blocks=30)
    assert all(map(torch.equal, chosen, mla_fp8.index_topk_ragged(*tensors, topk=64)))
    assert torch.equal(blocks, reference.best_blocks(own, seen, num_blocks=30))
    slots = torch.randint(0, 1 << 20, (1500,), device=device)
    got = mla_fp8.index_topk_ragged(*tensors, topk=64, candidate_blocks=blocks, k_slots=slots)
    want, lens = reference.index_topk(own, reference.in_blocks(seen, blocks), topk=64)
    assert torch.equal(got[0], want) and torch.equal(got[2], lens)
    column = (want + start[:, None]).long().clamp(0, 1499)
    assert torch.equal(got[1], slots[column].int().where(want >= 0, -1))


def test_scores_are_logits(device):
    """Of pinned entries, and of rows that take all, too; in plain calls and where blocks are published."""
    problem = random_problem(device, [640, 30, 0, 200], heads=32, next_n=2)
    logits, rows = problem.logits(), 8
    for pins in ({}, {"pin_first": 4, "pin_last": 9}):
        out = {
            name: torch.full((rows, 100), 7, dtype=torch.int32, device=device) for name in ("out_positions",)
        }
        out |= {"out_lens": torch.empty(rows, dtype=torch.int32, device=device)}
        scores = torch.full((rows, 120), 7.0, device=device)
        if emulation.is_cuda(str(device)):
            size = torch.ops.mla_fp8.index_topk_workspace(rows, 100, emulation.num_processors(str(device)))
            out["workspace"] = torch.empty(size, dtype=torch.uint8, device=device)
        positions, _, _ = problem.topk(100, **pins, **out, out_scores=scores[:, :100])
        assert torch.equal(scores[:, :100], reference.scores_of(logits, positions))
        assert (scores[:, 100:] == 7).all()


def test_long_rows_and_many_blocks(device):
    """Chunks, shares and windows of bits: more blocks than a CTA holds at once."""
    n = 70_000 if emulation.is_cpu_kernel(device) or device == "cuda" else 9000
    problem = random_problem(device, [n, n // 2], heads=16)
    blocks = assert_published(problem, 512, 2048)
    assert_consumed(problem, blocks, 512)
    assert_consumed(problem, some_blocks(problem, 3000, 2), 300)


def test_rows_that_publish_go_in_slices_where_tables_are_wide(device):
    """A table of 2^24 entries: keys of blocks of four rows have room, and a request has three."""
    problem = random_problem(device, [700, 90, 300], heads=16, next_n=3)
    width = (1 << 24) // problem.page_size - problem.page_table.shape[1]
    want = assert_published(problem, 64, 40)
    problem.page_table = torch.nn.functional.pad(problem.page_table, (0, width), value=-7)
    options = problem.keywords | {"topk": 64, "num_blocks": 40}
    *chosen, blocks = mla_fp8.index_topk_blocks(*problem.tensors, **options)
    assert torch.equal(blocks, want)
    assert all(map(torch.equal, chosen, problem.topk(64)))


def test_rows_with_long_lists_go_in_slices(device):
    problem = random_problem(device, [900, 40, 700], heads=16, next_n=5)
    blocks = torch.full((len(problem.q), 300_000), -1, dtype=torch.int32, device=device)
    blocks[:, -60:] = some_blocks(problem, 60, len(blocks))
    short = problem.topk(64, candidate_blocks=blocks[:, -60:])
    assert all(map(torch.equal, problem.topk(64, candidate_blocks=blocks), short))


@pytest.mark.device(torch.cuda.is_available(), "a GPU")
def test_slices_of_a_prompt():
    n, rows = 1 << 20, 75
    start = torch.arange(rows, device="cuda").int() // 5 * 1001
    end = (start + 70_000 + torch.arange(rows, device="cuda").int() * 777).clamp_max(n)
    tensors = (*ragged("cuda", n, rows), start, end)
    *chosen, blocks = mla_fp8.index_topk_ragged_blocks(*tensors, topk=512, num_blocks=2048)
    assert all(map(torch.equal, chosen, mla_fp8.index_topk_ragged(*tensors, topk=512)))
    got = mla_fp8.index_topk_ragged(*tensors, topk=512, candidate_blocks=blocks)
    for row in range(0, rows, 9):
        own = (
            *(x[row : row + 1] for x in tensors[:2]),
            *tensors[2:4],
            start[row : row + 1],
            end[row : row + 1],
        )
        logits = mla_fp8.index_logits_ragged(*own)[:, int(start[row]) : int(end[row])]
        seen = [torch.ones(logits.shape[1], dtype=torch.bool, device="cuda")]
        assert torch.equal(blocks[row : row + 1], reference.best_blocks(logits, seen, num_blocks=2048))
        inside = reference.in_blocks(seen, blocks[row : row + 1])
        assert torch.equal(got[0][row : row + 1], reference.index_topk(logits, inside, topk=512)[0])


@pytest.mark.parametrize(
    ("blocks", "options", "expected"),
    [
        (
            torch.zeros(3, 4).int(),
            {},
            "candidate_blocks must have a list for each of 4 rows or 2 requests, got 3",
        ),
        (torch.zeros(4, 4), {}, "candidate_blocks must have dtype torch.int32, got torch.float32"),
        (torch.zeros(4).int(), {}, "candidate_blocks must have shape"),
        (torch.zeros(4, 4).int(), {"block_size": 16}, "block_size must be 8, got 16"),
    ],
)
def test_candidates_are_checked(blocks, options, expected, device):
    problem = random_problem(device, [300, 40], heads=16, next_n=2)
    with pytest.raises(RuntimeError, match=f"mla_fp8.index_topk: {expected}"):
        problem.topk(64, candidate_blocks=blocks.to(device), **options)


def test_the_workspace_of_both_levels_is_bounded():
    bytes_of = torch.ops.mla_fp8.index_topk_workspace
    for rows in (1, 32, 192, 8192):
        assert bytes_of(rows, 512, 132, num_candidates=2048) <= 32 << 20
        assert bytes_of(rows, 512, 132, num_positions=1 << 20) <= 32 << 20
