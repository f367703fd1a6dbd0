"""index_topk with more pins than topk, and with buffers that are one."""

import pytest
import torch
from index_cases import random_problem

pytestmark = pytest.mark.op("index_topk")


def test_of_more_pins_than_topk_the_first_and_the_newest_stay(device):
    problem = random_problem(device, [900, 5], heads=8)
    for (first, last), want in {
        (0, 9): [*range(892, 900)],
        (3, 9): [0, 1, 2, *range(895, 900)],
        (9, 9): [*range(8)],
        (1 << 40, 1 << 40): [*range(8)],
    }.items():
        positions, _, lens = problem.topk(8, pin_first=first, pin_last=last)
        assert positions[0].tolist() == want and lens.tolist() == [8, 5]
        assert positions[1].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_slots_are_not_written_over_positions(device):
    problem = random_problem(device, [90, 5], heads=8)
    both, lens = torch.zeros(2, 8, dtype=torch.int32, device=device), torch.zeros(2, device=device).int()
    with pytest.raises(RuntimeError, match="out_slots must lie apart from out_positions, got its address"):
        problem.topk(8, out_positions=both, out_slots=both, out_lens=lens)
    assert not both.any()
