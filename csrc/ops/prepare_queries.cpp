#include "ops/prepare_queries.h"

#include <algorithm>

#include "ops/index_arguments.h"
#include "ops/rope_checks.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

// Checks everything but the outputs.
PrepareQueriesParams check_inputs(const Check& check, MLA_PREPARE_QUERIES_ARGUMENTS) {
  const IndexLayoutId id = check_index_layout(check, layout);
  const int64_t num_tokens = check(positions, "positions").shape({-1}).size(0);
  PrepareQueriesParams p{
      .num_tokens = num_tokens,
      .table = check_rope_table(check, cos, sin, positions, num_tokens, positions, "positions"),
      .is_neox = neox,
      .index_is_neox = index_neox,
      .hadamard = hadamard,
      .layout = id,
      .scaling = check_index_scaling(check, id, scale_format, amax_floor, reciprocal),
      .weight_scale = check.finite_float(weight_scale, "weight_scale"),
      .head_scale = check.finite_float(head_scale, "head_scale"),
  };
  if (q_pe) {
    const Arg arg = check(*q_pe, "q_pe");
    check.that(p.table.dim() > 0 && p.table.dim() % kPeStep == 0, "cos must have a multiple of ", kPeStep / 2,
               " columns for q_pe, at least as many, got ", p.table.half);
    arg.same_device_as(positions, "positions")
        .dtype({ScalarType::BFloat16})
        .shape({num_tokens, -1, p.table.dim()})
        .last_dim_contiguous()
        .aligned(16);
    check_head_values(arg, arg.size(1));
    p.num_heads = arg.size(1);
    p.q_pe = data<uint16_t>(*q_pe);
    p.q_pe_stride_token = arg.stride(0);
    p.q_pe_stride_head = arg.stride(1);
  }
  check.that(index_q.has_value() == index_weights.has_value(),
             "index_weights must be given with index_q, and not without it");
  check.that(index_cos.has_value() == index_sin.has_value(), "index_sin must be given with index_cos");
  check.that(!index_cos || index_q, "index_cos must be None without index_q, got a tensor");
  if (!index_q) return p;

  const Arg arg = check(*index_q, "index_q"), weights = check(*index_weights, "index_weights");
  arg.same_device_as(positions, "positions")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, -1, kIndexDim})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t heads = arg.size(1);
  check.that(heads >= 1 && heads <= kMaxQueryIndexHeads, "index_q must have 1 to ", kMaxQueryIndexHeads,
             " heads, got ", heads);
  weights.same_device_as(positions, "positions")
      .dtype({ScalarType::Float, ScalarType::BFloat16})
      .shape({num_tokens, heads})
      .last_dim_contiguous();
  p.index_table = index_cos ? check_rope_table(check, *index_cos, *index_sin, positions, num_tokens,
                                               positions, "positions")
                            : p.table;
  check_index_rope(check, index_cos ? "index_cos" : "cos", p.index_table, index_neox, "index_q");
  p.index_first_dim = index_rope_first ? 0 : kIndexDim - p.index_table.dim();
  p.num_index_heads = heads;
  p.index_q = data<uint16_t>(*index_q);
  p.index_q_stride_token = arg.stride(0);
  p.index_q_stride_head = arg.stride(1);
  p.index_weights = index_weights->const_data_ptr();
  p.weights_are_float = weights.is(ScalarType::Float);
  p.index_weights_stride_token = weights.stride(0);
  return p;
}

void check_out_q_pe(const Check& check, const OptionalTensor& out_q_pe, const Tensor& positions,
                    PrepareQueriesParams& p) {
  check.that(out_q_pe.has_value() || p.num_heads == 0, "out_q_pe must be given with q_pe, got None");
  if (!out_q_pe) return;
  const Arg out = check(*out_q_pe, "out_q_pe");
  out.same_device_as(positions, "positions")
      .dtype({ScalarType::BFloat16})
      .shape({p.num_tokens, p.num_heads, p.q_pe ? p.table.dim() : -1})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  p.out_q_pe = mutable_data<uint16_t>(*out_q_pe);
  p.out_q_pe_stride_token = out.stride(0);
  p.out_q_pe_stride_head = out.stride(1);
  const bool same = (p.num_tokens <= 1 || p.q_pe_stride_token == p.out_q_pe_stride_token) &&
                    (p.num_heads <= 1 || p.q_pe_stride_head == p.out_q_pe_stride_head);
  check.that(p.out_q_pe != p.q_pe || same || p.num_tokens * p.num_heads == 0,
             "out_q_pe must be q_pe itself or lie apart from it, got its address with other strides");
}

