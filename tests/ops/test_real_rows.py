"""A row is its keys, wherever they lie in it: every sparse attention op, on every device, in every kernel.

On a GPU the number of tokens, the heads and the layout choose the kernel: 9 tokens are decode's splits of a
row, 1100 prefill's kernels for many rows.
"""

from dataclasses import replace

import pytest
import torch
from assertions import assert_attention, assert_same
from row_cases import (
    HEADS,
    KINDS,
    PAGED_RUNS,
    Run,
    changed,
    compacted,
    nan_in,
    nothing_in,
    row_case,
    row_scope,
    with_length,
    workspace,
)
from sparse_cases import Case, all_layouts, packed_layouts
from window_cases import WindowCase, make_window_case, paged_layouts

from mla_fp8 import KV_LAYOUTS, KVLayout

every_head_count = pytest.mark.parametrize("num_q_heads", HEADS)
some_head_counts = pytest.mark.parametrize("num_q_heads", [8, 16, 32, 64, 128])
one_or_two_caches = pytest.mark.parametrize("extra_topk", [None, 70], ids=["one cache", "two caches"])
row_layouts = pytest.mark.parametrize("name", ["bf16", "bf16_512"])


def runs(device: str, num_q_heads: int = 8, run: str = "decode", num_tokens: int = 9, **_: object) -> bool:
    """The CPU has one kernel for any number of heads and of tokens, and none to be forced."""
    on_cpu = num_q_heads in (8, 20) and run in ("decode", "prefill") and num_tokens == 9
    return device != "cpu" or on_cpu


pytestmark = pytest.mark.only.with_args(runs)


@pytest.fixture(params=PAGED_RUNS)
def run(request) -> Run:
    return PAGED_RUNS[request.param]


@pytest.fixture(params=[9, 1100])
def num_tokens(request, device) -> int:
    return 2 * len(KINDS) if device == "cpu" else request.param


