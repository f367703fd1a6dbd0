"""quantize_index_k writes exactly the bytes of the specification, and no others."""

import pytest
import torch
from error_cases import check_refused
from index_cases import POISON

import mla_fp8
from mla_fp8 import INDEX_LAYOUTS
from mla_fp8 import index_reference as reference

pytestmark = pytest.mark.op("quantize_index_k")

OPTIONS = {
    "index_fp8 ue8m0": ("index_fp8", {}),
    "index_fp8 floor": ("index_fp8", {"amax_floor": 0.5}),
    "index_fp8 f32": ("index_fp8", {"scale_format": "f32"}),
    "index_fp8 reciprocal": ("index_fp8", {"scale_format": "f32", "reciprocal": True}),
    "index_fp8 hadamard": ("index_fp8", {"hadamard": True}),
    "index_fp4": ("index_fp4", {}),
    "index_fp4 floor": ("index_fp4", {"amax_floor": 1e-4}),
    "index_fp4 hadamard": ("index_fp4", {"hadamard": True}),
}
every_option = pytest.mark.parametrize("layout, options", OPTIONS.values(), ids=OPTIONS)


def written(
    k, slots, device, layout, page_size, num_pages, function=mla_fp8.quantize_index_k, gap=0, **options
):
    """A poisoned cache after the write."""
    layout = INDEX_LAYOUTS[layout]
    size = layout.page_bytes(page_size)
    whole = torch.full((num_pages, size + gap), POISON, dtype=torch.uint8, device=device)
    function(k, slots, whole[:, :size], layout=layout, page_size=page_size, **options)
    return whole.cpu()


def check(k, slots, device, layout, page_size=64, num_pages=9, gap=0, **options):
    place = (layout, page_size, num_pages)
    got = written(k.to(device), slots.to(device), device, *place, gap=gap, **options)
    want = written(k, slots.long(), "cpu", *place, reference.quantize_index_k, gap, **options)
    assert torch.equal(got, want)


@every_option
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_are_those_of_the_specification(layout, options, dtype, device):
    rows = torch.randn(500, 128) * torch.logspace(-6 if dtype is torch.float16 else -42, 4, 500)[:, None]
    slots = torch.randperm(9 * 64)[:500]
    slots[::17] = torch.tensor([-1, 9 * 64, -(1 << 62), (1 << 62)])[torch.arange(len(slots[::17])) % 4]
    check(rows.to(dtype), slots, device, layout, **options)


@every_option
def test_zero_rows_nan_and_infinities(layout, options, device):
    k = torch.randn(40, 128)
    k[0], k[1] = 0.0, -0.0
    k[2, 5], k[3, 40], k[4, 0], k[5] = float("nan"), float("inf"), -float("inf"), float("nan")
    k[6], k[7, ::2] = float("inf"), -float("nan")
    k[8], k[9] = 3.3e38, 2.0**-133
    if "hadamard" in options:
        k[8] = 1.0
    check(k.bfloat16(), torch.arange(40), device, layout, **options)


