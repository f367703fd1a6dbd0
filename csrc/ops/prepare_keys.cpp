#include "ops/prepare_keys.h"

#include "ops/index_arguments.h"
#include "ops/norm_rope_checks.h"
#include "ops/rope_checks.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

const Arg& check_norm_weight(const Arg& arg, const Tensor& like, int64_t dim) {
  return arg.same_device_as(like, "kv_cache")
      .dtype({ScalarType::BFloat16, ScalarType::Float})
      .shape({dim})
      .contiguous()
      .aligned(16);
}

struct QaArguments {
  const OptionalTensor &q_a, &weight, &out;
};

QaNormParams check_q_a(const Check& check, const QaArguments& a, int64_t num_tokens, float eps,
                       const Tensor& kv_cache) {
  check.that(a.q_a.has_value() == a.weight.has_value(),
             "q_a_weight must be given with q_a, and not without it");
  check.that(a.q_a.has_value() == a.out.has_value(), "out_q_a must be given with q_a, and not without it");
  if (!a.q_a) return {};
  const Arg q = check(*a.q_a, "q_a");
  q.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, -1})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t dim = q.size(1);
  check.that(dim > 0 && dim <= kMaxQaDim && dim % kQaStep == 0, "q_a must have a multiple of ", kQaStep,
             " columns, at most ", kMaxQaDim, ", got ", dim);
  const Arg weight = check(*a.weight, "q_a_weight");
  check_norm_weight(weight, kv_cache, dim);
  const Arg out = check(*a.out, "out_q_a");
  out.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, dim})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  QaNormParams p{
      .dim = dim,
      .q_a = data<uint16_t>(*a.q_a),
      .q_a_stride_token = q.stride(0),
      .weight = a.weight->const_data_ptr(),
      .weight_is_float = weight.is(ScalarType::Float),
      .eps = eps,
      .out_q_a = mutable_data<uint16_t>(*a.out),
      .out_q_a_stride_token = out.stride(0),
  };
  check.that(p.out_q_a != p.q_a || num_tokens <= 1 || p.q_a_stride_token == p.out_q_a_stride_token,
             "out_q_a must be q_a itself or lie apart from it, got its address with other strides");
  return p;
}

struct IndexKeyArguments {
  const OptionalTensor &k, &weight, &bias, &cos, &sin, &slot_mapping, &cache;
  int64_t layout, page_size;
  double eps;
  bool neox, rope_first, hadamard;
  const std::string& scale_format;
  std::optional<double> amax_floor;
  bool reciprocal;
};

IndexKeyParams check_index_k(const Check& check, const IndexKeyArguments& a, const NormRopeInsertParams& kv,
                             const Tensor& slot_mapping, const Tensor& positions, const Tensor& kv_cache) {
  const bool wanted = a.k.has_value();
  check.that(wanted == a.weight.has_value(), "index_k_weight must be given with index_k, and not without it");
  check.that(wanted == a.cache.has_value(), "index_cache must be given with index_k, and not without it");
  check.that(wanted || (!a.bias && !a.cos && !a.slot_mapping),
             "index_k_bias, index_cos and index_slot_mapping must be None without index_k");
  check.that(a.cos.has_value() == a.sin.has_value(), "index_sin must be given with index_cos");
  if (!wanted) return {};
  const IndexLayoutId id = check_index_layout(check, a.layout);
  const IndexCacheView cache = check_index_cache(check, *a.cache, id, a.page_size);
  check(*a.cache, "index_cache").same_device_as(kv_cache, "kv_cache");
  const Arg k = check(*a.k, "index_k");
  k.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({kv.num_tokens, kIndexDim})
      .last_dim_contiguous()
      .aligned(16);
  const Arg weight = check(*a.weight, "index_k_weight");
  check_norm_weight(weight, kv_cache, kIndexDim);
  if (a.bias)
    check_norm_weight(check(*a.bias, "index_k_bias"), kv_cache, kIndexDim).dtype({a.weight->scalar_type()});
  const RopeTable table =
      a.cos ? check_rope_table(check, *a.cos, *a.sin, positions, kv.num_tokens, kv_cache, "kv_cache")
            : kv.table;
  check_index_rope(check, a.cos ? "index_cos" : "cos", table, a.neox, "index_k");
  const Tensor& slots = a.slot_mapping ? *a.slot_mapping : slot_mapping;
  const Arg slots_arg = check(slots, a.slot_mapping ? "index_slot_mapping" : "slot_mapping");
  slots_arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({-1})
      .contiguous();
  const int64_t num_insert = slots_arg.size(0);
  check.that(num_insert <= kv.num_tokens, "index_slot_mapping must have at most ", kv.num_tokens,
             " entries (the rows of index_k), got ", num_insert);
  const float eps = check.finite_float(a.eps, "index_eps");
  check.that(eps >= 0, "index_eps must not be negative, got ", a.eps);
  return {
      .num_insert = cache.num_pages > 0 ? num_insert : 0,
      .num_slots = cache.num_pages * a.page_size,
      .page_size = a.page_size,
      .table = table,
      .is_neox = a.neox,
      .first_dim = a.rope_first ? 0 : kIndexDim - table.dim(),
      .k = data<uint16_t>(*a.k),
      .k_stride_token = k.stride(0),
      .weight = a.weight->const_data_ptr(),
      .bias = a.bias ? a.bias->const_data_ptr() : nullptr,
      .weight_is_float = weight.is(ScalarType::Float),
      .eps = eps,
      .hadamard = a.hadamard,
      .layout = id,
      .scaling = check_index_scaling(check, id, a.scale_format, a.amax_floor, a.reciprocal),
      .slot_mapping = slots.const_data_ptr(),
      .slots_are_int64 = slots_arg.is(ScalarType::Long),
      .kv_cache = mutable_data<uint8_t>(*a.cache),
      .kv_cache_stride_page = cache.stride_page,
  };
}

