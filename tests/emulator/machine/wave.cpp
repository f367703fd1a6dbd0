#include "emulator/machine/wave.h"

#include <cstring>

namespace emulator {

void Wave::set_exec(uint64_t mask) {
  s[kExec] = static_cast<uint32_t>(mask);
  s[kExec + 1] = static_cast<uint32_t>(mask >> 32);
  for (int lane = 0; lane < kLanes; ++lane) active[lane] = mask >> lane & 1 ? ~0u : 0u;
}

void Wave::touch_for_load(int vgpr, const Queue& queue, Pending::Kind kind) const {
  const auto r = static_cast<size_t>(vgpr);
  if (pending_v[r] == 0) return;
  int in_order = 0;
  for (const Pending& p : queue) in_order += p.kind == kind && p.first <= vgpr && vgpr < p.first + p.count;
  if (kind == Pending::kFlat || in_order != pending_v[r]) fault_vgpr(vgpr, "writes");
}

uint32_t Wave::scalar(const Instruction& i, int operand) const {
  constexpr float kFloats[] = {0.5f, -0.5f, 1.0f, -1.0f, 2.0f, -2.0f, 4.0f, -4.0f};
  if (operand >= 0 && operand < kSgprs) {
    touch_scalar(operand, "reads");
    return s[static_cast<size_t>(operand)];
  }
  if (operand >= 128 && operand <= 192) return static_cast<uint32_t>(operand - 128);
  if (operand > 192 && operand <= 208) return static_cast<uint32_t>(192 - operand);
  if (operand >= 240 && operand < 248) return std::bit_cast<uint32_t>(kFloats[operand - 240]);
  switch (operand) {
    case 248: return 0x3e22f983;  // 1 / (2 pi)
    case 251: return s[kVcc] == 0 && s[kVcc + 1] == 0;
    case 252: return exec() == 0;
    case 253: return scc;
    case kLiteral: return i.literal;
    default: fault("has operand " + std::to_string(operand) + ", which is not known as a scalar");
  }
}

// LLVM means literals of 64-bit scalar instructions zero-extended; small integers are sign-extended.
uint64_t Wave::scalar64(const Instruction& i, int operand) const {
  if (operand >= 0 && operand < kSgprs - 1) {
    const uint64_t low = scalar(i, operand);
    return low | uint64_t{scalar(i, operand + 1)} << 32;
  }
  if (operand == kLiteral) return i.literal;
  if (operand == kSharedBase) return uint64_t{kLdsAperture} << 32;
  if (operand >= 240 && operand < 248)
    return std::bit_cast<uint64_t>(static_cast<double>(std::bit_cast<float>(scalar(i, operand))));
  return static_cast<uint64_t>(static_cast<int32_t>(scalar(i, operand)));
}

void Wave::set_scalar(int sgpr, uint32_t value) {
  if (sgpr < 0 || sgpr >= kSgprs) fault("writes scalar " + std::to_string(sgpr));
  touch_scalar(sgpr, "writes");
  s[static_cast<size_t>(sgpr)] = value;
  if (sgpr >= kExec) set_exec(exec());
}

void Wave::set_scalar64(int sgpr, uint64_t value) {
  set_scalar(sgpr, static_cast<uint32_t>(value));
  set_scalar(sgpr + 1, static_cast<uint32_t>(value >> 32));
}

const uint32_t* Wave::select(const uint32_t* x, Part part) {
  if (part.select == 6) return x;
  const bool byte = part.select < 4;
  const int shift = byte ? part.select * 8 : (part.select - 4) * 16, unused = byte ? 24 : 16;
  uint32_t* lanes = scratch();
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t top = x[lane] >> shift << unused;
    lanes[lane] =
        part.sign_extend ? static_cast<uint32_t>(static_cast<int32_t>(top) >> unused) : top >> unused;
  }
  return lanes;
}

// DPP: the lane that each lane reads from. Lanes without one read 0 or keep their destination.
const uint32_t* Wave::permute(const Instruction& i, const uint32_t* x) {
  uint32_t* lanes = scratch();
  for (int lane = 0; lane < kLanes; ++lane) {
    const int row = lane & ~15, column = lane & 15, c = i.dpp, n = c & 15;
    int from = -1;
    if (c < 0x100) from = (lane & ~3) | (c >> 2 * (lane & 3) & 3);  // quad_perm
    else if (c < 0x110) from = column + n < 16 ? lane + n : -1;     // row_shl
    else if (c < 0x120) from = column >= n ? lane - n : -1;         // row_shr
    else if (c < 0x130) from = row | ((column - n) & 15);           // row_ror
    else if (c == 0x140) from = row | (15 - column);                // row_mirror
    else if (c == 0x141) from = row | (column ^ 7);                 // row_half_mirror
    else if (c == 0x142) from = row > 0 ? row - 1 : -1;             // row_bcast:15
    else if (c == 0x143) from = lane >= 32 ? 31 : -1;               // row_bcast:31
    else if (c >= 0x150 && c < 0x160) from = row | n;               // row_newbcast
    else fault("has DPP control " + std::to_string(c) + ", which is not known");
    const bool readable = from >= 0 && active[from];
    const bool enabled = (i.row_mask >> lane / 16 & 1) && (i.bank_mask >> lane / 4 % 4 & 1);
    if (!enabled || (!readable && !i.bound_zero))
      fault("leaves lanes of its destination as they were by DPP, which is not known");
    lanes[lane] = readable ? x[from] : 0;
  }
  return lanes;
}

