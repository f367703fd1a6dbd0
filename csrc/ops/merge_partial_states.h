#pragma once
#include <cmath>
#include <limits>

#include "common/dtype.h"
#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// The lse, or -inf if no key was attended to. FlashMLA says +inf then, and NaN counts as that, too.
MLA_HD float counted_lse(float lse) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  return lse < kInf ? lse : -kInf;
}

// A softmax-weighted sum of partial attention results over disjoint keys. A state with weight 0 adds nothing,
// whatever its out holds. If no other state is left, the result is 0, and its lse -inf.
struct MergePartialStatesParams {
  int64_t num_states, num_tokens, num_heads, head_dim;
  Dtype dtype;  // of all tensors that are an out
  // State 0; and states from 1 on, which are one tensor. Strides are in elements.
  struct Part {
    const void* out;  // [num_tokens, num_heads, head_dim]
    int64_t out_stride_token, out_stride_head;
    const float* lse;  // [num_tokens, num_heads]
    int64_t lse_stride_token, lse_stride_head;
  };
  Part first, others;
  int64_t out_stride_state, lse_stride_state;
  const float* attn_sink;  // [num_heads] or null: a natural logarithm, which adds to the sum of weights alone
  float log_base;          // the natural logarithm of lse's base

  void* out;  // [num_tokens, num_heads, head_dim]
  int64_t out_stride_token, out_stride_head;
  float* lse;  // [num_tokens, num_heads] contiguous

  MLA_HD int64_t out_offset(const Part& part, int64_t state, int64_t token, int64_t head) const {
    return (state > 0 ? (state - 1) * out_stride_state : 0) + token * part.out_stride_token +
           head * part.out_stride_head;
  }
  MLA_HD float counted_lse_of(int64_t state, int64_t token, int64_t head) const {
    const Part& part = state > 0 ? others : first;
    return counted_lse(part.lse[(state > 0 ? (state - 1) * lse_stride_state : 0) +
                                token * part.lse_stride_token + head * part.lse_stride_head]);
  }
};

namespace cpu {
void merge_partial_states(const MergePartialStatesParams& params);
}
namespace gpu {
void merge_partial_states(const MergePartialStatesParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
