#pragma once
// The parts that CTAs of one query leave for the second kernel, and the end of a head's output.
#include "cuda/device/math.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

struct PortableParams {
  SparseAttentionParams p;
  int splits;
};

// Launches the second kernel, which adds up the parts of all splits.
void launch_merge(const PortableParams& params, gpuStream_t stream);

// For each query, head and split an output, not divided by its sum; behind all outputs (maximum, sum).
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

// The factor of a sum of weighted rows; 0 if nothing is attended to.
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
