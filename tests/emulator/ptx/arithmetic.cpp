// Arithmetic of integers, comparisons, bits, moves.
#include <algorithm>

#include "emulator/ptx/arithmetic.h"

namespace emulator::ptx {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
// Without a wide type for 64 bits: the compiler's.
template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
  else return a + b;
}
template <class T>
T sub(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
  else return a - b;
}
template <class T>
T mul_lo(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * b);
}
template <class T>
T mul_hi(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * b >> (sizeof(T) * 8));
}
template <class T>
Wide<T> mul_wide(T a, T b) {
  return static_cast<Wide<T>>(a) * b;
}
template <class T>
T mad_lo(T a, T b, T c) {
  return add(mul_lo(a, b), c);
}
template <class T>
T divide(T a, T b) {  // by 0: all bits, as the machine does
  if (b == 0) return static_cast<T>(~T{0});
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return sub(T{0}, a);
  return static_cast<T>(a / b);
}
template <class T>
T remainder(T a, T b) {
  return sub(a, mul_lo(divide(a, b), b));
}
template <class T>
T negate(T a) {
  if constexpr (std::is_floating_point_v<T>) return -a;
  else return sub(T{0}, a);
}
template <class T>
T absolute(T a) {
  if constexpr (std::is_floating_point_v<T>) return std::fabs(a);
  else return a < 0 ? negate(a) : a;
}
template <class T>
T both(T a, T b) {
  return a & b;
}
template <class T>
T either(T a, T b) {
  return a | b;
}
template <class T>
T differ(T a, T b) {
  return a ^ b;
}
template <class T>
T invert(T a) {
  return static_cast<T>(~a);
}
template <class T>
uint32_t count_ones(T a) {
  return static_cast<uint32_t>(std::popcount(a));
}
template <class T>
uint32_t count_zeros(T a) {
  return static_cast<uint32_t>(std::countl_zero(a));
}
template <class T>
T reverse(T a) {
  T r = 0;
  for (size_t i = 0; i < sizeof(T) * 8; ++i) r = static_cast<T>(r << 1 | (a >> i & 1));
  return r;
}
// The highest bit that is not the sign's; -1: none. Shift amount: how far it is from the top.
template <class T, bool kShift>
uint32_t find_high(T a) {
  const auto bits = static_cast<Unsigned<T>>(a < 0 ? ~a : a);
  if (bits == 0) return ~0u;
  const int zeros = std::countl_zero(bits);
  return static_cast<uint32_t>(kShift ? zeros : static_cast<int>(sizeof(T) * 8) - 1 - zeros);
}

// Shifts by the whole width and more.
template <class T>
void shift_left(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) {
    const auto by = static_cast<uint32_t>(b[l]);
    d[l] = by >= sizeof(T) * 8 ? 0 : put(static_cast<T>(get<T>(a[l]) << by));
  });
}
template <class T>
void shift_right(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2);
  each_lane_alone(w.active, [&](int l) {
    const uint32_t by = std::min<uint32_t>(static_cast<uint32_t>(b[l]), sizeof(T) * 8 - 1);
    const T x = get<T>(a[l]);
    d[l] =
        put(!std::is_signed_v<T> && static_cast<uint32_t>(b[l]) >= sizeof(T) * 8 ? T{0}
                                                                                 : static_cast<T>(x >> by));
  });
}
template <bool kLeft>
void funnel_shift(Warp& w, const Instruction& i) {  // .wrap
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2), *c = w.operand(i, 3);
  each_lane_alone(w.active, [&](int l) {
    const uint64_t x = uint64_t{get<uint32_t>(b[l])} << 32 | get<uint32_t>(a[l]);
    const uint32_t by = static_cast<uint32_t>(c[l]) & 31;
    d[l] = static_cast<uint32_t>(kLeft ? x << by >> 32 : x >> by);
  });
}
template <class T>
void insert_bits(Warp& w, const Instruction& i) {  // bfi: the low bits of a into b
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2), *c = w.operand(i, 3), *n = w.operand(i, 4);
  each_lane_alone(w.active, [&](int l) {
    const unsigned width = sizeof(T) * 8, at = c[l] & 255, count = std::min<unsigned>(n[l] & 255, width);
    const T ones = count >= width ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << count) - 1);
    const T mask = at >= width ? T{0} : static_cast<T>(ones << at);
    const T x = at >= width ? T{0} : static_cast<T>(get<T>(a[l]) << at);
    d[l] = static_cast<T>((get<T>(b[l]) & ~mask) | (x & mask));
  });
}
void permute_bytes(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2), *c = w.operand(i, 3);
  each_lane_alone(w.active, [&](int l) {
    const uint64_t bytes = uint64_t{get<uint32_t>(b[l])} << 32 | get<uint32_t>(a[l]);
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
      const unsigned which = c[l] >> (4 * k) & 15;
      auto byte = static_cast<uint8_t>(bytes >> (8 * (which & 7)));
      if (which & 8) byte = byte & 128 ? 255 : 0;
      result |= uint32_t{byte} << (8 * k);
    }
    d[l] = result;
  });
}

// ---- choices and moves ----------------------------------------------------------------------------------

void select(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t *a = w.operand(i, 1), *b = w.operand(i, 2), *p = w.operand(i, 3);
  each_lane_alone(w.active, [&](int l) { d[l] = p[l] & 1 ? a[l] : b[l]; });
}
uint64_t not_predicate(uint64_t p) { return ~p & 1; }

