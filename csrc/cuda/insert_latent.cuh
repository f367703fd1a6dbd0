#pragma once
// A warp norms and rotates a latent of a layer and writes its row to the cache. k_norm_rope_insert does this,
// and ops that do more share it.
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"
#include "ops/norm_rope_insert.h"

namespace mla_fp8::gpu {

// Inserts a token's latent: norm, RoPE, then quantize_kv's row. kMayKeep: if out_kv is given, it gets the
// bf16 that is quantised, also of a token that is not stored.
template <KvLayoutId kId, bool kMayKeep>
__device__ __forceinline__ void insert_latent(const NormRopeInsertParams& p, const Divider& page_size,
                                              int64_t token) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  const int lane = threadIdx.x % kWarpSize;
  wait_for_previous_grid();
  const bool is_padding = kMayKeep && token >= p.num_insert;
  const int64_t slot = is_padding ? -1 : load_index(p.slot_mapping, p.slots_are_int64, token);
  const int64_t mate = is_padding ? -1
                                  : load_index(p.slot_mapping, p.slots_are_int64,
                                               (token ^ 1) < p.num_insert ? token ^ 1 : token);
  const Position position = load_position(p.table, token);
  const bool is_alone = mate != slot + 1 && mate != slot - 1;
  Words<4> x[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    if (pass < kNormPasses) {
      x[pass] = load_if<4>(p.kv + token * p.kv_stride_token + element, true);
    } else {
      const bool wanted = element < C::kDim && p.k_rope != nullptr;
      x[pass] = load_if<4>(p.k_rope + token * p.k_rope_stride_token + (element - kHeadDimV), wanted);
    }
  }
  Weights8 weight[kNormPasses]{};
  if (p.kv_weight != nullptr)
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass)
      weight[pass] = {p.kv_weight, p.weight_is_float, C::element(pass, lane)};
  constexpr int kLast = C::kPasses - 1;  // the rotated dims lie in the last pass
  const int element = C::element(kLast, lane), pair = (element - C::kDim + p.table.dim()) / 2;
  const bool is_rotated = element < C::kDim && element >= C::kDim - p.table.dim();
  const CacheRow to = find_row(p, page_size, slot);
  const bool is_stored = to.valid && position.valid;
  const bool is_kept = kMayKeep && p.out_kv != nullptr;
  if (!is_kept && !is_stored) return;
  Rotation rotation{};
  if (is_rotated && position.valid) rotation = load_rotation(p.table, position.at, pair);
  if (is_alone && is_stored) prefetch_partial_sectors<kId>(to, p.page_size);

  if (p.kv_weight != nullptr) {
    Floats8 v[kNormPasses];
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) v[pass] = unpack8(x[pass]);
    const float factor = rms_factor(v, p.eps);
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) {
      const Floats8 w = weight[pass].unpack(p.weight_is_float);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[pass].x[i] = __fmul_rn(__fmul_rn(v[pass].x[i], factor), w.x[i]);
      x[pass] = pack8(v[pass]);
    }
  }
  if (is_rotated) x[kLast] = pack8(rotate8(unpack8(x[kLast]), rotation));
  if (is_kept) {
#pragma unroll
    for (int pass = 0; pass < C::kPasses; ++pass) {
      const int at = C::element(pass, lane);
      const Words<4> kept = position.valid ? x[pass] : Words<4>{};
      if (pass < kNormPasses) store(p.out_kv + token * p.out_kv_stride_token + at, kept);
      else if (at < C::kDim && p.out_k_rope != nullptr)
        store(p.out_k_rope + token * p.out_k_rope_stride_token + (at - kHeadDimV), kept);
    }
    if (!is_stored) return;
  }
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  write_row<kId>(to, p.page_size, layer_scale, format_max(kL.nope_format), x);
}

}  // namespace mla_fp8::gpu
