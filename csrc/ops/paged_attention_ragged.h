#pragma once
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

inline constexpr int kMaxRaggedHeadDim = 576;  // of K and of V; both are multiples of 16

// Each request attends to the cached keys of its own pages. No value of the three index arrays reaches memory
// outside the tables: kv_indptr is clamped to [0, num_kv_indices], kv_last_page_len to [0, page_size].
struct PagedAttentionRaggedParams {
  int64_t num_requests;
  int num_q_heads, num_kv_heads, head_dim, head_dim_v;
  Dtype dtype;             // of q and out: bf16 or fp16
  CacheDtype cache_dtype;  // of both caches
  const void* q;           // [num_requests, num_q_heads, head_dim]; strides in elements
  int64_t q_stride_request, q_stride_head;
  const void *k_cache, *v_cache;  // [num_pages, page_size, num_kv_heads, head_dim or head_dim_v]
  int64_t k_cache_stride_page, k_cache_stride_row, k_cache_stride_head;
  int64_t v_cache_stride_page, v_cache_stride_row, v_cache_stride_head;
  int64_t num_pages, page_size;
  const int32_t* kv_indptr;   // [num_requests + 1]: pages of request r are kv_indices[kv_indptr[r] ..]
  const int32_t* kv_indices;  // [num_kv_indices]; a page outside [0, num_pages) is masked
  int64_t num_kv_indices;
  const int32_t* kv_last_page_len;         // [num_requests]: rows of the last page that count
  const float *k_scale, *v_scale;          // [1] or [num_kv_heads], null for bf16 and fp16 caches
  int64_t k_scale_stride, v_scale_stride;  // 0 for one value, 1 per head
  float sm_scale;
  float logits_soft_cap;  // 0 = none, else logits = cap * tanh(logits / cap)
  void* out;              // [num_requests, num_q_heads, head_dim_v]
  int64_t out_stride_request, out_stride_head;
  float* lse;  // [num_requests, num_q_heads] contiguous
};

namespace cpu {
void paged_attention_ragged(const PagedAttentionRaggedParams& params);
}
namespace gpu {
void paged_attention_ragged(const PagedAttentionRaggedParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
