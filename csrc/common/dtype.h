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
