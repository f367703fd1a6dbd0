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

}  // namespace mla_fp8
