// Vector instructions on 64 bits: integers, doubles, pairs of floats or halves.
#include <cmath>

#include "emulator/machine/formats.h"
#include "emulator/machine/lanes.h"

namespace emulator {
namespace {

double as_double(u64 x) { return std::bit_cast<double>(x); }
u64 as_bits64(double x) { return std::bit_cast<u64>(x); }

void move64(Wave& w, I i) {
  const Wave::Pair a = w.source64(i, 0);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = a[l];
  w.write64(i, result);
}
template <auto kF>
void shift64(Wave& w, I i) {
  const u32* n = w.source(i, 0);
  const Wave::Pair a = w.source64(i, 1);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = kF(a[l], n[l] & 63);
  w.write64(i, result);
}
void shift_add64(Wave& w, I i) {
  const Wave::Pair a = w.source64(i, 0), c = w.source64(i, 2);
  const u32* n = w.source(i, 1);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = (a[l] << (n[l] & 7)) + c[l];
  w.write64(i, result);
}
template <bool kSigned>
void multiply_add64(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1);
  const Wave::Pair c = w.source64(i, 2);
  u64 result[kLanes], carries = 0;
  for (int l = 0; l < kLanes; ++l) {
    const u64 product =
        kSigned ? static_cast<u64>(int64_t{as_signed(a[l])} * as_signed(b[l])) : u64{a[l]} * b[l];
    result[l] = product + c[l];
    carries |= u64{result[l] < product} << l;
  }
  w.write64(i, result);
  w.write_mask(i.sdst, carries);
}

// ---- doubles
u64 modified(I i, int k, u64 x) {
  if (i.absolute >> k & 1) x &= ~(1ull << 63);
  if (i.negate >> k & 1) x ^= 1ull << 63;
  return x;
}
template <auto kF>
void doubles(Wave& w, I i) {  // as many operands as kF takes
  constexpr int kCount = std::is_invocable_v<decltype(kF), double>           ? 1
                         : std::is_invocable_v<decltype(kF), double, double> ? 2
                                                                             : 3;
  Wave::Pair x[kCount];
  for (int k = 0; k < kCount; ++k) x[k] = w.source64(i, k);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const auto in = [&](int k) { return as_double(modified(i, k, x[k][l])); };
    if constexpr (kCount == 1) result[l] = as_bits64(kF(in(0)));
    else if constexpr (kCount == 2) result[l] = as_bits64(kF(in(0), in(1)));
    else result[l] = as_bits64(kF(in(0), in(1), in(2)));
  }
  w.write64(i, result);
}
void multiply_accumulate64(Wave& w, I i) {
  const Wave::Pair a = w.source64(i, 0), b = w.source64(i, 1);
  const u32 *low = w.vgpr(i.dst, "reads"), *high = w.vgpr(i.dst + 1, "reads");
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l)
    result[l] = as_bits64(std::fma(as_double(modified(i, 0, a[l])), as_double(modified(i, 1, b[l])),
                                   as_double(low[l] | u64{high[l]} << 32)));
  w.write64(i, result);
}
// The hardware's reciprocal square root is good to 2^29 ulp: the low bits are taken away, so that a result
// that relies on them is wrong here too.
double rough_rsqrt(double x) {
  constexpr u64 kLowBits = (1ull << 28) - 1;
  const double exact = 1.0 / std::sqrt(x);
  return std::isfinite(exact) ? as_double(as_bits64(exact) & ~kLowBits) : exact;
}
void double_to_float(Wave& w, I i) {
  const Wave::Pair a = w.source64(i, 0);
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits(static_cast<float>(as_double(modified(i, 0, a[l]))));
  w.write(i, result);
}
void float_to_double(Wave& w, I i) {
  const float* a = w.source_float(i, 0);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = as_bits64(a[l]);
  w.write64(i, result);
}

// ---- pairs: op_sel picks the half of a source that makes the low result, op_sel_hi that of the high one
bool high_half(I i, int k, bool of_high_result) { return (of_high_result ? i.op_sel_hi : i.op_sel) >> k & 1; }

