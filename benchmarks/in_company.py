"""Decode kernels alone, and between an engine's other kernels, which leave nothing of ours in the caches.

Needs an NVIDIA GPU. Device times of the kernels, as a profiler sees them, from CUDA graphs. The kernel before
attention has written the queries, as in an engine; before it come

  alone     none
  code      a dozen kernels over little memory: instruction caches are cold
  engine    the GEMMs, norms, activations and sorts of a decode step: everything but the queries is
"""

import argparse
import collections
import functools
import itertools
import statistics

import bench_sparse_decode as decode
import torch
from row_kinds import ROW_KINDS
from torch.profiler import ProfilerActivity, profile

HEADS, BATCHES = (8, 16, 32, 64, 128), (1, 8, 32, 128)
OURS, PEER = ("mla_fp8",), ("flash_fwd", "mla_combine")
REPLAYS, MOST_SETS = 8, 4


class Company:
    """What runs before attention."""

    def __init__(self) -> None:
        def bf16(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        self.small = bf16(256, 256)
        self.down, self.up = bf16(7168, 2112), bf16(1536, 3072)
        self.out, self.gate = bf16(2048, 7168), bf16(7168, 4096)

    def alone(self, _: int) -> None:
        pass

    def code(self, _: int) -> None:
        x = torch.nn.functional.gelu(self.small @ self.small).float().softmax(-1)
        x = torch.nn.functional.layer_norm(x, (256,)).sort(-1)[0].cumsum(0)
        (x @ x).bfloat16().topk(7)[0].sin().flip(0)

    def engine(self, batch: int) -> None:
        x = self.gate.new_ones(batch, 7168)
        q = (x @ self.down)[:, :1536].contiguous() @ self.up
        x = (torch.nn.functional.silu(q[:, :2048]) @ self.out).float().softmax(-1).bfloat16()
        x = torch.nn.functional.gelu(x @ self.gate)[:, :2048] @ self.out
        torch.nn.functional.layer_norm(x.float(), (7168,)).sort(-1)


def device_us(launch, queries: list[torch.Tensor], before, names: tuple[str, ...]) -> float:
    """Of the kernels of one launch whose names have one of ``names``: medians, summed over kernels.

    A kernel that begins before the one before it ends, and waits, counts from that end.
    """
    num_sets = len(queries)
    before()
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i, q in enumerate(queries):
            before()
            q.mul_(1)
            launch(i)
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if any(name in event.name for name in names)
    ]
    times, last_end = collections.defaultdict(list), 0.0
    for begin, end, name in sorted(spans):
        times[name].append(max(end - max(begin, last_end), 0.0))
        last_end = max(last_end, end)
    return sum(statistics.median(t) for t in times.values() if len(t) >= REPLAYS * num_sets // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose label has this")
    parser.add_argument("--rows", nargs="+", default=["full"], help="kinds of rows (row_kinds.py)")
    args = parser.parse_args()
    torch.manual_seed(0)
    company = Company()
    kinds = (company.alone, company.code, company.engine)
    peers = [("mla_fp8", OURS)] + [("flash_mla", PEER)] * (decode.flash_mla is not None)
    rows = [kind for kind in ROW_KINDS if kind.label in args.rows and kind.s_q == 1]
    print(f"{'case':40s} {'kernels':10s}", *(f"{kind.__name__:>8s}" for kind in kinds))
    for row_kind, layout, batch, heads in itertools.product(rows, ("dsv32", "dsv4"), BATCHES, HEADS):
        wide = (2048,) if layout == "dsv32" else (128, 256, 512)
        shape = decode.Shape(layout, heads, batch, *wide, rows=None if row_kind.label == "full" else row_kind)
        if args.only not in shape.label:
            continue
        problem = decode.Problem(shape)
        for who, names in peers:
            launch, queries = problem.native, problem.q
            if who == "flash_mla":
                problem.prepare_flash_mla()
                launch, queries = problem.flash_mla_kernels, problem.padded_q
            queries = list(queries)[:MOST_SETS]
            us = [device_us(launch, queries, functools.partial(kind, batch), names) for kind in kinds]
            print(f"{shape.label:40s} {who:10s}", *(f"{x:8.2f}" for x in us), flush=True)


if __name__ == "__main__":
    main()
