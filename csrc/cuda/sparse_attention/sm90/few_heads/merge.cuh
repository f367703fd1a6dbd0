#pragma once
// Merges the CTAs that share a query, in distributed shared memory. Each CTA's partial output lies over its
// ring, float [head][kOutPitch], beside the (max, sum) of each head.
#include "cuda/device/cluster.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// One warp merges num_quads <= 4 * 32 quads of one head; `quad` is this lane's first. Latency of remote loads
// bounds it, so 16 are in flight: 4 CTAs x 4 pieces of 32 quads. With up to two pieces the last two columns
// have the same pieces of four further CTAs. One table serves both, as its code is cold.
template <class C>
__device__ void merge_quads(const KernelParams& params, const typename C::Item& w, uint32_t smem, int quad,
                            int num_quads, int lane) {
  constexpr int kRows = 4, kColumns = 4, kHalf = kColumns / 2;
  const bool is_wide = num_quads > kHalf * kWarpSize;
  const int splits = params.num_splits(), head = quad / kOutQuads;
  if (!w.has_head(params.p, head)) return;  // loads are used, so they have ended before this CTA leaves
  // Each CTA begins with itself, so that not all read from one. In segments these are the sides of a tree.
  const auto other = [&](int i) {
    if constexpr (C::kSegments) return w.split ^ min(i, splits - 1);
    const int split = w.split + min(i, splits - 1);
    return split < splits ? split : split - splits;
  };
  const auto split_of = [&](int i, int half) { return is_wide ? i : i + half * kRows; };
  float2 stats = {kNoPartial, 0.0f};  // lane r holds split r's
  float largest = -INFINITY;
  if (lane < splits) {
    stats = load_cluster_float2(cluster_address(smem + MLA_SMEM(C, stats) + head * 8, lane));
    if constexpr (C::kFindsLargest)
      if (params.p.max_logits)
        largest = load_cluster_float(cluster_address(smem + MLA_SMEM(C, largest) + head * 4, lane));
  }
  const uint32_t mine = smem + MLA_SMEM(C, ring) + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
  float4 sum[kColumns] = {};
  float max = stats.x, total = 0.0f, factor = 0.0f;
#pragma unroll 1
  for (int r = 0; r < splits; r += is_wide ? kRows : 2 * kRows) {
    float4 x[kRows][kColumns];
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int split = split_of(r + k, half), first = is_wide ? half * kHalf : 0;
        const uint32_t theirs = cluster_address(mine, other(split));
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const int piece = (first + i) * kWarpSize;
          x[k][half * kHalf + i] =
              split < splits && piece < num_quads
                  ? load_cluster_float4(theirs + piece * static_cast<int>(sizeof(float4)))
                  : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
      }
    if (r == 0) {  // while the loads are on their way
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
      factor = fast_exp2(stats.x - max);
      total = stats.y * factor;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        total += __shfl_xor_sync(kFullWarp, total, offset);
        if constexpr (C::kFindsLargest) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float f = __shfl_sync(kFullWarp, factor, other(split_of(r + k, half)));
#pragma unroll
        for (int i = half * kHalf; i < (half + 1) * kHalf; ++i) x[k][i] = scaled(x[k][i], f);
      }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float4 first = tree_sum<kRows>([&](int k) { return x[k][i]; });
      float4 second = tree_sum<kRows>([&](int k) { return x[k][kHalf + i]; });
      if (!is_wide) add(first, second), second = {};
      add(sum[i], first), add(sum[kHalf + i], second);
    }
  }
  float out_factor = 0.0f;
  if (lane == 0) out_factor = finish_head<typename C::R>(params.p, w, head, max, total, largest);
  out_factor = __shfl_sync(kFullWarp, out_factor, 0);
  uint2* const out = place_of_head(params.p, w, head) + quad % kOutQuads;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (i * kWarpSize < num_quads) out[i * kWarpSize] = to_bf16<C::kSegments>(sum[i], out_factor);
}

// Each CTA of the cluster finishes an equal share of the heads, each of its eight warps an equal share of
// that: a few heads, or a part of one. Shares are of pieces, a quad for each lane.
template <class C>
__device__ void merge_splits(const KernelParams& params, const typename C::Item& w, uint8_t* smem, int warp,
                             int lane) {
  constexpr int kOfHead = kOutQuads / kWarpSize, kAll = C::kHeads * kOfHead;
  const auto begin = [&](int split) { return static_cast<int>(params.splits(split * kAll)); };
  const int of_cta = begin(w.split), end_of_cta = begin(w.split + 1);
  const int share = ceil_div(end_of_cta - of_cta, kConsumerWarps);
  const int first = of_cta + warp * share, end = min(first + share, end_of_cta);
#pragma unroll 1
  for (int piece = first, num; piece < end; piece += num) {
    const int most = share >= kOfHead ? kOfHead : 2;
    num = min(end - piece, most - piece % most);
    merge_quads<C>(params, w, shared_address(smem), piece * kWarpSize + lane, num * kWarpSize, lane);
  }
}

}  // namespace mla_fp8::gpu
