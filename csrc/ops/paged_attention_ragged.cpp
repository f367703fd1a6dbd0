#include "ops/paged_attention_ragged.h"

#include <climits>
#include <cmath>

#include "registration.h"

namespace mla_fp8 {
namespace {

// The dequantisation scale of one FP8 cache: required there, refused for bf16 and fp16.
const float* check_scale(const Check& check, const OptionalTensor& scale, const char* name, bool is_fp8,
                         int64_t num_kv_heads, const Tensor& q) {
  check.that(is_fp8 == scale.has_value(), name, " must be ", is_fp8 ? "given" : "None", " for ",
             is_fp8 ? "an FP8" : "a bf16 or fp16", " cache, got ", is_fp8 ? "None" : "a tensor");
  if (!is_fp8) return nullptr;
  check(*scale, name).same_device_as(q, "q").dtype({ScalarType::Float}).contiguous();
  const int64_t count = scale->numel();
  check.that(count == 1 || count == num_kv_heads, name, " must have 1 or ", num_kv_heads,
             " elements (per layer or per KV head), got ", count);
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

}  // namespace

void paged_attention_ragged_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& kv_indptr, const Tensor& kv_indices,
                                const Tensor& kv_last_page_len, double sm_scale, int64_t page_size,
                                const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                double logits_soft_cap, Tensor out, Tensor lse) {
  const Check check("paged_attention_ragged");
  const Arg q_arg = check(q, "q");
  q_arg.dtype({ScalarType::BFloat16, ScalarType::Half}).shape({-1, -1, -1}).last_dim_contiguous().aligned(16);
  const int64_t num_requests = q.size(0), num_q_heads = q.size(1), head_dim = q.size(2);
  check_head_dim(check, "q", head_dim);

  check.at_least(page_size, "page_size", 1);
  const Arg k = check(k_cache, "k_cache");
  k.same_device_as(q, "q")
      .dtype({q.scalar_type(), ScalarType::Float8_e4m3fn, ScalarType::Float8_e4m3fnuz})
      .shape({-1, page_size, -1, head_dim})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t num_pages = k_cache.size(0), num_kv_heads = k_cache.size(2);
  check.that(num_kv_heads >= 1, "k_cache must have at least 1 head, got 0");
  check(v_cache, "v_cache")
      .same_device_as(q, "q")
      .dtype({k_cache.scalar_type()})
      .shape({num_pages, page_size, num_kv_heads, -1})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t head_dim_v = v_cache.size(3);
  check_head_dim(check, "v_cache", head_dim_v);
  check.that(num_q_heads >= 1 && num_q_heads <= INT_MAX && num_q_heads % num_kv_heads == 0,
             "q must have a multiple of the cache's ", num_kv_heads, " heads, got ", num_q_heads);
  const bool is_fp8 = k.is(ScalarType::Float8_e4m3fn) || k.is(ScalarType::Float8_e4m3fnuz);
  const float* k_scales = check_scale(check, k_scale, "k_scale", is_fp8, num_kv_heads, q);
  const float* v_scales = check_scale(check, v_scale, "v_scale", is_fp8, num_kv_heads, q);

  const auto index_array = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name).same_device_as(q, "q").dtype({ScalarType::Int}).shape({size}).contiguous();
    return data<int32_t>(t);
  };
  const int32_t* indptr = index_array(kv_indptr, "kv_indptr", num_requests + 1);
  const int32_t* indices = index_array(kv_indices, "kv_indices", -1);
  const int32_t* last_page_len = index_array(kv_last_page_len, "kv_last_page_len", num_requests);

  const float softmax_scale = static_cast<float>(sm_scale), soft_cap = static_cast<float>(logits_soft_cap);
  check.that(std::isfinite(softmax_scale), "sm_scale must be finite, got ", sm_scale);
  check.that(std::isfinite(soft_cap) && soft_cap >= 0,
             "logits_soft_cap must be finite and at least 0 (which is none), got ", logits_soft_cap);
  check(out, "out")
      .same_device_as(q, "q")
      .dtype({q.scalar_type()})
      .shape({num_requests, num_q_heads, head_dim_v})
      .last_dim_contiguous()
      .rows_disjoint()
      .aligned(16);
  check(lse, "lse")
      .same_device_as(q, "q")
      .dtype({ScalarType::Float})
      .shape({num_requests, num_q_heads})
      .contiguous();
  if (num_requests == 0) return;

  const PagedAttentionRaggedParams params{
      .num_requests = num_requests,
      .num_q_heads = static_cast<int>(num_q_heads),
      .num_kv_heads = static_cast<int>(num_kv_heads),
      .head_dim = static_cast<int>(head_dim),
      .head_dim_v = static_cast<int>(head_dim_v),
      .dtype = q_arg.float_dtype(),
      .cache_dtype = k.is(ScalarType::Float8_e4m3fn)     ? CacheDtype::kE4m3fn
                     : k.is(ScalarType::Float8_e4m3fnuz) ? CacheDtype::kE4m3fnuz
                     : k.is(ScalarType::Half)            ? CacheDtype::kF16
                                                         : CacheDtype::kBf16,
      .q = q.const_data_ptr(),
      .q_stride_request = q.stride(0),
      .q_stride_head = q.stride(1),
      .k_cache = k_cache.const_data_ptr(),
      .v_cache = v_cache.const_data_ptr(),
      .k_cache_stride_page = k_cache.stride(0),
      .k_cache_stride_row = k_cache.stride(1),
      .k_cache_stride_head = k_cache.stride(2),
      .v_cache_stride_page = v_cache.stride(0),
      .v_cache_stride_row = v_cache.stride(1),
      .v_cache_stride_head = v_cache.stride(2),
      .num_pages = num_pages,
      .page_size = page_size,
      .kv_indptr = indptr,
      .kv_indices = indices,
      .num_kv_indices = kv_indices.size(0),
      .kv_last_page_len = last_page_len,
      .k_scale = k_scales,
      .v_scale = v_scales,
      .k_scale_stride = is_fp8 && k_scale->numel() > 1,
      .v_scale_stride = is_fp8 && v_scale->numel() > 1,
      .sm_scale = softmax_scale,
      .logits_soft_cap = soft_cap,
      .out = mutable_data<void>(out),
      .out_stride_request = out.stride(0),
      .out_stride_head = out.stride(1),
      .lse = mutable_data<float>(lse),
  };
  MLA_LAUNCH(paged_attention_ragged, q, params);
}

TwoTensors paged_attention_ragged(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& kv_indptr, const Tensor& kv_indices,
                                  const Tensor& kv_last_page_len, double sm_scale, int64_t page_size,
                                  const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                  double logits_soft_cap) {
  const Check check("paged_attention_ragged");
  check(q, "q").dtype({ScalarType::BFloat16, ScalarType::Half}).shape({-1, -1, -1});
  check(v_cache, "v_cache").shape({-1, -1, -1, -1});
  Tensor out = new_empty(q, {q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
  Tensor lse = new_empty(q, {q.size(0), q.size(1)}, ScalarType::Float);
  paged_attention_ragged_out(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale,
                             page_size, k_scale, v_scale, logits_soft_cap, out, lse);
  return {out, lse};
}

}  // namespace mla_fp8
