#pragma once
// Conversions in registers. Operands are pairs of 16-bit floats in a word, and eights of bf16 (four words),
// e4m3 (two words) and e2m1 (one). sm_89 and newer have instructions for e4m3fn; other GPUs, and e4m3fnuz,
// run the code of common/fp8.h. Bytes are the same, NaN included.
#include "common/dtype.h"
#include "common/fp8.h"
#include "cuda/device/global.cuh"

namespace mla_fp8::gpu {

inline constexpr float kE2m1ToHalf = 0x1p-14f;  // an e2m1 times this is the half with the e2m1's bits

// Both halves of the word are the bf16 of a value that is one already.
__device__ __forceinline__ uint32_t both_bf16(float value) { return (float_bits(value) >> 16) * 0x10001u; }

#if MLA_FP8_PTX

// Codes are never halved on NVIDIA's GPUs; csrc/hip/platform.h says why AMD's do.
template <Format>
inline constexpr bool kAreHalved = false;
template <int kWords, int kCount>
__device__ __forceinline__ void halve_codes(Words<kWords> (&)[kCount]) {}

#if __CUDA_ARCH__ >= 890
template <Format kFormat>
inline constexpr bool kHasE4m3Instructions = kFormat == Format::kE4m3fn;
#else
template <Format kFormat>
inline constexpr bool kHasE4m3Instructions = false;
#endif

// ---- pairs of bf16 or fp16 --------------------------------------------------------------------------------

template <Dtype kDtype>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kDtype == Dtype::kBf16) return {bits_float(pair << 16), bits_float(pair & 0xffff0000u)};
  float2 values;
  asm("{\n.reg .b16 l, u;\nmov.b32 {l, u}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, u;\n}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(pair));
  return values;
}

template <Dtype kDtype>
__device__ __forceinline__ uint32_t pack(float2 values) {
  uint32_t pair;
  if constexpr (kDtype == Dtype::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.y), "f"(values.x));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values.y), "f"(values.x));
  }
  return pair;
}

__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// pack for softmax weights; AMD's form below is quicker.
template <Dtype kDtype>
__device__ __forceinline__ uint32_t pack_weights(float2 values) {
  return pack<kDtype>(values);
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) { return pack<Dtype::kF16>({low, high}); }

// ---- cache formats ----------------------------------------------------------------------------------------

template <Format kFormat>
__device__ __forceinline__ float2 unpack_e4m3(uint32_t pair) {
  if constexpr (kHasE4m3Instructions<kFormat>) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return unpack<Dtype::kF16>(halves);
  } else {
    return {e4m3_to_float<kFormat>(static_cast<uint8_t>(pair)),
            e4m3_to_float<kFormat>(static_cast<uint8_t>(pair >> 8))};
  }
}

// Converts four codes to bf16 or fp16, exactly.
template <Format kFormat, Dtype kDtype>
__device__ __forceinline__ Words<2> e4m3x4_to_16bit(uint32_t codes) {
  return {pack<kDtype>(unpack_e4m3<kFormat>(codes)), pack<kDtype>(unpack_e4m3<kFormat>(codes >> 16))};
}

// Converts two e4m3fn codes to fp16 by the instruction of sm_89: exactly, NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t e4m3x2_to_f16(uint32_t codes) {
  uint32_t f;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(f) : "h"(static_cast<uint16_t>(codes)));
  return f;
}

// Converts four e4m3fn codes to fp16 by the instruction of sm_89: exactly, NaN kept.
__device__ __forceinline__ void e4m3_to_f16(uint32_t codes, uint32_t& f01, uint32_t& f23) {
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, "
      "high; }"
      : "=r"(f01), "=r"(f23)
      : "r"(codes));
}

// Two bf16 times a factor that is a bf16.
__device__ __forceinline__ uint32_t scale_bf16x2(uint32_t x, float factor) {
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(both_bf16(factor)), "r"(both_bf16(-0.0f)));
  return x;
}
// x * factor, clamped to [-limit, limit]; limit is a bf16. A NaN stays one.
__device__ __forceinline__ float2 scale_and_clamp(uint32_t x, float factor, float limit) {
  x = scale_bf16x2(x, factor);
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(both_bf16(limit)));
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(both_bf16(-limit)));
  return unpack<Dtype::kBf16>(x);
}

