"""Random calls of a layer's ops around attention. Their bits are compared: float32 in NumPy, in order."""

from typing import Any

import numpy as np
import torch
from fuzz_cases import INT_MAX, INT_MIN, Cache, Call, Random, from_bits, tensor
from fuzz_formats import HEAD_DIM_V, LAYOUTS, Array, bf16_bits, bf16_values, e4m3_codes
from fuzz_index_cases import entry_bytes
from fuzz_other_cases import POISON, assert_equal, index_tensor, same_bf16


def normed(x: Array, weight: Array | None, eps: float) -> Array:
    """One row of float32: the sums of sixteen neighbours in order, then of halves."""
    with np.errstate(all="ignore"):
        squares, sums = x.astype(np.float64).reshape(32, 16) ** 2, np.zeros(32, np.float32)
        for i in range(16):
            sums = (sums.astype(np.float64) + squares[:, i]).astype(np.float32)
        while len(sums) > 1:
            sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
        mean = sums[0] / np.float32(HEAD_DIM_V) + np.float32(eps)
        y = x * np.float32(1 / np.sqrt(np.float64(mean)))
        return y if weight is None else y * weight


def turned(bits: Array, cos: Array, sin: Array) -> Array:
    """The bits of a row of bf16 whose last dims are rotated."""
    half, bits = len(cos), bits.copy()
    if half == 0:
        return bits
    end = bf16_values(bits[-2 * half :])
    a, b = end[0::2], end[1::2]
    with np.errstate(all="ignore"):
        pairs = np.stack([a * cos - b * sin, a * sin + b * cos], -1)
    bits[-2 * half :] = bf16_bits(pairs.reshape(-1))
    return bits


def rows_of(r: Random, *shape: int) -> Array:
    """bf16 bits of any size; some of them NaN or infinite."""
    x = r.normal(*shape) * r.pick(1.0, 1.0, 1e-20, 1e18)
    for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-140):
        x[r.rng.random(x.shape) < r.pick(0.0, 1e-3)] = value
    return bf16_bits(x)


def positions_of(r: Random, n: int, max_pos: int) -> list[int]:
    outside = (-1, max_pos, INT_MIN, INT_MAX)
    return [int(r.rng.integers(max_pos)) if r.often(0.85) and max_pos else r.pick(*outside) for _ in range(n)]


def slots_of(r: Random, n: int, num_slots: int) -> list[int]:
    free = list(r.rng.permutation(num_slots))
    return [int(free.pop()) if free and r.often(0.8) else r.pick(-1, INT_MIN, INT_MAX, num_slots)
            for _ in range(n)]  # fmt: skip


def poisoned_pages(cache: Cache) -> torch.Tensor:
    if not cache.num_pages:
        return cache.tensor
    wide = torch.full((cache.num_pages, cache.pages.strides[0] or 16), POISON, dtype=torch.uint8)
    return wide[:, : cache.layout.page_bytes(cache.page_size)]


def table_of(r: Random, max_pos: int, half: int) -> tuple[Array, Array]:
    return r.normal(max_pos, half), r.normal(max_pos, half)


