// The second kernel of split queries: adds up, in their order, what the splits of a head have left.
#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"

// Not an anonymous namespace: csrc/hip finds kernels by name.
namespace mla_fp8::gpu::portable {

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * kWarpSize, kMergeDims = 4 * kWarpSize;
constexpr int kMergeAtOnce = 8;  // loads of a warp in flight

using Sums = float4[kMergeWarps][kWarpSize];

// A CTA adds up kMergeDims dims of one head of one query, each warp a quarter of the splits.
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ PortableParams params) {
  constexpr int kParts = kHeadDimV / kMergeDims;
  MLA_SHARED(Sums, sums);
  const SparseAttentionParams& p = params.p;
  const Partials partials(params);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t query_head = blockIdx.x / kParts;
  const int dim = blockIdx.x % kParts * kMergeDims + lane * 4;
  wait_for_previous_grid();

  float2 stats[kMaxPortableSplits / kWarpSize];  // lane i: of splits i, i + 32
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxPortableSplits / kWarpSize; ++i) {
    const int split = i * kWarpSize + lane;
    stats[i] = split < params.splits ? *partials.stats(query_head, split) : float2{-INFINITY, 0.0f};
    max = fmaxf(max, stats[i].x);
  }
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2)
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxPortableSplits / kWarpSize; ++i) {
    stats[i].x = stats[i].x == -INFINITY ? 0.0f : exp2f(stats[i].x - max);  // a split's weight from here on
    total += stats[i].x * stats[i].y;
  }
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) total += __shfl_xor_sync(kFullWarp, total, offset);

  const int first = params.splits * warp / kMergeWarps, end = params.splits * (warp + 1) / kMergeWarps;
  float4 sum{};
  for (int at = first; at < end; at += kMergeAtOnce) {
    float4 x[kMergeAtOnce];
    float weight[kMergeAtOnce];
#pragma unroll
    for (int i = 0; i < kMergeAtOnce; ++i) {
      const int split = min(at + i, end - 1);
      weight[i] = __shfl_sync(kFullWarp, split < kWarpSize ? stats[0].x : stats[1].x, split % kWarpSize);
      if (at + i >= end) weight[i] = 0.0f;
      x[i] = weight[i] == 0.0f ? float4{}  // not written, perhaps
                               : *reinterpret_cast<const float4*>(partials.out(query_head, split) + dim);
    }
#pragma unroll
    for (int i = 0; i < kMergeAtOnce; ++i)
      sum.x += weight[i] * x[i].x, sum.y += weight[i] * x[i].y, sum.z += weight[i] * x[i].z,
          sum.w += weight[i] * x[i].w;
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 1; other < kMergeWarps; ++other) {
    const float4 x = sums[other][lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int64_t token = query_head / p.num_q_heads;
  const int head = static_cast<int>(query_head - token * p.num_q_heads);
  const float factor = (p.scale ? *p.scale : 1.0f) * output_factor(p, head, max, total);
  *reinterpret_cast<Words<2>*>(p.out + token * p.out_stride_token + head * p.out_stride_head + dim) = {
      pack_bf16(sum.x * factor, sum.y * factor), pack_bf16(sum.z * factor, sum.w * factor)};
  if (threadIdx.x == 0 && dim == 0) store_stats(p, query_head, max, total);
}

// Of few splits: a warp adds up a head of a query.
constexpr int kFewSplits = 8, kFewAtOnce = 2;

__global__ void __launch_bounds__(kMergeThreads)
    merge_few_kernel(const __grid_constant__ PortableParams params) {
  constexpr int kParts = kHeadDimV / kMergeDims;
  const SparseAttentionParams& p = params.p;
  const Partials partials(params);
  const int lane = threadIdx.x % kWarpSize, own_split = lane % kFewSplits;
  const int64_t query_head = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / kWarpSize;
  wait_for_previous_grid();
  if (query_head >= p.num_tokens * p.num_q_heads) return;

  float2 stats = own_split < params.splits ? *partials.stats(query_head, own_split) : float2{-INFINITY, 0.0f};
  float max = stats.x;
#pragma unroll
  for (int offset = 1; offset < kFewSplits; offset *= 2)
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
  stats.x = stats.x == -INFINITY ? 0.0f : exp2f(stats.x - max);  // a split's weight from here on
  float total = stats.x * stats.y;
#pragma unroll
  for (int offset = 1; offset < kFewSplits; offset *= 2) total += __shfl_xor_sync(kFullWarp, total, offset);

  float4 sum[kParts] = {};
#pragma unroll 1
  for (int at = 0; at < params.splits; at += kFewAtOnce) {
    float4 x[kFewAtOnce][kParts];
    float weight[kFewAtOnce];
#pragma unroll
    for (int i = 0; i < kFewAtOnce; ++i) {
      weight[i] = __shfl_sync(kFullWarp, stats.x, (at + i) % kFewSplits);  // 0 past the last one
      const float* src = partials.out(query_head, at + i) + lane * 4;
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        x[i][part] = weight[i] == 0.0f ? float4{}  // not written, perhaps
                                       : *reinterpret_cast<const float4*>(src + part * kMergeDims);
    }
#pragma unroll
    for (int i = 0; i < kFewAtOnce; ++i)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        sum[part].x += weight[i] * x[i][part].x, sum[part].y += weight[i] * x[i][part].y,
            sum[part].z += weight[i] * x[i][part].z, sum[part].w += weight[i] * x[i][part].w;
  }
  const int64_t token = query_head / p.num_q_heads;
  const int head = static_cast<int>(query_head - token * p.num_q_heads);
  const float factor = (p.scale ? *p.scale : 1.0f) * output_factor(p, head, max, total);
  uint16_t* dst = p.out + token * p.out_stride_token + head * p.out_stride_head + lane * 4;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    *reinterpret_cast<Words<2>*>(dst + part * kMergeDims) = {
        pack_bf16(sum[part].x * factor, sum[part].y * factor),
        pack_bf16(sum[part].z * factor, sum[part].w * factor)};
  if (lane == 0) store_stats(p, query_head, max, total);
}

}  // namespace mla_fp8::gpu::portable

namespace mla_fp8::gpu {

void launch_merge(const PortableParams& params, gpuStream_t stream) {
  const int64_t query_heads = params.p.num_tokens * params.p.num_q_heads;
  if (params.splits <= portable::kFewSplits)
    return launch(portable::merge_few_kernel,
                  {.grid = ceil_div(query_heads, int64_t{portable::kMergeWarps}),
                   .block = portable::kMergeThreads,
                   .stream = stream},
                  params);
  launch(portable::merge_kernel,
         {.grid = query_heads * (kHeadDimV / portable::kMergeDims),
          .block = portable::kMergeThreads,
          .stream = stream},
         params);
}

}  // namespace mla_fp8::gpu
