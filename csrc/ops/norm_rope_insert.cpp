// k_norm_rope_insert and qk_norm_rope_insert share their checks and their kernel.
#include "ops/norm_rope_checks.h"
#include "ops/rope_checks.h"

namespace mla_fp8 {

NormRopeInsertParams check_latents(const Check& check, MLA_K_NORM_ROPE_INSERT_ARGUMENTS) {
  const KvLayoutId id = check.layout(layout);
  const KvLayout l = kv_layout(id);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  const int64_t extra_dim = l.head_dim_qk() - kHeadDimV;  // dims of k_rope

  const Arg kv_arg = check(kv, "kv");
  kv_arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({-1, kHeadDimV})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t num_tokens = kv_arg.size(0);
  if (kv_weight)
    check(*kv_weight, "kv_weight")
        .same_device_as(kv_cache, "kv_cache")
        .dtype({ScalarType::BFloat16, ScalarType::Float})
        .shape({kHeadDimV})
        .contiguous()
        .aligned(16);
  const RopeTable table = check_rope_table(check, cos, sin, positions, num_tokens, kv_cache, "kv_cache");
  check.that(!k_rope || extra_dim > 0, "k_rope must be None for layout ", l.name, ", got a tensor");
  if (k_rope) {
    check(*k_rope, "k_rope")
        .same_device_as(kv_cache, "kv_cache")
        .dtype({ScalarType::BFloat16})
        .shape({num_tokens, extra_dim})
        .last_dim_contiguous()
        .aligned(16);
    check.that(table.dim() == extra_dim, "cos must have ", extra_dim / 2,
               " columns (all of k_rope is rotated), got ", table.half);
  } else if (extra_dim > 0) {  // latents of a model without RoPE, in rows that have room for it
    check.that(table.half == 0, "k_rope must be given for layout ", l.name,
               " if anything is rotated, got None and ", table.half, " columns of cos");
  }
  const Arg slots = check(slot_mapping, "slot_mapping");
  slots.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({-1})
      .contiguous();
  const int64_t num_insert = slots.size(0);
  check.that(num_insert <= num_tokens, "slot_mapping must have at most ", num_tokens,
             " entries (the rows of kv), got ", num_insert);
  const float eps_float = check.finite_float(eps, "eps");
  check.that(eps_float >= 0, "eps must not be negative, got ", eps);
  const float* layer_scale = check.scale(scale, id, kv_cache);
  return {
      .layout = id,
      .num_tokens = num_tokens,
      .num_insert = cache.num_slots > 0 ? num_insert : 0,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .table = table,
      .kv = data<uint16_t>(kv),
      .kv_stride_token = kv_arg.stride(0),
      .k_rope = data<uint16_t>(k_rope),
      .k_rope_stride_token = k_rope ? k_rope->stride(0) : 0,
      .kv_weight = kv_weight ? kv_weight->const_data_ptr() : nullptr,
      .weight_is_float = kv_weight && check(*kv_weight, "kv_weight").is(ScalarType::Float),
      .eps = eps_float,
      .slot_mapping = slot_mapping.const_data_ptr(),
      .slots_are_int64 = slots.is(ScalarType::Long),
      .scale = layer_scale,
      .kv_cache = mutable_data<uint8_t>(kv_cache),
      .kv_cache_stride_page = cache.stride_page,
  };
}

namespace {

// Checks that there is a latent for each query. Errors name kv, not positions: each query has a position.
void check_rows(const Check& check, const Tensor& q, const Tensor& kv, const Tensor& positions) {
  const Arg queries = check(q, "q"), latents = check(kv, "kv"), at = check(positions, "positions");
  if (queries.dim() == 3 && at.dim() == 1 && latents.dim() == 2 && queries.size(0) == at.size(0) &&
      latents.size(0) != at.size(0))
    latents.shape({at.size(0), kHeadDimV});
}

void check_q(const Check& check, const Tensor& q, const Tensor& kv_cache, bool norm_q,
             std::optional<int64_t> num_heads, NormRopeInsertParams& params) {
  const Arg arg = check(q, "q");
  arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({params.num_tokens, -1, -1})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t dim = arg.size(2);
  if (norm_q)
    check.that(dim == kHeadDimV, "q must have a last dimension of ", kHeadDimV, " to be normed, got ", dim);
  else if (dim % kRopeStep != 0 || dim < params.table.dim())
    arg.fail("must have a multiple of ", kRopeStep, " as its last dimension, at least ", params.table.dim(),
             " (what is rotated), got ", dim);
  const int64_t heads = num_heads.value_or(arg.size(1));
  check_head_values(arg, heads);
  check.that(heads >= arg.size(1), "num_heads must be at least ", arg.size(1), " (the heads of q), got ",
             heads);
  params.num_q_heads = arg.size(1);
  params.num_heads = heads;
  params.head_dim = dim;
  params.norm_q = norm_q;
  params.q = data<uint16_t>(q);
  params.q_stride_token = arg.stride(0);
  params.q_stride_head = arg.stride(1);
}

void check_out_q(const Check& check, const Tensor& out_q, const Tensor& kv_cache,
                 NormRopeInsertParams& params) {
  const Arg out = check(out_q, "out_q");
  out.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({params.num_tokens, params.num_heads, params.head_dim})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  params.out_q = mutable_data<uint16_t>(out_q);
  params.out_q_stride_token = out.stride(0);
  params.out_q_stride_head = out.stride(1);
  if (params.out_q == params.q && params.num_tokens * params.num_q_heads * params.head_dim > 0) {
    check.that(params.num_heads == params.num_q_heads, "out_q must not be q where heads are added, got ",
               params.num_heads, " heads for ", params.num_q_heads);
    const bool same = (params.num_tokens <= 1 || params.q_stride_token == params.out_q_stride_token) &&
                      (params.num_heads <= 1 || params.q_stride_head == params.out_q_stride_head);
    check.that(same, "out_q must be q itself or lie apart from it, got its address with other strides");
  }
}

void run(NormRopeInsertParams params, [[maybe_unused]] const Tensor& kv_cache) {
  if (params.head_dim == 0 || params.num_tokens == 0) params.num_heads = 0;
  if (params.num_insert > 0 || params.num_heads > 0) MLA_LAUNCH(norm_rope_insert, kv_cache, params);
}

}  // namespace

void k_norm_rope_insert(MLA_K_NORM_ROPE_INSERT_ARGUMENTS) {
  run(check_latents(Check("k_norm_rope_insert"), kv, kv_weight, cos, sin, positions, slot_mapping, kv_cache,
                    layout, page_size, eps, k_rope, scale),
      kv_cache);
}

void qk_norm_rope_insert_out(MLA_QK_NORM_ROPE_INSERT_ARGUMENTS, Tensor out_q) {
  const Check check("qk_norm_rope_insert");
  check_rows(check, q, kv, positions);
  NormRopeInsertParams params = check_latents(check, kv, kv_weight, cos, sin, positions, slot_mapping,
                                              kv_cache, layout, page_size, eps, k_rope, scale);
  check_q(check, q, kv_cache, norm_q, num_heads, params);
  check_out_q(check, out_q, kv_cache, params);
  run(params, kv_cache);
}

Tensor qk_norm_rope_insert(MLA_QK_NORM_ROPE_INSERT_ARGUMENTS) {
  const Check check("qk_norm_rope_insert");
  check_rows(check, q, kv, positions);
  NormRopeInsertParams params = check_latents(check, kv, kv_weight, cos, sin, positions, slot_mapping,
                                              kv_cache, layout, page_size, eps, k_rope, scale);
  check_q(check, q, kv_cache, norm_q, num_heads, params);
  Tensor out_q = new_empty(q, {params.num_tokens, params.num_heads, params.head_dim}, ScalarType::BFloat16);
  check_out_q(check, out_q, kv_cache, params);
  run(params, kv_cache);
  return out_q;
}

}  // namespace mla_fp8
