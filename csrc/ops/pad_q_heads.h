#pragma once
#include <cstdint>

#include "common/stream.h"

namespace mla_fp8 {

// Copies q into the first num_q_heads heads of out_q and zeros the others. attn_sink is padded with -inf,
// even if there are no tokens.
struct PadQHeadsParams {
  int64_t num_tokens, num_q_heads, num_heads, head_dim;  // num_q_heads in, num_heads out
  const uint16_t* q;  // [num_tokens, num_q_heads, head_dim], 2-byte elements
  int64_t q_stride_token, q_stride_head;
  const float* attn_sink;  // [num_q_heads], or null: all -inf, which is no sink
  uint16_t* out_q;         // [num_tokens, num_heads, head_dim] contiguous
  float* out_attn_sink;    // [num_heads]
};

namespace cpu {
void pad_q_heads(const PadQHeadsParams& params);
}
namespace gpu {
void pad_q_heads(const PadQHeadsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
