#pragma once
// Partial results to one: the warps of a CTA through its shared memory, then the CTAs of a cluster (the
// splits of one row) through distributed shared memory. The order of additions is fixed: results are bitwise
// repeatable.
#include "cuda/device/cluster.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/few_heads/values.cuh"

namespace mla_fp8::gpu {

// (max, sum) of nothing. Far below kNoMax, so that its weight is 0 next to anything.
inline constexpr float kNoPartial = -3e38f;

// The factor of a head's output, from the base and the sum of its weights.
template <class C>
__device__ float output_factor(const SparseAttentionParams& p, int head, float base, float sum) {
  if (head >= p.num_q_heads || sum == 0.0f) return 0.0f;
  const float sink = p.attn_sink ? fast_exp2(p.attn_sink[head] * kLog2E - base + kWeightLog2) : 0.0f;
  return __fdividef(C::R::kUniformFp8 ? *p.scale : 1.0f, sum + sink);
}
__device__ inline void write_head(const SparseAttentionParams& p, int64_t token, int head, float base,
                                  float sum, float largest) {
  if (head >= p.num_q_heads) return;
  const int64_t at = token * p.num_q_heads + head;
  p.lse[at] = sum == 0.0f ? -INFINITY : (log2f(sum) + base - kWeightLog2) * kLn2;
  if (p.max_logits) p.max_logits[at] = largest * kLn2;
}
// Both, of a head of the CTA. `largest` is its largest logit; only prefill needs it.
template <class C>
__device__ float finish_head(const SparseAttentionParams& p, const Work& w, int head_in_cta, float base,
                             float sum, float largest = -INFINITY) {
  write_head(p, w.token, w.first_head + head_in_cta, base, sum, largest);
  return output_factor<C>(p, w.first_head + head_in_cta, base, sum);
}

// The producer warps: the first finds (max, sum) of the CTA while the consumers write their outputs.
template <class C>
__device__ void merge_stats(const TeamParams& params, const Work& w, uint8_t* smem, bool first, int lane) {
  const float2* warp_stats = reinterpret_cast<const float2*>(smem + C::kWarpStats);
  const float* warp_largest = reinterpret_cast<const float*>(smem + C::kWarpLargest);
  block_barrier<C::kThreads>();
  if (first && lane < C::kHeads) {
    float max = kNoPartial, sum = 0.0f, largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) {
      max = fmaxf(max, warp_stats[i * C::kHeads + lane].x);
      largest = fmaxf(largest, warp_largest[i * C::kHeads + lane]);
    }
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) {
      const float2 x = warp_stats[i * C::kHeads + lane];
      sum += x.y * fast_exp2(x.x - max);
    }
    float2 result = {max, sum};
    if (params.num_splits == 1)
      result.y = finish_head<C>(params.p, w, lane, max, sum, largest);  // nobody needs the sum
    reinterpret_cast<float2*>(smem + C::kStats)[lane] = result;
    reinterpret_cast<float*>(smem + C::kLargest)[lane] = largest;
  }
  block_barrier<C::kThreads>();
}

// Consumers: O^T fragments to shared memory as float [team][head][kHeadDimV], brought to the CTA's maximum.
template <class C>
__device__ void write_partials(const Consumer<C>& consumer, uint8_t* smem, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, team = warp / C::kMembers, member = warp % C::kMembers;
  float2* warp_stats = reinterpret_cast<float2*>(smem + C::kWarpStats);
  consumer.write_stats(smem);
  block_barrier<C::kThreads>();
#pragma unroll
  for (int n = 0; n < C::kGroups; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = n * kGroupHeads + 2 * t + c;
      float max = kNoPartial;
#pragma unroll
      for (int i = 0; i < kConsumerWarps; ++i) max = fmaxf(max, warp_stats[i * C::kHeads + head].x);
      factor[c] = fast_exp2(consumer.max_[n][c] - max);
    }
    float* head0 = reinterpret_cast<float*>(smem + C::kRing) +
                   (team * C::kHeads + n * kGroupHeads + 2 * t) * C::kOutPitch +
                   member * C::kChunks * kChunkDims;
    float* head1 = head0 + C::kOutPitch;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&o)[4] = consumer.out_[chunk][i][n];
        const int dim = chunk * kChunkDims + i * 16;
        if (consumer.is_bf16(chunk)) {  // fragment rows g, g + 8 are those dims
          head0[dim + g] = o[0] * factor[0], head0[dim + g + 8] = o[2] * factor[0];
          head1[dim + g] = o[1] * factor[1], head1[dim + g + 8] = o[3] * factor[1];
        } else {  // they are dims 2g, 2g + 1
          *reinterpret_cast<float2*>(head0 + dim + 2 * g) = {o[0] * factor[0], o[2] * factor[0]};
          *reinterpret_cast<float2*>(head1 + dim + 2 * g) = {o[1] * factor[1], o[3] * factor[1]};
        }
      }
  }
  block_barrier<C::kThreads>();
}

