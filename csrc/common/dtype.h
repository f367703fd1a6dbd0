#pragma once
// Floating-point dtypes that ops accept besides the cache formats.
#include <cstdint>

#include "common/fp8.h"

namespace mla_fp8 {

enum class Dtype : int32_t { kBf16, kF16, kF32 };

// Converts an IEEE half to a float, exactly; NaN stays NaN. Both conversions below compute every case, then
// select by signed comparisons. So loops over them vectorise on any x86-64.
MLA_HD float half_to_float(uint16_t x) {
#if __HIP_DEVICE_COMPILE__
  return static_cast<float>(__builtin_bit_cast(_Float16, x));
#else
  const int32_t a = x & 0x7fff;
  const uint32_t subnormal = float_bits(static_cast<float>(a) * 0x1p-24f);
  const uint32_t rebias = a < 0x7c00 ? 112u << 23 : 224u << 23;  // infinity and NaN: to exponent 255
  const uint32_t magnitude = a < 0x400 ? subnormal : (static_cast<uint32_t>(a) << 13) + rebias;
  return bits_float(magnitude | (uint32_t{x & 0x8000u} << 16));
#endif
}

// Rounds to nearest even; above the largest half, to infinity. Every NaN becomes 0x7fff, as on the GPUs.
MLA_HD uint16_t float_to_half(float x) {
#if __HIP_DEVICE_COMPILE__
  return x != x ? uint16_t{0x7fff} : __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
#else
  constexpr int32_t kMinNormal = 113 << 23, kInfHalf = 0x7c00;
  const uint32_t u = float_bits(x), sign = (u & kSignMask) >> 16;
  const int32_t a = static_cast<int32_t>(u & ~kSignMask);
  // Adding 0.5, whose last bit is half's quantum, leaves the rounded multiple of it in the low mantissa bits.
  const float shifted = bits_float(u & ~kSignMask) + 0.5f;
  const int32_t subnormal = static_cast<int32_t>(float_bits(shifted) - float_bits(0.5f));
  const uint32_t rounded = static_cast<uint32_t>(a) + 0xfffu + ((u >> 13) & 1u);
  const int32_t normal = static_cast<int32_t>(rounded >> 13) - (112 << 10);
  const int32_t finite = a < kMinNormal ? subnormal : normal;
  const int32_t code = finite < kInfHalf ? finite : kInfHalf;
  return static_cast<uint16_t>(a > static_cast<int32_t>(kInfBits) ? 0x7fffu
                                                                  : sign | static_cast<uint32_t>(code));
#endif
}

// The type that stores a value of `kDtype`.
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
