#pragma once
// The checks that the sparse attention ops share.
#include "ops/shared_keys.h"
#include "ops/sparse_attention.h"
#include "registration.h"

namespace mla_fp8 {

// The caller's outputs. max_logits is null in sparse_decode, and where the caller does not want it.
struct Outputs {
  const Tensor &out, &lse;
  const Tensor* max_logits;
};

// Checks one scope. `indices` has num_rows rows. `like` has a row for each token, and gives the device.
KvScope check_scope(const Check& check, const KvCacheView& cache, int64_t page_size, const Tensor& like,
                    const char* like_name, const Tensor& indices, const char* indices_name,
                    const OptionalTensor& topk_length, const char* length_name, int64_t num_rows);
// Checks everything but the scopes.
SparseAttentionParams check_common(const Check& check, const Tensor& q, KvLayoutId id, double sm_scale,
                                   const OptionalTensor& attn_sink, const Outputs& outputs);
// set_query_groups() checks and sets what says which queries are a group.
void set_query_groups(const Check& check, SparseAttentionParams& params, int64_t query_groups,
                      const OptionalTensor& query_start_loc, const Tensor& like, const char* like_name);
SparseAttentionParams check_paged(const Check& check, MLA_PAGED_SPARSE_ARGUMENTS, const Outputs& outputs);
// Checks a call whose first scope is a sliding window.
SparseAttentionParams check_window(const Check& check, MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS,
                                   const Outputs& outputs);

}  // namespace mla_fp8
