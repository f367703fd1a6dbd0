"""The kernels of mla_fp8.context_parallel with all ranks on one GPU, one after the other: the flags of the
others are raised beforehand. Ranks on GPUs of their own: test_context_parallel_gpus.py."""

from types import SimpleNamespace

import emulation
import pytest
import torch
import torch.distributed as dist

import mla_fp8
from mla_fp8 import context_parallel

pytestmark = [
    pytest.mark.device(torch.cuda.is_available() or emulation.executes(*emulation.NVIDIA), "an NVIDIA GPU"),
    pytest.mark.only(lambda device, **_: emulation.is_cuda(device)),
]
INF, NAN = float("inf"), float("nan")
HEADS, MAX_TOKENS, CTAS = 4, 5, 7  # heads of a rank


class Ranks:
    """Exchanges of ranks that map each other's memory, in one process."""

    def __init__(self, monkeypatch, world_size, device, **options):
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
                None, MAX_TOKENS, HEADS * world_size, device=device, symmetric=False, **options
            )
            exchange._allocate(CTAS)
            for name in ("queries", "outs", "lses"):
                exchange._memory[name].fill_(NAN)
            self.all.append(exchange)

    def raise_flags(self, name, number=1 << 20):
        for exchange in self.all:
            exchange._memory[name].fill_(number)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_queries_of_all_ranks_are_gathered(world_size, tokens, device, monkeypatch):
    ranks = Ranks(monkeypatch, world_size, device)
    ranks.raise_flags("query_flags")
    q = torch.randn(world_size, tokens, HEADS, 576 + 8, device=device).bfloat16()[..., 8:]  # rows apart
    for rank, exchange in enumerate(ranks.all):
        exchange.gather_queries(q[rank])
        with pytest.raises(RuntimeError, match="expected merge after gather_queries"):
            exchange.gather_queries(q[rank])
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