template <Format kFormat>
__device__ __forceinline__ uint32_t pack_e4m3(float2 values) {
  if constexpr (kHasE4m3Instructions<kFormat>) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(values.y), "f"(values.x));
    return pair;
  } else {
    return float_to_e4m3<kFormat>(values.x) | uint32_t{float_to_e4m3<kFormat>(values.y)} << 8;
  }
}

// The larger of each half of two pairs of bf16, none of them negative.
__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

// In each half of the word, the largest finite magnitude of that half of four pairs, and of `least`.
__device__ __forceinline__ uint32_t finite_amax_bf16x2(const Words<4>& x, uint32_t least) {
#pragma unroll
  for (int i = 0; i < 4; ++i)  // x * 0 + x turns an infinity into NaN, which max drops
    asm("{\n.reg .b32 t, zero;\nmov.b32 zero, 0;\nfma.rn.bf16x2 t, %1, zero, %1;\nabs.bf16x2 t, t;\n"
        "max.bf16x2 %0, %0, t;\n}"
        : "+r"(least)
        : "r"(x[i]));
  return least;
}
// The largest finite magnitude of eight bf16, as the bits of a bf16.
__device__ __forceinline__ uint32_t finite_amax8(const Words<4>& x) {
  const uint32_t amax = finite_amax_bf16x2(x, 0);
  return max(amax & 0xffffu, amax >> 16);
}
// finite_amax8 of x in the lower half of the word, of y in the upper half; at least `least`.
__device__ __forceinline__ uint32_t finite_amax8x2(const Words<4>& x, const Words<4>& y, uint32_t least) {
  const uint32_t of_x = finite_amax_bf16x2(x, least), of_y = finite_amax_bf16x2(y, least);
  return larger_bf16x2(__byte_perm(of_x, of_y, 0x5410), __byte_perm(of_x, of_y, 0x7632));
}

// The e2m1 codes of eight bf16 x / scale, where factor = kE2m1ToHalf / scale. A NaN becomes the largest code.
// The bits of the half 2^-14 x are x's e2m1 and nine more bits, so rounding is an addition.
__device__ __forceinline__ Words<1> encode_e2m1x8_by(const Words<4>& x, float factor) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack<Dtype::kBf16>(x[i]);
    const uint32_t halves = pack_f16(v.x * factor, v.y * factor);
    uint32_t a = halves & 0x7fff7fffu;
    asm("min.f16x2 %0, %0, %1;" : "+r"(a) : "r"(0x0e000e00u));  // 6
    a = (a + 0x00ff00ffu + (a >> 9 & 0x00010001u)) >> 9 & 0x00070007u;
    a |= halves >> 12 & 0x00080008u;
    codes |= ((a | a >> 12) & 0xffu) << 8 * i;
  }
  return {codes};
}
// The e2m1 codes of x / scale for an e4m3 scale > 0; a NaN scale makes codes 0. An approximate quotient is
// enough: an exact one that is no tie is 2^-8 or more off one; a tie is a half (tried: all mantissas).
__device__ __forceinline__ Words<1> encode_e2m1x8(const Words<4>& x, float scale) {
  const Words<1> codes = encode_e2m1x8_by(x, __fdividef(kE2m1ToHalf, scale));
  return {scale == scale ? codes[0] : 0u};
}

#else  // the code of common/dtype.h and hip/e4m3.h, which gives the same bytes

__device__ __forceinline__ Words<1> encode_e2m1x8_by(const Words<4>& x, float factor) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = {bits_float(x[i] << 16), bits_float(x[i] & 0xffff0000u)};
    const float by = factor / kE2m1ToHalf;
    codes |= (float_to_e2m1(v.x * by, 7) | uint32_t{float_to_e2m1(v.y * by, 7)} << 4) << (8 * i);
  }
  return {codes};
}

template <Dtype kDtype>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return {to_float<kDtype>(static_cast<uint16_t>(pair)), to_float<kDtype>(static_cast<uint16_t>(pair >> 16))};
}

