#pragma once
// One latent into a cache row, the counterpart of decode.h: per tile its amax, its scale, then the codes.
// What quantize_kv does to a latent; ops that make the latent themselves end in it, so that their bytes are
// quantize_kv's.
#include "common/dtype.h"
#include "cpu/simd.h"

namespace mla_fp8::cpu::MLA_ISA {

// The latent is rounded to bf16 first, so the bytes do not depend on its dtype.
template <Dtype kDtype>
MLA_SIMD F32 load_latent(const void* row, int i) {
  if constexpr (kDtype == Dtype::kBf16) {
    return load_bf16(static_cast<const uint16_t*>(row) + i);
  } else if constexpr (kDtype == Dtype::kF32) {
    return from_bits(shift_left<16>(to_bf16(load(static_cast<const float*>(row) + i))));
  } else {
    float x[kLanes];
    for (int j = 0; j < kLanes; ++j) x[j] = half_to_float(static_cast<const uint16_t*>(row)[i + j]);
    return from_bits(shift_left<16>(to_bf16(load(x))));
  }
}

// As float_to_e4m3 in fp8.h, 16 lanes.
template <Format kFormat>
MLA_SIMD U32 to_e4m3(F32 x, float max_value) {
  using E = E4m3<kFormat>;
  const U32 u = bits(x), sign = and_(shift_right<24>(u), set1(0x80u));
  const U32 magnitude = and_(u, set1(0x7fffffffu)), limit = set1(float_bits(max_value));
  const U32 a = select(greater(magnitude, limit), limit, magnitude);

  const F32 magic = set1(E::kQuantum * 0x1p23f);
  const U32 subnormal = sub(bits(add(from_bits(a), magic)), bits(magic));
  const U32 lsb = and_(shift_right<20>(a), set1(1u));
  const U32 rounded = shift_right<20>(add(a, add(lsb, set1(0x7ffffu))));
  const U32 normal = sub(rounded, set1((127u - E::kBias) << 3));
  const U32 code = select(greater(set1(E::kMinNormal), a), subnormal, normal);

  U32 signed_code = or_(code, sign);
  if constexpr (E::kFnuz) signed_code = select(equal(code, set1(0u)), code, signed_code);  // no -0
  return select(greater(magnitude, set1(kInfBits)), set1(uint32_t{E::kNan}), signed_code);
}

// As float_to_e2m1 in fp8.h, 16 lanes: a code in each, 0 of NaN.
MLA_SIMD U32 to_e2m1(F32 x) {
  const U32 u = bits(x), sign = and_(shift_right<28>(u), set1(8u));
  const U32 magnitude = and_(u, set1(0x7fffffffu)), limit = set1(float_bits(6.0f));
  const U32 a = select(greater(magnitude, limit), limit, magnitude);
  const F32 magic = set1(0x1p22f);
  const U32 subnormal = sub(bits(add(from_bits(a), magic)), bits(magic));
  const U32 lsb = and_(shift_right<22>(a), set1(1u));
  const U32 normal = sub(shift_right<22>(add(a, add(lsb, set1(0x1fffffu)))), set1(126u << 1));
  const U32 code = or_(select(greater(set1(float_bits(1.0f)), a), subnormal, normal), sign);
  return select(greater(magnitude, set1(kInfBits)), set1(0u), code);
}

// A tile of e2m1 is one vector. Returns its scale.
template <Dtype kDtype>
MLA_SIMD uint8_t encode_e2m1_tile(uint8_t* dst, const void* src, int first, float scale_floor) {
  const F32 latent = load_latent<kDtype>(src, first);
  const U32 magnitude = and_(bits(latent), set1(0x7fffffffu)), inf = set1(kInfBits);
  const U32 without_inf = select(equal(magnitude, inf), set1(0u), magnitude);
  const float amax = reduce_max(from_bits(select(greater(magnitude, inf), inf, without_inf)));
  const uint8_t scale_code = e2m1_tile_scale(amax, scale_floor);
  const float scale = e4m3_to_float<Format::kE4m3fn>(scale_code);
  float x[kLanes];
  store(x, latent);
  for (int i = 0; i < kLanes; ++i) x[i] /= scale;
  uint8_t codes[kLanes];
  store_u8(codes, to_e2m1(load(x)));
  for (int i = 0; i < kLanes / 2; ++i) dst[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  return scale_code;
}

// Largest finite magnitude: NaN and infinity stay their own element's affair.
template <Dtype kDtype>
MLA_SIMD float finite_amax(const void* row, int first, int count) {
  const U32 shift = set1(0x80000000u - kInfBits);  // what is not finite becomes negative
  U32 amax = shift;
  for (int i = 0; i < count; i += kLanes) {
    const U32 magnitude = and_(bits(load_latent<kDtype>(row, first + i)), set1(0x7fffffffu));
    amax = max_signed(amax, add(magnitude, shift));
  }
  return reduce_max(from_bits(sub(amax, shift)));
}

template <Format kFormat, Dtype kDtype>
MLA_SIMD void encode(uint8_t* dst, const void* src, int first, int count, float inv_scale, float fp8_max) {
  for (int i = first; i < first + count; i += kLanes) {
    const F32 x = load_latent<kDtype>(src, i);
    if constexpr (kFormat == Format::kBf16) {
      store_u16(reinterpret_cast<uint16_t*>(dst) + i, shift_right<16>(bits(x)));
    } else {
      store_u8(dst + i, to_e4m3<kFormat>(mul(x, set1(inv_scale)), fp8_max));
    }
  }
}

// The uniform FP8 layouts divide by an arbitrary scale: q = RNE(clamp(x / scale)), a true division.
template <Format kFormat, Dtype kDtype>
MLA_SIMD void encode_divided(uint8_t* dst, const void* src, int dim, float scale, float fp8_max) {
  for (int i = 0; i < dim; i += kLanes) {
    float x[kLanes];
    store(x, load_latent<kDtype>(src, i));
    for (int j = 0; j < kLanes; ++j) x[j] /= scale;
    store_u8(dst + i, to_e4m3<kFormat>(load(x), fp8_max));
  }
}

// nope and rope are where the latent's parts begin, as kDtype (null: a rope of zeros); page is the row's
// page. `layer_scale` is that of the uniform FP8 layouts.
template <KvLayoutId kId, Dtype kDtype>
MLA_SIMD void encode_row(uint8_t* page, int64_t row, int64_t page_size, const void* nope, const void* rope,
                         float layer_scale, float fp8_max) {
  constexpr KvLayout kL = kv_layout(kId);
  uint8_t* dst = page + kL.token_offset(row);
  if constexpr (kL.scale_format == ScaleFormat::kPerLayer) {
    encode_divided<kL.nope_format, kDtype>(dst, nope, kL.nope_dim, layer_scale, fp8_max);
    encode_divided<kL.rope_format, kDtype>(dst + kL.rope_offset(), rope, kL.rope_dim, layer_scale, fp8_max);
  } else if constexpr (kL.scale_format == ScaleFormat::kNone) {
    encode<kL.nope_format, kDtype>(dst, nope, 0, kL.nope_dim, 1.0f, 0.0f);
    encode<kL.rope_format, kDtype>(dst + kL.rope_offset(), rope, 0, kL.rope_dim, 1.0f, 0.0f);
  } else {
    uint8_t* scales = page + kL.scale_offset(row, page_size);
    if constexpr (kL.nope_format == Format::kE2m1) {
      static_assert(kL.tile_dim == kLanes);
      for (int tile = 0; tile < kL.num_tiles(); ++tile) {
        const int first = tile * kL.tile_dim;
        scales[tile] = encode_e2m1_tile<kDtype>(dst + first / 2, nope, first, kL.scale_floor);
      }
    } else {
      uint8_t exponent[kL.num_tiles()];  // of all tiles first: no code waits for the scale of its own tile
      for (int tile = 0; tile < kL.num_tiles(); ++tile) {
        const float amax = finite_amax<kDtype>(nope, tile * kL.tile_dim, kL.tile_dim);
        exponent[tile] = tile_scale_exponent(amax, kL.amax_floor, kL.scale_floor, fp8_max);
        store_scale<kL.scale_format>(scales, tile, exponent[tile]);
      }
      for (int tile = 0; tile < kL.num_tiles(); ++tile)
        encode<kL.nope_format, kDtype>(dst, nope, tile * kL.tile_dim, kL.tile_dim,
                                       ue8m0_reciprocal(exponent[tile]), fp8_max);
    }
    constexpr int kUsed = kL.num_tiles() * kL.scale_itemsize();
    memset(scales + kUsed, 0, kL.scale_bytes() - kUsed);
    if (rope) encode<kL.rope_format, kDtype>(dst + kL.rope_offset(), rope, 0, kL.rope_dim, 1.0f, 0.0f);
    else memset(dst + kL.rope_offset(), 0, kL.rope_bytes());
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
