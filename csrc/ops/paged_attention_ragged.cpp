// paged_attention_ragged reads separate K and V caches, paged_attention_ragged_latent one latent cache.
#include "ops/paged_attention_ragged.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "registration.h"

namespace mla_fp8 {
namespace {

// The arguments of both ops besides their caches.
struct Ragged {
  const Tensor &q, &kv_indptr, &kv_indices, &kv_last_page_len;
  double sm_scale, logits_soft_cap;
  const OptionalTensor& attn_sink;
  int64_t q_len, num_splits;
  const Tensor &out, &lse;
};

// Checks the dequantisation scale of a cache: FP8 requires one, bf16 and fp16 refuse it.
const float* check_scale(const Check& check, const OptionalTensor& scale, const char* name, bool is_fp8,
                         int64_t num_kv_heads, const Tensor& q) {
  check.that(is_fp8 == scale.has_value(), name, " must be ", is_fp8 ? "given" : "None", " for ",
             is_fp8 ? "an FP8" : "a bf16 or fp16", " cache, got ", is_fp8 ? "None" : "a tensor");
  if (!is_fp8) return nullptr;
  check(*scale, name).same_device_as(q, "q").dtype({ScalarType::Float}).contiguous();
  const int64_t count = scale->numel();
  if (num_kv_heads == 1) check.that(count == 1, name, " must have 1 element, got ", count);
  check.that(count == 1 || count == num_kv_heads, name, " must have 1 element or ", num_kv_heads,
             " (a KV head each), got ", count);
  const float* values = data<float>(*scale);
  if (scale->is_cpu())  // on a GPU reading it would be a sync: documented there as a precondition
    for (int64_t i = 0; i < count; ++i)
      check.that(std::isfinite(values[i]) && values[i] > 0, name, " must be finite and positive, got ",
                 values[i]);
  return values;
}

void check_head_dim(const Check& check, const char* name, int64_t dim) {
  check.that(dim >= 16 && dim <= kMaxRaggedHeadDim && dim % 16 == 0, name,
             " must have a last dimension that is a multiple of 16 up to ", kMaxRaggedHeadDim, ", got ", dim);
}

// Checks everything but the caches, of which `params` has what the heads and the outputs depend on.
void check_ragged(const Check& check, const Ragged& r, PagedAttentionRaggedParams& params) {
  const int64_t num_q_heads = r.q.size(1);
  check.that(num_q_heads >= 1 && num_q_heads <= INT_MAX && num_q_heads % params.num_kv_heads == 0,
             "q must have a multiple of the cache's ", params.num_kv_heads, " heads, got ", num_q_heads);
  check(r.kv_indptr, "kv_indptr").shape({-1});
  const int64_t num_requests = r.kv_indptr.size(0) - 1;
  check.that(num_requests >= 0, "kv_indptr must have at least 1 element, got 0");
  check.within(r.q_len, "q_len", 1, INT_MAX / num_q_heads);
  check.that(r.q.size(0) == num_requests * r.q_len, "q must have ", num_requests * r.q_len,
             " tokens (kv_indptr has ", num_requests, " requests, q_len is ", r.q_len, "), got ",
             r.q.size(0));
  const auto index_array = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name).same_device_as(r.q, "q").dtype({ScalarType::Int}).shape({size}).contiguous();
    return data<int32_t>(t);
  };
  params.num_requests = num_requests;
  params.q_len = static_cast<int>(r.q_len);
  params.num_q_heads = static_cast<int>(num_q_heads);
  params.kv_indptr = index_array(r.kv_indptr, "kv_indptr", num_requests + 1);
  params.kv_indices = index_array(r.kv_indices, "kv_indices", -1);
  params.num_kv_indices = r.kv_indices.size(0);
  params.kv_last_page_len = index_array(r.kv_last_page_len, "kv_last_page_len", num_requests);
  if (r.attn_sink)
    check(*r.attn_sink, "attn_sink")
        .same_device_as(r.q, "q")
        .dtype({ScalarType::Float})
        .shape({num_q_heads})
        .contiguous();
  params.attn_sink = data<float>(r.attn_sink);

  params.sm_scale = check.finite_float(r.sm_scale, "sm_scale");
  check.that(r.logits_soft_cap >= 0, "logits_soft_cap must be at least 0 (which is none), got ",
             r.logits_soft_cap);
  params.logits_soft_cap = check.finite_float(r.logits_soft_cap, "logits_soft_cap");
  check.that(r.num_splits >= 0 && r.num_splits <= kMaxRaggedSplits, "num_splits must be in [0, ",
             kMaxRaggedSplits, "] (0 chooses), got ", r.num_splits);
  params.num_splits = static_cast<int>(r.num_splits);
  check(r.out, "out")
      .same_device_as(r.q, "q")
      .dtype({r.q.scalar_type()})
      .shape({r.q.size(0), num_q_heads, params.head_dim_v})
      .last_dim_contiguous()
      .rows_disjoint()
      .aligned(16);
  check(r.lse, "lse")
      .same_device_as(r.q, "q")
      .dtype({ScalarType::Float})
      .shape({r.q.size(0), num_q_heads})
      .contiguous();
  params.dtype = check(r.q, "q").float_dtype();
  params.q = r.q.const_data_ptr();
  params.q_stride_token = r.q.stride(0);
  params.q_stride_head = r.q.stride(1);
  params.out = mutable_data<void>(r.out);
  params.out_stride_token = r.out.stride(0);
  params.out_stride_head = r.out.stride(1);
  params.lse = mutable_data<float>(r.lse);
}

