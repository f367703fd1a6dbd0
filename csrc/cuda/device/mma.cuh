#pragma once
// Warp-wide matrix instructions. Fragment notation: lane = 4 * g + t.
#include <cstdint>

#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

// D[16 x 8] += A[16 x 16] B[16 x 8] with float sums. d[0], d[1] are columns 2t, 2t + 1 of row g; d[2], d[3]
// are the same columns of row g + 8.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Reduces over g: over the rows of a fragment of A or D with the same t.
__device__ inline float max_over_g(float x) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}
__device__ inline float sum_over_g(float x) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}
// Reduces kCount values over g with half of the instructions that all values would take in all lanes. A lane
// is left with kLeftOfG values, from first_left_of_g on; of two lanes with the same ones the lower counts.
template <int kCount>
inline constexpr int kLeftOfG = kCount % 8 == 0 ? kCount / 8 : kCount / 4;
template <int kCount, int kOffset = 4, int kNow = kCount, class Op>
__device__ __forceinline__ void reduce_over_g(float (&x)[kCount], int lane, Op&& op) {
  static_assert(kCount % 4 == 0);
  if constexpr (kOffset < kWarpSize) {
    constexpr bool kHalves = kNow > kLeftOfG<kCount>;
    constexpr int kAfter = kHalves ? kNow / 2 : kNow;
    const bool upper = kHalves && (lane & kOffset);
#pragma unroll
    for (int i = 0; i < kAfter; ++i) {
      const float other = x[kHalves ? i + kAfter : i];
      const float given = __shfl_xor_sync(kFullWarp, upper ? x[i] : other, kOffset);
      x[i] = op(upper ? other : x[i], given);
    }
    reduce_over_g<kCount, kOffset * 2, kAfter>(x, lane, op);
  }
}
template <int kCount>
__device__ __forceinline__ int first_left_of_g(int lane) {
  return (lane & 4 ? kCount / 2 : 0) + (lane & 8 ? kCount / 4 : 0) +
         (kCount % 8 == 0 && (lane & 16) ? kCount / 8 : 0);
}
template <int kCount>
__device__ __forceinline__ bool counts_of_g(int lane) {
  return kCount % 8 == 0 || !(lane & 16);
}
// Reduces over t: over the columns of D in one row.
__device__ inline float max_over_t(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ inline float sum_over_t(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

}  // namespace mla_fp8::gpu
