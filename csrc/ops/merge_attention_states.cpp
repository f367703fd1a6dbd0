#include "ops/merge_attention_states.h"

#include "registration.h"

namespace mla_fp8 {
namespace {

// Returns the dtype of out_a, out_b and out.
Dtype check_inputs(const Check& check, const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                   const Tensor& lse_b) {
  const Arg a = check(out_a, "out_a");
  a.dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float})
      .shape({-1, -1, -1})
      .last_dim_contiguous();
  check(out_b, "out_b")
      .same_device_as(out_a, "out_a")
      .dtype({out_a.scalar_type()})
      .shape({out_a.size(0), out_a.size(1), out_a.size(2)})
      .last_dim_contiguous();
  for (const auto& [lse, name] : {std::pair{&lse_a, "lse_a"}, std::pair{&lse_b, "lse_b"}})
    check(*lse, name)
        .same_device_as(out_a, "out_a")
        .dtype({ScalarType::Float})
        .shape({out_a.size(0), out_a.size(1)})
        .contiguous();
  return a.float_dtype();
}

}  // namespace

void merge_attention_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                const Tensor& lse_b, Tensor out, Tensor lse) {
  const Check check("merge_attention_states");
  const Dtype dtype = check_inputs(check, out_a, lse_a, out_b, lse_b);
  const int64_t num_tokens = out_a.size(0), num_heads = out_a.size(1), head_dim = out_a.size(2);
  check(out, "out")
      .same_device_as(out_a, "out_a")
      .dtype({out_a.scalar_type()})
      .shape({num_tokens, num_heads, head_dim})
      .last_dim_contiguous()
      .rows_disjoint();
  check(lse, "lse")
      .same_device_as(out_a, "out_a")
      .dtype({ScalarType::Float})
      .shape({num_tokens, num_heads})
      .contiguous();
  if (num_tokens == 0 || num_heads == 0) return;

  const MergeAttentionStatesParams params{
      .num_tokens = num_tokens,
      .num_heads = num_heads,
      .head_dim = head_dim,
      .dtype = dtype,
      .out_a = out_a.const_data_ptr(),
      .out_b = out_b.const_data_ptr(),
      .out_a_stride_token = out_a.stride(0),
      .out_a_stride_head = out_a.stride(1),
      .out_b_stride_token = out_b.stride(0),
      .out_b_stride_head = out_b.stride(1),
      .lse_a = data<float>(lse_a),
      .lse_b = data<float>(lse_b),
      .out = out.mutable_data_ptr(),
      .out_stride_token = out.stride(0),
      .out_stride_head = out.stride(1),
      .lse = mutable_data<float>(lse),
  };
  MLA_LAUNCH(merge_attention_states, out_a, params);
}

TwoTensors merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                  const Tensor& lse_b) {
  check_inputs(Check("merge_attention_states"), out_a, lse_a, out_b, lse_b);
  Tensor out = new_empty(out_a, {out_a.size(0), out_a.size(1), out_a.size(2)}, out_a.scalar_type());
  Tensor lse = new_empty(out_a, {out_a.size(0), out_a.size(1)}, ScalarType::Float);
  merge_attention_states_out(out_a, lse_a, out_b, lse_b, out, lse);
  return {out, lse};
}

}  // namespace mla_fp8
