// Scalar instructions: arithmetic on SGPRs, branches, waits, barriers.
#include <bit>

#include "emulator/machine/wave.h"

namespace emulator {
namespace {

using I = const Instruction&;
constexpr uint64_t kMaxBranchesBack = 50'000'000;  // a loop that goes on for so long does not end

// d = f(a, b), and whether it is not zero.
template <auto kF>
void logic32(Wave& w, I i) {
  const uint32_t result = kF(w.scalar(i, i.src[0]), w.scalar(i, i.src[1]));
  w.set_scalar(i.sdst, result);
  w.scc = result != 0;
}
template <auto kF>
void logic64(Wave& w, I i) {
  const uint64_t result = kF(w.scalar64(i, i.src[0]), w.scalar64(i, i.src[1]));
  w.set_scalar64(i.sdst, result);
  w.scc = result != 0;
}
template <auto kF>
void shift64(Wave& w, I i) {
  const uint64_t result = kF(w.scalar64(i, i.src[0]), w.scalar(i, i.src[1]) & 63);
  w.set_scalar64(i.sdst, result);
  w.scc = result != 0;
}
// d = f(a, b, carry); f takes the carry by reference and leaves the new one.
template <auto kF>
void carry32(Wave& w, I i) {
  bool carry = w.scc;
  w.set_scalar(i.sdst, kF(w.scalar(i, i.src[0]), w.scalar(i, i.src[1]), carry));
  w.scc = carry;
}
template <auto kF>
void unary32(Wave& w, I i) {
  w.set_scalar(i.sdst, kF(w.scalar(i, i.src[0])));
}
template <auto kF>
void binary32(Wave& w, I i) {
  w.set_scalar(i.sdst, kF(w.scalar(i, i.src[0]), w.scalar(i, i.src[1])));
}
template <auto kF>
void compare32(Wave& w, I i) {
  w.scc = kF(w.scalar(i, i.src[0]), w.scalar(i, i.src[1]));
}
template <auto kF>
void constant(Wave& w, I i) {  // SOPK: the destination is the first operand
  w.set_scalar(i.sdst, kF(w, w.scalar(i, i.sdst), i.offset));
}
template <auto kF>
void compare_constant(Wave& w, I i) {
  w.scc = kF(w.scalar(i, i.sdst), i.offset);
}
// exec = f(source, exec); the old one goes to the destination.
template <auto kF>
void save_exec(Wave& w, I i) {
  const uint64_t before = w.exec(), source = w.scalar64(i, i.src[0]);
  w.set_scalar64(i.sdst, before);
  w.set_exec(kF(source, before));
  w.scc = w.exec() != 0;
}
template <auto kIf>
void branch(Wave& w, I i) {
  if (!kIf(w)) return;
  w.next += static_cast<size_t>(static_cast<ptrdiff_t>(i.offset));
  if (i.offset >= 0) return;
  if (*w.group->stop) throw Stopped();
  if (++w.branches_back > kMaxBranchesBack) w.fault("does not end");
}

int32_t as_signed(uint32_t x) { return static_cast<int32_t>(x); }
uint32_t add_signed(uint32_t a, uint32_t b, bool& overflow) {
  const int64_t sum = int64_t{as_signed(a)} + as_signed(b);
  overflow = sum != static_cast<int32_t>(sum);
  return static_cast<uint32_t>(sum);
}
uint32_t sub_signed(uint32_t a, uint32_t b, bool& overflow) {
  const int64_t sum = int64_t{as_signed(a)} - as_signed(b);
  overflow = sum != static_cast<int32_t>(sum);
  return static_cast<uint32_t>(sum);
}
uint32_t add_carry(uint32_t a, uint32_t b, bool& carry) {
  const uint64_t sum = uint64_t{a} + b + carry;
  carry = sum >> 32;
  return static_cast<uint32_t>(sum);
}
uint32_t sub_carry(uint32_t a, uint32_t b, bool& carry) {
  const uint64_t taken = uint64_t{b} + carry;
  carry = taken > a;
  return static_cast<uint32_t>(a - taken);
}
template <int kShift>
uint32_t shift_add(uint32_t a, uint32_t b, bool& carry) {
  carry = ((uint64_t{a} << kShift) + b) >> 32;
  return (a << kShift) + b;
}
uint32_t reverse(uint32_t x) {
  uint32_t result = 0;
  for (int k = 0; k < 32; ++k) result |= (x >> k & 1) << (31 - k);
  return result;
}

void move64(Wave& w, I i) { w.set_scalar64(i.sdst, w.scalar64(i, i.src[0])); }
void not32(Wave& w, I i) {
  const uint32_t result = ~w.scalar(i, i.src[0]);
  w.set_scalar(i.sdst, result);
  w.scc = result != 0;
}
void not64(Wave& w, I i) {
  const uint64_t result = ~w.scalar64(i, i.src[0]);
  w.set_scalar64(i.sdst, result);
  w.scc = result != 0;
}
void absolute(Wave& w, I i) {
  const uint32_t x = w.scalar(i, i.src[0]), result = as_signed(x) < 0 ? 0 - x : x;
  w.set_scalar(i.sdst, result);
  w.scc = result != 0;
}
void count_bits64(Wave& w, I i) {
  const int count = std::popcount(w.scalar64(i, i.src[0]));
  w.set_scalar(i.sdst, static_cast<uint32_t>(count));
  w.scc = count != 0;
}
void find_first64(Wave& w, I i) {
  const uint64_t x = w.scalar64(i, i.src[0]);
  w.set_scalar(i.sdst, x ? static_cast<uint32_t>(std::countr_zero(x)) : ~0u);
}
void program_counter(Wave& w, I i) { w.set_scalar64(i.sdst, reinterpret_cast<uint64_t>(w.text + w.next)); }
void select32(Wave& w, I i) {
  const uint32_t a = w.scalar(i, i.src[0]), b = w.scalar(i, i.src[1]);
  w.set_scalar(i.sdst, w.scc ? a : b);
}
void select64(Wave& w, I i) {
  const uint64_t a = w.scalar64(i, i.src[0]), b = w.scalar64(i, i.src[1]);
  w.set_scalar64(i.sdst, w.scc ? a : b);
}
template <bool kMaximum, class T>
void extreme(Wave& w, I i) {
  const T a = static_cast<T>(w.scalar(i, i.src[0])), b = static_cast<T>(w.scalar(i, i.src[1]));
  w.scc = kMaximum ? a > b : a < b;
  w.set_scalar(i.sdst, static_cast<uint32_t>(w.scc ? a : b));
}
template <bool kSigned>
void bit_field(Wave& w, I i) {
  const uint32_t x = w.scalar(i, i.src[0]), how = w.scalar(i, i.src[1]), first = how & 31,
                 count = how >> 16 & 127;
  uint32_t result = count == 0 ? 0 : x >> first;
  if (count > 0 && count < 32) {
    const uint32_t top = result << (32 - count);
    result = kSigned && first + count <= 32 ? static_cast<uint32_t>(as_signed(top) >> (32 - count))
                                            : top >> (32 - count);
  }
  w.set_scalar(i.sdst, result);
  w.scc = result != 0;
}
template <bool kEqual>
void compare64(Wave& w, I i) {
  w.scc = (w.scalar64(i, i.src[0]) == w.scalar64(i, i.src[1])) == kEqual;
}

void nothing(Wave&, I) {}
void wait(Wave& w, I i) { w.wait(static_cast<unsigned>(i.offset)); }
void end(Wave& w, I) { w.state = Wave::State::kDone; }
void barrier(Wave& w, I) {
  for (const Pending& p : w.lgkm)
    if (p.writes_memory) w.fault("is reached before s_waitcnt has waited for writes to LDS");
  w.state = Wave::State::kAtBarrier;
}

using u32 = uint32_t;
using u64 = uint64_t;
constexpr Format S1 = Format::kSop1, S2 = Format::kSop2, SK = Format::kSopk, SC = Format::kSopc,
                 SP = Format::kSopp;
constexpr Opcode kScalar[] = {
    {S1, 0, "s_mov_b32", unary32<[](u32 a) { return a; }>},
    {S1, 1, "s_mov_b64", move64},
    {S1, 4, "s_not_b32", not32},
    {S1, 5, "s_not_b64", not64},
    {S1, 8, "s_brev_b32", unary32<reverse>},
    {S1, 13, "s_bcnt1_i32_b64", count_bits64},
    {S1, 16, "s_ff1_i32_b32", unary32<[](u32 a) { return a ? static_cast<u32>(std::countr_zero(a)) : ~0u; }>},
    {S1, 17, "s_ff1_i32_b64", find_first64},
    {S1, 18, "s_flbit_i32_b32",
     unary32<[](u32 a) { return a ? static_cast<u32>(std::countl_zero(a)) : ~0u; }>},
    {S1, 22, "s_sext_i32_i8", unary32<[](u32 a) { return static_cast<u32>(static_cast<int8_t>(a)); }>},
    {S1, 23, "s_sext_i32_i16", unary32<[](u32 a) { return static_cast<u32>(static_cast<int16_t>(a)); }>},
    {S1, 28, "s_getpc_b64", program_counter},
    {S1, 32, "s_and_saveexec_b64", save_exec<[](u64 a, u64 e) { return a & e; }>},
    {S1, 33, "s_or_saveexec_b64", save_exec<[](u64 a, u64 e) { return a | e; }>},
    {S1, 34, "s_xor_saveexec_b64", save_exec<[](u64 a, u64 e) { return a ^ e; }>},
    {S1, 35, "s_andn2_saveexec_b64", save_exec<[](u64 a, u64 e) { return a & ~e; }>},
    {S1, 48, "s_abs_i32", absolute},
    {S2, 0, "s_add_u32", carry32<[](u32 a, u32 b, bool& c) { return c = false, add_carry(a, b, c); }>},
    {S2, 1, "s_sub_u32", carry32<[](u32 a, u32 b, bool& c) { return c = false, sub_carry(a, b, c); }>},
    {S2, 2, "s_add_i32", carry32<add_signed>},
    {S2, 3, "s_sub_i32", carry32<sub_signed>},
    {S2, 4, "s_addc_u32", carry32<add_carry>},
    {S2, 5, "s_subb_u32", carry32<sub_carry>},
    {S2, 6, "s_min_i32", extreme<false, int32_t>},
    {S2, 7, "s_min_u32", extreme<false, u32>},
    {S2, 8, "s_max_i32", extreme<true, int32_t>},
    {S2, 9, "s_max_u32", extreme<true, u32>},
    {S2, 10, "s_cselect_b32", select32},
    {S2, 11, "s_cselect_b64", select64},
    {S2, 12, "s_and_b32", logic32<[](u32 a, u32 b) { return a & b; }>},
    {S2, 13, "s_and_b64", logic64<[](u64 a, u64 b) { return a & b; }>},
    {S2, 14, "s_or_b32", logic32<[](u32 a, u32 b) { return a | b; }>},
    {S2, 15, "s_or_b64", logic64<[](u64 a, u64 b) { return a | b; }>},
    {S2, 16, "s_xor_b32", logic32<[](u32 a, u32 b) { return a ^ b; }>},
    {S2, 17, "s_xor_b64", logic64<[](u64 a, u64 b) { return a ^ b; }>},
    {S2, 18, "s_andn2_b32", logic32<[](u32 a, u32 b) { return a & ~b; }>},
    {S2, 19, "s_andn2_b64", logic64<[](u64 a, u64 b) { return a & ~b; }>},
    {S2, 20, "s_orn2_b32", logic32<[](u32 a, u32 b) { return a | ~b; }>},
    {S2, 21, "s_orn2_b64", logic64<[](u64 a, u64 b) { return a | ~b; }>},
    {S2, 23, "s_nand_b64", logic64<[](u64 a, u64 b) { return ~(a & b); }>},
    {S2, 25, "s_nor_b64", logic64<[](u64 a, u64 b) { return ~(a | b); }>},
    {S2, 27, "s_xnor_b64", logic64<[](u64 a, u64 b) { return ~(a ^ b); }>},
    {S2, 28, "s_lshl_b32", logic32<[](u32 a, u32 b) { return a << (b & 31); }>},
    {S2, 29, "s_lshl_b64", shift64<[](u64 a, u32 n) { return a << n; }>},
    {S2, 30, "s_lshr_b32", logic32<[](u32 a, u32 b) { return (a >> (b & 31)); }>},
    {S2, 31, "s_lshr_b64", shift64<[](u64 a, u32 n) { return (a >> n); }>},
    {S2, 32, "s_ashr_i32",
     logic32<[](u32 a, u32 b) { return (static_cast<u32>(as_signed(a) >> (b & 31))); }>},
    {S2, 33, "s_ashr_i64",
     shift64<[](u64 a, u32 n) { return (static_cast<u64>(static_cast<int64_t>(a) >> n)); }>},
    {S2, 34, "s_bfm_b32", binary32<[](u32 a, u32 b) { return ((1u << (a & 31)) - 1) << (b & 31); }>},
    {S2, 36, "s_mul_i32", binary32<[](u32 a, u32 b) { return a * b; }>},
    {S2, 37, "s_bfe_u32", bit_field<false>},
    {S2, 38, "s_bfe_i32", bit_field<true>},
    {S2, 44, "s_mul_hi_u32", binary32<[](u32 a, u32 b) { return (static_cast<u32>(u64{a} * b >> 32)); }>},
    {S2, 45, "s_mul_hi_i32",
     binary32<[](u32 a, u32 b) { return (static_cast<u32>(int64_t{as_signed(a)} * as_signed(b) >> 32)); }>},
    {S2, 46, "s_lshl1_add_u32", carry32<shift_add<1>>},
    {S2, 47, "s_lshl2_add_u32", carry32<shift_add<2>>},
    {S2, 48, "s_lshl3_add_u32", carry32<shift_add<3>>},
    {S2, 49, "s_lshl4_add_u32", carry32<shift_add<4>>},
    {S2, 50, "s_pack_ll_b32_b16", binary32<[](u32 a, u32 b) { return (a & 0xffff) | b << 16; }>},
    {S2, 51, "s_pack_lh_b32_b16", binary32<[](u32 a, u32 b) { return (a & 0xffff) | (b & 0xffff0000); }>},
    {S2, 52, "s_pack_hh_b32_b16", binary32<[](u32 a, u32 b) { return (a >> 16 | (b & 0xffff0000)); }>},
    {SC, 0, "s_cmp_eq_i32", compare32<[](u32 a, u32 b) { return a == b; }>},
    {SC, 1, "s_cmp_lg_i32", compare32<[](u32 a, u32 b) { return a != b; }>},
    {SC, 2, "s_cmp_gt_i32", compare32<[](u32 a, u32 b) { return (as_signed(a) > as_signed(b)); }>},
    {SC, 3, "s_cmp_ge_i32", compare32<[](u32 a, u32 b) { return (as_signed(a) >= as_signed(b)); }>},
    {SC, 4, "s_cmp_lt_i32", compare32<[](u32 a, u32 b) { return as_signed(a) < as_signed(b); }>},
    {SC, 5, "s_cmp_le_i32", compare32<[](u32 a, u32 b) { return as_signed(a) <= as_signed(b); }>},
    {SC, 6, "s_cmp_eq_u32", compare32<[](u32 a, u32 b) { return a == b; }>},
    {SC, 7, "s_cmp_lg_u32", compare32<[](u32 a, u32 b) { return a != b; }>},
    {SC, 8, "s_cmp_gt_u32", compare32<[](u32 a, u32 b) { return (a > b); }>},
    {SC, 9, "s_cmp_ge_u32", compare32<[](u32 a, u32 b) { return (a >= b); }>},
    {SC, 10, "s_cmp_lt_u32", compare32<[](u32 a, u32 b) { return a < b; }>},
    {SC, 11, "s_cmp_le_u32", compare32<[](u32 a, u32 b) { return a <= b; }>},
    {SC, 12, "s_bitcmp0_b32", compare32<[](u32 a, u32 b) { return ((a >> (b & 31) & 1) == 0); }>},
    {SC, 13, "s_bitcmp1_b32", compare32<[](u32 a, u32 b) { return ((a >> (b & 31) & 1) != 0); }>},
    {SC, 18, "s_cmp_eq_u64", compare64<true>},
    {SC, 19, "s_cmp_lg_u64", compare64<false>},
    {SK, 0, "s_movk_i32", [](Wave& w, I i) { w.set_scalar(i.sdst, static_cast<u32>(i.offset)); }},
    {SK, 2, "s_cmpk_eq_i32", compare_constant<[](u32 a, int b) { return as_signed(a) == b; }>},
    {SK, 3, "s_cmpk_lg_i32", compare_constant<[](u32 a, int b) { return as_signed(a) != b; }>},
    {SK, 4, "s_cmpk_gt_i32", compare_constant<[](u32 a, int b) { return (as_signed(a) > b); }>},
    {SK, 5, "s_cmpk_ge_i32", compare_constant<[](u32 a, int b) { return (as_signed(a) >= b); }>},
    {SK, 6, "s_cmpk_lt_i32", compare_constant<[](u32 a, int b) { return as_signed(a) < b; }>},
    {SK, 7, "s_cmpk_le_i32", compare_constant<[](u32 a, int b) { return as_signed(a) <= b; }>},
    {SK, 8, "s_cmpk_eq_u32", compare_constant<[](u32 a, int b) { return a == static_cast<uint16_t>(b); }>},
    {SK, 9, "s_cmpk_lg_u32", compare_constant<[](u32 a, int b) { return a != static_cast<uint16_t>(b); }>},
    {SK, 10, "s_cmpk_gt_u32", compare_constant<[](u32 a, int b) { return (a > static_cast<uint16_t>(b)); }>},
    {SK, 11, "s_cmpk_ge_u32", compare_constant<[](u32 a, int b) { return (a >= static_cast<uint16_t>(b)); }>},
    {SK, 12, "s_cmpk_lt_u32", compare_constant<[](u32 a, int b) { return a < static_cast<uint16_t>(b); }>},
    {SK, 13, "s_cmpk_le_u32", compare_constant<[](u32 a, int b) { return a <= static_cast<uint16_t>(b); }>},
    {SK, 14, "s_addk_i32", constant<[](Wave& w, u32 a, int b) {
       bool overflow;
       const u32 sum = add_signed(a, static_cast<u32>(b), overflow);
       w.scc = overflow;
       return sum;
     }>},
    {SK, 15, "s_mulk_i32", constant<[](Wave&, u32 a, int b) { return a * static_cast<u32>(b); }>},
    {SP, 0, "s_nop", nothing},
    {SP, 1, "s_endpgm", end},
    {SP, 2, "s_branch", branch<[](Wave&) { return true; }>},
    {SP, 4, "s_cbranch_scc0", branch<[](Wave& w) { return !w.scc; }>},
    {SP, 5, "s_cbranch_scc1", branch<[](Wave& w) { return w.scc; }>},
    {SP, 6, "s_cbranch_vccz", branch<[](Wave& w) { return w.vcc() == 0; }>},
    {SP, 7, "s_cbranch_vccnz", branch<[](Wave& w) { return w.vcc() != 0; }>},
    {SP, 8, "s_cbranch_execz", branch<[](Wave& w) { return w.exec() == 0; }>},
    {SP, 9, "s_cbranch_execnz", branch<[](Wave& w) { return w.exec() != 0; }>},
    {SP, 10, "s_barrier", barrier},
    {SP, 12, "s_waitcnt", wait},
    {SP, 14, "s_sleep", nothing},
    {SP, 15, "s_setprio", nothing},
};

}  // namespace

Table scalar_table() { return {kScalar, std::size(kScalar)}; }

}  // namespace emulator
