// Vector comparisons: a mask of lanes into VCC or a pair of scalar registers.
#include <immintrin.h>

#include <cmath>

#include "emulator/machine/lanes.h"

namespace emulator {
namespace {

// A bit for each lane of which `f` holds.
template <class F>
u64 lanes_of(F f) {
  alignas(32) u32 holds[kLanes];
  for (int l = 0; l < kLanes; ++l) holds[l] = f(l) ? ~0u : 0;
  u64 mask = 0;
  for (int l = 0; l < kLanes; l += 8)
    mask |= static_cast<u64>(_mm256_movemask_ps(_mm256_load_ps(reinterpret_cast<const float*>(holds + l))))
            << l;
  return mask;
}
template <auto kF, class T>
void compare(Wave& w, I i) {
  const auto of = [&](const auto& a, const auto& b) {
    w.write_mask(i.sdst, lanes_of([&](int l) { return kF(static_cast<T>(a[l]), static_cast<T>(b[l])); }));
  };
  if constexpr (sizeof(T) == 8) of(w.source64(i, 0), w.source64(i, 1));
  else if constexpr (std::is_same_v<T, float>) of(w.source_float(i, 0), w.source_float(i, 1));
  else of(w.source(i, 0), w.source(i, 1));
}

// Bits of the second operand name kinds of floats: signalling NaN, NaN, -inf, -normal, -subnormal, -0, and
// the positive ones backwards.
void classify64(Wave& w, I i) {
  const Wave::Pair a = w.source64(i, 0);
  const u32* kinds = w.source(i, 1);
  u64 mask = 0;
  for (int l = 0; l < kLanes; ++l) {
    u64 bits = a[l];
    if (i.absolute & 1) bits &= ~(1ull << 63);
    if (i.negate & 1) bits ^= 1ull << 63;
    const double x = std::bit_cast<double>(bits);
    int positive = 0;  // 6: zero, 7: subnormal, 8: normal, 9: infinity
    switch (std::fpclassify(x)) {
      case FP_ZERO: positive = 6; break;
      case FP_SUBNORMAL: positive = 7; break;
      case FP_NORMAL: positive = 8; break;
      case FP_INFINITE: positive = 9; break;
      default: break;
    }
    const int kind = positive == 0     ? static_cast<int>(bits >> 51 & 1)
                     : std::signbit(x) ? 11 - positive
                                       : positive;
    mask |= u64{(kinds[l] >> kind & 1) != 0} << l;
  }
  w.write_mask(i.sdst, mask);
}

constexpr auto kLt = [](auto a, auto b) { return a < b; };
constexpr auto kEq = [](auto a, auto b) { return a == b; };
constexpr auto kLe = [](auto a, auto b) { return a <= b; };
constexpr auto kGt = [](auto a, auto b) { return a > b; };
constexpr auto kNe = [](auto a, auto b) { return a != b; };
constexpr auto kGe = [](auto a, auto b) { return a >= b; };
constexpr auto kLg = [](auto a, auto b) { return a < b || a > b; };
constexpr auto kOrdered = [](auto a, auto b) { return a == a && b == b; };
constexpr auto kUnordered = [](auto a, auto b) { return a != a || b != b; };
constexpr auto kNge = [](auto a, auto b) { return !(a >= b); };
constexpr auto kNlg = [](auto a, auto b) { return !(a < b || a > b); };
constexpr auto kNgt = [](auto a, auto b) { return !(a > b); };
constexpr auto kNle = [](auto a, auto b) { return !(a <= b); };
constexpr auto kNlt = [](auto a, auto b) { return !(a < b); };

constexpr Format VC = Format::kVopc;
#define MLA_COMPARE_INTEGERS(first, suffix, T)                  \
  {VC, (first) + 1, "v_cmp_lt_" suffix, compare<kLt, T>},       \
      {VC, (first) + 2, "v_cmp_eq_" suffix, compare<kEq, T>},   \
      {VC, (first) + 3, "v_cmp_le_" suffix, compare<kLe, T>},   \
      {VC, (first) + 4, "v_cmp_gt_" suffix, compare<kGt, T>},   \
      {VC, (first) + 5, "v_cmp_ne_" suffix, compare<kNe, T>}, { \
    VC, (first) + 6, "v_cmp_ge_" suffix, compare<kGe, T>        \
  }
constexpr Opcode kCompare[] = {
    {VC, 18, "v_cmp_class_f64", classify64},
    {VC, 65, "v_cmp_lt_f32", compare<kLt, float>},
    {VC, 66, "v_cmp_eq_f32", compare<kEq, float>},
    {VC, 67, "v_cmp_le_f32", compare<kLe, float>},
    {VC, 68, "v_cmp_gt_f32", compare<kGt, float>},
    {VC, 69, "v_cmp_lg_f32", compare<kLg, float>},
    {VC, 70, "v_cmp_ge_f32", compare<kGe, float>},
    {VC, 71, "v_cmp_o_f32", compare<kOrdered, float>},
    {VC, 72, "v_cmp_u_f32", compare<kUnordered, float>},
    {VC, 73, "v_cmp_nge_f32", compare<kNge, float>},
    {VC, 74, "v_cmp_nlg_f32", compare<kNlg, float>},
    {VC, 75, "v_cmp_ngt_f32", compare<kNgt, float>},
    {VC, 76, "v_cmp_nle_f32", compare<kNle, float>},
    {VC, 77, "v_cmp_neq_f32", compare<kNe, float>},
    {VC, 78, "v_cmp_nlt_f32", compare<kNlt, float>},
    MLA_COMPARE_INTEGERS(160, "i16", int16_t),
    MLA_COMPARE_INTEGERS(168, "u16", uint16_t),
    MLA_COMPARE_INTEGERS(192, "i32", int32_t),
    MLA_COMPARE_INTEGERS(200, "u32", uint32_t),
    MLA_COMPARE_INTEGERS(224, "i64", int64_t),
    MLA_COMPARE_INTEGERS(232, "u64", uint64_t),
};

}  // namespace

Table compare_table() { return {kCompare, std::size(kCompare)}; }

}  // namespace emulator
