import hypothesis.strategies as st
import pytest
import torch
from call_chains import chains, quick
from error_cases import check_refused, misaligned, transposed
from hypothesis import given
from kv_cache_cases import INT32, INT64
from pool_cases import LAYOUT, PAGE_SIZE, POISON, POOL, Layer, chain, depth_of, entries, live_rows, same_bits

import mla_fp8
from mla_fp8 import index_reference as reference

LENGTH = 45  # of a request in the chains


@quick
@given(data=st.data())
@pytest.mark.sampled(5)
def test_one_call_gives_the_bits_of_every_chain_of_calls(device, data):
    """Entries, and what is left in the state; drafts are rejected in between."""
    torch.manual_seed(0)
    most = data.draw(st.integers(1, 9), label="tokens of a call that may be rejected")
    n = data.draw(st.integers(1, LENGTH), label="tokens")
    layer = Layer(device, strided=data.draw(st.booleans(), label="strided"))
    rows, whole, parts = layer.rows(n), layer.new_state(2, most), layer.new_state(2, most)
    cache = chain(layer, rows, [n], [0], whole)
    cache_of_parts = chain(
        layer, rows, *data.draw(chains(n, most, past_end=True), label="accepted, rejected"), parts
    )
    assert same_bits(entries(cache_of_parts, 0, n // POOL), entries(cache, 0, n // POOL))
    assert same_bits(live_rows(parts, 1, n), live_rows(whole, 1, n))


@pytest.mark.parametrize("most", range(1, 10))
def test_every_accepted_prefix_of_drafts(most, device):
    """Each call computes `most` tokens, of which 1, 2, .. most are accepted in turn."""
    layer = Layer(device)
    rows, cuts, rejected = layer.rows(LENGTH), [], []
    while sum(cuts) < LENGTH:
        cuts.append(min(len(cuts) % most + 1, LENGTH - sum(cuts)))
        rejected.append(max(0, most - cuts[-1]))
    want = chain(layer, rows, [LENGTH], [0], layer.new_state(2, most))
    got = chain(layer, rows, cuts, rejected, layer.new_state(2, most))
    assert same_bits(entries(got, 0, LENGTH // POOL), entries(want, 0, LENGTH // POOL))


@pytest.mark.parametrize("more", [0, 13], ids=["smallest depth", "larger"])
def test_a_call_of_many_requests_has_the_bits_of_calls_of_one(more, device):
    """From the start, from states, of no token, of one and of many; query_start_loc begins anywhere."""
    lens, starts = [531, 0, 3, 140, 1, 1, 1, 1, 64, 6], [0, 5, 7, 130, 61, 255, 126, 3, 2, 1]
    layer, depth, capacity = Layer(device, strided=True), depth_of(1) + more, 200
    state, cache = layer.new_state(12, depth=depth), layer.new_cache(len(lens) * capacity)
    slots, rows = [11 - r for r in range(len(lens))], [layer.rows(n) for n in lens]
    for r, start in enumerate(starts):
        at = layer.slots_of(0, start, r * capacity)
        layer.call(layer.rows(start), [start], [0], state, [slots[r]], at, cache)
    together = state.clone(), cache.clone()
    at = [
        layer.slots_of(start, n, r * capacity) for r, (start, n) in enumerate(zip(starts, lens, strict=True))
    ]
    for r, (n, start) in enumerate(zip(lens, starts, strict=True)):
        layer.call(rows[r], [n], [start], state, [slots[r]], at[r], cache)
    layer.call(torch.cat(rows, 1), lens, starts, together[0], slots, torch.cat(at), together[1], first=3)
    assert same_bits(together[1], cache)
    assert same_bits(together[0], state)  # all that is kept, and nothing else
    assert state[:, :2].isnan().all()  # slots of nobody


@pytest.mark.parametrize("depth", [4, 9])
def test_a_prefix_hit_at_every_position(depth, device):
    """What the slot must hold is copied from another one; every other row of it is NaN."""
    layer, n = Layer(device), 26
    rows = layer.rows(n)
    want = chain(layer, rows, [n], [0], layer.new_state(2, depth=depth))
    for hit in range(1, n):
        state, before = layer.new_state(2, depth=depth), layer.new_state(2, depth=depth)
        chain(layer, rows[:, :hit], [hit], [0], before)
        for p in range(hit - hit % POOL, hit):
            state[:, 1, p % depth] = before[:, 1, p % depth]
        got = chain(layer, rows[:, hit:], [n - hit], [0], state, start=hit)
        assert same_bits(entries(got, hit // POOL, n // POOL), entries(want, hit // POOL, n // POOL))


def test_a_slot_serves_one_request_after_another(device):
    """What another request left in a state does not matter, and lies beside what the next one leaves."""
    layer = Layer(device)
    state = layer.new_state(2, 3)
    for n in (17, 6, 3, 30):
        rows = layer.rows(n)
        got = chain(layer, rows, [2] * (n // 2) + [1] * (n % 2), [0] * (n // 2 + n % 2), state)
        want = chain(layer, rows, [n], [0], layer.new_state(2, 3))
        assert same_bits(entries(got, 0, n // POOL), entries(want, 0, n // POOL))


def test_entries_are_the_specifications(device):
    """Near float32's softmax, as that is not exact; half of all codes may be one apart after its rounding."""
    layer, lens, starts = Layer(device), [37, 1, 64, 5], [0, 3, 2, 7]
    history, pooled, want = {}, {}, {}
    ints = [torch.tensor(x) for x in (lens, starts, [3, 0, 2, 1])]
    before = [layer.rows(n).cpu() for n in starts]
    rows = [layer.rows(n).cpu() for n in lens]
    loc = torch.nn.functional.pad(ints[0].cumsum(0), (1, 0))
    state, cache = layer.new_state(4), layer.new_cache(400)
    for part, n, start in ((before, starts, [0] * 4), (rows, lens, starts)):
        at = torch.cat([layer.slots_of(p, m, 100 * r) for r, (p, m) in enumerate(zip(start, n, strict=True))])
        x = torch.cat(part, 1)
        layer.call(x.to(device), n, start, state, ints[2].tolist(), at, cache)
        loc = torch.nn.functional.pad(torch.tensor(n).cumsum(0), (1, 0))
        found = reference.pool_index_k(*x, loc, torch.tensor(start), history, ints[2], layer.ape.cpu())
        pooled |= {int(at[token]): key for token, key in found}
    assert len(pooled) == sum((s + n) // POOL for s, n in zip(starts, lens, strict=True))
    want = layer.new_cache(400).cpu()
    keys, slots = torch.stack(list(pooled.values())), torch.tensor(list(pooled))
    reference.quantize_index_k(keys, slots, want, layout=LAYOUT, page_size=PAGE_SIZE, hadamard=True)
    untouched = torch.ones(len(want) * PAGE_SIZE, dtype=torch.bool)
    untouched[slots] = False
    got = cache.cpu()
    assert (entries(got, 0, len(untouched))[untouched] == POISON).all()
    (values, scales), (exact, exact_scales) = (
        reference.index_keys(x, LAYOUT, PAGE_SIZE) for x in (got, want)
    )
    values, exact = (
        x[slots].double() * s[slots, None].double() for x, s in ((values, scales), (exact, exact_scales))
    )
    assert ((values - exact).abs() <= 2.0**-3 * exact.abs() + 2.0**-6 * exact.abs().amax(-1, True)).all()
    assert (values != exact).double().mean() < 0.02
    assert torch.equal(scales[slots], torch.exp2(scales[slots].log2().round()))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -float("inf"), 3e38])
def test_equal_scores_give_the_mean(value, device):
    """Exact bytes: of small integers, and with a number that is none, or large, in one key."""
    layer, n = Layer(device), 64
    layer.ape = torch.zeros(POOL, 128, device=device)
    keys = torch.randint(-50, 50, (n, 128), device=device).bfloat16()
    keys[9, 5] = value
    scores = torch.full_like(keys, 3.25)
    cache, want = layer.new_cache(n // POOL), layer.new_cache(n // POOL).cpu()
    slots = layer.slots_of(0, n)
    layer.call(torch.stack([keys, scores]), [n], [0], layer.new_state(1), [0], slots, cache)
    mean = keys.cpu().double().unflatten(0, (-1, POOL)).mean(1)
    mean = mean.float().bfloat16()  # a quarter of an integer below 200: exact
    options = {"layout": LAYOUT, "page_size": PAGE_SIZE, "hadamard": True}
    reference.quantize_index_k(mean, torch.arange(n // POOL), want, **options)
    assert same_bits(entries(cache.cpu(), 0, n // POOL), entries(want, 0, n // POOL))


@pytest.mark.parametrize("score", [float("nan"), -float("inf"), float("inf")])
def test_scores_that_are_no_numbers_are_a_softmax_of_them(score, device):
    """A dim of NaN or of infinite scores is NaN; one score of -inf is a key without weight."""
    layer, n = Layer(device), 8
    rows = layer.rows(n)
    clean = chain(layer, rows, [n], [0], layer.new_state(2))
    rows[1, :4, 7] = score
    got = chain(layer, rows, [n], [0], layer.new_state(2))
    assert same_bits(entries(got, 1, 2), entries(clean, 1, 2))
    values = LAYOUT.views(got, PAGE_SIZE)[0].flatten(0, 1)[0].float()
    assert values.isnan().all()  # the rotation has every dim in every other
    rows[1, :4, 7] = 0.0
    rows[1, 2, 7], rows[0, 2, 7] = -float("inf"), 30.0
    values = LAYOUT.views(chain(layer, rows, [n], [0], layer.new_state(2)), PAGE_SIZE)[0].flatten(0, 1)[0]
    assert not values.float().isnan().any()


def test_a_request_without_a_slot_is_skipped(device):
    """It reads and writes nothing, and the others do not notice; a negative position is no request either."""
    layer, n = Layer(device), 21
    rows, slots = layer.rows(n), [-1, 2, INT32.max, INT32.min, 0, 1]
    state, cache = layer.new_state(2), layer.new_cache(6 * 8)
    alone = layer.new_state(2)
    want = chain(layer, rows, [n], [0], alone)
    at = torch.cat([layer.slots_of(0, n, r * 8) for r in range(6)])
    layer.call(rows.repeat(1, 6, 1), [n] * 6, [0, 0, 0, 0, -1, 0], state, slots, at, cache)
    assert same_bits(state, alone)
    assert same_bits(entries(cache, 40, 40 + n // POOL), entries(want, 0, n // POOL))
    assert (entries(cache, 0, 40) == POISON).all()


def test_a_token_without_a_slot_still_leaves_its_state(device):
    layer, n = Layer(device), 21
    rows, state, other = layer.rows(n), layer.new_state(2), layer.new_state(2)
    chain(layer, rows, [n], [0], state)
    cache = layer.new_cache(n)
    hostile = torch.tensor([-1, len(cache) * PAGE_SIZE, INT64.max, INT64.min], device=device).repeat(n)[
        3 : 3 + n
    ]
    layer.call(rows, [n], [0], other, [1], hostile, cache)
    assert (cache == POISON).all() and same_bits(other, state)


def test_rows_that_pad_a_graph_are_not_looked_at(device):
    """Rows behind the last request, and requests of no rows."""
    layer, n = Layer(device), 9
    rows, state, alone = layer.rows(n + 7), layer.new_state(2), layer.new_state(2)
    want = chain(layer, rows[:, :n], [n], [0], alone)
    cache = layer.new_cache(n // POOL + 1)
    at = torch.cat([layer.slots_of(0, n), torch.arange(7, device=device)])
    layer.call(rows, [n, 0, 0], [0, 0, 3], state, [1, 0, 0], at, cache)
    assert same_bits(cache, want) and same_bits(state, alone)


@pytest.mark.parametrize(
    "starts",
    [[0, INT32.max, 9], [INT32.min, INT32.max, 0], [9, 0, 9], [0, 9, 2], [5, 5, 5], [0, 20, 40], [-4, 3, 9]],
    ids=str,
)
@pytest.mark.parametrize("first", [0, 6, INT32.max - 8, INT32.max])
def test_hostile_lengths_reach_no_foreign_memory(starts, first, device):
    """Sanitizers and the emulator see an access outside; here, what lies around is as it was."""
    layer = Layer(device)
    rows, (around, inside) = layer.rows(9), (layer.new_state(4), slice(1, 3))
    cache = layer.new_cache(64)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, [first, 1], [1, 0])]
    slots = torch.arange(9, device=device)
    mla_fp8.pool_index_k(
        *rows, *ints[:2], *(x[inside] for x in around), ints[2], layer.ape, slots, cache, page_size=PAGE_SIZE
    )
    assert around[:, 0].isnan().all() and around[:, 3].isnan().all()
    assert (entries(cache, 9, 64) == POISON).all()


def test_int32_and_int64_indices_do_the_same(device):
    layer, n = Layer(device), 30
    rows, outcomes = layer.rows(n), []
    for dtype in (torch.int32, torch.int64):
        state, cache = layer.new_state(2), layer.new_cache(8)
        ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, n], [2])]
        slots = layer.slots_of(2, n).to(dtype)
        mla_fp8.pool_index_k(
            *rows, *ints, *state, torch.tensor([1], dtype=dtype, device=device), layer.ape, slots, cache,
            page_size=PAGE_SIZE,
        )  # fmt: skip
        outcomes.append((cache, state))
    assert all(same_bits(*pair) for pair in zip(*outcomes, strict=True))


@pytest.mark.parametrize("seq_len", [3, 9, 64, 250])
def test_pools_are_chosen_and_become_tokens(seq_len, device):
    """A planted pool is among the chosen; all its tokens and the tail become slots: GLM's whole indexer."""
    layer, pools, topk = Layer(device), seq_len // POOL, 4
    torch.manual_seed(seq_len)
    rows = layer.rows(seq_len)
    planted = pools // 3
    query = torch.randn(128, device=device)
    rows[0, planted * POOL : planted * POOL + POOL] = 8 * query.sign().bfloat16()
    pages = 8
    table = torch.randperm(pages, device=device).int()[None]
    positions = torch.arange(seq_len, device=device)
    entry = positions // POOL
    slots = table[0].long()[entry // PAGE_SIZE] * PAGE_SIZE + entry % PAGE_SIZE
    cache = layer.new_cache((pages - 1) * PAGE_SIZE)
    layer.call(rows, [seq_len], [0], layer.new_state(1), [0], slots, cache)
    q = reference.rotate(query.cpu().bfloat16().float()).to(torch.float8_e4m3fn).to(device)
    seen = torch.tensor([seq_len], dtype=torch.int32, device=device)
    chosen, _, lens = mla_fp8.index_topk(
        q.repeat(1, 32, 1), torch.ones(1, 32, device=device), cache, table, seen, layout=LAYOUT,
        page_size=PAGE_SIZE, topk=topk, compress_ratio=POOL,
    )  # fmt: skip
    tokens, count = mla_fp8.topk_to_slots(
        chosen, table, page_size=PAGE_SIZE * POOL, group_size=POOL, token_lens=seen, lens=lens
    )
    want = {planted} if pools else set()
    assert want <= set(chosen[0, : int(lens)].tolist()) and int(lens) == min(pools, topk)
    got = tokens[0, : int(count)].tolist()
    groups = [p * POOL + i for p in chosen[0, : int(lens)].tolist() for i in range(POOL)]
    attended = [*groups, *range(pools * POOL, seq_len)]
    size = PAGE_SIZE * POOL
    assert got == [int(table[0, p // size]) * size + p % size for p in attended]
    assert (tokens[0, int(count) :] == -1).all()


def case(device):
    layer = Layer(device)
    k, score = layer.rows(5)
    state_k, state_score = layer.new_state(3)
    return {
        "k": k, "score": score, "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32, device=device),
        "start_pos": torch.tensor([0, 7], dtype=torch.int32, device=device), "state_k": state_k,
        "state_score": state_score, "state_slots": torch.tensor([1, 2], device=device), "ape": layer.ape,
        "slot_mapping": torch.arange(5, device=device), "index_cache": layer.new_cache(40),
        "page_size": PAGE_SIZE,
    }  # fmt: skip


ERRORS = [
    ("k", lambda x: x.float(), "k must have dtype torch.bfloat16, got torch.float32"),
    ("k", lambda x: x[:, :64], "k must have shape [*, 128], got [5, 64]"),
    ("k", transposed, "k must have stride 1 in its last dimension, got 5"),
    ("k", misaligned, "k must be 16-byte aligned, got an address that is 2 past"),
    ("score", lambda x: x[:4], "score must have shape [5, 128], got [4, 128]"),
    ("score", lambda x: x.float(), "score must have dtype torch.bfloat16, got torch.float32"),
    ("query_start_loc", lambda x: x.long(), "query_start_loc must have dtype torch.int32, got torch.int64"),
    ("query_start_loc", lambda x: x[:0], "query_start_loc must have at least 1 element, got 0"),
    ("start_pos", lambda x: x[:1], "start_pos must have shape [2], got [1]"),
    ("state_k", lambda x: x[:, :3], "state_k must have at least 4 rows per slot, got 3"),
    ("state_k", lambda x: x[:1].expand(3, -1, -1), "state_k must not overlap itself"),
    ("state_score", lambda x: x[:2], "state_score must have shape [3, 4, 128], got [2, 4, 128]"),
    ("state_slots", lambda x: x.short(), "state_slots must have dtype torch.int64 or torch.int32, got"),
    ("ape", lambda x: x.bfloat16(), "ape must have dtype torch.float32, got torch.bfloat16"),
    ("ape", lambda x: x[:2], "ape must have shape [4, 128], got [2, 128]"),
    ("slot_mapping", lambda x: x[:4], "slot_mapping must have shape [5], got [4]"),
    ("index_cache", lambda x: x[:, :-1], "index_cache must have shape [*, "),
    ("page_size", lambda _: 0, "page_size must be in [1, 16777216], got 0"),
]


@pytest.mark.parametrize("name, spoil, message", ERRORS, ids=[f"{x[0]}-{i}" for i, x in enumerate(ERRORS)])
def test_a_bad_argument_is_named_and_nothing_is_written(name, spoil, message, device):
    check_refused(mla_fp8.pool_index_k, case(device) | {name: spoil(case(device)[name])}, message)
