"""common/fp8.h, common/dtype.h and hip/e4m3.h against arithmetic done from the formats' definitions."""

from fractions import Fraction
from typing import NamedTuple

import _mla_fp8_core as core
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

CODES = np.arange(256, dtype=np.uint8)
BF16_FINITE = np.arange(0x7F80, dtype=np.uint16)  # every finite magnitude


class Fp8(NamedTuple):
    codec: object
    bias: int
    largest: float
    nans: tuple[int, ...]

    def value(self, code: int) -> float:
        """What the format's definition says the code is worth."""
        if code in self.nans:
            return np.nan
        exponent, mantissa = (code >> 3) & 15, code & 7
        magnitude = (
            mantissa / 8 * 2.0 ** (1 - self.bias)
            if exponent == 0
            else (1 + mantissa / 8) * 2.0 ** (exponent - self.bias)
        )
        return -magnitude if code & 0x80 else magnitude

    def magnitudes(self) -> np.ndarray:
        """Value of each non-negative finite code, ascending."""
        return np.array([self.value(c) for c in range(128) if c not in self.nans])

    def encode(self, x: np.ndarray, limit: float) -> np.ndarray:
        """Nearest code by trying every one of them in float64, ties to the even code."""
        x = x.astype(np.float64)
        distance = np.abs(np.minimum(np.abs(x), limit)[:, None] - self.magnitudes())
        nearest = distance == distance.min(axis=1, keepdims=True)
        even = np.where(np.arange(distance.shape[1]) % 2 == 0, nearest, False)
        code = np.where(nearest.sum(1) > 1, even.argmax(1), nearest.argmax(1)).astype(np.uint8)
        negative = np.signbit(x) & ((code != 0) | (self.bias == 7))  # fnuz has no -0
        return code | np.where(negative, 0x80, 0).astype(np.uint8)


FORMATS = {
    "e4m3fn": Fp8(core.e4m3fn, 7, 448.0, (0x7F, 0xFF)),
    "e4m3fnuz": Fp8(core.e4m3fnuz, 8, 240.0, (0x80,)),
    "hip_e4m3fn": Fp8(core.hip_e4m3fn, 7, 448.0, (0x7F, 0xFF)),
    "hip_e4m3fnuz": Fp8(core.hip_e4m3fnuz, 8, 240.0, (0x80,)),
}
both_formats = pytest.mark.parametrize("fp8", FORMATS.values(), ids=FORMATS)
floats = st.floats(width=32, allow_nan=False)


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def around(x: np.ndarray) -> np.ndarray:
    """x, its float32 neighbours, and their negatives."""
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        three = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return np.concatenate([three, -three])


@both_formats
def test_every_code_decodes_to_its_definition(fp8):
    want = np.array([fp8.value(int(c)) for c in CODES], np.float32)
    got = fp8.codec.decode(CODES)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(bits(got)[finite], bits(want)[finite])
    assert fp8.codec.max == fp8.largest == np.nanmax(want)


@both_formats
def test_every_code_survives_a_round_trip(fp8):
    codes = np.array([c for c in CODES if int(c) not in fp8.nans])
    np.testing.assert_array_equal(fp8.codec.encode(fp8.codec.decode(codes)), codes)


@both_formats
def test_encode_rounds_to_nearest_even_at_every_midpoint(fp8):
    values = fp8.magnitudes()
    x = np.concatenate([around(values), around((values[1:] + values[:-1]) / 2)])
    np.testing.assert_array_equal(fp8.codec.encode(x), fp8.encode(x, fp8.largest))


@both_formats
@given(x=floats)
def test_encode_matches_brute_force(fp8, x):
    x = np.array([x], np.float32)
    np.testing.assert_array_equal(fp8.codec.encode(x), fp8.encode(x, fp8.largest))


@both_formats
def test_encode_matches_brute_force_on_every_bf16(fp8):
    x = core.bf16_to_float(np.concatenate([BF16_FINITE, BF16_FINITE | 0x8000]))
    for chunk in np.array_split(x, 16):
        np.testing.assert_array_equal(fp8.codec.encode(chunk), fp8.encode(chunk, fp8.largest))


@both_formats
def test_encode_saturates_at_the_writers_maximum(fp8):
    x = around(
        np.array([np.inf, np.finfo(np.float32).max, 1e5, 449.0, 448.0, 240.0, 232.0, 225.0, 224.0, 216.0])
    )
    for limit in (fp8.largest, 240.0, 224.0, 1.0):
        got = fp8.codec.encode(x, limit)
        np.testing.assert_array_equal(got, fp8.encode(x, limit))
        assert np.abs(fp8.codec.decode(got)).max() == limit


