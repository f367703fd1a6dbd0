// Part of simd.h, which includes it inside its namespace: the operations in plain C++.
#pragma once

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
MLA_LANEWISE(div, F32, (F32 a, F32 b), a.v[i] / b.v[i])
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
MLA_LANEWISE(max_signed, U32, (U32 a, U32 b),
             static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i])
MLA_LANEWISE(min_signed, U32, (U32 a, U32 b),
             static_cast<int32_t>(a.v[i]) < static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i])
MLA_LANEWISE(is_nan, Mask, (F32 x), x.v[i] != x.v[i])
MLA_LANEWISE(equal, Mask, (U32 a, U32 b), a.v[i] == b.v[i])
MLA_LANEWISE(less, Mask, (F32 a, F32 b), a.v[i] < b.v[i])
MLA_LANEWISE(select, U32, (Mask m, U32 a, U32 b), m.v[i] ? a.v[i] : b.v[i])
MLA_LANEWISE(select, F32, (Mask m, F32 a, F32 b), m.v[i] ? a.v[i] : b.v[i])
MLA_LANEWISE(load_u8, U32, (const uint8_t* p), p[i])
MLA_LANEWISE(load_u16, U32, (const uint16_t* p), p[i])
MLA_SIMD
void store_u8(uint8_t* p, U32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(x.v[i]);
}
MLA_SIMD void store_u16(uint16_t* p, U32 x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(x.v[i]);
}
MLA_SIMD void unzip(F32 first, F32 second, F32* even, F32* odd) {
  for (int i = 0; i < kLanes; ++i) {
    const F32& in = i < kLanes / 2 ? first : second;
    even->v[i] = in.v[2 * i % kLanes];
    odd->v[i] = in.v[2 * i % kLanes + 1];
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
