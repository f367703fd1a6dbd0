"""The kernels of mla_fp8.context_parallel with all ranks on one GPU, one after the other: the flags of the
others are raised beforehand. On streams of one GPU they wait for each other, in a process of their own. Ranks
on GPUs of their own: test_context_parallel_gpus.py."""

import re
from types import SimpleNamespace

import emulation
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mla_fp8
from mla_fp8 import context_parallel

pytestmark = [
    pytest.mark.device(torch.cuda.is_available() or emulation.executes(*emulation.NVIDIA), "an NVIDIA GPU"),
    pytest.mark.only(lambda device, **_: emulation.is_cuda(device)),
]
INF, NAN = float("inf"), float("nan")
HEADS, MAX_TOKENS, CTAS, CANDIDATES = 4, 5, 7, 64  # heads of a rank


class Ranks:
    """Exchanges of ranks that map each other's memory, in one process."""

    def __init__(self, monkeypatch, world_size, device, ctas=CTAS, **options):
        self.all, memory = [], []
        for rank in range(world_size):

            def empty(size, rank=rank, **_):
                if not memory:
                    memory.append(torch.empty(world_size, size, dtype=torch.uint8, device=device))
                return memory[0][rank]

            def rendezvous(buffer, group):
                return SimpleNamespace(buffer_ptrs=[row.data_ptr() for row in memory[0]])

            fake = SimpleNamespace(empty=empty, rendezvous=rendezvous)
            monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda group: world_size)
            monkeypatch.setattr(context_parallel, "import_module", lambda name, fake=fake: fake)
            exchange = context_parallel.Exchange(
                None, MAX_TOKENS, HEADS * world_size, device=device, symmetric=False,
                max_candidates=CANDIDATES, **options,
            )  # fmt: skip
            exchange._allocate(ctas)
            for name in ("queries", "outs", "lses"):
                exchange._memory[name].fill_(NAN)
            exchange._memory["candidates"].fill_(7)
            self.all.append(exchange)

    def raise_flags(self, name, number=1 << 20):
        for exchange in self.all:
            exchange._memory[name].fill_(number)


@pytest.mark.parametrize("rope", [0, 64])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_queries_of_all_ranks_are_gathered(world_size, tokens, rope, device, monkeypatch):
    """Whole, or in two parts."""
    ranks = Ranks(monkeypatch, world_size, device)
    ranks.raise_flags("query_flags")
    q = torch.randn(world_size, tokens, HEADS, 576 + 8, device=device).bfloat16()[..., 8:]  # rows apart
    for rank, exchange in enumerate(ranks.all):
        parts = q[rank].split([576 - rope, rope], -1) if rope else (q[rank],)
        exchange.gather_queries(*parts)
        with pytest.raises(RuntimeError, match="expected merge after gather_queries"):
            exchange.gather_queries(*parts)
        assert exchange._memory["query_calls"].tolist() == [1, 0]
    want = q.transpose(0, 1).flatten(1, 2)
    for exchange in ranks.all:
        memory = exchange._memory
        assert torch.equal(memory["queries"][:tokens], want)
        assert memory["queries"][tokens:].isnan().all()
        assert memory["query_calls"].tolist() == [1, 0]
        others = [r for r in range(world_size) if r != exchange.rank]
        flags = memory["query_flags"][others]
        assert set(flags.flatten().tolist()) <= {1, 1 << 20} and (flags[:, 0] == 1).all()
        assert (memory["query_flags"][exchange.rank] == 1 << 20).all()


@pytest.mark.parametrize("base", [torch.e, 2.0])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_partial_results_are_merged_as_merge_partial_states_does(
    world_size, tokens, base, device, monkeypatch
):
    ranks = Ranks(monkeypatch, world_size, device, base=base)
    heads = HEADS * world_size
    sink = torch.randn(heads, device=device)
    for call in range(1, 4):  # the halves of the memory in turn
        ranks.raise_flags("state_flags")  # a call lowers its flags to its own number
        outs = torch.randn(world_size, tokens, heads, 512, device=device).bfloat16()
        lses = 3 * torch.randn(world_size, tokens, heads, device=device)
        gone = torch.rand(lses.shape, device=device) < 0.3
        lses[gone] = torch.tensor([-INF, INF, NAN], device=device)[torch.randint(3, (int(gone.sum()),))]
        outs[gone] = NAN
        want = mla_fp8.merge_partial_states(outs, lses, attn_sink=sink, base=base)
        for again in range(2):  # what the others sent is there the second time
            for rank, exchange in enumerate(ranks.all):
                own = slice(rank * HEADS, (rank + 1) * HEADS)
                exchange._memory["state_calls"][0] = call - 1
                got = exchange.merge(outs[rank], lses[rank], attn_sink=sink[own].contiguous())
                assert exchange._memory["state_calls"].tolist() == [call, 0]
                if again:
                    assert torch.equal(got[0], want[0][:, own]) and torch.equal(got[1], want[1][:, own])


