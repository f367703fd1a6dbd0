#pragma once
// The words in which kernels of this folder are written so that csrc/hip compiles them too. CUDA's vocabulary
// is one part; the other is what both headers below define:
//
//   MLA_FP8_PTX                  whether there is PTX
//   kWaveSize                    lanes of the matrix instructions; logical warps have 32 lanes everywhere
//   MLA_FP8_WAVE64               whether kWaveSize is 64
//   MLA_SHARED(Type, name)       declares a variable of the block
//   MLA_256_REGISTERS            limits a kernel to 256 registers where a compiler would take more
//   fast_exp2, fast_log2         the hardware's approximations
//   fast_divide                  x / y; on NVIDIA's GPUs approximate, and 0 for y above 2^126
#if MLA_FP8_WITH_HIP
#include "hip/platform.h"
#else
#include <cuda_runtime.h>

#define MLA_FP8_PTX 1
#define MLA_FP8_WAVE64 0
#define MLA_SHARED(Type, name) __shared__ Type name
#define MLA_256_REGISTERS

namespace mla_fp8::gpu {

inline constexpr int kWaveSize = 32;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_divide(float x, float y) { return __fdividef(x, y); }

}  // namespace mla_fp8::gpu
#endif

namespace mla_fp8::gpu {

inline constexpr int kWarpSize = 32;

}  // namespace mla_fp8::gpu
