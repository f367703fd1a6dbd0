"""Rows of FP4 with a scale for 16 elements, byte by byte, without the layout table."""

import pytest
import torch

import mla_fp8

NAME = "dsv41_fp4"
PAGE_SIZE, TILE = 64, 16
LAST_PAGE = 1  # of two, so that pages' offsets count
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # finite magnitudes by code
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def page_of(latent: torch.Tensor) -> torch.Tensor:
    """The bytes of a page that holds the rows of ``latent`` from row 0 on; 0xA5 where nothing was written."""
    layout = mla_fp8.KV_LAYOUTS[NAME]
    kv_cache = layout.empty(LAST_PAGE + 1, PAGE_SIZE, latent.device).fill_(0xA5)
    slots = LAST_PAGE * PAGE_SIZE + torch.arange(len(latent), device=latent.device)
    mla_fp8.quantize_kv(latent, slots, kv_cache, layout=NAME, page_size=PAGE_SIZE)
    assert (kv_cache[:LAST_PAGE] == 0xA5).all()
    return kv_cache[LAST_PAGE].cpu()


def stored(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [T, 512], bytes of the scales [T, 32]) by the offsets of the format."""
    page, rows = page_of(latent), len(latent)
    data = page[: 256 * rows].view(rows, 256)
    scales = page[PAGE_SIZE * 256 :][: 32 * rows].view(rows, 32)
    return torch.stack([data & 15, data >> 4], -1).flatten(1).int(), scales.int()


def nearest_even(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest value, of two as near the even one, by comparison with every middle."""
    middles = (values[1:] + values[:-1]) / 2
    below, above = (torch.searchsorted(middles, x.abs(), right=right) for right in (False, True))
    return torch.where(below % 2 == 0, below, above)


def scale_bytes(amax: torch.Tensor) -> torch.Tensor:
    """e4m3 of amax / 6, from the smallest to the largest one: a zero tile has the smallest."""
    return nearest_even((amax.double() / 6).clamp(E4M3[1], E4M3[-1]), E4M3).int()


