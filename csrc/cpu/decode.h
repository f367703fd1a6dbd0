#pragma once
// One cached token to bf16. The dequantiser writes it out, attention keeps it in its staging buffer.
#include "common/fp8.h"
#include "cpu/simd.h"

namespace mla_fp8::cpu::MLA_ISA {

// As e4m3_to_float in fp8.h, 16 lanes.
template <Format kFormat>
MLA_SIMD F32 load_e4m3(const uint8_t* p) {
  using E = E4m3<kFormat>;
  const U32 code = load_u8(p), magnitude = and_(code, set1(0x7fu));
  const U32 sign = shift_left<24>(and_(code, set1(0x80u)));
  const U32 normal = add(shift_left<20>(magnitude), set1((127u - E::kBias) << 23));
  const U32 subnormal = bits(mul(to_float(magnitude), set1(E::kQuantum)));
  const U32 value = or_(select(greater(set1(8u), magnitude), subnormal, normal), sign);
  const Mask nan = E::kFnuz ? equal(code, set1(0x80u)) : equal(magnitude, set1(0x7fu));
  return from_bits(select(nan, set1(kNanBits), value));
}

// value = e4m3 * scale in float, rounded once.
template <Format kFormat>
MLA_SIMD void decode(const uint8_t* src, int count, float scale, uint16_t* dst) {
  if constexpr (kFormat == Format::kBf16) {
    memcpy(dst, src, 2 * count);
  } else {
    for (int i = 0; i < count; i += kLanes)
      store_u16(dst + i, to_bf16(mul(load_e4m3<kFormat>(src + i), set1(scale))));
  }
}

// Row `row` of `page`: head_dim_qk bf16. `layer_scale` is that of the uniform FP8 layouts.
template <KvLayoutId kId>
MLA_SIMD void decode_row(const uint8_t* page, int64_t row, int64_t page_size, float layer_scale,
                         uint16_t* dst) {
  constexpr KvLayout kL = kv_layout(kId);
  const uint8_t* src = page + kL.token_offset(row);
  if constexpr (kL.num_tiles() > 0) {
    const uint8_t* scales = page + kL.scale_offset(row, page_size);
    for (int tile = 0; tile < kL.num_tiles(); ++tile) {
      const int first = tile * kL.tile_dim;
      decode<kL.nope_format>(src + first, kL.tile_dim, load_scale<kL.scale_format>(scales, tile),
                             dst + first);
    }
  } else {
    decode<kL.nope_format>(src, kL.nope_dim, layer_scale, dst);
  }
  decode<kL.rope_format>(src + kL.rope_offset(), kL.rope_dim, layer_scale, dst + kL.nope_dim);
}

}  // namespace mla_fp8::cpu::MLA_ISA
