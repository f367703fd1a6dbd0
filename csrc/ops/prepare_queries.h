#pragma once
#include "common/index_layout.h"
#include "common/stream.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

inline constexpr int kMaxQueryIndexHeads = 64;
inline constexpr int kPeStep = 16;  // q_pe has a multiple of this many dims: two vectors of bf16

// Attention's q_pe and the indexer's queries of the same tokens. A token whose position is outside a table
// becomes zeros in that tensor.
struct PrepareQueriesParams {
  int64_t num_tokens;

  // Attention: bf16 [num_tokens, num_heads, table.dim()], all of it rotated, each dim rounded to bf16.
  int64_t num_heads;  // 0: none
  RopeTable table;
  bool is_neox;          // RoPE pairs (i, i + half); else neighbours
  const uint16_t* q_pe;  // strides in elements
  int64_t q_pe_stride_token, q_pe_stride_head;
  uint16_t* out_q_pe;  // q_pe itself, or memory apart from it
  int64_t out_q_pe_stride_token, out_q_pe_stride_head;

  // Indexer: bf16 [num_tokens, num_index_heads, kIndexDim]; RoPE to bf16, Hadamard to bf16, codes.
  int64_t num_index_heads;  // 0: none
  RopeTable index_table;
  bool index_is_neox;
  int index_first_dim;  // the first rotated dim
  bool hadamard;
  IndexLayoutId layout;  // of the values of out_index_q
  IndexScaling scaling;
  const uint16_t* index_q;
  int64_t index_q_stride_token, index_q_stride_head;
  uint8_t* out_index_q;       // [num_tokens, num_index_heads, value_bytes]
  uint8_t* out_index_scale;   // for e2m1: [num_tokens, num_index_heads, kIndexScaleBytes]
  const void* index_weights;  // [num_tokens, num_index_heads] bf16 or float
  bool weights_are_float;
  int64_t index_weights_stride_token;
  float* out_index_weights;  // index_weights * weight_scale * the scale of e4m3 * head_scale
  float weight_scale, head_scale;
};

namespace cpu {
void prepare_queries(const PrepareQueriesParams& params);
}
namespace gpu {
void prepare_queries(const PrepareQueriesParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