const uint32_t* Wave::rearranged(const Instruction& i, int k, const uint32_t* x) {
  return i.dpp >= 0 ? (k == 0 ? permute(i, x) : x) : select(x, i.part[k]);
}

const uint32_t* Wave::with_sign(const Instruction& i, int k, const uint32_t* x) {
  uint32_t* lanes = scratch();
  const uint32_t keep = i.absolute >> k & 1 ? 0x7fffffff : ~0u, flip = i.negate >> k & 1 ? 0x80000000 : 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = (x[lane] & keep) ^ flip;
  return lanes;
}

Wave::Pair Wave::source64(const Instruction& i, int k) {
  const int operand = i.src[k];
  if (operand >= kFirstVgpr) {
    const uint32_t* low = vgpr(operand - kFirstVgpr, "reads");
    return {low, vgpr(operand - kFirstVgpr + 1, "reads")};
  }
  const uint64_t value = scalar64(i, operand);
  const uint32_t* low = broadcast(static_cast<uint32_t>(value));
  return {low, broadcast(static_cast<uint32_t>(value >> 32))};
}

void Wave::write_part(const Instruction& i, const uint32_t* result) {
  uint32_t* d = vgpr(i.dst, "writes");
  const bool byte = i.dst_part.select < 4;
  const int shift = byte ? i.dst_part.select * 8 : (i.dst_part.select - 4) * 16;
  const uint32_t mask = (byte ? 0xffu : 0xffffu) << shift, replaced = i.keep == 2 ? mask : ~0u;
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t bits = active[lane] & replaced;
    d[lane] = (d[lane] & ~bits) | (result[lane] << shift & mask & bits);
  }
}

void Wave::write64(const Instruction& i, const uint64_t* result) {
  uint32_t *low = vgpr(i.dst, "writes"), *high = vgpr(i.dst + 1, "writes");
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t bits = active[lane];
    low[lane] = (low[lane] & ~bits) | (static_cast<uint32_t>(result[lane]) & bits);
    high[lane] = (high[lane] & ~bits) | (static_cast<uint32_t>(result[lane] >> 32) & bits);
  }
}

void Wave::issue(Queue& queue, const Pending& p) {
  for (int r = p.first; r < p.first + p.count; ++r)
    ++(p.kind == Pending::kScalar ? pending_s[static_cast<size_t>(r)] : pending_v[static_cast<size_t>(r)]);
  queue.push(p);
}

// vmcnt is bits 0 to 3 and 14 to 15, lgkmcnt bits 8 to 11, all ones for no wait. Scalar loads come back in
// any order, and so do FLAT ones, which both counters count: only a wait for none of them helps.
void Wave::wait(unsigned counters) {
  const auto drain = [&](Queue& queue, unsigned left, auto in_order) {
    if (left > 0)
      for (const Pending& p : queue)
        if (!in_order(p.kind)) return;
    while (queue.size() > left) {
      const Pending p = queue.pop();
      for (int r = p.first; r < p.first + p.count; ++r)
        --(p.kind == Pending::kScalar ? pending_s[static_cast<size_t>(r)]
                                      : pending_v[static_cast<size_t>(r)]);
    }
    queue.tidy();
  };
  const unsigned vm_left = (counters & 15) | (counters >> 14 & 3) << 4, lgkm_left = counters >> 8 & 15;
  if (vm_left < 63) drain(vm, vm_left, [](auto kind) { return kind == Pending::kGlobal; });
  if (lgkm_left < 15) drain(lgkm, lgkm_left, [](auto kind) { return kind == Pending::kLds; });
}

void Wave::fault(const std::string& what) const {
  throw Fault(group->gpu->name + " " + describe(code[pc]) + " " + what + " (wave " + std::to_string(id) +
              ", byte " + std::to_string(4 * pc) + " of " + *group->kernel + ")");
}

void Wave::fault_vgpr(int vgpr, const char* how) const {
  const std::string name = "v" + std::to_string(vgpr);
  if (vgpr >= registers)
    fault(std::string(how) + " " + name + ", but its kernel has " + std::to_string(registers) + " VGPRs");
  fault(std::string(how) + " " + name + " before s_waitcnt has waited for its load");
}

void Wave::fault_sgpr(int sgpr, const char* how) const {
  fault(std::string(how) + " s" + std::to_string(sgpr) + " before s_waitcnt has waited for its load");
}

}  // namespace emulator