// mov: to {low, high}, from {low, high}, or one to one.
void move(Warp& w, const Instruction& i) {
  uint64_t* d = w.result(i);
  const uint64_t* a = w.operand(i, 1);
  each_lane_alone(w.active, [&](int l) { d[l] = a[l]; });
}
void unpack(Warp& w, const Instruction& i) {
  const int bits = static_cast<int>(i.extra) / i.results;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  Lanes a;
  std::memcpy(a, w.operand(i, i.results), sizeof a);
  for (int k = 0; k < i.results; ++k) {
    uint64_t* d = w.result(i, k);
    each_lane_alone(w.active, [&](int l) { d[l] = a[l] >> (bits * k) & mask; });
  }
}
void pack(Warp& w, const Instruction& i) {
  const int count = i.num_regs - 1, bits = static_cast<int>(i.extra) / count;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  Lanes x = {};
  for (int k = 0; k < count; ++k) {
    const uint64_t* a = w.operand(i, 1 + k);
    for (int l = 0; l < kLanes; ++l) x[l] |= (a[l] & mask) << (bits * k);
  }
  uint64_t* d = w.result(i);
  each_lane_alone(w.active, [&](int l) { d[l] = x[l]; });
}

// ---- the table ------------------------------------------------------------------------------------------

template <class T>
void add_integers(Handlers& t, const std::string& type) {
  t["add." + type] = binary<T, add<T>>;
  t["sub." + type] = binary<T, sub<T>>;
  t["mul.lo." + type] = binary<T, mul_lo<T>>;
  t["mul.hi." + type] = binary<T, mul_hi<T>>;
  if constexpr (sizeof(T) < 8) t["mul.wide." + type] = binary<T, mul_wide<T>>;
  t["mad.lo." + type] = ternary<T, mad_lo<T>>;
  t["div." + type] = binary<T, divide<T>>;
  t["rem." + type] = binary<T, remainder<T>>;
  t["min." + type] = binary<T, minimum<T>>;
  t["max." + type] = binary<T, maximum<T>>;
  t["neg." + type] = unary<T, negate<T>>;
  t["abs." + type] = unary<T, absolute<T>>;
  t["shr." + type] = shift_right<T>;
  if constexpr (sizeof(T) >= 4) {
    t["bfind." + type] = unary<T, find_high<T, false>>;
    t["bfind.shiftamt." + type] = unary<T, find_high<T, true>>;
  }
}
template <class T>
void add_bits(Handlers& t, const std::string& type) {
  t["and." + type] = binary<T, both<T>>;
  t["or." + type] = binary<T, either<T>>;
  t["xor." + type] = binary<T, differ<T>>;
  t["not." + type] = unary<T, invert<T>>;
  t["shl." + type] = shift_left<T>;
  t["shr." + type] = shift_right<T>;
  if constexpr (sizeof(T) >= 4) {
    t["popc." + type] = unary<T, count_ones<T>>;
    t["clz." + type] = unary<T, count_zeros<T>>;
    t["brev." + type] = unary<T, reverse<T>>;
    t["bfi." + type] = insert_bits<T>;
  }
}

Handlers table() {
  Handlers t;
  add_integers<uint16_t>(t, "u16"), add_integers<int16_t>(t, "s16");
  add_integers<uint32_t>(t, "u32"), add_integers<int32_t>(t, "s32");
  add_integers<uint64_t>(t, "u64"), add_integers<int64_t>(t, "s64");
  add_bits<uint16_t>(t, "b16"), add_bits<uint32_t>(t, "b32"), add_bits<uint64_t>(t, "b64");
  t["and.pred"] = binary<uint64_t, both<uint64_t>>;
  t["or.pred"] = binary<uint64_t, either<uint64_t>>;
  t["xor.pred"] = binary<uint64_t, differ<uint64_t>>;
  t["not.pred"] = unary<uint64_t, not_predicate>;
  add_comparisons<uint16_t>(t, "u16"), add_comparisons<int16_t>(t, "s16"),
      add_comparisons<uint16_t>(t, "b16");
  add_comparisons<uint32_t>(t, "u32"), add_comparisons<int32_t>(t, "s32"),
      add_comparisons<uint32_t>(t, "b32");
  add_comparisons<uint64_t>(t, "u64"), add_comparisons<int64_t>(t, "s64"),
      add_comparisons<uint64_t>(t, "b64");
  t["shf.l.wrap.b32"] = funnel_shift<true>;
  t["shf.r.wrap.b32"] = funnel_shift<false>;
  t["prmt.b32"] = permute_bytes;
  for (const char* type : {"b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64"})
    t[std::string("selp.") + type] = select;
  return t;
}

}  // namespace

Handler find_arithmetic(const Opcode& opcode, const Operands& operands, Instruction& i) {
  static const Handlers handlers = table();
  if (opcode[0] == "mov") {
    if (opcode[1] != "pred") i.extra = std::stoul(opcode[1].substr(1));
    if (operands[0].kind == Operand::kVector) return unpack;
    return operands[1].kind == Operand::kVector ? pack : move;
  }
  const auto found = handlers.find(joined(opcode));
  return found == handlers.end() ? nullptr : found->second;
}

}  // namespace emulator::ptx
