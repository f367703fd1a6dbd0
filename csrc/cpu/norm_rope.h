#pragma once
// RMSNorm and RoPE of bf16 rows. Roundings are in the order of layer_reference.py.
#include "common/kv_layout.h"
#include "cpu/simd.h"
#include "ops/rope_table.h"

namespace mla_fp8::cpu::MLA_ISA {

constexpr int kSquares = kHeadDimV / 2;
static_assert(kSquares == kLanes * kLanes);

// 1 / sqrt(x). Computed in double, it is the nearest float for every mantissa (tried: all 2^24).
MLA_SIMD float inverse_root(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

// The factor of a row, from sixteen partial sums of squares.
MLA_SIMD float rms_factor(F32 squares, float eps) {
  return inverse_root(reduce_add(squares) * (1.0f / kHeadDimV) + eps);
}

// 1 / sqrt(mean of squares + eps) of 512 floats. The squares of sixteen neighbours are added in order, then
// halves of the 32 sums.
MLA_SIMD float rms_factor(const float* src, float eps) {
  F32 sums[2];
  for (int block = 0; block < 2; ++block) {
    F32 x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = load(src + block * kSquares + i * kLanes);
    transpose(x);  // lane l of x[i]: element i of the l-th sixteen
    F32 sum = set1(0.0f);
    for (int i = 0; i < kLanes; ++i) sum = fma(x[i], x[i], sum);
    sums[block] = sum;
  }
  return rms_factor(add(sums[0], sums[1]), eps);
}
// rms_factor of 512 bf16.
MLA_SIMD float rms_factor(const uint16_t* src, float eps) {
  F32 sums[2];
  for (int block = 0; block < 2; ++block) {
    F32 pairs[kLanes / 2];
    for (int i = 0; i < kLanes / 2; ++i)
      pairs[i] = from_bits(load_words(src + block * kSquares + i * 2 * kLanes));
    transpose(pairs);  // lane l of pairs[i]: elements 2i and 2i + 1 of the l-th sixteen
    F32 sum = set1(0.0f);
    for (int i = 0; i < kLanes / 2; ++i) {
      const F32 even = even_bf16(bits(pairs[i])), odd = odd_bf16(bits(pairs[i]));
      sum = fma(odd, odd, fma(even, even, sum));
    }
    sums[block] = sum;
  }
  return rms_factor(add(sums[0], sums[1]), eps);
}

// dst = bf16(src * factor * weight), 512 elements; dst may be src. Weight: void (none), bf16 or float.
template <class Weight>
MLA_SIMD void scale_row(const uint16_t* src, float factor, const Weight* weight, uint16_t* dst) {
  for (int i = 0; i < kHeadDimV; i += 2 * kLanes) {
#if MLA_SIMD_AVX512
    F32 in_order[2];
    for (int k = 0; k < 2; ++k) {
      in_order[k] = mul(load_bf16(src + i + k * kLanes), set1(factor));
      if constexpr (std::is_same_v<Weight, uint16_t>)
        in_order[k] = mul(in_order[k], load_bf16(weight + i + k * kLanes));
      if constexpr (std::is_same_v<Weight, float>)
        in_order[k] = mul(in_order[k], load(weight + i + k * kLanes));
    }
    if (store_plain_bf16(dst + i, in_order[0], in_order[1])) continue;
#endif
    const U32 words = load_words(src + i);
    F32 even = mul(even_bf16(words), set1(factor)), odd = mul(odd_bf16(words), set1(factor));
    if constexpr (std::is_same_v<Weight, uint16_t>) {
      const U32 weights = load_words(weight + i);
      even = mul(even, even_bf16(weights));
      odd = mul(odd, odd_bf16(weights));
    }
    if constexpr (std::is_same_v<Weight, float>) {
      F32 of_even, of_odd;
      unzip(load(weight + i), load(weight + i + kLanes), &of_even, &of_odd);
      even = mul(even, of_even);
      odd = mul(odd, of_odd);
    }
    store_words(dst + i, to_words(even, odd));
  }
}

// cos and sin at one position; for an inverse rotation, with sin negated. Arrays are padded: a vector may
// read past the last pair.
struct Rotation {
  alignas(64) float cos[kMaxRopeHalf + kLanes], sin[kMaxRopeHalf + kLanes];
};

// Fills `r` and returns whether the table has the position.
MLA_SIMD bool load_rotation_at(const RopeTable& t, int64_t at, bool back, Rotation& r) {
  if (t.half <= 0) return true;
  if (at < 0 || at >= t.max_pos) return false;
  const float *cos = t.cos + at * t.cos_stride_pos, *sin = t.sin + at * t.sin_stride_pos;
  int first = 0;
  if (t.cos_stride_pair == 1 && t.sin_stride_pair == 1) {
    for (; first + kLanes <= t.half; first += kLanes) {
      store(r.cos + first, load(cos + first));
      store(r.sin + first, mul(load(sin + first), set1(back ? -1.0f : 1.0f)));
    }
  }
  for (int i = first; i < t.half; ++i) {
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

// Rotates sixteen pairs of neighbours from pair i on: (a c - b s, a s + b c), each rounded to bf16.
MLA_SIMD U32 rotate_words(U32 words, const Rotation& r, int i) {
  const F32 a = even_bf16(words), b = odd_bf16(words), c = load(r.cos + i), s = load(r.sin + i);
  return to_words(sub(mul(a, c), mul(b, s)), add(mul(a, s), mul(b, c)));
}

// Rotates `half` pairs of neighbours; dst may be src.
MLA_SIMD void rotate(const uint16_t* src, int half, const Rotation& r, uint16_t* dst) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes)
    store_words(dst + 2 * i, rotate_words(load_words(src + 2 * i), r, i));
  if (i == half) return;
  uint16_t rest[2 * kLanes] = {};
  memcpy(rest, src + 2 * i, 4 * static_cast<size_t>(half - i));
  store_words(rest, rotate_words(load_words(rest), r, i));
  memcpy(dst + 2 * i, rest, 4 * static_cast<size_t>(half - i));
}

// Rotates elements i and i + half: (a c - b s, a s + b c), each rounded to bf16; dst may be src.
MLA_SIMD void rotate_halves(const uint16_t* src, int half, const Rotation& r, uint16_t* dst) {
  for (int i = 0; i < half; i += kLanes) {
    const int count = std::min(kLanes, half - i);
    uint16_t pairs[2][kLanes] = {};
    for (int k = 0; k < 2; ++k)
      memcpy(pairs[k], src + k * half + i, sizeof(uint16_t) * static_cast<size_t>(count));
    const F32 a = load_bf16(pairs[0]), b = load_bf16(pairs[1]), c = load(r.cos + i), s = load(r.sin + i);
    store_u16(pairs[0], to_bf16(sub(mul(a, c), mul(b, s))));
    store_u16(pairs[1], to_bf16(add(mul(a, s), mul(b, c))));
    for (int k = 0; k < 2; ++k)
      memcpy(dst + k * half + i, pairs[k], sizeof(uint16_t) * static_cast<size_t>(count));
  }
}

// Rotates by halves (is_neox), or by pairs of neighbours.
MLA_SIMD void rotate_pairs(const uint16_t* src, bool is_neox, int half, const Rotation& r, uint16_t* dst) {
  if (is_neox) rotate_halves(src, half, r, dst);
  else rotate(src, half, r, dst);
}

// Rotates a head's last dims and copies the others; without a rotation writes zeros. `streamed`: by stream().
MLA_SIMD void rotate_head(const uint16_t* src, int64_t dim, int half, const Rotation* rotation, bool streamed,
                          uint16_t* dst) {
  const int64_t untouched = dim - 2 * half;
  if (!rotation) {
    memset(dst, 0, sizeof(uint16_t) * dim);
  } else if (streamed) {
    constexpr int kLine = 64 / sizeof(uint16_t);
    const int64_t first = untouched / kLine * kLine;
    alignas(64) uint16_t rest[2 * kMaxRopeHalf + kLine];
    for (int64_t i = first; i < untouched; ++i) rest[i - first] = src[i];
    rotate(src + untouched, half, *rotation, rest + untouched - first);
    stream(dst, src, sizeof(uint16_t) * first);
    stream(dst + first, rest, sizeof(uint16_t) * (dim - first));
  } else {
    if (dst != src) memcpy(dst, src, sizeof(uint16_t) * untouched);
    rotate(src + untouched, half, *rotation, dst + untouched);
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
