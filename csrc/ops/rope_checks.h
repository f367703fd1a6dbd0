#pragma once
// Checks of RoPE tables that ops which rotate share.
#include "common/torch.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

// Checks cos and sin, [max_pos, half] float32, on the device of `like`. The table has no positions.
RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& like,
                           const char* like_name);
// Checks positions [num_tokens] as well.
RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                           int64_t num_tokens, const Tensor& like, const char* like_name);

// Checks heads [num_tokens, heads, head_dim]: kernels count the values of a token in int.
inline void check_head_values(const Arg& arg, int64_t heads) {
  const int64_t dim = arg.size(2);
  if (dim > 0 && heads > INT32_MAX / dim)
    arg.fail("must have fewer than 2^31 values per token, got ", heads, " heads of ", dim);
}

}  // namespace mla_fp8
