// k_norm_rope_insert and qk_norm_rope_insert on the CPU: token by token the latent through a row of bf16 into
// the cache, then its heads; bound by memory.
#include <algorithm>

#include "cpu/encode.h"
#include "cpu/isa.h"
#include "cpu/norm_rope.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

// `factor` is that of the latent, if it is normed.
template <KvLayoutId kId>
void insert_latent(const NormRopeInsertParams& p, int64_t token, const Rotation* rotation, float factor) {
  constexpr KvLayout kL = kv_layout(kId);
  constexpr int kDim = kL.head_dim_qk();
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[token];
  if (slot < 0 || slot >= p.num_slots || !rotation) return;
  const uint16_t* kv = p.kv + token * p.kv_stride_token;
  alignas(64) uint16_t latent[kDim];
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
  rotate(rotated, p.table.half, *rotation, rotated);

  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;
  encode_row<kId, Dtype::kBf16>(page, slot % p.page_size, p.page_size, latent, latent + kL.nope_dim,
                                layer_scale, format_max(kL.nope_format));
}

void prepare_heads(const NormRopeInsertParams& p, int64_t token, const Rotation* rotation, bool streamed) {
  for (int64_t head = 0; head < p.num_heads; ++head) {
    uint16_t* out = p.out_q + token * p.out_q_stride_token + head * p.out_q_stride_head;
    if (head >= p.num_q_heads || !rotation) {
      memset(out, 0, sizeof(uint16_t) * p.head_dim);
      continue;
    }
    const uint16_t* q = p.q + token * p.q_stride_token + head * p.q_stride_head;
    if (!p.norm_q) {
      rotate_head(q, p.head_dim, p.table.half, rotation, streamed, out);
      continue;
    }
    scale_row<void>(q, rms_factor(q, p.eps), nullptr, out);
    uint16_t* rotated = out + kHeadDimV - p.table.dim();
    rotate(rotated, p.table.half, *rotation, rotated);
  }
}

}  // namespace

void norm_rope_insert(const NormRopeInsertParams& p, bool streamed, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_kv_layout(p.layout, [&](auto id) {
    Rotation rotation;
    // Of some latents at once: what a root and a division take is then hidden behind the next latent.
    constexpr int64_t kFactors = 8;
    float factors[kFactors] = {};
    for (int64_t token = begin; token < end; ++token) {
      const int64_t k = (token - begin) % kFactors, known = std::min({token + kFactors, end, p.num_insert});
      for (int64_t i = token; k == 0 && p.kv_weight && i < known; ++i)
        factors[i - token] = rms_factor(p.kv + i * p.kv_stride_token, p.eps);
      const Rotation* r = load_rotation(p.table, token, false, rotation) ? &rotation : nullptr;
      if (token < p.num_insert) insert_latent<id>(p, token, r, factors[k]);
      prepare_heads(p, token, r, streamed);
    }
  });
  if (streamed) end_streams();
}

}  // namespace mla_fp8::cpu::MLA_ISA
