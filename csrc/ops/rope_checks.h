#pragma once
// What the ops that rotate check of their tables.
#include "common/torch.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

// cos and sin [max_pos, half] float32, on the device of `like`; without positions.
RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& like,
                           const char* like_name);
// And positions [num_tokens].
RopeTable check_rope_table(const Check& check, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                           int64_t num_tokens, const Tensor& like, const char* like_name);

// Heads [num_tokens, heads, head_dim]: the values of a token are counted in int.
inline void check_head_values(const Arg& arg, int64_t heads) {
  const int64_t dim = arg.size(2);
  if (dim > 0 && heads > INT32_MAX / dim)
    arg.fail("must have fewer than 2^31 values per token, got ", heads, " heads of ", dim);
}

}  // namespace mla_fp8
