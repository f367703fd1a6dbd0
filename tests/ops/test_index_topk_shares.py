"""index_topk where several CTAs share a row, or one has several."""

import emulation
import pytest
import torch
from index_cases import ints, random_problem

import mla_fp8

pytestmark = pytest.mark.op("index_topk")


@pytest.mark.parametrize("are_many", [False, True])
@pytest.mark.parametrize("next_n", [1, 2])
def test_rows_of_short_contexts_are_shared_by_ctas(are_many, next_n, device):
    """Requests that begin and end anywhere in the share of a CTA, and whole ones in it: more rows than CTAs
    answer themselves, or less. The words by which they wait for each other hold anything before a call."""
    sms = emulation.num_processors(device)
    count = 4 * sms // next_n + 3 if are_many else 12
    lens = [(300, 1025, 64, 257, 700, 1, 513, 40, 900, 256, 301, 12)[i % 12] for i in range(count)]
    problem = random_problem(device, lens, heads=16, next_n=next_n)
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
    ("next_n", "heads", "topk"), [(5, 64, 128), (6, 64, 128), (8, 64, 128), (4, 16, 2100), (8, 16, 2100)]
)
@pytest.mark.parametrize("num_requests", [1, 2, 9])
def test_drafts_that_are_several_units(num_requests, next_n, heads, topk, has_row_lens, device):
    """Some take all that they see, or see nothing, beside others that do not; several CTAs share them."""
    lens = [2 * topk + 300, topk + 2, 5, topk, 0, 3 * topk, topk + next_n, 2000, 1][:num_requests]
    row_lens = [max(n - j * 70 % 400, 0) if j % 3 else n for n in lens for j in range(next_n)]
    options = {"row_lens": ints(row_lens, device)} if has_row_lens else {}
    problem = random_problem(device, lens, heads=heads, next_n=next_n, **options)
    want = problem.want_topk(topk)
    sms = emulation.num_processors(device)
    size = mla_fp8.index_topk_workspace(len(problem.q), topk=topk, num_sms=sms)
    for byte in (0x00, 0xA5):
        workspace = torch.full((size,), byte, dtype=torch.uint8, device=device)
        got = [torch.full(x.shape, 7, dtype=torch.int32, device=device) for x in want]
        out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
        problem.topk(topk, **out, workspace=workspace)
        assert all(map(torch.equal, got, want))
