#pragma once
// e4m3 by ordinary instructions, for AMD GPUs and formats without their own. A multiplication moves a value
// between float's exponents and e4m3's, subnormals included. Kernels' mode keeps subnormals (code_objects.py
// checks that). On a CPU a caller may flush them, so common/fp8.h does without.
#include "common/fp8.h"

namespace mla_fp8::gpu {

// The factor from a code's bits, in the place of a float's, to its value.
template <Format kFormat>
inline constexpr float kE4m3Unit = E4m3<kFormat>::kFnuz ? 0x1p119f : 0x1p120f;

// The value of the code in byte `byte` of a word.
template <Format kFormat>
MLA_HD float widen_e4m3(uint32_t codes, int byte) {
  // The code goes to the top, then four bits down: sign, three copies of it to mask, exponent, mantissa.
  const auto spread = static_cast<int32_t>(codes << (24 - 8 * byte)) >> 4;
  const uint32_t bits = static_cast<uint32_t>(spread) & 0x87f00000u;
  const bool is_nan = E4m3<kFormat>::kFnuz ? bits == kSignMask : (bits & 0x07f00000u) == 0x07f00000u;
  return is_nan ? bits_float(kNanBits) : bits_float(bits) * kE4m3Unit<kFormat>;
}

// float_to_e4m3 for x that a caller has clamped: NaN, or no larger than what rounds to the largest code.
template <Format kFormat>
MLA_HD uint32_t narrow_e4m3(float x) {
  using F = E4m3<kFormat>;
  const uint32_t bits = float_bits(x) & ~kSignMask, exponent = bits & kInfBits;
  // Adding 2^20 times the power of two below |x| rounds |x| to four bits.
  const float power = bits_float((exponent > F::kMinNormal ? exponent : F::kMinNormal) + (20u << 23));
  const float rounded = bits_float(bits) + power - power;
  const uint32_t code = float_bits(rounded * (1 / kE4m3Unit<kFormat>)) >> 20 | (float_bits(x) >> 24 & 0x80u);
  if (bits > kInfBits) return F::kNan;
  return F::kFnuz && code == 0x80 ? 0 : code;
}

// Turns four e4m3fn codes into the e4m3fnuz codes of half their value, so that a GPU with instructions for
// e4m3fnuz alone reads e4m3fn. -0 becomes 0, NaN becomes fnuz's, and other codes stay. These are steps of
// their own, since -0 is in any row and NaN in hardly any. No sum carries into the next byte.
inline constexpr uint32_t kMagnitudes = 0x7f7f7f7f, kSigns = 0x80808080;
// Sets the sign bit of each NaN and clears those of other codes; the other bits mean nothing.
MLA_HD uint32_t nan_signs(uint32_t e4m3fn) { return (e4m3fn & kMagnitudes) + 0x01010101u; }
MLA_HD uint32_t drop_minus_zeros(uint32_t e4m3fn) {
  const uint32_t magnitudes = e4m3fn & kMagnitudes, not_zero = magnitudes + kMagnitudes;
#if __HIP_DEVICE_COMPILE__  // clang does not choose this instruction by itself
  uint32_t codes;
  asm("v_bfi_b32 %0, %1, %2, %3" : "=v"(codes) : "v"(not_zero), "v"(e4m3fn), "v"(magnitudes));
  return codes;
#else
  return (e4m3fn & not_zero) | (magnitudes & ~not_zero);
#endif
}
MLA_HD uint32_t halve_nans(uint32_t e4m3fn) {
  const uint32_t nan = nan_signs(e4m3fn) & kSigns;
  return (e4m3fn & kSigns) | ((e4m3fn & kMagnitudes) + (nan >> 7));  // 0x7f + 1
}
MLA_HD uint32_t halve_e4m3fn(uint32_t codes) { return halve_nans(drop_minus_zeros(codes)); }

struct Float4 {
  float x[4];
};

// The values of e4m3fn `codes`, from those of halve_e4m3fn(codes) in e4m3fnuz.
template <bool kKeepsMinusZero>
MLA_HD Float4 undo_halving(uint32_t codes, Float4 halves) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves.x[i] *= 2.0f;
    if (kKeepsMinusZero)
      halves.x[i] = bits_float(float_bits(halves.x[i]) | (codes << (24 - 8 * i) & kSignMask));
  }
  return halves;
}

}  // namespace mla_fp8::gpu
