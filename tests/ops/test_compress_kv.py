import itertools

import hypothesis.strategies as st
import pytest
import torch
from call_chains import chains, quick
from compress_cases import (
    EPS,
    KIND_IDS,
    KINDS,
    POISON,
    Layer,
    chain,
    depth_of,
    live_rows,
    same_bits,
    window_of,
)
from hypothesis import given
from kv_cache_cases import INT32, INT64, layer_scale

import mla_fp8
from mla_fp8 import KV_LAYOUTS, layer_reference

kinds = pytest.mark.parametrize("ratio, online", KINDS, ids=KIND_IDS)
LENGTH = {1: 9, 2: 21, 4: 45, 128: 270}  # of a request in the random chains


@kinds
@quick
@given(data=st.data())
@pytest.mark.sampled(5)
def test_one_call_gives_the_bits_of_every_chain_of_calls(ratio, online, device, data):
    """Latents, cache bytes and what is left in the state; drafts are rejected in between."""
    torch.manual_seed(0)
    most = data.draw(st.integers(1, 9), label="tokens of a call that may be rejected")
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    whole, cache, state = chain(layer, rows, [n], [0], most=most)
    cuts, rejected = data.draw(chains(n, most), label="accepted, rejected")
    parts, cache_of_parts, state_of_parts = chain(layer, rows, cuts, rejected, most=most)
    assert same_bits(parts, whole) and same_bits(cache_of_parts, cache)
    assert same_bits(live_rows(layer, state_of_parts, n), live_rows(layer, state, n))


@kinds
@pytest.mark.parametrize("most", range(1, 10))
def test_every_accepted_prefix_of_drafts(ratio, online, most, device):
    """Each call computes `most` tokens, of which 1, 2, .. most are accepted in turn."""
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows, cuts, rejected = layer.rows(n), [], []
    while sum(cuts) < n:
        cuts.append(min(len(cuts) % most + 1, n - sum(cuts)))
        rejected.append(min(most - cuts[-1], n - sum(cuts)) if cuts[-1] < most else 0)
    whole, cache, _ = chain(layer, rows, [n], [0], most=most)
    parts, cache_of_parts, _ = chain(layer, rows, cuts, rejected, most=most)
    assert same_bits(parts, whole) and same_bits(cache_of_parts, cache)


@kinds
@pytest.mark.parametrize("more", [0, 13], ids=["smallest depth", "larger"])
@pytest.mark.parametrize("has_ape", [False, True])
def test_a_large_call_has_the_bits_of_small_ones(ratio, online, more, has_ape, device):
    """Kernels for many tokens: requests from the start, from states, of no token, of one and of many."""
    lens, starts = [531, 0, 3, 140, 260, 1, 64], [0, 5, 7, 130, 61, 255, 126]
    layer, depth = Layer(ratio, online, device), depth_of(ratio, online, 1) + more
    if not has_ape:
        layer.constants["ape"] = None
    capacity = layer.max_pos // ratio + 1
    state, slots = layer.new_state(9, depth=depth), [8 - r for r in range(len(lens))]
    cache = layer.new_cache(len(lens) * capacity)

    def positions(r, first, n):
        return layer.slots_of(torch.arange(first, first + n, device=device), r * capacity)

    def by_chunks(r, rows, first, state, cache):
        done, latents = 0, []
        while done < len(rows):
            part = rows[done : done + 100]
            at = positions(r, first + done, len(part))
            latents.append(layer.call(part, [len(part)], [first + done], state, [slots[r]], at, cache))
            done += len(part)
        return torch.cat(latents) if latents else layer.rows(0).new_empty(0, 512, dtype=torch.bfloat16)

    for r, start in enumerate(starts):
        by_chunks(r, layer.rows(start), 0, state, cache)
    before = None if state is None else state.clone(), cache.clone()
    rows = [layer.rows(n) for n in lens]
    want = [
        by_chunks(r, x, start, state, cache) for r, (x, start) in enumerate(zip(rows, starts, strict=True))
    ]
    at = torch.cat([positions(r, start, n) for r, (start, n) in enumerate(zip(starts, lens, strict=True))])
    got = layer.call(torch.cat(rows), lens, starts, before[0], slots, at, before[1], first=3)
    assert same_bits(got, torch.cat(want)) and same_bits(before[1], cache)
    assert same_bits(before[0], state)  # all that is kept, and nothing else