struct IndexOutputs {
  const OptionalTensor &q, &weights, &scale;
};

void check_index_outputs(const Check& check, const IndexOutputs& out, const Tensor& positions,
                         PrepareQueriesParams& p) {
  const IndexLayout l = index_layout(p.layout);
  const bool is_fp4 = p.layout == IndexLayoutId::kIndexFp4;
  const auto one = [&](const OptionalTensor& tensor, const char* name, bool wanted, ScalarType dtype,
                       int64_t last) -> uint8_t* {
    if (!tensor || !wanted) {
      check.that(!wanted, name, " must be given with index_q, got None");
      return nullptr;
    }
    const Arg arg = check(*tensor, name);
    arg.same_device_as(positions, "positions").dtype({dtype});
    if (last > 0)
      arg.shape({p.num_tokens, p.num_index_heads, last}).contiguous().aligned(std::min<int64_t>(last, 16));
    else arg.shape({p.num_tokens, p.num_index_heads}).contiguous();
    return mutable_data<uint8_t>(*tensor);
  };
  const bool wanted = p.num_index_heads > 0;
  p.out_index_q =
      one(out.q, "out_index_q", wanted, is_fp4 ? ScalarType::Byte : ScalarType::Float8_e4m3fn, l.value_bytes);
  p.out_index_weights =
      reinterpret_cast<float*>(one(out.weights, "out_index_weights", wanted, ScalarType::Float, 0));
  p.out_index_scale = one(out.scale, "out_index_scale", wanted && is_fp4, ScalarType::Byte, kIndexScaleBytes);
}

void run(const PrepareQueriesParams& params, [[maybe_unused]] const Tensor& positions) {
  if (params.num_tokens > 0 && params.num_heads + params.num_index_heads > 0)
    MLA_LAUNCH(prepare_queries, positions, params);
}

}  // namespace

#define PASSED                                                                               \
  q_pe, index_q, index_weights, cos, sin, positions, index_cos, index_sin, neox, index_neox, \
      index_rope_first, hadamard, layout, scale_format, amax_floor, reciprocal, weight_scale, head_scale

void prepare_queries_out(MLA_PREPARE_QUERIES_ARGUMENTS, OptionalTensor out_q_pe, OptionalTensor out_index_q,
                         OptionalTensor out_index_weights, OptionalTensor out_index_scale) {
  const Check check("prepare_queries");
  PrepareQueriesParams params = check_inputs(check, PASSED);
  check_out_q_pe(check, out_q_pe, positions, params);
  check_index_outputs(check, {out_index_q, out_index_weights, out_index_scale}, positions, params);
  run(params, positions);
}

// Outputs for what is not given have no elements.
FourTensors prepare_queries(MLA_PREPARE_QUERIES_ARGUMENTS) {
  const Check check("prepare_queries");
  PrepareQueriesParams params = check_inputs(check, PASSED);
  const bool is_fp4 = params.layout == IndexLayoutId::kIndexFp4;
  const int64_t tokens = params.num_tokens, heads = params.num_index_heads;
  Tensor q = new_empty(positions, {q_pe ? tokens : 0, params.num_heads, q_pe ? params.table.dim() : 0},
                       ScalarType::BFloat16);
  const int64_t index_tokens = index_q ? tokens : 0;
  Tensor codes = new_empty(positions, {index_tokens, heads, index_layout(params.layout).value_bytes},
                           is_fp4 ? ScalarType::Byte : ScalarType::Float8_e4m3fn);
  Tensor weights = new_empty(positions, {index_tokens, heads}, ScalarType::Float);
  Tensor scale = new_empty(positions, {is_fp4 ? index_tokens : 0, heads, kIndexScaleBytes}, ScalarType::Byte);
  if (q_pe) check_out_q_pe(check, q, positions, params);
  check_index_outputs(check, {codes, weights, scale}, positions, params);
  run(params, positions);
  return {q, codes, weights, scale};
}

}  // namespace mla_fp8