def assert_right(case: Case, results: tuple[torch.Tensor, ...]) -> None:
    """For the first tokens, which are of all kinds, and the last; for fewer of wide rows."""
    count = max(3, min(len(case.q), len(KINDS), 8000 // case.scopes[0].indices.shape[1]))
    some = torch.tensor([*range(count), len(case.q) - 1], device=case.q.device)
    assert_attention(case, results, some)


def keeps_places(case: Case, run: Run) -> bool:
    """Two CTAs that convert for each other multiply invalid keys of holes, too, with weights of zero: right,
    but not the bits of the compacted row."""
    pairs = case.layout.name == "dsv4" and case.q.shape[1] > 64 and len(case.q) > 9 and case.q.is_cuda
    return pairs and run not in (PAGED_RUNS["batch_invariant"], PAGED_RUNS["portable"])


def check_places(case: Case, run: Run) -> None:
    results = run(case)
    assert_right(case, results)
    for change in (compacted, with_length):
        in_front = run(changed(case, change))
        if keeps_places(case, run):
            assert_right(case, in_front)
        else:
            assert_same(in_front, results)
    assert_same(run(case), results)


def check_neighbours(case: Case, run: Run) -> None:
    """Rows full of NaN before, between and after the others leave nothing behind."""
    poisoned = torch.rand(len(case.q), device=case.q.device) < 0.5
    want = run(changed(case, nothing_in(poisoned)))
    assert all(t[~poisoned].isnan().sum() == 0 for t in want)
    run(changed(case, nan_in(torch.ones_like(poisoned))))
    for which in (poisoned, torch.zeros_like(poisoned)):  # the second finds what the launch before left
        got = run(changed(case, nan_in(which)))
        assert_same(tuple(t[~poisoned] for t in got), tuple(t[~poisoned] for t in want))
        assert got[0][which].isnan().all()


@all_layouts
@every_head_count
@one_or_two_caches
@pytest.mark.sampled(5)
def test_holes_give_the_bits_of_the_compacted_row_and_of_its_length(
    layout, num_q_heads, extra_topk, num_tokens, run, device
):
    check_places(
        row_case(layout, device, num_tokens=num_tokens, num_q_heads=num_q_heads, extra_topk=extra_topk), run
    )


@all_layouts
@every_head_count
@one_or_two_caches
def test_nan_of_other_rows_does_not_reach_a_row(layout, num_q_heads, extra_topk, num_tokens, run, device):
    check_neighbours(
        row_case(layout, device, num_tokens=num_tokens, num_q_heads=num_q_heads, extra_topk=extra_topk), run
    )


@row_layouts
@every_head_count
@pytest.mark.parametrize("check", [check_places, check_neighbours])
def test_rows_of_a_workspace(name, num_q_heads, check, num_tokens, device):
    shape = {"num_tokens": num_tokens, "num_q_heads": num_q_heads, "page_size": 1}
    check(row_case(KV_LAYOUTS[name], device, **shape), workspace)


# No multiple of a stage or a block, wider than any plan splits, wider than shared memory would hold.
@packed_layouts
@some_head_counts
@pytest.mark.parametrize("topk", [1, 15, 17, 63, 65, 333, 2049, 9001])
@pytest.mark.sampled(5)
def test_any_width(layout, num_q_heads, topk, run, device):
    shape = {"num_tokens": len(KINDS), "num_q_heads": num_q_heads, "num_slots": 3000}
    check_places(row_case(layout, device, topk=topk, **shape), run)


@pytest.mark.parametrize("layout", ["dsv32", "dsv4", "bf16"])
@some_head_counts
@pytest.mark.parametrize("topk", [2100, 8300])
@pytest.mark.sampled(5)
def test_few_keys_in_a_wide_row(layout, num_q_heads, topk, num_tokens, run, device):
    shape = {"num_tokens": min(num_tokens, 300), "num_q_heads": num_q_heads, "num_slots": 3000}
    case = row_case(KV_LAYOUTS[layout], device, topk=topk, **shape)
    (scope,) = case.scopes
    kept = torch.rand(scope.indices.shape, device=device) < 5 / topk
    check_places(replace(case, scopes=[replace(scope, indices=scope.indices.where(kept, -1))]), run)


@packed_layouts
@some_head_counts
def test_one_slot_in_every_place_is_that_slot(layout, num_q_heads, num_tokens, run, device):
    case = row_case(layout, device, num_tokens=num_tokens, num_q_heads=num_q_heads, topk=2048)
    (scope,) = case.scopes
    chosen = scope.indices[0, 0]
    everywhere = replace(scope, indices=torch.full_like(scope.indices, int(chosen)))
    same = replace(case, scopes=[everywhere], attn_sink=None)
    out, lse = run(same)
    row = scope.rows[int(chosen)].double()
    torch.testing.assert_close(out.double(), row[:512].expand_as(out), rtol=2**-7, atol=1e-3)
    logits = case.q.double() @ row * case.sm_scale
    torch.testing.assert_close(lse.double(), logits + torch.tensor(2048.0).log().item(), rtol=1e-5, atol=1e-4)


@packed_layouts
@some_head_counts
def test_a_key_of_both_caches_counts_twice(layout, num_q_heads, num_tokens, run, device):
    """The same pages under two names."""
    case = row_case(layout, device, num_tokens=num_tokens, num_q_heads=num_q_heads)
    twice = replace(case, scopes=case.scopes * 2)
    results = run(twice)
    assert_right(twice, results)
    once = run(case)[1]
    torch.testing.assert_close(results[1], once + torch.tensor(2.0).log().item(), rtol=1e-5, atol=1e-5)


def window_case(layout: KVLayout, device: str, num_q_heads: int, num_tokens: int) -> WindowCase:
    """Prompts from 0 and from the middle; entries of all kinds of rows besides."""
    lengths = [num_tokens // 3, num_tokens - num_tokens // 3 - 3]
    window = make_window_case(
        layout, device, query_lens=lengths, seq_lens=[lengths[0], lengths[1] + 50], num_q_heads=num_q_heads,
        padding=3,
    )  # fmt: skip
    entries = row_scope(layout, device, num_tokens, topk=150, page_size=2, num_slots=400)
    return replace(window, case=replace(window.case, scopes=[*window.case.scopes, entries]))


def run_window(window: WindowCase) -> Run:
    """Of cases with other entries than the window's own."""

    def run(case: Case) -> tuple[torch.Tensor, ...]:
        out, _, lse = replace(window, case=case).run(backend="native")
        return out, lse

    return run


@paged_layouts
@every_head_count
def test_entries_beside_windows(layout, num_q_heads, num_tokens, device):
    window = window_case(layout, device, num_q_heads, num_tokens)
    case, run = window.case, run_window(window)
    results = run(case)
    assert_right(case, results)

    def entries(change) -> Case:
        return replace(case, scopes=[case.scopes[0], change(case.scopes[1])])

    for change in (compacted, with_length):
        in_front = run(entries(change))
        if keeps_places(case, run):
            assert_right(case, in_front)
        else:
            assert_same(in_front, results)
    poisoned = torch.rand(num_tokens, device=device) < 0.5
    got = run(entries(nan_in(poisoned)))
    assert_same(tuple(t[~poisoned] for t in got), tuple(t[~poisoned] for t in results))
    assert got[0][poisoned].isnan().all()
