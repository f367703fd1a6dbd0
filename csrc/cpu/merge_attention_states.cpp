// merge_attention_states on the CPU: two weights per head, then one loop over the head that the compiler
// vectorises; bound by memory.
#include "ops/merge_attention_states.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/parallel.h"

namespace mla_fp8::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Weights {
  float a, b, lse;
};

// exp(lse_a) and exp(lse_b) over their sum. The larger one is taken out first, so nothing overflows. One lse
// at least is not -inf.
Weights weights(float lse_a, float lse_b) {
  const float max = std::max(lse_a, lse_b);
  const float a = std::exp(lse_a - max), b = std::exp(lse_b - max), sum = a + b;
  return {a / sum, b / sum, max + std::log(sum)};
}

template <Dtype kDtype>
void merge_head(const FloatStorage<kDtype>* a, float lse_a, const FloatStorage<kDtype>* b, float lse_b,
                int64_t head_dim, FloatStorage<kDtype>* out, float* lse) {
  if (lse_a == -kInf || lse_b == -kInf) {  // one side as it is: its bits, and never the other side's NaN
    *lse = lse_a == -kInf ? lse_b : lse_a;
    if (*lse == -kInf) std::fill_n(out, head_dim, FloatStorage<kDtype>{});
    else std::copy_n(lse_a == -kInf ? b : a, head_dim, out);
    return;
  }
  const Weights w = weights(lse_a, lse_b);
  for (int64_t i = 0; i < head_dim; ++i)
    out[i] = from_float<kDtype>(to_float<kDtype>(a[i]) * w.a + to_float<kDtype>(b[i]) * w.b);
  *lse = w.lse;
}

}  // namespace

void merge_attention_states(const MergeAttentionStatesParams& p) {
  constexpr int64_t kGrain = 32;  // heads a thread takes at least
  with_dtype(p.dtype, [&](auto dtype) {
    using T = FloatStorage<dtype>;
    parallel_for(p.num_tokens * p.num_heads, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i / p.num_heads, h = i % p.num_heads;
        merge_head<dtype>(
            static_cast<const T*>(p.out_a) + t * p.out_a_stride_token + h * p.out_a_stride_head, p.lse_a[i],
            static_cast<const T*>(p.out_b) + t * p.out_b_stride_token + h * p.out_b_stride_head, p.lse_b[i],
            p.head_dim, static_cast<T*>(p.out) + t * p.out_stride_token + h * p.out_stride_head, p.lse + i);
      }
    });
  });
}

}  // namespace mla_fp8::cpu
