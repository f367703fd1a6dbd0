#pragma once
// One problem under three ops: sparse_decode and sparse_prefill_paged read packed pages, sparse_prefill reads
// bf16 rows (a cache of pages of one row).
#include "common/dtype.h"
#include "common/stream.h"

namespace mla_fp8 {

// One cache and the slots of it that each token attends to.
struct KvScope {
  const uint8_t* kv_cache;  // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;
  int64_t num_slots, page_size;
  const int32_t* indices;  // [num_tokens, topk]; outside [0, num_slots): masked
  int64_t indices_stride_token, topk;
  const int32_t* topk_length;  // [num_tokens] or null: only the first n indices count
};

struct SparseAttentionParams {
  KvLayoutId layout;
  int64_t num_tokens;
  int num_q_heads;
  int num_scopes;
  KvScope scopes[2];  // attended to jointly: one softmax
  const uint16_t* q;  // [num_tokens, num_q_heads, head_dim_qk] bf16
  int64_t q_stride_token, q_stride_head;
  const float* scale;      // one value for the layer (uniform FP8 layouts), else null
  const float* attn_sink;  // [num_q_heads] or null: an extra logit without a value
  float sm_scale;
  bool batch_invariant;
  uint16_t* out;  // [num_tokens, num_q_heads, kHeadDimV] bf16; 0 where nothing is attended
  int64_t out_stride_token, out_stride_head;
  float* lse;         // [num_tokens, num_q_heads] contiguous, natural log, sink excluded, -inf if nothing
  float* max_logits;  // the same shape, or null: the largest sm_scale * q.k, -inf if nothing
};

namespace cpu {
void sparse_attention(const SparseAttentionParams& params);
}
namespace gpu {
void sparse_decode(const SparseAttentionParams& params, gpuStream_t stream);
void sparse_prefill(const SparseAttentionParams& params, gpuStream_t stream);
void sparse_attention_portable(const SparseAttentionParams& params, gpuStream_t stream);  // both, on any GPU
}  // namespace gpu

}  // namespace mla_fp8
