import pytest
import torch
from kv_cache_cases import (
    INT32,
    POISON,
    all_layouts,
    distinct_slots,
    e4m3_tiles,
    latents,
    layer_scale,
    lazy_cache,
    page_sizes,
    poisoned_cache,
    whole_buffer,
)

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

NUM_PAGES = 7
SOURCES = [torch.bfloat16, torch.float16, torch.float32]


def check_bytes(latent, slots, kv_cache, *, layout, page_size, **options):
    """The op and the reference write the same bytes, and neither touches another one."""
    scale = layer_scale(layout, kv_cache.device)
    options |= {"layout": layout, "page_size": page_size, "scale": scale}
    expected = poisoned_cache(layout, len(kv_cache), page_size, kv_cache.device)
    reference.quantize_kv(latent, slots.long(), expected, **options)
    mla_fp8.quantize_kv(latent, slots, kv_cache, **options)
    assert torch.equal(kv_cache, expected)
    gaps = whole_buffer(kv_cache).view(len(kv_cache), kv_cache.stride(0))[:, kv_cache.shape[1] :]
    assert (gaps == POISON).all()


def written(latent, layout, **options):
    """The views (nope, scale, rope) of latent's rows, in a cache of one token a page."""
    kv_cache = poisoned_cache(layout, len(latent), 1, latent.device)
    slots = torch.arange(len(latent), device=latent.device)
    scale = layer_scale(layout, latent.device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=1, scale=scale, **options)
    return [view[:, 0] for view in layout.views(kv_cache, 1)]


@all_layouts
@page_sizes
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_bytes_match_the_reference(layout, page_size, num_tokens, device):
    slots = distinct_slots(num_tokens, NUM_PAGES * page_size, device)
    kv_cache = poisoned_cache(layout, NUM_PAGES, page_size, device)
    check_bytes(latents(layout, num_tokens, device), slots, kv_cache, layout=layout, page_size=page_size)


@all_layouts
@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("several_threads")
def test_many_tokens_of_every_dtype(layout, dtype, slot_dtype, device):
    """Enough rows for several threads; a row of each magnitude that bf16 knows, subnormals too."""
    latent = torch.randn(300, layout.head_dim_qk, device=device)
    latent = (latent * torch.logspace(-44, 37, 300, device=device)[:, None]).to(dtype)
    slots = distinct_slots(300, NUM_PAGES * 64, device, slot_dtype)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device)
    check_bytes(latent, slots, kv_cache, layout=layout, page_size=64)


@all_layouts
def test_rows_past_the_slot_mapping_are_padding(layout, device):
    latent = latents(layout, 40, device)
    latent[11:] = float("nan")
    slots = distinct_slots(11, NUM_PAGES * 64, device)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device)
    check_bytes(latent, slots, kv_cache, layout=layout, page_size=64)


@all_layouts
def test_no_slot_names_another_slot(layout, device):
    num_slots = NUM_PAGES * 64
    hostile = [-1, num_slots, INT32.min, INT32.max, -num_slots, num_slots + 63, 1 << 30]
    hostile64 = [1 << 32, -(1 << 32), (1 << 63) - 1, -(1 << 63), (1 << 58) + 1]
    for dtype, values in ((torch.int32, hostile), (torch.int64, hostile + hostile64)):
        slots = torch.tensor(values, dtype=dtype, device=device)
        kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device)
        scale = layer_scale(layout, device)
        mla_fp8.quantize_kv(
            latents(layout, len(slots), device), slots, kv_cache, layout=layout, page_size=64, scale=scale
        )
        assert (kv_cache == POISON).all()


@all_layouts
def test_pages_may_lie_apart(layout, device):
    slots = distinct_slots(19, NUM_PAGES * 64, device)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device, gap=4096 + 16)
    check_bytes(latents(layout, 19, device), slots, kv_cache, layout=layout, page_size=64)


