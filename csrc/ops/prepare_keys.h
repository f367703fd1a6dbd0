#pragma once
#include "common/index_layout.h"
#include "ops/norm_rope_insert.h"

namespace mla_fp8 {

inline constexpr int kMaxQaDim = 2048;  // most dims of q_a: a warp holds a row
inline constexpr int kQaStep = 8;

// RMSNorm of the latents of queries (q_a), rounded to bf16.
struct QaNormParams {
  int64_t dim;          // 0: there is no q_a
  const uint16_t* q_a;  // [num_tokens, dim] bf16; strides in elements
  int64_t q_a_stride_token;
  const void* weight;  // [dim] bf16 or float
  bool weight_is_float;
  float eps;
  uint16_t* out_q_a;  // q_a itself, or memory apart from it
  int64_t out_q_a_stride_token;
};

// The indexer's keys: LayerNorm to bf16, RoPE to bf16, Hadamard to bf16, codes into slot slot_mapping[i].
// Slots outside [0, num_slots) are skipped, and so is a token whose position is outside the table.
struct IndexKeyParams {
  int64_t num_insert;  // entries of slot_mapping; 0: there are no keys
  int64_t num_slots, page_size;
  RopeTable table;
  bool is_neox;       // RoPE pairs (i, i + half); else neighbours
  int first_dim;      // the first rotated dim
  const uint16_t* k;  // [num_tokens, kIndexDim] bf16; stride in elements
  int64_t k_stride_token;
  const void *weight, *bias;  // [kIndexDim] bf16 or float, both of one dtype; bias may be null
  bool weight_is_float;
  float eps;
  bool hadamard;
  IndexLayoutId layout;
  IndexScaling scaling;
  const void* slot_mapping;
  bool slots_are_int64;
  uint8_t* kv_cache;  // the cache of index keys
  int64_t kv_cache_stride_page;
};

// All work between a layer's first projections and its second ones.
struct PrepareKeysParams {
  NormRopeInsertParams latents;  // without heads
  QaNormParams queries;
  IndexKeyParams index;
};

namespace cpu {
void prepare_keys(const PrepareKeysParams& params);
}
namespace gpu {
void prepare_keys(const PrepareKeysParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
