#pragma once
// Pairs of 16-bit floats in one register, low half first: what the tensor cores eat. See convert.cuh.
#include <cstdint>

#include "cuda/convert.cuh"

namespace mla_fp8::gpu {

__device__ inline uint32_t pack_f16(float low, float high) { return pack<Dtype::kF16>({low, high}); }
__device__ inline uint32_t pack_bf16(float low, float high) { return pack<Dtype::kBf16>({low, high}); }
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// ---- sm_90 ----
__device__ inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Four e4m3fn bytes to f16: exact, NaN kept.
__device__ inline void e4m3_to_f16(uint32_t bytes, uint32_t& f01, uint32_t& f23) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, "
      "high; }"
      : "=r"(f01), "=r"(f23)
      : "r"(bytes));
}

}  // namespace mla_fp8::gpu
