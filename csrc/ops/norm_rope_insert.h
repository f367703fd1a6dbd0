#pragma once
#include "common/dtype.h"
#include "common/stream.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

// The latents of a layer: RMSNorm to bf16, RoPE to bf16, quantised into slot slot_mapping[i]. If there are
// heads, each query head is normed and rotated likewise into out_q. Slots outside [0, num_slots) are skipped.
// A token whose position is outside the table is skipped too, and its query heads become zeros.
struct NormRopeInsertParams {
  KvLayoutId layout;
  int64_t num_tokens;  // rows of q, kv and positions
  int64_t num_insert;  // entries of slot_mapping; further rows of kv are padding
  int64_t num_slots, page_size;
  RopeTable table;

  const uint16_t* kv;  // [num_tokens, kHeadDimV] bf16; strides in elements
  int64_t kv_stride_token;
  const uint16_t* k_rope;  // [num_tokens, head_dim_qk - kHeadDimV], not normed; null: zeros
  int64_t k_rope_stride_token;
  const void* kv_weight;  // [kHeadDimV] bf16 or float; null: kv is normed already
  bool weight_is_float;
  float eps;
  const void* slot_mapping;  // [num_insert] int64 or int32, slot = page * page_size + row
  bool slots_are_int64;
  const float* scale;  // one value for the layer (uniform FP8 layouts), else null
  uint8_t* kv_cache;   // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;

  // For prepare_keys: the bf16 of which the row was made, shaped like kv and k_rope; null: they are not kept.
  uint16_t *out_kv, *out_k_rope;
  int64_t out_kv_stride_token, out_k_rope_stride_token;

  int64_t num_q_heads, num_heads;  // in, and out: further heads of out_q are zeros; 0: there is no q
  int64_t head_dim;                // of q and out_q; kHeadDimV if they are normed
  bool norm_q;                     // without a weight
  const uint16_t* q;               // [num_tokens, num_q_heads, head_dim] bf16
  int64_t q_stride_token, q_stride_head;
  uint16_t* out_q;  // [num_tokens, num_heads, head_dim]; q itself, or memory apart from it
  int64_t out_q_stride_token, out_q_stride_head;

  // The first dim of a head that the op changes or has to copy.
  int64_t first_dim() const {
    const bool in_place = out_q == q && num_heads == num_q_heads;
    return in_place && !norm_q ? head_dim - table.dim() : 0;
  }
};

namespace cpu {
void norm_rope_insert(const NormRopeInsertParams& params);
}
namespace gpu {
void norm_rope_insert(const NormRopeInsertParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
