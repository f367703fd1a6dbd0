#pragma once
#include <cstdint>

#include "common/macros.h"

namespace mla_fp8 {

inline constexpr int kMaxRopeHalf = 128;   // pairs: half of a latent's dims
inline constexpr int kIndexRopeHalf = 32;  // of RoPE by halves in a head or key of the indexer
inline constexpr int kRopeStep = 8;        // rotated dims are a multiple of this: a vector of bf16

// cos and sin, float32, for the pairs of neighbours (2i, 2i + 1) that a token rotates at each position. The
// last 2 * half dims are rotated. A position outside [0, max_pos) has no rotation. If half is 0, nothing is
// rotated and positions are not read.
struct RopeTable {
  const float *cos, *sin;  // [max_pos, half]; strides in elements
  int64_t cos_stride_pos, cos_stride_pair, sin_stride_pos, sin_stride_pair;
  int64_t max_pos;
  int half;
  bool vector;            // four pairs of cos, and of sin, lie in 16 aligned bytes
  const void* positions;  // [num_tokens] int64 or int32
  bool positions_are_int64;

  MLA_HD int dim() const { return 2 * half; }
};

}  // namespace mla_fp8
