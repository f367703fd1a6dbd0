#pragma once
// Sixteen lanes of float or uint32 and 32 bf16, for AVX-512, AVX2 and plain C++. Every operation is the same
// IEEE operation on each lane in all three, so a kernel written against this header gives the same bytes
// whichever is compiled. Kernel files are compiled once per instruction set (see isa.h), each into its own
// namespace cpu::MLA_ISA.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/fp8.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MLA_SIMD_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define MLA_SIMD_AVX2 1
#include <immintrin.h>
#elif defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define MLA_SIMD static inline __attribute__((always_inline))

namespace mla_fp8::cpu::MLA_ISA {

inline constexpr int kLanes = 16;

// Subnormals: codecs keep them whatever mode the caller's thread is in; attention flushes them, because
// VDPBF16PS does. The destructor restores the caller's mode.
enum class Subnormals { kKeep, kFlush };
class SubnormalMode {
 public:
#if defined(__x86_64__)
  MLA_HD explicit SubnormalMode(Subnormals mode) : saved_(_mm_getcsr()) {
    constexpr unsigned kFlushBits = 0x8040;  // FTZ | DAZ
    _mm_setcsr(mode == Subnormals::kFlush ? saved_ | kFlushBits : saved_ & ~kFlushBits);
  }
  MLA_HD ~SubnormalMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  explicit SubnormalMode(Subnormals) {}
#endif
};

#if MLA_SIMD_AVX512

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
MLA_SIMD F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MLA_SIMD F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
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
MLA_SIMD Mask equal(U32 a, U32 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
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
// a[0] b[0] a[1] b[1] ... in 32 lanes.
MLA_SIMD void zip(F32 a, F32 b, F32* first, F32* second) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  first->v = _mm512_permutex2var_ps(a.v, low, b.v);
  second->v = _mm512_permutex2var_ps(a.v, high, b.v);
}
MLA_SIMD Bf16x32 load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
MLA_SIMD Bf16x32 broadcast_pair(const uint16_t* p) {
  int pair;
  memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
// acc + a[2i + 1] * b[2i + 1], then + a[2i] * b[2i], each fused.
MLA_SIMD F32 dot(F32 acc, Bf16x32 a, Bf16x32 b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const auto f = [](__m512i x) __attribute__((always_inline)) { return _mm512_castsi512_ps(x); };
  acc.v = _mm512_fmadd_ps(f(_mm512_and_si512(a.v, odd)), f(_mm512_and_si512(b.v, odd)), acc.v);
  return {_mm512_fmadd_ps(f(_mm512_slli_epi32(a.v, 16)), f(_mm512_slli_epi32(b.v, 16)), acc.v)};
#endif
}
// Rows k and k + 1 as pairs: lane i of the two results holds (low[j], high[j]), in an order of j that
// interleave_column() tells.
MLA_SIMD void interleave(Bf16x32 low, Bf16x32 high, Bf16x32* first, Bf16x32* second) {
  first->v = _mm512_unpacklo_epi16(low.v, high.v);
  second->v = _mm512_unpackhi_epi16(low.v, high.v);
}
MLA_SIMD void store_pairs(uint16_t* p, Bf16x32 x) { _mm512_storeu_si512(p, x.v); }
// Lane i of the result is the sum of the lanes of v[i], in the order that the plain version spells out.
MLA_SIMD F32 reduce_add_16(const F32 v[kLanes]) {
  __m512 quad[4];  // of four vectors each: the sums of their 128-bit quarters
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

#elif MLA_SIMD_AVX2

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

#define MLA_BOTH(f) {f(0), f(1)}
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
template <int kBits>
MLA_LANEWISE(shift_left, U32, (U32 a), _mm256_slli_epi32(a.v[i], kBits))
template <int kBits>
MLA_LANEWISE(shift_right, U32, (U32 a), _mm256_srli_epi32(a.v[i], kBits))
MLA_LANEWISE(greater, Mask, (U32 a, U32 b),
             _mm256_cmpgt_epi32(a.v[i], b.v[i])) MLA_LANEWISE(equal, Mask, (U32 a, U32 b),
                                                              _mm256_cmpeq_epi32(a.v[i], b.v[i]))
    MLA_LANEWISE(less, Mask, (F32 a, F32 b), _mm256_castps_si256(_mm256_cmp_ps(a.v[i], b.v[i], _CMP_LT_OQ)))
        MLA_LANEWISE(select, U32, (Mask m, U32 a, U32 b), _mm256_blendv_epi8(b.v[i], a.v[i], m.v[i]))
            MLA_LANEWISE(select, F32, (Mask m, F32 a, F32 b),
                         _mm256_blendv_ps(b.v[i], a.v[i], _mm256_castsi256_ps(m.v[i])))
                MLA_LANEWISE(load_u8, U32, (const uint8_t* p),
                             _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p +
                                                                                                   8 * i))))
                    MLA_LANEWISE(load_u16, U32, (const uint16_t* p),
                                 _mm256_cvtepu16_epi32(
                                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i)))) MLA_SIMD
    void store_u16(uint16_t* p, U32 x) {
  const __m256i packed = _mm256_packus_epi32(x.v[0], x.v[1]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
MLA_SIMD void store_u8(uint8_t* p, U32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.v[0], x.v[1]), 0xd8);
  const __m128i packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
MLA_SIMD void zip(F32 a, F32 b, F32* first, F32* second) {
  F32* const out[2] = {first, second};
  for (int i = 0; i < 2; ++i) {
    const __m256 low = _mm256_unpacklo_ps(a.v[i], b.v[i]), high = _mm256_unpackhi_ps(a.v[i], b.v[i]);
    out[i]->v[0] = _mm256_permute2f128_ps(low, high, 0x20);
    out[i]->v[1] = _mm256_permute2f128_ps(low, high, 0x31);
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
    __m256 quarters[2];  // of four vectors: quarters 0, 1 and 2, 3
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

#else  // plain

struct F32 {
  float v[kLanes];
};
struct U32 {
  uint32_t v[kLanes];
};
struct Mask {
  bool v[kLanes];
};
struct Bf16x32 {
  uint16_t v[2 * kLanes];
};

#define MLA_LANEWISE(name, Result, Args, expression)      \
  MLA_SIMD Result name Args {                             \
    Result r;                                             \
    for (int i = 0; i < kLanes; ++i) r.v[i] = expression; \
    return r;                                             \
  }
MLA_LANEWISE(set1, F32, (float x), x)
MLA_LANEWISE(load, F32, (const float* p), p[i])
MLA_SIMD void store(float* p, F32 x) { memcpy(p, x.v, sizeof x); }
MLA_LANEWISE(add, F32, (F32 a, F32 b), a.v[i] + b.v[i])
MLA_LANEWISE(sub, F32, (F32 a, F32 b), a.v[i] - b.v[i])
MLA_LANEWISE(mul, F32, (F32 a, F32 b), a.v[i] * b.v[i])
MLA_LANEWISE(fma, F32, (F32 a, F32 b, F32 c), __builtin_fmaf(a.v[i], b.v[i], c.v[i]))
MLA_LANEWISE(max, F32, (F32 a, F32 b), a.v[i] > b.v[i] ? a.v[i] : b.v[i])
MLA_SIMD U32 bits(F32 x) {
  U32 r;
  memcpy(&r, &x, sizeof r);
  return r;
}
MLA_SIMD F32 from_bits(U32 x) {
  F32 r;
  memcpy(&r, &x, sizeof r);
  return r;
}
MLA_LANEWISE(to_float, F32, (U32 x), static_cast<float>(static_cast<int32_t>(x.v[i])))
MLA_LANEWISE(set1, U32, (uint32_t x), x)
MLA_LANEWISE(add, U32, (U32 a, U32 b), a.v[i] + b.v[i])
MLA_LANEWISE(sub, U32, (U32 a, U32 b), a.v[i] - b.v[i])
MLA_LANEWISE(and_, U32, (U32 a, U32 b), a.v[i] & b.v[i])
MLA_LANEWISE(or_, U32, (U32 a, U32 b), a.v[i] | b.v[i])
template <int kBits>
MLA_LANEWISE(shift_left, U32, (U32 a), a.v[i] << kBits)
template <int kBits>
MLA_LANEWISE(shift_right, U32, (U32 a), a.v[i] >> kBits)
MLA_LANEWISE(greater, Mask, (U32 a, U32 b), a.v[i] > b.v[i])
    MLA_LANEWISE(equal, Mask, (U32 a, U32 b), a.v[i] == b.v[i])
        MLA_LANEWISE(less, Mask, (F32 a, F32 b), a.v[i] < b.v[i])
            MLA_LANEWISE(select, U32, (Mask m, U32 a, U32 b), m.v[i] ? a.v[i] : b.v[i])
                MLA_LANEWISE(select, F32, (Mask m, F32 a, F32 b), m.v[i] ? a.v[i] : b.v[i])
                    MLA_LANEWISE(load_u8, U32, (const uint8_t* p), p[i])
                        MLA_LANEWISE(load_u16, U32, (const uint16_t* p), p[i]) MLA_SIMD
    void store_u8(uint8_t* p, U32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(x.v[i]);
}
MLA_SIMD void store_u16(uint16_t* p, U32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(x.v[i]);
}
MLA_SIMD void zip(F32 a, F32 b, F32* first, F32* second) {
  for (int i = 0; i < kLanes; ++i) {
    F32* const out = i < kLanes / 2 ? first : second;
    out->v[2 * i % kLanes] = a.v[i];
    out->v[2 * i % kLanes + 1] = b.v[i];
  }
}
MLA_SIMD Bf16x32 load_pairs(const uint16_t* p) {
  Bf16x32 r;
  memcpy(r.v, p, sizeof r);
  return r;
}
MLA_SIMD Bf16x32 broadcast_pair(const uint16_t* p) {
  Bf16x32 r;
  for (int i = 0; i < kLanes; ++i) memcpy(r.v + 2 * i, p, 4);
  return r;
}
MLA_SIMD F32 dot(F32 acc, Bf16x32 a, Bf16x32 b) {
  const auto f = [](uint16_t x) __attribute__((always_inline)) {
    const uint32_t u = uint32_t{x} << 16;
    float r;
    memcpy(&r, &u, 4);
    return r;
  };
  for (int i = 0; i < kLanes; ++i) {
    acc.v[i] = __builtin_fmaf(f(a.v[2 * i + 1]), f(b.v[2 * i + 1]), acc.v[i]);
    acc.v[i] = __builtin_fmaf(f(a.v[2 * i]), f(b.v[2 * i]), acc.v[i]);
  }
  return acc;
}
MLA_SIMD void interleave(Bf16x32 low, Bf16x32 high, Bf16x32* first, Bf16x32* second) {
  for (int i = 0; i < kLanes; ++i) {
    const int j = i / 4 * 8 + i % 4;
    first->v[2 * i] = low.v[j];
    first->v[2 * i + 1] = high.v[j];
    second->v[2 * i] = low.v[j + 4];
    second->v[2 * i + 1] = high.v[j + 4];
  }
}
MLA_SIMD void store_pairs(uint16_t* p, Bf16x32 x) { memcpy(p, x.v, sizeof x); }
MLA_SIMD F32 reduce_add_16(const F32 v[kLanes]) {
  F32 r;
  for (int i = 0; i < kLanes; ++i) {
    float quarter[4];
    for (int j = 0; j < 4; ++j) {
      const float* x = v[i].v + 4 * j;
      quarter[j] = (x[0] + x[2]) + (x[1] + x[3]);
    }
    r.v[i] = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  }
  return r;
}

#endif

// ---- the same for all, from the operations above ----------------------------------------------------------

// The column of a 32-wide row that lane `lane` of interleave()'s first (half = 0) or second result holds.
constexpr int interleave_column(int half, int lane) { return lane / 4 * 8 + 4 * half + lane % 4; }

MLA_SIMD F32 load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_u16(p))); }

