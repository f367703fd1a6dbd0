#include "ops/rope_checks.h"

namespace mla_fp8 {

RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& like,
                           const char* like_name) {
  const Arg cos_arg = check(cos, "cos"), sin_arg = check(sin, "sin");
  cos_arg.same_device_as(like, like_name).dtype({ScalarType::Float}).shape({-1, -1});
  sin_arg.same_device_as(like, like_name)
      .dtype({ScalarType::Float})
      .shape({cos_arg.size(0), cos_arg.size(1)});
  const int64_t half = cos_arg.size(1);
  if (half > kMaxRopeHalf || 2 * half % kRopeStep != 0)
    cos_arg.fail("must have a multiple of ", kRopeStep / 2, " columns, at most ", kMaxRopeHalf, ", got ",
                 half);
  const auto is_vector = [&](const Arg& t, const Tensor& tensor) {
    return t.stride(1) == 1 && t.stride(0) % 4 == 0 &&
           reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  };
  return {
      .cos = data<float>(cos),
      .sin = data<float>(sin),
      .cos_stride_pos = cos_arg.stride(0),
      .cos_stride_pair = cos_arg.stride(1),
      .sin_stride_pos = sin_arg.stride(0),
      .sin_stride_pair = sin_arg.stride(1),
      .max_pos = cos_arg.size(0),
      .half = static_cast<int>(half),
      .vector = is_vector(cos_arg, cos) && is_vector(sin_arg, sin),
      .positions = nullptr,
      .positions_are_int64 = false,
  };
}

RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                           int64_t num_tokens, const Tensor& like, const char* like_name) {
  RopeTable table = check_rope_table(check, cos, sin, like, like_name);
  const Arg arg = check(positions, "positions");
  arg.same_device_as(like, like_name)
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({num_tokens})
      .contiguous();
  table.positions = positions.const_data_ptr();
  table.positions_are_int64 = arg.is(ScalarType::Long);
  return table;
}

}  // namespace mla_fp8