@both_formats
def test_nan_encodes_to_nan_and_nothing_else_does(fp8):
    nans = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF], np.uint32)
    assert set(fp8.codec.encode(nans.view(np.float32))) == {fp8.nans[0]}
    everything = core.bf16_to_float(np.arange(65536, dtype=np.uint16))
    is_nan = np.isin(fp8.codec.encode(everything), fp8.nans)
    np.testing.assert_array_equal(is_nan, np.isnan(everything))


@pytest.mark.parametrize("codec", [core.e4m3fnuz, core.hip_e4m3fnuz])
def test_fnuz_negative_underflow_is_zero_not_nan(codec):
    x = -np.array([0.0, 1e-45, 2.0**-126, 2.0**-12, 2.0**-11], np.float32)  # the last: half the smallest code
    np.testing.assert_array_equal(codec.encode(x), 0)
    assert codec.encode(np.nextafter(x[-1:], np.float32(-1))) == 0x81


@pytest.mark.parametrize("name", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("byte", range(4))
def test_hip_decodes_each_byte_of_a_word(name, byte):
    got, want = getattr(core, f"hip_{name}").decode(CODES, byte), getattr(core, name).decode(CODES)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_four_e4m3fn_codes_are_four_e4m3fnuz_codes_of_half_their_value():
    """Each code in each byte, next to each kind of neighbour."""
    for byte in range(4):
        for others in (0x00, 0x01, 0x7F, 0x80, 0xFF):
            words = np.full((256, 4), others, np.uint8)
            words[:, byte] = CODES
            halves = core.halve_e4m3fn(words.view(np.uint32)[:, 0]).view(np.uint8).reshape(256, 4)
            want = core.e4m3fn.decode(words) / 2
            np.testing.assert_array_equal(core.e4m3fnuz.decode(halves), want)


def test_bf16_widens_exactly():
    everything = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(bits(core.bf16_to_float(everything)), everything.astype(np.uint32) << 16)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_rounds_to_nearest_even(low):
    upper = np.arange(65536, dtype=np.uint32)
    x = (upper << 16 | low).view(np.float32)
    x, upper = x[~np.isnan(x)], upper[~np.isnan(x)]

    def value(code):  # float64; the code after the largest finite one stands for 2^128
        magnitude = (code & 0x7FFF) << 16
        return np.where(magnitude == 0x7F800000, 2.0**128, magnitude.view(np.float32).astype(np.float64))

    magnitude = np.where(np.isinf(x), 2.0**128, np.abs(x.astype(np.float64)))
    with np.errstate(invalid="ignore"):
        below, above = magnitude - value(upper), value(upper + 1) - magnitude
    up = (above < below) | ((above == below) & (upper & 1 == 1))
    np.testing.assert_array_equal(core.float_to_bf16(x), upper + (up & ~np.isinf(x)))


def test_every_nan_rounds_to_the_one_bf16_nan():
    x = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert (core.float_to_bf16(x) == 0x7FFF).all()


def test_every_half_widens_exactly():
    everything = np.arange(65536, dtype=np.uint16)
    want, got = everything.view(np.float16).astype(np.float32), core.half_to_float(everything)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(bits(got)[finite], bits(want)[finite])


def test_every_ue8m0_code_is_its_power_of_two():
    got = core.ue8m0_to_float(CODES)
    assert np.isnan(got[255])
    np.testing.assert_array_equal(got[:255].astype(np.float64), 2.0 ** (np.arange(255) - 127.0))
    usable = np.arange(1, 254, dtype=np.uint8)  # both the scale and its reciprocal are normal
    np.testing.assert_array_equal(core.ue8m0_to_float(usable) * core.ue8m0_reciprocal(usable), 1.0)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_every_e2m1_code_decodes_to_its_value_and_back():
    codes = np.arange(16, dtype=np.uint8)
    want = np.concatenate([E2M1, -E2M1]).astype(np.float32)
    np.testing.assert_array_equal(bits(core.e2m1.decode(codes)), bits(want))
    np.testing.assert_array_equal(core.e2m1.encode(want), codes)
    assert core.e2m1.max == 6


def test_four_e2m1_codes_widen_to_four_bytes():
    packed = np.arange(65536, dtype=np.uint16)
    bytes_ = core.e2m1x4_to_e4m3(packed).view(np.uint8).reshape(-1, 4)
    codes = np.stack([packed >> 4 * i & 15 for i in range(4)], 1)
    np.testing.assert_array_equal(core.e4m3fn.decode(bytes_) * 64, np.concatenate([E2M1, -E2M1])[codes])


@given(x=floats)
def test_e2m1_is_the_nearest_and_of_two_the_even_one(x):
    distance = np.abs(E2M1 - min(abs(x), 6.0))
    nearest = [code for code in range(8) if distance[code] == distance.min()]
    code = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
    assert core.e2m1.encode(np.float32(x)) == code + 8 * bool(np.signbit(np.float32(x)))


def test_e2m1_rounds_to_even_at_every_middle_and_has_no_nan():
    x = around(np.concatenate([E2M1, (E2M1[1:] + E2M1[:-1]) / 2]))
    distance = np.abs(np.minimum(np.abs(x.astype(np.float64)), 6)[:, None] - E2M1)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(8) % 2 == 0)
    want = np.where(nearest.sum(1) > 1, even.argmax(1), nearest.argmax(1)) + 8 * np.signbit(x)
    np.testing.assert_array_equal(core.e2m1.encode(x), want)
    assert core.e2m1.encode(np.float32(np.nan)) == core.e2m1.encode(-np.float32(np.nan)) == 0


