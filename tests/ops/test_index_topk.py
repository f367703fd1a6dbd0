"""index_topk is the exact top-k of index_logits of the same device under a total order, whatever is equal,
NaN, absent or missing, and however the same rows are called.
"""

import emulation
import pytest
import torch
from index_cases import Problem, between_steps, constant_keys_problem, ints, random_problem

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("index_topk")

INF, NAN = float("inf"), float("nan")
N = 1500  # entries, not a multiple of any tile
ORDERS = {
    "random": torch.randn(N, generator=torch.Generator().manual_seed(1)),
    "all equal": torch.full((N,), 0.25),
    "all zero": torch.zeros(N),
    "zeros of both signs": torch.zeros(N).where(torch.arange(N) % 3 > 0, -0.0),
    "ascending": torch.arange(N).float(),
    "descending": -torch.arange(N).float(),
    "two values": (torch.arange(N) * 7 % 5 < 2).float(),
    "one larger": torch.full((N,), 1.0).index_fill(0, torch.tensor([1234]), 2.0),
    "one smaller": torch.full((N,), -1.0).index_fill(0, torch.tensor([3]), -2.0),
    "within an ulp": 1.0 + torch.arange(N).flip(0) % 3 * 2.0**-23,
    "beyond half": torch.logspace(4, 38, N).flip(0),
    "subnormal": torch.arange(N).flip(0) * 2.0**-149,
    "infinities": torch.tensor([INF, 1.0, -INF, 0.0, -1.0]).repeat(N // 5),
    "some NaN": torch.randn(N).where(torch.arange(N) % 4 > 0, NAN),
    "mostly NaN": torch.full((N,), NAN).where(torch.arange(N) % 7 > 0, torch.randn(N)),
    "all NaN": torch.full((N,), NAN),
    "NaN and -inf": torch.full((N,), NAN).where(torch.arange(N) % 2 > 0, -INF),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("topk", [1, 64, 500, 1499, 2048])
def test_any_order_of_logits_is_selected_exactly(order, topk, device):
    values = ORDERS[order]
    problem = constant_keys_problem(device, values)
    got, want = problem.logits()[0, :N].cpu(), values + 0.0
    assert torch.equal(got.nan_to_num(nan=7.0), want.nan_to_num(nan=7.0))
    problem.assert_exact(topk)


LONG_ORDERS = {
    "random": torch.randn,
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
    "all equal": lambda n: torch.full((n,), 0.25),
    "two values": lambda n: (torch.arange(n) * 7 % 5 < 2).float(),
    "mostly NaN": lambda n: torch.full((n,), NAN).where(torch.arange(n) % 23 > 0, torch.randn(n)),
    "some far above": between_steps(1e4),
    "many far above": between_steps(1e4, 4),
    "some far below": between_steps(-1e4),
    "some infinite": between_steps(INF),
}


@pytest.mark.parametrize("order", LONG_ORDERS)
@pytest.mark.parametrize(
    ("next_n", "topk", "pin_last"), [(1, 2048, 0), (4, 2048, 0), (3, 100, 700), (2, 4000, 0), (4, 16, 0)]
)
def test_candidates_are_thrown_away_exactly(order, next_n, topk, pin_last, device):
    """So many rows over the same entries that whoever scans them must throw candidates away again and again,
    or, where the workspace has room for all, keep them; rows that begin and end anywhere in a share, and all
    of them as the row alone."""
    n, requests = (20_000, 90) if device == "cuda" else (9_000, 3)
    alone = constant_keys_problem(device, LONG_ORDERS[order](n))
    want, _, _ = alone.want_topk(topk, pin_last=pin_last)
    rows = requests * next_n
    many = Problem(
        alone.q.expand(rows, -1, -1).contiguous(), alone.weights.expand(rows, -1).contiguous(),
        alone.index_cache, alone.page_table.expand(requests, -1).contiguous(), None, alone.layout,
        alone.page_size, {"row_lens": ints([n] * rows, device), "next_n": next_n},
    )  # fmt: skip
    for _ in emulation.runs(2):
        positions, _, lens = many.topk(topk, pin_last=pin_last)
        assert torch.equal(positions, want.expand(rows, -1)) and (lens == topk).all()


@pytest.mark.parametrize("order", LONG_ORDERS)
@pytest.mark.parametrize(
    ("requests", "next_n", "n"),
    [(1, 1, 300_000), (1, 2, 300_000), (1, 2, 30_000), (32, 1, 90_000), (5, 1, 60_000), (1, 8, 90_000),
     (3, 8, 50_000)],
)  # fmt: skip
@pytest.mark.sampled(6)
def test_long_rows_are_chosen_from_exactly(order, requests, next_n, n, device):
    """Rows that a GPU divides among blocks, whose keys have room in shared memory or have none."""
    n = n if device == "cuda" or requests == 1 else n // 20
    alone = constant_keys_problem(device, LONG_ORDERS[order](n))
    want, _, _ = alone.want_topk(2048)
    rows = requests * next_n
    many = Problem(
        alone.q.expand(rows, -1, -1).contiguous(), alone.weights.expand(rows, -1).contiguous(),
        alone.index_cache, alone.page_table.expand(requests, -1).contiguous(), None, alone.layout,
        alone.page_size, {"row_lens": ints([n] * rows, device), "next_n": next_n},
    )  # fmt: skip
    positions, _, lens = many.topk(2048)
    assert torch.equal(positions, want.expand(rows, -1)) and (lens == 2048).all()


@pytest.mark.parametrize("heads", [1, 7, 16, 32, 40, 64])
@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_random_keys_and_any_number_of_heads(heads, layout, device):
    random_problem(device, [700, 64, 65, 0, 1], heads=heads, layout=layout).assert_exact(128)


@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("layout", ["index_fp8", "index_fp4"])
def test_pages_of_any_size_with_gaps_between_them(page_size, layout, device):
    problem = random_problem(device, [777, 300], page_size=page_size, gap=64, layout=layout)
    problem.assert_exact(100)


@pytest.mark.parametrize("topk", [1, 100, 128, 129])
@pytest.mark.parametrize("change", [-2, -1, 0, 1, 2])
def test_lengths_around_topk_and_a_page(topk, change, device):
    lens = [max(topk + change, 0), 64 + change, 128 + change, 256 + change]
    random_problem(device, lens, heads=16).assert_exact(topk)


def test_the_largest_topk(device):
    random_problem(device, [9000, 4096, 5000], heads=8).assert_exact(4096)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 5, 6, 8])
