"""A step from host memory in a CUDA graph: lookup, copies and attention, in line or beside each other."""

import pytest
import torch
from hot_decode_cases import HEADS, HOT, PAGE, Server

import mla_fp8

pytestmark = pytest.mark.device(torch.cuda.is_available(), "a GPU")
BESIDE = pytest.mark.parametrize("wait", [True, False], ids=["waits", "beside"])


class Step:
    """A server's step on buffers that stay where they are."""

    def __init__(self, wait: bool, next_n: int = 1) -> None:
        self.server = server = Server("dsv32", "cuda", next_n=next_n)
        self.wait, self.entries = wait, server.choose(0)
        rows = len(self.entries)
        self.q = torch.zeros(rows, HEADS, 576, device="cuda", dtype=torch.bfloat16)
        self.plan = [torch.empty_like(self.entries) for _ in range(3)]
        self.hit_rows = torch.empty_like(self.entries)
        self.plan.append(torch.empty(rows, device="cuda", dtype=torch.int32))
        self.counters = torch.zeros(2, dtype=torch.int64, device="cuda")

    def run(self):
        server = self.server
        names = ("out_hot_rows", "out_miss_host_rows", "out_miss_hot_rows", "out_miss_counts")
        mla_fp8.resolve_hot_rows(
            self.entries, server.held, server.order, server.table, num_host_rows=len(server.rows),
            host_page_size=PAGE, next_n=server.next_n, counters=self.counters,
            **dict(zip(names, self.plan, strict=True)), out_hit_rows=self.hit_rows,
        )  # fmt: skip
        options = server.options(wait=self.wait, hit_rows=self.hit_rows)
        self.out = mla_fp8.decode_hot_rows(self.q, server.host, server.hot, *self.plan, **options)

    def new(self, step: int) -> None:
        self.entries.copy_(self.server.choose(step))
        self.q.normal_()

    def assert_right(self) -> None:
        server = self.server
        want = mla_fp8.sparse_decode(
            self.q, server.whole, server.slots(self.entries), layout=server.layout, page_size=PAGE,
            sm_scale=0.04, attn_sink=server.sink,
        )  # fmt: skip
        if self.wait:
            assert torch.equal(self.out[0], want[0]) and torch.equal(self.out[1], want[1])
        torch.testing.assert_close(self.out[0].float(), want[0].float(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(self.out[1], want[1], rtol=1e-5, atol=1e-5)


@BESIDE
@pytest.mark.parametrize("next_n", [1, 2])
def test_replays_serve_new_entries(wait, next_n):
    step = Step(wait, next_n)
    step.run()
    step.assert_right()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for i in range(1, 7):
        step.new(i)
        graph.replay()
        step.assert_right()
    hits, misses = step.counters.tolist()
    assert hits > 0 and misses > 5 * HOT


@BESIDE
def test_a_step_runs_behind_what_is_on_the_callers_stream(wait):
    """And what comes behind it there finds it done."""
    step, stream = Step(wait), torch.cuda.Stream()
    step.run()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        step.new(1)
        step.run()
        step.assert_right()


@BESIDE
def test_nothing_waits_for_the_gpu(wait):
    step = Step(wait)
    step.run()
    step.new(1)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
        returned_before_the_device = not busy.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert returned_before_the_device
    step.assert_right()
