#pragma once
// One problem under four ops: sparse_decode, sparse_prefill_paged and sparse_prefill_window read packed
// pages, sparse_prefill reads bf16 rows (a cache of pages of one row).
#include <string>

#include "common/dtype.h"
#include "common/kv_layout.h"
#include "common/requests.h"
#include "common/stream.h"

namespace mla_fp8 {

inline constexpr int kMaxQHeads = 128;  // every kernel is written for no more

// One cache and the slots of it that each token attends to.
struct KvScope {
  const uint8_t* kv_cache;  // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;
  int64_t num_slots, page_size;
  const int32_t* indices;  // [num_tokens, topk]; outside [0, num_slots): masked
  int64_t indices_stride_token, topk;
  const int32_t* topk_length;  // [num_tokens] or null: only the first n indices count
};

// In place of the first scope's indices: each token attends to the window_size last tokens of its request, up
// to its own position, where the request's pages hold them.
struct SlidingWindow {
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request, num_requests, max_pages, window_size;
  const int32_t* query_start_loc;  // [num_requests + 1], element 0 is subtracted
  const int32_t* seq_lens;         // [num_requests], the queries are the last tokens
};

// Where a query stands in its request.
struct WindowQuery {
  int64_t request = -1;   // -1: none
  int64_t position = -1;  // < 0: the request has fewer tokens than queries
  int64_t queries = 0;    // of the request, from this one on
};
MLA_HD WindowQuery find_query(const SlidingWindow& w, int64_t token) {
  const int64_t request = find_request(w.query_start_loc, w.num_requests, token);
  if (request < 0) return {};
  const int64_t queries = int64_t{w.query_start_loc[request + 1]} - w.query_start_loc[0] - token;
  return {request, w.seq_lens[request] - queries, queries};
}

// In place of the second scope's indices: each token attends to the first entries of its request in the
// window's geometry, as many as its topk_length, where the request's pages hold them.
struct EntryPages {
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request, max_pages;
};

struct SparseAttentionParams {
  KvLayoutId layout, extra_layout;  // of the two scopes; without a second one the same
  int64_t num_tokens;
  int num_q_heads;
  int num_scopes;
  KvScope scopes[2];  // attended to jointly: one softmax
  bool is_window;     // the first scope is `window`
  SlidingWindow window;
  bool has_entry_pages;  // of a window: the second scope is `entry_pages`
  EntryPages entry_pages;
  const uint16_t* q;  // [num_tokens, num_q_heads, head_dim_qk] bf16
  int64_t q_stride_token, q_stride_head;
  const float* scale;      // one value for the layer (uniform FP8 layouts), else null
  const float* attn_sink;  // [num_q_heads] or null: an extra logit without a value
  float sm_scale;
  bool batch_invariant;
  int64_t query_groups;        // consecutive queries whose keys are mostly the same; 1: none
  const int32_t* shared_keys;  // their lists (ops/shared_keys.h), or null: made here if it pays
  uint16_t* out;               // [num_tokens, num_q_heads, kHeadDimV] bf16; 0 where nothing is attended
  int64_t out_stride_token, out_stride_head;
  float* lse;         // [num_tokens, num_q_heads] contiguous, natural log, sink excluded, -inf if nothing
  float* max_logits;  // the same shape, or null: the largest sm_scale * q.k, -inf if nothing
  float* workspace;   // where parts of a query's keys meet, or null; not more of them than it has room for
  int64_t workspace_floats;

  MLA_HD KvPair layouts() const { return {layout, extra_layout}; }

