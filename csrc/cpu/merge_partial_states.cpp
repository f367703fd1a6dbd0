// merge_partial_states and merge_attention_states on the CPU. The weights of a head come first, then for each
// state a loop over the head, which the compiler vectorises. Bound by memory.
#include "ops/merge_partial_states.h"

#include <algorithm>
#include <vector>

#include "common/parallel.h"

namespace mla_fp8::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Sets weights[i] of a head's state i, which add up to 1, or less with a sink. Returns the lse of all states.
float find_weights(const MergePartialStatesParams& p, int64_t token, int64_t head, float* weights) {
  float largest = -kInf;  // subtracted first, so that nothing overflows
  for (int64_t i = 0; i < p.num_states; ++i) largest = std::max(largest, p.counted_lse_of(i, token, head));
  if (largest == -kInf) {
    std::fill_n(weights, p.num_states, 0.0f);
    return largest;
  }
  float sum = 0;
  for (int64_t i = 0; i < p.num_states; ++i)
    sum += weights[i] = std::exp((p.counted_lse_of(i, token, head) - largest) * p.log_base);
  const float sink = p.attn_sink ? std::exp(p.attn_sink[head] - largest * p.log_base) : 0.0f;
  for (int64_t i = 0; i < p.num_states; ++i) weights[i] /= sum + sink;
  return largest + std::log(sum) / p.log_base;
}

template <Dtype kDtype>
void merge_head(const MergePartialStatesParams& p, int64_t token, int64_t head, const float* weights,
                float* sums) {
  using T = FloatStorage<kDtype>;
  const bool any = std::any_of(weights, weights + p.num_states, [](float w) { return w != 0; });
  std::fill_n(sums, p.head_dim, any ? -0.0f : 0.0f);  // -0 + x is x, bit for bit
  for (int64_t i = 0; i < p.num_states; ++i) {
    if (weights[i] == 0) continue;
    const MergePartialStatesParams::Part& part = i > 0 ? p.others : p.first;
    const T* x = static_cast<const T*>(part.out) + p.out_offset(part, i, token, head);
    for (int64_t d = 0; d < p.head_dim; ++d) sums[d] += to_float<kDtype>(x[d]) * weights[i];
  }
  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  for (int64_t d = 0; d < p.head_dim; ++d) out[d] = from_float<kDtype>(sums[d]);
}

}  // namespace

void merge_partial_states(const MergePartialStatesParams& p) {
  constexpr int64_t kGrain = 32;  // heads a thread takes at least
  with_dtype(p.dtype, [&](auto dtype) {
    parallel_for(p.num_tokens * p.num_heads, kGrain, [&](int64_t begin, int64_t end) {
      std::vector<float> memory(p.num_states + p.head_dim);
      float *weights = memory.data(), *sums = weights + p.num_states;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t token = i / p.num_heads, head = i % p.num_heads;
        p.lse[i] = find_weights(p, token, head, weights);
        merge_head<dtype>(p, token, head, weights, sums);
      }
    });
  });
}

}  // namespace mla_fp8::cpu
