// Vector instructions on 32-bit lanes.
#include <algorithm>
#include <cmath>

#include "emulator/machine/formats.h"
#include "emulator/machine/lanes.h"

namespace emulator {
namespace {

u32 signed24(u32 x) { return static_cast<u32>(as_signed(x << 8) >> 8); }
int exponent(float x) { return static_cast<int>(as_bits(x) >> 23 & 255); }
// v_exp, v_log and v_rcp take and give subnormals as 0. They are good to 1 ulp; here the result is nearest.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
template <auto kF>
float approximation(float x) {
  return flushed(static_cast<float>(kF(static_cast<double>(flushed(x)))));
}

float maximum(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
float minimum(float a, float b) { return -maximum(-a, -b); }
u32 to_unsigned(float x) { return !(x > 0) ? 0 : x >= 0x1p32f ? ~0u : static_cast<u32>(x); }
u32 to_signed(float x) {
  if (x != x) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? 0x80000000 : static_cast<u32>(static_cast<int32_t>(x));
}
template <class T>
u32 median(u32 a, u32 b, u32 c) {
  const T x = static_cast<T>(a), y = static_cast<T>(b), z = static_cast<T>(c);
  return static_cast<u32>(std::max(std::min(x, y), std::min(std::max(x, y), z)));
}
u32 unsigned24(u32 x) { return x & 0xffffff; }
u32 shift_right_signed(u32 a, u32 b) { return static_cast<u32>(as_signed(b) >> (a & 31)); }
u32 bit_field(u32 a, u32 b, u32 c) { return a >> (b & 31) & ((1u << (c & 31)) - 1); }
u32 align_bits(u32 a, u32 b, u32 c) { return static_cast<u32>((u64{a} << 32 | b) >> (c & 31)); }
u32 reverse(u32 x) {
  u32 result = 0;
  for (int k = 0; k < 32; ++k) result |= (x >> k & 1) << (31 - k);
  return result;
}
// v_perm_b32: bytes of a and b, signs of words, 0 and 255, as each byte of the selector says.
u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 data = u64{a} << 32 | b;
  u32 result = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 s = selector >> 8 * k & 255;
    const u32 value = s > 12    ? 255
                      : s == 12 ? 0
                      : s >= 8  ? (data >> (16 * (s - 8) + 15) & 1) * 255
                                : data >> 8 * s & 255;
    result |= value << 8 * k;
  }
  return result;
}

// ---- carries: d = f(a, b, carry), the new carries as a mask
template <auto kF, bool kCarryIn>
void carry(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1);
  const u64 in = kCarryIn ? w.scalar64(i, i.src[2]) : 0;
  alignas(64) u32 result[kLanes];
  u64 out = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool c = in >> l & 1;
    result[l] = kF(a[l], b[l], c);
    out |= u64{c} << l;
  }
  w.write(i, result);
  w.write_mask(i.sdst, out);
}
u32 add_carry(u32 a, u32 b, bool& c) {
  const u64 sum = u64{a} + b + c;
  c = sum >> 32;
  return static_cast<u32>(sum);
}
u32 sub_carry(u32 a, u32 b, bool& c) {
  const u64 taken = u64{b} + c;
  c = taken > a;
  return static_cast<u32>(a - taken);
}
u32 subrev_carry(u32 a, u32 b, bool& c) { return sub_carry(b, a, c); }

