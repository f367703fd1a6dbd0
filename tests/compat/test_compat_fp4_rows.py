"""FP4 rows of other packages become rows of ours: their bytes are laid out here by hand."""

import pytest
import torch

import mla_fp8
from mla_fp8 import KV_LAYOUTS
from mla_fp8.compat.fp4_rows import FP4_ROWS, convert_kv

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([VALUES, -VALUES])
PAGES, PAGE_SIZE = 5, 16
every_format = pytest.mark.parametrize("src_rows", ["flashinfer_nvfp4_384", "sglang_mxfp4_368"])


def written(src_rows: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(a cache of random rows, what they are as float32): every slot, byte by byte."""
    codes = torch.randint(16, (PAGES, PAGE_SIZE, 448))
    data = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    rope = torch.randn(PAGES, PAGE_SIZE, 64).bfloat16()
    rope_bytes = rope.view(torch.uint8)
    if src_rows == "flashinfer_nvfp4_384":
        scales = torch.randint(0, 0x7F, (PAGES, PAGE_SIZE, 28)).to(torch.uint8)
        number = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
        tail = torch.nn.functional.pad(scales, (0, 4))
        page = torch.cat([torch.cat([data, rope_bytes], -1).flatten(1), tail.flatten(1)], 1)
        page = torch.nn.functional.pad(page, (0, 48), value=0xA5)  # pages may be longer
    else:
        scales = torch.randint(120, 135, (PAGES, PAGE_SIZE, 14)).to(torch.uint8)
        number = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
        unwritten = torch.full((PAGES, PAGE_SIZE, 2), 0xA5, dtype=torch.uint8)
        page = torch.cat([data, scales, unwritten, rope_bytes], -1).flatten(1)
    rows = torch.cat([VALUES[codes] * number, rope.float()], -1).flatten(0, 1)
    return page.to(device), rows


def run(src: torch.Tensor, rows: str, layout: str, src_slots, slot_mapping, dst=None, **changes):
    dst = KV_LAYOUTS[layout].empty(4, 64, src.device).fill_(0xA5) if dst is None else dst
    options = {"src_rows": rows, "layout": layout, "src_page_size": PAGE_SIZE, "page_size": 64}
    scale = torch.tensor([0.5], device=src.device) if KV_LAYOUTS[layout].needs_scale else None
    slots = {"src_slots": src_slots.to(src.device), "slot_mapping": slot_mapping.to(src.device)}
    convert_kv(src, dst, **(options | slots | {"scale": scale} | changes))
    return dst


@every_format
@pytest.mark.parametrize("layout", ["dsv4", "dsv41", "dsv41_fp4", "bf16_512", "fp8_e4m3_512"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_bytes_are_those_of_the_rows_quantised(src_rows, layout, dtype, device):
    src, rows = written(src_rows, device)
    assert torch.equal(rows, rows.bfloat16().float())  # every value is exact in bf16
    src_slots = torch.randperm(len(rows))[:70].to(dtype)
    slot_mapping = torch.randperm(256)[:70].to(dtype)
    src_slots[[3, 17, 30]] = torch.tensor([-1, len(rows), -(2**31)], dtype=dtype)
    slot_mapping[[5, 6]] = torch.tensor([-1, 256], dtype=dtype)
    got = run(src, src_rows, layout, src_slots, slot_mapping)
    real = (src_slots >= 0) & (src_slots < len(rows))
    want = torch.full_like(got, 0xA5)
    scale = torch.tensor([0.5], device=device) if KV_LAYOUTS[layout].needs_scale else None
    mla_fp8.quantize_kv(
        rows[src_slots[real].long()].bfloat16().to(device), slot_mapping[real].to(device), want,
        layout=layout, page_size=64, scale=scale,
    )  # fmt: skip
    assert torch.equal(got, want)


@every_format
def test_rows_survive_in_bf16_and_bf16_rope_in_dsv4(src_rows, device):
    src, rows = written(src_rows, device)
    slots = torch.arange(len(rows))
    for layout, first in (("bf16_512", 0), ("dsv4", 448)):
        cache = run(src, src_rows, layout, slots, slots)
        got = mla_fp8.dequantize_kv(cache, slots.to(device), layout=layout, page_size=64).cpu().float()
        assert torch.equal(got[:, first:], rows[:, first:])


@every_format
def test_a_nan_scale_is_the_affair_of_its_tile(src_rows, device):
    src, rows = written(src_rows, device)
    flashinfer = src_rows == "flashinfer_nvfp4_384"
    at = PAGE_SIZE * 352 + 2 * 32 + 3 if flashinfer else 2 * 368 + 224 + 3  # row 2, tile 3
    src[1, at] = 0x7F if flashinfer else 0xFF
    tile = 16 if flashinfer else 32
    slots = torch.arange(len(rows))
    cache = run(src, src_rows, "bf16_512", slots, slots)
    got = mla_fp8.dequantize_kv(cache, slots.to(device), layout="bf16_512", page_size=64).cpu().float()
    nan = torch.zeros_like(got, dtype=torch.bool)
    nan[PAGE_SIZE + 2, 3 * tile : 4 * tile] = True
    assert torch.equal(got.isnan(), nan) and torch.equal(got[~nan], rows[~nan])


@every_format
def test_many_rows_go_in_parts(src_rows, monkeypatch, device):
    src, rows = written(src_rows, device)
    slots = torch.arange(len(rows))
    want = run(src, src_rows, "dsv41_fp4", slots, slots)
    monkeypatch.setattr("mla_fp8.compat.fp4_rows.ROWS_AT_ONCE", 7)
    assert torch.equal(run(src, src_rows, "dsv41_fp4", slots, slots), want)
    none = torch.zeros(0, dtype=torch.int64)
    assert (run(src, src_rows, "dsv41_fp4", none, none) == 0xA5).all()


def test_the_bytes_of_a_row_are_in_the_name():
    for name, rows in FP4_ROWS.items():
        assert name.endswith(f"_{rows.bytes_per_token}")


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("src_rows", "nvfp4", "src_rows must be one of flashinfer_nvfp4_384, sglang_mxfp4_368, got 'nvfp4'"),
        ("layout", "dsv32", "layout must be one of 512 dims, got dsv32"),
        ("src_page_size", 0, "src_page_size must be positive, got 0"),
        ("src_page_size", 17, "src must be pages of at least 6528 bytes, got 6192"),
        ("src_slots", torch.zeros(4), "src_slots must be 1-d int32 or int64, got 1-d torch.float32"),
        ("slot_mapping", torch.zeros(2, 2).int(), "slot_mapping must be 1-d int32 or int64, got 2-d"),
        ("slot_mapping", torch.zeros(5).int(), "slot_mapping must be of 4 slots, got 5"),
    ],
)
def test_bad_input_is_refused(name, value, message):
    src, _ = written("flashinfer_nvfp4_384", "cpu")
    dst = KV_LAYOUTS["dsv4"].empty(4, 64, "cpu").fill_(0xA5)
    given = {"src_slots": torch.arange(4), "slot_mapping": torch.arange(4), "layout": "dsv4"} | {name: value}
    slots = given.pop("src_slots"), given.pop("slot_mapping")
    with pytest.raises(ValueError, match=f"convert_kv: {message}"):
        run(src, "flashinfer_nvfp4_384", given.pop("layout"), *slots, dst=dst, **given)
    assert (dst == 0xA5).all()
