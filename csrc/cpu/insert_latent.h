#pragma once
// Norm and RoPE of a layer's latent into a row of bf16, and that row into its slot of the cache.
#include "cpu/encode.h"
#include "cpu/norm_rope.h"
#include "ops/norm_rope_insert.h"

namespace mla_fp8::cpu::MLA_ISA {

// Makes the latent of a token. `factor` is its rms_factor; without kv_weight it is not used.
template <KvLayoutId kId>
MLA_SIMD void make_latent(const NormRopeInsertParams& p, int64_t token, const Rotation& rotation,
                          float factor, uint16_t (&latent)[kv_layout(kId).head_dim_qk()]) {
  constexpr int kDim = kv_layout(kId).head_dim_qk();
  const uint16_t* kv = p.kv + token * p.kv_stride_token;
  if (p.kv_weight) {
    if (p.weight_is_float) scale_row(kv, factor, static_cast<const float*>(p.kv_weight), latent);
    else scale_row(kv, factor, static_cast<const uint16_t*>(p.kv_weight), latent);
  } else {
    memcpy(latent, kv, sizeof(uint16_t) * kHeadDimV);
  }
  if constexpr (kDim > kHeadDimV) {
    constexpr size_t kBytes = sizeof(uint16_t) * (kDim - kHeadDimV);
    if (p.k_rope) memcpy(latent + kHeadDimV, p.k_rope + token * p.k_rope_stride_token, kBytes);
    else memset(latent + kHeadDimV, 0, kBytes);
  }
  uint16_t* rotated = latent + kDim - p.table.dim();
  rotate(rotated, p.table.half, rotation, rotated);
}

MLA_SIMD int64_t slot_of(const NormRopeInsertParams& p, int64_t token) {
  return p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                           : static_cast<const int32_t*>(p.slot_mapping)[token];
}

// Encodes the latent into its slot, if it has one.
template <KvLayoutId kId>
MLA_SIMD void insert_latent(const NormRopeInsertParams& p, int64_t token,
                            const uint16_t (&latent)[kv_layout(kId).head_dim_qk()]) {
  constexpr KvLayout kL = kv_layout(kId);
  const int64_t slot = slot_of(p, token);
  if (slot < 0 || slot >= p.num_slots) return;
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  encode_row<kId, Dtype::kBf16>(page, slot % p.page_size, p.page_size, latent, latent + kL.nope_dim,
                                layer_scale, format_max(kL.nope_format));
}

}  // namespace mla_fp8::cpu::MLA_ISA
