#pragma once
// 16-bit and 8-bit floats as the hardware converts them.
#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace emulator {

inline float from_f16(uint32_t half) { return _cvtsh_ss(static_cast<uint16_t>(half)); }
inline uint32_t to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline uint32_t to_f16_toward_zero(float x) { return _cvtss_sh(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline float from_bf16(uint32_t x) { return std::bit_cast<float>(x << 16); }
inline uint32_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// e4m3fn has its NaN in 0x7f and 0xff and a bias of 7; e4m3fnuz in 0x80, without -0, and a bias of 8.
inline float from_e4m3(uint32_t code, bool fnuz) {
  const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
  if (fnuz ? (code & 0xff) == 0x80 : (code & 0x7f) == 0x7f)
    return std::bit_cast<float>(0x7fc00000 | (fnuz ? 0 : (code & 0x80) << 24));
  const int bias = fnuz ? 8 : 7;
  const float value =
      exponent > 0 ? std::ldexp(8.0f + static_cast<float>(mantissa), static_cast<int>(exponent) - bias - 3)
                   : std::ldexp(static_cast<float>(mantissa), 1 - bias - 3);
  return code & 0x80 ? -value : value;
}

}  // namespace emulator
