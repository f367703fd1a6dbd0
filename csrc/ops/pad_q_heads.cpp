#include "ops/pad_q_heads.h"

#include "registration.h"

namespace mla_fp8 {
namespace {

void check_inputs(const Check& check, const Tensor& q, const OptionalTensor& attn_sink, int64_t num_heads) {
  check(q, "q").dtype({ScalarType::BFloat16, ScalarType::Half}).shape({-1, -1, -1}).last_dim_contiguous();
  check.that(num_heads >= q.size(1), "num_heads must be at least ", q.size(1), " (the heads of q), got ",
             num_heads);
  if (attn_sink)
    check(*attn_sink, "attn_sink")
        .same_device_as(q, "q")
        .dtype({ScalarType::Float})
        .shape({q.size(1)})
        .contiguous();
}

}  // namespace

void pad_q_heads_out(const Tensor& q, const OptionalTensor& attn_sink, int64_t num_heads, Tensor out_q,
                     Tensor out_attn_sink) {
  const Check check("pad_q_heads");
  check_inputs(check, q, attn_sink, num_heads);
  check(out_q, "out_q")
      .same_device_as(q, "q")
      .dtype({q.scalar_type()})
      .shape({q.size(0), num_heads, q.size(2)})
      .contiguous();
  check(out_attn_sink, "out_attn_sink")
      .same_device_as(q, "q")
      .dtype({ScalarType::Float})
      .shape({num_heads})
      .contiguous();
  if (num_heads == 0) return;

  const PadQHeadsParams params{
      .num_tokens = q.size(2) > 0 ? q.size(0) : 0,  // heads without elements: there is nothing to copy
      .num_q_heads = q.size(1),
      .num_heads = num_heads,
      .head_dim = q.size(2),
      .q = data<uint16_t>(q),
      .q_stride_token = q.stride(0),
      .q_stride_head = q.stride(1),
      .attn_sink = data<float>(attn_sink),
      .out_q = mutable_data<uint16_t>(out_q),
      .out_attn_sink = mutable_data<float>(out_attn_sink),
  };
  MLA_LAUNCH(pad_q_heads, q, params);
}

TwoTensors pad_q_heads(const Tensor& q, const OptionalTensor& attn_sink, int64_t num_heads) {
  check_inputs(Check("pad_q_heads"), q, attn_sink, num_heads);
  Tensor out_q = new_empty(q, {q.size(0), num_heads, q.size(2)}, q.scalar_type());
  Tensor out_attn_sink = new_empty(q, {num_heads}, ScalarType::Float);
  pad_q_heads_out(q, attn_sink, num_heads, out_q, out_attn_sink);
  return {out_q, out_attn_sink};
}

}  // namespace mla_fp8