def norm_rope_insert(r: Random, with_q: bool) -> Call:
    cache = Cache(r, r.pick(*LAYOUTS), usable_pages=True)
    layout, num_tokens, max_pos = cache.layout, r.pick(0, 1, 5, 20), r.pick(0, 1, 40)
    extra = layout.dim - HEAD_DIM_V
    half = r.pick(0, 32) if extra else r.pick(0, 4, 32, 128)
    cos, sin = table_of(r, max_pos, half)
    kv, k_rope = rows_of(r, num_tokens, HEAD_DIM_V), rows_of(r, num_tokens, extra if half else 0)
    weight = r.pick(None, torch.bfloat16, torch.float32)
    factors = None if weight is None else bf16_values(bf16_bits(r.normal(HEAD_DIM_V)))
    eps, at = r.pick(1e-6, 0.0, 1e-2), positions_of(r, num_tokens, max_pos)
    slots = slots_of(r, num_tokens, cache.num_slots)[: r.pick(num_tokens, num_tokens // 2)]
    known = [half == 0 or 0 <= p < max_pos for p in at]
    none = np.zeros(0, np.float32)

    def angles(t: int) -> tuple[Array, Array]:
        return (cos[at[t]], sin[at[t]]) if half else (none, none)

    whole = poisoned_pages(cache)
    want = whole.numpy().copy()
    for t, slot in enumerate(slots):
        if 0 <= slot < cache.num_slots and known[t]:
            row = kv[t] if factors is None else bf16_bits(normed(bf16_values(kv[t]), factors, eps))
            row = np.concatenate([row, k_rope[t] if half else np.zeros(extra, np.uint16)])
            page, place = divmod(slot, cache.page_size)
            row = turned(row, *angles(t))
            layout.store(want[page], cache.page_size, place, row, cache.scale, None)
    alternating = torch.stack([tensor(cos), tensor(sin)], -1).flatten(1) if r.often(0.3) else None
    arguments: dict[str, Any] = {
        "kv": from_bits(kv),
        "kv_weight": None if factors is None else tensor(factors).to(weight),
        "cos": tensor(cos) if alternating is None else alternating[:, 0::2],
        "sin": tensor(sin) if alternating is None else alternating[:, 1::2],
        "positions": index_tensor(r, at),
        "slot_mapping": index_tensor(r, slots),
        "kv_cache": whole,
        **cache.options(),
        "eps": eps,
        "k_rope": from_bits(k_rope) if extra and half else None,
    }  # fmt: skip
    if not with_q:
        return Call("k_norm_rope_insert", arguments, lambda _: assert_equal("kv_cache", whole, want))

    heads, norm_q = r.pick(1, 3, 16), r.often()
    dim = HEAD_DIM_V if norm_q else r.pick(max(2 * half, 8), HEAD_DIM_V, 576)
    num_heads = heads + r.pick(0, 5)
    q = rows_of(r, num_tokens, heads, dim)
    want_q = np.zeros((num_tokens, num_heads, dim), np.uint16)
    for t in range(num_tokens):
        for h in range(heads if known[t] else 0):
            row = bf16_bits(normed(bf16_values(q[t, h]), None, eps)) if norm_q else q[t, h]
            want_q[t, h] = turned(row, *angles(t))
    source = from_bits(q)
    more = {"q": source, "norm_q": norm_q, "num_heads": num_heads}
    if num_heads == heads and r.often(0.5):
        more["out_q"] = source

    def check(results: tuple[torch.Tensor, ...]) -> None:
        same_bf16("q", results[0], want_q)
        assert_equal("kv_cache", whole, want)

    return Call("qk_norm_rope_insert", arguments | more, check)


def k_norm_rope_insert(r: Random) -> Call:
    return norm_rope_insert(r, with_q=False)


def qk_norm_rope_insert(r: Random) -> Call:
    return norm_rope_insert(r, with_q=True)


def turned_part(bits: Array, cos: Array, sin: Array, neox: bool, first: int) -> Array:
    """The bits of a row whose dims from ``first`` on are rotated."""
    half, out = len(cos), bits.copy()
    order = np.arange(2 * half).reshape(2, half).T.reshape(-1) if neox else np.arange(2 * half)
    part = bits[first : first + 2 * half]
    out[first : first + 2 * half][order] = turned(part[order], cos, sin)
    return out


def index_queries(r: Random, n: int, max_pos: int, at: list[int]) -> tuple[dict[str, Any], list[Array]]:
    """Arguments of the indexer's part, and its results: codes, weights and the scales of e2m1."""
    heads, neox, first, fp4 = r.pick(1, 3, 8, 64), r.often(), r.often(), r.often(0.3)
    half = r.pick(0, 32) if neox else r.pick(0, 4, 32, 60, 64)
    cos, sin = table_of(r, max_pos, half)
    q, is_f32, floor = rows_of(r, n, heads, 128), not fp4 and r.often(), r.pick(None, 0.25)
    reciprocal, scales = is_f32 and r.often(), [np.float32(r.pick(1.0, 128**-0.5, 0.3)) for _ in range(2)]
    of_weights = r.pick(torch.float32, torch.bfloat16)
    weights = tensor(r.normal(n, heads)).to(of_weights)
    w = weights.float().numpy()
    codes, four = np.zeros((n, heads, 64 if fp4 else 128), np.uint8), np.zeros((n, heads, 4), np.uint8)
    out = np.zeros((n, heads), np.float32)
    for t, p in enumerate(at):
        known = half == 0 or 0 <= p < max_pos
        for h in range(heads):
            bits = q[t, h] if known else np.zeros(128, np.uint16)
            if known and half:
                bits = turned_part(bits, cos[p], sin[p], neox, 0 if first else 128 - 2 * half)
            default = 6 * 2.0**-126 if fp4 else 1e-4
            codes[t, h], four[t, h] = entry_bytes(
                bf16_values(bits).astype(np.float32), fp4, is_f32, reciprocal, floor or default
            )
            scale = np.float32(1) if fp4 else four[t, h].view(np.float32)[0]
            with np.errstate(all="ignore"):
                out[t, h] = w[t, h] * scales[0] * scale * scales[1]
    arguments = {
        "index_q": from_bits(q), "index_weights": weights, "index_cos": tensor(cos), "index_sin": tensor(sin),
        "index_neox": neox, "index_rope_first": first, "layout": "index_fp4" if fp4 else "index_fp8",
        "scale_format": "f32" if is_f32 else "ue8m0", "amax_floor": floor, "reciprocal": reciprocal,
        "weight_scale": float(scales[0]), "head_scale": float(scales[1]),
    }  # fmt: skip
    return arguments, [codes, out, *([four] if fp4 else [])]


NO_INDEX = {"index_q": None, "index_weights": None}


def prepare_queries(r: Random) -> Call:
    n, max_pos, heads, half = r.pick(0, 1, 4, 9), r.pick(0, 1, 40), r.pick(1, 5, 16), r.pick(8, 32, 56)
    at, (cos, sin), neox = positions_of(r, n, max_pos), table_of(r, max_pos, half), r.often()
    q = rows_of(r, n, heads, 2 * half)
    want = np.zeros_like(q)
    for t, p in enumerate(at):
        for h in range(heads if 0 <= p < max_pos else 0):
            want[t, h] = turned_part(q[t, h], cos[p], sin[p], neox, 0)
    arguments = {
        "positions": index_tensor(r, at), "cos": tensor(cos), "sin": tensor(sin), "q_pe": from_bits(q),
        "neox": neox,
    }  # fmt: skip
    index, wanted = index_queries(r, n, max_pos, at) if r.often(0.7) else (dict(NO_INDEX), [])
    if r.often():
        arguments["out_q_pe"] = arguments["q_pe"]

    def check(results: tuple[torch.Tensor | None, ...]) -> None:
        assert results[0] is not None
        same_bf16("q_pe", results[0], want)
        for name, got, expected in zip(("codes", "weights", "scales"), results[1:], wanted, strict=False):
            assert got is not None
            assert_equal(name, got.view(torch.uint8) if name == "codes" else got, expected)

    return Call("prepare_queries", arguments | index, check)


def normed_of_any(x: Array, weight: Array, eps: float) -> Array:
    """One row of float32: eights of a lane in order, 256 apart, then halves of the 32 sums."""
    with np.errstate(all="ignore"):
        whole = np.pad(x, (0, -len(x) % 256)).astype(np.float64).reshape(-1, 32, 8) ** 2
        sums = np.zeros(32, np.float32)
        for part in whole:
            for i in range(8):
                sums = (sums.astype(np.float64) + part[:, i]).astype(np.float32)
        mean = halved(sums) / np.float32(len(x)) + np.float32(eps)
        return x * np.float32(1 / np.sqrt(np.float64(mean))) * weight


def halved(sums: Array) -> np.float32:
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]  # type: ignore[no-any-return]


def layer_normed(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    def mean(y: Array) -> np.float32:
        y = y.reshape(16, 8)
        for _ in range(3):
            y = y[:, ::2] + y[:, 1::2]
        return halved(y[:, 0]) / np.float32(128)

    with np.errstate(all="ignore"):
        centred = x - mean(x)
        factor = np.float32(1 / np.sqrt(np.float64(mean(centred * centred) + np.float32(eps))))
        y = centred * factor * weight
        return y if bias is None else y + bias


def index_keys(r: Random, at: list[int], max_pos: int) -> tuple[dict[str, Any], torch.Tensor, Array]:
    """Arguments of the indexer's part of prepare_keys, its cache, and what that has to hold."""
    n, fp4, neox, first = len(at), r.often(0.3), r.often(), r.often()
    half = r.pick(0, 32) if neox else r.pick(0, 4, 32, 60, 64)
    page_size, num_pages, eps = r.pick(1, 16, 61), r.pick(1, 3), r.pick(1e-6, 1e-2)
    k, (cos, sin) = rows_of(r, n, 128), table_of(r, max_pos, half)
    weight, bias = bf16_values(bf16_bits(r.normal(128))), r.pick(None, bf16_values(bf16_bits(r.normal(128))))
    of_weights, size = r.pick(torch.float32, torch.bfloat16), 64 if fp4 else 128
    is_f32, floor = not fp4 and r.often(), r.pick(None, 0.25)
    reciprocal, slots = is_f32 and r.often(), slots_of(r, n, num_pages * page_size)
    cache = torch.full((num_pages, page_size * (size + 4)), POISON, dtype=torch.uint8)
    want = cache.numpy().copy()
    for t, (slot, p) in enumerate(zip(slots, at, strict=True)):
        if not 0 <= slot < num_pages * page_size or (half and not 0 <= p < max_pos):
            continue
        bits = bf16_bits(layer_normed(bf16_values(k[t]), weight, bias, eps))
        if half:
            bits = turned_part(bits, cos[p], sin[p], neox, 0 if first else 128 - 2 * half)
        default = 6 * 2.0**-126 if fp4 else 1e-4
        values = bf16_values(bits).astype(np.float32)
        codes, scales = entry_bytes(values, fp4, is_f32, reciprocal, floor or default)
        page, row = divmod(slot, page_size)
        want[page, row * size : (row + 1) * size] = codes
        want[page, page_size * size + 4 * row :][:4] = scales
    arguments = {
        "index_k": from_bits(k), "index_k_weight": tensor(weight).to(of_weights), "index_cos": tensor(cos),
        "index_k_bias": None if bias is None else tensor(bias).to(of_weights), "index_sin": tensor(sin),
        "index_slot_mapping": index_tensor(r, slots), "index_cache": cache, "index_neox": neox,
        "index_page_size": page_size, "index_eps": eps, "index_rope_first": first, "amax_floor": floor,
        "index_layout": "index_fp4" if fp4 else "index_fp8", "scale_format": "f32" if is_f32 else "ue8m0",
        "reciprocal": reciprocal,
    }  # fmt: skip
    return arguments, cache, want


def prepare_keys(r: Random) -> Call:
    call = norm_rope_insert(r, with_q=False)
    arguments, n = call.arguments, len(call.arguments["kv"])
    at, dim = arguments["positions"].tolist(), r.pick(8, 64, 264, 1536)
    q_a, weight = rows_of(r, n, dim), bf16_values(bf16_bits(r.normal(dim)))
    want = [bf16_bits(normed_of_any(bf16_values(row), weight, arguments["eps"])) for row in q_a]
    arguments |= {"q_a": from_bits(q_a), "q_a_weight": tensor(weight)}
    if r.often():
        arguments["out_q_a"] = arguments["q_a"]
    index, cache, want_index = index_keys(r, at, len(arguments["cos"]))

    def check(results: tuple[torch.Tensor, ...]) -> None:
        same_bf16("q_a", results[0], np.array(want, np.uint16).reshape(n, dim))
        assert_equal("index_cache", cache, want_index)
        call.check(())

    return Call("prepare_keys", arguments | index, check)


def attended(r: Random) -> tuple[dict[str, Any], Array]:
    """Arguments of inverse_rope, and the bits of its result."""
    num_tokens, heads, half, max_pos = r.pick(0, 1, 4, 9), r.pick(1, 4, 6), r.pick(0, 4, 32), r.pick(0, 1, 40)
    dim = r.pick(128, HEAD_DIM_V, 640)
    o, (cos, sin) = rows_of(r, num_tokens, heads, dim), table_of(r, max_pos, half)
    at = positions_of(r, num_tokens, max_pos)
    want = np.zeros_like(o)
    for t, p in enumerate(at):
        for h in range(heads if half == 0 or 0 <= p < max_pos else 0):
            want[t, h] = turned(o[t, h], cos[p], -sin[p]) if half else o[t, h]
    arguments = {"o": from_bits(o), "cos": tensor(cos), "sin": tensor(sin), "positions": index_tensor(r, at)}
    return arguments, want


def inverse_rope(r: Random) -> Call:
    arguments, want = attended(r)
    if r.often():
        arguments["out"] = arguments["o"]
    return Call("inverse_rope", arguments, lambda results: same_bf16("o", results[0], want))


def inverse_rope_quantize(r: Random) -> Call:
    arguments, bits = attended(r)
    num_tokens, heads, dim = bits.shape
    groups, tile, power_of_two = r.pick(1, heads), r.pick(32, 128), r.often()
    tiles = bf16_values(bits).reshape(num_tokens, groups, heads // groups * dim // tile, tile)
    amax = np.abs(np.where(np.isfinite(tiles), tiles, 0)).max(-1)
    scale = np.maximum(amax, np.float32(1e-10)) / np.float32(448)
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    with np.errstate(all="ignore"):
        codes = e4m3_codes(tiles / scale[..., None], False, 448.0)

    def check(results: tuple[torch.Tensor, ...]) -> None:
        assert_equal("scale", results[1], scale)
        assert_equal("codes", results[0].contiguous().view(torch.uint8), codes)

    more = {"num_groups": groups, "tile": tile, "power_of_two": power_of_two}
    return Call("inverse_rope_quantize", arguments | more, check)
