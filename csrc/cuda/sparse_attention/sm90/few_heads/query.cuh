#pragma once
// Q of one CTA, in the order in which the tensor cores read it as the B operand of K Q^T.
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// The heads of one of kWarps warps. They are loaded before the first barrier, and stored after it.
template <class C, int kWarps = kConsumerWarps>
struct Query {
  using R = typename C::R;
  static constexpr int kHeads = C::kHeads / kWarps, kWords = R::kDims / 64;
  uint32_t word[kHeads][kWords];

  __device__ void load(const SparseAttentionParams& p, int64_t query, int first_head, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      const uint32_t* row =
          reinterpret_cast<const uint32_t*>(p.q + query * p.q_stride_token + head * p.q_stride_head);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        word[i][j] = head < p.num_q_heads ? __ldg(row + lane + kWarpSize * j) : 0u;
    }
  }

  // Brings what load() will read to L2.
  __device__ static void prefetch(const SparseAttentionParams& p, int64_t query, int first_head, int warp,
                                  int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      if (head < p.num_q_heads && lane < ceil_div(R::kDims * 2, 128))
        prefetch_l2(p.q + query * p.q_stride_token + head * p.q_stride_head + lane * 64);
    }
  }

  // Stores Q times q_factor, and the factors in q_scale.
  __device__ void store(uint8_t* q, float* q_scale, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = warp * kHeads + i;
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kWords; ++j) largest = larger_magnitudes(largest, word[i][j]);
      const float factor = q_factor(__reduce_max_sync(kFullWarp, larger_of_two(largest)));
      if (lane == 0) q_scale[head] = factor;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int at = lane + kWarpSize * j, step = at / 8, in_step = at % 8;
        const bool fp8 = step < R::kFp8Dims / 16;
        // K's fragments hold e4m3 dims 4t .. 4t + 3 in the places of k = 2t, 2t + 1, 2t + 8, 2t + 9.
        const int t = fp8 ? in_step / 2 : in_step % 4, half = fp8 ? in_step % 2 : in_step / 4;
        *reinterpret_cast<uint32_t*>(q + offset(step, head, t, half)) = q_pair(word[i][j], factor, fp8);
      }
    }
    if constexpr (C::kWgmma) fence_proxy_async();
  }

 private:
  // mma: one 16-byte load gives a lane both registers of two octets, or of two steps of one. wgmma: core
  // matrices of 8 heads x 16 bytes.
  __device__ static int offset(int step, int head, int t, int half) {
    const int octet = head / kOctetHeads, row = head % kOctetHeads;
    if constexpr (C::kWgmma) return (step * 2 + half) * C::kHeads * 16 + octet * 128 + row * 16 + t * 4;
    const int fragment = step * C::kOctets + octet;
    return (fragment / 2 * kWarpSize + row * 4 + t) * 16 + fragment % 2 * 8 + half * 4;
  }
};

}  // namespace mla_fp8::gpu
