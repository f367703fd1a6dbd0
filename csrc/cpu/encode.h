#pragma once
// Encodes a latent into a cache row, as decode.h decodes one: the amax and scale of each tile, then the
// codes. This is what quantize_kv does with a latent. Ops that make latents themselves end with it, so that
// their bytes are quantize_kv's.
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

// The codes nearest to magnitudes, which are no larger than the format's largest value. A code has kMantissa
// bits below an exponent; kMask covers both; kMinNormal is the least normal value. Adding 2^23 quanta leaves
// the rounded multiple of the quantum in the low bits. The exponent's own bits, less those of kMinNormal,
// complete the code. These are even, so they are taken off what is added, and rounding stays as it is.
template <int kMantissa, uint32_t kMinNormal, uint32_t kMask>
MLA_SIMD U32 to_minifloat(U32 magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr uint32_t kMagic = uint32_t{kDropped} << 23 | ((0u - (kMinNormal >> kDropped)) & kMask);
  static_assert(kMagic % 2 == 0);
  const U32 exponent = max_signed(and_(magnitude, set1(kInfBits)), set1(kMinNormal));
  const U32 multiple = bits(add(from_bits(magnitude), from_bits(add(exponent, set1(kMagic)))));
  return and_(add(multiple, shift_right<kDropped>(exponent)), set1(kMask));
}

// Sixteen codes by float_to_e4m3 of fp8.h.
template <Format kFormat>
MLA_SIMD U32 to_e4m3(F32 x, float max_value) {
  using E = E4m3<kFormat>;
  const U32 u = bits(x), sign = and_(shift_right<24>(u), set1(0x80u));
  const U32 a = min_signed(and_(u, set1(0x7fffffffu)), set1(float_bits(max_value)));
  const U32 code = to_minifloat<3, E::kMinNormal, 0x7f>(a);
  U32 signed_code = or_(code, sign);
  if constexpr (E::kFnuz) signed_code = select(equal(code, set1(0u)), code, signed_code);  // no -0
  return select(is_nan(x), set1(uint32_t{E::kNan}), signed_code);
}

// Sixteen codes by float_to_e2m1 of fp8.h, one a lane.
MLA_SIMD U32 to_e2m1(F32 x, uint8_t of_nan) {
  const U32 u = bits(x), sign = and_(shift_right<28>(u), set1(8u));
  const U32 a = min_signed(and_(u, set1(0x7fffffffu)), set1(float_bits(6.0f)));
  const U32 code = or_(to_minifloat<1, 127u << 23, 7>(a), sign);
  return select(is_nan(x), set1(uint32_t{of_nan}), code);
}

// Stores sixteen e2m1 codes as eight bytes.
MLA_SIMD void store_e2m1(uint8_t* dst, U32 codes) {
  uint8_t bytes[kLanes];
  store_u8(bytes, codes);
#if MLA_SIMD_AVX512 || MLA_SIMD_AVX2
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  const __m128i words = _mm_maddubs_epi16(all, _mm_set1_epi16(0x1001));  // even codes + 16 times odd ones
  _mm_storel_epi64(reinterpret_cast<__m128i*>(dst), _mm_packus_epi16(words, words));
#else
  for (int i = 0; i < kLanes / 2; ++i) dst[i] = static_cast<uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
#endif
}

// Encodes 16 tiles of e2m1, a vector each: the scales, one a lane, then the codes.
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

  // e2m1_tile_scale of fp8.h.
  constexpr Format kScale = Format::kE4m3fn;
  const F32 scaled = mul(amax, set1(1.0f / 6.0f)), floor = set1(scale_floor);
  const U32 code = to_e4m3<kScale>(select(less(floor, scaled), scaled, floor), format_max(kScale));
  store_u8(scales, select(equal(bits(amax), inf), set1(uint32_t{E4m3<kScale>::kNan}), code));
  float scale[kLanes];
  store(scale, load_e4m3<kScale>(scales));

  for (int i = 0; i < kLanes; ++i) store_e2m1(dst + i * kLanes / 2, to_e2m1(div(x[i], set1(scale[i])), 0));
}