template <auto kF, int kCount>
void packed_floats(Wave& w, I i) {
  const u32* x[2][3];
  for (int k = 0; k < kCount; ++k) {
    const bool constant = i.src[k] >= kSgprs && i.src[k] < kFirstVgpr;  // the same in both halves
    const Wave::Pair pair = constant ? Wave::Pair{w.source(i, k), nullptr} : w.source64(i, k);
    for (int half = 0; half < 2; ++half)
      x[half][k] = high_half(i, k, half) && !constant ? pair.high : pair.low;
  }
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = 0;
  for (int half = 0; half < 2; ++half) {
    u32 flip[3];
    for (int k = 0; k < 3; ++k) flip[k] = (half ? i.negate_high : i.negate) >> k & 1 ? 0x80000000 : 0;
    for (int l = 0; l < kLanes; ++l) {
      const auto in = [&](int k) { return as_float(x[half][k][l] ^ flip[k]); };
      float y;
      if constexpr (kCount == 2) y = kF(in(0), in(1));
      else y = kF(in(0), in(1), in(2));
      result[l] |= u64{as_bits(y)} << 32 * half;
    }
  }
  w.write64(i, result);
}
void packed_move(Wave& w, I i) {
  const auto half = [&](int k, bool high) {
    if (i.src[k] >= kSgprs && i.src[k] < kFirstVgpr) return w.source(i, k);
    const Wave::Pair pair = w.source64(i, k);
    return high ? pair.high : pair.low;
  };
  const u32 *a = half(0, i.op_sel & 1), *b = half(1, i.op_sel & 2);
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = a[l] | u64{b[l]} << 32;
  w.write64(i, result);
}
template <auto kF>
void packed_words(Wave& w, I i) {
  const u32 *a = w.source(i, 0), *b = w.source(i, 1);
  if (i.negate || i.negate_high) w.fault("negates integers");
  alignas(64) u32 result[kLanes];
  const auto half = [](u32 x, bool high) { return high ? x >> 16 : x & 0xffff; };
  for (int l = 0; l < kLanes; ++l) {
    const u32 low = kF(half(a[l], high_half(i, 0, false)), half(b[l], high_half(i, 1, false)));
    const u32 high = kF(half(a[l], high_half(i, 0, true)), half(b[l], high_half(i, 1, true)));
    result[l] = (low & 0xffff) | high << 16;
  }
  w.write(i, result);
}
// Each source a float, or with op_sel_hi a half that op_sel picks; neg_hi is the absolute value.
void mixed_multiply_add(Wave& w, I i) {
  const u32* x[3];
  for (int k = 0; k < 3; ++k) {
    x[k] = w.source(i, k);
    if (high_half(i, k, true) && i.src[k] >= 240 && i.src[k] < kLiteral) w.fault("has a constant as a half");
  }
  alignas(64) u32 result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    float in[3];
    for (int k = 0; k < 3; ++k) {
      in[k] = !high_half(i, k, true) ? as_float(x[k][l])
                                     : from_f16(high_half(i, k, false) ? x[k][l] >> 16 : x[k][l]);
      if (i.negate_high >> k & 1) in[k] = std::fabs(in[k]);
      if (i.negate >> k & 1) in[k] = -in[k];
    }
    result[l] = as_bits(std::fma(in[0], in[1], in[2]));
  }
  w.write(i, result);
}
// Two FP8 codes of the low word, or with SDWA of the high one, to floats.
void from_fp8_pair(Wave& w, I i) {
  const u32* a = w.source(i, 0);
  if (w.group->gpu->name == "gfx90a") w.fault("does not exist on this GPU");
  static const auto kValues = [] {
    std::array<std::array<u32, 256>, 2> values{};
    for (u32 fnuz = 0; fnuz < 2; ++fnuz)
      for (u32 code = 0; code < 256; ++code) values[fnuz][code] = as_bits(from_e4m3(code, fnuz));
    return values;
  }();
  const auto& values = kValues[w.group->gpu->fp8_is_fnuz];
  u64 result[kLanes];
  for (int l = 0; l < kLanes; ++l) result[l] = values[a[l] & 255] | u64{values[a[l] >> 8 & 255]} << 32;
  w.write64(i, result);
}

constexpr Format V1 = Format::kVop1, V2 = Format::kVop2, V3 = Format::kVop3, VP = Format::kVop3p;
constexpr Opcode kWide[] = {
    {V1, 15, "v_cvt_f32_f64", double_to_float},
    {V1, 16, "v_cvt_f64_f32", float_to_double},
    {V1, 38, "v_rsq_f64", doubles<rough_rsqrt>},
    {V1, 56, "v_mov_b64", move64},
    {V1, 86, "v_cvt_pk_f32_fp8", from_fp8_pair},
    {V2, 4, "v_fmac_f64", multiply_accumulate64},
    {V3, 460, "v_fma_f64", doubles<[](double a, double b, double c) { return std::fma(a, b, c); }>},
    {V3, 488, "v_mad_u64_u32", multiply_add64<false>, kCarries},
    {V3, 489, "v_mad_i64_i32", multiply_add64<true>, kCarries},
    {V3, 520, "v_lshl_add_u64", shift_add64},
    {V3, 640, "v_add_f64", doubles<[](double a, double b) { return a + b; }>},
    {V3, 641, "v_mul_f64", doubles<[](double a, double b) { return a * b; }>},
    {V3, 0x28f, "v_lshlrev_b64", shift64<[](u64 a, u32 n) { return a << n; }>},
    {V3, 0x290, "v_lshrrev_b64", shift64<[](u64 a, u32 n) { return (a >> n); }>},
    {V3, 0x291, "v_ashrrev_i64",
     shift64<[](u64 a, u32 n) { return (static_cast<u64>(static_cast<int64_t>(a) >> n)); }>},
    {VP, 1, "v_pk_mul_lo_u16", packed_words<[](u32 a, u32 b) { return a * b; }>},
    {VP, 10, "v_pk_add_u16", packed_words<[](u32 a, u32 b) { return a + b; }>},
    {VP, 32, "v_fma_mix_f32", mixed_multiply_add},
    {VP, 48, "v_pk_fma_f32", packed_floats<[](float a, float b, float c) { return std::fma(a, b, c); }, 3>},
    {VP, 49, "v_pk_mul_f32", packed_floats<[](float a, float b) { return a * b; }, 2>},
    {VP, 50, "v_pk_add_f32", packed_floats<[](float a, float b) { return a + b; }, 2>},
    {VP, 51, "v_pk_mov_b32", packed_move},
};

}  // namespace

Table wide_table() { return {kWide, std::size(kWide)}; }

}  // namespace emulator
