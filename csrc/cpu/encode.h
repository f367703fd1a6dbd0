#pragma once
// One latent into a cache row, the counterpart of decode.h: per tile its amax, its scale, then the codes.
// What quantize_kv does to a latent; ops that make the latent themselves end in it, so that their bytes are
// quantize_kv's.
#include "common/dtype.h"
#include "cpu/decode.h"
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

// Of 16 tiles of e2m1, a vector each: their scales, one to a lane, then their codes.
template <Dtype kDtype>
MLA_SIMD void encode_e2m1_tiles(uint8_t* dst, uint8_t* scales, const void* src, int first,
                                float scale_floor) {
  const U32 inf = set1(kInfBits);
  F32 x[kLanes], magnitudes[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    x[i] = load_latent<kDtype>(src, first + i * kLanes);
    const U32 magnitude = and_(bits(x[i]), set1(0x7fffffffu));
    const U32 without_inf = select(equal(magnitude, inf), set1(0u), magnitude);
    magnitudes[i] = from_bits(select(greater(magnitude, inf), inf, without_inf));  // infinity stands for NaN
  }
  transpose(magnitudes);
  F32 amax = magnitudes[0];
  for (int i = 1; i < kLanes; ++i) amax = max(amax, magnitudes[i]);

  // As e2m1_tile_scale in fp8.h.
  constexpr Format kScale = Format::kE4m3fn;
  const F32 scaled = mul(amax, set1(1.0f / 6.0f)), floor = set1(scale_floor);
  const U32 code = to_e4m3<kScale>(select(less(floor, scaled), scaled, floor), format_max(kScale));
  store_u8(scales, select(equal(bits(amax), inf), set1(uint32_t{E4m3<kScale>::kNan}), code));
  float scale[kLanes];
  store(scale, load_e4m3<kScale>(scales));

  for (int i = 0; i < kLanes; ++i) {
    uint64_t codes[2];  // a byte each; two of them become one
    store_u8(reinterpret_cast<uint8_t*>(codes), to_e2m1(div(x[i], set1(scale[i]))));
    for (uint64_t& eight : codes) {
      eight = (eight | eight >> 4) & 0x00ff00ff00ff00ffu;
      eight = (eight | eight >> 8) & 0x0000ffff0000ffffu;
      const auto four = static_cast<uint32_t>(eight | eight >> 16);
      memcpy(dst, &four, sizeof four);
      dst += sizeof four;
    }
  }
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
      static_assert(kL.tile_dim == kLanes && kL.num_tiles() % kLanes == 0);
      for (int tile = 0; tile < kL.num_tiles(); tile += kLanes) {
        const int first = tile * kL.tile_dim;
        encode_e2m1_tiles<kDtype>(dst + first / 2, scales + tile, nope, first, kL.scale_floor);
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
