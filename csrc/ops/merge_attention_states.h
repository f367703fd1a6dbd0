#pragma once
#include "common/dtype.h"
#include "common/stream.h"

namespace mla_fp8 {

// Softmax-weighted sum of two partial attention results over disjoint keys. A side whose lse is -inf
// contributes nothing, whatever its out holds; both -inf give 0 and -inf.
struct MergeAttentionStatesParams {
  int64_t num_tokens, num_heads, head_dim;
  Dtype dtype;                // of out_a, out_b and out
  const void *out_a, *out_b;  // [num_tokens, num_heads, head_dim]; strides in elements
  int64_t out_a_stride_token, out_a_stride_head, out_b_stride_token, out_b_stride_head;
  const float *lse_a, *lse_b;  // [num_tokens, num_heads] contiguous
  void* out;                   // [num_tokens, num_heads, head_dim]
  int64_t out_stride_token, out_stride_head;
  float* lse;  // [num_tokens, num_heads] contiguous
};

namespace cpu {
void merge_attention_states(const MergeAttentionStatesParams& params);
}
namespace gpu {
void merge_attention_states(const MergeAttentionStatesParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
