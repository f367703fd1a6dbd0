#pragma once
// The lazy softmax of few_heads and many_heads, and how a head ends.
#include <cmath>

#include "cuda/device/convert.cuh"
#include "cuda/device/math.cuh"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

// Weights are 2^(x - base + 7) in f16. The base, and with it O, moves only when a maximum has grown by more
// than 2^8, so a weight is at most 2^15.
inline constexpr float kLazyLog2 = 8.0f;
inline constexpr float kWeightLog2 = 7.0f;
inline constexpr float kNoMax = -1e30f;
// (max, sum) of nothing. Far below kNoMax, so that its weight is 0 next to anything.
inline constexpr float kNoPartial = -3e38f;

// The factor of a head's output, from the base and the sum of its weights.
template <class R>
__device__ float output_factor(const SparseAttentionParams& p, int head, float base, float sum) {
  if (head >= p.num_q_heads || sum == 0.0f) return 0.0f;
  const float sink = p.attn_sink ? fast_exp2(p.attn_sink[head] * kLog2E - base + kWeightLog2) : 0.0f;
  return __fdividef(R::kUniformFp8 ? *p.scale : 1.0f, sum + sink);
}
__device__ inline void write_head(const SparseAttentionParams& p, int64_t token, int head, float base,
                                  float sum, float largest) {
  if (head >= p.num_q_heads) return;
  const int64_t at = token * p.num_q_heads + head;
  p.lse[at] = sum == 0.0f ? -INFINITY : (log2f(sum) + base - kWeightLog2) * kLn2;
  if (p.max_logits) p.max_logits[at] = largest * kLn2;
}
// Both, of a head of an item (its query, its first head). `largest` is its largest logit; only prefill
// needs it.
template <class R, class Item>
__device__ float finish_head(const SparseAttentionParams& p, const Item& item, int head_in_item, float base,
                             float sum, float largest = -INFINITY) {
  write_head(p, item.token, item.first_head + head_in_item, base, sum, largest);
  return output_factor<R>(p, item.first_head + head_in_item, base, sum);
}

// A head's output in units of four dims.
inline constexpr int kOutQuads = kHeadDimV / 4;

// `quad`: counted from the item's first head on.
template <class Item>
__device__ void store_out(const SparseAttentionParams& p, const Item& item, int quad, float4 x,
                          float factor) {
  const int head = item.first_head + quad / kOutQuads;
  if (head >= p.num_q_heads) return;
  uint16_t* out = p.out + item.token * p.out_stride_token + head * p.out_stride_head + quad % kOutQuads * 4;
  *reinterpret_cast<uint2*>(out) = {pack_bf16(x.x * factor, x.y * factor),
                                    pack_bf16(x.z * factor, x.w * factor)};
}

__device__ inline void add(float4& a, const float4& b, float factor = 1.0f) {
  a.x = fmaf(b.x, factor, a.x), a.y = fmaf(b.y, factor, a.y);
  a.z = fmaf(b.z, factor, a.z), a.w = fmaf(b.w, factor, a.w);
}

}  // namespace mla_fp8::gpu
