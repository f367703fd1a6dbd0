// inverse_rope and inverse_rope_quantize: checks and outputs.
#include "ops/inverse_rope.h"

#include "ops/rope_checks.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

AttendedHeads check_heads(const Check& check, const Tensor& o, const Tensor& cos, const Tensor& sin,
                          const Tensor& positions) {
  const Arg arg = check(o, "o");
  arg.dtype({ScalarType::BFloat16}).shape({-1, -1, -1}).last_dim_contiguous().aligned(16);
  const RopeTable table = check_rope_table(check, cos, sin, positions, arg.size(0), o, "o");
  check_head_values(arg, arg.size(1));
  if (arg.size(2) % kRopeStep != 0 || arg.size(2) < table.dim())
    arg.fail("must have a multiple of ", kRopeStep, " as its last dimension, at least ", table.dim(),
             " (what is rotated), got ", arg.size(2));
  return {
      .num_tokens = arg.size(0),
      .num_heads = arg.size(1),
      .head_dim = arg.size(2),
      .table = table,
      .o = data<uint16_t>(o),
      .o_stride_token = arg.stride(0),
      .o_stride_head = arg.stride(1),
  };
}

InverseRopeQuantizeParams check_groups(const Check& check, const Tensor& o, const Tensor& cos,
                                       const Tensor& sin, const Tensor& positions, int64_t num_groups,
                                       int64_t tile, bool power_of_two) {
  const AttendedHeads heads = check_heads(check, o, cos, sin, positions);
  check.that(num_groups >= 1 && heads.num_heads % num_groups == 0, "num_groups must divide ", heads.num_heads,
             " (the heads of o), got ", num_groups);
  check.that(tile == 32 || tile == 128, "tile must be 32 or 128, got ", tile);
  check.that(heads.head_dim % tile == 0, "o must have a multiple of ", tile,
             " (the tile) as its last dimension, got ", heads.head_dim);
  return {.heads = heads,
          .num_groups = num_groups,
          .tile = static_cast<int>(tile),
          .power_of_two = power_of_two,
          .num_scale_rows = heads.num_tokens};
}

void check_outputs(const Check& check, const Tensor& o, const Tensor& out, const Tensor& out_scale,
                   InverseRopeQuantizeParams& params) {
  const int64_t dim = params.heads_per_group() * params.heads.head_dim;
  const Arg values = check(out, "out"), scales = check(out_scale, "out_scale");
  values.same_device_as(o, "o")
      .dtype({ScalarType::Float8_e4m3fn})
      .shape({params.heads.num_tokens, params.num_groups, dim})
      .last_dim_contiguous()
      .aligned(8);
  scales.same_device_as(o, "o")
      .dtype({ScalarType::Float})
      .shape({params.heads.num_tokens, params.num_groups, dim / params.tile});
  const auto apart = [](const Arg& t) {
    if (t.is_empty()) return;
    for (int64_t d = 0; d < t.dim(); ++d)
      if (t.size(d) > 1 && t.stride(d) == 0) t.fail("must not overlap itself, got stride 0 in dimension ", d);
  };
  apart(values);
  apart(scales);
  params.out = static_cast<uint8_t*>(out.mutable_data_ptr());
  params.out_stride_token = values.stride(0);
  params.out_stride_group = values.stride(1);
  params.out_scale = mutable_data<float>(out_scale);
  params.scale_stride_token = scales.stride(0);
  params.scale_stride_group = scales.stride(1);
  params.scale_stride_tile = scales.stride(2);
}

bool has_elements(const AttendedHeads& heads) {
  return heads.num_tokens > 0 && heads.num_heads > 0 && heads.head_dim > 0;
}

}  // namespace

void inverse_rope_out(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                      Tensor out) {
  const Check check("inverse_rope");
  const AttendedHeads heads = check_heads(check, o, cos, sin, positions);
  const Arg arg = check(out, "out");
  arg.same_device_as(o, "o")
      .dtype({ScalarType::BFloat16})
      .shape({heads.num_tokens, heads.num_heads, heads.head_dim})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  const InverseRopeParams params{.heads = heads,
                                 .out = mutable_data<uint16_t>(out),
                                 .out_stride_token = arg.stride(0),
                                 .out_stride_head = arg.stride(1)};
  if (!has_elements(heads)) return;
  if (params.out == heads.o) {
    const bool same = (heads.num_tokens == 1 || arg.stride(0) == heads.o_stride_token) &&
                      (heads.num_heads == 1 || arg.stride(1) == heads.o_stride_head);
    check.that(same, "out must be o itself or lie apart from it, got its address with other strides");
  }
  MLA_LAUNCH(inverse_rope, o, params);
}

Tensor inverse_rope(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions) {
  check_heads(Check("inverse_rope"), o, cos, sin, positions);
  Tensor out = new_empty(o, {o.size(0), o.size(1), o.size(2)}, ScalarType::BFloat16);
  inverse_rope_out(o, cos, sin, positions, out);
  return out;
}

void inverse_rope_quantize_out(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                               int64_t num_groups, int64_t tile, bool power_of_two, Tensor out,
                               Tensor out_scale) {
  const Check check("inverse_rope_quantize");
  InverseRopeQuantizeParams params =
      check_groups(check, o, cos, sin, positions, num_groups, tile, power_of_two);
  check_outputs(check, o, out, out_scale, params);
  if (has_elements(params.heads)) MLA_LAUNCH(inverse_rope_quantize, o, params);
}

TwoTensors inverse_rope_quantize(const Tensor& o, const Tensor& cos, const Tensor& sin,
                                 const Tensor& positions, int64_t num_groups, int64_t tile,
                                 bool power_of_two) {
  const Check check("inverse_rope_quantize");
  InverseRopeQuantizeParams params =
      check_groups(check, o, cos, sin, positions, num_groups, tile, power_of_two);
  // DeepGEMM's form: a matrix for each group; scales token by token, padded to a multiple of 4 tokens.
  constexpr int64_t kScaleRows = 4;
  const int64_t tokens = params.heads.num_tokens, dim = params.heads_per_group() * params.heads.head_dim;
  params.num_scale_rows = align_up(tokens, kScaleRows);
  Tensor values = new_empty(o, {num_groups, tokens, dim}, ScalarType::Float8_e4m3fn);
  Tensor scales = new_empty(o, {num_groups, dim / tile, params.num_scale_rows}, ScalarType::Float);
  using torch::stable::transpose;
  const Tensor out = transpose(values, 0, 1);
  const Tensor used = torch::stable::narrow(scales, 2, 0, tokens);
  const Tensor out_scale = transpose(transpose(used, 0, 2), 1, 2);
  check_outputs(check, o, out, out_scale, params);
  if (has_elements(params.heads)) MLA_LAUNCH(inverse_rope_quantize, o, params);
  return {out, out_scale};
}

}  // namespace mla_fp8
