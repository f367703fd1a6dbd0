// The sparse attention ops: they check arguments, allocate results and workspaces, and launch.
#include "ops/sparse_attention.h"

#include <functional>

#include "cuda/sparse_attention/plan.h"
#include "ops/sparse_arguments.h"
#include "registration.h"

namespace mla_fp8 {

#if !MLA_FP8_WITH_CUDA && !MLA_FP8_WITH_HIP
// Tells Python what Hopper's plans decide by layouts and heads: lines of a name and its values.
std::string attention_table() {
  std::string table = "tile_rows " + std::to_string(gpu::kTileRows);
  const auto add = [&](const char* name, gpu::Rows rows) {
    table += std::string("\n") + name;
    for (int i = 0; i < kNumKvLayouts; ++i)
      if (const auto id = static_cast<KvLayoutId>(i); rows.has({id, id}))
        table += std::string(" ") + kv_layout(id).name;
  };
  add("any_width", gpu::kTimedFp8Rows);  // batch_invariant: no bit depends on the width of a list of keys
  add("groups", gpu::kListedRows);       // layouts, and heads, of neighbours that share lists of keys
  table += "\ngroup_heads";
  for (int heads = 1; heads <= kMaxQHeads; ++heads)
    if (gpu::fills_tiles(heads)) table += ' ' + std::to_string(heads);
  return table;
}
#endif

namespace {

// Allocates out and lse, after a check that q has three dimensions.
std::pair<Tensor, Tensor> new_outputs(const Check& check, const Tensor& q) {
  check(q, "q").shape({-1, -1, -1});
  return {new_empty(q, {q.size(0), q.size(1), kHeadDimV}, ScalarType::BFloat16),
          new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float)};
}

// Checks a workspace and makes it part of the problem.
void use_workspace(const Check& check, const Tensor& q, const Tensor& workspace,
                   SparseAttentionParams& params) {
  check(workspace, "workspace").same_device_as(q, "q").dtype({ScalarType::Float}).contiguous().aligned(16);
  params.workspace = mutable_data<float>(workspace);
  params.workspace_floats = workspace.numel();
}

// A plan may take other kernels from this number of queries on (cuda/sparse_attention/plan.cpp).
constexpr int64_t kMaxInvariantQueries = int64_t{1} << 20;

void set_batch_invariant(const Check& check, bool batch_invariant, SparseAttentionParams& params) {
  params.batch_invariant = batch_invariant;
  if (!batch_invariant) return;
  check.that(params.num_tokens < kMaxInvariantQueries, "q must have fewer than ", kMaxInvariantQueries,
             " tokens with batch_invariant, got ", params.num_tokens);
  check.that(!params.max_logits, "max_logits must be None with batch_invariant, got a tensor");
}

}  // namespace

