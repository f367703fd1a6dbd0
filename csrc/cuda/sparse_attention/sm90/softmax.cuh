#pragma once
// The scale of a head's Q, the lazy softmax, and the end of a head.
#include <cmath>

#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// ---- the scale of a head's Q ----------------------------------------------------------------------------

// The power of two that brings a head's |q| below 2^14. Q times it is stored as f16 for e4m3 dims and as bf16
// for the others. `largest`: the bits of the head's largest |q|, a bf16.
__device__ inline float q_factor(uint32_t largest) {
  return power_of_two(14 - max(exponent_above(largest << 16), -100));
}
// The larger magnitude of two pairs of bf16, in each half.
__device__ inline uint32_t larger_magnitudes(uint32_t largest, uint32_t x) {
  return __vmaxu2(largest, x & 0x7fff7fffu);
}
__device__ inline uint32_t larger_of_two(uint32_t x) { return max(x & 0xffff, x >> 16); }
// Scales a pair of Q: to f16 for e4m3 dims, else to bf16.
__device__ inline uint32_t q_pair(uint32_t pair, float factor, bool fp8) {
  const float2 x = unpack<Dtype::kBf16>(pair);
  return fp8 ? pack_f16(x.x * factor, x.y * factor) : pack_bf16(x.x * factor, x.y * factor);
}
// The factor from products with such a Q to logits (log2).
template <class R>
__device__ float logit_scale(const SparseAttentionParams& p, float q_factor) {
  return p.sm_scale * kLog2E * (R::kUniformFp8 ? *p.scale : 1.0f) * reciprocal(q_factor);
}

// ---- the lazy softmax, and the end of a head ------------------------------------------------------------

// A weight is 2^(logit - base + 7), an f16. The base moves, and O with it, only when a logit exceeds it by
// more than 8 (log2). So a weight is at most 2^15.
inline constexpr float kLazyLog2 = 8.0f;
inline constexpr float kWeightLog2 = 7.0f;
inline constexpr float kNoMax = -1e30f;
// The maximum of a part without keys. It lies far below kNoMax: its weight is 0 next to anything.
inline constexpr float kNoPartial = -3e38f;
// The base for a head's largest logit; a whole number in segments.
template <class C>
__device__ float base_for(float largest) {
  return C::kSegments ? rintf(largest) : largest;
}

// The factor of a head's output, from the base and the sum of its weights.
template <class R>
__device__ float output_factor(const SparseAttentionParams& p, int head, float base, float sum) {
  if (head >= p.num_q_heads || sum == 0.0f) return 0.0f;
  const float sink = p.attn_sink ? fast_exp2(p.attn_sink[head] * kLog2E - base + kWeightLog2) : 0.0f;
  return __fdividef(R::kUniformFp8 ? *p.scale : 1.0f, sum + sink);
}
__device__ inline void write_head(const SparseAttentionParams& p, int64_t query, int head, float base,
                                  float sum, float largest) {
  if (head >= p.num_q_heads) return;
  const int64_t at = query * p.num_q_heads + head;
  p.lse[at] = sum == 0.0f ? -INFINITY : (log2f(sum) + base - kWeightLog2) * kLn2;
  if (p.max_logits) p.max_logits[at] = largest * kLn2;
}
// Does both for a head of an item. `largest` is the head's largest logit; only prefill needs it.
template <class R, class Item>
__device__ float finish_head(const SparseAttentionParams& p, const Item& item, int head_in_item, float base,
                             float sum, float largest = -INFINITY) {
  if (!item.has_head(p, head_in_item)) return 0.0f;
  const int head = item.head_of(p, head_in_item);
  write_head(p, item.query_of(p, head_in_item), head, base, sum, largest);
  return output_factor<R>(p, head, base, sum);
}

// A head's output in units of four dims.
inline constexpr int kOutQuads = kHeadDimV / 4;

template <class Item>
__device__ uint2* place_of_head(const SparseAttentionParams& p, const Item& item, int head_in_item) {
  const int64_t query = item.query_of(p, head_in_item);
  const int head = item.head_of(p, head_in_item);
  return reinterpret_cast<uint2*>(p.out + query * p.out_stride_token + head * p.out_stride_head);
}
template <bool kSegments>
__device__ float output_value(float x, float factor) {
  return kSegments && fabsf(x) < 0x1p-100f ? 0.0f : x * factor;
}
template <bool kSegments>
__device__ uint2 to_bf16(float4 x, float factor) {
  const auto value = [&](float y) { return output_value<kSegments>(y, factor); };
  return {pack_bf16(value(x.x), value(x.y)), pack_bf16(value(x.z), value(x.w))};
}

__device__ inline void add(float4& a, const float4& b, float factor = 1.0f) {
  a.x = fmaf(b.x, factor, a.x), a.y = fmaf(b.y, factor, a.y);
  a.z = fmaf(b.z, factor, a.z), a.w = fmaf(b.w, factor, a.w);
}
__device__ inline void add(float& a, float b) { a += b; }
__device__ inline float4 scaled(const float4& x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
// Adds up f(first) to f(first + kCount - 1) as a binary tree does.
template <int kCount, class Fn>
__device__ __forceinline__ auto tree_sum(Fn&& f, int first = 0) {
  if constexpr (kCount == 1) {
    return f(first);
  } else {
    auto sum = tree_sum<kCount / 2>(f, first);
    add(sum, tree_sum<kCount / 2>(f, first + kCount / 2));
    return sum;
  }
}

}  // namespace mla_fp8::gpu
