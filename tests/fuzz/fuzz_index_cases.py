"""Random calls of the indexer's ops. Queries and keys are small integers, weights and scales powers of two
times small integers: float32 sums of them are exact in any order, so ties abound and one choice is right.
"""

import numpy as np
import torch
from fuzz_cases import INT_MAX, INT_MIN, Call, Random, int32, starts, tensor
from fuzz_formats import Array, bf16_bits, bf16_values, e2m1_codes, e4m3_codes
from fuzz_oracle import find_request
from fuzz_other_cases import POISON, assert_equal, index_tensor
from torch import Tensor

OF_NAN = 7  # the largest


def power_above(x: Array) -> Array:
    """The exponent of the smallest power of two >= x."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return exponent - (mantissa == 0.5)


def entry_bytes(x: Array, fp4: bool, is_f32: bool, reciprocal: bool, floor: float) -> tuple[Array, Array]:
    """Value and scale bytes of a key of bf16 values."""
    tiles = x.reshape(4 if fp4 else 1, -1)
    amax = np.where(np.isfinite(tiles), np.abs(tiles), 0).max(1)
    amax = np.maximum(amax.astype(np.float32), np.float32(floor))
    if fp4:
        exponent = power_above(amax.astype(np.float64) / 6)
        codes = e2m1_codes(tiles.astype(np.float64) / 2.0 ** exponent[:, None], OF_NAN).reshape(-1)
        scales = np.where(np.isnan(tiles).any(1), 255, exponent + 127).astype(np.uint8)
        return codes[::2] | codes[1::2] << 4, scales
    scale = (
        amax / np.float32(448) if is_f32 else np.float32(2.0 ** power_above(amax.astype(np.float64) / 448))
    )
    scale = np.float32(np.asarray(scale).reshape(-1)[0])
    with np.errstate(over="ignore"):
        quotient = x * (np.float32(1) / scale) if reciprocal else x / scale
    return e4m3_codes(quotient, False, 448.0), np.array([scale]).view(np.uint8)


def quantize_index_k(r: Random) -> Call:
    fp4, page_size, num_pages, n = r.often(), r.pick(1, 2, 16, 61), r.pick(0, 1, 3), r.pick(0, 1, 5, 40)
    value_bytes = 64 if fp4 else 128
    dtype = r.pick(torch.bfloat16, torch.float16, torch.float32)
    x = r.normal(n, 128) * r.pick(1.0, 1e-4, 100.0)
    for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-20):
        x[r.rng.random(x.shape) < 0.01] = value
    k = tensor(x.astype(np.float32)).to(dtype)
    values = bf16_values(bf16_bits(k.float().numpy())).astype(np.float32)
    free = list(r.rng.permutation(num_pages * page_size))
    slots = [int(free.pop()) if free and r.often(0.8) else r.pick(-1, INT_MIN, INT_MAX, num_pages * page_size)
             for _ in range(n)]  # fmt: skip
    cache = torch.full((num_pages, page_size * (value_bytes + 4)), POISON, dtype=torch.uint8)
    floor, is_f32 = r.pick(None, 0.25), not fp4 and r.often()
    reciprocal = is_f32 and r.often()
    default = 6 * 2.0**-126 if fp4 else 1e-4
    want = cache.numpy().copy()
    for i, slot in enumerate(slots):
        if 0 <= slot < num_pages * page_size:
            page, row = divmod(slot, page_size)
            codes, scales = entry_bytes(values[i], fp4, is_f32, reciprocal, floor or default)
            want[page, row * value_bytes : (row + 1) * value_bytes] = codes
            at = page_size * value_bytes + 4 * row
            want[page, at : at + 4] = scales
    arguments = {
        "k": k, "slot_mapping": index_tensor(r, slots), "index_cache": cache,
        "layout": "index_fp4" if fp4 else "index_fp8", "page_size": page_size,
        "scale_format": "f32" if is_f32 else "ue8m0", "amax_floor": floor, "reciprocal": reciprocal,
    }  # fmt: skip
    return Call("quantize_index_k", arguments, lambda _: assert_equal("index_cache", cache, want))


def small(r: Random, *shape: int) -> Array:
    return r.rng.integers(-2, 3, shape).astype(np.float32)


def scores(q: Array, weights: Array, k: Array, scale: Array) -> Array:
    """[keys] of one row."""
    return (np.maximum(q.astype(np.float64) @ k.T, 0) * weights[:, None]).sum(0) * scale


def fp8(x: Array) -> Tensor:
    return tensor(x).to(torch.float8_e4m3fn)


def queries(r: Random, rows: int) -> tuple[Array, Array]:
    heads = r.pick(1, 3, 8, 16, 33, 64)
    return small(r, rows, heads, 128), small(r, rows, heads) / r.pick(1, 8)


def choose(logits: Array, present: Array, topk: int, first: int, last: int) -> list[int]:
    n, first = len(logits), min(first, topk)
    last = min(last, topk - first)
    ranked = sorted(
        (int(i) for i in np.flatnonzero(present)),
        key=lambda i: (not (i < first or i >= n - last), 0 if i < first or i >= n - last else -logits[i], i),
    )
    return sorted(ranked[:topk])


def check_choice(results, wanted: list[list[int]], slots: list[list[int]], topk: int) -> None:  # type: ignore[no-untyped-def]
    positions, found, lens = results
    padded = np.full((2, len(wanted), topk), -1)
    for row, (choice, their_slots) in enumerate(zip(wanted, slots, strict=True)):
        padded[0, row, : len(choice)], padded[1, row, : len(choice)] = choice, their_slots
    assert_equal("positions", positions, padded[0])
    assert_equal("slots", found, padded[1])
    assert_equal("lens", lens, [len(choice) for choice in wanted])


def candidates(r: Random, lists: int, seen: int) -> tuple[list[list[int]] | None, int]:
    """Blocks of each list, if there are any: repeated, beyond what rows see, none."""
    n = r.pick(0, 1, 5, 40)
    return ([r.ints(n, -1, seen // 8 + 2, 0.1) for _ in range(lists)] if r.often(0.4) else None), n


def among(present: Array, blocks: list[int] | None) -> Array:
    if blocks is None:
        return present
    return present & np.isin(np.arange(len(present)) // 8, blocks)


def best_blocks(logits: Array, present: Array, num_blocks: int) -> list[int]:
    newest = (len(logits) - 1) // 8
    best = {
        block: max((logits[i] for i in range(8 * block, min(8 * block + 8, len(logits))) if present[i]),
                   default=-np.inf)
        for block in range(newest + 1)
    }  # fmt: skip
    ranked = sorted(best, key=lambda block: (block != newest, -best[block], block))[:num_blocks]
    return sorted(block for block in ranked if best[block] > -np.inf or block == newest)


def publish(
    op: str, arguments: dict, choices: list[list[int]], slots: list[list[int]], published: list[list[int]]
) -> Call:
    padded = np.full((len(published), arguments["num_blocks"]), -1)
    for row, blocks in enumerate(published):
        padded[row, : len(blocks)] = blocks

    def check(results: tuple[Tensor, ...]) -> None:
        check_choice(results[:3], choices, slots, arguments["topk"])
        assert_equal("blocks", results[3], padded)

    return Call(op, arguments, check)


def paged(r: Random, op: str) -> Call:
    page_size, num_pages = r.pick(1, 3, 16, 64), r.pick(0, 1, 6)
    requests, pages = r.pick(0, 1, 4), r.pick(0, 1, 7)
    gap, ratio = r.pick(0, 0, 12, 4096), r.pick(1, 1, 2, 4)
    varlen = r.often(0.3) and requests > 0
    next_n = 1 if varlen else r.pick(1, 1, 2, 5, 9)
    rows = r.pick(0, 1, 12) if varlen else requests * next_n
    whole = torch.full((num_pages, page_size * 132 + gap), 0xFF, dtype=torch.uint8)[:, : page_size * 132]
    k, scale = small(r, num_pages, page_size, 128), 2.0 ** r.rng.integers(-3, 4, (num_pages, page_size))
    whole[:, : page_size * 128] = fp8(k).view(torch.uint8).view(num_pages, page_size * 128)
    whole[:, page_size * 128 :] = (
        tensor(scale.astype(np.float32)).view(torch.uint8).view(num_pages, page_size * 4)
    )
    table = [r.ints(pages, 0, num_pages, 0.15, (num_pages,)) for _ in range(requests)]
    lens = r.ints(requests, 0, pages * page_size * ratio + 9, 0.1)
    start = starts(r, requests, rows) if varlen else [next_n * i for i in range(requests + 1)]
    row_lens = r.ints(rows, 0, pages * page_size + 9, 0.1) if r.often(0.3) else None
    q, weights = queries(r, rows)
    cells, choices, slots, topk = [], [], [], r.pick(1, 7, 64, 300, 4096)
    first, last = r.pick((0, 0), (0, 0), (3, 9), (1 << 40, 0), (0, 200))
    published, num_blocks = [], r.pick(1, 3, 60, 4096)
    first, last = (0, 0) if op == "index_topk_blocks" else (first, last)
    of_rows = r.often() or rows == requests
    lists, n = candidates(r, rows if of_rows else requests, pages * page_size)
    for row in range(rows):
        request = find_request(start, row)
        seen = 0
        if request is not None:
            m, j = start[request + 1] - start[request], row - (start[request] - start[0])
            seen = row_lens[row] if row_lens else max(lens[request] - m + 1 + j, 0) // ratio
        seen = min(max(seen, 0), pages * page_size)
        at = [divmod(p, page_size) for p in range(seen)]
        at = [(table[request][page], entry) for page, entry in at]
        present = np.array([0 <= page < num_pages for page, _ in at], bool)
        logits = np.full(seen, -np.inf)
        if present.any():
            keys, of = zip(*((k[at[i]], scale[at[i]]) for i in np.flatnonzero(present)), strict=True)
            logits[present] = scores(q[row], weights[row], np.array(keys), np.array(of))
        cells.append(logits)
        published.append(best_blocks(logits, present, num_blocks) if seen else [])
        if op == "index_topk" and lists is not None and request is not None:
            present = among(present, lists[row if of_rows else request])
        choices.append(choose(logits, present, topk, first, last))
        slots.append([at[i][0] * page_size + at[i][1] for i in choices[-1]])
    arguments = {
        "q": fp8(q), "weights": tensor(weights.astype(np.float32)), "index_cache": whole,
        "page_table": int32(table).view(requests, pages),
        "seq_lens": None if row_lens else int32(lens),
        "layout": "index_fp8",
        "page_size": page_size, "row_lens": int32(row_lens) if row_lens else None,
        "query_start_loc": int32(start) if varlen else None,
        "next_n": next_n, "compress_ratio": 1 if row_lens else ratio,
    }  # fmt: skip
    if op == "index_topk":
        arguments |= {"topk": topk, "pin_first": first, "pin_last": last}
        arguments["candidate_blocks"] = None if lists is None else int32(lists).view(len(lists), n)
        return Call(op, arguments, lambda results: check_choice(results, choices, slots, topk))
    if op == "index_topk_blocks":
        return publish(op, arguments | {"topk": topk, "num_blocks": num_blocks}, choices, slots, published)
    width = r.pick(0, 1, 64, 500)
    want = np.full((rows, width), -np.inf)
    for row, logits in enumerate(cells):
        want[row, : len(logits)] = logits[:width]
    return Call(op, arguments | {"width": width}, lambda results: assert_equal("logits", results[0], want))


def index_logits(r: Random) -> Call:
    return paged(r, "index_logits")


def index_topk(r: Random) -> Call:
    return paged(r, "index_topk")


def index_topk_blocks(r: Random) -> Call:
    return paged(r, "index_topk_blocks")


def ragged(r: Random, op: str) -> Call:
    rows, n = r.pick(0, 1, 9), r.pick(0, 1, 100, 700)
    k, scale = small(r, n, 128), 2.0 ** r.rng.integers(-3, 4, n)
    q, weights = queries(r, rows)
    begin, end = r.ints(rows, 0, n + 1, 0.1), r.ints(rows, 0, n + 9, 0.1)
    arguments = {
        "q": fp8(q), "weights": tensor(weights.astype(np.float32)), "k": fp8(k),
        "k_scale": tensor(scale.astype(np.float32)), "k_start": int32(begin), "k_end": int32(end),
    }  # fmt: skip
    ranges = [(min(max(b, 0), n), min(max(e, 0), n)) for b, e in zip(begin, end, strict=True)]
    if op == "index_logits_ragged":
        want = np.full((rows, n), -np.inf)
        for row, (b, e) in enumerate(ranges):
            want[row, b:e] = scores(q[row], weights[row], k[b:e], scale[b:e])
        return Call(op, arguments, lambda results: assert_equal("logits", results[0], want))
    topk, first, last = r.pick(1, 7, 64, 300), r.pick(0, 2), r.pick(0, 5)
    k_slots = r.ints(n, 0, INT_MAX, 0.1) if r.often() else None
    choices, slots, published, num_blocks = [], [], [], r.pick(1, 3, 60)
    publishes = op == "index_topk_ragged_blocks"
    lists, of_list = (None, 0) if publishes else candidates(r, rows, n)
    if publishes:
        first = last = 0
    for row, (b, e) in enumerate(ranges):
        logits = scores(q[row], weights[row], k[b : max(b, e)], scale[b : max(b, e)])
        all_there = np.ones(len(logits), bool)
        published.append(best_blocks(logits, all_there, num_blocks) if len(logits) else [])
        present = among(all_there, None if lists is None else lists[row])
        choices.append(choose(logits, present, topk, first, last))
        slots.append([b + p if k_slots is None else k_slots[b + p] for p in choices[-1]])
    arguments["topk"] = topk
    arguments["k_slots"] = (
        None if k_slots is None else torch.tensor(k_slots, dtype=r.pick(torch.int32, torch.int64))
    )
    if publishes:
        return publish(op, arguments | {"num_blocks": num_blocks}, choices, slots, published)
    arguments |= {"pin_first": first, "pin_last": last}
    if lists is not None:
        arguments["candidate_blocks"] = int32(lists).view(rows, of_list)
    return Call(op, arguments, lambda results: check_choice(results, choices, slots, topk))


def index_logits_ragged(r: Random) -> Call:
    return ragged(r, "index_logits_ragged")


def index_topk_ragged(r: Random) -> Call:
    return ragged(r, "index_topk_ragged")


def index_topk_ragged_blocks(r: Random) -> Call:
    return ragged(r, "index_topk_ragged_blocks")


def topk_to_slots(r: Random) -> Call:
    rows, topk, requests, pages = r.pick(0, 1, 9), r.pick(0, 1, 20), r.pick(0, 1, 3), r.pick(0, 1, 5)
    page_size, group, next_n = r.pick(1, 3, 64), r.pick(1, 2, 4), r.pick(1, 3)
    table = [r.ints(pages, 0, 1000, 0.1) for _ in range(requests)]
    positions = [r.ints(topk, 0, pages * page_size // group + 2, 0.2) for _ in range(rows)]
    request = r.ints(rows, 0, requests, 0.1) if r.often() else None
    tokens = r.ints(rows, 0, pages * page_size, 0.1) if r.often() else None
    lens = r.ints(rows, 0, topk + 2, 0.1) if r.often() else None
    world, turn, by_slot = r.pick(1, 2, 5), r.pick(1, 4), r.often()
    rank = r.pick(0, world - 1)

    def own(number: int) -> int:
        mine = number >= 0 and number // turn % world == rank
        return number // (world * turn) * turn + number % turn if mine else -1

    width = topk * group + (0 if tokens is None else group - 1)
    want, want_lens = np.full((rows, width), -1), [0] * rows
    for row, chosen in enumerate(positions):
        owner = row // next_n if request is None else request[row]
        if not 0 <= owner < requests:
            continue
        counted = [i + 1 for i, p in enumerate(chosen) if p >= 0]
        count = (counted[-1] if counted else 0) if lens is None else min(max(lens[row], 0), topk)
        wanted = [p * group + i if p >= 0 else -1 for p in chosen[:count] for i in range(group)]
        seen = 0 if tokens is None else max(tokens[row], 0)
        wanted += range(seen - seen % group, seen)
        found = []
        for t in wanted if by_slot else map(own, wanted):
            page = table[owner][t // page_size] if 0 <= t < pages * page_size else -1
            slot = page * page_size + t % page_size if page >= 0 else -1
            slot = own(slot) if by_slot else slot
            found.append(slot if slot <= INT_MAX else -1)
        found = [slot for slot in found if slot >= 0] if world > 1 else found
        want[row, : len(found)], want_lens[row] = found, len(found)
    arguments = {
        "positions": int32(positions).view(rows, topk), "page_table": int32(table).view(requests, pages),
        "page_size": page_size, "next_n": next_n, "group_size": group,
        "row_to_request": None if request is None else int32(request),
        "token_lens": None if tokens is None else int32(tokens),
        "lens": None if lens is None else int32(lens),
        "world_size": world, "rank": rank, "interleave": turn, "by_slot": by_slot,
    }  # fmt: skip

    def check(results: tuple[Tensor, ...]) -> None:
        assert_equal("slots", results[0], want)
        assert_equal("lens", results[1], want_lens)

    return Call("topk_to_slots", arguments, check)


def merge_topk(r: Random) -> Call:
    ranks, rows, k = r.pick(1, 2, 5), r.pick(0, 1, 4), r.pick(0, 1, 30)
    topk, own = r.pick(1, 7, 40, 100), r.rng.integers(ranks) if r.often() else None
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.0, 3e38], dtype=np.float32)
    scores = values[r.rng.integers(len(values), size=(ranks, rows, k))]
    positions = r.rng.integers(-20, 60 if r.often() else INT_MAX, size=(ranks, rows, k))
    interleave = r.pick(None, 1, 4, 1 << 16)
    want, want_lens = np.full((rows, topk), -1), [0] * rows
    for row in range(rows):
        found = []  # what comes first is the smallest
        for rank in range(ranks):
            for i in range(k):
                score, position = float(scores[rank, row, i]), int(positions[rank, row, i])
                if interleave is not None and position >= 0:
                    position += (position // interleave * (ranks - 1) + rank) * interleave
                    position = position if position <= INT_MAX else -1
                if (score == -np.inf) if own is not None else (position < 0):
                    continue
                place = position if own is None else rank * k + i
                answer = position if own in (None, rank) else -1
                found.append((np.isnan(score), 0.0 if np.isnan(score) else -score, place, answer))
        chosen = sorted(answer for *_, answer in sorted(found)[:topk] if answer >= 0)
        want[row, : len(chosen)], want_lens[row] = chosen, len(chosen)
    given = positions if own is None else positions[own]
    arguments = {
        "scores": tensor(scores), "positions": int32(given.tolist()).view(given.shape), "topk": topk,
        "rank": None if own is None else int(own), "interleave": interleave,
    }  # fmt: skip

    def check(results: tuple[Tensor, ...]) -> None:
        assert_equal("positions", results[0], want)
        assert_equal("lens", results[1], want_lens)

    return Call("merge_topk", arguments, check)