@all_layouts
@pytest.mark.parametrize("typed", [False, True], ids=["bytes", "typed"])
def test_the_cache_may_be_typed_and_in_flash_mla_view(layout, typed, device):
    """By its FP8 dtype or bf16; test_cache_dtypes.py has every dtype, and those that are refused."""
    has_bf16 = layout.fp8_dtype is None and layout.name.startswith("bf16")
    dtype = (torch.bfloat16 if has_bf16 else layout.fp8_dtype or torch.float8_e4m3fn) if typed else torch.int8
    latent, slots = latents(layout, 19, device), distinct_slots(19, NUM_PAGES * 64, device)
    options = {"layout": layout, "page_size": 64, "scale": layer_scale(layout, device)}
    expected = poisoned_cache(layout, NUM_PAGES, 64, device)
    mla_fp8.quantize_kv(latent, slots, expected, **options)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device, gap=64)
    four_d = layout.flash_mla_view(kv_cache, 64)
    for view in (kv_cache.view(dtype), four_d.view(dtype), four_d.view(dtype)[:, :, 0]):
        kv_cache.fill_(POISON)
        mla_fp8.quantize_kv(latent, slots, view, **options)
        assert torch.equal(kv_cache, expected)


@all_layouts
@pytest.mark.parametrize("dtype", SOURCES)
def test_rope_may_come_apart(layout, dtype, device):
    latent, slots = latents(layout, 19, device, dtype), distinct_slots(13, NUM_PAGES * 64, device)
    options = {"layout": layout, "page_size": 64, "scale": layer_scale(layout, device)}
    expected, kv_cache = (poisoned_cache(layout, NUM_PAGES, 64, device) for _ in range(2))
    mla_fp8.quantize_kv(latent, slots, expected, **options)
    nope, rope = latent.split([layout.nope_dim, layout.rope_dim], dim=-1)
    mla_fp8.quantize_kv(nope.contiguous(), slots, kv_cache, rope=rope, **options)
    assert torch.equal(kv_cache, expected)


@all_layouts
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_do_not_depend_on_the_source_dtype(layout, dtype, device):
    """Wider sources round to bf16 first, here across a midpoint that the scale's rule can see."""
    latent = latents(layout, 50, device, dtype)
    latent[0] = 448 * (1 + 2.0**-9)  # bf16: 448
    latent[1] = 448 * (1 + 2.0**-8 + 2.0**-10)  # bf16: one ulp above
    for got, want in zip(written(latent, layout), written(latent.bfloat16(), layout), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("limit", [224.0, 240.0, 128.0])
@pytest.mark.parametrize("name", ["dsv32_fnuz", "dsv4_fnuz", "fp8_e4m3_fnuz", "dsv4"])
def test_a_smaller_maximum_bounds_scales_and_codes(name, limit, device):
    layout = KV_LAYOUTS[name]
    latent, slots = latents(layout, 40, device), distinct_slots(40, NUM_PAGES * 64, device)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device)
    check_bytes(latent, slots, kv_cache, layout=layout, page_size=64, fp8_max=limit)
    nope, _, _ = written(latent, layout, fp8_max=limit)
    assert limit / 2 <= nope.float().abs().max() <= limit