def test_every_amax_has_the_scale_of_a_division(device):
    """All finite bf16 as the largest element of a tile: no reciprocal and no floor shows."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    amax = torch.nn.functional.pad(amax, (0, -len(amax) % 32))
    for some in amax.split(PAGE_SIZE * 32):
        latent = torch.zeros(len(some), TILE, dtype=torch.bfloat16)
        latent[:, 5] = -some
        _, scales = stored(latent.view(-1, 512).to(device))
        assert torch.equal(scales.flatten(), scale_bytes(some))


@dtypes
def test_codes_are_those_of_a_division_by_the_stored_scale(dtype, device):
    latent = (torch.randn(PAGE_SIZE, 512) * torch.logspace(-6, 3, PAGE_SIZE)[:, None]).to(dtype)
    codes, scales = stored(latent.to(device))
    tiles = latent.bfloat16().double().unflatten(1, (-1, TILE))
    assert torch.equal(scales, scale_bytes(tiles.abs().amax(-1)))
    quotients = (tiles / E4M3[scales.long()][..., None]).flatten(1)
    want = nearest_even(quotients.clamp(-6, 6), VALUES) + 8 * quotients.signbit()
    assert torch.equal(codes, want.int())


def test_every_quotient_is_rounded_as_a_division_rounds_it(device):
    """Every mantissa of a bf16 under every scale, next to what fixes the scale, and ties: a product with the
    reciprocal lands on the other side of some."""
    amax = 6 * E4M3[1:]
    amax = amax[scale_bytes(amax) == torch.arange(1, 0x7F)]  # all: 6 s is a bf16
    assert len(amax) == 0x7E
    x = torch.arange(128, 256).double() * 2.0**-7  # [1, 2)
    for exponent in (-2, -1, 0, 1, 2):
        tiles = (amax / 6)[:, None] * 2.0**exponent * x  # not all bf16: rounded first
        tiles = tiles.bfloat16().double().clamp(max=amax[:, None]).view(len(amax), -1, TILE)
        tiles[:, :, 0] = amax[:, None]
        latent = torch.nn.functional.pad(tiles.flatten(), (0, -tiles.numel() % 512)).view(-1, 512)
        for some in latent.split(PAGE_SIZE):
            codes, scales = stored(some.bfloat16().to(device))
            quotients = some.view(len(some), -1, TILE) / E4M3[scales.long()][..., None]
            assert torch.equal(codes, nearest_even(quotients.flatten(1), VALUES).int())


def test_the_bytes_of_one_row_are_frozen(device):
    latent = torch.zeros(2, 512)
    latent[1, :16] = torch.stack([VALUES, -VALUES], -1).flatten()
    latent[1, 16:24] = torch.tensor([6.0, *MIDDLES])
    latent[1, 32:36] = torch.tensor(
        [6 * 1.0625, -6 * 1.0625, 1.0, -0.0]
    )  # 1.0625 is a tie: 1, and 6.375 saturates
    latent[1, 48:52] = torch.tensor([float("inf"), -float("inf"), 6.0, 3.0])
    latent[1, 64:66] = torch.tensor([1.0, float("nan")])
    latent[1, 80:82] = torch.tensor([1e6, -1e6])  # beyond 6 * 448
    latent[1, 96:98] = torch.tensor([-1e-10, 2.0**-10])  # below the smallest scale: 1/2 of it is the code 1
    page = page_of(latent.bfloat16().to(device))
    first, second = page[: PAGE_SIZE * 256].view(-1, 256)[:2]
    zero_scales, scales = page[PAGE_SIZE * 256 :].view(-1, 32)[:2].tolist()
    assert (first == 0).all() and zero_scales == [0x01] * 32
    assert scales == [0x38, 0x38, 0x38, 0x38, 0x7F, 0x7E, *[0x01] * 26]
    assert second[:8].tolist() == [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]
    assert second[8:12].tolist() == [0x07, 0x22, 0x44, 0x66]  # ties to the even codes
    assert second[16:18].tolist() == [0xF7, 0x82]
    assert second[24:26].tolist() == [0xF7, 0x57]
    assert (second[32:40] == 0).all()
    assert second[40].item() == 0xF7 and second[48].item() == 0x18
    assert (second[49:] == 0).all()


def test_a_nan_takes_its_tile_and_an_infinity_itself(device):
    latent = torch.randn(PAGE_SIZE, 512).bfloat16()
    rows = torch.arange(PAGE_SIZE)
    nan_at, inf_at = (7 * rows) % 512, (7 * rows + 64) % 512
    latent[rows, nan_at] = 0
    latent[rows, inf_at] = 0
    codes, scales = stored(latent.to(device))
    hostile = latent.clone()
    hostile[rows, nan_at] = float("nan")
    hostile[rows[::2], nan_at[::2]] = -float("nan")
    hostile[rows, inf_at] = (float("inf") * (1 - 2 * (rows % 2))).bfloat16()
    scales[rows, nan_at // TILE] = 0x7F
    codes.view(-1, 32, TILE)[rows, nan_at // TILE] = 0
    codes[rows, inf_at] = (7 + 8 * (rows % 2)).int()
    got_codes, got_scales = stored(hostile.to(device))
    assert torch.equal(got_scales, scales) and torch.equal(got_codes, codes)


def test_nothing_but_the_rows_is_written(device):
    page = page_of(torch.ones(3, 512, device=device))
    written = torch.zeros(len(page), dtype=torch.bool)
    written[: 3 * 256] = True
    written[PAGE_SIZE * 256 : PAGE_SIZE * 256 + 3 * 32] = True
    assert (page[~written] == 0xA5).all() and (page[written] != 0xA5).all()


def test_every_code_under_every_scale_is_their_product(device):
    """Of any writer's bytes: each code in each half of a byte, each of the 256 scales."""
    kv_cache = mla_fp8.KV_LAYOUTS[NAME].empty(1, 8, device)
    data = torch.arange(8 * 256, dtype=torch.int32).mul(37).to(torch.uint8).view(8, 256)
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(8, 32)
    kv_cache[0, : 8 * 256], kv_cache[0, 8 * 256 :] = data.flatten().to(device), scales.flatten().to(device)
    rows = mla_fp8.dequantize_kv(kv_cache, torch.arange(8, device=device), layout=NAME, page_size=8).cpu()
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).long()
    assert all(set(tile.tolist()) == set(range(16)) for tile in codes.view(-1, 32 * TILE))
    products = torch.cat([VALUES, -VALUES])[codes].view(8, 32, TILE)
    products = (products * scales.view(torch.float8_e4m3fn).double()[..., None]).flatten(1)
    nan = products.isnan()
    assert nan.sum() == 2 * TILE and (rows.view(torch.int16)[nan] == 0x7FFF).all()
    assert torch.equal(rows.double()[~nan], products[~nan])  # exact in bf16
    assert torch.equal(rows.signbit()[~nan], products.signbit()[~nan])
