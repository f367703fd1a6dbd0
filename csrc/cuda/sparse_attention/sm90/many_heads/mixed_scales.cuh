#pragma once
// The scales of a stage over two layouts: they lie behind its rows, and those of K's fragments with them.
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders, bool kHasKeyTable>
struct StageScales<MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>> {
  int e;
  bool is_nan[2];

  template <class C>
  __device__ void load(const uint8_t* smem, int stage, int g, int) {
    e = reinterpret_cast<const int*>(smem + MLA_SMEM(C, stage_exponents))[stage];
    const uint8_t* const valid = smem + MLA_SMEM(C, valid) + stage * kStageRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) is_nan[i] = valid[g + 8 * i] & kNanKey;
  }
  __device__ void store(uint8_t*, int, int) const {}
};

}  // namespace mla_fp8::gpu
