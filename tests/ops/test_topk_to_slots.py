"""topk_to_slots against loops: holes, pages that are none, groups with their tails."""

import pytest
import torch
from error_cases import check_refused
from index_cases import ints

import mla_fp8
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("topk_to_slots")
INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1


def inputs(device, rows=37, topk=50, requests=5, pages=9, page_size=16):
    limit = pages * page_size
    positions = torch.randint(-3, limit + 5, (rows, topk))
    positions[0, :4] = torch.tensor([INT_MIN, INT_MAX, limit, limit - 1])
    positions[1], positions[2, 20:], positions[3] = -1, -1, 0
    table = torch.randint(-2, 4000, (requests, pages))
    table[0, 0], table[1, 1], table[2, 2] = INT_MIN, INT_MAX, 1 << 30
    return ints(positions, device), ints(table, device)


def check(positions, table, **options):
    got = mla_fp8.topk_to_slots(positions, table, **options)
    want = reference.topk_to_slots(positions, table, **options)
    for name, x, y in zip(("slots", "lens"), got, want, strict=True):
        assert x.dtype is torch.int32 and torch.equal(x, y), name


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("next_n", [1, 3, 8])
def test_rows_of_requests_one_after_another(page_size, next_n, device):
    check(*inputs(device, page_size=page_size), page_size=page_size, next_n=next_n)


def test_rows_of_any_request(device):
    positions, table = inputs(device)
    requests = torch.randint(-1, 6, (37,))
    requests[:3] = torch.tensor([INT_MIN, INT_MAX, 5])
    check(positions, table, page_size=16, row_to_request=ints(requests, device))


def test_lengths_of_the_caller(device):
    positions, table = inputs(device)
    lens = torch.randint(-5, 60, (37,))
    lens[:2] = torch.tensor([INT_MIN, INT_MAX])
    check(positions, table, page_size=16, next_n=8, lens=ints(lens, device))


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_groups_with_the_tokens_of_the_open_one(group_size, device):
    """As GLM's pools: the tail follows the last group that counts, then -1."""
    positions, table = inputs(device, topk=33)
    tokens = torch.randint(0, 9 * 16, (37,))
    tokens[:6] = torch.tensor([0, 1, 2, 3, -7, INT_MAX])
    for lens in (None, ints(torch.arange(37), device)):
        check(positions // 8, table, page_size=16, next_n=8, group_size=group_size,
              token_lens=ints(tokens, device), lens=lens)  # fmt: skip