@kinds
@pytest.mark.parametrize("depth", ["smallest", "larger"])
def test_a_prefix_hit_at_every_position(ratio, online, depth, device):
    """What the slot must hold is copied from another one; every other row of it is NaN."""
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    size = depth_of(ratio, online, 1) + (5 if depth == "larger" else 0)
    whole, cache, _ = chain(layer, rows, [n], [0], most=1, state=layer.new_state(2, depth=size))
    for hit in range(0, n, 1 if ratio < 128 else 13):
        state = layer.new_state(2, depth=size)
        if hit and state is not None:
            _, _, before = chain(layer, rows[:hit], [hit], [0], most=1, state=layer.new_state(2, depth=size))
            for p in range(max(0, hit - (1 if online else window_of(ratio) - 1)), hit):
                state[1, p % size] = before[1, p % size]
        latents, cache_behind, _ = chain(layer, rows[hit:], [n - hit], [0], most=1, start=hit, state=state)
        assert same_bits(latents, whole[hit:])
        pages = layer.layout.views(cache_behind, layer.page_size)
        for pair in zip(pages, layer.layout.views(cache, layer.page_size), strict=True):
            got, want = (x.reshape(-1, x.shape[-1])[hit // ratio : n // ratio] for x in pair)
            assert same_bits(got, want)


@kinds
def test_requests_may_change_their_places_between_calls(ratio, online, device):
    """State follows its slot; a call mixes prefill, decode and verify; query_start_loc begins anywhere."""
    layer, num_requests = Layer(ratio, online, device), 5
    lengths = [LENGTH[ratio] + 7 * i for i in range(num_requests)]
    rows = [layer.rows(n) for n in lengths]
    capacity = max(lengths) // ratio + 1
    state, cache = layer.new_state(9, 1), layer.new_cache(num_requests * capacity)
    latents, done = [[] for _ in rows], [0] * num_requests
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        order = [
            r for r in torch.randperm(num_requests, generator=generator).tolist() if done[r] < lengths[r]
        ]
        if not order:
            break
        steps = [int(torch.randint(0, (3, 60)[i % 2], (1,), generator=generator)) for i in range(len(order))]
        steps = [min(step, lengths[r] - done[r]) for r, step in zip(order, steps, strict=True)]
        batch = [rows[r][done[r] : done[r] + step] for r, step in zip(order, steps, strict=True)]
        slots = [
            layer.slots_of(torch.arange(done[r], done[r] + step, device=device), r * capacity)
            for r, step in zip(order, steps, strict=True)
        ]
        out = layer.call(
            torch.cat(batch), steps, [done[r] for r in order], state, [8 - r for r in order],
            torch.cat(slots), cache, first=11,
        )  # fmt: skip
        for r, part in zip(order, out.split(steps), strict=True):
            latents[r].append(part)
            done[r] += len(part)
    for r in range(num_requests):
        last = rows[r][done[r] :]
        positions = torch.arange(done[r], lengths[r], device=device)
        out = layer.call(
            last, [len(last)], [done[r]], state, [8 - r], layer.slots_of(positions, r * capacity), cache
        )
        alone, own_cache, _ = chain(layer, rows[r], [lengths[r]], [0], most=1)
        assert same_bits(torch.cat([*latents[r], out]), alone)
        at = torch.arange(lengths[r] // ratio, device=device)
        options = {"layout": layer.layout, "page_size": layer.page_size}
        got = mla_fp8.dequantize_kv(cache, r * capacity + at, **options)
        assert same_bits(got, mla_fp8.dequantize_kv(own_cache, at, **options))
    if state is not None:
        assert state[:4].isnan().all()  # slots of nobody


@kinds
@pytest.mark.parametrize("round_pooled", [True, False])
@pytest.mark.parametrize("half", [0, 32])
@pytest.mark.parametrize(
    "layout", [x for x in KV_LAYOUTS.values() if x.head_dim_qk == 512], ids=lambda x: x.name
)
def test_latents_and_rows_are_the_specifications(layout, half, round_pooled, ratio, online, device):
    """Latents to a rounding of bf16, as the softmax is not exact; rows by the bytes of those latents."""
    n, layer = LENGTH[ratio], Layer(ratio, online, device, layout=layout, round_pooled=round_pooled)
    layer.constants["cos"], layer.constants["sin"] = (layer.constants[x][:, :half] for x in ("cos", "sin"))
    rows, scale = layer.rows(n), layer_scale(layout, device)
    constants = {key: None if x is None else x.cpu() for key, x in layer.constants.items()}
    want = layer_reference.compress_kv(
        rows.cpu(), torch.tensor([0, n]), torch.tensor([0]), {}, torch.tensor([1]),
        **constants, ratio=ratio, eps=EPS, round_pooled=round_pooled,
    )  # fmt: skip
    positions = torch.arange(n, device=device)
    slots, cache, state = layer.slots_of(positions), layer.new_cache(n // ratio), layer.new_state(2)
    latent = torch.full((n, 512), float("nan"), dtype=torch.bfloat16, device=device)
    ints = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 5 + n], [0], [1])]
    mla_fp8.compress_kv(
        rows, *ints[:2], state, ints[2], slot_mapping=slots, kv_cache=cache, **layer.constants, ratio=ratio,
        layout=layout, page_size=16, eps=EPS, online=online, round_pooled=round_pooled, scale=scale,
        out_latent=latent,
    )  # fmt: skip
    tokens = torch.tensor([token for token, _, _ in want])
    assert torch.equal(tokens, (~latent.isnan().any(1)).nonzero()[:, 0].cpu()) and len(want) == n // ratio
    got, exact = latent[tokens.to(device)].cpu().float(), torch.stack([x for _, x, _ in want]).float()
    assert ((got - exact).abs() <= 2.0**-7 * exact.abs() + 1e-4).all()
    assert (got != exact).float().mean() < 0.02

    entries = torch.stack([x for _, _, x in want])
    if round_pooled:
        entries = layer_reference.rotated(
            latent[tokens.to(device)].cpu(), constants["cos"], constants["sin"], tokens + 1 - ratio
        )
    clean = layer.new_cache(n // ratio).cpu()
    options = {"layout": layout, "page_size": 16, "scale": None if scale is None else scale.cpu()}
    mla_fp8.quantize_kv(entries, torch.arange(len(entries)), clean, **options)
    if round_pooled:
        assert torch.equal(cache.cpu(), clean)
    else:  # one rounding of float32 apart, and a code of e4m3
        stored = torch.arange(len(entries))
        got, exact = (mla_fp8.dequantize_kv(x, stored, **options).float() for x in (cache.cpu(), clean))
        assert (
            (got - exact).abs() <= 2.0**-3 * exact.abs() + 2e-2 * exact.abs().amax(-1, keepdim=True)
        ).all()
        assert (got != exact).float().mean() < 0.02


@kinds
def test_equal_scores_give_the_mean(ratio, online, device):
    """Of integers, from float64: the softmax itself is exact then."""
    n, layer = 256, Layer(ratio, online, device)
    layer.constants["ape"] = None
    layer.constants["norm_weight"] = torch.ones(512, device=device)
    rows = torch.randint(-50, 50, (n, layer.width), device=device).float()
    half = rows.shape[1] // 2
    if ratio > 1:
        rows[:, half:] = 3.25
    latents, _, _ = chain(layer, rows, [n], [0], most=1)
    for p in range(2 * ratio - 1, n, ratio):
        window = rows[p + 1 - window_of(ratio) : p + 1].double()
        own = window[-ratio:, 512:1024] if ratio == 4 else window[:, :512]
        values = torch.cat([window[:-ratio, :512], own]) if ratio == 4 else own
        mean = values.mean(0).bfloat16().double()
        want = mean / (mean.square().mean() + EPS).sqrt()
        assert (
            (latents[p].double() - want).abs() <= 2.0**-6 * want.abs() + 1e-5
        ).all()  # a bf16 apart, twice


@kinds
@pytest.mark.only(lambda ratio, **_: ratio > 1)  # 1 has no state
def test_a_request_without_a_slot_is_skipped(ratio, online, device):
    """It reads and writes nothing, and the others do not notice; a negative position is no request either."""
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    alone, _, state_alone = chain(layer, rows, [n], [0], most=1)
    info = INT64 if ratio == 4 else INT32
    outside = torch.tensor([-1, 2, info.max, info.min, 0, 1], device=device)
    outside = outside.to(torch.int64 if ratio == 4 else torch.int32)
    starts = torch.tensor([0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n], dtype=torch.int32, device=device)
    start_pos = torch.tensor([0, 0, 0, 0, -1, 0], dtype=torch.int32, device=device)
    state, cache = layer.new_state(2), layer.new_cache(6 * n)
    latent = torch.full((6 * n, 512), float("nan"), dtype=torch.bfloat16, device=device)
    slots = torch.arange(6 * n, device=device)
    mla_fp8.compress_kv(
        rows.repeat(6, 1), starts, start_pos, state, outside, slot_mapping=slots, kv_cache=cache,
        **layer.constants, ratio=ratio, layout=layer.layout, page_size=layer.page_size, eps=EPS,
        online=online, out_latent=latent,
    )  # fmt: skip
    assert latent[: 5 * n].isnan().all() and same_bits(latent[5 * n :], alone)
    assert state[0].isnan().all() and same_bits(state[1], state_alone[1])
    nope, _, _ = layer.layout.views(cache, layer.page_size)
    assert (nope.view(torch.uint8).flatten(0, 1)[: 5 * n] == POISON).all()


@kinds
def test_a_token_without_a_slot_still_leaves_its_state(ratio, online, device):
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    whole, _, state = chain(layer, rows, [n], [0], most=1)
    other, cache = layer.new_state(2, 1), layer.new_cache(n)
    hostile = torch.tensor([-1, len(cache) * 16, INT64.max, INT64.min], device=device).repeat(n)[:n]
    latents = layer.call(rows, [n], [0], other, [1], hostile, cache)
    assert same_bits(latents, whole) and (cache == POISON).all()
    assert same_bits(other, state)


@kinds
def test_a_block_whose_position_the_table_does_not_know_is_not_stored(ratio, online, device):
    n = LENGTH[ratio]
    layer = Layer(ratio, online, device, max_pos=n // ratio // 2 * ratio)
    latents, cache, _ = chain(layer, layer.rows(n), [n], [0], most=1)
    nope, _, _ = layer.layout.views(cache, layer.page_size)
    stored = (nope.view(torch.uint8).flatten(0, 1) != POISON).any(1)
    assert stored.sum() == n // ratio // 2 and stored[: n // ratio // 2].all()
    assert (~latents.isnan().any(1)).sum() == n // ratio


@kinds
@pytest.mark.parametrize("seed", range(5))
def test_no_number_in_query_start_loc_reads_or_writes_elsewhere(ratio, online, seed, device):
    torch.manual_seed(seed)
    layer, n = Layer(ratio, online, device), 64
    values = torch.tensor([INT32.min, -1, 0, 3, 17, 63, 64, 65, 1 << 30, INT32.max])
    starts = values[torch.randint(10, (7,))].int().to(device)
    start_pos = values[torch.randint(10, (6,))].int().to(device)
    slots = torch.tensor([0, 2, 4, 6, 8, 10], device=device)
    whole = layer.new_state(13, 2)
    state = None if whole is None else whole[1:12]
    cache = layer.new_cache(n)
    latent = torch.zeros(n, 512, dtype=torch.bfloat16, device=device)
    mla_fp8.compress_kv(
        layer.rows(n), starts, start_pos, state, slots, slot_mapping=torch.arange(n, device=device),
        kv_cache=cache[:-1], **layer.constants, ratio=ratio, layout=layer.layout, page_size=16, eps=EPS,
        online=online, out_latent=latent,
    )  # fmt: skip
    assert (cache[-1] == POISON).all()
    if whole is not None:
        assert whole[[0, 12]].isnan().all() and state[1::2].isnan().all()


@kinds
def test_a_nan_reaches_all_of_its_own_row_and_no_other(ratio, online, device):
    """A NaN among the scores (ratio 1 has none: kv) of a dim: no exp2 makes a number of it."""
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    whole, _, _ = chain(layer, rows, [n], [0], most=1)
    block = n // ratio // 2
    rows[block * ratio + ratio // 2, {1: 0, 4: 1536}.get(ratio, 512) + 7] = float("nan")
    latents, _, _ = chain(layer, rows, [n], [0], most=1)
    close = block * ratio + ratio - 1
    assert latents[close].isnan().all()
    whole[close] = latents[close]
    assert same_bits(latents, whole)


def test_rows_of_ratio_1_may_be_bf16(device):
    layer = Layer(1, False, device)
    rows = layer.rows(30).bfloat16()
    cache, latents = layer.new_cache(30), []
    for x in (rows, rows.float(), torch.cat([rows, rows], 1)[:, 512:]):
        slots = torch.arange(30, device=device)
        latents.append(layer.call(x, [30], [0], None, [0], slots, cache))
    assert same_bits(latents[0], latents[1]) and same_bits(latents[0], latents[2])


@kinds
def test_rows_and_states_may_lie_apart(ratio, online, device):
    n, layer = LENGTH[ratio], Layer(ratio, online, device)
    rows = layer.rows(n)
    whole, _, state = chain(layer, rows, [n], [0], most=1)
    wide = torch.full((n, layer.width + 64), float("nan"), device=device)
    wide[:, 32:-32] = rows
    pool = None if state is None else torch.full((2, *state.shape[1:-1], 2100), float("nan"), device=device)
    view = None if pool is None else pool[:, :, : state.shape[-1]]
    slots = layer.slots_of(torch.arange(n, device=device))
    assert same_bits(layer.call(wide[:, 32:-32], [n], [0], view, [1], slots, layer.new_cache(n)), whole)
    if pool is not None:
        assert same_bits(view[1], state[1]) and pool[:, :, state.shape[-1] :].isnan().all()


EXTREME_SCORES = (0.0, -0.0, 87.4, -87.4, 88.1, -1e4, 1e30, -1e38, float("inf"), float("-inf"), float("nan"))
EXTREME_VALUES = (0.0, -0.0, 1e-42, -3e-38, 1.5, 2e19, -3e38)


@kinds
@pytest.mark.only(lambda ratio, **_: ratio > 1)  # 1 has no scores
def test_extreme_numbers_have_the_bits_of_the_cpu(ratio, online, device):
    """A dim of each block: its first and last score, its values. NaN is where that of float64 is NaN."""
    scores = EXTREME_SCORES if ratio < 128 else EXTREME_SCORES[-3:]
    pairs = torch.tensor(list(itertools.product(scores, scores)))
    n, layer = len(pairs) * ratio, Layer(ratio, online, device)
    layer.constants["ape"] = None
    rows = layer.rows(n).cpu()
    half, dim, block = layer.width // 2, 77 + (512 if ratio == 4 else 0), torch.arange(len(pairs))
    rows[block * ratio, half + dim], rows[(block + 1) * ratio - 1, half + dim] = pairs.T
    values = torch.tensor(EXTREME_VALUES)
    rows[block * ratio, dim], rows[(block + 1) * ratio - 1, dim] = values[block % 7], values[block // 7 % 7]

    latents, cache, _ = chain(layer, rows.to(device), [n], [0], most=1)
    there = Layer(
        ratio, online, "cpu", constants={k: v if v is None else v.cpu() for k, v in layer.constants.items()}
    )
    want, want_cache, _ = chain(there, rows, [n], [0], most=1)
    assert same_bits(latents.cpu(), want) and same_bits(cache.cpu(), want_cache)

    window = rows[:, half + dim].double().unflatten(0, (-1, ratio))
    if ratio == 4:  # the rows before, of the other half
        before = rows[:, half + 77].double().unflatten(0, (-1, ratio)).roll(1, 0)
        before[0] = float("-inf")
        window = torch.cat([before, window], 1)
    is_nan = window.softmax(1).isnan().any(1)
    assert torch.equal(want[ratio - 1 :: ratio].isnan().all(1), is_nan) and 0 < is_nan.sum() < len(is_nan)
