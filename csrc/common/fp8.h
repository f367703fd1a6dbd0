#pragma once
// Conversions of e4m3fn, e4m3fnuz, e2m1, ue8m0 and bf16, with the same bits on host and device. They use
// integers where a subnormal could meet a flush-to-zero mode. Each format gets one NaN, never the operand's:
// which NaN a multiplication returns depends on the machine and on the compiler's operand order.
#include <cstdint>
#include <cstring>

#include "common/kv_layout.h"

namespace mla_fp8 {

MLA_HD uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
MLA_HD float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline constexpr uint32_t kSignMask = 0x80000000u;
inline constexpr uint32_t kInfBits = 0x7f800000u;
inline constexpr uint32_t kNanBits = 0x7fc00000u;
inline constexpr uint16_t kBf16Nan = 0x7fff;

MLA_HD float bf16_to_float(uint16_t x) { return bits_float(uint32_t{x} << 16); }

// Rounds to nearest even. Every NaN becomes kBf16Nan, as in the GPUs' conversion.
MLA_HD uint16_t float_to_bf16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & ~kSignMask) > kInfBits) return kBf16Nan;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// The numbers in which the two e4m3 encodings differ.
template <Format kFormat>
struct E4m3 {
  static_assert(is_e4m3(kFormat));
  static constexpr bool kFnuz = kFormat == Format::kE4m3fnuz;
  static constexpr int kBias = kFnuz ? 8 : 7;
  static constexpr uint8_t kNan = kFnuz ? 0x80 : 0x7f;
  static constexpr float kQuantum = kFnuz ? 0x1p-10f : 0x1p-9f;  // value of the smallest subnormal
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;  // as float bits
};

template <Format kFormat>
MLA_HD float e4m3_to_float(uint8_t x) {
  using F = E4m3<kFormat>;
  const bool is_nan = F::kFnuz ? x == 0x80 : (x & 0x7f) == 0x7f;
  const uint32_t sign = uint32_t{x & 0x80u} << 24, exponent = (x >> 3) & 15u, mantissa = x & 7u;
  if (is_nan) return bits_float(kNanBits);
  if (exponent == 0) return bits_float(float_bits(static_cast<float>(mantissa) * F::kQuantum) | sign);
  return bits_float(sign | ((exponent + 127 - F::kBias) << 23) | (mantissa << 20));
}

