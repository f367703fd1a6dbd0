// cvt, and the formats of 8 and 16 bits.
#include <array>
#include <cmath>
#include <limits>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {

namespace {

template <class T>
uint64_t to_integer(float x, bool down) {  // saturating; NaN is 0
  if (std::isnan(x)) return 0;
  const double whole = down ? std::floor(x) : std::trunc(x);
  if (whole <= static_cast<double>(std::numeric_limits<T>::min())) return put(std::numeric_limits<T>::min());
  if (whole >= static_cast<double>(std::numeric_limits<T>::max())) return put(std::numeric_limits<T>::max());
  return put(static_cast<T>(whole));
}

template <class To, class From>
void integers(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t* a = w.operand(i, 1);
  each_lane_alone(w.active, [&](int l) { d[l] = put(static_cast<To>(get<From>(a[l]))); });
}
template <class F>
void each(Warp& w, const Instruction& i, F f) {
  uint64_t* d = w.result(i);
  const uint64_t* a = w.operand(i, 1);
  each_lane_alone(w.active, [&](int l) { d[l] = f(a[l]); });
}
template <class F>
void each_pair(Warp& w, const Instruction& i, F f) {  // of two registers; the first is the upper half
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) { d[l] = f(get<float>(a[l]), get<float>(b[l])); });
}

uint8_t float_to_e4m3(float x) {  // satfinite
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff, sign = bits >> 24 & 128;
  if (magnitude > 0x7f800000) return 0x7f;
  const float size = std::bit_cast<float>(magnitude);
  if (size >= 464.0f) return static_cast<uint8_t>(sign | 0x7e);  // 448 and what rounds to it or beyond
  // Multiples of 2^-9 below 2^-6: the sum rounds to one. Above, three bits of the mantissa, ties to even.
  const uint32_t code = size < 0x1p-6f
                            ? std::bit_cast<uint32_t>(size + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f)
                            : (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (uint32_t{127 - 7} << 23)) >> 20;
  return static_cast<uint8_t>(sign | code);
}

template <class From>
Handler to(const std::string& type) {
  if (type == "u8") return integers<uint8_t, From>;
  if (type == "s8") return integers<int8_t, From>;
  if (type == "u16") return integers<uint16_t, From>;
  if (type == "s16") return integers<int16_t, From>;
  if (type == "u32") return integers<uint32_t, From>;
  if (type == "s32") return integers<int32_t, From>;
  if (type == "u64") return integers<uint64_t, From>;
  if (type == "s64") return integers<int64_t, From>;
  if (type == "f32") return integers<float, From>;
  return nullptr;
}

}  // namespace

const std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> all;
  for (uint32_t i = 0; i < 256; ++i) all[i] = from_e4m3(i, false);
  return all;
}();

Handler find_conversion(const Opcode& opcode, const Operands&, Instruction&) {
  if (opcode[0] != "cvt") return nullptr;
  const std::string &from = opcode.back(), &type = opcode[opcode.size() - 2];
  if (type == "bf16x2" && from == "f32")
    return [](Warp& w, const Instruction& i) {
      each_pair(w, i, [](float a, float b) { return uint64_t{float_to_bf16(a)} << 16 | float_to_bf16(b); });
    };
  if (type == "f16x2" && from == "f32")
    return [](Warp& w, const Instruction& i) {
      each_pair(w, i, [](float a, float b) { return uint64_t{float_to_f16(a)} << 16 | float_to_f16(b); });
    };
  if (type == "e4m3x2" && from == "f32" && has(opcode, "satfinite"))
    return [](Warp& w, const Instruction& i) {
      each_pair(w, i, [](float a, float b) { return uint64_t{float_to_e4m3(a)} << 8 | float_to_e4m3(b); });
    };
  if (type == "f16x2" && from == "e4m3x2")
    return [](Warp& w, const Instruction& i) {
      each(w, i, [](uint64_t x) {
        const auto half = [&](int h) {
          return uint64_t{float_to_f16(e4m3_to_float(static_cast<uint8_t>(x >> h)))};
        };
        return half(8) << 16 | half(0);
      });
    };
  if (type == "f32" && from == "f16")
    return [](Warp& w, const Instruction& i) {
      each(w, i, [](uint64_t x) { return put(from_f16(static_cast<uint16_t>(x))); });
    };
  if (type == "f32" && from == "bf16")
    return [](Warp& w, const Instruction& i) {
      each(w, i, [](uint64_t x) { return put(from_bf16(static_cast<uint16_t>(x))); });
    };
  if (type == "f16" && from == "f32")
    return [](Warp& w, const Instruction& i) {
      each(w, i, [](uint64_t x) { return uint64_t{float_to_f16(get<float>(x))}; });
    };
  if (type == "bf16" && from == "f32")
    return [](Warp& w, const Instruction& i) {
      each(w, i, [](uint64_t x) { return uint64_t{float_to_bf16(get<float>(x))}; });
    };
  if (type == "f32" && from == "f32") {
    if (has(opcode, "sat"))
      return [](Warp& w, const Instruction& i) {
        each(w, i, [](uint64_t x) { return put(std::fmin(std::fmax(get<float>(x), 0.0f), 1.0f)); });
      };
    if (has(opcode, "rni"))
      return [](Warp& w, const Instruction& i) {
        each(w, i, [](uint64_t x) { return put(std::nearbyintf(get<float>(x))); });
      };
    return nullptr;
  }
  if (from == "f32" && (has(opcode, "rzi") || has(opcode, "rmi"))) {
    const bool down = has(opcode, "rmi");
    const auto choose = [&]<class T>(T) -> Handler {
      if (down)
        return [](Warp& w, const Instruction& i) {
          each(w, i, [](uint64_t x) { return to_integer<T>(get<float>(x), true); });
        };
      return [](Warp& w, const Instruction& i) {
        each(w, i, [](uint64_t x) { return to_integer<T>(get<float>(x), false); });
      };
    };
    if (type == "s32") return choose(int32_t{});
    if (type == "u32") return choose(uint32_t{});
    return nullptr;
  }
  if (from == "u8") return to<uint8_t>(type);
  if (from == "s8") return to<int8_t>(type);
  if (from == "u16") return to<uint16_t>(type);
  if (from == "s16") return to<int16_t>(type);
  if (from == "u32") return to<uint32_t>(type);
  if (from == "s32") return to<int32_t>(type);
  if (from == "u64") return to<uint64_t>(type);
  if (from == "s64") return to<int64_t>(type);
  return nullptr;
}

}  // namespace emulator::ptx
