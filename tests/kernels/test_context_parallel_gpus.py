"""mla_fp8.context_parallel on GPUs of one host, a process each: symmetric memory against collectives, graphs,
a rank that is late, and one that never comes."""

import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mla_fp8.context_parallel import Exchange

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.device(GPUS >= 2 and torch.version.cuda is not None, "two NVIDIA GPUs of one host")
HEADS, MAX_TOKENS, TOPK, INTERLEAVE, PAGE = 64, 128, 256, 4, 64
worlds = pytest.mark.parametrize("world_size", [n for n in (2, 4, 8) if n <= GPUS])


class Rank:
    def __init__(self, rank: int, world_size: int, **options):
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cuda", rank)
        options = {"max_candidates": TOPK} | options
        self.exchange = Exchange(dist.group.WORLD, MAX_TOKENS, HEADS, **options)
        self.plain = Exchange(dist.group.WORLD, MAX_TOKENS, HEADS, max_candidates=TOPK, symmetric=False)
        assert self.exchange.transport == "symmetric memory" and self.plain.transport == "collectives"
        self.heads = HEADS // world_size

    def inputs(self, tokens: int, seed: int):
        """Queries of this rank, and what it found for all: some rows had no keys here."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        options = {"device": self.device, "generator": generator}
        q = torch.randn(tokens, self.heads, 576, **options).bfloat16()
        out = torch.randn(tokens, HEADS, 512, **options).bfloat16()
        lse = 3 * torch.randn(tokens, HEADS, **options)
        gone = torch.rand(tokens, HEADS, **options) < 0.2
        gone[0] = self.rank != 0  # one rank has all keys of token 0
        lse[gone], out[gone] = -torch.inf, torch.nan
        return q, out, lse

    def choice(self, tokens: int, seed: int):
        """What this rank chose among its own keys, in the form of merge_topk's arguments."""
        generator = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        options = {"device": self.device, "generator": generator}
        scores = torch.randint(50, (tokens, TOPK), **options) / 2
        positions = torch.rand(tokens, 4 * TOPK, **options).argsort(1)[:, :TOPK].int()
        positions[torch.rand(tokens, TOPK, **options) < 0.3] = -1
        table = torch.arange(tokens * 4 * TOPK // PAGE, device=self.device).int().view(tokens, -1)
        return {
            "scores": scores, "positions": positions, "topk": TOPK, "interleave": INTERLEAVE,
            "page_table": table, "page_size": PAGE,
        }  # fmt: skip

    def check(self, tokens: int, seed: int) -> None:
        q, out, lse = self.inputs(tokens, seed)
        choice = self.choice(tokens, seed)
        chosen, wanted = self.exchange.merge_topk(**choice), self.plain.merge_topk(**choice)
        assert all(torch.equal(*pair) for pair in zip(chosen, wanted, strict=True))
        assert torch.equal(self.exchange.gather_queries(q), self.plain.gather_queries(q))
        got, want = self.exchange.merge(out, lse), self.plain.merge(out, lse)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        if self.rank == 0:
            assert torch.equal(got[0][0], out[0, : self.heads])


def equal_to_collectives(rank: Rank) -> None:
    for seed, tokens in enumerate((1, 2, 7, 128, 1, 33, 64, 3)):
        rank.check(tokens, seed)


def replayed_graphs(rank: Rank) -> None:
    """100,000 steps in graphs of 100, with eager calls of other sizes between them."""
    steps, tokens = 100, 4
    q, out, lse = rank.inputs(tokens, 0)
    wanted_q = rank.plain.gather_queries(q)
    want = rank.plain.merge(out, lse)
    choice = rank.choice(tokens, 0)
    wanted_choice = rank.plain.merge_topk(**choice)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(steps):
            chosen = rank.exchange.merge_topk(**choice)
            gathered = rank.exchange.gather_queries(q).clone()  # behind merge, the next call may write it
            got = rank.exchange.merge(out, lse)
    for replay in range(1000):
        got[0].fill_(torch.nan)
        chosen[1].fill_(-7)
        graph.replay()
        if replay % 100 == 99:
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            assert torch.equal(gathered, wanted_q)
            assert all(torch.equal(*pair) for pair in zip(chosen, wanted_choice, strict=True))
            rank.check(1 + replay // 100, replay)


def a_rank_is_late(rank: Rank) -> None:
    for late in range(rank.world_size):
        torch.cuda.synchronize()
        if rank.rank == late:
            time.sleep(1.5)
        rank.check(5, late)


def two_exchanges_on_two_streams(rank: Rank) -> None:
    """A rank is late to the first call: the second, ahead of it, would hold the SMs that the first needs."""
    other = Exchange(dist.group.WORLD, MAX_TOKENS, HEADS)
    exchanges, streams = (rank.exchange, other), [torch.cuda.Stream() for _ in range(2)]
    _, out, lse = rank.inputs(128, 0)
    want = rank.plain.merge(out, lse)
    torch.cuda.synchronize()
    for call in range(40):
        got = []
        for exchange, stream in zip(exchanges, streams, strict=True):
            with torch.cuda.stream(stream):
                if exchange is rank.exchange and rank.rank == call % rank.world_size:
                    torch.cuda._sleep(2_000_000)
                got.append(exchange.merge(out, lse))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for result in got for pair in zip(result, want, strict=True))


def nobody_waits_forever(rank: Rank) -> None:
    short = Exchange(dist.group.WORLD, MAX_TOKENS, HEADS, time_limit=1.0)
    if rank.rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="CUDA error"):
            short.gather_queries(rank.inputs(3, 0)[0])
            torch.cuda.synchronize()
        assert 0.5 < time.monotonic() - begin < 20


def run(rank: int, world_size: int, port: int, body, errors) -> None:
    try:
        torch.cuda.set_device(rank)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(
            "nccl", address, world_size=world_size, rank=rank, device_id=torch.device("cuda", rank)
        )
        body(Rank(rank, world_size))
        if body is not nobody_waits_forever:
            torch.cuda.synchronize()
            dist.destroy_process_group()
    except BaseException as error:
        errors.put(f"rank {rank}: {error!r}")
    finally:
        errors.put(None)


@worlds
@pytest.mark.parametrize(
    "body",
    [
        equal_to_collectives,
        a_rank_is_late,
        two_exchanges_on_two_streams,
        replayed_graphs,
        nobody_waits_forever,
    ],
    ids=lambda f: f.__name__,
)
def test_ranks(body, world_size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    errors = context.Queue()
    ranks = [
        context.Process(target=run, args=(rank, world_size, port, body, errors), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        said = []
        while said.count(None) < world_size:
            said.append(errors.get(timeout=180))
            assert said[-1] is None, said[-1]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
