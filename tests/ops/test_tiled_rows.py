"""Rows that hold all 512 elements as e4m3 with scales of tiles, byte by byte, without the layout table."""

import pytest
import torch

import mla_fp8

PAGE_SIZE = 64
TILE = {"dsv41": 32, "dsv32_nope": 128}
LAST_PAGE = 1  # of two, so that pages' offsets count
both_layouts = pytest.mark.parametrize("name", TILE)


def page_of(latent: torch.Tensor, name: str) -> torch.Tensor:
    """The bytes of a page that holds the rows of ``latent`` from row 0 on; 0xA5 where nothing was written."""
    layout = mla_fp8.KV_LAYOUTS[name]
    kv_cache = layout.empty(LAST_PAGE + 1, PAGE_SIZE, latent.device).fill_(0xA5)
    slots = LAST_PAGE * PAGE_SIZE + torch.arange(len(latent), device=latent.device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=name, page_size=PAGE_SIZE)
    assert (kv_cache[:LAST_PAGE] == 0xA5).all()
    return kv_cache[LAST_PAGE].cpu()


def stored(latent: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [T, 512], biased exponents of the scales [T, tiles]) by the offsets of the formats."""
    page, rows = page_of(latent, name), range(len(latent))
    if name == "dsv41":
        codes = [page[512 * r : 512 * r + 512] for r in rows]
        scales = [page[PAGE_SIZE * 512 + 16 * r :][:16] for r in rows]
    else:
        pitch = 512 + 16
        codes = [page[pitch * r :][:512] for r in rows]
        scales = [page[pitch * r + 512 :][:16] for r in rows]
    words = torch.stack(scales)
    if name == "dsv32_nope":
        bits = words.view(torch.int32)
        assert (bits & 0x7FFFFF == 0).all()  # powers of two
        words = bits >> 23
    return torch.stack(codes), words.int()


def exponent_by_bits(amax: torch.Tensor) -> torch.Tensor:
    """SGLang's closed form, without a division: 448 is 1.75 * 2^8, and no scale is below 2^-13."""
    bits = amax.float().view(torch.int32)
    return ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp_min(114)


@both_layouts
def test_every_amax_has_the_scale_of_the_closed_form(name, device):
    """All finite bf16 as the largest element of a tile."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    tiles = 512 // TILE[name]
    amax = torch.nn.functional.pad(amax, (0, -len(amax) % tiles))
    for some in amax.split(PAGE_SIZE * tiles):
        latent = torch.zeros(len(some), TILE[name], dtype=torch.bfloat16)
        latent[:, 5] = some
        _, exponents = stored(latent.view(-1, 512).to(device), name)
        assert torch.equal(exponents.flatten(), exponent_by_bits(some))


@both_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_those_of_a_division_by_the_stored_scale(name, dtype, device):
    latent = torch.randn(PAGE_SIZE, 512) * torch.logspace(-6, 3, PAGE_SIZE)[:, None]
    latent = latent.to(dtype)
    codes, exponents = stored(latent.to(device), name)
    tiles = latent.bfloat16().double().unflatten(1, (-1, TILE[name]))
    assert torch.equal(exponents, exponent_by_bits(tiles.abs().amax(-1).float()))
    exact = (tiles / 2.0 ** (exponents.double() - 127)[..., None]).flatten(1)  # at most 448
    assert torch.equal(codes, exact.float().to(torch.float8_e4m3fn).view(torch.uint8))


@both_layouts
def test_the_bytes_of_one_row_are_frozen(name, device):
    tile = TILE[name]
    latent = torch.zeros(2, 512, device=device)
    latent[1, 0:4] = torch.tensor([448.0, -224.0, -0.0, 2.0**-9])
    latent[1, tile : tile + 4] = torch.tensor([450.0, float("nan"), float("inf"), -float("inf")])
    latent[1, 2 * tile : 2 * tile + 2] = torch.tensor([-float("nan"), 2.0**-13])
    codes, exponents = stored(latent.bfloat16(), name)
    assert (codes[0] == 0).all() and (exponents[0] == 114).all()
    assert exponents[1].tolist() == [127, 128, *[114] * (512 // tile - 2)]
    # 450 is 225 * 2, of which e4m3 keeps 224; NaN has one code, in its place; infinities saturate.
    assert codes[1, :4].tolist() == [0x7E, 0xF6, 0x80, 0x01]
    assert codes[1, tile : tile + 4].tolist() == [0x76, 0x7F, 0x7E, 0xFE]
    assert codes[1, 2 * tile : 2 * tile + 2].tolist() == [0x7F, 0x38]


@both_layouts
def test_nothing_but_the_rows_is_written(name, device):
    page = page_of(torch.ones(3, 512, device=device), name)
    written = torch.zeros(len(page), dtype=torch.bool)
    if name == "dsv41":
        written[: 3 * 512] = True
        written[PAGE_SIZE * 512 : PAGE_SIZE * 512 + 3 * 16] = True
    else:
        written[: 3 * (512 + 16)] = True
    assert (page[~written] == 0xA5).all()
    assert (page[written] != 0xA5).all()


def test_scales_that_are_no_powers_of_two_are_read_as_stored(device):
    """Writers of NoPE rows before vLLM #49435 stored amax / 448 as it is."""
    layout = mla_fp8.KV_LAYOUTS["dsv32_nope"]
    kv_cache = layout.empty(1, 4, device)
    nope, scale, _ = layout.views(kv_cache, 4)
    nope.view(torch.uint8).copy_(torch.arange(4 * 512, device=device).view(1, 4, 512) % 0x7F)
    scale.copy_(torch.rand(1, 4, 4, device=device) + 0.1)
    rows = mla_fp8.dequantize_kv(kv_cache, torch.arange(4, device=device), layout=layout, page_size=4)
    want = nope[0].float() * scale[0].repeat_interleave(128, -1)
    assert torch.equal(rows, want.bfloat16())
