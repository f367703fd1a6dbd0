#pragma once
// Decodes one token of a cache to bf16: dequantize_kv writes it out, attention stages it.
#include "common/fp8.h"
#include "cpu/simd.h"

namespace mla_fp8::cpu::MLA_ISA {

// Sixteen values by e4m3_to_float of fp8.h.
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

// Whether e4m3 * scale is a normal bf16 (or 0) for every code: exponents are added and nothing is rounded.
MLA_SIMD bool is_exact_scale(float scale) {
  const uint32_t u = float_bits(scale);
  return (u & 0x807fffffu) == 0 && u >> 23 >= 127 - 110 && u >> 23 <= 127 + 110;
}

#if MLA_SIMD_AVX512
// decode() for an exact scale: 32 codes at a time in 16-bit lanes, subnormals by a table of eight.
template <Format kFormat>
MLA_SIMD void decode_exact(const uint8_t* src, int count, float scale, uint16_t* dst) {
  using E = E4m3<kFormat>;
  const int exponent = static_cast<int>(float_bits(scale) >> 23) - 127;
  // The bf16 of 0 to 7 quanta at scale 1: the exponent of the top bit, and the rest as mantissa.
  constexpr int kQuantum = (127 - E::kBias - 2) << 7;
  constexpr auto entry = [](int top, int mantissa) {
    return static_cast<int16_t>(kQuantum + (top << 7) + mantissa);
  };
  alignas(16) static constexpr int16_t kSubnormals[8] = {
      0, entry(0, 0), entry(1, 0), entry(1, 64), entry(2, 0), entry(2, 32), entry(2, 64), entry(2, 96)};
  const __m512i quanta =
      _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(kSubnormals)));
  const __m512i table =
      _mm512_mask_add_epi16(quanta, 0xfe, quanta, _mm512_set1_epi16(static_cast<int16_t>(exponent << 7)));
  const __m512i base = _mm512_set1_epi16(static_cast<int16_t>((127 - E::kBias + exponent) << 7));
  const __m512i magnitude_mask = _mm512_set1_epi16(0x7f), nan = _mm512_set1_epi16(kBf16Nan);
  for (int i = 0; i < count; i += 32) {
    const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
    const __m512i magnitude = _mm512_and_si512(code, magnitude_mask);
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), base);
    const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    value = _mm512_mask_permutexvar_epi16(value, is_subnormal, magnitude, table);
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(magnitude_mask, code), 8);
    const __mmask32 is_nan = E::kFnuz ? _mm512_cmpeq_epi16_mask(code, _mm512_set1_epi16(0x80))
                                      : _mm512_cmpeq_epi16_mask(magnitude, magnitude_mask);
    value = _mm512_mask_mov_epi16(_mm512_or_si512(value, sign), is_nan, nan);
    _mm512_storeu_si512(dst + i, value);
  }
}
#endif

// Decodes a row of e2m1 with an e4m3 scale for each tile of 16. A product is a bf16, so nothing is rounded.
MLA_SIMD void decode_e2m1(const uint8_t* src, const uint8_t* scale_codes, int num_tiles, uint16_t* dst) {
  static_assert(kLanes == 16);
  for (int begin = 0; begin < num_tiles; begin += kLanes) {
    float scales[kLanes];
    store(scales, load_e4m3<Format::kE4m3fn>(scale_codes + begin));
#if MLA_SIMD_AVX512
    // A table for each tile: the bf16 of the 16 codes.
    const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f,
                                         -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(0x00100010), 1);
    const auto table = [&](float scale) __attribute__((always_inline)) {
      if (scale != scale) return _mm256_set1_epi16(kBf16Nan);
      const __m512i products = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(scale)));
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(products, 16));
    };
    for (int i = 0; i < kLanes; i += 2, src += kLanes, dst += 2 * kLanes) {
      const __m512i both =
          _mm512_inserti64x4(_mm512_castsi256_si512(table(scales[i])), table(scales[i + 1]), 1);
      const __m512i bytes =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));  // two codes a lane
      const __m512i codes = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)),
                                             _mm512_set1_epi32(0x000f000f));
      _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(_mm512_or_si512(codes, second), both));
    }
#else
    for (int i = 0; i < kLanes; ++i, src += kLanes / 2, dst += kLanes) {
      uint16_t packed[kLanes / 4];
      memcpy(packed, src, sizeof packed);
      uint32_t words[kLanes / 4];
      for (int j = 0; j < kLanes / 4; ++j) words[j] = e2m1x4_to_e4m3(packed[j]);
      uint8_t codes[kLanes];
      memcpy(codes, words, sizeof codes);
      store_u16(dst, to_bf16(mul(load_e4m3<Format::kE4m3fn>(codes), set1(kE2m1Unit * scales[i]))));
    }
#endif
  }
}

// value = e4m3 * scale in float, rounded once to bf16.
template <Format kFormat>
MLA_SIMD void decode(const uint8_t* src, int count, float scale, uint16_t* dst) {
  if constexpr (kFormat == Format::kBf16) {
    memcpy(dst, src, 2 * count);
  } else {
#if MLA_SIMD_AVX512
    if (is_exact_scale(scale)) return decode_exact<kFormat>(src, count, scale, dst);
#endif
    for (int i = 0; i < count; i += kLanes)
      store_u16(dst + i, to_bf16(mul(load_e4m3<kFormat>(src + i), set1(scale))));
  }
}

// Decodes row `row` of `page` to head_dim_qk bf16. `layer_scale` is that of uniform FP8 layouts.
template <KvLayoutId kId>
MLA_SIMD void decode_row(const uint8_t* page, int64_t row, int64_t page_size, float layer_scale,
                         uint16_t* dst) {
  constexpr KvLayout kL = kv_layout(kId);
  const uint8_t* src = page + kL.token_offset(row);
  if constexpr (kL.nope_format == Format::kE2m1) {
    static_assert(kL.tile_dim == kLanes && kL.scale_format == ScaleFormat::kE4m3 && kL.rope_dim == 0);
    decode_e2m1(src, page + kL.scale_offset(row, page_size), kL.num_tiles(), dst);
    return;
  } else if constexpr (kL.num_tiles() > 0) {
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
