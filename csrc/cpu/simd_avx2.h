// Part of simd.h, which includes it inside its namespace: the operations by AVX2.
#pragma once

struct F32 {
  __m256 v[2];
};
struct U32 {
  __m256i v[2];
};
struct Mask {
  __m256i v[2];
};
struct Bf16x32 {
  __m256i v[2];
};

MLA_SIMD F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MLA_SIMD F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MLA_SIMD void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.v[0]);
  _mm256_storeu_ps(p + 8, x.v[1]);
}
#define MLA_LANEWISE(name, Result, Args, expression) \
  MLA_SIMD Result name Args {                        \
    Result r;                                        \
    for (int i = 0; i < 2; ++i) r.v[i] = expression; \
    return r;                                        \
  }
MLA_LANEWISE(add, F32, (F32 a, F32 b), _mm256_add_ps(a.v[i], b.v[i]))
MLA_LANEWISE(sub, F32, (F32 a, F32 b), _mm256_sub_ps(a.v[i], b.v[i]))
MLA_LANEWISE(mul, F32, (F32 a, F32 b), _mm256_mul_ps(a.v[i], b.v[i]))
MLA_LANEWISE(div, F32, (F32 a, F32 b), _mm256_div_ps(a.v[i], b.v[i]))
MLA_LANEWISE(fma, F32, (F32 a, F32 b, F32 c), _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]))
MLA_LANEWISE(max, F32, (F32 a, F32 b), _mm256_max_ps(a.v[i], b.v[i]))
MLA_LANEWISE(bits, U32, (F32 x), _mm256_castps_si256(x.v[i]))
MLA_LANEWISE(from_bits, F32, (U32 x), _mm256_castsi256_ps(x.v[i]))
MLA_LANEWISE(to_float, F32, (U32 x), _mm256_cvtepi32_ps(x.v[i]))
MLA_LANEWISE(set1, U32, (uint32_t x), _mm256_set1_epi32(static_cast<int>(x)))
MLA_LANEWISE(add, U32, (U32 a, U32 b), _mm256_add_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(sub, U32, (U32 a, U32 b), _mm256_sub_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(and_, U32, (U32 a, U32 b), _mm256_and_si256(a.v[i], b.v[i]))
MLA_LANEWISE(or_, U32, (U32 a, U32 b), _mm256_or_si256(a.v[i], b.v[i]))
MLA_SIMD __m256 first_half(F32 x) { return x.v[0]; }
MLA_SIMD __m256 second_half(F32 x) { return x.v[1]; }
template <int kBits>
MLA_LANEWISE(shift_left, U32, (U32 a), _mm256_slli_epi32(a.v[i], kBits))
template <int kBits>
MLA_LANEWISE(shift_right, U32, (U32 a), _mm256_srli_epi32(a.v[i], kBits))
MLA_LANEWISE(greater, Mask, (U32 a, U32 b), _mm256_cmpgt_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(max_signed, U32, (U32 a, U32 b), _mm256_max_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(min_signed, U32, (U32 a, U32 b), _mm256_min_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(is_nan, Mask, (F32 x), _mm256_castps_si256(_mm256_cmp_ps(x.v[i], x.v[i], _CMP_UNORD_Q)))
MLA_LANEWISE(equal, Mask, (U32 a, U32 b), _mm256_cmpeq_epi32(a.v[i], b.v[i]))
MLA_LANEWISE(less, Mask, (F32 a, F32 b), _mm256_castps_si256(_mm256_cmp_ps(a.v[i], b.v[i], _CMP_LT_OQ)))
MLA_LANEWISE(select, U32, (Mask m, U32 a, U32 b), _mm256_blendv_epi8(b.v[i], a.v[i], m.v[i]))
MLA_LANEWISE(select, F32, (Mask m, F32 a, F32 b),
             _mm256_blendv_ps(b.v[i], a.v[i], _mm256_castsi256_ps(m.v[i])))
MLA_LANEWISE(load_u8, U32, (const uint8_t* p),
             _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))))
MLA_LANEWISE(load_u16, U32, (const uint16_t* p),
             _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))))
MLA_SIMD
void store_u16(uint16_t* p, U32 x) {
  const __m256i packed = _mm256_packus_epi32(x.v[0], x.v[1]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
MLA_SIMD void store_u8(uint8_t* p, U32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.v[0], x.v[1]), 0xd8);
  const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
MLA_SIMD void unzip(F32 first, F32 second, F32* even, F32* odd) {
  F32* const out[2] = {even, odd};
  for (int i = 0; i < 2; ++i) {
    const F32& in = i == 0 ? first : second;
    const __m256d evens = _mm256_castps_pd(_mm256_shuffle_ps(in.v[0], in.v[1], 0x88));
    const __m256d odds = _mm256_castps_pd(_mm256_shuffle_ps(in.v[0], in.v[1], 0xdd));
    out[0]->v[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(evens, 0xd8));
    out[1]->v[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(odds, 0xd8));
  }
}
MLA_LANEWISE(load_pairs, Bf16x32, (const uint16_t* p),
             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * i)))
MLA_SIMD Bf16x32 broadcast_pair(const uint16_t* p) {
  int pair;
  memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
MLA_SIMD F32 dot(F32 acc, Bf16x32 a, Bf16x32 b) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  for (int i = 0; i < 2; ++i) {
    const auto f = [](__m256i x) __attribute__((always_inline)) { return _mm256_castsi256_ps(x); };
    acc.v[i] = _mm256_fmadd_ps(f(_mm256_and_si256(a.v[i], odd)), f(_mm256_and_si256(b.v[i], odd)), acc.v[i]);
    acc.v[i] = _mm256_fmadd_ps(f(_mm256_slli_epi32(a.v[i], 16)), f(_mm256_slli_epi32(b.v[i], 16)), acc.v[i]);
  }
  return acc;
}
MLA_SIMD void interleave(Bf16x32 low, Bf16x32 high, Bf16x32* first, Bf16x32* second) {
  for (int i = 0; i < 2; ++i) {
    first->v[i] = _mm256_unpacklo_epi16(low.v[i], high.v[i]);
    second->v[i] = _mm256_unpackhi_epi16(low.v[i], high.v[i]);
  }
}
MLA_SIMD void store_pairs(uint16_t* p, Bf16x32 x) {
  for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16 * i), x.v[i]);
}
MLA_SIMD F32 reduce_add_16(const F32 v[kLanes]) {
  __m128 quad[4];
  for (int i = 0; i < 4; ++i) {
    __m256 quarters[2];  // of four vectors: quarters 0 and 1; 2 and 3
    for (int j = 0; j < 2; ++j) {
      const __m256 a = v[4 * i].v[j], b = v[4 * i + 1].v[j], c = v[4 * i + 2].v[j], d = v[4 * i + 3].v[j];
      const __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
      const __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
      quarters[j] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)),
                                  _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    }
    const __m256 halves = _mm256_add_ps(quarters[0], quarters[1]);
    quad[i] = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  }
  return {_mm256_set_m128(quad[1], quad[0]), _mm256_set_m128(quad[3], quad[2])};
}
