"""Tiles of queries that share keys, on Hopper: their lists, and every kernel that attends to them."""

from dataclasses import replace

import emulation
import pytest
import torch
from assertions import assert_attention, assert_same
from draft_cases import draft_case, hostile_starts, plan_of, refilled, uneven
from sparse_cases import Case, packed_layouts

from mla_fp8 import KV_LAYOUTS

DEVICE = emulation.hopper()
pytestmark = pytest.mark.device(DEVICE is not None, "a Hopper GPU")
PARTS_FROM = 8192  # entries of a tile that one CTA takes


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """Of an emulated GPU: sharing pays for few queries, too."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "1")


def part_of(key: int, parts: int) -> int:
    return (key * 0x9E3779B1 & 0xFFFFFFFF) >> 16 & (parts - 1)


def wanted_list(case: Case, queries: range, entries: int) -> list[tuple[int, int]] | None:
    """(slot, marks) of the queries of a tile; None if one of them names a slot twice."""
    marks: dict[int, int] = {}
    for bit, query in enumerate(queries):
        for which, scope in enumerate(case.scopes):
            length = scope.indices.shape[1] if scope.length is None else int(scope.length[query])
            for slot in scope.indices[query, : max(length, 0)].tolist():
                if not 0 <= slot < len(scope.rows):
                    continue
                key = slot | which << 31
                if marks.get(key, 0) >> bit & 1:
                    return None
                marks[key] = marks.get(key, 0) | 1 << bit
    parts = 1
    while parts * PARTS_FROM < entries:
        parts *= 2
    of_all = (1 << len(queries)) - 1
    ordered = sorted(marks, key=lambda key: (marks[key] != of_all, part_of(key, parts)))  # stable
    return [(key, marks[key]) for key in ordered]


@packed_layouts
@pytest.mark.parametrize(
    "group, heads, topk, extra_topk", [(4, 8, 600, 70), (6, 8, 900, 0), (8, 16, 300, 200), (8, 8, 2000, 48)]
)
def test_lists(layout, group, heads, topk, extra_topk):
    """Of several CTAs, too; in an order that the inputs say. No list of tile 0, which names a slot twice."""
    groups = 700 if DEVICE == "cuda" else 150  # few groups are faster alone
    case = draft_case(layout, DEVICE, groups, group, num_q_heads=heads, topk=topk, extra_topk=extra_topk,
                      num_pages=3000, shortest=0.95)  # fmt: skip
    indices = case.scopes[0].indices
    indices[0, :9] = indices[0, 0].clamp_min(0)
    lists = plan_of(case, group).cpu()
    for _ in emulation.runs(2)[1:]:
        assert torch.equal(plan_of(case, group).cpu()[:, 0], lists[:, 0])
    tiles = -(-group // (64 // heads))
    if groups * tiles <= 48 and group >= 4 * tiles:
        tiles *= 2
    size = -(-group // tiles)
    room = -(-size * (topk + extra_topk) // 16) * 16
    assert lists.shape == (groups * tiles, 4 + room + room // 4)
    for i in {*range(min(4, groups * tiles)), groups * tiles - 1}:
        first = i // tiles * group + i % tiles * size
        queries = range(first, min(first + size, (i // tiles + 1) * group))
        want = wanted_list(case, queries, size * (topk + extra_topk))
        count = int(lists[i, 0])
        assert (want is None) == (i == 0)
        if want is None:
            assert count == -1
            continue
        slots = (lists[i, 4 : 4 + count].long() & 0xFFFFFFFF).tolist()
        marks = lists[i, 4 + room :].contiguous().view(torch.uint8)[:count].tolist()
        assert list(zip(slots, marks, strict=True)) == want


@packed_layouts
@pytest.mark.parametrize("group, heads", [(6, 8), (4, 16)])
def test_lists_of_requests_with_other_numbers_of_tokens(layout, group, heads, monkeypatch):
    """Each request that has tokens has lists of them alone, as many as it fills; those behind pad a step."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "2")  # as below
    counts = [group, 1, 0, group, group - 1, group, group // 2, group, 9, *[group] * 9]
    counts *= 7 if DEVICE == "cuda" else 3  # lists are of tiles that are mostly full
    topk = 900 if DEVICE == "cuda" else 300
    case = draft_case(layout, DEVICE, len(counts), 9, num_q_heads=heads, topk=topk, num_pages=3000,
                      shortest=0.95)  # fmt: skip
    case, starts = uneven(case, 9, counts, padding=7)
    lists = plan_of(case, group, query_start_loc=starts).cpu()
    tiles = -(-group * heads // 64)
    size = -(-group // tiles)
    room = -(-size * topk // 16) * 16
    assert lists.shape == (len(counts) * tiles, 4 + room + room // 4)
    for i in range(18 * tiles):
        first = int(starts[i // tiles]) + i % tiles * size
        end = min(first + size, int(starts[i // tiles]) + min(counts[i // tiles], group))
        want = wanted_list(case, range(first, max(first, end)), size * topk)
        count = int(lists[i, 0])
        if count == -1 and end - first == 1:
            continue  # a token by itself shares nothing
        slots = (lists[i, 4 : 4 + count].long() & 0xFFFFFFFF).tolist()
        marks = lists[i, 4 + room :].contiguous().view(torch.uint8)[:count].tolist()
        assert list(zip(slots, marks, strict=True)) == want


@pytest.mark.parametrize("overlap", [0.0, 0.9])
def test_a_list_that_is_too_long_is_none(overlap, monkeypatch):
    """8 queries of 8 heads that share nothing cost more in a tile than alone."""
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", "8")
    groups = 1024 if DEVICE == "cuda" else 64
    case = draft_case(KV_LAYOUTS["dsv4"], DEVICE, groups, 8, topk=300, overlap=overlap, num_pages=3000)
    assert ((plan_of(case, 8)[:, 0] == -1) == (overlap == 0)).all()


@packed_layouts
@pytest.mark.parametrize(
    "heads, group, num_q_heads", [(32, 4, 8), (32, 2, 16), (48, 6, 8), (48, 3, 16), (64, 7, 8), (64, 2, 32)]
)
@pytest.mark.parametrize("overlap", [0.0, 0.9])
def test_every_kernel_over_lists(layout, heads, group, num_q_heads, overlap):
    if heads == 48 and layout.name != "dsv4":
        pytest.skip("tiles of 48 rows are of dsv4")
    case = draft_case(
        layout, DEVICE, 3, group, num_q_heads=num_q_heads, extra_topk=50, topk=300, overlap=overlap
    )
    by = {"kernel": "many_heads", "schedule": "split", "heads": heads, "splits": 1}
    got = case.run_by(**by, query_groups=group)
    assert_attention(case, got)
    for _ in emulation.runs(2)[1:]:
        assert_same(case.run_by(**by, query_groups=group), got)
    out, max_logits, lse = case.run_by(**by, query_groups=group, max_logits=False)
    assert torch.equal(out, got[0]) and torch.equal(lse, got[2]) and max_logits.numel() == 0


@packed_layouts
@pytest.mark.parametrize("heads, group, num_q_heads", [(32, 4, 8), (64, 6, 8), (64, 6, 16)])
def test_every_kernel_over_lists_of_uneven_requests(layout, heads, group, num_q_heads):
    """With more tokens than a group has, and such of no request."""
    counts = [4, 1, 0, 6, 2, 7]
    case = draft_case(layout, DEVICE, len(counts), 7, num_q_heads=num_q_heads, topk=100, extra_topk=50)
    case, starts = uneven(case, 7, counts, padding=2)
    by = {"kernel": "many_heads", "schedule": "split", "heads": heads, "splits": 1}
    got = case.run_by(**by, query_groups=group, query_start_loc=starts + 3)
    assert_attention(case, got)
    assert_same(case.run_by(**by, query_groups=group, query_start_loc=starts + 3), got)


@packed_layouts
def test_tiles_of_hostile_starts_change_no_result(layout):
    """Tiles may overlap: whoever writes a query's result last, it is right."""
    case = draft_case(layout, DEVICE, 6, 4, num_q_heads=8, topk=100)
    by = {"kernel": "many_heads", "schedule": "split", "heads": 32, "splits": 1}
    for starts in hostile_starts(len(case.q), DEVICE):
        assert_attention(case, case.run_by(**by, query_groups=4, query_start_loc=starts))


@packed_layouts
@pytest.mark.parametrize(
    "heads, group, num_q_heads, groups",
    [(32, 8, 8, 4), (64, 7, 16, 4), (48, 6, 8, 49), (64, 8, 8, 49)],
)
@pytest.mark.parametrize("without_lists", ["some", "all"])
def test_queries_alone_beside_tiles(layout, heads, group, num_q_heads, groups, without_lists, monkeypatch):
    """A query that goes alone has the bits of a call that shares nothing; the last group is short of one."""
    if heads == 48 and layout.name != "dsv4":
        pytest.skip("tiles of 48 rows are of dsv4")
    tiles = -(-group * num_q_heads // 64)
    if groups <= 48 and group >= 4 * tiles:
        tiles *= 2
    monkeypatch.setenv("FAKE_CUDA_PROCESSORS", f"{groups * tiles + 1}")
    case = draft_case(layout, DEVICE, groups, group, num_q_heads=num_q_heads, topk=50, extra_topk=30)
    case = case.tokens(slice(0, groups * group - 1))
    every = 2 if without_lists == "some" else 1
    scope = case.scopes[0]
    twice = scope.indices.clone()
    for first in range(0, len(twice), group * every):  # a list has no place for what counts twice
        twice[first : first + group, :2] = 3
    case = replace(case, scopes=[refilled(scope, twice, scope.length), *case.scopes[1:]])
    out, _, lse = case.run_by(
        kernel="many_heads", schedule="split", heads=heads, splits=1, query_groups=group, max_logits=False
    )
    assert_attention(case, (out, lse))
    alone = torch.arange(len(twice)) // group % every == 0
    assert_same([x[alone] for x in (out, lse)], [x[alone] for x in case.decode()])


@packed_layouts
def test_garbage_lists_give_finite_rows(layout):
    """A plan of other indices, or none: nothing is read that is in no cache."""
    case = draft_case(layout, DEVICE, 700 if DEVICE == "cuda" else 6, 4, num_q_heads=8, topk=600)
    case.scopes[0].kv_cache.zero_()
    lists = plan_of(case, 4)
    for _ in range(3):
        hostile = torch.randint(-(2**31), 2**31 - 1, lists.shape, device=DEVICE).int()
        out, lse = case.decode(query_groups=4, shared_keys=hostile)
        assert out.isfinite().all() and not lse.isnan().any()