RANKS = [(2, 0, 1), (2, 1, 4), (3, 2, 1), (8, 5, 2), (256, 3, 1 << 16)]


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("world_size, rank, interleave", RANKS)
def test_a_rank_has_its_own_rows_packed_in_order(world_size, rank, interleave, by_slot, device):
    positions, table = inputs(device, topk=1200, pages=90)
    ranks = {"world_size": world_size, "rank": rank, "interleave": interleave, "by_slot": by_slot}
    check(positions, table, page_size=16, next_n=8, **ranks)
    tokens = ints(torch.randint(0, 90 * 16, (37,)), device)
    lens = ints(torch.arange(37) * 40, device)
    check(positions // 8, table, page_size=16, next_n=8, group_size=4, token_lens=tokens, lens=lens, **ranks)


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_rows_of_all_ranks_are_the_rows_of_one(world_size, interleave, device):
    """vLLM's pages hold rows of one rank. A global slot is the rank's own, and whose it is."""
    pages, page_size = 12, 64
    positions = ints(torch.rand(9, pages * page_size * world_size).argsort(1)[:, :300].sort(1).values, device)
    table = ints(torch.randperm(9 * pages).view(9, pages), device)
    found = []
    for rank in range(world_size):
        slots, lens = mla_fp8.topk_to_slots(
            positions, table, page_size=page_size, world_size=world_size, rank=rank, interleave=interleave
        )
        assert ((slots >= 0).sum(1) == lens).all()
        found.append(torch.where(slots < 0, -1, slots * world_size + rank))
    number = positions // (world_size * interleave) * interleave + positions % interleave
    owner = positions // interleave % world_size
    page = table.gather(1, (number // page_size).long())
    want = (page * page_size + number % page_size) * world_size + owner
    got = torch.cat(found, 1).sort(1).values[:, -300:]
    assert torch.equal(got, want.sort(1).values)


def test_sglangs_wide_pages_are_vllms_rule_with_one_row_a_turn(device):
    """A page of P * W slots holds P rows of each rank: by slot or by position, the same rows."""
    pages, page_size, world_size = 9, 16, 4
    positions, table = inputs(device, pages=pages, page_size=page_size * world_size)
    table = table.clamp_max(4000)
    for rank in range(world_size):
        ranks = {"world_size": world_size, "rank": rank, "next_n": 8}
        by_slot = mla_fp8.topk_to_slots(
            positions, table, page_size=page_size * world_size, by_slot=True, **ranks
        )
        by_position = mla_fp8.topk_to_slots(positions, table, page_size=page_size, **ranks)
        assert all(map(torch.equal, by_slot, by_position))


def test_slots_of_many_ranks_may_be_past_2_to_the_31(device):
    table = ints([[INT_MAX // 64, INT_MAX]], device)
    positions = ints([[0, 1, 62, 63, 64]], device)
    for rank in range(2):
        options = {"page_size": 64, "world_size": 2, "rank": rank, "by_slot": True}
        check(positions, table, **options)
        check(positions, table * 2 + 1, **options)


def test_no_rows_no_columns_no_pages(device):
    positions, table = inputs(device)
    check(positions[:0], table, page_size=16)
    check(positions[:, :0], table, page_size=16)
    check(positions, table[:, :0], page_size=16, next_n=8)
    check(positions, table[:0], page_size=16)


def test_it_agrees_with_index_topk_and_fills_wide_buffers(device):
    positions, table = inputs(device)
    slots = torch.full((37, 60), 1 << 30, dtype=torch.int32, device=device)
    lens = torch.full((37,), 1 << 30, dtype=torch.int32, device=device)
    options = {"page_size": 16, "next_n": 8}
    mla_fp8.topk_to_slots(positions, table, **options, out_slots=slots[:, :50], out_lens=lens)
    want = reference.topk_to_slots(positions, table, **options)
    assert torch.equal(slots[:, :50], want[0]) and torch.equal(lens, want[1])
    assert (slots[:, 50:] == 1 << 30).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"positions": torch.zeros(3, 4)}, "positions must have dtype torch.int32, got torch.float32"),
        ({"page_table": torch.zeros(3, dtype=torch.int32)}, "page_table must have shape [*, *], got [3]"),
        ({"page_size": 0}, "page_size must be in [1, 16777216], got 0"),
        ({"next_n": 0}, "next_n must be at least 1, got 0"),
        ({"group_size": 65}, "group_size must be in [1, 64], got 65"),
        ({"world_size": 257}, "world_size must be in [1, 256], got 257"),
        ({"world_size": 4, "rank": 4}, "rank must be in [0, 3], got 4"),
        ({"rank": 1}, "rank must be in [0, 0], got 1"),
        ({"interleave": 0}, "interleave must be in [1, 65536], got 0"),
        ({"lens": ints([1], "cpu")}, "lens must have shape [3], got [1]"),
        ({"token_lens": [1, 2, 3]}, "token_lens must be a tensor, got [1, 2, 3]"),
        ({"out_slots": torch.zeros(3, 5, dtype=torch.int32), "out_lens": ints([0] * 3, "cpu")},
         "out_slots must have shape [3, 4], got [3, 5]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(changes, message):
    given = {"positions": ints([[0] * 4] * 3, "cpu"), "page_table": ints([[0]] * 3, "cpu"), "page_size": 16}
    check_refused(mla_fp8.topk_to_slots, given | changes, f"mla_fp8.topk_to_slots: {message}")
