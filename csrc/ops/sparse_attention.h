#pragma once
// The problem that all sparse attention ops solve. sparse_decode, sparse_prefill_paged and
// sparse_prefill_window read packed pages; sparse_prefill reads bf16 rows (a cache of pages of one row).
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

// Replaces the first scope's indices: a token attends to the last window_size tokens of its request, up to
// its own position, where the request's pages hold them.
struct SlidingWindow {
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request, num_requests, max_pages, window_size;
  const int32_t* query_start_loc;  // [num_requests + 1], element 0 is subtracted
  const int32_t* seq_lens;         // [num_requests], the queries are the last tokens
};

// The place of a query in its request.
struct WindowQuery {
  int64_t request = -1;   // -1: none
  int64_t position = -1;  // < 0: the request has fewer tokens than queries
  int64_t queries = 0;    // the request's queries from this one on
};
MLA_HD WindowQuery find_query(const SlidingWindow& w, int64_t token) {
  const int64_t request = find_request(w.query_start_loc, w.num_requests, token);
  if (request < 0) return {};
  const int64_t queries = int64_t{w.query_start_loc[request + 1]} - w.query_start_loc[0] - token;
  return {request, w.seq_lens[request] - queries, queries};
}

// Replaces the second scope's indices: a token attends to the first topk_length entries of its request, where
// the request's pages hold them. The window tells which request that is.
struct EntryPages {
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request, max_pages;
};

struct SparseAttentionParams {
  KvLayoutId layout, extra_layout;  // the layouts of the scopes; equal without a second scope
  int64_t num_tokens;
  int num_q_heads;
  int num_scopes;
  KvScope scopes[2];  // attended to jointly: one softmax
  bool is_window;     // the first scope is `window`
  SlidingWindow window;
  bool has_entry_pages;  // windows only: the second scope is `entry_pages`
  EntryPages entry_pages;
  const uint16_t* q;  // [num_tokens, num_q_heads, head_dim_qk] bf16
  int64_t q_stride_token, q_stride_head;
  const float* scale;      // one value for the layer (uniform FP8 layouts), else null
  const float* attn_sink;  // [num_q_heads] or null: an extra logit without a value
  float sm_scale;
  bool batch_invariant;
  // So many consecutive queries have mostly the same keys; 1: no groups. A call that is no window may have
  // window.query_start_loc and window.num_requests alone: a group is then of one request.
  int64_t query_groups;
  const int32_t* shared_keys;  // the groups' lists (ops/shared_keys.h); null: made here if they pay
  uint16_t* out;               // [num_tokens, num_q_heads, kHeadDimV] bf16; 0 where nothing is attended
  int64_t out_stride_token, out_stride_head;
  float* lse;         // [num_tokens, num_q_heads] contiguous, natural log, sink excluded, -inf if nothing
  float* max_logits;  // the same shape, or null: the largest sm_scale * q.k, -inf if nothing
  float* workspace;   // room for parts of queries, or null; its size limits how many parts there are
  int64_t workspace_floats;

  MLA_HD KvPair layouts() const { return {layout, extra_layout}; }

  // The same problem for some of its tokens, without groups: those, and lists, count from the call's first
  // token. Not for windows: a window finds the request of a token by the token's number.
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

inline int64_t num_keys(const SparseAttentionParams& p) {  // keys of a token, at most
  return p.scopes[0].topk + (p.num_scopes > 1 ? p.scopes[1].topk : 0);
}

// The keys of one token in one scope.
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
      // A garbage length costs no time: the keys behind the table's last page, masked anyway, are left out.
      const int64_t known = w.max_pages * scope_.page_size;
      const int64_t end = q.position < known ? q.position + 1 : known;
      length_ = end > first_ ? end - first_ : 0;
    }
  }
  // The listed keys of a token. Only for a scope without pages.
  MLA_HD static Selection of_list(const KvScope& scope, int64_t token) { return {scope, token, false}; }
  MLA_HD int64_t length() const { return length_; }
  MLA_HD int64_t first_position() const { return first_; }    // position in the request, for a window
  MLA_HD const int32_t* entries() const { return indices_; }  // slots; or the pages of the token's request

  // The slot of the i-th key; -1: masked.
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
  const int32_t* indices_ = nullptr;  // slots, or the request's pages
  int64_t max_pages_ = 0, first_ = 0, length_ = 0;
};

// Floats that a CTA leaves in the workspace for each head of a query that CTAs share: (maximum, sum), the
// output, and in some kernels the largest logit.
inline constexpr int kFloatsOfPart = 3 + kHeadDimV;
inline constexpr int64_t kMaxPortableSplits = 64, kMaxInvariantSplits = 8;
// The most floats that a workspace needs. Parts are at most enough for two CTAs of 32 heads on each SM.
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
// Floats that `workspace` must have on the current device. Shapes alone decide; most need none.
int64_t sparse_decode_workspace(const SparseAttentionParams& params);
int64_t sparse_prefill_workspace(const SparseAttentionParams& params);
void sparse_decode(const SparseAttentionParams& params, gpuStream_t stream);
void sparse_prefill(const SparseAttentionParams& params, gpuStream_t stream);

// A kernel that a test asks for: names of kernel and schedule, heads per CTA, CTAs per query, gathering warps
// (0: any number). cuda/sparse_attention/plan.h lists them (kVariants).
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
