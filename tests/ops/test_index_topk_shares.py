"""index_topk where several CTAs share a row, or one has several."""

import emulation
import pytest
import torch
from index_cases import ints, random_problem

import mla_fp8

pytestmark = pytest.mark.op("index_topk")


@pytest.mark.parametrize("kind", ["few", "many", "one is longer", "as long as each other"])
@pytest.mark.parametrize(("next_n", "heads"), [(1, 16), (2, 16), (1, 64), (2, 64)])
def test_rows_of_short_contexts_are_shared_by_ctas(kind, next_n, heads, device):
    """Requests of as many CTAs each, or that begin and end anywhere in the share of a CTA, and whole ones in
    it: more rows than CTAs answer themselves, or less. The words by which they wait for each other hold
    anything before a call."""
    sms = emulation.num_processors(device)
    count = 4 * sms // next_n + 3 if kind == "many" else 30 if kind == "one is longer" else 12
    if kind == "many" and heads == 64 and device != "cuda":
        pytest.skip("minutes of a CPU")
    lens = [(300, 1025, 64, 257, 700, 1, 513, 40, 900, 256, 301, 12)[i % 12] for i in range(count)]
    if kind == "one is longer":
        lens[7] = 6001
    if kind == "as long as each other":
        lens = [700] * count
    problem = random_problem(device, lens, heads=heads, next_n=next_n)
    want = problem.want_topk(128)
    size = mla_fp8.index_topk_workspace(len(problem.q), topk=128, num_sms=sms)
    for byte in (0x00, 0xA5):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        for _ in range(2):
            got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
            out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
            problem.topk(128, **out, workspace=workspace)
            assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("has_row_lens", [False, True])
@pytest.mark.parametrize(
    ("next_n", "heads", "topk", "room"),
    [
        *((n, 64, 128, 21000) for n in (2, 3, 5, 6, 8)),  # more than lets each row be a unit of its own
        (3, 64, 128, 0),
        (6, 64, 128, 0),
        (4, 16, 2100, 0),
        (8, 16, 2100, 0),
    ],
)
@pytest.mark.parametrize("num_requests", [1, 2, 9])
def test_drafts_that_are_several_units(num_requests, next_n, heads, topk, room, has_row_lens, device):
    """Some take all that they see, or see nothing, beside others that do not; several CTAs share them. The
    page table has room for more than they see."""
    lens = [2 * topk + 300, topk + 2, 5, topk, 0, 3 * topk, topk + next_n, 2000, 1][:num_requests]
    row_lens = [max(n - j * 70 % 400, 0) if j % 3 else n for n in lens for j in range(next_n)]
    options = {"row_lens": ints(row_lens, device)} if has_row_lens else {}
    problem = random_problem(device, lens, heads=heads, next_n=next_n, **options)
    want = problem.want_topk(topk)
    problem.page_table = torch.nn.functional.pad(
        problem.page_table, (0, max(room // 64 - problem.page_table.shape[1], 0)), value=-7
    )
    sms = emulation.num_processors(device)
    size = mla_fp8.index_topk_workspace(len(problem.q), topk=topk, num_sms=sms)
    for byte in (0x00, 0xA5):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
        out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
        problem.topk(topk, **out, workspace=workspace)
        assert all(map(torch.equal, got, want))