template <Dtype kDtype>
__device__ __forceinline__ uint32_t pack(float2 values) {
  return from_float<kDtype>(values.x) | uint32_t{from_float<kDtype>(values.y)} << 16;
}

// pack for softmax weights. A NaN may become anything: a row with a NaN weight has a NaN normaliser.
template <Dtype kDtype>
__device__ __forceinline__ uint32_t pack_weights(float2 values) {
  if constexpr (kDtype == Dtype::kBf16) return round_to_bf16(values.x, values.y);
  else return pack<kDtype>(values);
}

template <Format kFormat>
__device__ __forceinline__ float2 unpack_e4m3(uint32_t pair) {
  const Float4 values = e4m3x4_to_float<kFormat>(pair & 0xffffu);
  return {values.x[0], values.x[1]};
}

// Converts four codes to bf16 or fp16, exactly but for -0: that becomes 0, which is the same to attention.
template <Format kFormat, Dtype kDtype>
__device__ __forceinline__ Words<2> e4m3x4_to_16bit(uint32_t codes) {
  const Float4 values = e4m3x4_to_float<kFormat, false>(codes);
  return {pack_exact<kDtype>(values.x[0], values.x[1]), pack_exact<kDtype>(values.x[2], values.x[3])};
}

template <int kWords, int kCount>
__device__ __forceinline__ void halve_codes(Words<kWords> (&x)[kCount]) {
  uint32_t nan = 0;
#pragma unroll
  for (int i = 0; i < kWords * kCount; ++i) {
    uint32_t& codes = x[i / kWords][i % kWords];
    nan |= nan_signs(codes);
    codes = drop_minus_zeros(codes);
  }
  if ((nan & kSigns) == 0) return;
#pragma unroll
  for (int i = 0; i < kWords * kCount; ++i) {
    uint32_t& codes = x[i / kWords][i % kWords];
    codes = halve_nans(codes);
  }
}

__device__ __forceinline__ float2 scale_and_clamp(uint32_t x, float factor, float limit) {
  const auto one = [&](float value) {
    value *= factor;
    return value < -limit ? -limit : value > limit ? limit : value;
  };
  const float2 values = unpack<Dtype::kBf16>(x);
  return {one(values.x), one(values.y)};
}

template <Format kFormat>
__device__ __forceinline__ uint32_t pack_e4m3(float2 values) {
  return narrow_e4m3<kFormat>(values.x) | narrow_e4m3<kFormat>(values.y) << 8;
}

__device__ __forceinline__ uint32_t finite_amax8(const Words<4>& x) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t magnitude = x[i / 2] >> (i % 2 * 16) & 0x7fffu;
    if (magnitude < kInfBits >> 16) amax = max(amax, magnitude);
  }
  return amax;
}

__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
  return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}
__device__ __forceinline__ uint32_t finite_amax8x2(const Words<4>& x, const Words<4>& y, uint32_t least) {
  return larger_bf16x2(finite_amax8(x) | finite_amax8(y) << 16, least);
}

__device__ __forceinline__ Words<1> encode_e2m1x8(const Words<4>& x, float scale) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack<Dtype::kBf16>(x[i]);
    codes |= (float_to_e2m1(v.x / scale, 0) | uint32_t{float_to_e2m1(v.y / scale, 0)} << 4) << (8 * i);
  }
  return {codes};
}

#endif

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  return pack<Dtype::kBf16>({low, high});
}

// Converts the codes of kCount columns of four rows: columns[j] gets the four 16-bit floats of column j.
template <Format kFormat, Dtype kDtype, int kCount>
__device__ __forceinline__ void e4m3_columns_to_16bit(const uint32_t (&rows)[4],
                                                      Words<2> (&columns)[kCount]) {
#if !MLA_FP8_PTX
  // Packing floats of two rows costs no more than packing floats of one, so no bytes have to be transposed.
  if constexpr (kHasE4m3Instructions<kFormat>) {
    Float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = e4m3x4_to_float<kFormat, false>(rows[i]);
#pragma unroll
    for (int j = 0; j < kCount; ++j)
      columns[j] = {pack_exact<kDtype>(x[0].x[j], x[1].x[j]), pack_exact<kDtype>(x[2].x[j], x[3].x[j])};
    return;
  }
#endif
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const auto code = [&](int i) { return (rows[i] >> (8 * j) & 0xffu) << (8 * i); };
    columns[j] = e4m3x4_to_16bit<kFormat, kDtype>(code(0) | code(1) | code(2) | code(3));
  }
}