def test_a_row_of_no_keys_is_not_sent(device, monkeypatch):
    ranks = Ranks(monkeypatch, 2, device)
    ranks.raise_flags("state_flags")
    out = torch.full((2, 2 * HEADS, 512), 1.0, device=device).bfloat16()
    lse = torch.zeros(2, 2 * HEADS, device=device)
    lse[1] = -INF
    ranks.all[0].merge(out, lse)
    memory = ranks.all[1]._memory
    assert (memory["outs"][1, 0, 0] == 1).all() and memory["outs"][1, 0, 1].isnan().all()
    assert torch.equal(memory["lses"][1, 0, :2], lse[:, HEADS:])
    assert memory["lses"][0].isnan().all() and memory["lses"][1, 1].isnan().all()


@pytest.mark.parametrize("ctas", [1, CTAS])
@pytest.mark.parametrize("columns, topk", [(CANDIDATES, CANDIDATES), (20, 33)])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_choices_are_merged_and_become_slots_of_a_rank(
    world_size, rows, columns, topk, ctas, device, monkeypatch
):
    """As merge_topk and topk_to_slots do: scores of few levels, lists that end, a page that is none."""
    ranks, interleave, page = Ranks(monkeypatch, world_size, device, ctas), 4, 16
    for call in range(1, 4):  # the halves of the memory in turn
        ranks.raise_flags("score_flags")
        scores = torch.randint(5, (world_size, rows, columns), device=device) / 2
        positions = torch.rand(world_size, rows, 2 * columns, device=device).argsort(2)[..., :columns].int()
        ends = torch.randint(columns + 1, (world_size, rows, 1), device=device)
        positions.masked_fill_(torch.arange(columns, device=device) >= ends, -1)
        table = torch.randperm(rows * 8, device=device).int().view(rows, 8)
        table[:, 1] = -1
        for paged in (False, True):
            want, lens = mla_fp8.merge_topk(scores, positions, topk=topk, interleave=interleave)
            for again in range(2):  # what the others sent is there the second time
                for rank, exchange in enumerate(ranks.all):
                    exchange._memory["score_calls"][0] = call - 1
                    out = torch.full((rows, topk + 3), -7, dtype=torch.int32, device=device)
                    got = exchange.merge_topk(
                        scores[rank], positions[rank], topk=topk, interleave=interleave, page_size=page,
                        page_table=table if paged else None, out_positions=out[:, :topk],
                    )  # fmt: skip
                    assert exchange._memory["score_calls"].tolist() == [call, 0]
                    assert (out[:, topk:] == -7).all()
                    if again and paged:
                        own = {"world_size": world_size, "rank": rank, "interleave": interleave}
                        slots = mla_fp8.topk_to_slots(want, table, page_size=page, **own)
                        if world_size == 1:  # holes stay there
                            slots = packed(slots[0]), (slots[0] >= 0).sum(1).int()
                        assert torch.equal(got[1], slots[0]) and torch.equal(got[2], slots[1])
                    elif again:
                        assert got[1] is None and torch.equal(got[2], lens)
                    assert not again or torch.equal(out[:, :topk], want)


def packed(slots):
    return torch.gather(slots, 1, (slots < 0).int().argsort(dim=1, stable=True))


@pytest.mark.device(torch.cuda.is_available(), "streams of a GPU")
def test_a_call_on_another_stream_waits_for_the_last_one(device, monkeypatch):
    first, second = Ranks(monkeypatch, 1, device).all[0], Ranks(monkeypatch, 1, device).all[0]
    q = torch.ones(1, HEADS, 576, device=device).bfloat16()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(50_000_000)
        first.gather_queries(q)
    with torch.cuda.stream(streams[1]):
        second.gather_queries(q)
        assert not streams[1].query()
        streams[1].synchronize()
    assert streams[0].query()


