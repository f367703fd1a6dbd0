#pragma once
// Q of one CTA, from global memory into the order in which the tensor cores read it as the B operand of K
// Q^T.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"

namespace mla_fp8::gpu {

// The heads of one of kWarps warps. Loaded before the first barrier, stored after it.
template <class C, int kWarps = kConsumerWarps>
struct Query {
  using R = typename C::R;
  static constexpr int kHeads = C::kHeads / kWarps, kWords = R::kDims / 64;
  uint32_t word[kHeads][kWords];

  __device__ void load(const SparseAttentionParams& p, int64_t token, int first_head, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      const uint32_t* row =
          reinterpret_cast<const uint32_t*>(p.q + token * p.q_stride_token + head * p.q_stride_head);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        word[i][j] = head < p.num_q_heads ? __ldg(row + lane + kWarpSize * j) : 0u;
    }
  }

  // What load will read, into L2.
  __device__ static void prefetch(const SparseAttentionParams& p, int64_t token, int first_head, int warp,
                                  int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      if (head < p.num_q_heads && lane < ceil_div(R::kDims * 2, 128))
        prefetch_l2(p.q + token * p.q_stride_token + head * p.q_stride_head + lane * 64);
    }
  }

  // f16 for e4m3 dims, bf16 for the others, each head scaled by a power of two to |q| <= 2^14; the factors go
  // to q_scale.
  __device__ void store(uint8_t* q, float* q_scale, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = warp * kHeads + i;
      float largest = 0.0f;
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        largest = fmaxf(largest, fmaxf(fabsf(low(word[i][j])), fabsf(high(word[i][j]))));
      const int exponent = max(exponent_above(__reduce_max_sync(kFullWarp, __float_as_uint(largest))), -100);
      const float factor = power_of_two(14 - exponent);
      if (lane == 0) q_scale[head] = factor;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int at = lane + kWarpSize * j, step = at / 8, in_step = at % 8;
        const bool fp8 = step < R::kFp8Dims / 16;
        const float x = low(word[i][j]) * factor, y = high(word[i][j]) * factor;
        // K's fragments hold e4m3 dims 4t .. 4t + 3 in the places of k = 2t, 2t + 1, 2t + 8, 2t + 9.
        const int t = fp8 ? in_step / 2 : in_step % 4, half = fp8 ? in_step % 2 : in_step / 4;
        *reinterpret_cast<uint32_t*>(q + offset(step, head, t, half)) =
            fp8 ? pack_f16(x, y) : pack_bf16(x, y);
      }
    }
    if constexpr (C::kWgmma) fence_proxy_async();
  }

 private:
  __device__ static float low(uint32_t x) { return __uint_as_float(x << 16); }
  __device__ static float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
  // mma: one 16-byte load gives a lane both registers of two groups, or of two steps of one. wgmma: core
  // matrices of 8 heads x 16 bytes.
  __device__ static int offset(int step, int head, int t, int half) {
    const int group = head / kGroupHeads, row = head % kGroupHeads;
    if constexpr (C::kWgmma) return (step * 2 + half) * C::kHeads * 16 + group * 128 + row * 16 + t * 4;
    const int fragment = step * C::kGroups + group;
    return (fragment / 2 * kWarpSize + row * 4 + t) * 16 + fragment % 2 * 8 + half * 4;
  }
};

}  // namespace mla_fp8::gpu