PagedAttentionRaggedParams check_caches(const Check& check, const Ragged& r, const Tensor& k_cache,
                                        const Tensor& v_cache, int64_t page_size,
                                        const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  check(r.q, "q")
      .dtype({ScalarType::BFloat16, ScalarType::Half})
      .shape({-1, -1, -1})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t head_dim = r.q.size(2);
  check_head_dim(check, "q", head_dim);
  check.within(page_size, "page_size", 1, kMaxPageSize);
  const Arg k = check(k_cache, "k_cache");
  k.same_device_as(r.q, "q")
      .dtype({r.q.scalar_type(), ScalarType::Float8_e4m3fn, ScalarType::Float8_e4m3fnuz})
      .shape({-1, page_size, -1, head_dim})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t num_pages = k_cache.size(0), num_kv_heads = k_cache.size(2);
  check.that(num_kv_heads >= 1 && num_kv_heads <= INT_MAX, "k_cache must have at least 1 head, got ",
             num_kv_heads);
  const Arg v = check(v_cache, "v_cache");
  v.same_device_as(r.q, "q")
      .dtype({k_cache.scalar_type()})
      .shape({num_pages, page_size, num_kv_heads, -1})
      .last_dim_contiguous()
      .aligned(16);
  check_head_dim(check, "v_cache", v_cache.size(3));
  const bool is_fp8 = k.is(ScalarType::Float8_e4m3fn) || k.is(ScalarType::Float8_e4m3fnuz);
  const float* k_scales = check_scale(check, k_scale, "k_scale", is_fp8, num_kv_heads, r.q);
  const float* v_scales = check_scale(check, v_scale, "v_scale", is_fp8, num_kv_heads, r.q);

  PagedAttentionRaggedParams params{
      .num_kv_heads = static_cast<int>(num_kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .head_dim_v = static_cast<int>(v_cache.size(3)),
      .cache_dtype = k.is(ScalarType::Float8_e4m3fn)     ? CacheDtype::kE4m3fn
                     : k.is(ScalarType::Float8_e4m3fnuz) ? CacheDtype::kE4m3fnuz
                     : k.is(ScalarType::Half)            ? CacheDtype::kF16
                                                         : CacheDtype::kBf16,
      .k_cache = data<uint8_t>(k_cache),
      .v_cache = data<uint8_t>(v_cache),
      .k_cache_stride_page = k.stride(0) * k.itemsize(),
      .k_cache_stride_row = k.stride(1) * k.itemsize(),
      .k_cache_stride_head = k.stride(2) * k.itemsize(),
      .v_cache_stride_page = v.stride(0) * v.itemsize(),
      .v_cache_stride_row = v.stride(1) * v.itemsize(),
      .v_cache_stride_head = v.stride(2) * v.itemsize(),
      .num_pages = num_pages,
      .page_size = page_size,
      .k_scale = k_scales,
      .v_scale = v_scales,
      .k_scale_stride = is_fp8 && k_scale->numel() > 1,
      .v_scale_stride = is_fp8 && v_scale->numel() > 1,
  };
  check_ragged(check, r, params);
  return params;
}

PagedAttentionRaggedParams check_latent(const Check& check, const Ragged& r, const Tensor& kv_cache,
                                        int64_t layout, int64_t page_size, const OptionalTensor& scale) {
  const KvLayoutId id = check.first_layout(layout);
  const KvLayout l = kv_layout(id);
  check(r.q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({-1, -1, l.head_dim_qk()})
      .last_dim_contiguous()
      .aligned(16);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  check(kv_cache, "kv_cache").same_device_as(r.q, "q");
  const float* layer_scale = check.scale(scale, id, r.q);
  PagedAttentionRaggedParams params{
      .num_kv_heads = 1,
      .head_dim = l.head_dim_qk(),
      .head_dim_v = kHeadDimV,
      .cache_dtype = l.nope_format == Format::kBf16     ? CacheDtype::kBf16
                     : l.nope_format == Format::kE4m3fn ? CacheDtype::kE4m3fn
                                                        : CacheDtype::kE4m3fnuz,
      .is_latent = true,
      .layout = id,
      .k_cache = cache.data,
      .v_cache = cache.data,
      .k_cache_stride_page = cache.stride_page,
      .k_cache_stride_row = l.token_stride(),
      .v_cache_stride_page = cache.stride_page,
      .v_cache_stride_row = l.token_stride(),
      .num_pages = cache.num_slots / page_size,
      .page_size = page_size,
      .k_scale = layer_scale,
      .v_scale = layer_scale,
  };
  check_ragged(check, r, params);
  return params;
}

// Keeps the caller's num_splits, but replaces 0 by a number that suits the device of q.
void choose_splits([[maybe_unused]] const Tensor& q, PagedAttentionRaggedParams& params) {
#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
  const OnDeviceOf device(q);
  using gpu::paged_attention_ragged_splits;
#else
  using cpu::paged_attention_ragged_splits;
#endif
  if (params.num_splits == 0) params.num_splits = paged_attention_ragged_splits(params);
}

// Takes as many splits as the caller's workspace has room for. An explicit number has to fit.
void use_workspace(const Check& check, const Tensor& q, const OptionalTensor& workspace,
                   PagedAttentionRaggedParams& params) {
  const bool is_explicit = params.num_splits > 0;
  choose_splits(q, params);
  int64_t size = 0;
  if (workspace) {
    check(*workspace, "workspace").same_device_as(q, "q").dtype({ScalarType::Float}).contiguous().aligned(16);
    size = workspace->numel();
    params.workspace = mutable_data<float>(*workspace);
  }
  if (params.num_splits == 1) return;
  const int64_t needed = ragged_workspace_size(params);
  check.that(!is_explicit || size >= needed, "workspace must have at least ", needed, " elements for ",
             params.num_splits, " splits, got ", size);
  if (needed > 0)
    params.num_splits = static_cast<int>(
        std::max<int64_t>(1, std::min<int64_t>(params.num_splits, params.num_splits * size / needed)));
}

// Runs with a new workspace, which lives until the kernels are in the stream.
void run_with_new_workspace(const Tensor& q, PagedAttentionRaggedParams& params) {
  if (params.num_requests == 0) return;
  choose_splits(q, params);
  OptionalTensor workspace;
  if (params.num_splits > 1) {
    workspace = new_empty(q, {ragged_workspace_size(params)}, ScalarType::Float);
    params.workspace = mutable_data<float>(*workspace);
  }
  MLA_LAUNCH(paged_attention_ragged, q, params);
}

}  // namespace

#define MLA_RAGGED_PASS                                                                              \
  {q,          kv_indptr, kv_indices, kv_last_page_len, sm_scale, logits_soft_cap, attn_sink, q_len, \
   num_splits, out,       lse}

void paged_attention_ragged_out(MLA_PAGED_ATTENTION_RAGGED_ARGUMENTS, Tensor out, Tensor lse,
                                OptionalTensor workspace) {
  const Check check("paged_attention_ragged");
  PagedAttentionRaggedParams params =
      check_caches(check, MLA_RAGGED_PASS, k_cache, v_cache, page_size, k_scale, v_scale);
  use_workspace(check, q, workspace, params);
  if (params.num_requests > 0) MLA_LAUNCH(paged_attention_ragged, q, params);
}

TwoTensors paged_attention_ragged(MLA_PAGED_ATTENTION_RAGGED_ARGUMENTS) {
  const Check check("paged_attention_ragged");
  check(q, "q").dtype({ScalarType::BFloat16, ScalarType::Half}).shape({-1, -1, -1});
  check(v_cache, "v_cache").shape({-1, -1, -1, -1});
  Tensor out = new_empty(q, {q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
  Tensor lse = new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float);
  PagedAttentionRaggedParams params =
      check_caches(check, MLA_RAGGED_PASS, k_cache, v_cache, page_size, k_scale, v_scale);
  run_with_new_workspace(q, params);
  return {out, lse};
}

void paged_attention_ragged_latent_out(MLA_PAGED_ATTENTION_RAGGED_LATENT_ARGUMENTS, Tensor out, Tensor lse,
                                       OptionalTensor workspace) {
  const Check check("paged_attention_ragged_latent");
  PagedAttentionRaggedParams params =
      check_latent(check, MLA_RAGGED_PASS, kv_cache, layout, page_size, scale);
  use_workspace(check, q, workspace, params);
  if (params.num_requests > 0) MLA_LAUNCH(paged_attention_ragged, q, params);
}

TwoTensors paged_attention_ragged_latent(MLA_PAGED_ATTENTION_RAGGED_LATENT_ARGUMENTS) {
  const Check check("paged_attention_ragged_latent");
  check(q, "q").dtype({ScalarType::BFloat16}).shape({-1, -1, -1});
  Tensor out = new_empty(q, {q.size(0), q.size(1), kHeadDimV}, ScalarType::BFloat16);
  Tensor lse = new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float);
  PagedAttentionRaggedParams params =
      check_latent(check, MLA_RAGGED_PASS, kv_cache, layout, page_size, scale);
  run_with_new_workspace(q, params);
  return {out, lse};
}

}  // namespace mla_fp8
