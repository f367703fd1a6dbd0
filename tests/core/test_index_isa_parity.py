"""The indexer's CPU kernels give the same bits on every instruction set, in every mode of the caller's."""

import _mla_fp8_core as core
import numpy as np
import pytest
from test_isa_parity import PLAIN, callers_modes, simd_isas

FP8, FP4 = range(2)
BYTES = {FP8: (128, 4), FP4: (64, 4)}
UE8M0, F32, RECIPROCAL = range(3)
N = 150


def keys() -> np.ndarray:
    """Rows of one magnitude each, from subnormal to overflow, then random bits."""
    r = np.random.default_rng(0)
    normal = (r.normal(size=(N // 2, 128)) * np.logspace(-44, 37, N // 2)[:, None]).astype(np.float32)
    return np.concatenate([normal, r.integers(0, 2**32, (N - N // 2, 128), np.uint32).view(np.float32)])


def written(isa, mode, layout: int, scale_format: int, floor: float, hadamard: bool) -> np.ndarray:
    cache = np.full(N * sum(BYTES[layout]) + 64, 0xA5, np.uint8)
    options = {"scale_format": scale_format, "amax_floor": floor, "hadamard": hadamard}
    with mode():
        core.quantize_index_k(isa, keys(), cache, layout=layout, **options)
    return cache


@simd_isas
@callers_modes
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(
    "layout, scale_format, floor",
    [(FP8, UE8M0, 1e-4), (FP8, F32, 1e-4), (FP8, RECIPROCAL, 1e-4), (FP4, UE8M0, 6 * 2.0**-126)],
)
def test_quantize_index_k_gives_the_same_bytes(isa, mode, layout, scale_format, floor, hadamard):
    options = (layout, scale_format, floor, hadamard)
    np.testing.assert_array_equal(written(isa, mode, *options), written(PLAIN, mode, *options))


def pools(isa, mode, start: int) -> list[np.ndarray]:
    """The entries, and the state afterwards, of rows of random bits and of one magnitude each."""
    r = np.random.default_rng(1)
    k, score = r.integers(0, 1 << 16, (2, N, 128), np.uint16)
    k[: N // 2], score[: N // 2] = k[: N // 2] & 0x80FF | 0x3F00, score[: N // 2] & 0x81FF | 0x3E00
    state, ape = (
        r.integers(0x3E00, 0x4000, (2, 7, 128), np.uint16),
        r.normal(size=(4, 128)).astype(np.float32),
    )
    cache = np.full((start + N) // 4 * 132 + 64, 0xA5, np.uint8)
    with mode():
        core.pool_index_k(isa, k, score, state, ape, cache, start)
    return [cache, state]


@simd_isas
@callers_modes
@pytest.mark.parametrize("start", [0, 5, 7])
def test_pool_index_k_gives_the_same_bytes(isa, mode, start):
    for got, want in zip(pools(isa, mode, start), pools(PLAIN, mode, start), strict=True):
        np.testing.assert_array_equal(got, want)


def queries(isa, mode, half: int, **options) -> list[np.ndarray]:
    r = np.random.default_rng(2)
    bits = [r.integers(0, 1 << 16, (40, heads, dim), np.uint16) for heads, dim in ((3, 2 * half), (5, 128))]
    for x, part in zip(bits, (8, 30), strict=True):  # some of one magnitude, the others of any
        x[:part] = x[:part] & 0x80FF | 0x3F00
    cos, sin = r.normal(size=(2, 40, half)).astype(np.float32)
    with mode():
        found = core.prepare_queries(isa, *bits, cos, sin, **options)
    return [x.view(np.uint32) if x.dtype == np.float32 else x for x in found]


@simd_isas
@callers_modes
@pytest.mark.parametrize("half, is_neox", [(8, False), (32, False), (32, True), (48, False)])
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("layout, scale_format", [(FP8, UE8M0), (FP8, F32), (FP8, RECIPROCAL), (FP4, UE8M0)])
def test_prepare_queries_gives_the_same_bits(
    isa, mode, half, is_neox, is_first, hadamard, layout, scale_format
):
    options = {"is_neox": is_neox, "is_first": is_first, "hadamard": hadamard, "layout": layout}
    options["scale_format"] = scale_format
    want = queries(PLAIN, mode, half, **options)
    for got, expected in zip(queries(isa, mode, half, **options), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def logits(isa, mode, heads: int, layout: int, fp4_query: bool, hostile: bool) -> np.ndarray:
    r = np.random.default_rng(1)
    value_bytes, scale_bytes = BYTES[layout]
    cache = r.integers(0, 256, N * (value_bytes + scale_bytes), np.uint8)
    q = r.integers(0, 256, (heads, 64 if fp4_query else 128), np.uint8)
    weights = r.integers(0, 2**32, heads, np.uint32).view(np.float32)
    if not hostile:
        weights = r.normal(size=heads).astype(np.float32)
        q &= 0x77 if fp4_query else 0xBF
        values, scales = cache[: N * value_bytes], cache[N * value_bytes :]
        values &= 0xFF if layout == FP4 else 0xBF
        if layout == FP8:
            scales.view(np.float32)[:] = r.random(N)
        else:
            scales[:] = r.integers(100, 130, len(scales))
    scale = r.integers(0 if hostile else 100, 256 if hostile else 130, (heads, 4), np.uint8)
    arguments = (q, weights, scale if fp4_query else None, cache)
    with mode():
        return core.index_logits(isa, *arguments, layout=layout, num_entries=N).view(np.uint32)


@simd_isas
@callers_modes
@pytest.mark.parametrize("heads", [1, 8, 17, 32, 48, 64])
@pytest.mark.parametrize("layout, fp4_query", [(FP8, False), (FP4, False), (FP4, True)])
@pytest.mark.parametrize("hostile", [False, True])
def test_index_logits_have_the_same_bits(isa, mode, heads, layout, fp4_query, hostile):
    case = (heads, layout, fp4_query, hostile)
    want = logits(PLAIN, mode, *case)
    np.testing.assert_array_equal(logits(isa, mode, *case), want)
    assert hostile or np.isfinite(want.view(np.float32)).all()
