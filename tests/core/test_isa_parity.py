"""Every instruction set gives the same bytes, and they are those of the scalar codecs in common/fp8.h."""

from contextlib import nullcontext

import _mla_fp8_core as core
import numpy as np
import pytest

PAGE_SIZE, NUM_PAGES = 61, 3
NUM_SLOTS = PAGE_SIZE * NUM_PAGES
PLAIN = core.ISAS[0]
LAYOUTS = list(enumerate(core.KV_LAYOUTS))  # (id, layout)

all_layouts = pytest.mark.parametrize("id, layout", LAYOUTS, ids=[x.name for x in core.KV_LAYOUTS])
FIRST = [x for x in LAYOUTS if not x[1].extra_only]
simd_isas = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(i, id=i.name, marks=[] if i.supported else pytest.mark.skip(reason="not on this CPU"))
        for i in core.ISAS[1:]
    ],
)
modes = [nullcontext] + ([core.FlushDenormals] if core.FlushDenormals.available else [])
callers_modes = pytest.mark.parametrize("mode", modes, ids=["keep", "flush"][: len(modes)])
dtypes = pytest.mark.parametrize("dtype", ["bf16", "float16", "float32"])


def latents(head_dim_qk: int, dtype: str) -> np.ndarray:
    """Rows of one magnitude each, from subnormal to overflow, then random bits (NaN and inf among them)."""
    r = np.random.default_rng(0)
    rows = (NUM_SLOTS // 2, head_dim_qk)
    normal = (r.normal(size=rows) * np.logspace(-44, 37, rows[0])[:, None]).astype(np.float32)
    patterns = r.integers(0, 2**32, rows, np.uint32)
    if dtype == "float32":
        return np.concatenate([normal, patterns.view(np.float32)])
    narrow = core.float_to_bf16(normal)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            narrow = normal.astype(np.float16).view(np.uint16)
    both = np.concatenate([narrow, (patterns >> 16).astype(np.uint16)])
    return both.view(np.float16) if dtype == "float16" else both


def options(id: int, layout) -> dict:
    """A scale that is no power of two shows whether the division is one."""
    scale = 0.37 if layout.scale_format == "per_layer" else None
    return {"layout": id, "page_size": PAGE_SIZE, "scale": scale}


def quantized(isa, latent, id, layout, mode=nullcontext, **more) -> np.ndarray:
    """A poisoned cache with padded pages after the write; some slots are hostile."""
    slots = np.random.default_rng(1).permutation(NUM_SLOTS)[: len(latent)]
    slots[:4] = [-1, NUM_SLOTS, -(2**63), 2**63 - 1]
    kv_cache = np.full((NUM_PAGES, layout.page_bytes(PAGE_SIZE) + 48), 0xA5, np.uint8)
    with mode():
        isa.quantize_kv(latent, slots, kv_cache, **options(id, layout), **more)
    return kv_cache


def random_cache(layout) -> np.ndarray:
    """Every FP8 code under every scale byte, sooner or later; dsv32 scales of any bits."""
    return np.random.default_rng(2).integers(0, 256, (NUM_PAGES, layout.page_bytes(PAGE_SIZE) + 48), np.uint8)


def dequantized(isa, kv_cache, id, layout, mode=nullcontext) -> np.ndarray:
    slots = np.concatenate([np.arange(NUM_SLOTS), [-1, NUM_SLOTS, -(2**63), 2**63 - 1]])
    with mode():
        return isa.dequantize_kv(kv_cache, slots, **options(id, layout))


def codec(format: str):
    return getattr(core, format)


def test_the_best_supported_isa_is_picked():
    assert PLAIN.name == "plain" and PLAIN.supported
    assert core.best_isa == [i.name for i in core.ISAS if i.supported][-1]


@all_layouts
@dtypes
@callers_modes
def test_plain_quantize_ignores_the_callers_mode(id, layout, dtype, mode):
    latent = latents(layout.head_dim_qk, dtype)
    assert (quantized(PLAIN, latent, id, layout, mode) == quantized(PLAIN, latent, id, layout)).all()


@simd_isas
@all_layouts
@dtypes
@callers_modes
def test_quantize_gives_the_same_bytes_on_every_isa(isa, id, layout, dtype, mode):
    latent = latents(layout.head_dim_qk, dtype)
    want = quantized(PLAIN, latent, id, layout)
    np.testing.assert_array_equal(quantized(isa, latent, id, layout, mode), want)


@simd_isas
def test_quantize_with_a_smaller_maximum_gives_the_same_bytes(isa):
    id, layout = next(row for row in LAYOUTS if row[1].name == "dsv4_fnuz")
    latent = latents(layout.head_dim_qk, "bf16")
    want = quantized(PLAIN, latent, id, layout, fp8_max=224.0)
    np.testing.assert_array_equal(quantized(isa, latent, id, layout, fp8_max=224.0), want)
    assert (want != quantized(PLAIN, latent, id, layout)).any()


@simd_isas
@all_layouts
@callers_modes
def test_dequantize_gives_the_same_bits_on_every_isa(isa, id, layout, mode):
    kv_cache = random_cache(layout)
    want = dequantized(PLAIN, kv_cache, id, layout)
    np.testing.assert_array_equal(dequantized(isa, kv_cache, id, layout, mode), want)


def prologue(isa, id, layout, half: int, mode=nullcontext, **more) -> tuple[np.ndarray, np.ndarray]:
    """(q, cache): latents and heads of every magnitude, NaN and inf among them."""
    r, rows = np.random.default_rng(4), latents(512, "bf16")
    rows = rows[r.permutation(len(rows))][: len(rows) // 3 * 3]
    kv, q = rows[: len(rows) // 3], rows[len(rows) // 3 :].reshape(len(rows) // 3, 2, 512)
    extra = layout.head_dim_qk - 512
    half = extra // 2 or half
    table = np.float32(r.normal(size=(2, len(kv), half)))
    kv_cache = np.full((NUM_PAGES, layout.page_bytes(PAGE_SIZE) + 48), 0xA5, np.uint8)
    weight, slots = np.float32(r.normal(size=512)), r.permutation(NUM_SLOTS)[: len(kv)]
    inputs = (q, kv, kv[:, :extra].copy(), weight, *table, slots, kv_cache)
    with mode():
        out = isa.norm_rope_insert(*inputs, **options(id, layout), **more)
    return out, kv_cache


@simd_isas
@all_layouts
@callers_modes
@pytest.mark.parametrize("half", [4, 32, 36])
def test_norm_rope_insert_gives_the_same_bits_on_every_isa(isa, half, id, layout, mode):
    for norm_q in (True, False):
        want = prologue(PLAIN, id, layout, half, norm_q=norm_q)
        for streamed in (False, True):
            got = prologue(isa, id, layout, half, mode, norm_q=norm_q, streamed=streamed)
            for x, y in zip(got, want, strict=True):
                np.testing.assert_array_equal(x, y)


@simd_isas
@callers_modes
@pytest.mark.parametrize("half", [0, 4, 32, 36])
@pytest.mark.parametrize("tile", [32, 128])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_inverse_rope_gives_the_same_bits_on_every_isa(isa, power_of_two, tile, half, mode):
    r, rows = np.random.default_rng(5), latents(256, "bf16")
    o = rows[r.permutation(len(rows))][: len(rows) // 2 * 2].reshape(-1, 2, 256)
    table = np.float32(r.normal(size=(2, len(o), half)))
    want = PLAIN.inverse_rope(o, *table, tile=tile, power_of_two=power_of_two)
    for streamed in (False, True):
        with mode():
            got = isa.inverse_rope(o, *table, tile=tile, power_of_two=power_of_two, streamed=streamed)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x, y)


def compressed(isa, ratio, online, mode=nullcontext, depth=140, **options) -> tuple[np.ndarray, ...]:
    """(latents, cache, state); scores of every size, NaN and infinities among them."""
    r, tokens, start = np.random.default_rng(6), 300, 37
    layout = next(x for x in core.KV_LAYOUTS if x.name == "dsv4")
    width = 512 * {1: 1, 4: 4}.get(ratio, 2)
    x = (r.normal(size=(tokens, width)) * np.logspace(-3, 3, tokens)[:, None]).astype(np.float32)
    x[::9, 3], x[5::11, -7], x[:, -9], x[7::13, -11] = np.nan, np.nan, -np.inf, np.inf
    state = np.float32(np.abs(r.normal(size=(1, depth, 1536 if online else width))))
    ape = np.float32(r.normal(size=(ratio, width // 2) if ratio > 2 else (0, 0)))
    inputs = (ape, np.float32(r.normal(size=512)), *np.float32(r.normal(size=(2, 400, 32))))
    cache = np.full((1, layout.page_bytes(tokens + start)), 0xA5, np.uint8)
    with mode():
        latent = isa.compress_kv(x, state, *inputs, cache, start=start, ratio=ratio, online=online, **options)
    return latent, cache, state


ratios = pytest.mark.parametrize(
    "ratio, online", [(1, False), (2, False), (4, False), (128, False), (128, True)]
)


@simd_isas
@callers_modes
@pytest.mark.parametrize("round_pooled", [True, False])
@ratios
def test_compress_kv_gives_the_same_bits_on_every_isa(isa, ratio, online, round_pooled, mode):
    want = compressed(PLAIN, ratio, online, round_pooled=round_pooled)
    for x, y in zip(compressed(isa, ratio, online, mode, round_pooled=round_pooled), want, strict=True):
        np.testing.assert_array_equal(x, y)


@ratios
@pytest.mark.parametrize("depth", [128, 200, 2])
@pytest.mark.parametrize("cuts", [[150], [1, 90, 91, 92, 218, 219, 220, 299], list(range(1, 300))])
def test_compress_kv_gives_the_same_bits_whatever_thread_is_faster(ratio, online, depth, cuts):
    if depth < ratio and not online:
        pytest.skip("the state is not as deep as a block")
    isa = [x for x in core.ISAS if x.supported][-1]
    want = compressed(isa, ratio, online, depth=depth, round_pooled=True)
    got = compressed(isa, ratio, online, depth=depth, round_pooled=True, cuts=cuts)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def attention_case(dtype: str, head_dim: int, head_dim_v: int, page_size: int = 7) -> dict:
    """23 query heads of three requests over random caches; one key of the last request is NaN."""
    r = np.random.default_rng(3)

    def cache(dim: int) -> np.ndarray:
        x = r.normal(size=(20, page_size, dim)).astype(np.float32)
        x[19] = np.nan
        if dtype.startswith("e4m3"):
            return codec(dtype).encode(x)
        narrow = core.float_to_bf16(x) if dtype == "bf16" else x.astype(np.float16)
        return narrow.view(np.uint8)

    return {
        "q": core.float_to_bf16(4 * r.normal(size=(3, 23, head_dim)).astype(np.float32)),
        "k_cache": cache(head_dim),
        "v_cache": cache(head_dim_v),
        "kv_indptr": np.array([0, 15, 15, 20], np.int32),
        "kv_indices": np.arange(20, dtype=np.int32),
        "kv_last_page_len": np.array([3, 0, 1], np.int32),
        "dtype": getattr(core.CacheDtype, dtype),
        "scale": 0.37,
    }


@simd_isas
@callers_modes
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("head_dims", [(16, 48), (576, 512)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_paged_attention_ragged_gives_the_same_bits_on_every_isa(
    isa, num_splits, head_dims, soft_cap, dtype, mode
):
    case = attention_case(dtype, *head_dims) | {"logits_soft_cap": soft_cap, "num_splits": num_splits}
    want = PLAIN.paged_attention_ragged(**case)
    with mode():
        got = isa.paged_attention_ragged(**case)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    lse = want[1]
    assert np.isfinite(lse[0]).all() and (lse[1] == -np.inf).all() and np.isnan(lse[2]).all()


def decoded(raw: np.ndarray, format: str, scale) -> np.ndarray:
    """Cache bytes to bf16 bits with the scalar codecs."""
    if format == "bf16":
        return raw.view(np.uint16)
    if format == "e2m1":
        raw = np.stack([raw & 15, raw >> 4], 1).ravel()
    with np.errstate(all="ignore"):
        return core.float_to_bf16(codec(format).decode(raw) * scale)


@all_layouts
def test_dequantize_is_one_multiplication_rounded_once(id, layout):
    kv_cache = random_cache(layout)
    got = dequantized(PLAIN, kv_cache, id, layout)
    assert (got[NUM_SLOTS:] == 0).all()
    layer_scale = np.float32(options(id, layout)["scale"] or 1)
    for slot in range(0, NUM_SLOTS, 7):
        page, row = kv_cache[slot // PAGE_SIZE], slot % PAGE_SIZE
        token = page[layout.token_offset(row) :][: layout.token_stride]
        scale = layer_scale
        if layout.num_tiles:
            stored = page[layout.scale_offset(row, PAGE_SIZE) :][: layout.num_tiles * layout.scale_itemsize]
            decode = {"ue8m0": core.ue8m0_to_float, "e4m3": core.e4m3fn.decode}
            scale = decode.get(layout.scale_format, lambda x: x.view(np.float32))(stored)
            scale = scale.repeat(layout.tile_dim)
        nope = decoded(token[: layout.nope_bytes], layout.nope_format, scale)
        rope = decoded(token[layout.rope_offset :], layout.rope_format, layer_scale)
        want = np.concatenate([nope, rope])
        np.testing.assert_array_equal(got[slot], want)


@all_layouts
def test_quantize_is_one_scaling_rounded_once(id, layout):
    """The bytes of one token from the scalar codecs, tile by tile."""
    latent = latents(layout.head_dim_qk, "bf16")
    slots = np.arange(NUM_SLOTS)[: len(latent)]
    kv_cache = np.full((NUM_PAGES, layout.page_bytes(PAGE_SIZE)), 0xA5, np.uint8)
    PLAIN.quantize_kv(latent, slots, kv_cache, **options(id, layout))
    for slot in range(0, len(slots), 5):
        page, row = kv_cache[slot // PAGE_SIZE], slot % PAGE_SIZE
        token, scales_at = layout.token_offset(row), layout.scale_offset(row, PAGE_SIZE)
        nope, rope = np.split(latent[slot], [layout.nope_dim])
        if layout.nope_format == "e2m1":
            want_rope, x = rope.view(np.uint8), core.bf16_to_float(nope).reshape(layout.num_tiles, -1)
            amax = np.where(np.isfinite(x), np.abs(x), 0).max(1)
            amax[np.isnan(x).any(1)] = np.inf
            stored = core.e2m1_tile_scale(amax, layout.scale_floor)
            with np.errstate(all="ignore"):
                codes = core.e2m1.encode(x / core.e4m3fn.decode(stored)[:, None]).reshape(-1, 2)
            want = codes[:, 0] | codes[:, 1] << 4
            np.testing.assert_array_equal(page[scales_at:][: layout.scale_bytes], stored)
        elif layout.num_tiles:
            want_rope, x = rope.view(np.uint8), core.bf16_to_float(nope).reshape(layout.num_tiles, -1)
            limit = codec(layout.nope_format).max
            amax = np.where(np.isfinite(x), np.abs(x), 0).max(1)
            exponent = core.tile_scale_exponent(amax, layout.amax_floor, layout.scale_floor, limit)
            with np.errstate(all="ignore"):
                want = codec(layout.nope_format).encode(x * core.ue8m0_reciprocal(exponent)[:, None]).ravel()
            stored = exponent if layout.scale_itemsize == 1 else core.ue8m0_to_float(exponent).view(np.uint8)
            padded = np.zeros(layout.scale_bytes, np.uint8)
            padded[: len(stored)] = stored
            np.testing.assert_array_equal(page[scales_at:][: layout.scale_bytes], padded)
        elif layout.scale_format == "per_layer":
            scale = np.float32(options(id, layout)["scale"])
            with np.errstate(all="ignore"):
                want, want_rope = (
                    codec(layout.nope_format).encode(core.bf16_to_float(x) / scale) for x in (nope, rope)
                )
        else:
            want, want_rope = nope.view(np.uint8), rope.view(np.uint8)
        np.testing.assert_array_equal(page[token:][: layout.nope_bytes], want)
        np.testing.assert_array_equal(page[token + layout.rope_offset :][: layout.rope_bytes], want_rope)


def keys_of_every_size(r, id: int, layout) -> np.ndarray:
    sizes = np.logspace(-42, 3, NUM_SLOTS)[:, None]
    latent = core.float_to_bf16((r.normal(size=(NUM_SLOTS, layout.head_dim_qk)) * sizes).astype(np.float32))
    kv_cache = np.full((NUM_PAGES, layout.page_bytes(PAGE_SIZE)), 0xFF, np.uint8)
    PLAIN.quantize_kv(latent, np.arange(NUM_SLOTS), kv_cache, **options(id, layout))
    return kv_cache


@simd_isas
@pytest.mark.parametrize(
    "id, extra",
    [(id, None) for id, _ in FIRST] + core.KV_PAIRS,
    ids=lambda x: "alone" if x is None else core.KV_LAYOUTS[x].name,
)
@callers_modes
def test_attention_gives_the_same_bits_on_every_isa(isa, id, extra, mode):
    """Logits of every size, subnormal and huge values, NaN keys, empty rows, partly filled blocks."""
    r, layout = np.random.default_rng(3), core.KV_LAYOUTS[id]
    kv_cache = keys_of_every_size(r, id, layout)
    second = {}
    if extra is not None:
        second = {
            "extra_kv_cache": keys_of_every_size(r, extra, core.KV_LAYOUTS[extra]),
            "extra_layout": extra,
        }

    num_tokens, num_heads, topk = 6, 7, 150
    q = core.float_to_bf16(r.normal(size=(num_tokens, num_heads, layout.head_dim_qk)).astype(np.float32))
    indices = r.integers(0, NUM_SLOTS, (num_tokens, topk)).astype(np.int32)
    indices[:, ::7] = -1
    indices[1] = -1
    indices[2, 5:] = NUM_SLOTS
    q[3] = core.float_to_bf16(np.float32(1e-39))
    indices[4] %= NUM_SLOTS // 2  # tiny keys only
    sink = r.normal(size=num_heads).astype(np.float32)
    more = {**options(id, layout), "sm_scale": 0.3, "attn_sink": sink, **second}
    want = PLAIN.sparse_attention(q, kv_cache, indices, **more)
    with mode():
        got = isa.sparse_attention(q, kv_cache, indices, **more)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
