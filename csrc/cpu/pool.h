#pragma once
// A softmax over a few rows, per dim: the same float32 arithmetic, in the same order, as on the GPUs
// (csrc/cuda/compress_kv/pool.cuh).
#include "cpu/simd.h"

namespace mla_fp8::cpu::MLA_ISA {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kGroup = 8;  // rows that are pooled in order

// A softmax in parts: the largest score, the sum of the weights, the sum of weighted values.
struct Pooled {
  F32 top, sum, value;
};

// 2^((score - top) log2 e); a top of -inf stands for no weight at all.
MLA_SIMD F32 weight_of(F32 score, F32 top) {
  const F32 lowest = set1(-INFINITY);
  const F32 shift = select(less(lowest, top), top, select(less(top, set1(0.0f)), set1(0.0f), top));
  return exp2_nonpositive(mul(sub(score, shift), set1(kLog2E)));
}

MLA_SIMD Pooled join(Pooled a, Pooled b) {
  const F32 top = max(b.top, a.top), of_a = weight_of(a.top, top), of_b = weight_of(b.top, top);
  return {top, fma(b.sum, of_b, mul(a.sum, of_a)), fma(b.value, of_b, mul(a.value, of_a))};
}

// Where a row of the window has its kv, its score and the score's bias.
struct WindowRow {
  const float *kv, *score, *bias;  // bias: or null
};

MLA_SIMD F32 score_of(const WindowRow& row, int d) {
  const F32 score = load(row.score + d);
  return row.bias ? add(score, load(row.bias + d)) : score;
}

// Dims d to d + 15 of up to eight rows, in order.
MLA_SIMD Pooled pool_group(const WindowRow* rows, int count, int d) {
  F32 score[kGroup], top = score_of(rows[0], d);
  for (int j = 0; j < count; ++j) score[j] = score_of(rows[j], d);
  for (int j = 1; j < count; ++j) top = max(score[j], top);
  F32 sum = weight_of(score[0], top), value = mul(sum, load(rows[0].kv + d));
  for (int j = 1; j < count; ++j) {
    const F32 weight = weight_of(score[j], top);
    sum = add(sum, weight);
    value = fma(weight, load(rows[j].kv + d), value);
  }
  return {top, sum, value};
}

}  // namespace mla_fp8::cpu::MLA_ISA