#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
namespace {

SparseAttentionParams& params_of(SparseAttentionParams& params) { return params; }
SparseAttentionParams& params_of(gpu::WantedSparseAttention& problem) { return problem.params; }

// Launches with the caller's `workspace`, which may be none. If the pointer is null, a workspace is allocated
// when the plan wants one. A graph under capture keeps its memory. Elsewhere the next owner of that memory
// uses it behind these kernels in the stream.
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
#else  // the CPU has one kernel for all ops
#define MLA_LAUNCH_SPARSE(op, check, q, params, workspace)                     \
  {                                                                            \
    if (workspace && *workspace) use_workspace(check, q, **workspace, params); \
    if (params.num_tokens > 0) MLA_LAUNCH(sparse_attention, q, params);        \
  }
#endif

#define MLA_PAGED_SPARSE_PASS                                                                               \
  q, kv_cache, indices, layout, page_size, sm_scale, topk_length, attn_sink, extra_kv_cache, extra_indices, \
      extra_topk_length, extra_page_size, extra_layout, scale, query_groups, shared_keys, query_start_loc

#define MLA_WINDOW_PASS                                                                                    \
  q, kv_cache, page_table, query_start_loc, seq_lens, layout, page_size, window_size, sm_scale, attn_sink, \
      extra_kv_cache, extra_indices, extra_topk_length, extra_page_size, extra_layout, scale,              \
      extra_page_table

// Each function checks and launches one op. If `workspace` is null, it may allocate one.
namespace {

void decode(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, const Outputs& outputs,
            const OptionalTensor* workspace) {
  const Check check("sparse_decode");
  SparseAttentionParams params = check_paged(check, MLA_PAGED_SPARSE_PASS, outputs);
  set_batch_invariant(check, batch_invariant, params);
  MLA_LAUNCH_SPARSE(sparse_decode, check, q, params, workspace);
}

void prefill_paged(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, const Outputs& outputs,
                   const OptionalTensor* workspace) {
  const Check check("sparse_prefill_paged");
  SparseAttentionParams params = check_paged(check, MLA_PAGED_SPARSE_PASS, outputs);
  set_batch_invariant(check, batch_invariant, params);
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

void prefill_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, bool batch_invariant, const Outputs& outputs,
                    const OptionalTensor* workspace) {
  const Check check("sparse_prefill_window");
  SparseAttentionParams params = check_window(check, MLA_WINDOW_PASS, outputs);
  set_batch_invariant(check, batch_invariant, params);
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

// sparse_prefill reads its bf16 rows as a cache of pages of one row.
void prefill(MLA_SPARSE_PREFILL_ARGUMENTS, bool batch_invariant, const Outputs& outputs,
             const OptionalTensor* workspace) {
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
  const KvCacheView rows{data<uint8_t>(kv), 2 * kv.stride(0), kv.size(0)};
  params.scopes[0] =
      check_scope(check, rows, 1, q, "q", indices, "indices", topk_length, "topk_length", q.size(0));
  params.num_scopes = 1;
  set_batch_invariant(check, batch_invariant, params);
  MLA_LAUNCH_SPARSE(sparse_prefill, check, q, params, workspace);
}

Tensor new_max_logits(const Tensor& q) { return new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float); }

}  // namespace

int64_t sparse_attention_workspace(int64_t num_tokens, int64_t num_q_heads, int64_t num_sms,
                                   bool batch_invariant) {
  const Check check("sparse_attention_workspace");
  check.within(num_tokens, "num_tokens", 0, INT32_MAX);
  check.within(num_q_heads, "num_q_heads", 1, kMaxQHeads);
  check.within(num_sms, "num_sms", 1, kMaxProcessors);
  return sparse_attention_floats(num_tokens, num_q_heads, num_sms, batch_invariant);
}

namespace {

// Returns the caller's workspace, or null where the op may allocate its own.
const OptionalTensor* workspace_of(const OptionalTensor& workspace, bool allocate_workspace) {
  return allocate_workspace && !workspace ? nullptr : &workspace;
}

}  // namespace

void sparse_decode_out(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, Tensor out, Tensor lse,
                       OptionalTensor workspace, bool allocate_workspace) {
  decode(MLA_PAGED_SPARSE_PASS, batch_invariant, {out, lse, nullptr},
         workspace_of(workspace, allocate_workspace));
}
TwoTensors sparse_decode(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant) {
  auto [out, lse] = new_outputs(Check("sparse_decode"), q);
  decode(MLA_PAGED_SPARSE_PASS, batch_invariant, {out, lse, nullptr}, nullptr);
  return {out, lse};
}

void sparse_prefill_paged_out(MLA_PAGED_SPARSE_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill_paged(MLA_PAGED_SPARSE_PASS, batch_invariant, {out, lse, max_logits ? &*max_logits : nullptr},
                workspace_of(workspace, allocate_workspace));
}
ThreeTensors sparse_prefill_paged(MLA_PAGED_SPARSE_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill_paged"), q);
  Tensor max_logits = new_max_logits(q);
  prefill_paged(MLA_PAGED_SPARSE_PASS, false, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

void sparse_prefill_window_out(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill_window(MLA_WINDOW_PASS, batch_invariant, {out, lse, max_logits ? &*max_logits : nullptr},
                 workspace_of(workspace, allocate_workspace));
}
ThreeTensors sparse_prefill_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill_window"), q);
  Tensor max_logits = new_max_logits(q);
  prefill_window(MLA_WINDOW_PASS, false, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

void sparse_prefill_out(MLA_SPARSE_PREFILL_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS) {
  prefill(q, kv, indices, sm_scale, attn_sink, topk_length, batch_invariant,
          {out, lse, max_logits ? &*max_logits : nullptr}, workspace_of(workspace, allocate_workspace));
}
ThreeTensors sparse_prefill(MLA_SPARSE_PREFILL_ARGUMENTS) {
  auto [out, lse] = new_outputs(Check("sparse_prefill"), q);
  Tensor max_logits = new_max_logits(q);
  prefill(q, kv, indices, sm_scale, attn_sink, topk_length, false, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}

#if !MLA_FP8_WITH_HIP
namespace {

// `t` by other sizes and strides, from its first element on, for kernels and callers: it has no version in
// common with `t`.
Tensor reinterpreted(const Tensor& t, Shape sizes, Shape strides) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(
      t.get(), static_cast<int64_t>(sizes.size()), sizes.begin(), strides.begin(), /*more offset*/ 0, &made));
  return Tensor(made);
}

// A tensor [a, b, ...] as [a * b, ...]. Fails where its rows are not all at one distance.
Tensor first_two_as_one(const Check& check, const Tensor& t, const char* name) {
  const Arg arg = check(t, name);
  check.that(arg.dim() == 3 || arg.dim() == 4, name, " must have 3 or 4 dimensions, got ", arg.dim());
  const int64_t many = arg.size(0), each = arg.size(1), step = arg.stride(each == 1 ? 0 : 1);
  check.that(many <= 1 || each == 1 || arg.stride(0) == each * step, name, " must have rows at one distance");
  if (arg.dim() == 3) return reinterpreted(t, {many * each, arg.size(2)}, {step, arg.stride(2)});
  return reinterpreted(t, {many * each, arg.size(2), arg.size(3)}, {step, arg.stride(2), arg.stride(3)});
}

}  // namespace

TwoTensors _flash_mla_decode(MLA_FLASH_MLA_DECODE_ARGUMENTS) {
  const Check check("_flash_mla_decode");
  check(q, "q").shape({-1, -1, -1, -1});
  check(kv_cache, "kv_cache").shape({-1, -1, 1, -1});
  check(indices, "indices").shape({q.size(0), q.size(1), -1});
  std::optional<int64_t> extra_page_size;
  OptionalTensor extra;
  if (extra_kv_cache) {
    check(*extra_kv_cache, "extra_kv_cache").shape({-1, -1, 1, -1});
    extra_page_size = extra_kv_cache->size(1);
  }
  if (extra_indices) {
    check(*extra_indices, "extra_indices").shape({q.size(0), q.size(1), -1});
    extra = first_two_as_one(check, *extra_indices, "extra_indices");
  }
  const int64_t requests = q.size(0), queries = q.size(1), heads = q.size(2), tokens = requests * queries;
  const Tensor out = new_empty(q, {requests, queries, heads, kHeadDimV}, ScalarType::BFloat16);
  const Tensor lse = new_empty(q, {requests, queries, heads}, ScalarType::Float);
  decode(first_two_as_one(check, q, "q"), kv_cache, first_two_as_one(check, indices, "indices"), layout,
         kv_cache.size(1), sm_scale, topk_length, attn_sink, extra_kv_cache, extra, extra_topk_length,
         extra_page_size, extra_layout, {}, query_groups, shared_keys, {}, false,
         {reinterpreted(out, {tokens, heads, kHeadDimV}, {heads * kHeadDimV, kHeadDimV, 1}),
          reinterpreted(lse, {tokens, heads}, {heads, 1}), nullptr},
         nullptr);
  return {out, reinterpreted(lse, {requests, heads, queries}, {queries * heads, 1, heads})};
}

ThreeTensors _flash_mla_prefill(MLA_SPARSE_PREFILL_ARGUMENTS) {
  const Check check("_flash_mla_prefill");
  check(kv, "kv").shape({-1, 1, -1});
  check(indices, "indices").shape({-1, 1, -1});
  auto [out, lse] = new_outputs(check, q);
  Tensor max_logits = new_max_logits(q);
  prefill(q, first_two_as_one(check, kv, "kv"), first_two_as_one(check, indices, "indices"), sm_scale,
          attn_sink, topk_length, false, {out, lse, &max_logits}, nullptr);
  return {out, max_logits, lse};
}
#endif

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
