#pragma once
// RMSNorm and RoPE of bf16 rows, every rounding in the order of layer_reference.py.
#include "common/kv_layout.h"
#include "cpu/simd.h"
#include "ops/rope_table.h"

namespace mla_fp8::cpu::MLA_ISA {

// 1 / sqrt(mean of the squares + eps) of 512 elements, load(i) of which are elements i to i + 15. The squares
// of sixteen neighbours are added in order, then halves of the 32 sums.
template <class Load>
MLA_SIMD float rms_factor(const Load& load, float eps) {
  constexpr int kBlock = kLanes * kLanes;
  static_assert(kHeadDimV == 2 * kBlock);
  F32 sums[2];
  for (int block = 0; block < 2; ++block) {
    F32 x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = load(block * kBlock + i * kLanes);
    transpose(x);  // lane l of x[i]: element i of the l-th sixteen
    F32 sum = set1(0.0f);
    for (int i = 0; i < kLanes; ++i) sum = fma(x[i], x[i], sum);
    sums[block] = sum;
  }
  const float mean = reduce_add(add(sums[0], sums[1])) * (1.0f / kHeadDimV);
  // Through double the nearest float, for every mantissa (tried, all 2^24).
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(mean + eps)));
}

// dst = bf16(src * factor * weight), 512 elements; in place if they are the same. Weight: void for none,
// uint16_t (bf16) or float.
template <class Weight>
MLA_SIMD void scale_row(const uint16_t* src, float factor, const Weight* weight, uint16_t* dst) {
  for (int i = 0; i < kHeadDimV; i += kLanes) {
    F32 x = mul(load_bf16(src + i), set1(factor));
    if constexpr (std::is_same_v<Weight, uint16_t>) x = mul(x, load_bf16(weight + i));
    if constexpr (std::is_same_v<Weight, float>) x = mul(x, load(weight + i));
    store_u16(dst + i, to_bf16(x));
  }
}

// cos and sin at one position, those of an inverse rotation with the sign of sin turned.
struct Rotation {
  float cos[kMaxRopeHalf + kLanes], sin[kMaxRopeHalf + kLanes];  // a vector may read past the last pair
};

// Whether the table knows the position; fills `r` if so.
MLA_SIMD bool load_rotation_at(const RopeTable& t, int64_t at, bool back, Rotation& r) {
  if (t.half <= 0) return true;
  if (at < 0 || at >= t.max_pos) return false;
  const float *cos = t.cos + at * t.cos_stride_pos, *sin = t.sin + at * t.sin_stride_pos;
  for (int i = 0; i < t.half; ++i) {
    r.cos[i] = cos[i * t.cos_stride_pair];
    r.sin[i] = back ? -sin[i * t.sin_stride_pair] : sin[i * t.sin_stride_pair];
  }
  for (int i = t.half; i < t.half + kLanes; ++i) r.cos[i] = r.sin[i] = 0.0f;
  return true;
}

MLA_SIMD bool load_rotation(const RopeTable& t, int64_t token, bool back, Rotation& r) {
  if (t.half <= 0) return true;
  const int64_t at = t.positions_are_int64 ? static_cast<const int64_t*>(t.positions)[token]
                                           : static_cast<const int32_t*>(t.positions)[token];
  return load_rotation_at(t, at, back, r);
}

// (a c - b s, a s + b c) of `half` pairs of neighbours, each rounded to bf16; in place if src is dst.
MLA_SIMD void rotate(const uint16_t* src, int half, const Rotation& r, uint16_t* dst) {
  for (int i = 0; i < half; i += kLanes) {
    const size_t bytes = 4 * static_cast<size_t>(half - i < kLanes ? half - i : kLanes);
    float pairs[kLanes] = {};  // two bf16 each
    memcpy(pairs, src + 2 * i, bytes);
    const U32 words = bits(load(pairs));
    const F32 a = from_bits(shift_left<16>(words)), b = from_bits(and_(words, set1(0xffff0000u)));
    const F32 c = load(r.cos + i), s = load(r.sin + i);
    const U32 first = to_bf16(sub(mul(a, c), mul(b, s))), second = to_bf16(add(mul(a, s), mul(b, c)));
    store(pairs, from_bits(or_(first, shift_left<16>(second))));
    memcpy(dst + 2 * i, pairs, bytes);
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