@pytest.mark.parametrize("limit", [None, 4.0, 208.0])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_512_fnuz"])
def test_every_bf16_has_the_code_of_a_true_division_by_the_layers_scale(name, limit, device):
    """Kernels multiply by a reciprocal and correct: scales of odd mantissas and up to the ends of float32."""
    layout = KV_LAYOUTS[name]
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    num_tokens = -(-len(values) // layout.head_dim_qk)
    latent = values.repeat(2)[: num_tokens * layout.head_dim_qk].view(num_tokens, layout.head_dim_qk)
    slots = torch.arange(num_tokens)
    exponents = (-149, -126, -61, -60, -30, -9, -1, 0, 3, 60, 61, 127)
    for scale in (mantissa * 2.0**e for e in exponents for mantissa in (1.0, 1.3700001, 2 - 2.0**-23)):
        options = {"layout": layout, "page_size": 1, "fp8_max": limit, "scale": torch.tensor([scale])}
        want, got = (poisoned_cache(layout, num_tokens, 1, where) for where in ("cpu", device))
        reference.quantize_kv(latent, slots, want, **options)
        options["scale"] = options["scale"].to(device)
        mla_fp8.quantize_kv(latent.to(device), slots.to(device), got, **options)
        assert torch.equal(got.cpu(), want), scale


@e4m3_tiles
def test_an_amax_of_the_maximum_needs_no_larger_scale(layout, device):
    """amax = max * 2^k has scale 2^k; one bf16 ulp above has twice that."""
    largest = torch.finfo(layout.fp8_dtype).max
    exponents = torch.arange(-12, 100, device=device)
    exact = (largest * 2.0**exponents).bfloat16()
    above = (exact.view(torch.int16) + 1).view(torch.bfloat16)
    for amax, factor in ((exact, 1), (above, 2), (-exact, 1), (-above, 2)):
        latent = torch.zeros(len(amax), layout.head_dim_qk, dtype=torch.bfloat16, device=device)
        latent[:, : layout.nope_dim : layout.tile_dim] = amax[:, None]
        nope, scale, _ = written(latent, layout)
        want = factor * 2.0 ** exponents.float()
        assert torch.equal(scale.float(), want[:, None].expand_as(scale))
        assert torch.equal(nope.float()[:, 0].abs(), torch.full_like(want, largest / factor))


@e4m3_tiles
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-30, 1e-7, -1e-9])
def test_small_tiles_have_the_scale_of_the_engines_writers(layout, value, device):
    latent = torch.full((2, layout.head_dim_qk), value, dtype=torch.bfloat16, device=device)
    _, scale, _ = written(latent, layout)
    floor = {"dsv4": 2.0 ** (105 - 127), "dsv4_fnuz": 2.0**-21}.get(layout.name, 2.0**-13)
    assert (scale.float() == floor).all()
    if layout.scale_format == "ue8m0" and layout.fp8_dtype is torch.float8_e4m3fn:
        assert (scale.view(torch.uint8) == {"dsv4": 105, "dsv41": 114}[layout.name]).all()


@e4m3_tiles
def test_scales_are_powers_of_two_that_fit_and_half_of_them_would_not(layout, device):
    """From the data the test kept, in float64."""
    latent = latents(layout, 200, device) * 50
    _, scale, _ = written(latent, layout)
    amax = latent[:, : layout.nope_dim].double().abs().unflatten(-1, (-1, layout.tile_dim)).amax(-1)
    need = (amax.clamp_min(layout.amax_floor) / torch.finfo(layout.fp8_dtype).max).clamp_min(
        layout.scale_floor
    )
    assert (scale.double().frexp().mantissa == 0.5).all()
    assert ((scale.double() >= need) & (scale.double() / 2 < need)).all()


@pytest.mark.parametrize("layout", [x for x in KV_LAYOUTS.values() if not x.extra_only], ids=lambda x: x.name)
def test_nan_and_inf_stay_their_own_elements_affair(layout, device):
    """Every other byte is what it would be with a zero there; NaN stays NaN, infinities saturate."""
    latent = latents(layout, 30, device).contiguous()
    rows = torch.arange(30, device=device)
    nan_at, inf_at, minus_inf_at = 3 + 7 * rows, 4 + 7 * rows, 5 + 7 * rows
    rope_rows = rows[: len(rows) if layout.rope_dim else 0]
    rope_at = layout.nope_dim + rope_rows
    for column in (nan_at, inf_at, minus_inf_at):
        latent[rows, column] = 0
    latent[rope_rows, rope_at] = 0
    clean = [view.float() for view in written(latent, layout)]
    latent[rows, nan_at] = float("nan")
    latent[rows, inf_at] = float("inf")
    latent[rows, minus_inf_at] = -float("inf")
    latent[rope_rows, rope_at] = float("nan")
    nope, scale, rope = (view.float() for view in written(latent, layout))

    assert torch.equal(scale, clean[1])
    assert nope[rows, nan_at].isnan().all() and rope[rope_rows, rope_rows].isnan().all()
    limit = torch.finfo(layout.fp8_dtype).max if layout.fp8_dtype else float("inf")
    assert (nope[rows, inf_at] == limit).all() and (nope[rows, minus_inf_at] == -limit).all()
    for column in (nan_at, inf_at, minus_inf_at):
        nope[rows, column] = 0
    rope[rope_rows, rope_rows] = 0
    assert torch.equal(nope, clean[0]) and torch.equal(rope, clean[2])


