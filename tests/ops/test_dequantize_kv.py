import pytest
import torch
from kv_cache_cases import (
    INT32,
    all_layouts,
    assert_same_values,
    distinct_slots,
    latents,
    layer_scale,
    lazy_cache,
    page_sizes,
    poisoned_cache,
    tiled_layouts,
)

import mla_fp8
from mla_fp8 import KV_LAYOUTS, reference

NUM_PAGES = 7


def random_cache(layout, page_size, device, gap=0):
    """Random bytes: every code, NaN too, under scales of every kind."""
    kv_cache = poisoned_cache(layout, NUM_PAGES, page_size, device, gap)
    kv_cache.copy_(torch.randint(0, 256, kv_cache.shape, dtype=torch.uint8, device=device))
    return kv_cache


def options(layout, page_size, device):
    return {"layout": layout, "page_size": page_size, "scale": layer_scale(layout, device)}


def exact_latents(layout, num_tokens, device):
    """Latents that the layout holds without loss: codes times a power of two, the largest in each tile."""
    if layout.nope_format == "e2m1":
        codes = torch.tensor([*reference.E2M1, *(-x for x in reference.E2M1)], device=device)
        tiles = codes[torch.randint(16, (num_tokens, layout.num_tiles, layout.tile_dim), device=device)]
        tiles[..., 0] = reference.E2M1[-1]
        scales = torch.randint(1, 0x7F, (num_tokens, layout.num_tiles, 1), device=device)
        return (tiles * scales.to(torch.uint8).view(torch.float8_e4m3fn).float()).flatten(1).bfloat16()
    if layout.fp8_dtype is None:
        return latents(layout, num_tokens, device)
    finite = torch.arange(256, dtype=torch.uint8, device=device).view(layout.fp8_dtype).float()
    finite = finite[finite.isfinite()]
    values = finite[torch.randint(len(finite), (num_tokens, layout.head_dim_qk), device=device)]
    if layout.num_tiles:
        values[:, : layout.nope_dim : layout.tile_dim] = finite.max()
        tiles = values[:, : layout.nope_dim].unflatten(-1, (layout.num_tiles, -1))
        tiles *= 2.0 ** torch.randint(-8, 100, tiles.shape[:2], device=device)[..., None]
    return values.bfloat16()


@all_layouts
@page_sizes
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_values_match_the_reference(layout, page_size, slot_dtype, device):
    kv_cache, kwargs = random_cache(layout, page_size, device, gap=32), options(layout, page_size, device)
    for n in (0, 1, 50, 300):
        slots = torch.randint(-2, NUM_PAGES * page_size + 2, (n,), dtype=slot_dtype, device=device)
        got = mla_fp8.dequantize_kv(kv_cache, slots, **kwargs)
        assert_same_values(got, reference.dequantize_kv(kv_cache, slots, **kwargs))


@all_layouts
def test_representable_latents_come_back_exactly(layout, device):
    """From the data the test kept: quantise, gather in another order, compare with what went in."""
    latent = exact_latents(layout, 200, device)
    slots = torch.randperm(NUM_PAGES * 61, device=device)[:200]
    kv_cache = poisoned_cache(layout, NUM_PAGES, 61, device, gap=16)
    scale = layer_scale(layout, device, value=1.0)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=layout, page_size=61, scale=scale)
    order = torch.randperm(200, device=device)
    out = mla_fp8.dequantize_kv(kv_cache, slots[order], layout=layout, page_size=61, scale=scale)
    assert torch.equal(out, latent[order])