// Decodes eight values: e4m3 * scale in float, rounded once to bf16. Values that are bf16 pass through.
template <Format kFormat>
__device__ __forceinline__ Words<4> decode8(const Words<2>& codes, float scale) {
  Words<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack_e4m3<kFormat>(codes[i / 2] >> (i % 2 * 16));
    out[i] = pack<Dtype::kBf16>({v.x * scale, v.y * scale});
  }
  return out;
}
template <Format>
__device__ __forceinline__ Words<4> decode8(const Words<4>& bf16, float) {
  return bf16;
}
template <Format>
__device__ __forceinline__ Words<4> decode8(const Words<1>& e2m1, float scale) {
  const Words<2> e4m3{e2m1x4_to_e4m3(e2m1[0] & 0xffffu), e2m1x4_to_e4m3(e2m1[0] >> 16)};
  return decode8<Format::kE4m3fn>(e4m3, kE2m1Unit * scale);
}

// The bf16 bits of the largest finite magnitude of eight, or of infinity if one is NaN.
__device__ __forceinline__ uint32_t finite_amax8_or_nan(const Words<4>& x) {
  uint32_t nan = 0;  // bit 15 of a half: its magnitude is above infinity
#pragma unroll
  for (int i = 0; i < 4; ++i) nan |= (x[i] & 0x7fff7fffu) + 0x007f007fu;
  return nan & 0x80008000u ? kInfBits >> 16 : finite_amax8(x);
}

// The codes of eight bf16 x: map(x * factor, clamped to limit) for each. Products are of two at a time in
// bf16, exactly: factor is a power of two, so x * factor is a bf16 unless its code is 0. limit is a bf16.
template <Format kFormat, class Map>
__device__ __forceinline__ auto encode8(const Words<4>& x, float factor, float limit, const Map& map) {
  if constexpr (kFormat == Format::kBf16) {
    return x;
  } else {
    Words<2> codes{};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = scale_and_clamp(x[i], factor, limit);
      codes[i / 2] |= pack_e4m3<kFormat>({map(v.x), map(v.y)}) << (i % 2 * 16);
    }
    return codes;
  }
}

// encode8 without map, where limit is the largest number of the format: the conversion saturates there.
template <Format kFormat>
__device__ __forceinline__ Words<2> encode8(const Words<4>& x, float factor) {
#if MLA_FP8_PTX
  if constexpr (kHasE4m3Instructions<kFormat>) {
    Words<2> codes{};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes[i / 2] |= pack_e4m3<kFormat>(unpack<Dtype::kBf16>(scale_bf16x2(x[i], factor))) << (i % 2 * 16);
    return codes;
  }
#endif
  return encode8<kFormat>(x, factor, format_max(kFormat), [](float quotient) { return quotient; });
}

// tile_scale_exponent for two tiles at once: from bf16 of their largest magnitudes, at least the floor, to
// bf16 of their scales. fp8_max is a bf16, too.
__device__ __forceinline__ uint32_t tile_scales_bf16x2(uint32_t amax, float fp8_max) {
  const uint32_t one = 127u << 7, round_up = 0x7fu;
  return (amax - ((float_bits(fp8_max) >> 16) - one - round_up) * 0x10001u) & 0x7f807f80u;
}

// Rounds to bf16: eight fp16 in x, or eight floats, four in x and four in `more`.
__device__ __forceinline__ Words<4> to_bf16x8(bool is_float, const Words<4>& x, const Words<4>& more) {
  Words<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Words<4>& w = i < 2 ? x : more;
    const float2 halves = unpack<Dtype::kF16>(x[i]);
    out[i] = pack<Dtype::kBf16>(
        {is_float ? bits_float(w[i % 2 * 2]) : halves.x, is_float ? bits_float(w[i % 2 * 2 + 1]) : halves.y});
  }
  return out;
}

}  // namespace mla_fp8::gpu
