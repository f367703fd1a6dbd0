// quantize_kv on the CPU: for each token, the amax of each tile, its scale, then the codes. One pass over the
// latent, 16 lanes at a time; bound by memory.
#include "cpu/encode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

template <KvLayoutId kId, Dtype kDtype>
void quantize_token(const QuantizeKvParams& p, int64_t token) {
  constexpr KvLayout kL = kv_layout(kId);
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const int64_t row = slot % p.page_size;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;

  constexpr int kItemsize = kDtype == Dtype::kF32 ? 4 : 2;
  const void* nope = static_cast<const uint8_t*>(p.nope) + token * p.nope_stride_token * kItemsize;
  const void* rope =
      p.rope ? static_cast<const uint8_t*>(p.rope) + token * p.rope_stride_token * kItemsize : nullptr;

  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  encode_row<kId, kDtype>(page, row, p.page_size, nope, rope, layer_scale, p.fp8_max);
}

}  // namespace

void quantize_kv(const QuantizeKvParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_kv_layout(p.layout, [&](auto id) {
    with_dtype(p.dtype, [&](auto dtype) {
      for (int64_t token = begin; token < end; ++token) quantize_token<id, dtype>(p, token);
    });
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