void conditional(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  const u64 mask = w.scalar64(i, i.src[2]);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(mask >> l & 1 ? b[l] : a[l]);
  w.write(i, result);
}
void sub_clamped(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = i.clamp && b[l] > a[l] ? 0 : a[l] - b[l];
  w.write(i, result);
}
void multiply_accumulate(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  const u32* d = w.vgpr(i.dst, "reads");
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(std::fma(a[l], b[l], as_float(d[l])));
  w.write(i, result);
}
// a * literal + b; on gfx90a, which calls it v_madmk_f32, in two roundings.
void multiply_literal(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  const float k = as_float(i.literal);
  const bool fused = w.group->gpu->name != "gfx90a";
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(fused ? std::fma(a[l], k, b[l]) : a[l] * k + b[l]);
  w.write(i, result);
}
void multiply_add_literal(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(std::fma(a[l], b[l], as_float(i.literal)));
  w.write(i, result);
}
void from_half(Wave& w, I i) {
  const u32* a = w.source(i, 0);
  const bool absolute = i.absolute & 1, negate = i.negate & 1;
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l)
    result[l] = (as_bits(from_f16(a[l])) & (absolute ? 0x7fffffff : ~0u)) ^ (negate ? 0x80000000 : 0);
  w.write(i, result);
}
// Of the lanes before this one, how many bits of the mask's low or high half are set.
template <int kFirst>
void count_below(Wave& w, I i) {
  const u32 *mask = w.source(i, 0), *more = w.source(i, 1);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int below = std::clamp(l - kFirst, 0, 32);
    const u32 lanes = below == 32 ? ~0u : (1u << below) - 1;
    result[l] = more[l] + static_cast<u32>(std::popcount(mask[l] & lanes));
  }
  w.write(i, result);
}
void swap(Wave& w, I i) {
  u32 *a = w.vgpr(i.dst, "writes"), *b = w.vgpr(i.src[0] - kFirstVgpr, "writes");
  for (int l = 0; l < kLanes; ++l)
    if (w.active[l]) std::swap(a[l], b[l]);
}
void read_first_lane(Wave& w, I i) {
  const u32* a = w.source(i, 0);
  w.set_scalar(i.sdst, a[w.exec() ? std::countr_zero(w.exec()) : 0]);
}
void read_lane(Wave& w, I i) {
  const u32* a = w.source(i, 0);
  w.set_scalar(i.sdst, a[w.scalar(i, i.src[1]) & 63]);
}
void write_lane(Wave& w, I i) { w.vgpr(i.dst, "writes")[w.scalar(i, i.src[1]) & 63] = w.scalar(i, i.src[0]); }
void truth_table(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1), *c = w.source(i, 2);
  const u32 table = static_cast<u32>(i.omod << 6 | i.absolute << 3 | i.negate);
  alignas(64) u32 result[kLanes] = {};
  for (int k = 0; k < 8; ++k)
    if (table >> k & 1)
      for (int l = 0; l < kLanes; ++l)
        result[l] |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
  w.write(i, result);
}

// ---- division, in three instructions around a reciprocal and fused multiplications
void divide_scale(Wave& w, I i) {
  const float *x = w.source_float(i, 0), *denominator = w.source_float(i, 1),
              *numerator = w.source_float(i, 2);
  alignas(64) u32 result[kLanes];
  u64 scaled = 0;
  const auto subnormal = [](double q) { return q != 0 && std::fabs(q) < 0x1p-126; };
  for (int l = 0; l < kLanes; ++l) {
    const float d = denominator[l], n = numerator[l];
    const bool of_denominator = as_bits(x[l]) == as_bits(d);
    float value = x[l];
    bool mark = false;
    if (n == 0 || d == 0) {
      value = as_float(0x7fc00000);
    } else if (exponent(n) - exponent(d) >= 96) {
      mark = true;
      if (of_denominator) value = std::ldexp(value, 64);
    } else if (std::fpclassify(d) == FP_SUBNORMAL) {
      value = std::ldexp(value, 64);
    } else if (const bool small = subnormal(1.0 / d), quotient = subnormal(static_cast<double>(n) / d);
               small) {
      mark = quotient;
      if (!quotient) value = std::ldexp(value, -64);
      else if (of_denominator) value = std::ldexp(value, 64);
    } else if (quotient) {
      mark = true;
      if (as_bits(x[l]) == as_bits(n)) value = std::ldexp(value, 64);
    } else if (exponent(n) <= 23) {
      value = std::ldexp(value, 64);
    }
    result[l] = as_bits(value);
    scaled |= u64{mark} << l;
  }
  w.write(i, result);
  w.write_mask(i.sdst, scaled);
}
void divide_fused(Wave& w, I i) {
  const float *a = w.source_float(i, 0), *b = w.source_float(i, 1), *c = w.source_float(i, 2);
  const u64 scaled = w.vcc();
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    float q = std::fma(a[l], b[l], c[l]);
    if (scaled >> l & 1) q = std::ldexp(q, exponent(c[l]) > 127 ? 64 : -64);
    result[l] = as_bits(q);
  }
  w.write(i, result);
}
// The quotient is taken as correctly rounded, which is what the sequence is for: the manuals leave corner
// cases of v_div_scale open.
void divide_fixup(Wave& w, I i) {
  w.source_float(i, 0);  // the sequence's result
  const float *denominator = w.source_float(i, 1), *numerator = w.source_float(i, 2);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const float d = denominator[l], n = numerator[l];
    if (n != n) result[l] = as_bits(n) | 0x400000;
    else if (d != d) result[l] = as_bits(d) | 0x400000;
    else if ((d == 0 && n == 0) || (std::isinf(d) && std::isinf(n))) result[l] = 0xffc00000;
    else result[l] = as_bits(n / d);
  }
  w.write(i, result);
}

