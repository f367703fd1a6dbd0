#pragma once
// Floating-point dtypes that ops accept besides the cache formats.
#include <cstdint>

#include "common/fp8.h"

namespace mla_fp8 {

enum class Dtype : int32_t { kBf16, kF16, kF32 };

// IEEE half to float, exact; NaN stays NaN.
MLA_HD float half_to_float(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16, exponent = (x >> 10) & 31u, mantissa = x & 0x3ffu;
  if (exponent == 31) return bits_float(sign | kInfBits | (mantissa << 13));
  if (exponent == 0) return bits_float(float_bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest even, past the largest half is infinity. Every NaN becomes the one that the GPUs write.
MLA_HD uint16_t float_to_half(float x) {
  constexpr uint32_t kMinNormal = 113u << 23, kInfHalf = 0x7c00u;
  const uint32_t u = float_bits(x), sign = (u & kSignMask) >> 16, a = u & ~kSignMask;
  if (a > kInfBits) return 0x7fff;
  uint32_t code;
  if (a < kMinNormal) {
    code = float_bits(bits_float(a) + 0.5f) - float_bits(0.5f);  // the last bit of 0.5 is half's quantum
  } else {
    code = ((a + 0xfffu + ((a >> 13) & 1u)) >> 13) - (112u << 10);
    code = code < kInfHalf ? code : kInfHalf;
  }
  return static_cast<uint16_t>(sign | code);
}

// How a value of `kDtype` is stored, and its conversions.
template <Dtype kDtype>
using FloatStorage = std::conditional_t<kDtype == Dtype::kF32, float, uint16_t>;

template <Dtype kDtype>
MLA_HD float to_float(FloatStorage<kDtype> x) {
  if constexpr (kDtype == Dtype::kF32) return x;
  else if constexpr (kDtype == Dtype::kF16) return half_to_float(x);
  else return bf16_to_float(x);
}
template <Dtype kDtype>
MLA_HD FloatStorage<kDtype> from_float(float x) {
  if constexpr (kDtype == Dtype::kF32) return x;
  else if constexpr (kDtype == Dtype::kF16) return float_to_half(x);
  else return float_to_bf16(x);
}

// Runs fn(constant<dtype>{}).
template <class Fn>
inline void with_dtype(Dtype dtype, Fn&& fn) {
  switch (dtype) {
    case Dtype::kBf16: return fn(constant<Dtype::kBf16>{});
    case Dtype::kF16: return fn(constant<Dtype::kF16>{});
    case Dtype::kF32: return fn(constant<Dtype::kF32>{});
  }
}

}  // namespace mla_fp8
