// Arithmetic of floats and of pairs of 16 bits.
#include "emulator/ptx/arithmetic.h"

namespace emulator::ptx {
namespace {

template <class T>
T add(T a, T b) {
  return a + b;
}
float minus(float a, float b) { return a - b; }
float negate(float a) { return -a; }
float magnitude(float a) { return std::fabs(a); }

float fused(float a, float b, float c) { return std::fma(a, b, c); }
// Towards -infinity: what is rounded to the nearest may be a step too high.
float fused_down(float a, float b, float c) {
  const double exact = std::fma(static_cast<double>(a), static_cast<double>(b), static_cast<double>(c));
  const auto near = static_cast<float>(exact);
  return near > exact ? std::nextafterf(near, -INFINITY) : near;
}
float times(float a, float b) { return a * b; }
float flush(float a) { return std::fabs(a) < 1.17549435e-38f ? std::copysign(0.0f, a) : a; }
float flushed_times(float a, float b) { return flush(flush(a) * flush(b)); }
float over(float a, float b) { return a / b; }
float reciprocal(float a) { return 1.0f / a; }
float reciprocal_root(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
float root(float a) { return std::sqrt(a); }
float power_of_2(float a) {  // ftz or not: what is subnormal is not what anybody reads
  return flush(static_cast<float>(std::exp2(static_cast<double>(flush(a)))));
}
float log_of_2(float a) {
  return std::fabs(a) < 1.17549435e-38f ? -INFINITY : static_cast<float>(std::log2(static_cast<double>(a)));
}
float nan_minimum(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
float nan_maximum(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }

// Pairs of 16 bits: in float, then rounded. A product of two is exact there; an fma is rounded twice.
template <bool kBf16>
float widen(uint32_t x) {
  return kBf16 ? from_bf16(x) : from_f16(x);
}
template <bool kBf16>
uint32_t narrow(float x) {
  return kBf16 ? float_to_bf16(x) : float_to_f16(x);
}
template <bool kBf16, auto kFunction, int kArguments>
void pairs(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t* a[3] = {};
  for (int k = 0; k < kArguments; ++k) a[k] = w.operand(i, 1 + k);
  each_lane_alone(w.active, [&](int l) {
    uint32_t result = 0;
    for (int h = 0; h < 32; h += 16) {
      const auto x = [&](int k) { return widen<kBf16>(static_cast<uint32_t>(a[k][l] >> h)); };
      if constexpr (kArguments == 1) result |= narrow<kBf16>(kFunction(x(0))) << h;
      else if constexpr (kArguments == 2) result |= narrow<kBf16>(kFunction(x(0), x(1))) << h;
      else result |= narrow<kBf16>(kFunction(x(0), x(1), x(2))) << h;
    }
    d[l] = result;
  });
}
template <class T, auto kFunction>
void halves(Warp& w, const Instruction& i) {  // u16x2, s16x2
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) {
    const auto half = [&](int h) {
      return uint32_t{static_cast<uint16_t>(kFunction(static_cast<T>(a[l] >> h), static_cast<T>(b[l] >> h)))}
             << h;
    };
    d[l] = half(0) | half(16);
  });
}

Handlers table() {
  Handlers t;
  add_comparisons<float>(t, "f32");
  t["add.f32"] = t["add.rn.f32"] = binary<float, add<float>>;
  t["sub.f32"] = t["sub.rn.f32"] = binary<float, minus>;
  t["mul.f32"] = t["mul.rn.f32"] = binary<float, times>;
  t["mul.rn.ftz.f32"] = binary<float, flushed_times>;
  t["div.rn.f32"] = t["div.approx.f32"] = t["div.full.f32"] = binary<float, over>;
  t["min.f32"] = binary<float, minimum<float>>;
  t["max.f32"] = binary<float, maximum<float>>;
  t["max.NaN.f32"] = binary<float, nan_maximum>;
  t["neg.f32"] = unary<float, negate>;
  t["abs.f32"] = unary<float, magnitude>;
  t["fma.rn.f32"] = ternary<float, fused>;
  t["fma.rm.f32"] = ternary<float, fused_down>;
  t["rcp.rn.f32"] = t["rcp.approx.ftz.f32"] = t["rcp.approx.f32"] = unary<float, reciprocal>;
  t["rsqrt.approx.ftz.f32"] = t["rsqrt.approx.f32"] = unary<float, reciprocal_root>;
  t["sqrt.rn.f32"] = unary<float, root>;
  t["ex2.approx.f32"] = t["ex2.approx.ftz.f32"] = unary<float, power_of_2>;
  t["lg2.approx.f32"] = t["lg2.approx.ftz.f32"] = unary<float, log_of_2>;
  t["mul.rn.f16x2"] = t["mul.f16x2"] = pairs<false, times, 2>;
  t["mul.rn.bf16x2"] = t["mul.bf16x2"] = pairs<true, times, 2>;
  t["fma.rn.bf16x2"] = pairs<true, fused, 3>;
  t["fma.rn.f16x2"] = pairs<false, fused, 3>;
  t["abs.bf16x2"] = pairs<true, magnitude, 1>;
  t["min.f16x2"] = pairs<false, minimum<float>, 2>;
  t["max.f16x2"] = pairs<false, maximum<float>, 2>;
  t["min.bf16x2"] = pairs<true, minimum<float>, 2>;
  t["max.bf16x2"] = pairs<true, maximum<float>, 2>;
  t["min.NaN.bf16x2"] = pairs<true, nan_minimum, 2>;
  t["max.NaN.bf16x2"] = pairs<true, nan_maximum, 2>;
  t["min.s16x2"] = halves<int16_t, minimum<int16_t>>;
  t["max.s16x2"] = halves<int16_t, maximum<int16_t>>;
  t["min.u16x2"] = halves<uint16_t, minimum<uint16_t>>;
  t["max.u16x2"] = halves<uint16_t, maximum<uint16_t>>;
  return t;
}

}  // namespace

Handler find_float(const Opcode& opcode, const Operands&, Instruction&) {
  static const Handlers handlers = table();
  const auto found = handlers.find(joined(opcode));
  return found == handlers.end() ? nullptr : found->second;
}

}  // namespace emulator::ptx