def test_the_scale_of_e2m1_is_that_of_a_division_for_every_amax():
    amax = core.bf16_to_float(BF16_FINITE)
    quotient = np.maximum(amax.astype(np.float64) / 6, 2.0**-9)
    want = FORMATS["e4m3fn"].encode(quotient, 448.0)
    np.testing.assert_array_equal(core.e2m1_tile_scale(amax, 2.0**-9), want)
    assert core.e2m1_tile_scale(0.0, 2.0**-9) == 0x01 and core.e2m1_tile_scale(np.inf, 2.0**-9) == 0x7F


def smallest_exponent(amax: float, amax_floor: float, scale_floor: float, fp8_max: float) -> int:
    """The contract, in rational arithmetic."""
    need = max(max(Fraction(amax), Fraction(amax_floor)) / Fraction(fp8_max), Fraction(scale_floor))
    exponent = 0
    while Fraction(2) ** (exponent - 127) < need:
        exponent += 1
    return exponent


FLOORS = sorted(
    {(x.amax_floor, x.scale_floor) for x in core.KV_LAYOUTS if x.scale_format in ("f32", "ue8m0")}
)
WRITER_MAXIMA = [v for v in FORMATS["e4m3fn"].magnitudes() if v >= 4]


@given(st.integers(0, len(BF16_FINITE) - 1), st.sampled_from(FLOORS), st.sampled_from(WRITER_MAXIMA))
def test_tile_scale_is_the_smallest_power_of_two_that_fits(amax_code, floors, fp8_max):
    amax = float(core.bf16_to_float(np.uint16(amax_code)))
    want = smallest_exponent(amax, *floors, fp8_max)
    assert core.tile_scale_exponent(amax, *floors, fp8_max) == want


@pytest.mark.parametrize("fp8_max", [448.0, 240.0, 224.0, 4.0])
@pytest.mark.parametrize("floors", FLOORS)
def test_tile_scale_fits_for_every_amax(floors, fp8_max):
    """The same for every bf16: products of few significant bits are exact in float64."""
    amax = core.bf16_to_float(BF16_FINITE)
    exponent = core.tile_scale_exponent(amax, *floors, fp8_max)
    need = np.maximum(amax.astype(np.float64), floors[0])

    def fits(scale):
        return (scale * fp8_max >= need) & (scale >= floors[1])

    scale = 2.0 ** (exponent.astype(np.float64) - 127)
    assert fits(scale).all()
    assert not fits(scale / 2).any()
    assert exponent.max() <= 253  # its reciprocal is a normal float


def test_floors_give_the_bytes_of_the_engines_writers():
    by_name = {layout.name: layout for layout in core.KV_LAYOUTS}
    for name, byte in (("dsv4", 105), ("dsv32", 127 - 13), ("dsv41", 114), ("dsv32_nope", 114)):
        layout = by_name[name]
        assert core.tile_scale_exponent(0.0, layout.amax_floor, layout.scale_floor, 448.0) == byte


@pytest.mark.skipif(not core.FlushDenormals.available, reason="this CPU has no such mode")
def test_codecs_ignore_the_callers_flush_denormal_mode():
    half, subnormals = np.arange(65536, dtype=np.uint16), np.arange(0x80, dtype=np.uint16)
    x = around(FORMATS["e4m3fn"].magnitudes()[:16])
    tiny = np.concatenate([core.bf16_to_float(subnormals), x])

    def everything():
        return [
            core.half_to_float(half),
            core.bf16_to_float(half),
            core.float_to_bf16(tiny),
            core.ue8m0_to_float(CODES),
            *(codec.decode(CODES) for codec in (core.e4m3fn, core.e4m3fnuz)),
            core.e2m1.encode(tiny),
            core.e2m1_tile_scale(np.abs(tiny), 2.0**-9),
            *(codec.encode(tiny) for codec in (core.e4m3fn, core.e4m3fnuz)),
            *(core.tile_scale_exponent(np.abs(tiny), *floors, 448.0) for floors in FLOORS),
        ]

    kept = everything()
    with core.FlushDenormals():
        flushed = everything()
    for a, b in zip(kept, flushed, strict=True):
        assert a.tobytes() == b.tobytes()