def ranks_wait_for_each_other() -> None:
    """Graphs of two ranks on two streams of one GPU, whose CTAs all run at once; one of them is late."""
    monkeypatch, steps, rows, topk, page = pytest.MonkeyPatch(), 20, 5, 48, 16
    monkeypatch.setattr(context_parallel, "_follow_last_call", lambda device: None)
    ranks, streams = Ranks(monkeypatch, 2, "cuda", time_limit=20.0), [torch.cuda.Stream() for _ in range(2)]
    q = torch.randn(2, rows, HEADS, 576, device="cuda").bfloat16()
    outs = torch.randn(2, rows, 2 * HEADS, 512, device="cuda").bfloat16()
    lses = torch.randn(2, rows, 2 * HEADS, device="cuda")
    scores = torch.randint(5, (2, rows, CANDIDATES), device="cuda") / 2
    positions = torch.rand(2, rows, 2 * CANDIDATES, device="cuda").argsort(2)[..., :CANDIDATES].int()
    table = torch.arange(rows * 8, device="cuda").int().view(rows, 8)
    chosen, _ = mla_fp8.merge_topk(scores, positions, topk=topk, interleave=1)
    merged = mla_fp8.merge_partial_states(outs, lses)
    graphs, found = [], []
    for exchange, stream in zip(ranks.all, streams, strict=True):
        rank, graph = exchange.rank, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(steps):
                choice = exchange.merge_topk(
                    scores[rank], positions[rank], topk=topk, interleave=1, page_table=table, page_size=page
                )
                gathered = exchange.gather_queries(q[rank]).clone()
                got = exchange.merge(outs[rank], lses[rank])
        graphs.append(graph)
        found.append((choice, gathered, got))
    for replay in range(100):
        for rank in (replay % 2, 1 - replay % 2):
            with torch.cuda.stream(streams[rank]):
                if rank == replay // 2 % 2:
                    torch.cuda._sleep(100_000)
                for x in (*found[rank][0], found[rank][1], *found[rank][2]):
                    x.zero_()
                graphs[rank].replay()
        torch.cuda.synchronize()
        for rank, (choice, gathered, got) in enumerate(found):
            own, ours = slice(rank * HEADS, (rank + 1) * HEADS), {"world_size": 2, "rank": rank}
            slots = mla_fp8.topk_to_slots(chosen, table, page_size=page, **ours)
            assert all(map(torch.equal, choice, (chosen, *slots)))
            assert torch.equal(gathered, q.transpose(0, 1).flatten(1, 2))
            assert torch.equal(got[0], merged[0][:, own]) and torch.equal(got[1], merged[1][:, own])
    for exchange in ranks.all:
        for kind in ("query", "state", "score"):
            assert exchange._memory[f"{kind}_calls"].tolist() == [100 * steps, 0]


def nobody_waits_forever() -> None:
    exchange = Ranks(pytest.MonkeyPatch(), 2, "cuda", time_limit=0.5).all[0]
    exchange.merge_topk(torch.zeros(1, 8, device="cuda"), torch.zeros(1, 8, device="cuda").int(), topk=8)
    with pytest.raises(RuntimeError, match="CUDA error"):
        torch.cuda.synchronize()


def run_body(body, errors) -> None:
    try:
        body()
        errors.put("")
    except BaseException as error:
        errors.put(repr(error))


@pytest.mark.device(torch.cuda.is_available(), "streams of a GPU")
@pytest.mark.parametrize("body", [ranks_wait_for_each_other, nobody_waits_forever], ids=lambda f: f.__name__)
def test_ranks_on_one_gpu(body, device):
    context = mp.get_context("spawn")
    errors = context.Queue()
    process = context.Process(target=run_body, args=(body, errors), daemon=True)
    process.start()
    try:
        assert errors.get(timeout=90) == ""
    finally:
        process.join(10)
        process.kill()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda o: o | {"peers": []}, "peers must be 1 to 16 ranks, got 0"),
        (lambda o: o | {"rank": 2}, r"rank must be in \[0, 1\], got 2"),
        (lambda o: o | {"time_limit": 0.0}, "time_limit must be above 0 and below 1e9 s, got 0"),
    ],
)
def test_what_is_wrong_is_refused(change, message, device, monkeypatch):
    exchange = Ranks(monkeypatch, 2, device).all[0]
    exchange._peers = change(exchange._peers)
    with pytest.raises(RuntimeError, match=message):
        exchange.merge(
            torch.zeros(1, 2 * HEADS, 512, device=device).bfloat16(), torch.zeros(1, 2 * HEADS, device=device)
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk": 0}, "topk must be in [1, 4096], got 0"),
        ({"interleave": 3}, "interleave must be a power of two of at most 65536, got 3"),
        ({"page_size": 0}, "page_size must be in [1, 16777216], got 0"),
        ({"next_n": 0}, "next_n must be at least 1, got 0"),
        ({"interleave": None}, "interleave must be given with page_table, got None"),
        ({"scores": (6, 8)}, "scores must be [at most 5, at most 64, a multiple of 4] float32, got [6, 8]"),
        ({"scores": (2, 68)}, "a multiple of 4] float32, got [2, 68]"),
        ({"scores": (2, 6)}, "a multiple of 4] float32, got [2, 6]"),
        ({"out_positions": (2, 9)}, "out_positions must have shape [2, 8], got [2, 9]"),
    ],
)
def test_choices_that_do_not_fit_are_refused(change, message, device, monkeypatch):
    exchange = Ranks(monkeypatch, 2, device).all[0]
    scores = torch.zeros(change.pop("scores", (2, 8)), device=device)
    out = torch.full(change.pop("out_positions", (2, 8)), -7, dtype=torch.int32, device=device)
    options = {"topk": 8, "interleave": 1, "page_size": 16, "out_positions": out} | change
    table = torch.zeros(2, 1, dtype=torch.int32, device=device)
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        exchange.merge_topk(scores, scores.int(), page_table=table, **options)
    assert (out == -7).all()
