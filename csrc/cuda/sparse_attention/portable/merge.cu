// The second kernel of split queries: it adds up, in their order, the parts that the splits of a head left.
#include "cuda/device/convert.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"
#include "ops/paged_attention_ragged.h"

// Not an anonymous namespace: csrc/hip finds kernels by name.
namespace mla_fp8::gpu::portable {

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * kWarpSize;
constexpr int kFewSplits = 8;
constexpr int kMergeAtOnce = 8;  // loads of a warp in flight

using Sums = float4[kMergeWarps][kWarpSize];

// kShares 1: a warp adds up all dims of one head of one query. 4: a CTA takes a quarter of them, each warp a
// quarter of the splits. 4 CTAs an SM: with fewer registers loads would wait for each other.
template <int kShares, int kMostSplits>
__global__ void __launch_bounds__(kMergeThreads, 4)
    merge_kernel(const __grid_constant__ PortableParams params) {
  constexpr int kDims = kHeadDimV / kShares, kPieces = kDims / 4 / kWarpSize;  // pieces: a lane's, of 4 dims
  constexpr int kAtOnce = kMergeAtOnce / kPieces, kStats = ceil_div(kMostSplits, kWarpSize);
  const SparseAttentionParams& p = params.p;
  const Partials partials(params);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, share = warp % kShares;
  const int64_t item = (int64_t{blockIdx.x} * kMergeWarps + warp) / kShares, query_head = item / kShares;
  const int first_dim = static_cast<int>(item % kShares) * kDims + lane * 4;
  wait_for_previous_grid();
  if (kShares == 1 && query_head >= p.num_tokens * p.num_q_heads) return;

  float2 stats[kStats];  // lane i has splits i, i + 32, ...
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kStats; ++i) {
    const int split = i * kWarpSize + lane;
    stats[i] = split < params.splits ? *partials.stats(query_head, split) : float2{-INFINITY, 0.0f};
    max = fmaxf(max, stats[i].x);
  }
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2)
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kStats; ++i) {
    stats[i].x = stats[i].x == -INFINITY ? 0.0f : exp2f(stats[i].x - max);  // a split's weight from here on
    total += stats[i].x * stats[i].y;
  }
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) total += __shfl_xor_sync(kFullWarp, total, offset);

  const int first = params.splits * share / kShares, end = params.splits * (share + 1) / kShares;
  float4 sum[kPieces] = {};
#pragma unroll 1
  for (int at = first; at < end; at += kAtOnce) {
    float4 x[kAtOnce][kPieces];
    float weight[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int split = min(at + i, end - 1);
      float of_lane = stats[0].x;
#pragma unroll
      for (int part = 1; part < kStats; ++part)
        if (split >= part * kWarpSize) of_lane = stats[part].x;
      weight[i] = __shfl_sync(kFullWarp, of_lane, split % kWarpSize);
      if (at + i >= end) weight[i] = 0.0f;
      const float* const src = partials.out(query_head, split) + first_dim;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece)
        x[i][piece] = weight[i] == 0.0f ? float4{}  // not written, perhaps
                                        : *reinterpret_cast<const float4*>(src + piece * 4 * kWarpSize);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        float4& s = sum[piece];
        const float4& y = x[i][piece];
        s.x += weight[i] * y.x, s.y += weight[i] * y.y, s.z += weight[i] * y.z, s.w += weight[i] * y.w;
      }
  }
  if constexpr (kShares > 1) {
    MLA_SHARED(Sums, sums);
    sums[warp][lane] = sum[0];
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 1; other < kMergeWarps; ++other) {
      const float4 x = sums[other][lane];
      sum[0].x += x.x, sum[0].y += x.y, sum[0].z += x.z, sum[0].w += x.w;
    }
  }
  const int64_t token = query_head / p.num_q_heads;
  const int head = static_cast<int>(query_head - token * p.num_q_heads);
  const float factor = (p.scale ? *p.scale : 1.0f) * output_factor(p, head, max, total);
  uint16_t* const dst = p.out + token * p.out_stride_token + head * p.out_stride_head + first_dim;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece)
    *reinterpret_cast<Words<2>*>(dst + piece * 4 * kWarpSize) = {
        pack_bf16(sum[piece].x * factor, sum[piece].y * factor),
        pack_bf16(sum[piece].z * factor, sum[piece].w * factor)};
  if (first_dim == 0) store_stats(p, query_head, max, total);
}

}  // namespace mla_fp8::gpu::portable

namespace mla_fp8::gpu {

void launch_merge(const PortableParams& params, gpuStream_t stream) {
  using namespace portable;
  const auto merge = [&](auto kernel, int shares) {
    const int64_t warps = params.p.num_tokens * params.p.num_q_heads * shares * shares;
    launch(kernel, {.grid = ceil_div(warps, int64_t{kMergeWarps}), .block = kMergeThreads, .stream = stream},
           params);
  };
  if constexpr (MLA_FP8_PTX)  // elsewhere another kernel is for ragged attention
    if (params.splits > kMaxPortableSplits) return merge(merge_kernel<4, kMaxRaggedSplits>, 4);
  if (params.splits <= kFewSplits) merge(merge_kernel<1, kFewSplits>, 1);
  else merge(merge_kernel<4, kMaxPortableSplits>, 4);
}

}  // namespace mla_fp8::gpu
