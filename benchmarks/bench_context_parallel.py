"""What ranks exchange around top-k and attention: Exchange over symmetric memory beside its collectives
(NCCL, packing and merge), and beside the bare collectives. A process a GPU, CUDA graphs of 20 calls, medians
of rank 0.

    python benchmarks/bench_context_parallel.py [--gpus 2] [--tokens 1 4 8 32 64 128] [--seconds 150]

It also checks each case: both transports have the same bits. Without two GPUs it says so and ends.
It writes no CSV; options of other benchmarks that it does not have are not used.
"""

import argparse
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mla_fp8.context_parallel import Exchange

CALLS, ROUNDS = 20, 15
TOPK, PAGE = 2048, 64
Call = Callable[[], object]


def median_us(calls: dict[str, Call], group: dist.ProcessGroup) -> dict[str, float]:
    """Of one call, of each in turn."""
    graphs = {}
    for name, call in calls.items():
        call()  # what is made at the first call
        torch.cuda.synchronize()
        dist.barrier(group)
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            dist.barrier(group)
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            took[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: statistics.median(times[2:]) for name, times in took.items()}


def case(tokens: int, heads: int, group: dist.ProcessGroup) -> dict[str, float]:
    world_size = dist.get_world_size(group)
    device, own = torch.device("cuda", torch.cuda.current_device()), heads // world_size
    ours = Exchange(group, tokens, heads, max_candidates=TOPK)
    nccl = Exchange(group, tokens, heads, max_candidates=TOPK, symmetric=False)
    if ours.transport != "symmetric memory":
        raise SystemExit("no symmetric memory here")
    q = torch.randn(tokens, own, 576, device=device).bfloat16()
    out, lse = (
        torch.randn(tokens, heads, 512, device=device).bfloat16(),
        torch.randn(tokens, heads, device=device),
    )
    assert torch.equal(ours.gather_queries(q), nccl.gather_queries(q))
    for x, y in zip(ours.merge(out, lse), nccl.merge(out, lse), strict=True):
        assert torch.equal(x, y)
    scores = torch.randn(tokens, TOPK, device=device)
    positions = torch.rand(tokens, 4 * TOPK, device=device).argsort(1)[:, :TOPK].int()
    table = torch.arange(tokens * 4 * TOPK // PAGE, device=device).int().view(tokens, -1)

    def choose(exchange: Exchange) -> list[torch.Tensor | None]:
        chosen = exchange.merge_topk(
            scores, positions, topk=TOPK, interleave=1, page_table=table, page_size=PAGE
        )
        return list(chosen)

    for chosen, wanted in zip(choose(ours), choose(nccl), strict=True):
        assert chosen is not None and wanted is not None and torch.equal(chosen, wanted)
    sent = out.view(tokens, world_size, own, 512).transpose(0, 1).contiguous()
    received, gathered = torch.empty_like(sent), q.new_empty(world_size * tokens, own, 576)

    def step(exchange: Exchange) -> None:
        exchange.gather_queries(q)
        exchange.merge(out, lse)

    return median_us(
        {
            "choice": lambda: choose(ours),
            "choice, NCCL": lambda: choose(nccl),
            "step": lambda: step(ours),
            "step, NCCL": lambda: step(nccl),
            "merge": lambda: ours.merge(out, lse),
            "merge, NCCL": lambda: nccl.merge(out, lse),
            "all-to-all": lambda: dist.all_to_all_single(received, sent, group=group),
            "all-gather": lambda: dist.all_gather_into_tensor(gathered, q, group=group),
        },
        group,
    )


def rank_of(rank: int, gpus: int, port: int, options: argparse.Namespace) -> None:
    begin = time.monotonic()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", f"tcp://127.0.0.1:{port}", world_size=gpus, rank=rank, device_id=device)
    if rank == 0:
        print(f"{gpus} x {torch.cuda.get_device_name()}, torch {torch.__version__}, us a call")
    for heads in options.heads:
        for tokens in options.tokens:
            late = torch.tensor(float(time.monotonic() - begin > options.seconds), device=device)
            dist.all_reduce(late)
            if late.item():
                break
            us = case(tokens, heads, dist.group.WORLD)
            if rank == 0:
                times = ", ".join(f"{name} {x:.1f}" for name, x in us.items())
                ratio = us["step"] / us["step, NCCL"]
                print(f"tokens={tokens} heads={heads}: {times}; step / NCCL {ratio:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Benchmark of context_parallel.Exchange.")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 32, 64, 128])
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--seconds", type=float, default=150.0, help="later cases are left out")
    parser.add_argument("--smoke", action="store_true", help="one case")
    given, _ = parser.parse_known_args()
    if given.gpus < 2:
        print("context_parallel needs two GPUs of one host: nothing ran")
        raise SystemExit(0)
    if given.smoke:
        given.tokens, given.heads = given.tokens[:1], given.heads[:1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (given.gpus, port, given), nprocs=given.gpus)
