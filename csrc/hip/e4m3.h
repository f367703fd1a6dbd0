#pragma once
// e4m3 by ordinary instructions, for AMD GPUs or formats without their own: a multiplication moves a value
// between float's exponents and e4m3's, subnormals included. A kernel's mode keeps those (code_objects.py
// looks); on a CPU, where a caller may flush them, common/fp8.h does without.
#include "common/fp8.h"

namespace mla_fp8::gpu {

// From a code's bits in a float's place to its value.
template <Format kFormat>
inline constexpr float kE4m3Unit = E4m3<kFormat>::kFnuz ? 0x1p119f : 0x1p120f;

// The code in byte `byte` of a word.
template <Format kFormat>
MLA_HD float widen_e4m3(uint32_t codes, int byte) {
  // The code at the top, then four bits down: sign, three copies of it that go, exponent, mantissa.
  const auto spread = static_cast<int32_t>(codes << (24 - 8 * byte)) >> 4;
  const uint32_t bits = static_cast<uint32_t>(spread) & 0x87f00000u;
  const bool is_nan = E4m3<kFormat>::kFnuz ? bits == kSignMask : (bits & 0x07f00000u) == 0x07f00000u;
  return is_nan ? bits_float(kNanBits) : bits_float(bits) * kE4m3Unit<kFormat>;
}

// As float_to_e4m3, for x that a caller has clamped: NaN, or not above what rounds to the largest code.
template <Format kFormat>
MLA_HD uint32_t narrow_e4m3(float x) {
  using F = E4m3<kFormat>;
  const uint32_t bits = float_bits(x) & ~kSignMask, exponent = bits & kInfBits;
  // 2^20 times the power of two below |x| ends three bits below that: adding it rounds |x| to four bits.
  const float power = bits_float((exponent > F::kMinNormal ? exponent : F::kMinNormal) + (20u << 23));
  const float rounded = bits_float(bits) + power - power;
  const uint32_t code = float_bits(rounded * (1 / kE4m3Unit<kFormat>)) >> 20 | (float_bits(x) >> 24 & 0x80u);
  if (bits > kInfBits) return F::kNan;
  return F::kFnuz && code == 0x80 ? 0 : code;
}

// Four e4m3fn codes as the e4m3fnuz codes of half their value: -0 becomes 0, each NaN the one of fnuz. A GPU
// that widens e4m3fnuz alone reads e4m3fn by them.
MLA_HD uint32_t halve_e4m3fn(uint32_t codes) {
  // 0x80 in every byte of x that is 0: no carry leaves its byte.
  const auto zero_bytes = [](uint32_t x) { return ~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x | 0x7f7f7f7fu); };
  const uint32_t minus_zero = zero_bytes(codes ^ 0x80808080u);
  const uint32_t nan = zero_bytes((codes & 0x7f7f7f7fu) ^ 0x7f7f7f7fu);
  const uint32_t nan_bytes = (nan << 1) - (nan >> 7);  // a product would be four times as slow
  return (codes & ~minus_zero & ~nan_bytes) | nan;
}

struct Float4 {
  float x[4];
};

// What `codes` are in e4m3fn, from what halve_e4m3fn(codes) are in e4m3fnuz.
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
