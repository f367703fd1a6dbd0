#pragma once
#include "common/dtype.h"
#include "common/stream.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

// Attention's output: heads whose last dims carry the keys' rotation. Strides are in elements. A token whose
// position is outside the table counts as zeros.
struct AttendedHeads {
  int64_t num_tokens, num_heads, head_dim;
  RopeTable table;
  const uint16_t* o;  // [num_tokens, num_heads, head_dim] bf16
  int64_t o_stride_token, o_stride_head;
};

// Rotates the last dims of each head back by the query's position, and rounds to bf16.
struct InverseRopeParams {
  AttendedHeads heads;
  uint16_t* out;  // [num_tokens, num_heads, head_dim]; o itself, or memory apart from it
  int64_t out_stride_token, out_stride_head;

  // The first dim of a head that the op changes or has to copy.
  int64_t first_dim() const { return out == heads.o ? heads.head_dim - heads.table.dim() : 0; }
};

// inverse_rope, then e4m3fn with a scale for each `tile` consecutive values of a group of heads.
struct InverseRopeQuantizeParams {
  AttendedHeads heads;
  int64_t num_groups;
  int tile;           // 32 or 128; head_dim is a multiple of it
  bool power_of_two;  // scales: the smallest power of two >= max(amax, kAmaxFloor) / 448, else that itself
  uint8_t* out;       // [num_tokens, num_groups, num_heads / num_groups * head_dim] e4m3fn
  int64_t out_stride_token, out_stride_group;
  float* out_scale;  // [num_tokens, num_groups, num_heads / num_groups * head_dim / tile]
  int64_t scale_stride_token, scale_stride_group, scale_stride_tile;
  int64_t num_scale_rows;  // at least num_tokens; further rows of scales become 0

  static constexpr float kAmaxFloor = 1e-10f;
  MLA_HD int64_t heads_per_group() const { return heads.num_heads / num_groups; }
};

namespace cpu {
void inverse_rope(const InverseRopeParams& params);
void inverse_rope_quantize(const InverseRopeQuantizeParams& params);
}  // namespace cpu
namespace gpu {
void inverse_rope(const InverseRopeParams& params, gpuStream_t stream);
void inverse_rope_quantize(const InverseRopeQuantizeParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