@all_layouts
def test_any_latent_comes_back_within_the_formats_error(layout, device):
    """e4m3 keeps 4 significant bits: half an ulp is 2^-4 of the value, or half the smallest code's worth."""
    latent = latents(layout, 200, device).clamp(-80, 80)
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device)
    slots = torch.randperm(NUM_PAGES * 64, device=device)[:200]
    kwargs = options(layout, 64, device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, **kwargs)
    out = mla_fp8.dequantize_kv(kv_cache, slots, **kwargs)
    if layout.nope_format == "e2m1":  # half the gap below 6, or what saturates as the scale was rounded down
        amax = latent.float().abs().unflatten(-1, (-1, layout.tile_dim)).amax(-1)
        bound = (amax / 5.6 + 6 * layout.scale_floor / 2).repeat_interleave(layout.tile_dim, -1)
        assert ((out.float() - latent.float()).abs() <= bound).all()
        return
    if layout.fp8_dtype is None:
        assert torch.equal(out, latent)
        return
    quantum = torch.arange(2, dtype=torch.uint8).view(layout.fp8_dtype).double()[1].item()
    nope, kept = (x.double()[:, : layout.nope_dim] for x in (out, latent))
    scale = torch.tensor(kwargs["scale"].item() if layout.needs_scale else 1.0, device=device)
    if layout.num_tiles:
        amax = kept.abs().unflatten(-1, (layout.num_tiles, -1)).amax(-1).clamp_min(1e-4)
        top = torch.finfo(layout.fp8_dtype).max
        scale = (2 * (amax / top).clamp_min(layout.scale_floor)).repeat_interleave(layout.tile_dim, -1)
    bound = torch.maximum(kept.abs() * 2.0**-4, scale * quantum / 2) + kept.abs() * 2.0**-8
    assert ((nope - kept).abs() <= bound).all()
    if layout.rope_format == "bf16":
        assert torch.equal(out[:, layout.nope_dim :], latent[:, layout.nope_dim :])


@pytest.mark.parametrize("name", ["dsv4", "dsv4_fnuz", "dsv41"])
@pytest.mark.parametrize("byte", [0, 1, 127, 254, 255])
def test_every_scale_byte_means_its_power_of_two(name, byte, device):
    """0 is 2^-127, a subnormal that stays exact; 255 makes NaN even of zeros."""
    layout = KV_LAYOUTS[name]
    kv_cache = poisoned_cache(layout, 1, 2, device)
    nope, scale, _ = layout.views(kv_cache, 2)
    codes = torch.arange(2 * layout.nope_dim, device=device).to(torch.uint8).view(1, 2, -1)
    nope.view(torch.uint8).copy_(codes)
    scale.view(torch.uint8).fill_(byte)
    got = mla_fp8.dequantize_kv(kv_cache, torch.arange(2, device=device), layout=layout, page_size=2)
    exact = codes.cpu().view(layout.fp8_dtype).double()[0] * (
        2.0 ** (byte - 127) if byte < 255 else float("nan")
    )
    assert_same_values(got[:, : layout.nope_dim].cpu(), exact.float().bfloat16())
    assert got[:, : layout.nope_dim].isnan().all() == (byte == 255)


@all_layouts
def test_no_slot_reads_another_slot(layout, device):
    kv_cache = poisoned_cache(layout, NUM_PAGES, 64, device).fill_(0xFF)  # NaN in every format
    num_slots = NUM_PAGES * 64
    hostile = [-1, num_slots, INT32.min, INT32.max, -num_slots, num_slots + 63, 1 << 30]
    hostile64 = [1 << 32, -(1 << 32), (1 << 63) - 1, -(1 << 63), (1 << 58) + 1]
    for dtype, values in ((torch.int32, hostile), (torch.int64, hostile + hostile64)):
        slots = torch.tensor(values, dtype=dtype, device=device)
        assert (mla_fp8.dequantize_kv(kv_cache, slots, **options(layout, 64, device)) == 0).all()


@all_layouts
def test_a_slot_says_nothing_about_its_neighbours(layout, device):
    """NaN in every other slot, in the padding and in slot 0 stays there."""
    kv_cache = poisoned_cache(layout, NUM_PAGES, 61, device, gap=64).fill_(0xFF)
    latent, slots = (
        exact_latents(layout, 40, device),
        1 + torch.randperm(NUM_PAGES * 61 - 1, device=device)[:40],
    )
    kwargs = options(layout, 61, device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, **kwargs)
    assert mla_fp8.dequantize_kv(kv_cache, slots, **kwargs).isfinite().all()


