"""index_topk is right whatever its workspace held before the call, and in whatever order its blocks begin."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import emulation
import pytest
import torch
from index_cases import Problem, random_problem

import mla_fp8

pytestmark = pytest.mark.op("index_topk")

# Heads where keys of long rows are counted. The scan of sm_80 takes 16 at a time: each costs seconds.
COUNTED = 16 if emulation.executes(emulation.AMPERE) else 64
LENS = (300, 1025, 64, 257, 700, 1, 513, 40, 900, 256, 301, 12)
SHAPES: dict[str, dict[str, Any]] = {
    "one row, a CTA for each tile": {"lens": [2000], "heads": 64},
    "as many CTAs for each row": {"lens": [700] * 7, "heads": 16},
    "rows that begin and end within shares": {"lens": LENS, "heads": 16},
    "units of two rows": {"lens": LENS, "heads": 64, "next_n": 2, "width": 21_000},
    "drafts in lanes": {"lens": [900, 1300, 40], "heads": 64, "next_n": 6, "width": 21_000},
    "the merge chooses among kept keys": {"lens": [*LENS, 6001], "heads": 16, "width": 21_000},
    "keys of long rows are counted": {"lens": [66_000, 900], "heads": COUNTED, "processors": 7, "topk": 2048},
    "lists are merged": {"lens": [5400, 5300, 5200], "heads": 16, "next_n": 4, "processors": 2},
}
# Numbers that the kernels once took as signs; how many CTAs, or keys, a counter says have arrived.
WORDS = {
    "zeros": 0,
    "ones": -1,
    "poison": 0xA5A5A5A5A5A5A5A5 - (1 << 64),
    "an arrival": 0x9E3779B97F4A7C15 - (1 << 64),
    "a sum": (0xFFC5A39BD6 << 24) + 5 - (1 << 64),
    "one of each": 0x0000000100000001,
    "one less than all": 0x0000000700000007,
    "keys of a row": 0x4000000040000000,
}


class Call:
    """A problem, its answer in a new workspace, and buffers for others."""

    def __init__(self, device: str, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
        if emulation.is_cpu_kernel(device):
            pytest.skip("CPUs need no workspace")
        options = dict(SHAPES[shape])
        width, self.topk = options.pop("width", 0), options.pop("topk", 128)
        self.processors = options.pop("processors", None)
        if self.processors:
            monkeypatch.setenv("FAKE_CUDA_PROCESSORS", str(self.processors))
        self.problem = problem(device, width, **options)
        self.want = self.problem.want_topk(self.topk)
        self.sms = emulation.num_processors(device)
        if device != "cuda" and self.processors:
            self.sms = min(self.sms, self.processors)
        self.device = device

    def size(self) -> int:
        rows = len(self.problem.q)
        return int(torch.ops.mla_fp8.index_topk_workspace(rows, self.topk, self.sms))

    def run(self, workspace: torch.Tensor, **more: torch.Tensor) -> list[torch.Tensor]:
        got = [torch.full(x.shape, 7, dtype=torch.int32, device=self.device) for x in self.want]
        out = dict(zip(("out_positions", "out_slots", "out_lens"), got, strict=True))
        self.problem.topk(self.topk, **out, workspace=workspace, **more)
        return got

    def run_with_other_scores(self, workspace: torch.Tensor) -> None:
        self.problem.weights.neg_()
        try:
            self.run(workspace)
        finally:
            self.problem.weights.neg_()

    def assert_right(self, workspace: torch.Tensor, **more: torch.Tensor) -> None:
        assert all(map(torch.equal, self.run(workspace, **more), self.want))


def problem(device: str, width: int, lens: Any, **options: Any) -> Problem:
    made = random_problem(device, list(lens), **options)
    more = max(width // made.page_size - made.page_table.shape[1], 0)
    made.page_table = torch.nn.functional.pad(made.page_table, (0, more), value=-7)
    return made


def filled(size: int, word: int, device: str) -> torch.Tensor:
    return torch.full((size // 8 + 1,), word, device=device).view(torch.uint8)[:size]


@pytest.fixture(params=SHAPES)
def call(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    return Call(device, monkeypatch, request.param)


def test_it_may_hold_anything(call: Call) -> None:
    """One number everywhere, then what the call left there."""
    for word in WORDS.values():
        workspace = filled(call.size(), word, call.device)
        call.assert_right(workspace)
    call.assert_right(workspace)


def test_it_may_hold_a_part_of_what_a_call_leaves(call: Call) -> None:
    before = filled(call.size(), WORDS["one of each"], call.device)
    after = before.clone()
    call.run_with_other_scores(after)
    pieces = torch.rand(call.size() // 16 + 1, device=call.device) < 0.5
    for taken in (pieces, ~pieces):
        mask = taken.repeat_interleave(16)[: call.size()]
        call.assert_right(torch.where(mask, after, before))


def test_it_may_hold_what_calls_of_other_shapes_leave(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [Call(device, monkeypatch, shape) for shape in SHAPES if "processors" not in SHAPES[shape]]
    workspace = filled(max(call.size() for call in calls), WORDS["poison"], device)
    for call in (*calls, *reversed(calls)):
        call.assert_right(workspace)


def test_counters_are_zeros_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls of any shapes, one after the other."""
    sms = emulation.num_processors(device)
    counters = torch.zeros(torch.ops.mla_fp8.index_topk_counters(sms), dtype=torch.int32, device=device)
    for shape in (*SHAPES, *reversed(SHAPES)):
        with monkeypatch.context() as patch:
            call = Call(device, patch, shape)
            call.assert_right(filled(call.size(), WORDS["one of each"], device), counters=counters)
            assert not counters.any()


