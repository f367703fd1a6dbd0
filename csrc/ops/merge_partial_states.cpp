// merge_partial_states; and merge_attention_states, whose two states are two tensors.
#include "ops/merge_partial_states.h"

#include "registration.h"

namespace mla_fp8 {
namespace {

using Part = MergePartialStatesParams::Part;

// One state, or several in one tensor. Dimension `d` is that of tokens.
Part part_of(const Arg& out, const void* out_data, const Arg& lse, const float* lse_data, int64_t d) {
  return {out_data, out.stride(d), out.stride(d + 1), lse_data, lse.stride(d), lse.stride(d + 1)};
}

const Arg& check_floats(const Arg& out) {
  return out.dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float});
}

// Checks what both ops return.
void check_outputs(const Check& check, const Tensor& like, const char* name, const Tensor& out,
                   const Tensor& lse, MergePartialStatesParams& params) {
  const Arg o = check(out, "out");
  o.same_device_as(like, name)
      .dtype({like.scalar_type()})
      .shape({params.num_tokens, params.num_heads, params.head_dim})
      .last_dim_contiguous()
      .rows_disjoint();
  check(lse, "lse")
      .same_device_as(like, name)
      .dtype({ScalarType::Float})
      .shape({params.num_tokens, params.num_heads})
      .contiguous();
  params.out = out.mutable_data_ptr();
  params.out_stride_token = o.stride(0);
  params.out_stride_head = o.stride(1);
  params.lse = mutable_data<float>(lse);
}

MergePartialStatesParams check_pair(const Check& check, const Tensor& out_a, const Tensor& lse_a,
                                    const Tensor& out_b, const Tensor& lse_b) {
  const Arg a = check(out_a, "out_a"), b = check(out_b, "out_b");
  check_floats(a).shape({-1, -1, -1}).last_dim_contiguous();
  b.same_device_as(out_a, "out_a")
      .dtype({out_a.scalar_type()})
      .shape({a.size(0), a.size(1), a.size(2)})
      .last_dim_contiguous();
  const Arg of_a = check(lse_a, "lse_a"), of_b = check(lse_b, "lse_b");
  for (const Arg* lse : {&of_a, &of_b})
    lse->same_device_as(out_a, "out_a").dtype({ScalarType::Float}).shape({a.size(0), a.size(1)}).contiguous();
  return {
      .num_states = 2,
      .num_tokens = a.size(0),
      .num_heads = a.size(1),
      .head_dim = a.size(2),
      .dtype = a.float_dtype(),
      .first = part_of(a, out_a.const_data_ptr(), of_a, data<float>(lse_a), 0),
      .others = part_of(b, out_b.const_data_ptr(), of_b, data<float>(lse_b), 0),
      .log_base = 1,
  };
}

MergePartialStatesParams check_states(const Check& check, const Tensor& outs, const Tensor& lses,
                                      const OptionalTensor& attn_sink, double base) {
  const Arg o = check(outs, "outs"), l = check(lses, "lses");
  check_floats(o).shape({-1, -1, -1, -1}).last_dim_contiguous();
  const int64_t states = o.size(0), tokens = o.size(1), heads = o.size(2);
  l.same_device_as(outs, "outs").dtype({ScalarType::Float}).shape({states, tokens, heads});
  check.that(states >= 1, "outs must be of at least 1 state, got 0");
  if (attn_sink)
    check(*attn_sink, "attn_sink")
        .same_device_as(outs, "outs")
        .dtype({ScalarType::Float})
        .shape({heads})
        .contiguous();
  check.that(base > 1 && std::isfinite(base), "base must be finite and above 1, got ", base);
  const int64_t itemsize = o.itemsize();
  const auto second = [&](const Tensor& t, const Arg& arg, int64_t bytes) {  // all states from the second on
    return static_cast<const char*>(t.const_data_ptr()) + (states > 1 ? arg.stride(0) * bytes : 0);
  };
  const auto* second_lse = reinterpret_cast<const float*>(second(lses, l, sizeof(float)));
  return {
      .num_states = states,
      .num_tokens = tokens,
      .num_heads = heads,
      .head_dim = o.size(3),
      .dtype = o.float_dtype(),
      .first = part_of(o, outs.const_data_ptr(), l, data<float>(lses), 1),
      .others = part_of(o, second(outs, o, itemsize), l, second_lse, 1),
      .out_stride_state = o.stride(0),
      .lse_stride_state = l.stride(0),
      .attn_sink = data<float>(attn_sink),
      .log_base = static_cast<float>(std::log(base)),
  };
}

void run(const MergePartialStatesParams& params, [[maybe_unused]] const Tensor& out) {
  if (params.num_tokens == 0 || params.num_heads == 0) return;
  MLA_LAUNCH(merge_partial_states, out, params);
}

TwoTensors new_outputs(const Tensor& like, const MergePartialStatesParams& params) {
  return {new_empty(like, {params.num_tokens, params.num_heads, params.head_dim}, like.scalar_type()),
          new_empty(like, {params.num_tokens, params.num_heads}, ScalarType::Float)};
}

}  // namespace

void merge_attention_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                const Tensor& lse_b, Tensor out, Tensor lse) {
  const Check check("merge_attention_states");
  MergePartialStatesParams params = check_pair(check, out_a, lse_a, out_b, lse_b);
  check_outputs(check, out_a, "out_a", out, lse, params);
  run(params, out);
}

TwoTensors merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                  const Tensor& lse_b) {
  const Check check("merge_attention_states");
  MergePartialStatesParams params = check_pair(check, out_a, lse_a, out_b, lse_b);
  const auto [out, lse] = new_outputs(out_a, params);
  check_outputs(check, out_a, "out_a", out, lse, params);
  run(params, out);
  return {out, lse};
}

void merge_partial_states_out(const Tensor& outs, const Tensor& lses, const OptionalTensor& attn_sink,
                              double base, Tensor out, Tensor lse) {
  const Check check("merge_partial_states");
  MergePartialStatesParams params = check_states(check, outs, lses, attn_sink, base);
  check_outputs(check, outs, "outs", out, lse, params);
  run(params, out);
}

TwoTensors merge_partial_states(const Tensor& outs, const Tensor& lses, const OptionalTensor& attn_sink,
                                double base) {
  const Check check("merge_partial_states");
  MergePartialStatesParams params = check_states(check, outs, lses, attn_sink, base);
  const auto [out, lse] = new_outputs(outs, params);
  check_outputs(check, outs, "outs", out, lse, params);
  run(params, out);
  return {out, lse};
}

}  // namespace mla_fp8