@all_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_nan_has_the_bits_of_the_reference(layout, dtype, device):
    """Of either sign, quiet or signalling, alone in a vector or next to its like."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    exponent = torch.tensor(float("inf"), dtype=dtype).view(bits).item()
    sign = torch.iinfo(bits).min
    nans = torch.tensor([exponent + 1, exponent + 3, sign + exponent + 1, -1], dtype=bits)
    latent = latents(layout, 16, device, dtype).contiguous()
    latent[:8] = nans.to(device).view(dtype).repeat(layout.head_dim_qk // 4)
    for row in range(8, 16):
        latent[row, row::37] = nans[row % 4].to(device).view(dtype)
    slots, cache = torch.arange(16, device=device), poisoned_cache(layout, 1, 16, device)
    check_bytes(latent, slots, cache, layout=layout, page_size=16, scale=layer_scale(layout, device))


@pytest.mark.parametrize("name", [x.name for x in KV_LAYOUTS.values() if x.nope_format == "e4m3fnuz"])
def test_fnuz_negative_underflow_is_zero_not_nan(name, device):
    layout = KV_LAYOUTS[name]
    latent = torch.full((3, layout.head_dim_qk), -1e-30, dtype=torch.bfloat16, device=device)
    latent[1] = -0.0
    latent[2, 0] = 200.0  # the rest of its tile underflows
    nope, _, _ = written(latent, layout)
    codes = nope.view(torch.uint8)
    assert (codes[:2] == 0).all() and (codes[2, 1:] == 0).all()


@pytest.mark.parametrize(
    "layout", [x for x in KV_LAYOUTS.values() if x.num_tiles and x.rope_dim], ids=lambda x: x.name
)
def test_rope_is_bit_exact(layout, device):
    latent = torch.zeros(1024, layout.head_dim_qk, dtype=torch.bfloat16, device=device)
    patterns = torch.arange(1024 * layout.rope_dim, device=device).to(torch.int16).view(1024, -1)
    latent[:, layout.nope_dim :].copy_(patterns.view(torch.bfloat16))
    _, _, rope = written(latent, layout)
    assert torch.equal(rope.view(torch.int16), patterns)


@all_layouts
def test_offsets_past_2_to_the_31(layout, device):
    kv_cache = lazy_cache(layout, 64, device)
    latent = latents(layout, 64, device)
    slots = (len(kv_cache) - 1) * 64 + torch.arange(64, device=device)
    kv_cache[-2:] = POISON
    small = poisoned_cache(layout, 1, 64, device)
    options = {"layout": layout, "page_size": 64, "scale": layer_scale(layout, device)}
    mla_fp8.quantize_kv(latent, slots, kv_cache, **options)
    mla_fp8.quantize_kv(latent, slots - slots[0], small, **options)
    assert torch.equal(kv_cache[-1:], small)
    assert (kv_cache[-2] == POISON).all()


@all_layouts
@pytest.mark.parametrize("num_tokens", [3, 400])
def test_the_callers_flush_denormal_mode_changes_nothing(layout, num_tokens):
    latent = torch.randn(num_tokens, layout.head_dim_qk) * torch.logspace(-44, -36, num_tokens)[:, None]
    latent = latent.bfloat16()
    want = [view.view(torch.uint8).clone() for view in written(latent, layout)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        got = written(latent, layout)
        assert torch.tensor([1e-40]) * 1 == 0  # and the caller's mode is still set
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b)


def test_a_cache_without_pages_takes_nothing(device):
    layout = KV_LAYOUTS["dsv4"]
    kv_cache = layout.empty(0, 64, device)
    mla_fp8.quantize_kv(
        latents(layout, 2, device), torch.tensor([0, 5], device=device), kv_cache, layout=layout, page_size=64
    )