@pytest.mark.parametrize(
    ("counters", "expected"),
    [
        (torch.zeros(1 << 20, 1), r"counters must have dtype torch.int32, got torch.float32"),
        (torch.zeros(1 << 20, 2).int(), r"counters must be contiguous"),
    ],
)
def test_counters_are_checked(counters: torch.Tensor, expected: str, device: str) -> None:
    made = random_problem(device, [300], heads=16)
    out = {"out_positions": torch.empty(1, 64), "out_slots": torch.empty(1, 64), "out_lens": torch.empty(1)}
    out = {name: x.int().to(device) for name, x in out.items()}
    size = torch.ops.mla_fp8.index_topk_workspace(1, 64, emulation.num_processors(device))
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match=expected):
        made.topk(64, **out, workspace=workspace, counters=counters.to(device).T)


def test_their_number_is_that_of_the_device(device: str) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 0
    want = torch.ops.mla_fp8.index_topk_counters(sms) if sms else 0
    assert mla_fp8.index_topk_counters(device) == want


def test_too_few_counters_are_refused(device: str) -> None:
    if emulation.is_cpu_kernel(device):
        pytest.skip("CPUs need none")
    call = Call(device, pytest.MonkeyPatch(), "one row, a CTA for each tile")
    counters = torch.zeros(100, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=r"counters must have at least \d+ entries, got 100"):
        call.run(filled(call.size(), 0, device), counters=counters)


@pytest.fixture
def machine(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Variables of the machine that executes PTX, for a ``with``."""
    if not emulation.executes(*emulation.NVIDIA):
        pytest.skip("needs the machine that executes PTX")

    @contextlib.contextmanager
    def set_to(**variables: int) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            yield

    return set_to


def test_blocks_may_begin_in_any_order(machine: Callable[..., Any], call: Call) -> None:
    """The machine runs a block to its end before the next one begins, so none may wait for another."""
    with machine(FAKE_CUDA_DESCENDING=1):
        for word in ("zeros", "one of each"):
            call.assert_right(filled(call.size(), WORDS[word], call.device))


@pytest.mark.parametrize("blocks", [1, 4, 6])
def test_it_may_hold_what_a_killed_call_leaves(blocks: int, machine: Callable[..., Any], call: Call) -> None:
    for order in ({}, {"FAKE_CUDA_DESCENDING": 1}):
        workspace = filled(call.size(), WORDS["zeros"], call.device)
        with (
            machine(FAKE_CUDA_MOST_CLUSTERS=min(blocks, call.sms - 1), **order),
            pytest.raises(RuntimeError, match="killed"),
        ):
            call.run_with_other_scores(workspace)
        call.assert_right(workspace)


def test_graphs_and_streams(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is replayed when its workspace holds anything, beside another one on another stream."""
    if device != "cuda":
        pytest.skip("needs a GPU")
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], []
    for shape in ("as many CTAs for each row", "keys of long rows are counted"):
        call = Call(device, monkeypatch, shape)
        workspace = filled(call.size(), WORDS["ones"], device)
        call.run(workspace)  # what is loaded when it is used first
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call.run(workspace)
        graphs.append((call, workspace, graph, got))
    for word in WORDS.values():
        for _, workspace, _, got in graphs:
            workspace.copy_(filled(len(workspace), word, device))
            for x in got:
                x.fill_(7)
        torch.cuda.synchronize()
        for stream, (_, _, graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(3):
                    graph.replay()
        torch.cuda.synchronize()
        for call, _, _, got in graphs:
            assert all(map(torch.equal, got, call.want))
