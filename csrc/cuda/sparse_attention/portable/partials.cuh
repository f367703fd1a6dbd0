#pragma once
// What the CTAs that share a query leave for the second kernel, and how a head's output ends.
#include "cuda/device/math.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

struct PortableParams {
  SparseAttentionParams p;
  int splits;
};

// Adds up what the splits have left.
void launch_merge(const PortableParams& params, gpuStream_t stream);

// The output of each query, head and split, not yet divided by its sum; then the (maximum, sum) of each.
struct Partials {
  float* base;
  int64_t count;
  int splits;
  __device__ explicit Partials(const PortableParams& params)
      : base(params.p.workspace),
        count(params.p.num_tokens * params.p.num_q_heads * params.splits),
        splits(params.splits) {}
  __device__ float2* stats(int64_t query_head, int split) const {
    return reinterpret_cast<float2*>(base + count * kHeadDimV) + query_head * splits + split;
  }
  __device__ float* out(int64_t query_head, int split) const {
    return base + (query_head * splits + split) * kHeadDimV;
  }
};

// What the sum of weighted rows is multiplied by. Nothing attended: 0.
__device__ __forceinline__ float output_factor(const SparseAttentionParams& p, int head, float max,
                                               float total) {
  if (total == 0.0f) return 0.0f;
  return 1.0f / (total + (p.attn_sink ? exp2f(p.attn_sink[head] * kLog2E - max) : 0.0f));
}
__device__ __forceinline__ void store_stats(const SparseAttentionParams& p, int64_t query_head, float max,
                                            float total) {
  p.lse[query_head] = total == 0.0f ? -INFINITY : (max + log2f(total)) * kLn2;
  if (p.max_logits) p.max_logits[query_head] = max * kLn2;
}

}  // namespace mla_fp8::gpu
