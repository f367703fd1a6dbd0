"""Random calls of compress_kv and pool_index_k: what is pooled near float64's, the state exactly."""

from typing import Any

import numpy as np
import torch
from fuzz_cases import INT_MAX, INT_MIN, Cache, Call, Random, int32, tensor
from fuzz_formats import HEAD_DIM_V, LAYOUTS, Array, bf16_bits, bf16_values
from fuzz_index_cases import entry_bytes
from fuzz_layer_cases import poisoned_pages, slots_of, table_of, turned
from fuzz_other_cases import POISON, assert_equal, index_tensor

WIDTHS = {1: 512, 2: 1024, 4: 2048, 128: 1024}


def window_rows(x: Array, state: Array | None, first: int, start: int, close: int, ratio: int) -> list[tuple]:
    """(position, row) of the window of the token at position `close`; the call begins at `start`."""
    found = []
    for q in range(max(0, close + 1 - {4: 8}.get(ratio, ratio)), close + 1):
        if q >= start:
            found.append((q, x[first + q - start]))
        else:
            assert state is not None
            found.append((q, state[q % len(state)]))
    return found


def pooled(rows: list[tuple], ape: Array | None, close: int, ratio: int) -> Array:
    values, scores = [], []
    for q, row in rows:
        part = HEAD_DIM_V if ratio == 4 and q > close - ratio else 0
        values.append(row[part : part + HEAD_DIM_V].astype(float))
        scores.append(row[len(row) // 2 + part :][:HEAD_DIM_V].astype(float))
        if ape is not None:
            scores[-1] = scores[-1] + ape[q % ratio, part : part + HEAD_DIM_V]
    if ratio == 1:
        return values[0]
    weights = np.exp(np.array(scores) - np.max(scores, 0))
    return (weights * np.array(values)).sum(0) / weights.sum(0)


Batch = list[tuple[int, int, int]]  # of each request: tokens, position of the first, slot of the state
Latents = dict[int, tuple[Array, int]]  # by token: the latent, and the position of its row


def outcome(
    x: Array, batch: Batch, state: Array, ape: Array | None, weight: Array, ratio: int
) -> tuple[Latents, Array]:
    """The latents, and the state afterwards."""
    want, after, first = dict[int, tuple[Array, int]](), state.copy(), 0
    for length, start, slot in batch:
        served = start >= 0 and (ratio == 1 or 0 <= slot < len(state))
        own = state[slot] if served and ratio > 1 else None
        for t in range(length if served else 0):
            p = start + t
            if (p + 1) % ratio == 0:
                mean = pooled(window_rows(x, own, first, start, p, ratio), ape, p, ratio)
                mean = bf16_values(bf16_bits(mean.astype(np.float32))).astype(float)
                want[first + t] = mean / np.sqrt((mean**2).mean() + 1e-6) * weight, p + 1 - ratio
            if ratio > 1 and t >= length - state.shape[1]:
                after[slot, p % state.shape[1]] = x[first + t]
        first += length
    return want, after


def requests_of(r: Random, num_states: int) -> Batch:
    order, outside = list(r.rng.permutation(num_states)), (-1, num_states, INT_MIN, INT_MAX)
    return [
        (
            r.pick(0, 1, 3, 9, 140),
            r.pick(0, 1, 5, 127, 128, 300, -1, INT_MIN),
            int(order.pop()) if order and r.often(0.8) else r.pick(*outside),
        )
        for _ in range(r.pick(0, 1, 3))
    ]


def compress_kv(r: Random) -> Call:
    ratio, num_states = r.pick(1, 2, 4, 128), r.pick(0, 1, 4)
    cache = Cache(r, r.pick(*(x for x in LAYOUTS if x.dim == HEAD_DIM_V)), usable_pages=True)
    width, depth = WIDTHS[ratio], {1: 1, 2: 2, 4: 8, 128: 128}[ratio] + r.pick(0, 3)
    batch = requests_of(r, num_states)
    n = sum(length for length, _, _ in batch)
    x = r.normal(n, width) * r.pick(1.0, 5.0)
    is_bf16 = ratio == 1 and r.often(0.3)
    x = bf16_values(bf16_bits(x)) if is_bf16 else x
    state, half = r.normal(num_states, depth, width), r.pick(0, 4, 32)
    cos, sin = table_of(r, r.pick(0, 400), half)
    ape = r.normal(ratio, width // 2) if ratio > 2 and r.often(0.8) else None
    weight = bf16_values(bf16_bits(r.normal(HEAD_DIM_V)))
    want, after = outcome(x, batch, state, ape, weight, ratio)
    rows, held, whole = slots_of(r, n, cache.num_slots), tensor(state), poisoned_pages(cache)
    expected = whole.numpy().copy()
    latent = torch.full((n, HEAD_DIM_V), 99.0, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {
        "kv_score": tensor(x).to(torch.bfloat16) if is_bf16 else tensor(x),
        "query_start_loc": int32(np.cumsum([r.pick(0, 7, -3), *(length for length, _, _ in batch)])),
        "start_pos": int32([start for _, start, _ in batch]), "state": None if ratio == 1 else held,
        "state_slots": index_tensor(r, [slot for _, _, slot in batch]),
        "ape": None if ape is None else tensor(ape), "norm_weight": tensor(weight), "cos": tensor(cos),
        "sin": tensor(sin), "slot_mapping": index_tensor(r, rows), "kv_cache": whole, **cache.options(),
        "ratio": ratio, "eps": 1e-6, "out_latent": latent,
    }  # fmt: skip

    def check(_: tuple[torch.Tensor, ...]) -> None:
        if ratio > 1:
            assert_equal("state", held, after)
        got, bits = latent.float().numpy(), latent.view(torch.int16).numpy().view(np.uint16)
        closed = (got != 99.0).any(1).nonzero()[0].tolist()
        assert closed == sorted(want), f"closed {closed} for {sorted(want)}"
        for t, (exact, position) in want.items():
            far = np.abs(got[t] - exact) > 2.0**-6 * np.abs(exact) + 1e-3
            assert not far.any(), f"latent {t}: {got[t][far][0]} for {exact[far][0]}"
            if 0 <= rows[t] < cache.num_slots and (half == 0 or position < len(cos)):
                angles = (cos[position], sin[position]) if half else (cos[:0].ravel(), sin[:0].ravel())
                page, place = divmod(rows[t], cache.page_size)
                row = turned(bits[t], *angles)
                cache.layout.store(expected[page], cache.page_size, place, row, cache.scale, None)
        assert_equal("kv_cache", whole, expected)

    return Call("compress_kv", arguments, check)


def pool_index_k(r: Random) -> Call:
    """Scores are equal or far apart, keys small integers: what is pooled is exact, and so are the bytes."""
    num_states, depth = r.pick(0, 1, 4), r.pick(4, 7, 16)
    num_pages, page_size = r.pick(0, 1, 3), r.pick(1, 16, 61)
    batch = requests_of(r, num_states)
    n = sum(length for length, _, _ in batch)
    k, state_k = (
        r.rng.integers(-9, 10, shape).astype(np.float32) for shape in ((n, 128), (num_states, depth, 128))
    )
    score, state_score = (r.rng.choice([0.0, 300.0], x.shape).astype(np.float32) for x in (k, state_k))
    ape = np.repeat(r.rng.choice([0.0, 300.0], (4, 1)), 128, 1).astype(np.float32)
    slots = slots_of(r, n, num_pages * page_size)
    cache = torch.full((num_pages, page_size * 132), POISON, dtype=torch.uint8)
    want, after, first = cache.numpy().copy(), [state_k.copy(), state_score.copy()], 0
    for length, start, slot in batch:
        if start >= 0 and 0 <= slot < num_states:
            ring = [
                {p: x[slot, p % depth] for p in range(max(0, start - depth), start)}
                for x in (state_k, state_score)
            ]
            for t in range(length):
                p = start + t
                for history, new, kept in zip(ring, (k, score), after, strict=True):
                    history[p] = new[first + t]
                    kept[slot, p % depth] = new[first + t]
                if p % 4 == 3 and 0 <= slots[first + t] < num_pages * page_size:
                    keys, logits = (np.array([x[q] for q in range(p - 3, p + 1)], float) for x in ring)
                    weights = np.exp(logits + ape - (logits + ape).max(0))
                    mean = (weights * keys).sum(0) / weights.sum(0)
                    row = hadamard(bf16_values(bf16_bits(mean.astype(np.float32))))
                    page, at = divmod(slots[first + t], page_size)
                    codes, scale = entry_bytes(row, False, False, False, 1e-4)
                    want[page, at * 128 : at * 128 + 128] = codes
                    want[page, page_size * 128 + 4 * at :][:4] = scale
        first += length
    held = [tensor(x).to(torch.bfloat16) for x in (state_k, state_score)]
    arguments: dict[str, Any] = {
        "k": tensor(k).to(torch.bfloat16), "score": tensor(score).to(torch.bfloat16),
        "query_start_loc": int32(np.cumsum([r.pick(0, 7, -3), *(length for length, _, _ in batch)])),
        "start_pos": int32([start for _, start, _ in batch]), "state_k": held[0], "state_score": held[1],
        "state_slots": index_tensor(r, [slot for _, _, slot in batch]), "ape": tensor(ape),
        "slot_mapping": index_tensor(r, slots), "index_cache": cache, "page_size": page_size,
    }  # fmt: skip

    def check(_: tuple[torch.Tensor, ...]) -> None:
        for name, got, exact in zip(("state_k", "state_score"), held, after, strict=True):
            assert_equal(name, got.float(), exact)
        assert_equal("index_cache", cache, want)

    return Call("pool_index_k", arguments, check)


def hadamard(x: Array) -> Array:
    """In float32, neighbours first, rounded to bf16: sums of what is pooled here are exact in any order."""
    for step in (1, 2, 4, 8, 16, 32, 64):
        pairs = x.reshape(-1, 2, step)
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
    return bf16_values(bf16_bits((x * np.float32(128**-0.5)).astype(np.float32))).astype(np.float32)