// Rounds to nearest even and saturates at +-max, which must be representable; NaN stays NaN.
template <Format kFormat>
MLA_HD uint8_t float_to_e4m3(float x, float max = format_max(kFormat)) {
  using F = E4m3<kFormat>;
  const uint32_t u = float_bits(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  uint32_t a = u & ~kSignMask;
  if (a > kInfBits) return F::kNan;
  if (a > float_bits(max)) a = float_bits(max);
  uint32_t code;
  if (a < F::kMinNormal) {
    // Adding 2^23 quanta leaves the rounded multiple of the quantum in the low mantissa bits.
    constexpr float kMagic = F::kQuantum * 0x1p23f;
    code = float_bits(bits_float(a) + kMagic) - float_bits(kMagic);
  } else {
    code = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - ((127u - F::kBias) << 3);
  }
  return F::kFnuz && code == 0 ? uint8_t{0}
                               : static_cast<uint8_t>(sign | code);  // fnuz has no -0: 0x80 is NaN
}

// ue8m0: value 2^(x - 127), 255 is NaN. Byte 0 is a float subnormal.
MLA_HD float ue8m0_to_float(uint8_t x) {
  if (x == 255) return bits_float(kNanBits);
  return bits_float(x == 0 ? 0x00400000u : uint32_t{x} << 23);
}

// Returns the biased exponent of the smallest power of two >= max(max(amax, amax_floor) / fp8_max,
// scale_floor). No division: the difference of two floats' bits is on a power of two where the quotient is,
// else between the same two. That fails for a subnormal amax, which is far below the floor.
MLA_HD uint8_t tile_scale_exponent(float amax, float amax_floor, float scale_floor, float fp8_max) {
  const auto round_up = [](uint32_t bits) { return static_cast<int32_t>(bits + 0x7fffffu) >> 23; };
  const uint32_t kOne = 127u << 23;
  const int32_t exponent =
      round_up(float_bits(amax > amax_floor ? amax : amax_floor) - float_bits(fp8_max) + kOne);
  const int32_t floor = round_up(float_bits(scale_floor));
  return static_cast<uint8_t>(exponent > floor ? exponent : floor);
}
// Returns 2^(127 - exponent), the exact reciprocal of a stored scale. The floors and fp8_max >= 4 keep
// exponent in [105, 253].
MLA_HD float ue8m0_reciprocal(uint8_t exponent) { return bits_float(uint32_t(254 - exponent) << 23); }

// e2m1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. Its exponent and mantissa, shifted left
// by two bits, are the e4m3fn of 1/64 of its value, subnormals included. Kernels read it in this way.
inline constexpr float kE2m1Unit = 64.0f;

// Expands the four codes in the low 16 bits, lowest first, to four bytes of e4m3fn: 1/64 of their values.
MLA_HD constexpr uint32_t e2m1x4_to_e4m3(uint32_t codes) {
  codes = (codes | codes << 8) & 0x00ff00ffu;
  codes = (codes | codes << 4) & 0x0f0f0f0fu;
  return (codes & 0x08080808u) << 4 | (codes & 0x07070707u) << 2;
}

// Rounds to nearest, ties to the even code, and saturates; the sign of a zero is kept. e2m1 has no NaN: a NaN
// becomes `of_nan`.
MLA_HD uint8_t float_to_e2m1(float x, uint8_t of_nan) {
  const uint32_t u = float_bits(x), sign = (u >> 28) & 8u, kLargest = float_bits(6.0f);
  uint32_t a = u & ~kSignMask;
  if (a > kInfBits) return of_nan;
  if (a > kLargest) a = kLargest;
  // Rounding works as in float_to_e4m3: below 1 the quantum is 0.5.
  const uint32_t code = a < float_bits(1.0f) ? float_bits(bits_float(a) + 0x1p22f) - float_bits(0x1p22f)
                                             : ((a + 0x1fffffu + ((a >> 22) & 1u)) >> 22) - (126u << 1);
  return static_cast<uint8_t>(sign | code);
}

// Returns the scale of a tile of e2m1: the e4m3fn nearest to amax / 6, at least scale_floor. amax is a bf16
// value, for which amax * (1 / 6) rounds as amax / 6 does. Infinity stands for a tile with a NaN.
MLA_HD uint8_t e2m1_tile_scale(float amax, float scale_floor) {
  if (float_bits(amax) == kInfBits) return E4m3<Format::kE4m3fn>::kNan;
  const float scale = amax * (1.0f / 6.0f);
  return float_to_e4m3<Format::kE4m3fn>(scale > scale_floor ? scale : scale_floor);
}

template <ScaleFormat kFormat>
MLA_HD void store_scale(uint8_t* scales, int tile, uint8_t exponent) {
  if constexpr (kFormat == ScaleFormat::kUe8m0) {
    scales[tile] = exponent;
  } else {
    const float scale = ue8m0_to_float(exponent);
    memcpy(scales + 4 * tile, &scale, 4);
  }
}

template <ScaleFormat kFormat>
MLA_HD float load_scale(const uint8_t* scales, int tile) {
  if constexpr (kFormat == ScaleFormat::kUe8m0) return ue8m0_to_float(scales[tile]);
  if constexpr (kFormat == ScaleFormat::kE4m3) return e4m3_to_float<Format::kE4m3fn>(scales[tile]);
  float scale;
  memcpy(&scale, scales + 4 * tile, 4);
  return scale;
}

}  // namespace mla_fp8