// Checks where latents are kept, and returns a row's stride.
int64_t check_kept(const Check& check, const Tensor& out, const char* name, int64_t num_tokens, int64_t dim,
                   const Tensor& kv_cache) {
  const Arg arg = check(out, name);
  arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, dim})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  return arg.stride(0);
}

}  // namespace

void prepare_keys(const Tensor& kv, const OptionalTensor& kv_weight, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const Tensor& slot_mapping, Tensor kv_cache,
                  const OptionalTensor& k_rope, const OptionalTensor& q_a, const OptionalTensor& q_a_weight,
                  const OptionalTensor& index_k, const OptionalTensor& index_k_weight,
                  const OptionalTensor& index_k_bias, const OptionalTensor& index_cos,
                  const OptionalTensor& index_sin, const OptionalTensor& index_slot_mapping,
                  OptionalTensor index_cache, int64_t layout, int64_t page_size, double eps,
                  const OptionalTensor& scale, int64_t index_layout, std::optional<int64_t> index_page_size,
                  double index_eps, bool index_neox, bool index_rope_first, bool hadamard,
                  std::string scale_format, std::optional<double> amax_floor, bool reciprocal,
                  OptionalTensor out_q_a, OptionalTensor out_kv, OptionalTensor out_k_rope) {
  const Check check("prepare_keys");
  PrepareKeysParams p{.latents = check_latents(check, kv, kv_weight, cos, sin, positions, slot_mapping,
                                               kv_cache, layout, page_size, eps, k_rope, scale)};
  NormRopeInsertParams& latents = p.latents;
  p.queries = check_q_a(check, {q_a, q_a_weight, out_q_a}, latents.num_tokens, latents.eps, kv_cache);
  p.index = check_index_k(check,
                          {index_k, index_k_weight, index_k_bias, index_cos, index_sin, index_slot_mapping,
                           index_cache, index_layout, index_page_size.value_or(page_size), index_eps,
                           index_neox, index_rope_first, hadamard, scale_format, amax_floor, reciprocal},
                          latents, slot_mapping, positions, kv_cache);
  check.that(!out_k_rope || (out_kv && k_rope), "out_k_rope must be None without out_kv and k_rope");
  check.that(!out_kv || !k_rope || out_k_rope, "out_k_rope must be given with out_kv and k_rope");
  if (out_kv) {
    latents.out_kv_stride_token =
        check_kept(check, *out_kv, "out_kv", latents.num_tokens, kHeadDimV, kv_cache);
    latents.out_kv = mutable_data<uint16_t>(*out_kv);
  }
  if (out_k_rope) {
    latents.out_k_rope_stride_token =
        check_kept(check, *out_k_rope, "out_k_rope", latents.num_tokens, latents.table.dim(), kv_cache);
    latents.out_k_rope = mutable_data<uint16_t>(*out_k_rope);
  }
  const bool any = latents.num_insert > 0 || out_kv || p.queries.dim > 0 || p.index.num_insert > 0;
  if (latents.num_tokens > 0 && any) MLA_LAUNCH(prepare_keys, kv_cache, p);
}

}  // namespace mla_fp8
