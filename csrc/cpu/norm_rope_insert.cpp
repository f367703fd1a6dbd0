// k_norm_rope_insert and qk_norm_rope_insert on the CPU: for each token, the latent by way of a row of bf16
// into the cache, then the heads; bound by memory.
#include <algorithm>

#include "cpu/insert_latent.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

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
    // Factors of some latents at once: what a root and a division take is hidden behind the next latent.
    constexpr int64_t kFactors = 8;
    float factors[kFactors] = {};
    for (int64_t token = begin; token < end; ++token) {
      const int64_t k = (token - begin) % kFactors, known = std::min({token + kFactors, end, p.num_insert});
      for (int64_t i = token; k == 0 && p.kv_weight && i < known; ++i)
        factors[i - token] = rms_factor(p.kv + i * p.kv_stride_token, p.eps);
      const Rotation* r = load_rotation(p.table, token, false, rotation) ? &rotation : nullptr;
      const int64_t slot = token < p.num_insert && r ? slot_of(p, token) : -1;
      if (slot >= 0 && slot < p.num_slots) {
        alignas(64) uint16_t latent[kv_layout(id).head_dim_qk()];
        make_latent<id>(p, token, rotation, factors[k], latent);
        insert_latent<id>(p, token, latent);
      }
      prepare_heads(p, token, r, streamed);
    }
  });
  if (streamed) end_streams();
}

}  // namespace mla_fp8::cpu::MLA_ISA
