#include "ops/sparse_arguments.h"

#include <algorithm>

namespace mla_fp8 {

KvScope check_scope(const Check& check, const KvCacheView& cache, int64_t page_size, const Tensor& like,
                    const char* like_name, const Tensor& indices, const char* indices_name,
                    const OptionalTensor& topk_length, const char* length_name, int64_t num_rows) {
  check(indices, indices_name)
      .same_device_as(like, like_name)
      .dtype({ScalarType::Int})
      .shape({num_rows, -1})
      .last_dim_contiguous();
  if (topk_length)
    check(*topk_length, length_name)
        .same_device_as(like, like_name)
        .dtype({ScalarType::Int})
        .shape({like.size(0)})
        .contiguous();
  return {
      .kv_cache = cache.data,
      .kv_cache_stride_page = cache.stride_page,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .indices = data<int32_t>(indices),
      .indices_stride_token = indices.stride(0),
      .topk = indices.size(1),
      .topk_length = data<int32_t>(topk_length),
  };
}

SparseAttentionParams check_common(const Check& check, const Tensor& q, KvLayoutId id, double sm_scale,
                                   const OptionalTensor& attn_sink, const Outputs& outputs) {
  const KvLayout l = kv_layout(id);
  check(q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({-1, -1, l.head_dim_qk()})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t num_tokens = q.size(0), num_heads = q.size(1);
  check.that(num_heads >= 1 && num_heads <= kMaxQHeads, "q must have 1 to ", kMaxQHeads, " heads, got ",
             num_heads);
  if (attn_sink)
    check(*attn_sink, "attn_sink")
        .same_device_as(q, "q")
        .dtype({ScalarType::Float})
        .shape({num_heads})
        .contiguous();
  check(outputs.out, "out")
      .same_device_as(q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, num_heads, kHeadDimV})
      .last_dim_contiguous()
      .rows_disjoint()
      .aligned(16);
  const auto per_head = [&](const Tensor& t, const char* name) {
    check(t, name)
        .same_device_as(q, "q")
        .dtype({ScalarType::Float})
        .shape({num_tokens, num_heads})
        .contiguous();
  };
  per_head(outputs.lse, "lse");
  if (outputs.max_logits) per_head(*outputs.max_logits, "max_logits");
  return {
      .layout = id,
      .extra_layout = id,
      .num_tokens = num_tokens,
      .num_q_heads = static_cast<int>(num_heads),
      .q = data<uint16_t>(q),
      .q_stride_token = q.stride(0),
      .q_stride_head = q.stride(1),
      .attn_sink = data<float>(attn_sink),
      .sm_scale = check.finite_float(sm_scale, "sm_scale"),
      .out = mutable_data<uint16_t>(outputs.out),
      .out_stride_token = outputs.out.stride(0),
      .out_stride_head = outputs.out.stride(1),
      .lse = mutable_data<float>(outputs.lse),
      .max_logits = outputs.max_logits ? mutable_data<float>(*outputs.max_logits) : nullptr,
  };
}

namespace {

// Adds the second cache, if there is one. With `page_table` its entries are found by their request's pages.
void add_extra_scope(const Check& check, SparseAttentionParams& params, const Tensor& q,
                     const OptionalTensor& extra_kv_cache, const OptionalTensor& extra_indices,
                     const OptionalTensor& extra_topk_length, std::optional<int64_t> extra_page_size,
                     std::optional<int64_t> extra_layout, const OptionalTensor* page_table = nullptr) {
  if (page_table) {
    check.that(extra_kv_cache && extra_topk_length && extra_page_size,
               "extra_kv_cache, extra_page_table, extra_page_size and extra_topk_length must be given "
               "together, got ",
               extra_kv_cache ? "a cache, " : "no cache, ",
               extra_page_size ? "a page size, " : "no page size, ",
               extra_topk_length ? "lengths" : "no lengths");
    check.that(!extra_indices, "extra_indices must be None with extra_page_table, got a tensor");
  } else {
    check.that(extra_kv_cache.has_value() == extra_indices.has_value() &&
                   extra_kv_cache.has_value() == extra_page_size.has_value(),
               "extra_kv_cache, extra_indices and extra_page_size must be given together, got ",
               extra_kv_cache ? "a cache, " : "no cache, ", extra_indices ? "indices, " : "no indices, ",
               extra_page_size ? "a page size" : "no page size");
  }
  check.that(extra_kv_cache || !extra_topk_length,
             "extra_topk_length must be None without extra_kv_cache, got a tensor");
  check.that(extra_kv_cache || !extra_layout, "extra_layout must be None without extra_kv_cache, got ",
             extra_layout.value_or(0));
  if (!extra_kv_cache) return;
  if (extra_layout) params.extra_layout = check.extra_layout(*extra_layout, params.layout);
  const KvCacheView extra = check.kv_cache(*extra_kv_cache, "extra_kv_cache", params.extra_layout,
                                           *extra_page_size, "extra_page_size");
  check(*extra_kv_cache, "extra_kv_cache").same_device_as(q, "q");
  params.num_scopes = 2;
  params.has_entry_pages = page_table != nullptr;
  params.scopes[1] =
      check_scope(check, extra, *extra_page_size, q, "q", page_table ? **page_table : *extra_indices,
                  page_table ? "extra_page_table" : "extra_indices", extra_topk_length, "extra_topk_length",
                  page_table ? params.window.num_requests : q.size(0));
  if (!page_table) return;
  KvScope& scope = params.scopes[1];
  params.entry_pages = {scope.indices, scope.indices_stride_token, scope.topk};
  scope.indices = nullptr, scope.indices_stride_token = 0, scope.topk *= *extra_page_size;
}

void add_shared_keys(const Check& check, SparseAttentionParams& params, const Tensor& q, int64_t query_groups,
                     const OptionalTensor& shared_keys, const OptionalTensor& query_start_loc) {
  check.within(query_groups, "query_groups", 1, kMaxQueryGroup);
  check.that(query_groups > 1 || !shared_keys, "shared_keys must be None without query_groups, got a tensor");
  check.that(query_groups > 1 || !query_start_loc,
             "query_start_loc must be None without query_groups, got a tensor");
  set_query_groups(check, params, query_groups, query_start_loc, q, "q");
  if (!shared_keys) return;
  const SharedKeysShape shape(params);
  check(*shared_keys, "shared_keys")
      .same_device_as(q, "q")
      .dtype({ScalarType::Int})
      .shape({shape.num_tiles, shape.words})
      .contiguous()
      .aligned(16);
  params.shared_keys = data<int32_t>(*shared_keys);
}

}  // namespace

void set_query_groups(const Check& check, SparseAttentionParams& params, int64_t query_groups,
                      const OptionalTensor& query_start_loc, const Tensor& like, const char* like_name) {
  params.query_groups = query_groups;
  if (!query_start_loc) return;
  const Arg starts = check(*query_start_loc, "query_start_loc");
  starts.same_device_as(like, like_name).dtype({ScalarType::Int}).shape({-1}).contiguous();
  check.that(starts.size(0) >= 2, "query_start_loc must have at least 2 elements, got ", starts.size(0));
  params.window.query_start_loc = data<int32_t>(*query_start_loc);
  params.window.num_requests = starts.size(0) - 1;
}

SparseAttentionParams check_paged(const Check& check, MLA_PAGED_SPARSE_ARGUMENTS, const Outputs& outputs) {
  const KvLayoutId id = check.first_layout(layout);
  SparseAttentionParams params = check_common(check, q, id, sm_scale, attn_sink, outputs);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  check(kv_cache, "kv_cache").same_device_as(q, "q");
  params.scale = check.scale(scale, id, q);
  params.scopes[0] =
      check_scope(check, cache, page_size, q, "q", indices, "indices", topk_length, "topk_length", q.size(0));
  params.num_scopes = 1;

  add_extra_scope(check, params, q, extra_kv_cache, extra_indices, extra_topk_length, extra_page_size,
                  extra_layout);
  add_shared_keys(check, params, q, query_groups, shared_keys, query_start_loc);
  return params;
}

SparseAttentionParams check_window(const Check& check, MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS,
                                   const Outputs& outputs) {
  const KvLayoutId id = check.first_layout(layout);
  SparseAttentionParams params = check_common(check, q, id, sm_scale, attn_sink, outputs);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  check(kv_cache, "kv_cache").same_device_as(q, "q");
  params.scale = check.scale(scale, id, q);
  check.at_least(window_size, "window_size", 1);
  check(page_table, "page_table")
      .same_device_as(q, "q")
      .dtype({ScalarType::Int})
      .shape({-1, -1})
      .last_dim_contiguous();
  const int64_t num_requests = page_table.size(0);
  const auto per_request = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name).same_device_as(q, "q").dtype({ScalarType::Int}).shape({size}).contiguous();
    return data<int32_t>(t);
  };
  params.scopes[0] = {
      .kv_cache = cache.data,
      .kv_cache_stride_page = cache.stride_page,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .topk = std::min(window_size, page_table.size(1) * page_size),
  };
  params.num_scopes = 1;
  params.is_window = true;
  params.window = {
      .page_table = data<int32_t>(page_table),
      .page_table_stride_request = page_table.stride(0),
      .num_requests = num_requests,
      .max_pages = page_table.size(1),
      .window_size = std::min<int64_t>(window_size, INT32_MAX),  // positions are below that
      .query_start_loc = per_request(query_start_loc, "query_start_loc", num_requests + 1),
      .seq_lens = per_request(seq_lens, "seq_lens", num_requests),
  };
  add_extra_scope(check, params, q, extra_kv_cache, extra_indices, extra_topk_length, extra_page_size,
                  extra_layout, extra_page_table ? &extra_page_table : nullptr);
  return params;
}

}  // namespace mla_fp8