constexpr Format V1 = Format::kVop1, V2 = Format::kVop2, V3 = Format::kVop3;
constexpr Opcode kVector[] = {
    {V1, 0, "v_nop", [](Wave&, I) {}},
    {V1, 1, "v_mov_b32", lanes1<[](u32 a) { return a; }>},
    {V1, 2, "v_readfirstlane_b32", read_first_lane, kScalarResult},
    {V1, 5, "v_cvt_f32_i32", lanes1<[](u32 a) { return as_bits(static_cast<float>(as_signed(a))); }>},
    {V1, 6, "v_cvt_f32_u32", lanes1<[](u32 a) { return as_bits(static_cast<float>(a)); }>},
    {V1, 7, "v_cvt_u32_f32", from_float<to_unsigned>},
    {V1, 8, "v_cvt_i32_f32", from_float<to_signed>},
    {V1, 10, "v_cvt_f16_f32", from_float<to_f16>},
    {V1, 11, "v_cvt_f32_f16", from_half},
    {V1, 17, "v_cvt_f32_ubyte0", lanes1<[](u32 a) { return as_bits(static_cast<float>(a & 255)); }>},
    {V1, 18, "v_cvt_f32_ubyte1", lanes1<[](u32 a) { return (as_bits(static_cast<float>(a >> 8 & 255))); }>},
    {V1, 19, "v_cvt_f32_ubyte2", lanes1<[](u32 a) { return (as_bits(static_cast<float>(a >> 16 & 255))); }>},
    {V1, 20, "v_cvt_f32_ubyte3", lanes1<[](u32 a) { return (as_bits(static_cast<float>(a >> 24))); }>},
    {V1, 28, "v_trunc_f32", floats1<[](float a) { return std::trunc(a); }>},
    {V1, 29, "v_ceil_f32", floats1<[](float a) { return std::ceil(a); }>},
    {V1, 30, "v_rndne_f32", floats1<[](float a) { return std::nearbyint(a); }>},
    {V1, 31, "v_floor_f32", floats1<[](float a) { return std::floor(a); }>},
    {V1, 32, "v_exp_f32", floats1<approximation<[](double x) { return std::exp2(x); }>>},
    {V1, 33, "v_log_f32", floats1<approximation<[](double x) { return std::log2(x); }>>},
    {V1, 34, "v_rcp_f32", floats1<approximation<[](double x) { return 1.0 / x; }>>},
    {V1, 35, "v_rcp_iflag_f32", floats1<approximation<[](double x) { return 1.0 / x; }>>},
    {V1, 36, "v_rsq_f32", floats1<approximation<[](double x) { return 1.0 / std::sqrt(x); }>>},
    {V1, 39, "v_sqrt_f32", floats1<approximation<[](double x) { return std::sqrt(x); }>>},
    {V1, 43, "v_not_b32", lanes1<[](u32 a) { return ~a; }>},
    {V1, 44, "v_bfrev_b32", lanes1<reverse>},
    {V1, 45, "v_ffbh_u32", lanes1<[](u32 a) { return a ? static_cast<u32>(std::countl_zero(a)) : ~0u; }>},
    {V1, 46, "v_ffbl_b32", lanes1<[](u32 a) { return a ? static_cast<u32>(std::countr_zero(a)) : ~0u; }>},
    {V1, 81, "v_swap_b32", swap},
    {V2, 0, "v_cndmask_b32", conditional},
    {V2, 1, "v_add_f32", floats2<[](float a, float b) { return a + b; }>},
    {V2, 2, "v_sub_f32", floats2<[](float a, float b) { return a - b; }>},
    {V2, 3, "v_subrev_f32", floats2<[](float a, float b) { return b - a; }>},
    {V2, 5, "v_mul_f32", floats2<[](float a, float b) { return a * b; }>},
    {V2, 6, "v_mul_i32_i24", lanes2<[](u32 a, u32 b) { return signed24(a) * signed24(b); }>},
    {V2, 8, "v_mul_u32_u24", lanes2<[](u32 a, u32 b) { return unsigned24(a) * unsigned24(b); }>},
    {V2, 9, "v_mul_hi_u32_u24",
     lanes2<[](u32 a, u32 b) { return (static_cast<u32>(u64{unsigned24(a)} * unsigned24(b) >> 32)); }>},
    {V2, 10, "v_min_f32", floats2<minimum>},
    {V2, 11, "v_max_f32", floats2<maximum>},
    {V2, 12, "v_min_i32", lanes2<[](u32 a, u32 b) { return as_signed(a) < as_signed(b) ? a : b; }>},
    {V2, 13, "v_max_i32", lanes2<[](u32 a, u32 b) { return (as_signed(a) > as_signed(b) ? a : b); }>},
    {V2, 14, "v_min_u32", lanes2<[](u32 a, u32 b) { return a < b ? a : b; }>},
    {V2, 15, "v_max_u32", lanes2<[](u32 a, u32 b) { return (a > b ? a : b); }>},
    {V2, 16, "v_lshrrev_b32", lanes2<[](u32 a, u32 b) { return (b >> (a & 31)); }>},
    {V2, 17, "v_ashrrev_i32", lanes2<shift_right_signed>},
    {V2, 18, "v_lshlrev_b32", lanes2<[](u32 a, u32 b) { return b << (a & 31); }>},
    {V2, 19, "v_and_b32", lanes2<[](u32 a, u32 b) { return a & b; }>},
    {V2, 20, "v_or_b32", lanes2<[](u32 a, u32 b) { return a | b; }>},
    {V2, 21, "v_xor_b32", lanes2<[](u32 a, u32 b) { return a ^ b; }>},
    {V2, 23, "v_fmamk_f32", multiply_literal, kLiteralFollows},
    {V2, 24, "v_fmaak_f32", multiply_add_literal, kLiteralFollows},
    {V2, 25, "v_add_co_u32", carry<add_carry, false>, kCarries},
    {V2, 26, "v_sub_co_u32", carry<sub_carry, false>, kCarries},
    {V2, 27, "v_subrev_co_u32", carry<subrev_carry, false>, kCarries},
    {V2, 28, "v_addc_co_u32", carry<add_carry, true>, kCarries},
    {V2, 29, "v_subb_co_u32", carry<sub_carry, true>, kCarries},
    {V2, 30, "v_subbrev_co_u32", carry<subrev_carry, true>, kCarries},
    {V2, 38, "v_add_u16", lanes2<[](u32 a, u32 b) { return (a + b) & 0xffff; }>},
    {V2, 39, "v_sub_u16", lanes2<[](u32 a, u32 b) { return (a - b) & 0xffff; }>},
    {V2, 41, "v_mul_lo_u16", lanes2<[](u32 a, u32 b) { return (a * b) & 0xffff; }>},
    {V2, 42, "v_lshlrev_b16", lanes2<[](u32 a, u32 b) { return (b << (a & 15)) & 0xffff; }>},
    {V2, 43, "v_lshrrev_b16", lanes2<[](u32 a, u32 b) { return ((b & 0xffff) >> (a & 15)); }>},
    {V2, 52, "v_add_u32", lanes2<[](u32 a, u32 b) { return a + b; }>},
    {V2, 53, "v_sub_u32", sub_clamped, kClamps},
    {V2, 54, "v_subrev_u32", lanes2<[](u32 a, u32 b) { return b - a; }>},
    {V2, 59, "v_fmac_f32", multiply_accumulate},
    {V2, 61, "v_xnor_b32", lanes2<[](u32 a, u32 b) { return ~(a ^ b); }>},
    {V3, 450, "v_mad_i32_i24", lanes3<[](u32 a, u32 b, u32 c) {
       return signed24(a) * signed24(b) + c;
     }>},
    {V3, 451, "v_mad_u32_u24", lanes3<[](u32 a, u32 b, u32 c) { return unsigned24(a) * unsigned24(b) + c; }>},
    {V3, 456, "v_bfe_u32", lanes3<bit_field>},
    {V3, 457, "v_bfe_i32", lanes3<[](u32 a, u32 b, u32 c) {
       const u32 unused = (32 - (c & 31)) & 31;
       return c & 31 ? static_cast<u32>(as_signed(a >> (b & 31) << unused) >> unused) : 0;
     }>},
    {V3, 458, "v_bfi_b32", lanes3<[](u32 a, u32 b, u32 c) { return (a & b) | (~a & c); }>},
    {V3, 459, "v_fma_f32", floats3<[](float a, float b, float c) { return std::fma(a, b, c); }>},
    {V3, 462, "v_alignbit_b32", lanes3<align_bits>},
    {V3, 463, "v_alignbyte_b32",
     lanes3<[](u32 a, u32 b, u32 c) { return (static_cast<u32>((u64{a} << 32 | b) >> 8 * (c & 3))); }>},
    {V3, 464, "v_min3_f32", floats3<[](float a, float b, float c) { return minimum(minimum(a, b), c); }>},
    {V3, 467, "v_max3_f32", floats3<[](float a, float b, float c) { return maximum(maximum(a, b), c); }>},
    {V3, 468, "v_max3_i32", lanes3<[](u32 a, u32 b, u32 c) {
       return static_cast<u32>(std::max(std::max(as_signed(a), as_signed(b)), as_signed(c)));
     }>},
    {V3, 469, "v_max3_u32", lanes3<[](u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); }>},
    {V3, 471, "v_med3_i32", lanes3<median<int32_t>>},
    {V3, 472, "v_med3_u32", lanes3<median<u32>>},
    {V3, 478, "v_div_fixup_f32", divide_fixup},
    {V3, 480, "v_div_scale_f32", divide_scale, kCarries},
    {V3, 482, "v_div_fmas_f32", divide_fused},
    {V3, 493, "v_perm_b32", lanes3<permute_bytes>},
    {V3, 499, "v_xad_u32", lanes3<[](u32 a, u32 b, u32 c) { return (a ^ b) + c; }>},
    {V3, 509, "v_lshl_add_u32", lanes3<[](u32 a, u32 b, u32 c) { return (a << (b & 31)) + c; }>},
    {V3, 510, "v_add_lshl_u32", lanes3<[](u32 a, u32 b, u32 c) { return (a + b) << (c & 31); }>},
    {V3, 511, "v_add3_u32", lanes3<[](u32 a, u32 b, u32 c) { return a + b + c; }>},
    {V3, 512, "v_lshl_or_b32", lanes3<[](u32 a, u32 b, u32 c) { return a << (b & 31) | c; }>},
    {V3, 513, "v_and_or_b32", lanes3<[](u32 a, u32 b, u32 c) { return (a & b) | c; }>},
    {V3, 514, "v_or3_b32", lanes3<[](u32 a, u32 b, u32 c) { return a | b | c; }>},
    {V3, 564, "v_bitop3_b32", truth_table, kTruthTable},
    {V3, 615, "v_cvt_pk_f16_f32", from_floats<[](float a, float b) { return to_f16(a) | to_f16(b) << 16; }>},
    {V3, 616, "v_cvt_pk_bf16_f32",
     from_floats<[](float a, float b) { return to_bf16(a) | to_bf16(b) << 16; }>},
    {V3, 645, "v_mul_lo_u32", lanes2<[](u32 a, u32 b) { return a * b; }>},
    {V3, 646, "v_mul_hi_u32", lanes2<[](u32 a, u32 b) { return (static_cast<u32>(u64{a} * b >> 32)); }>},
    {V3, 647, "v_mul_hi_i32",
     lanes2<[](u32 a, u32 b) { return (static_cast<u32>(int64_t{as_signed(a)} * as_signed(b) >> 32)); }>},
    {V3, 648, "v_ldexp_f32", [](Wave& w, I i) {
       const float* a = w.source_float(i, 0);
       const u32* n = w.source(i, 1);
       alignas(64) u32 result[kLanes];
       for (int l = 0; l < kLanes; ++l)
         result[l] = as_bits(std::ldexp(a[l], std::clamp(as_signed(n[l]), -1000, 1000)));
       w.write(i, result);
     }},
    {V3, 649, "v_readlane_b32", read_lane, kScalarResult},
    {V3, 650, "v_writelane_b32", write_lane},
    {V3, 651, "v_bcnt_u32_b32", lanes2<[](u32 a, u32 b) { return b + static_cast<u32>(std::popcount(a)); }>},
    {V3, 652, "v_mbcnt_lo_u32_b32", count_below<0>},
    {V3, 653, "v_mbcnt_hi_u32_b32", count_below<32>},
    {V3, 662, "v_cvt_pkrtz_f16_f32",
     from_floats<[](float a, float b) { return to_f16_toward_zero(a) | to_f16_toward_zero(b) << 16; }>},
};

}  // namespace

Table vector_table() { return {kVector, std::size(kVector)}; }

}  // namespace emulator
