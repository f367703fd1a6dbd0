#pragma once
// The merge of the CTAs that share a query, in distributed shared memory: each CTA's partial output lies over
// its ring, float [head][kOutPitch], beside (max, sum) of each head.
#include "cuda/device/cluster.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// One warp, num_quads <= kRounds * 32 quads of one head; `quad` is this lane's first. What bounds it is the
// latency of remote loads, so many are in flight: of kSplits CTAs at once. And its code, which is cold.
template <class C, int kSplits, int kRounds>
__device__ void merge_quads(const KernelParams& params, const typename C::Item& w, uint32_t smem, int quad,
                            int num_quads, int lane) {
  const int splits = params.num_splits(), head = quad / kOutQuads;
  if (!w.has_head(params.p, head)) return;  // what is loaded is used: it has come before this CTA leaves
  // Each begins with itself: nobody is asked by all. Of segments these are sides of a tree.
  const auto other = [&](int i) {
    if constexpr (C::kSegments) return w.split ^ min(i, splits - 1);
    const int split = w.split + min(i, splits - 1);
    return split < splits ? split : split - splits;
  };
  float2 stats = {kNoPartial, 0.0f};  // lane r holds split r's
  float largest = -INFINITY;
  if (lane < splits) {
    stats = load_cluster_float2(cluster_address(smem + MLA_SMEM(C, stats) + head * 8, lane));
    if constexpr (C::kFindsLargest)
      if (params.p.max_logits)
        largest = load_cluster_float(cluster_address(smem + MLA_SMEM(C, largest) + head * 4, lane));
  }
  const uint32_t mine = smem + MLA_SMEM(C, ring) + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
  float4 sum[kRounds] = {};
  float max = stats.x, total = 0.0f, factor = 0.0f;
#pragma unroll 1
  for (int r = 0; r < splits; r += kSplits) {
    float4 x[kSplits][kRounds];
#pragma unroll
    for (int k = 0; k < kSplits; ++k) {
      const uint32_t theirs = cluster_address(mine, other(r + k));
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        x[k][i] = r + k < splits && i * kWarpSize < num_quads
                      ? load_cluster_float4(theirs + i * kWarpSize * static_cast<int>(sizeof(float4)))
                      : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    if (r == 0) {  // while those are on their way
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
    for (int k = 0; k < kSplits; ++k) {
      const float f = __shfl_sync(kFullWarp, factor, other(r + k));
#pragma unroll
      for (int i = 0; i < kRounds; ++i)
        if constexpr (C::kSegments) x[k][i] = scaled(x[k][i], f);
        else add(sum[i], x[k][i], f);
    }
    if constexpr (C::kSegments)
#pragma unroll
      for (int i = 0; i < kRounds; ++i) add(sum[i], tree_sum<kSplits>([&](int k) { return x[k][i]; }));
  }
  float out_factor = 0.0f;
  if (lane == 0) out_factor = finish_head<typename C::R>(params.p, w, head, max, total, largest);
  out_factor = __shfl_sync(kFullWarp, out_factor, 0);
  uint2* const out = place_of_head(params.p, w, head) + quad % kOutQuads;
#pragma unroll
  for (int i = 0; i < kRounds; ++i)
    if (i * kWarpSize < num_quads) out[i * kWarpSize] = to_bf16<C::kSegments>(sum[i], out_factor);
}

// Eight warps: each CTA of the cluster finishes an equal share of the heads from all CTAs' sums, each of its
// warps an equal share of that: a few heads, or a part of one. Shares are of pieces, a quad for each lane.
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
    const auto merge = [&](auto splits, auto rounds) {
      merge_quads<C, splits(), rounds()>(params, w, shared_address(smem), piece * kWarpSize + lane,
                                         num * kWarpSize, lane);
    };
    if (share >= kOfHead) merge(constant<4>{}, constant<kOfHead>{});
    else merge(constant<8>{}, constant<2>{});
  }
}

}  // namespace mla_fp8::gpu