def test_drafts_see_one_entry_more_each(next_n, device):
    problem = random_problem(device, [300, 3, 1, 700], next_n=next_n, heads=16)
    assert [seen for _, seen in problem.rows()][:next_n] == list(range(300 - next_n + 1, 301))
    problem.assert_exact(64)


def test_drafts_as_four_dimensions_are_the_same_rows(device):
    problem = random_problem(device, [300, 200], next_n=3, heads=16)
    want = problem.topk(64)
    problem.q = problem.q.unflatten(0, (2, 3))
    assert all(map(torch.equal, problem.topk(64), want))


@pytest.mark.parametrize("ratio", [2, 4])
def test_one_entry_for_several_tokens(ratio, device):
    seq_lens = ints([400 * ratio + 3, 2, 50], device)
    problem = random_problem(
        device, [401, 3, 50], seq_lens=seq_lens, next_n=3, compress_ratio=ratio, heads=16
    )
    assert problem.rows()[:4] == [(0, (400 * ratio + s) // ratio) for s in (1, 2, 3)] + [(1, 0)]
    problem.assert_exact(64)


def test_rows_found_by_query_start_loc(device):
    """An offset first element, a request without rows, rows behind the last request."""
    start = ints([5, 7, 7, 12, 14], device)
    problem = random_problem(device, [90, 50, 300, 1], num_rows=12, query_start_loc=start, heads=16)
    assert [r for r, _ in problem.rows()] == [0, 0, 2, 2, 2, 2, 2, 3, 3, -1, -1, -1]
    problem.assert_exact(40)
    positions, slots, lens = problem.topk(40)
    assert (positions[9:] == -1).all() and (slots[9:] == -1).all() and not lens[9:].any()


def test_row_lens_replace_seq_lens(device):
    row_lens = ints([5, 300, -7, 1 << 30, 0, 64], device)
    problem = random_problem(device, [300, 70], next_n=3, row_lens=row_lens, heads=16)
    problem.page_table.clamp_(-1, len(problem.index_cache) - 1)
    assert [seen for _, seen in problem.rows()] == [5, 300, 0, problem.width, 0, 64]
    problem.assert_exact(100)


def test_absent_pages_are_never_chosen(device):
    problem = random_problem(device, [640, 640], heads=16)
    problem.page_table[0, 2], problem.page_table[0, 5] = -1, len(problem.index_cache)
    problem.page_table[1, :] = -(1 << 31)
    problem.assert_exact(600)
    positions, _, lens = problem.topk(600, pin_last=300)
    assert lens.tolist() == [512, 0] and (positions[1] == -1).all()
    assert not ((positions[0] >= 128) & (positions[0] < 192)).any()


@pytest.mark.parametrize("topk", [40, 639, 640, 2048])
def test_rows_that_see_no_more_than_topk_take_all_that_is_there(topk, device):
    """Beside rows that see more, drafts of one request among them, and whatever their logits are."""
    problem = random_problem(device, [640, 641, 30, 1, 5, 700], heads=16, next_n=2)
    problem.page_table[0, 2], problem.page_table[5, 0] = -1, len(problem.index_cache)
    problem.layout.views(problem.index_cache, problem.page_size)[1][:, ::3] = NAN
    problem.assert_exact(topk)
    problem.assert_exact(topk, pin_first=3, pin_last=50)
    positions, _, lens = problem.topk(topk)
    assert torch.equal(
        lens,
        torch.minimum(
            lens.new_tensor([575, 576, 640, 641, 29, 30, 0, 1, 4, 5, 635, 636]), lens.new_tensor(topk)
        ),
    )
    if topk == 640:
        assert torch.equal(
            positions[1, :129].cpu(), torch.arange(129).where(torch.arange(129) < 128, 192).int()
        )


@pytest.mark.parametrize("pins", [(0, 5), (5, 0), (16, 100), (16, 2000), (2000, 0), (1 << 40, 1 << 40)])
def test_pinned_entries_come_first(pins, device):
    first, last = pins
    constant_keys_problem(device, ORDERS["some NaN"]).assert_exact(128, pin_first=first, pin_last=last)
    random_problem(device, [900, 20, 129], heads=16).assert_exact(128, pin_first=first, pin_last=last)


def test_what_no_row_sees_is_never_read(device):
    """NaN keys behind the last entry, in unlisted pages and behind an absent page change nothing."""
    problem = random_problem(device, [500, 130], heads=16)
    before = [x.clone() for x in problem.topk(64)]
    used = torch.cat(problem.slots()).unique()
    values, scales = problem.layout.views(problem.index_cache, problem.page_size)
    unused = torch.ones(values.shape[:2], dtype=torch.bool, device=device).view(-1)
    unused[used.long()] = False
    unused = unused.view(values.shape[:2])
    for byte in (0x7F, 0x00):
        values.view(torch.uint8)[unused] = byte
        scales[unused] = NAN if byte else INF
        assert all(map(torch.equal, problem.topk(64), before))


@pytest.mark.parametrize("order", ["random", "all equal", "mostly NaN"])
@pytest.mark.parametrize(
    ("lens", "processors"),
    [
        ((70_000, 3000, 69_900), 11),
        ((70_000, 69_990, 69_900), 13),
        ((70_000, 1900, 30_000), 12),
        ((420_000,), 45),
        ((9000, 1900, 3000), 12),
    ],
)
def test_keys_of_long_rows_are_counted(order, lens, processors, device, monkeypatch):
    """Requests so long that the scan counts keys by their upper bits, beside short ones, or about as long as
    each other, so that each begins with a share; short ones alone in a wide page table, with which the merge
    has nothing to do. The words in which keys are counted hold anything before a call."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", str(processors))
    values = LONG_ORDERS[order](max(70_000, lens[0]))
    alone = constant_keys_problem(device, values)
    rows = len(lens)
    many = Problem(
        torch.zeros(rows, 64, 128, device=device).to(torch.float8_e4m3fn),
        torch.zeros(rows, 64, device=device), alone.index_cache,
        alone.page_table.expand(rows, -1).contiguous(), ints(lens, device), alone.layout,
        alone.page_size,
    )  # fmt: skip
    many.q[:, :2] = alone.q
    many.weights[:, :2] = alone.weights
    want = many.want_topk(2048)
    size = torch.ops.mla_fp8.index_topk_workspace(rows, 2048, emulation.num_processors(device))
    for byte, calls in ((0x00, 1), (0xA5, 2)):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        for _ in range(calls):
            got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
            out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
            many.topk(2048, **out, workspace=workspace)
            assert all(map(torch.equal, got, want))


def rows_of(problem: Problem, requests: list[int]) -> Problem:
    """The same problem with these requests only, in this order."""
    next_n = problem.options.get("next_n", 1)
    rows = torch.tensor([r * next_n + j for r in requests for j in range(next_n)], device=problem.q.device)
    index = torch.tensor(requests, device=problem.q.device)
    seq_lens = None if problem.seq_lens is None else problem.seq_lens[index]
    q = problem.q.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    return Problem(
        q, problem.weights[rows], problem.index_cache,
        problem.page_table[index], seq_lens, problem.layout, problem.page_size, problem.options,
    )  # fmt: skip


def test_a_row_does_not_depend_on_the_others_or_on_its_place(device):
    lens = [3000, 10, 700, 64, 2000, 0, 1500] * (6 if device == "cuda" else 2)
    problem = random_problem(device, lens, heads=32, next_n=2)
    want = problem.topk(256)
    logits = problem.logits()
    order = torch.randperm(len(lens)).tolist()
    for requests in ([0], [4], [6], order, order[:9]):
        part = rows_of(problem, requests)
        rows = torch.tensor([2 * r + j for r in requests for j in range(2)], device=device)
        assert all(torch.equal(x, y[rows]) for x, y in zip(part.topk(256), want, strict=True))
        assert torch.equal(part.logits(), logits[rows])


def test_where_the_pages_lie_does_not_matter(device):
    problem = random_problem(device, [1000, 900], heads=32)
    positions, _, lens = problem.topk(256)
    order = torch.randperm(len(problem.index_cache), device=device)
    moved = torch.empty_like(problem.index_cache)
    moved[order] = problem.index_cache
    exists = (problem.page_table >= 0) & (problem.page_table < len(order))
    table = torch.where(exists, order[torch.where(exists, problem.page_table, 0).long()], -1).int()
    problem.index_cache, problem.page_table = moved, table
    again = problem.topk(256)
    assert torch.equal(again[0], positions) and torch.equal(again[2], lens)


def test_drafts_together_are_the_rows_alone(device):
    problem = random_problem(device, [1500, 700], heads=64, next_n=6)
    want = problem.topk(200)
    flat = Problem(
        problem.q, problem.weights, problem.index_cache, problem.page_table.repeat_interleave(6, 0), None,
        problem.layout, problem.page_size, {"row_lens": ints([seen for _, seen in problem.rows()], device)},
    )  # fmt: skip
    assert all(map(torch.equal, flat.topk(200), want))


def test_paged_and_ragged_choose_the_same(device):
    problem = random_problem(device, [900], heads=64, next_n=7)
    keys = reference.index_keys(problem.index_cache, problem.layout, problem.page_size)
    slots = problem.slots()[-1].long()
    k, scale = keys[0].view(torch.uint8)[slots].view(torch.float8_e4m3fn), keys[1][slots]
    start = torch.zeros(7, dtype=torch.int32, device=device)
    end = ints([seen for _, seen in problem.rows()], device)
    ragged = (problem.q, problem.weights, k, scale, start, end)
    got = mla_fp8.index_topk_ragged(*ragged, topk=128, k_slots=slots)
    assert all(map(torch.equal, got, problem.topk(128)))
    assert torch.equal(mla_fp8.index_logits_ragged(*ragged), problem.logits(900))


def test_a_slot_that_int32_does_not_hold_is_none(device):
    q = torch.randn(1, 8, 128, device=device).to(torch.float8_e4m3fn)
    k, scale = torch.randn(4, 128, device=device).to(torch.float8_e4m3fn), torch.ones(4, device=device)
    start, weights = ints([0], device), torch.ones(1, 8, device=device)
    slots = torch.tensor([2**31 - 1, 2**31, 2**32 + 7, -(2**40)], device=device)
    got = mla_fp8.index_topk_ragged(q, weights, k, scale, start, start + 4, topk=4, k_slots=slots)[1]
    assert got.tolist() == [[2**31 - 1, -1, -1, -1]]


def test_ragged_rows_see_their_own_range(device):
    k = torch.randn(1000, 128, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(1000, device=device)
    q = torch.randn(9, 24, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(9, 24, device=device).bfloat16()
    start = ints([0, 10, 500, 999, 1000, -5, 700, 20, 5], device)
    end = ints([1000, 300, 800, 1000, 1000, 50, 600, 1 << 30, -3], device)
    logits = mla_fp8.index_logits_ragged(q, weights, k, scale, start, end)
    positions, slots, lens = mla_fp8.index_topk_ragged(q, weights, k, scale, start, end, topk=100)
    ranges = [(0, 1000), (10, 300), (500, 800), (999, 1000), (0, 0), (0, 50), (0, 0), (20, 1000), (0, 0)]
    for row, (begin, stop) in enumerate(ranges):
        present = [torch.ones(stop - begin, dtype=torch.bool, device=device)]
        want, count = reference.index_topk(logits[row : row + 1, begin:stop], present, topk=100)
        assert torch.equal(positions[row], want[0]) and lens[row] == count[0]
        assert torch.equal(slots[row], torch.where(want[0] >= 0, want[0] + begin, -1))
        outside = torch.ones(1000, dtype=torch.bool, device=device)
        outside[begin:stop] = False
        assert (logits[row][outside] == -INF).all() and not (logits[row][~outside] == -INF).any()


def test_slots_of_another_cache(device):
    problem = random_problem(device, [300, 40], heads=16)
    table = ints([[7, 3, -1, 9], [5, 6, 1, 0]], device)
    positions, slots, _ = problem.topk(64, slot_page_table=table, slot_page_size=100)
    assert torch.equal(slots, reference.slots_of(positions, table, [0, 1], 100))


def test_buffers_of_the_caller_are_filled_whole(device):
    problem = random_problem(device, [300, 40], heads=16)
    want = problem.topk(64)
    positions, slots = (torch.full((2, 80), 1 << 30, dtype=torch.int32, device=device) for _ in range(2))
    lens = torch.full((2,), 1 << 30, dtype=torch.int32, device=device)
    sms = emulation.num_processors(device)
    workspace = torch.full(
        (torch.ops.mla_fp8.index_topk_workspace(2, 64, sms),), 0xFF, dtype=torch.uint8, device=device
    )
    out = {"out_positions": positions[:, :64], "out_lens": lens, "workspace": workspace}
    got = problem.topk(64, **out, out_slots=slots[:, :64])
    assert all(map(torch.equal, got, want))
    assert (positions[:, 64:] == 1 << 30).all() and (slots[:, 64:] == 1 << 30).all()
    positions.fill_(1 << 30)
    assert problem.topk(64, **out)[1] is None
    assert torch.equal(positions[:, :64], want[0]) and torch.equal(lens, want[2])


def test_repeats_give_the_same_bits(device):
    problem = random_problem(device, [4000, 3000], heads=64, next_n=4)
    first = problem.topk(512)
    for _ in range(3):
        assert all(map(torch.equal, problem.topk(512), first))


def test_no_rows(device):
    problem = random_problem(device, [], heads=16)
    positions, slots, lens = problem.topk(64)
    assert positions.shape == slots.shape == (0, 64) and lens.shape == (0,)
    assert problem.logits(5).shape == (0, 5)


def test_the_workspace_does_not_depend_on_the_context():
    bytes_of = torch.ops.mla_fp8.index_topk_workspace
    assert bytes_of(1 << 20, 2048, 132) == bytes_of(4, 2048, 132) <= 26 << 20
    assert bytes_of(1, 512, 132) < bytes_of(2, 512, 132)