// Round to nearest even, every NaN becomes kBf16Nan; as float_to_bf16 in fp8.h.
MLA_SIMD U32 to_bf16(F32 x) {
  const U32 u = bits(x), magnitude = and_(u, set1(0x7fffffffu));
  const U32 lsb = and_(shift_right<16>(u), set1(1u));
  const U32 rounded = shift_right<16>(add(u, add(lsb, set1(0x7fffu))));
  return select(greater(magnitude, set1(0x7f800000u)), set1(uint32_t{kBf16Nan}), rounded);
}

// Sixteen rows become sixteen columns. Zipping rows i and i + 8 into 2i and 2i + 1 rotates the bits of an
// element's index (row, column) by one; four times swaps row and column.
MLA_SIMD void transpose(F32 (&x)[kLanes]) {
  for (int round = 0; round < 4; ++round) {
    F32 y[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) zip(x[i], x[i + kLanes / 2], &y[2 * i], &y[2 * i + 1]);
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
}

// Largest lane; lanes are not NaN.
MLA_SIMD float reduce_max(F32 x) {
  float v[kLanes];
  store(v, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
}

// Sum of the lanes, halves first: always the same tree.
MLA_SIMD float reduce_add(F32 x) {
  float v[kLanes];
  store(v, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

// 2^x for x <= 0 (relative error 2e-7); 0 below -126, NaN stays NaN.
MLA_SIMD F32 exp2_nonpositive(F32 x) {
  // Adding 1.5 * 2^23 leaves round(x) in the low mantissa bits.
  const F32 magic = set1(0x1.8p23f), clamped = max(set1(-127.0f), x);
  const F32 shifted = add(clamped, magic), f = sub(clamped, sub(shifted, magic));
  F32 p = set1(1.540353039e-4f);
  p = fma(p, f, set1(1.333355814e-3f));
  p = fma(p, f, set1(9.618129107e-3f));
  p = fma(p, f, set1(5.550410866e-2f));
  p = fma(p, f, set1(2.402265070e-1f));
  p = fma(p, f, set1(6.931471806e-1f));
  p = fma(p, f, set1(1.0f));
  const F32 scaled = from_bits(add(bits(p), shift_left<23>(bits(shifted))));
  return select(less(x, set1(-126.0f)), set1(0.0f), scaled);
}

}  // namespace mla_fp8::cpu::MLA_ISA