@every_option
def test_every_bf16(layout, options, device):
    """Each magnitude beside neighbours of every other size."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if "hadamard" in options:  # sums of huge numbers overflow; their order is the specification's affair
        bits = bits.where(bits.abs() < 1e30, 1.0)
    k = bits.view(512, 128)
    check(
        torch.cat([k, k.t().reshape(512, 128)]), torch.arange(1024), device, layout, num_pages=16, **options
    )


@pytest.mark.parametrize("layout, largest", [("index_fp8", 448.0), ("index_fp4", 6.0)])
def test_amax_on_a_power_of_two_and_beside_it(layout, largest, device):
    powers = largest * 2.0 ** torch.arange(-10, 20)
    near = torch.cat([powers, powers * (1 + 2.0**-7), powers * (1 - 2.0**-8)])
    k = torch.rand(len(near), 128) * near[:, None]
    k[:, ::32] = near[:, None]
    check(k.bfloat16(), torch.arange(len(near)), device, layout)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_pages_of_any_size_and_gap(layout, page_size, device):
    n = 7 * page_size
    check(torch.randn(n, 128), torch.randperm(n).int(), device, layout, page_size, 7, gap=16)


def test_strided_keys_and_padding_rows(device):
    wide = torch.randn(50, 256).bfloat16()
    check(wide[:, 64:192], torch.arange(30), device, "index_fp8")


def test_the_engines_view_is_the_same_memory(device):
    layout, k = INDEX_LAYOUTS["index_fp8"], torch.randn(128, 128, device=device)
    flat, slots = layout.empty(2, 64, device).zero_(), torch.arange(128, device=device)
    engines = flat.clone().view(2, 64, 1, layout.bytes_per_entry)
    for cache in (flat, engines.view(torch.float8_e4m3fn)):
        mla_fp8.quantize_index_k(k, slots, cache, layout=layout, page_size=64)
    assert torch.equal(flat, engines.view(2, -1))


def test_hadamard_keeps_products(device):
    """An orthogonal rotation: q . k stays, up to the rounding to bf16."""
    x = torch.randn(64, 128)
    rotated = reference.rotate(x.bfloat16().float())
    torch.testing.assert_close(rotated @ rotated.T, x @ x.T, atol=0.5, rtol=0.02)


def test_the_expansion_of_fp4_for_every_code_and_exponent():
    """Byte = nearest e4m3 of e2m1 * 2^(E - R), R the largest exponent less 6; scale 2^(R - 127)."""
    packed = torch.arange(16, dtype=torch.uint8).repeat(8)
    row = (packed[::2] | packed[1::2] << 4).repeat(256, 1)
    exponents = torch.stack([torch.full((256,), 200), *[torch.arange(256)] * 3], 1).to(torch.uint8)
    values, scale = reference.expand_e2m1(row, exponents)
    number = torch.tensor(reference.E2M1, dtype=torch.double)[packed.long() & 7]
    number = (number * (1 - 2.0 * (packed >> 3).double())).view(4, 32)
    exact = number * 2.0 ** (exponents.double()[:, :, None] - 127)
    got = values.double().view(256, 4, 32) * scale.double()[:, None, None]
    near = exponents.long() >= exponents.long().amax(1, keepdim=True) - 14  # exact within 2^14
    assert torch.equal(got[:255][near[:255]], exact[:255][near[:255]])
    assert scale[255].isnan() and torch.isfinite(scale[:255]).all()
    step = scale.double()[:, None, None] * 2.0**-9
    assert ((got - exact).abs()[:255] <= step[:255] / 2).all()


def with_slots(**changes):
    layout = INDEX_LAYOUTS[changes.pop("layout", "index_fp8")]
    given = {
        "k": torch.zeros(4, 128, dtype=torch.bfloat16), "slot_mapping": torch.arange(4),
        "index_cache": layout.empty(2, 64, "cpu"), "layout": layout, "page_size": 64,
    }  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"k": torch.zeros(4, 64)}, "k must have shape [*, 128], got [4, 64]"),
        ({"k": torch.zeros(4, 128).double()},
         "k must have dtype torch.bfloat16 or torch.float16 or torch.float32, got torch.float64"),
        ({"k": torch.zeros(2, 128)}, "slot_mapping must have at most 2 entries (the rows of k), got 4"),
        ({"k": torch.zeros(4, 130)[:, 1:129]}, "k must be 16-byte aligned"),
        ({"slot_mapping": torch.zeros(4)},
         "slot_mapping must have dtype torch.int64 or torch.int32, got torch.float32"),
        ({"page_size": 32}, "index_cache must have shape [*, 4224], got [2, 8448]"),
        ({"page_size": 0}, "page_size must be in [1, 16777216], got 0"),
        ({"index_cache": torch.zeros(2, 8448)},
         "index_cache must have dtype torch.uint8 or torch.int8 or torch.float8_e4m3fn for layout index_fp8, "
         "got torch.float32"),
        ({"scale_format": "fp32"}, "scale_format must be ue8m0 or f32, got fp32"),
        ({"scale_format": "f32", "layout": "index_fp4"},
         "scale_format must be ue8m0 for layout index_fp4, got f32"),
        ({"reciprocal": True}, "reciprocal must be False unless scale_format is f32, got True"),
        ({"amax_floor": 0.0}, "amax_floor must be in ["),
        ({"amax_floor": float("nan")}, "amax_floor must be in ["),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_is_written(changes, message):
    check_refused(mla_fp8.quantize_index_k, with_slots(**changes), f"mla_fp8.quantize_index_k: {message}")
