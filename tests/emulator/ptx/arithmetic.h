#pragma once
// Functions of one, two or three operands, lane by lane.
#include <cmath>
#include <map>
#include <string>
#include <type_traits>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {

template <class T, auto kFunction>
void unary(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t* a = w.operand(i, 1);
  each_lane_alone(w.active, [&](int l) { d[l] = put(kFunction(get<T>(a[l]))); });
}
template <class T, auto kFunction>
void binary(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) { d[l] = put(kFunction(get<T>(a[l]), get<T>(b[l]))); });
}
template <class T, auto kFunction>
void ternary(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2), *c = w.operand(i, 3);
  each_lane_alone(w.active, [&](int l) { d[l] = put(kFunction(get<T>(a[l]), get<T>(b[l]), get<T>(c[l]))); });
}

template <class T>
T minimum(T a, T b) {  // of a number and a NaN the number
  return b != b || a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  return b != b || a > b ? a : b;
}

// Comparisons: of floats none holds of what is no number, unless it says so (ltu).
enum Compare { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan };
template <class T, Compare kCompare, bool kOrNan>
void set_predicate(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) {
    const T x = get<T>(a[l]), y = get<T>(b[l]);
    if constexpr (std::is_floating_point_v<T>) {
      const bool is_none = std::isnan(x) || std::isnan(y);
      if (kCompare == kNum || kCompare == kNan || is_none) {
        d[l] = kCompare == kNum ? !is_none : kCompare == kNan ? is_none : kOrNan;
        return;
      }
    }
    switch (kCompare) {
      case kEq: d[l] = x == y; break;
      case kNe: d[l] = x != y; break;
      case kLt: d[l] = x < y; break;
      case kLe: d[l] = x <= y; break;
      case kGt: d[l] = x > y; break;
      default: d[l] = x >= y; break;
    }
  });
}
using Handlers = std::map<std::string, Handler>;
template <class T>
void add_comparisons(Handlers& t, const std::string& type) {
  const auto one = [&]<Compare kCompare>(const std::string& name, std::integral_constant<Compare, kCompare>) {
    t["setp." + name + "." + type] = set_predicate<T, kCompare, false>;
    if constexpr (std::is_floating_point_v<T>)
      t["setp." + name + "u." + type] = set_predicate<T, kCompare, true>;
  };
  one("eq", std::integral_constant<Compare, kEq>{});
  one("ne", std::integral_constant<Compare, kNe>{});
  one("lt", std::integral_constant<Compare, kLt>{});
  one("le", std::integral_constant<Compare, kLe>{});
  one("gt", std::integral_constant<Compare, kGt>{});
  one("ge", std::integral_constant<Compare, kGe>{});
  if constexpr (std::is_floating_point_v<T>) {
    t["setp.num." + type] = set_predicate<T, kNum, false>;
    t["setp.nan." + type] = set_predicate<T, kNan, false>;
  }
}

}  // namespace emulator::ptx
