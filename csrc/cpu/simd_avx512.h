// Part of simd.h, which includes it inside its namespace: the operations by AVX-512 with bf16 instructions.
#pragma once

struct F32 {
  __m512 v;
};
struct U32 {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};
struct Bf16x32 {
  __m512i v;
};

MLA_SIMD F32 set1(float x) { return {_mm512_set1_ps(x)}; }
MLA_SIMD F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
MLA_SIMD void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
MLA_SIMD F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
MLA_SIMD F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MLA_SIMD F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MLA_SIMD F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
MLA_SIMD F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MLA_SIMD F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
MLA_SIMD __m256 first_half(F32 x) { return _mm512_castps512_ps256(x.v); }
MLA_SIMD __m256 second_half(F32 x) { return _mm512_extractf32x8_ps(x.v, 1); }
MLA_SIMD U32 bits(F32 x) { return {_mm512_castps_si512(x.v)}; }
MLA_SIMD F32 from_bits(U32 x) { return {_mm512_castsi512_ps(x.v)}; }
MLA_SIMD F32 to_float(U32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
MLA_SIMD U32 set1(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
MLA_SIMD U32 add(U32 a, U32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
MLA_SIMD U32 sub(U32 a, U32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
MLA_SIMD U32 and_(U32 a, U32 b) { return {_mm512_and_si512(a.v, b.v)}; }
MLA_SIMD U32 or_(U32 a, U32 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>
MLA_SIMD U32 shift_left(U32 a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
MLA_SIMD U32 shift_right(U32 a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
MLA_SIMD Mask greater(U32 a, U32 b) { return {_mm512_cmpgt_epi32_mask(a.v, b.v)}; }  // both < 2^31
MLA_SIMD U32 max_signed(U32 a, U32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
MLA_SIMD U32 min_signed(U32 a, U32 b) { return {_mm512_min_epi32(a.v, b.v)}; }
MLA_SIMD Mask equal(U32 a, U32 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
MLA_SIMD Mask is_nan(F32 x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
MLA_SIMD Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
MLA_SIMD U32 select(Mask m, U32 a, U32 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }
MLA_SIMD F32 select(Mask m, F32 a, F32 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
MLA_SIMD U32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
MLA_SIMD U32 load_u16(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
MLA_SIMD void store_u8(uint8_t* p, U32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
MLA_SIMD void store_u16(uint16_t* p, U32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
// Separates 32 lanes a[0] b[0] a[1] b[1] ...: those with even numbers, and those with odd numbers.
MLA_SIMD void unzip(F32 first, F32 second, F32* even, F32* odd) {
  const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even->v = _mm512_permutex2var_ps(first.v, at, second.v);
  odd->v = _mm512_permutex2var_ps(first.v, _mm512_add_epi32(at, _mm512_set1_epi32(1)), second.v);
}
MLA_SIMD Bf16x32 load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
MLA_SIMD Bf16x32 broadcast_pair(const uint16_t* p) {
  int pair;
  memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// acc + a[2i + 1] * b[2i + 1], then + a[2i] * b[2i]; each step is fused.
MLA_SIMD F32 dot(F32 acc, Bf16x32 a, Bf16x32 b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
}
// Zips rows k and k + 1 into pairs: lane i of the results is (low[j], high[j]), in the order of j that
// interleave_column() says.
MLA_SIMD void interleave(Bf16x32 low, Bf16x32 high, Bf16x32* first, Bf16x32* second) {
  first->v = _mm512_unpacklo_epi16(low.v, high.v);
  second->v = _mm512_unpackhi_epi16(low.v, high.v);
}
MLA_SIMD void store_pairs(uint16_t* p, Bf16x32 x) { _mm512_storeu_si512(p, x.v); }
// Lane i of the result is the sum of the lanes of v[i], in the order that the plain version spells out.
MLA_SIMD F32 reduce_add_16(const F32 v[kLanes]) {
  __m512 quad[4];  // the sums of the 128-bit quarters of four vectors each
  for (int i = 0; i < 4; ++i) {
    const __m512 a = v[4 * i].v, b = v[4 * i + 1].v, c = v[4 * i + 2].v, d = v[4 * i + 3].v;
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    quad[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                            _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  __m512 half[2];  // quarters 0 + 2 and 1 + 3
  for (int i = 0; i < 2; ++i)
    half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2 * i], quad[2 * i + 1], 0x44),
                            _mm512_shuffle_f32x4(quad[2 * i], quad[2 * i + 1], 0xee));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(half[0], half[1], 0x88),
                        _mm512_shuffle_f32x4(half[0], half[1], 0xdd))};
}
