// The checks shared by the sparse attention ops, and the ops themselves.
#include "ops/sparse_attention.h"

#include <algorithm>
#include <functional>

#include "ops/shared_keys.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

// Outputs as the caller gave them; max_logits is null for sparse_decode, and where nobody wants them.
struct Outputs {
  const Tensor &out, &lse;
  const Tensor* max_logits;
};

// `indices` has num_rows rows.
KvScope check_scope(const Check& check, const KvCacheView& cache, int64_t page_size, const Tensor& q,
                    const Tensor& indices, const char* indices_name, const OptionalTensor& topk_length,
                    const char* length_name, int64_t num_rows) {
  check(indices, indices_name)
      .same_device_as(q, "q")
      .dtype({ScalarType::Int})
      .shape({num_rows, -1})
      .last_dim_contiguous();
  if (topk_length)
    check(*topk_length, length_name)
        .same_device_as(q, "q")
        .dtype({ScalarType::Int})
        .shape({q.size(0)})
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

// Everything but the scopes.
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

// The second cache, if there is one. With `page_table` its entries are found by that.
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
  const KvCacheView extra =
      check.kv_cache(*extra_kv_cache, "extra_kv_cache", params.extra_layout, *extra_page_size);
  check(*extra_kv_cache, "extra_kv_cache").same_device_as(q, "q");
  params.num_scopes = 2;
  params.has_entry_pages = page_table != nullptr;
  params.scopes[1] =
      check_scope(check, extra, *extra_page_size, q, page_table ? **page_table : *extra_indices,
                  page_table ? "extra_page_table" : "extra_indices", extra_topk_length, "extra_topk_length",
                  page_table ? params.window.num_requests : q.size(0));
  if (!page_table) return;
  KvScope& scope = params.scopes[1];
  params.entry_pages = {scope.indices, scope.indices_stride_token, scope.topk};
  scope.indices = nullptr, scope.indices_stride_token = 0, scope.topk *= *extra_page_size;
}

void add_shared_keys(const Check& check, SparseAttentionParams& params, const Tensor& q, int64_t query_groups,
                     const OptionalTensor& shared_keys) {
  check.that(query_groups >= 1 && query_groups <= kMaxQueryGroup, "query_groups must be in [1, ",
             kMaxQueryGroup, "], got ", query_groups);
  check.that(query_groups > 1 || !shared_keys, "shared_keys must be None without query_groups, got a tensor");
  params.query_groups = query_groups;
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

SparseAttentionParams check_paged(const Check& check, MLA_PAGED_SPARSE_ARGUMENTS, const Outputs& outputs) {
  const KvLayoutId id = check.first_layout(layout);
  SparseAttentionParams params = check_common(check, q, id, sm_scale, attn_sink, outputs);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  check(kv_cache, "kv_cache").same_device_as(q, "q");
  params.scale = check.scale(scale, id, q);
  params.scopes[0] =
      check_scope(check, cache, page_size, q, indices, "indices", topk_length, "topk_length", q.size(0));
  params.num_scopes = 1;

  add_extra_scope(check, params, q, extra_kv_cache, extra_indices, extra_topk_length, extra_page_size,
                  extra_layout);
  add_shared_keys(check, params, q, query_groups, shared_keys);
  return params;
}

// The first scope as a sliding window.
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
      .window_size = std::min<int64_t>(window_size, INT32_MAX),  // positions are less
      .query_start_loc = per_request(query_start_loc, "query_start_loc", num_requests + 1),
      .seq_lens = per_request(seq_lens, "seq_lens", num_requests),
  };
  add_extra_scope(check, params, q, extra_kv_cache, extra_indices, extra_topk_length, extra_page_size,
                  extra_layout, extra_page_table ? &extra_page_table : nullptr);
  return params;
}

// Fresh outputs, once q's shape is known to be usable.
std::pair<Tensor, Tensor> new_outputs(const Check& check, const Tensor& q) {
  check(q, "q").shape({-1, -1, -1});
  return {new_empty(q, {q.size(0), q.size(1), kHeadDimV}, ScalarType::BFloat16),
          new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float)};
}

}  // namespace

namespace {

// Floats in the caller's workspace; checked, and part of the problem from here on.
void use_workspace(const Check& check, const Tensor& q, const Tensor& workspace,
                   SparseAttentionParams& params) {
  check(workspace, "workspace").same_device_as(q, "q").dtype({ScalarType::Float}).contiguous().aligned(16);
  params.workspace = mutable_data<float>(workspace);
  params.workspace_floats = workspace.numel();
}

}  // namespace

