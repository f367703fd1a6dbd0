#pragma once
// Q of a CTA, from global memory into the order in which wgmma reads it as the B
// operand of K Q^T.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"

namespace mla_fp8::gpu {

// The heads of one of eight warps; a head is shared by kLanes lanes, which take four dims each in turn, so
// that the 32 words that a warp stores at once lie in different banks (of 32 heads, two in a bank). Loaded
// before a barrier, stored after it.
template <class C>
struct WgmmaQuery {
  using R = typename C::R;
  static constexpr int kHeads = C::kHeads / kConsumerWarps, kLanes = kWarpSize / kHeads;
  static constexpr int kRounds = R::kDims / (4 * kLanes), kFp8Rounds = R::kFp8Dims / (4 * kLanes);
  uint2 dims[kRounds];

  __device__ void load(const SparseAttentionParams& p, int64_t query, int first_head, int warp, int lane) {
    const int head = first_head + warp * kHeads + lane / kLanes;
    const uint16_t* row = p.q + query * p.q_stride_token + head * p.q_stride_head + lane % kLanes * 4;
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      dims[i] = head < p.num_q_heads ? __ldg(reinterpret_cast<const uint2*>(row + i * 4 * kLanes)) : uint2{};
  }

  // f16 for e4m3 dims, bf16 for the others, each head scaled by a power of two to |q| <= 2^14; the factors go
  // to kQScale.
  __device__ void store(uint8_t* smem, int warp, int lane) const {
    uint32_t largest = 0;  // bits of |q|
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      largest = __vmaxu2(largest, __vmaxu2(dims[i].x & 0x7fff7fffu, dims[i].y & 0x7fff7fffu));
    largest = max(largest & 0xffff, largest >> 16);
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2)
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
    const int head = warp * kHeads + lane / kLanes, turn = lane % kLanes;
    const float factor = power_of_two(14 - max(exponent_above(largest << 16), -100));
    if (turn == 0) reinterpret_cast<float*>(smem + MLA_SMEM(C, q_scale))[head] = factor;

    // Core matrices of 8 heads x 8 dims, 16 bytes a head: [k-step][half][octet][head].
    constexpr int kHalf = C::kHeads * 16;
    uint8_t* const at = smem + MLA_SMEM(C, q) + head * 16;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int quad = i * kLanes + turn, step = quad / 4, t = quad % 4;
      const float2 x = {low(dims[i].x) * factor, high(dims[i].x) * factor};
      const float2 y = {low(dims[i].y) * factor, high(dims[i].y) * factor};
      if (i < kFp8Rounds) {  // K's fragments hold dims 4t .. 4t + 3 as k = 2t, 2t + 1, 2t + 8, 2t + 9
        *reinterpret_cast<uint32_t*>(at + step * 2 * kHalf + t * 4) = pack_f16(x.x, x.y);
        *reinterpret_cast<uint32_t*>(at + (step * 2 + 1) * kHalf + t * 4) = pack_f16(y.x, y.y);
      } else {
        *reinterpret_cast<uint2*>(at + (step * 2 + t / 2) * kHalf + t % 2 * 8) = {pack_bf16(x.x, x.y),
                                                                                  pack_bf16(y.x, y.y)};
      }
    }
    fence_proxy_async();
  }

 private:
  __device__ static float low(uint32_t x) { return __uint_as_float(x << 16); }
  __device__ static float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
};

}  // namespace mla_fp8::gpu