#if MLA_SIMD_AVX512
// finite_amax() of bf16, 32 elements at a time in 16-bit lanes.
MLA_SIMD float finite_amax_bf16(const uint16_t* src, int count) {
  constexpr int kShift = 0x8000 - (kInfBits >> 16);  // what is not finite becomes negative
  const __m512i mask = _mm512_set1_epi16(0x7fff), shift = _mm512_set1_epi16(kShift);
  __m512i amax = shift;
  for (int i = 0; i < count; i += 32)
    amax =
        _mm512_max_epi16(amax, _mm512_add_epi16(_mm512_and_si512(_mm512_loadu_si512(src + i), mask), shift));
  const __m256i sixteen = _mm256_max_epi16(_mm512_castsi512_si256(amax), _mm512_extracti64x4_epi64(amax, 1));
  const __m128i eight = _mm_max_epi16(_mm256_castsi256_si128(sixteen), _mm256_extracti128_si256(sixteen, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return bf16_to_float(static_cast<uint16_t>((~_mm_cvtsi128_si32(least) & 0xffff) - kShift));
}

// encode_tiles() of bf16, 32 elements at a time in 16-bit lanes. A magnitude becomes a code with eight bits
// behind the point, and is rounded. Subnormal bf16 are below half a quantum at any scale. Infinity, as the
// power of two that its bits would be, is above all codes up to kMostExponent. One loop over all tiles keeps
// constants in registers.
constexpr uint8_t kMostExponent = 240;
template <Format kFormat, int kTile>
MLA_SIMD void encode_bf16_tiles(uint8_t* dst, const uint16_t* src, int count, const uint8_t* exponent,
                                float fp8_max) {
  using E = E4m3<kFormat>;
  const auto all = [](int x)
                       __attribute__((always_inline)) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
  const int max_code = static_cast<int>(float_bits(fp8_max) >> 16) - ((127 - E::kBias) << 7);
  for (int i = 0; i < count * kTile; i += 32) {
    const __m512i to_code = all((exponent[i / kTile] - E::kBias) << 7);  // bf16 has 7 bits below its exponent
    const __m512i x = _mm512_loadu_si512(src + i), magnitude = _mm512_and_si512(x, all(0x7fff));
    const __m512i code = _mm512_min_epi16(_mm512_sub_epi16(magnitude, to_code), all(max_code));
    // A code without an exponent is the mantissa with its leading 1, shifted.
    const __m512i mantissa = _mm512_or_si512(_mm512_slli_epi16(magnitude, 8), all(0x8000));
    const __m512i distance = _mm512_sub_epi16(all(5), _mm512_srai_epi16(code, 7));
    const __mmask32 is_normal = _mm512_cmpgt_epi16_mask(code, all(0x7f));
    const __m512i fixed = _mm512_mask_slli_epi16(_mm512_srlv_epi16(mantissa, distance), is_normal, code, 4);
    const __m512i lsb = _mm512_and_si512(_mm512_srli_epi16(fixed, 8), all(1));
    const __m512i rounded = _mm512_add_epi16(fixed, _mm512_add_epi16(lsb, all(0x7f)));
    __m512i sign = _mm512_andnot_si512(all(0x7fff), x);
    if constexpr (E::kFnuz)  // no -0
      sign = _mm512_maskz_mov_epi16(_mm512_cmpgt_epi16_mask(rounded, all(0xff)), sign);
    const __m512i both = _mm512_or_si512(_mm512_and_si512(rounded, all(0x7f00)), sign);
    const __mmask32 is_nan = _mm512_cmpgt_epi16_mask(magnitude, all(kInfBits >> 16));
    const __m512i result = _mm512_mask_mov_epi16(_mm512_srli_epi16(both, 8), is_nan, all(E::kNan));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm512_cvtepi16_epi8(result));
  }
}
#endif

// The largest finite magnitude of vectors x(0) to x(count - 1). NaN and infinity are left out: they concern
// their own element alone.
template <class X>
MLA_SIMD float finite_amax(int count, const X& x) {
  const U32 shift = set1(0x80000000u - kInfBits);  // what is not finite becomes negative
  U32 amax = shift;
  for (int i = 0; i < count; ++i) amax = max_signed(amax, add(and_(bits(x(i)), set1(0x7fffffffu)), shift));
  return reduce_max(from_bits(sub(amax, shift)));
}

template <Dtype kDtype>
MLA_SIMD float finite_amax(const void* row, int first, int count) {
#if MLA_SIMD_AVX512
  if constexpr (kDtype == Dtype::kBf16)
    return finite_amax_bf16(static_cast<const uint16_t*>(row) + first, count);
#endif
  return finite_amax(count / kLanes, [&](int i) __attribute__((always_inline)) {
    return load_latent<kDtype>(row, first + i * kLanes);
  });
}

// The codes of x / 2^(exponent - 127) for `count` tiles, with an exponent each from tile_scale_exponent.
template <Format kFormat, Dtype kDtype, int kTile>
MLA_SIMD void encode_tiles(uint8_t* dst, const void* src, int first, int count, const uint8_t* exponent,
                           float fp8_max) {
#if MLA_SIMD_AVX512
  if constexpr (kDtype == Dtype::kBf16) {
    bool is_small = true;
    for (int tile = 0; tile < count; ++tile) is_small &= exponent[tile] <= kMostExponent;
    if (is_small)
      return encode_bf16_tiles<kFormat, kTile>(dst + first, static_cast<const uint16_t*>(src) + first, count,
                                               exponent, fp8_max);
  }
#endif
  for (int i = 0; i < count * kTile; i += kLanes) {
    const F32 scaled = mul(load_latent<kDtype>(src, first + i), set1(ue8m0_reciprocal(exponent[i / kTile])));
    store_u8(dst + first + i, to_e4m3<kFormat>(scaled, fp8_max));
  }
}

// Copies elements as bf16.
template <Dtype kDtype>
MLA_SIMD void copy_bf16(uint8_t* dst, const void* src, int count) {
  for (int i = 0; i < count; i += kLanes)
    store_u16(reinterpret_cast<uint16_t*>(dst) + i, shift_right<16>(bits(load_latent<kDtype>(src, i))));
}

// Encodes with an arbitrary scale, as uniform FP8 layouts do: round(clamp(x / scale)), by a true division.
template <Format kFormat, Dtype kDtype>
MLA_SIMD void encode_divided(uint8_t* dst, const void* src, int first, int count, float scale,
                             float fp8_max) {
  for (int i = first; i < first + count; i += kLanes)
    store_u8(dst + i, to_e4m3<kFormat>(div(load_latent<kDtype>(src, i), set1(scale)), fp8_max));
}

// Encodes a latent into row `row` of `page`. nope and rope are its parts, as kDtype; a null rope is zeros.
// `layer_scale` is that of uniform FP8 layouts.
template <KvLayoutId kId, Dtype kDtype>
MLA_SIMD void encode_row(uint8_t* page, int64_t row, int64_t page_size, const void* nope, const void* rope,
                         float layer_scale, float fp8_max) {
  constexpr KvLayout kL = kv_layout(kId);
  uint8_t* dst = page + kL.token_offset(row);
  if constexpr (kL.scale_format == ScaleFormat::kPerLayer) {
    encode_divided<kL.nope_format, kDtype>(dst, nope, 0, kL.nope_dim, layer_scale, fp8_max);
    encode_divided<kL.rope_format, kDtype>(dst + kL.rope_offset(), rope, 0, kL.rope_dim, layer_scale,
                                           fp8_max);
  } else if constexpr (kL.scale_format == ScaleFormat::kNone) {
    static_assert(kL.nope_format == Format::kBf16 && kL.rope_format == Format::kBf16);
    copy_bf16<kDtype>(dst, nope, kL.nope_dim);
    copy_bf16<kDtype>(dst + kL.rope_offset(), rope, kL.rope_dim);
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
      encode_tiles<kL.nope_format, kDtype, kL.tile_dim>(dst, nope, 0, kL.num_tiles(), exponent, fp8_max);
    }
    constexpr int kUsed = kL.num_tiles() * kL.scale_itemsize();
    memset(scales + kUsed, 0, kL.scale_bytes() - kUsed);
    static_assert(kL.rope_dim == 0 || kL.rope_format == Format::kBf16);
    if (rope) copy_bf16<kDtype>(dst + kL.rope_offset(), rope, kL.rope_dim);
    else memset(dst + kL.rope_offset(), 0, kL.rope_bytes());
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
