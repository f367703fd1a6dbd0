// prepare_queries on the CPU: for each token, the heads of attention, then the heads of the indexer by way of
// a row of bf16; bound by memory.
#include "ops/prepare_queries.h"

#include "cpu/index_row.h"
#include "cpu/isa.h"
#include "cpu/norm_rope.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

void prepare_heads(const PrepareQueriesParams& p, int64_t token, const Rotation* rotation) {
  for (int64_t head = 0; head < p.num_heads; ++head) {
    const uint16_t* src = p.q_pe + token * p.q_pe_stride_token + head * p.q_pe_stride_head;
    uint16_t* dst = p.out_q_pe + token * p.out_q_pe_stride_token + head * p.out_q_pe_stride_head;
    if (rotation) rotate_pairs(src, p.is_neox, p.table.half, *rotation, dst);
    else memset(dst, 0, sizeof(uint16_t) * p.table.dim());
  }
}

// Encodes a head of the indexer. Returns the codes' scale, by which the head's weight is multiplied.
MLA_SIMD float encode_index_q(const PrepareQueriesParams& p, int64_t at, const F32 (&x)[kIndexVectors]) {
  const IndexLayout l = index_layout(p.layout);
  uint8_t* codes = p.out_index_q + at * l.value_bytes;
  if (p.layout == IndexLayoutId::kIndexFp8) return encode_index_fp8(p.scaling, x, codes);
  encode_index_fp4(p.scaling, x, codes, p.out_index_scale + at * kIndexScaleBytes);
  return 1.0f;
}

void prepare_index_heads(const PrepareQueriesParams& p, int64_t token, const Rotation* rotation) {
  const int64_t weights = token * p.index_weights_stride_token;
  for (int64_t head = 0; head < p.num_index_heads; ++head) {
    alignas(64) uint16_t row[kIndexDim] = {};
    if (rotation) {
      memcpy(row, p.index_q + token * p.index_q_stride_token + head * p.index_q_stride_head, sizeof row);
      uint16_t* rotated = row + p.index_first_dim;
      rotate_pairs(rotated, p.index_is_neox, p.index_table.half, *rotation, rotated);
    }
    F32 x[kIndexVectors];
    for (int i = 0; i < kIndexVectors; ++i) x[i] = load_bf16(row + i * kLanes);
    if (p.hadamard) hadamard(x);
    const int64_t at = token * p.num_index_heads + head;
    const float scale = encode_index_q(p, at, x);
    const float weight = p.weights_are_float
                             ? static_cast<const float*>(p.index_weights)[weights + head]
                             : bf16_to_float(static_cast<const uint16_t*>(p.index_weights)[weights + head]);
    p.out_index_weights[at] = weight * p.weight_scale * scale * p.head_scale;
  }
}

}  // namespace

void prepare_queries(const PrepareQueriesParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  Rotation rotation, of_index;
  for (int64_t token = begin; token < end; ++token) {
    if (p.num_heads > 0)
      prepare_heads(p, token, load_rotation(p.table, token, false, rotation) ? &rotation : nullptr);
    if (p.num_index_heads > 0)
      prepare_index_heads(p, token,
                          load_rotation(p.index_table, token, false, of_index) ? &of_index : nullptr);
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