@all_layouts
def test_out_may_be_a_slice_of_a_workspace(layout, device):
    kv_cache, slots = random_cache(layout, 64, device), distinct_slots(33, NUM_PAGES * 64, device)
    workspace = torch.full((40, layout.head_dim_qk + 128), float("nan"), dtype=torch.bfloat16, device=device)
    workspace.view(torch.int16).fill_(0x5AA5)
    out = workspace[3:36, 64:-64]
    kwargs = options(layout, 64, device)
    assert mla_fp8.dequantize_kv(kv_cache, slots, out=out, **kwargs) is out
    assert_same_values(out, mla_fp8.dequantize_kv(kv_cache, slots, **kwargs))
    out.view(torch.int16).fill_(0x5AA5)
    assert (workspace.view(torch.int16) == 0x5AA5).all()


@all_layouts
@pytest.mark.parametrize("as_numbers", [False, True])
def test_the_cache_may_be_typed_and_in_flash_mla_view(layout, as_numbers, device):
    dtype = torch.int8
    if as_numbers:
        dtype = layout.fp8_dtype or (torch.bfloat16 if layout.rope_dim else torch.float4_e2m1fn_x2)
    kv_cache, slots = random_cache(layout, 64, device, gap=64), distinct_slots(33, NUM_PAGES * 64, device)
    kwargs = options(layout, 64, device)
    want = mla_fp8.dequantize_kv(kv_cache, slots, **kwargs)
    four_d = layout.flash_mla_view(kv_cache, 64)
    for view in (kv_cache.view(dtype), four_d.view(dtype), four_d.view(dtype)[:, :, 0]):
        assert_same_values(mla_fp8.dequantize_kv(view, slots, **kwargs), want)


@all_layouts
def test_offsets_past_2_to_the_31(layout, device):
    kv_cache = lazy_cache(layout, 64, device)
    latent, kwargs = latents(layout, 64, device), options(layout, 64, device)
    small = poisoned_cache(layout, 1, 64, device)
    rows = torch.arange(64, device=device)
    mla_fp8.quantize_kv(latent, rows, small, **kwargs)
    kv_cache[-1] = small[0]
    last = (len(kv_cache) - 1) * 64
    want = mla_fp8.dequantize_kv(small, rows, **kwargs)
    assert torch.equal(mla_fp8.dequantize_kv(kv_cache, last + rows, **kwargs), want)

    numbers = {"dtype": torch.int32, "device": device}
    page_table = torch.tensor([[len(kv_cache) - 1]], **numbers)
    lens, offsets = torch.tensor([64], **numbers), torch.tensor([0], **numbers)
    paged = mla_fp8.dequantize_kv_paged(kv_cache, page_table, lens, lens, offsets, num_rows=64, **kwargs)
    assert torch.equal(paged, want)


@tiled_layouts
@pytest.mark.parametrize("num_rows", [3, 400])
def test_the_callers_flush_denormal_mode_changes_nothing(layout, num_rows):
    kv_cache = random_cache(layout, 64, "cpu")
    layout.views(kv_cache, 64)[1].view(torch.uint8)[::2] = 0  # scales of 2^-127, or zero
    slots = torch.arange(num_rows)
    want = mla_fp8.dequantize_kv(kv_cache, slots, layout=layout, page_size=64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        got = mla_fp8.dequantize_kv(kv_cache, slots, layout=layout, page_size=64)
        assert torch.tensor([1e-40]) * 1 == 0  # and the caller's mode is still set
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_a_cache_without_pages_gives_zeros(device):
    layout = KV_LAYOUTS["dsv4"]
    slots = torch.tensor([0, -1, 7], device=device)
    out = mla_fp8.dequantize_kv(layout.empty(0, 64, device), slots, layout=layout, page_size=64)
    assert out.shape == (3, layout.head_dim_qk) and (out == 0).all()


@all_layouts
def test_results_repeat_and_do_not_depend_on_the_other_rows(layout, device):
    kv_cache, slots = random_cache(layout, 64, device), distinct_slots(300, NUM_PAGES * 64, device)
    kwargs, before = options(layout, 64, device), kv_cache.clone()
    together = mla_fp8.dequantize_kv(kv_cache, slots, **kwargs).view(torch.int16)
    alone = torch.cat([mla_fp8.dequantize_kv(kv_cache, slots[i : i + 1], **kwargs) for i in range(0, 300, 7)])
    assert torch.equal(together[::7], alone.view(torch.int16))
    assert torch.equal(kv_cache, before)
