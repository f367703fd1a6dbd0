#pragma once
// The problem that paged_attention_ragged and paged_attention_ragged_latent solve.
#include "common/dtype.h"
#include "common/stream.h"

namespace mla_fp8 {

enum class CacheDtype : int32_t { kBf16, kF16, kE4m3fn, kE4m3fnuz };

// Runs fn(constant<dtype>{}).
template <class Fn>
inline void with_cache_dtype(CacheDtype dtype, Fn&& fn) {
  switch (dtype) {
    case CacheDtype::kBf16: return fn(constant<CacheDtype::kBf16>{});
    case CacheDtype::kF16: return fn(constant<CacheDtype::kF16>{});
    case CacheDtype::kE4m3fn: return fn(constant<CacheDtype::kE4m3fn>{});
    case CacheDtype::kE4m3fnuz: return fn(constant<CacheDtype::kE4m3fnuz>{});
  }
}

inline constexpr int kMaxRaggedHeadDim = 256;  // separate K and V caches; both are multiples of 16
inline constexpr int kMaxRaggedSplits = 128;
inline constexpr float kSmallTanh = 0.06f;  // below it tanh is the first terms of its series

// Each request attends to the cached keys of its own pages. The last of its q_len query tokens sees all of
// them, each earlier one a key less. No value of the three index arrays reaches memory outside the tables:
// kv_indptr is clamped to [0, num_kv_indices], kv_last_page_len to [0, page_size].
struct PagedAttentionRaggedParams {
  int64_t num_requests;
  int q_len;  // query tokens of each request
  int num_q_heads, num_kv_heads, head_dim, head_dim_v;
  Dtype dtype;             // q and out: bf16 or fp16
  CacheDtype cache_dtype;  // both caches, and nope in a latent one
  bool is_latent;          // v_cache is k_cache: V is the first head_dim_v elements of the latent
  KvLayoutId layout;       // a latent cache's
  const void* q;           // [num_requests * q_len, num_q_heads, head_dim]; strides in elements
  int64_t q_stride_token, q_stride_head;
  // [num_pages, page_size, num_kv_heads, head_dim or head_dim_v]; strides in bytes
  const uint8_t *k_cache, *v_cache;
  int64_t k_cache_stride_page, k_cache_stride_row, k_cache_stride_head;
  int64_t v_cache_stride_page, v_cache_stride_row, v_cache_stride_head;
  int64_t num_pages, page_size;
  const int32_t* kv_indptr;   // [num_requests + 1]: pages of request r are kv_indices[kv_indptr[r] ..]
  const int32_t* kv_indices;  // [num_kv_indices]; a page outside [0, num_pages) is masked
  int64_t num_kv_indices;
  const int32_t* kv_last_page_len;         // [num_requests]: rows of the last page that count
  const float *k_scale, *v_scale;          // [1] or [num_kv_heads]; null: no scale, or scales in the cache
  int64_t k_scale_stride, v_scale_stride;  // 0 for one value, 1 per head
  float sm_scale;
  float logits_soft_cap;   // 0 = none, else logits = cap * tanh(logits / cap)
  const float* attn_sink;  // [num_q_heads] or null: an extra logit without a value
  void* out;               // [num_requests * q_len, num_q_heads, head_dim_v]
  int64_t out_stride_token, out_stride_head;
  float* lse;  // [num_requests * q_len, num_q_heads] contiguous, sink excluded
  // The keys of each request are cut into num_splits parts, whose results meet in the workspace.
  int num_splits;
  float* workspace;  // ragged_workspace_size() floats, unused with one split

  MLA_HD int64_t num_tokens() const { return num_requests * q_len; }
};

// The pages of a request, and how many keys they hold.
struct RequestPages {
  int64_t first, num_keys;  // first: in kv_indices
};
MLA_HD RequestPages find_pages(const PagedAttentionRaggedParams& p, int64_t request) {
  const auto clamp = [](int64_t x, int64_t limit) { return x < 0 ? 0 : x > limit ? limit : x; };
  const int64_t first = clamp(p.kv_indptr[request], p.num_kv_indices);
  const int64_t pages = clamp(p.kv_indptr[request + 1], p.num_kv_indices) - first;
  const int64_t last_page_len = clamp(p.kv_last_page_len[request], p.page_size);
  return {first, pages > 0 ? (pages - 1) * p.page_size + last_page_len : 0};
}

// Floats: an output and an lse for each split, token and head. Over a latent cache a GPU keeps (maximum,
// sum).
inline int64_t ragged_workspace_size(const PagedAttentionRaggedParams& p) {
  return p.num_splits * p.num_tokens() * p.num_q_heads * (p.head_dim_v + (p.is_latent ? 2 : 1));
}

namespace cpu {
// The number of splits that gives many threads work, whatever the lengths are.
int paged_attention_ragged_splits(const PagedAttentionRaggedParams& params);
void paged_attention_ragged(const PagedAttentionRaggedParams& params);
}  // namespace cpu
namespace gpu {
// The number of splits that fills the GPU, whatever the lengths are; at most kMaxRaggedSplits.
int paged_attention_ragged_splits(const PagedAttentionRaggedParams& params);
void paged_attention_ragged(const PagedAttentionRaggedParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