// The outputs of a CTA's heads in units of four dims.
inline constexpr int kOutQuads = kHeadDimV / 4;

template <class C>
__device__ void store_out(const SparseAttentionParams& p, const Work& w, int quad, float4 x, float factor) {
  const int head = w.first_head + quad / kOutQuads;
  if (head >= p.num_q_heads) return;
  uint16_t* out = p.out + w.token * p.out_stride_token + head * p.out_stride_head + quad % kOutQuads * 4;
  *reinterpret_cast<uint2*>(out) = {pack_bf16(x.x * factor, x.y * factor),
                                    pack_bf16(x.z * factor, x.w * factor)};
}

__device__ inline void add(float4& a, const float4& b, float factor = 1.0f) {
  a.x = fmaf(b.x, factor, a.x), a.y = fmaf(b.y, factor, a.y);
  a.z = fmaf(b.z, factor, a.z), a.w = fmaf(b.w, factor, a.w);
}

// Consumers: sums the teams. One split: that is the output. Several: the sum replaces the first team's part.
template <class C>
__device__ void merge_teams(const TeamParams& params, const Work& w, uint8_t* smem, int thread) {
  const float2* stats = reinterpret_cast<const float2*>(smem + C::kStats);
  const auto place = [&](int team, int quad) {
    return reinterpret_cast<float4*>(smem + C::kRing) +
           ((team * C::kHeads + quad / kOutQuads) * C::kOutPitch / 4 + quad % kOutQuads);
  };
  constexpr int kAtOnce = 4;  // loads in flight
#pragma unroll
  for (int first = 0; first < C::kHeads * kOutQuads / kConsumerThreads; first += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      x[i] = *place(0, quad);
#pragma unroll
      for (int team = 1; team < C::kTeams; ++team) add(x[i], *place(team, quad));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      if (params.num_splits > 1) *place(0, quad) = x[i];
      else store_out<C>(params.p, w, quad, x[i], stats[quad / kOutQuads].y);
    }
  }
}

// Consumers: each CTA of the cluster finishes an equal share of the row's outputs from all CTAs' sums.
template <class C>
__device__ void merge_splits(const TeamParams& params, const Work& w, uint8_t* smem, int thread) {
  const uint32_t base = shared_address(smem);
  const int splits = params.num_splits, lane = thread % kWarpSize;
  const int share = C::kHeads * kOutQuads / splits,
            first = w.split * share;                        // a multiple of 64: a warp stays
  for (int i = thread; i < share; i += kConsumerThreads) {  // inside one head
    const int quad = first + i, head = quad / kOutQuads;
    float2 stats = {kNoPartial, 0.0f};  // lane r holds split r's
    float largest = -INFINITY;
    if (lane < splits) {
      stats = load_cluster_float2(cluster_address(base + C::kStats + head * 8, lane));
      if (params.p.max_logits)
        largest = load_cluster_float(cluster_address(base + C::kLargest + head * 4, lane));
    }
    const uint32_t mine = base + C::kRing + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float max = stats.x, total = 0.0f, factor = 0.0f;
    constexpr int kAtOnce = 8;
    for (int r = 0; r < splits; r += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        x[k] = r + k < splits ? load_cluster_float4(cluster_address(mine, r + k))
                              : float4{0.0f, 0.0f, 0.0f, 0.0f};
      if (r == 0) {  // while those are on their way
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
          max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
        factor = fast_exp2(stats.x - max);
        total = stats.y * factor;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          total += __shfl_xor_sync(kFullWarp, total, offset);
          largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add(sum, x[k], __shfl_sync(kFullWarp, factor, r + k));
    }
    float out_factor = 0.0f;
    if (lane == 0) out_factor = finish_head<C>(params.p, w, head, max, total, largest);
    store_out<C>(params.p, w, quad, sum, __shfl_sync(kFullWarp, out_factor, 0));
  }
}

}  // namespace mla_fp8::gpu
