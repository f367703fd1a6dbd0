#pragma once
// Vectors of sixteen floats or uint32, and of 32 bf16, for AVX-512, AVX2 and plain C++. Each operation is the
// same IEEE operation on each lane in all three. So a kernel written with this header gives the same bytes
// whichever is compiled. Kernel files are compiled once for each instruction set (isa.h), into its own
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
#include <emmintrin.h>
#endif

// Plain C++, and the address sanitizer's checks, take minutes to compile if everything is inlined.
#if defined(__SANITIZE_ADDRESS__) || !(MLA_SIMD_AVX512 || MLA_SIMD_AVX2)
#define MLA_SIMD static inline
#else
#define MLA_SIMD static inline __attribute__((always_inline))
#endif

namespace mla_fp8::cpu::MLA_ISA {

inline constexpr int kLanes = 16;

// The mode of subnormals while an object lives; its destructor restores the caller's. Codecs keep subnormals,
// whatever the caller's mode. Attention flushes them, because VDPBF16PS does.
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
#include "cpu/simd_avx512.h"
#elif MLA_SIMD_AVX2
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_plain.h"
#endif

// Copies whole lines to `dst`, which lies on one, past the caches: they are not read first, and they evict
// nothing. Call end_streams() after the last one, before another thread reads them.
MLA_SIMD void stream(void* dst, const void* src, size_t bytes) {
  const auto *from = static_cast<const uint8_t*>(src), *end = from + bytes;
  auto* to = static_cast<uint8_t*>(dst);
#if MLA_SIMD_AVX512
  for (; from < end; from += 64, to += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__x86_64__)
  for (; from < end; from += 16, to += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  memcpy(to, from, static_cast<size_t>(end - from));
#endif
}
MLA_SIMD void end_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- the same for all, from the operations above ----------------------------------------------------------

// The column of a 32-wide row in lane `lane` of the first (half = 0) or second result of interleave().
constexpr int interleave_column(int half, int lane) { return lane / 4 * 8 + 4 * half + lane % 4; }

MLA_SIMD F32 load_bf16(const uint16_t* p) { return from_bits(shift_left<16>(load_u16(p))); }

// Rounds to nearest even, and every NaN to kBf16Nan, like float_to_bf16 in fp8.h. The result is in the upper
// half of a lane; the lower half means nothing.
MLA_SIMD U32 round_to_bf16(F32 x) {
  const U32 u = bits(x), lsb = and_(shift_right<16>(u), set1(1u));
  return select(is_nan(x), set1(uint32_t{kBf16Nan} << 16), add(u, add(lsb, set1(0x7fffu))));
}
MLA_SIMD U32 to_bf16(F32 x) { return shift_right<16>(round_to_bf16(x)); }

// Loads 32 bf16 as 16 words. Even elements are the lower halves.
MLA_SIMD U32 load_words(const uint16_t* p) {
  float words[kLanes];
  memcpy(words, p, sizeof words);
  return bits(load(words));
}
MLA_SIMD void store_words(uint16_t* p, U32 words) {
  float to[kLanes];
  store(to, from_bits(words));
  memcpy(p, to, sizeof to);
}
#if MLA_SIMD_AVX512
// Rounds 32 floats by the instruction for it. False where to_bf16() would differ: for a NaN, or a subnormal.
MLA_SIMD bool store_plain_bf16(uint16_t* p, F32 first, F32 second) {
  constexpr int kNanOrSubnormal = 0x01 | 0x20 | 0x80;
  const __mmask16 others =
      _mm512_fpclass_ps_mask(first.v, kNanOrSubnormal) | _mm512_fpclass_ps_mask(second.v, kNanOrSubnormal);
  if (others != 0) return false;
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
  return true;
}
#endif
MLA_SIMD F32 even_bf16(U32 words) { return from_bits(shift_left<16>(words)); }
MLA_SIMD F32 odd_bf16(U32 words) { return from_bits(and_(words, set1(0xffff0000u))); }
MLA_SIMD U32 to_words(F32 even, F32 odd) {
  return or_(to_bf16(even), and_(round_to_bf16(odd), set1(0xffff0000u)));
}

// Transposes sixteen rows into sixteen columns; of eight rows, lane l of row i becomes element 8l + i of all.
// A step unzips rows 2i and 2i + 1 into i and i + kRows / 2: that rotates the bits of an element's index
// (row, column) by one.
template <int kRows>
MLA_SIMD void transpose(F32 (&x)[kRows]) {
  for (int rows = 1; rows < kRows; rows *= 2) {
    F32 y[kRows];
    for (int i = 0; i < kRows / 2; ++i) unzip(x[2 * i], x[2 * i + 1], &y[i], &y[i + kRows / 2]);
    for (int i = 0; i < kRows; ++i) x[i] = y[i];
  }
}

// The largest lane. No lane may be NaN.
MLA_SIMD float reduce_max(F32 x) {
#if MLA_SIMD_AVX512 || MLA_SIMD_AVX2
  const __m256 eight = _mm256_max_ps(first_half(x), second_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float v[kLanes];
  store(v, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
#endif
}

// The sum of the lanes, halves first: always the same tree. It goes through memory; in registers the norm of
// heads took 12 % longer.
MLA_SIMD float reduce_add(F32 x) {
  float v[kLanes];
  store(v, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  return v[0];
}

// 2^x for x <= 0, with a relative error of 2e-7. Below -126 it is 0; NaN stays NaN.
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
