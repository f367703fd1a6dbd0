#pragma once
// Arithmetic on floats and their bits.
#include <cstdint>

#include "common/fp8.h"
#include "cuda/device/platform.cuh"

namespace mla_fp8::gpu {

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float power_of_two(int exponent) { return bits_float((127 + exponent) << 23); }
// 1 / x for a power of two x.
__device__ __forceinline__ float reciprocal(float x) { return bits_float((254u << 23) - float_bits(x)); }
// The least e with x < 2^e, from the bits of a float x >= 0.
__device__ __forceinline__ int exponent_above(uint32_t bits) { return static_cast<int>(bits >> 23) - 126; }

#if MLA_FP8_PTX
// Products of pairs of 16-bit floats.
__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// One half of a pair in both halves. It takes no instruction of its own: a product reads its operand so.
__device__ __forceinline__ uint32_t low_twice_f16(uint32_t pair) {
  uint32_t d;
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ uint32_t high_twice_f16(uint32_t pair) {
  uint32_t d;
  asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {  // sm_90
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
#endif

}  // namespace mla_fp8::gpu