#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
namespace {

SparseAttentionParams& params_of(SparseAttentionParams& params) { return params; }
SparseAttentionParams& params_of(gpu::WantedSparseAttention& problem) { return problem.params; }

// `workspace` is the caller's, who may have none, or null: one is allocated if the plan asks for it. A graph
// under capture keeps it; elsewhere whoever gets its memory next uses it behind these kernels in the stream.
template <class Problem>
void launch_sparse(const Check& check, int64_t size(const Problem&), void launch(const Problem&, gpuStream_t),
                   const Tensor& q, Problem problem, const OptionalTensor* workspace) {
  const OnDeviceOf device(q);
  SparseAttentionParams& params = params_of(problem);
  OptionalTensor own;
  if (workspace && *workspace) use_workspace(check, q, **workspace, params);
  if (params.num_tokens == 0) return;
  if (!workspace || (params.workspace && params.batch_invariant)) {
    const int64_t wanted = size(problem);
    if (!workspace && wanted > 0)
      use_workspace(check, q, own.emplace(new_empty(q, {wanted}, ScalarType::Float)), params);
    check.that(params.workspace_floats >= wanted, "workspace must have at least ", wanted,
               " elements with batch_invariant, got ", params.workspace_floats);
  }
  launch(problem, current_stream(q));
}

}  // namespace
#define MLA_LAUNCH_SPARSE(op, check, q, params, workspace) \
  launch_sparse(check, gpu::op##_workspace, gpu::op, q, params, workspace)
#else  // one kernel serves them all
#define MLA_LAUNCH_SPARSE(op, check, q, params, workspace)                     \
  {                                                                            \
    if (workspace && *workspace) use_workspace(check, q, **workspace, params); \
    if (params.num_tokens > 0) MLA_LAUNCH(sparse_attention, q, params);        \
  }
#endif

#define MLA_PAGED_SPARSE_PASS                                                                               \
  q, kv_cache, indices, layout, page_size, sm_scale, topk_length, attn_sink, extra_kv_cache, extra_indices, \
      extra_topk_length, extra_page_size, extra_layout, scale, query_groups, shared_keys

#define MLA_WINDOW_PASS                                                                                    \
  q, kv_cache, page_table, query_start_loc, seq_lens, layout, page_size, window_size, sm_scale, attn_sink, \
      extra_kv_cache, extra_indices, extra_topk_length, extra_page_size, extra_layout, scale,              \
      extra_page_table

// Each op into outputs; without a pointer to a workspace it may allocate one.
namespace {

void decode(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, const Outputs& outputs,
            const OptionalTensor* workspace) {
  const Check check("sparse_decode");
  SparseAttentionParams params = check_paged(check, MLA_PAGED_SPARSE_PASS, outputs);
  params.batch_invariant = batch_invariant;
  MLA_LAUNCH_SPARSE(sparse_decode, check, q, params, workspace);
}

void prefill_paged(MLA_PAGED_SPARSE_ARGUMENTS, const Outputs& outputs, const OptionalTensor* workspace) {
  const Check check("sparse_prefill_paged");
  SparseAttentionParams params = check_paged(check, MLA_PAGED_SPARSE_PASS, outputs);
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

void prefill_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, const Outputs& outputs,
                    const OptionalTensor* workspace) {
  const Check check("sparse_prefill_window");
  SparseAttentionParams params = check_window(check, MLA_WINDOW_PASS, outputs);
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

// bf16 rows are a cache of pages of one row.
void prefill(MLA_SPARSE_PREFILL_ARGUMENTS, const Outputs& outputs, const OptionalTensor* workspace) {
  const Check check("sparse_prefill");
  check(q, "q").shape({-1, -1, -1});
  const int64_t small = kv_layout(KvLayoutId::kBf16D512).head_dim_qk();
  const int64_t large = kv_layout(KvLayoutId::kBf16).head_dim_qk();
  check.that(q.size(2) == small || q.size(2) == large, "q must have a last dimension of ", small, " or ",
             large, ", got ", q.size(2));
  const KvLayoutId id = q.size(2) == small ? KvLayoutId::kBf16D512 : KvLayoutId::kBf16;
  SparseAttentionParams params = check_common(check, q, id, sm_scale, attn_sink, outputs);
  check(kv, "kv")
      .same_device_as(q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({-1, q.size(2)})
      .last_dim_contiguous()
      .aligned(16);
  const KvCacheView rows{mutable_data<uint8_t>(kv), 2 * kv.stride(0), kv.size(0)};
  params.scopes[0] =
      check_scope(check, rows, 1, q, indices, "indices", topk_length, "topk_length", q.size(0));
  params.num_scopes = 1;
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

Tensor new_max_logits(const Tensor& q) { return new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float); }

}  // namespace

int64_t sparse_attention_workspace(int64_t num_tokens, int64_t num_q_heads, int64_t num_sms,
                                   bool batch_invariant) {
  const Check check("sparse_attention_workspace");
  check.at_least(num_tokens, "num_tokens", 0);
  check.that(num_q_heads >= 1 && num_q_heads <= kMaxQHeads, "num_q_heads must be in [1, ", kMaxQHeads,
             "], got ", num_q_heads);
  check.at_least(num_sms, "num_sms", 1);
  return sparse_attention_floats(num_tokens, num_q_heads, num_sms, batch_invariant);
}

void sparse_decode_out(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, Tensor out, Tensor lse,
                       const OptionalTensor& workspace) {
  decode(MLA_PAGED_SPARSE_PASS, batch_invariant, {out, lse, nullptr}, &workspace);
}
TwoTensors sparse_decode(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant) {
  auto [out, lse] = new_outputs(Check("sparse_decode"), q);
  decode(MLA_PAGED_SPARSE_PASS, batch_invariant, {out, lse, nullptr}, nullptr);
  return {out, lse};
}

void sparse_prefill_paged_out(MLA_PAGED_SPARSE_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill_paged(MLA_PAGED_SPARSE_PASS, {out, lse, max_logits ? &*max_logits : nullptr}, &workspace);
}
ThreeTensors sparse_prefill_paged(MLA_PAGED_SPARSE_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill_paged"), q);
  Tensor max_logits = new_max_logits(q);
  prefill_paged(MLA_PAGED_SPARSE_PASS, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

void sparse_prefill_window_out(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill_window(MLA_WINDOW_PASS, {out, lse, max_logits ? &*max_logits : nullptr}, &workspace);
}
ThreeTensors sparse_prefill_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill_window"), q);
  Tensor max_logits = new_max_logits(q);
  prefill_window(MLA_WINDOW_PASS, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

void sparse_prefill_out(MLA_SPARSE_PREFILL_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill(q, kv, indices, sm_scale, attn_sink, topk_length, {out, lse, max_logits ? &*max_logits : nullptr},
          &workspace);
}
ThreeTensors sparse_prefill(MLA_SPARSE_PREFILL_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill"), q);
  Tensor max_logits = new_max_logits(q);
  prefill(q, kv, indices, sm_scale, attn_sink, topk_length, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
namespace {

ThreeTensors run_by(const Check& check, const Tensor& q, const gpu::WantedKernel& wanted, bool max_logits,
                    const std::function<SparseAttentionParams(const Outputs&)>& check_params) {
  auto [out, lse] = new_outputs(check, q);
  Tensor largest = new_empty(q, {max_logits ? q.size(0) : 0, q.size(1)}, ScalarType::Float);
  const SparseAttentionParams params = check_params({out, lse, max_logits ? &largest : nullptr});
  const gpu::WantedSparseAttention problem{params, wanted};
  MLA_LAUNCH_SPARSE(sparse_attention_by, check, q, problem, nullptr);
  return {out, largest, lse};
}

}  // namespace

#define MLA_WANTED_KERNEL \
  {kernel, schedule, static_cast<int>(heads), static_cast<int>(splits), static_cast<int>(producers)}

ThreeTensors _sparse_attention(MLA_PAGED_SPARSE_ARGUMENTS, MLA_KERNEL_ARGUMENTS) {
  const Check check("_sparse_attention");
  return run_by(check, q, MLA_WANTED_KERNEL, max_logits,
                [&](const Outputs& outputs) { return check_paged(check, MLA_PAGED_SPARSE_PASS, outputs); });
}

ThreeTensors _sparse_attention_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, MLA_KERNEL_ARGUMENTS) {
  const Check check("_sparse_attention_window");
  return run_by(check, q, MLA_WANTED_KERNEL, max_logits,
                [&](const Outputs& outputs) { return check_window(check, MLA_WINDOW_PASS, outputs); });
}
#endif

}  // namespace mla_fp8
