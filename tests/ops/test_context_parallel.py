"""Ranks that hold a part of the keys each, against one rank that holds all. Ranks are a dimension, or
processes that exchange by gloo."""

import math
import socket

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mla_fp8
from mla_fp8.context_parallel import Exchange

HEADS, PAGE, TOPK, ENTRIES = 8, 16, 64, 500
LAYOUT = mla_fp8.KV_LAYOUTS["dsv32"]
OPTIONS = {"layout": LAYOUT, "page_size": PAGE, "sm_scale": 576**-0.5}
RANKS = pytest.mark.parametrize("world_size, interleave", [(2, 1), (2, 16), (3, 1), (4, 4), (8, 64)])


def cache_of(latent: Tensor, rope: Tensor) -> Tensor:
    cache = LAYOUT.empty(-(-max(len(latent), 1) // PAGE), PAGE, "cpu")
    slots = torch.arange(len(latent))
    mla_fp8.quantize_kv(latent, slots, cache, rope=rope, layout=LAYOUT, page_size=PAGE)
    return cache


class Step:
    """Queries, keys and positions that one rank with all keys attends to."""

    def __init__(self, tokens: int = 5, seed: int = 0):
        torch.manual_seed(seed)
        self.q = torch.randn(tokens, HEADS, 576).bfloat16()
        self.latent, self.rope = torch.randn(ENTRIES, 512).bfloat16(), torch.randn(ENTRIES, 64).bfloat16()
        self.positions = torch.rand(tokens, ENTRIES).argsort(1)[:, :TOPK].sort(1).values.int()
        self.positions[tokens // 2] = torch.arange(TOPK)  # with interleave 64 the keys of one rank
        self.sink = torch.randn(HEADS)

    def whole(self, **options):
        return mla_fp8.sparse_decode(
            self.q, cache_of(self.latent, self.rope), self.positions, backend="native", **OPTIONS, **options
        )

    def of_rank(self, world_size: int, rank: int, interleave: int, q: Tensor | None = None):
        own = torch.arange(ENTRIES) // interleave % world_size == rank
        pages = -(-max(int(own.sum()), 1) // PAGE)
        table = torch.arange(pages, dtype=torch.int32).expand(len(self.q), -1).contiguous()
        slots, lens = mla_fp8.topk_to_slots(
            self.positions, table, page_size=PAGE, world_size=world_size, rank=rank, interleave=interleave
        )
        return mla_fp8.sparse_decode(
            self.q if q is None else q, cache_of(self.latent[own], self.rope[own]), slots, topk_length=lens,
            backend="native", **OPTIONS,
        )  # fmt: skip


def close(got, want):
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@RANKS
@pytest.mark.parametrize("has_sink", [False, True])
def test_partial_results_of_ranks_add_up_to_that_of_one(world_size, interleave, has_sink):
    step = Step()
    parts = [step.of_rank(world_size, r, interleave) for r in range(world_size)]
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    assert world_size * interleave < 500 or (lses == -math.inf).any()
    got = mla_fp8.merge_partial_states(outs, lses, attn_sink=step.sink if has_sink else None)
    close(got, step.whole(attn_sink=step.sink if has_sink else None))


@pytest.mark.parametrize("seed", range(12))
def test_ranks_that_choose_among_their_own_keys_attend_as_one_rank_does(seed):
    """Requests of any lengths, some of no rank's, one token's, or at most topk: they need no merge."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    world_size, interleave, topk = pick(2, 3, 4, 8), pick(1, 4, 16), pick(8, 32)
    lens = torch.tensor([pick(0, 1, topk - 1, topk, topk + 1, 90, 200) for _ in range(4)])
    q = torch.randn(len(lens), HEADS, 576, generator=generator).bfloat16()
    latent = torch.randn(len(lens), 200, 512, generator=generator).bfloat16()
    rope = torch.randn(len(lens), 200, 64, generator=generator).bfloat16()
    scores = torch.randint(9, (len(lens), 200), generator=generator) / 2  # ties
    number = torch.arange(200)

    def choose(own):
        """The best of each request's ``own`` positions, numbered from 0, and their scores."""
        counts = (own[None] < lens[:, None]).sum(1)
        found = scores[:, own].masked_fill(torch.arange(len(own)) >= counts[:, None], -math.inf)
        found = torch.nn.functional.pad(found, (0, max(topk - len(own), 0)), value=-math.inf)
        best = found.sort(dim=1, descending=True, stable=True)
        positions = best.indices[:, :topk].int().where(best.values[:, :topk] > -math.inf, -1)
        return best.values[:, :topk].contiguous(), positions.contiguous()

    def attend(own, slots, lens):
        pages = -(-max(len(own), 1) // PAGE)
        cache = LAYOUT.empty(len(lens) * pages, PAGE, "cpu")
        at = torch.arange(len(lens))[:, None] * pages * PAGE + torch.arange(len(own))
        rows = latent[:, own].flatten(0, 1), at.flatten(), cache
        mla_fp8.quantize_kv(*rows, rope=rope[:, own].flatten(0, 1), layout=LAYOUT, page_size=PAGE)
        return mla_fp8.sparse_decode(q, cache, slots, topk_length=lens, backend="native", **OPTIONS)

    def table(own):
        pages = -(-max(len(own), 1) // PAGE)
        return torch.arange(len(lens) * pages, dtype=torch.int32).view(len(lens), pages)

    want = choose(number)[1]
    want = want.where(want >= 0, 1 << 30).sort(1).values
    want = want.where(want < 1 << 30, -1)
    whole = attend(number, *mla_fp8.topk_to_slots(want, table(number), page_size=PAGE))
    owned = [number[number // interleave % world_size == r] for r in range(world_size)]
    found, positions = map(torch.stack, zip(*map(choose, owned), strict=True))
    chosen, counts = mla_fp8.merge_topk(found, positions, topk=topk, interleave=interleave)
    assert torch.equal(chosen, want)
    assert torch.equal(counts, lens.clamp_max(topk).int())
    every = torch.where(number[:topk] < lens[:, None], number[:topk], -1).int()
    short = lens <= topk
    assert torch.equal(chosen[short], every[short])  # nobody has to ask the others
    parts = []
    for rank, own in enumerate(owned):
        ranks = {"world_size": world_size, "rank": rank, "interleave": interleave}
        parts.append(attend(own, *mla_fp8.topk_to_slots(chosen, table(own), page_size=PAGE, **ranks)))
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    got = mla_fp8.merge_partial_states(outs, lses)
    close(got, whole)
    assert (got[0][lens == 0] == 0).all() and (got[1][lens == 0] == -math.inf).all()
    one = (lses[:, :, 0] > -math.inf).sum(0) == 1  # a rank that has all keys leaves its bits
    assert all(torch.equal(x[one], y[one]) for x, y in zip(got, whole, strict=True))


def test_a_rank_that_has_all_keys_of_a_token_leaves_its_bits():
    step = Step()
    parts = [step.of_rank(8, r, 64) for r in range(8)]
    token = 2  # whose keys are 0 to 63
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    assert (lses[1:, token] == -math.inf).all() and (outs[1:, token] == 0).all()
    out, lse = mla_fp8.merge_partial_states(outs, lses)
    whole = step.whole()
    assert torch.equal(out[token], whole[0][token]) and torch.equal(lse[token], whole[1][token])


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_v4s_entries_and_one_attends_to_the_window(world_size):
    """The window is in every rank's cache; its rows and the sink count once."""
    torch.manual_seed(0)
    layout, page, tokens = mla_fp8.KV_LAYOUTS["dsv4"], 16, 3
    rows, q = torch.randn(2, 320, 512).bfloat16(), torch.randn(tokens, HEADS, 512).bfloat16()
    sink = torch.randn(HEADS)

    def filled(latent):
        cache = layout.empty(-(-len(latent) // page), page, "cpu")
        mla_fp8.quantize_kv(latent, torch.arange(len(latent)), cache, layout=layout, page_size=page)
        return cache

    window = torch.arange(tokens)[:, None].int() + torch.arange(128, dtype=torch.int32)
    chosen = torch.rand(tokens, 320).argsort(1)[:, :TOPK].sort(1).values.int()

    def attend(window, entries, slots, **options):
        return mla_fp8.sparse_decode(
            q, filled(rows[0]), window, layout=layout, page_size=page, sm_scale=512**-0.5, backend="native",
            extra_kv_cache=entries, extra_indices=slots, extra_page_size=page, **options,
        )  # fmt: skip

    want = attend(window, filled(rows[1]), chosen, attn_sink=sink)
    parts = []
    for rank in range(world_size):
        own = rows[1][torch.arange(320) % world_size == rank]
        table = torch.arange(-(-len(own) // page), dtype=torch.int32).expand(tokens, -1).contiguous()
        slots, lens = mla_fp8.topk_to_slots(chosen, table, page_size=page, world_size=world_size, rank=rank)
        counted = window if rank == 1 else torch.full_like(window, -1)
        parts.append(attend(counted, filled(own), slots, extra_topk_length=lens))
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    close(mla_fp8.merge_partial_states(outs, lses, attn_sink=sink), want)


def check_choice(exchange: Exchange, rows: int, interleave: int) -> None:
    """Against the merge of all ranks' lists, and the slots of this rank."""
    scores = torch.randint(9, (exchange.world_size, rows, TOPK)) / 2  # alike on all ranks
    positions = torch.rand(exchange.world_size, rows, 2 * TOPK).argsort(2)[..., :TOPK].int()
    positions[torch.rand(positions.shape) < 0.3] = -1
    table = torch.randperm(rows * 8).int().view(rows, 8)
    mine = scores[exchange.rank], positions[exchange.rank]
    options = {"topk": TOPK, "interleave": interleave}
    chosen, lens = mla_fp8.merge_topk(scores, positions, **options)
    got = exchange.merge_topk(*mine, **options)
    assert torch.equal(got[0], chosen) and got[1] is None and torch.equal(got[2], lens)
    out = torch.full((rows, TOPK + 5), -7, dtype=torch.int32)
    paged = {"page_table": table, "page_size": PAGE, "out_positions": out[:, :TOPK]}
    got = exchange.merge_topk(*mine, **options, **paged)
    ranks = {"world_size": exchange.world_size, "rank": exchange.rank, "interleave": interleave}
    slots = mla_fp8.topk_to_slots(chosen, table, page_size=PAGE, **ranks)
    assert torch.equal(out[:, :TOPK], chosen) and (out[:, TOPK:] == -7).all()
    assert all(map(torch.equal, got[1:], slots))


@pytest.mark.slow
@pytest.mark.parametrize("world_size, interleave", [(2, 1), (4, 64)])
def test_processes_exchange_what_one_process_adds_up_bit_for_bit(world_size, interleave):
    def run_rank(rank: int) -> dict:
        exchange = Exchange(dist.group.WORLD, 16, HEADS, device="cpu", max_candidates=TOPK)
        assert exchange.transport == "collectives"
        heads = HEADS // world_size
        own = slice(rank * heads, (rank + 1) * heads)
        for tokens, seed in ((5, 0), (1, 1), (16, 2)):
            step = Step(tokens, seed)
            got = exchange.attend(
                step.q[:, own],
                lambda q, step=step: step.of_rank(world_size, rank, interleave, q),
                attn_sink=step.sink[own],
            )
            outs, lses = map(
                torch.stack,
                zip(*(step.of_rank(world_size, r, interleave) for r in range(world_size)), strict=True),
            )
            want = mla_fp8.merge_partial_states(outs, lses, attn_sink=step.sink)
            assert torch.equal(got[0], want[0][:, own]) and torch.equal(got[1], want[1][:, own])
            whole = step.whole(attn_sink=step.sink)
            close(got, (whole[0][:, own], whole[1][:, own]))
            queries = exchange.gather_queries(step.q[:, own, :512], step.q[:, own, 512:])
            assert torch.equal(queries, step.q)
            exchange.merge(outs[rank], lses[rank])
            check_choice(exchange, tokens, interleave)
        return {}

    assert forked_ranks.of_ranks(world_size, run_rank) == [{}] * world_size


@pytest.fixture
def alone():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_rank_attends_as_it_is(alone, caplog):
    caplog.set_level("INFO")
    step = Step()
    for _ in range(2):
        exchange = Exchange(alone, 8, HEADS, device="cpu")
        got = exchange.attend(step.q, lambda q: step.of_rank(1, 0, 1, q))
    assert all(map(torch.equal, got, step.whole()))
    assert caplog.text.count("exchanges by collectives: not every rank has an NVIDIA GPU") <= 1


def test_what_does_not_fit_is_refused(alone):
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        Exchange(alone, 0, 8)
    with pytest.raises(ValueError, match="head_dim_qk must be a multiple of 8, got 570"):
        Exchange(alone, 1, 8, head_dim_qk=570)
    with pytest.raises(ValueError, match=r"num_heads must be a multiple of 1 \(the ranks\), got 0"):
        Exchange(alone, 1, 0)
    for most in (-4, 6, 4100):
        with pytest.raises(
            ValueError, match=rf"max_candidates must be a multiple of 4 in \[0, 4096\], got {most}"
        ):
            Exchange(alone, 1, 8, max_candidates=most)
    exchange = Exchange(alone, 4, HEADS, device="cpu")
    with pytest.raises(ValueError, match=r"at most 0, a multiple of 4\] float32, got \[1, 4\] float32"):
        exchange.merge_topk(torch.zeros(1, 4), torch.zeros(1, 4).int(), topk=4)
    with pytest.raises(ValueError, match=r"q must be \[at most 4, 8, 512\] bfloat16, got \[1, 8, 500\]"):
        exchange.gather_queries(torch.zeros(1, 8, 500).bfloat16(), torch.zeros(1, 8, 64).bfloat16())
    with pytest.raises(ValueError, match=r"q_rope must be \[at most 4, 8, 64\] bfloat16, got \[1, 7, 64\]"):
        exchange.gather_queries(torch.zeros(1, 8, 512).bfloat16(), torch.zeros(1, 7, 64).bfloat16())
    with pytest.raises(
        ValueError, match=r"q must be \[at most 4, 8, 576\] bfloat16, got \[5, 8, 576\] bfloat16"
    ):
        exchange.gather_queries(torch.zeros(5, 8, 576).bfloat16())
    with pytest.raises(
        ValueError, match=r"out must be \[at most 4, 8, 512\] bfloat16, got \[4, 8, 512\] float32"
    ):
        exchange.merge(torch.zeros(4, 8, 512), torch.zeros(4, 8))


def test_queries_are_gathered_once_for_a_merge(alone):
    """A second time their memory would be overwritten while another rank attends."""
    step, exchange = Step(), Exchange(alone, 8, HEADS, device="cpu")
    again = pytest.raises(RuntimeError, match="expected merge after gather_queries, got gather_queries")
    q = exchange.gather_queries(step.q)
    with again:
        exchange.gather_queries(step.q)
    with again:
        exchange.attend(step.q, lambda q: step.of_rank(1, 0, 1, q))
    with again:
        exchange.gather_queries(step.q)
    exchange.merge(*step.of_rank(1, 0, 1, q))
    exchange.merge(*step.of_rank(1, 0, 1, q))  # of queries that every rank has
    with pytest.raises(ZeroDivisionError):
        exchange.attend(step.q, lambda q: 1 // 0)
    with pytest.raises(ValueError, match="out must be"):
        exchange.attend(step.q, lambda q: (q, q))
    got = exchange.attend(step.q, lambda q: step.of_rank(1, 0, 1, q))
    assert all(map(torch.equal, got, step.whole()))