  // The same problem for some of its tokens. Those of a window know their requests by their numbers. They go
  // alone: groups, and lists of shared keys, count from the first of all tokens.
  SparseAttentionParams of_tokens(int64_t first, int64_t count) const {
    SparseAttentionParams p = *this;
    p.num_tokens = count;
    p.query_groups = 1, p.shared_keys = nullptr;
    p.q += first * q_stride_token, p.out += first * out_stride_token;
    p.lse += first * num_q_heads;
    if (max_logits) p.max_logits += first * num_q_heads;
    for (int i = 0; i < num_scopes; ++i) {
      p.scopes[i].indices += first * scopes[i].indices_stride_token;
      if (scopes[i].topk_length) p.scopes[i].topk_length += first;
    }
    return p;
  }
};

inline int64_t num_keys(const SparseAttentionParams& p) {  // of a token, at most
  return p.scopes[0].topk + (p.num_scopes > 1 ? p.scopes[1].topk : 0);
}

// What one token attends to in one scope.
class Selection {
 public:
  MLA_HD Selection(const SparseAttentionParams& p, int scope, int64_t token)
      : Selection(p, scope, token, p.is_window ? find_query(p.window, token) : WindowQuery{}) {}
  MLA_HD Selection(const SparseAttentionParams& p, int scope, int64_t token, const WindowQuery& q)
      : Selection(p.scopes[scope], token, scope == 0 ? p.is_window : p.has_entry_pages) {
    if (!is_paged_) return;
    if (q.request >= 0 && scope == 1) {
      indices_ = p.entry_pages.page_table + q.request * p.entry_pages.page_table_stride_request;
      max_pages_ = p.entry_pages.max_pages;
      length_ = listed(token);
    } else if (q.request >= 0 && q.position >= 0) {
      const SlidingWindow& w = p.window;
      indices_ = w.page_table + q.request * w.page_table_stride_request;
      max_pages_ = w.max_pages;
      first_ = q.position < w.window_size ? 0 : q.position - w.window_size + 1;
      // A length that is garbage costs no time: what is behind the table's last page is masked anyway.
      const int64_t known = w.max_pages * scope_.page_size;
      const int64_t end = q.position < known ? q.position + 1 : known;
      length_ = end > first_ ? end - first_ : 0;
    }
  }
  // Where no window is: what is listed for the token.
  MLA_HD static Selection of_list(const KvScope& scope, int64_t token) { return {scope, token, false}; }
  MLA_HD int64_t length() const { return length_; }
  MLA_HD int64_t first_position() const { return first_; }    // of a window
  MLA_HD const int32_t* entries() const { return indices_; }  // slots, or the pages of the token's request

  // -1: masked.
  MLA_HD int64_t slot(int64_t i) const {
    int64_t slot;
    if (is_paged_) {
      const int64_t page = (first_ + i) / scope_.page_size;
      if (page >= max_pages_ || indices_[page] < 0) return -1;
      slot = indices_[page] * scope_.page_size + (first_ + i) % scope_.page_size;
    } else {
      slot = indices_[i];
    }
    return slot >= 0 && slot < scope_.num_slots ? slot : -1;
  }

 private:
  MLA_HD Selection(const KvScope& scope, int64_t token, bool is_paged) : scope_(scope), is_paged_(is_paged) {
    if (is_paged) return;
    indices_ = scope.indices + token * scope.indices_stride_token;
    length_ = listed(token);
  }
  MLA_HD int64_t listed(int64_t token) const {
    const int64_t length = scope_.topk_length ? scope_.topk_length[token] : scope_.topk;
    return length < 0 ? 0 : length < scope_.topk ? length : scope_.topk;
  }

  const KvScope& scope_;
  const bool is_paged_;
  const int32_t* indices_ = nullptr;  // or the request's pages
  int64_t max_pages_ = 0, first_ = 0, length_ = 0;
};

// What CTAs that share a query leave in the workspace for a head and a part: (maximum, sum), output; some the
// largest logit.
inline constexpr int kFloatsOfPart = 3 + kHeadDimV;
inline constexpr int64_t kMaxPortableSplits = 64, kMaxInvariantSplits = 8;
// Floats that a workspace never needs more of: parts are at most enough for two CTAs of 32 heads on each SM.
constexpr int64_t sparse_attention_floats(int64_t num_tokens, int64_t num_q_heads, int64_t num_sms,
                                          bool batch_invariant) {
  const int64_t heads = num_tokens * num_q_heads, filling = 2 * num_sms * 32;
  const int64_t most = heads * (batch_invariant ? kMaxInvariantSplits : kMaxPortableSplits);
  return (batch_invariant || most < filling ? most : filling) * kFloatsOfPart + 2 * num_sms;
}

namespace cpu {
void sparse_attention(const SparseAttentionParams& params);
}
namespace gpu {
// Floats that `workspace` must have on the current device: by shapes alone, 0 for most.
int64_t sparse_decode_workspace(const SparseAttentionParams& params);
int64_t sparse_prefill_workspace(const SparseAttentionParams& params);
void sparse_decode(const SparseAttentionParams& params, gpuStream_t stream);
void sparse_prefill(const SparseAttentionParams& params, gpuStream_t stream);

// For tests: a kernel and schedule by name, heads of a CTA, CTAs of a query, warps that gather (0: as the
// kernel has). cuda/sparse_attention/plan.h has them all.
struct WantedKernel {
  std::string kernel, schedule;
  int heads, splits, producers;
};
struct WantedSparseAttention {
  SparseAttentionParams params;
  WantedKernel wanted;
};
int64_t sparse_attention_by_workspace(const WantedSparseAttention& problem);
void sparse_attention_by(const WantedSparseAttention& problem, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
