#pragma once
// The state that machine code of a CDNA GPU works on: a wave of 64 lanes, its workgroup, and the decoded
// instructions. What a program must not do ends the launch with a Fault: it names the kernel, the instruction
// and the rule.
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/machine/allocations.h"

namespace emulator {

inline constexpr int kLanes = 64, kVgprs = 512, kSgprs = 128;
// Numbers of scalar registers and of operands, as the encoding has them.
inline constexpr int kVcc = 106, kM0 = 124, kExec = 126, kSharedBase = 235, kLiteral = 255, kFirstVgpr = 256;
// The high word of FLAT addresses that mean LDS. No address of the host has it.
inline constexpr uint32_t kLdsAperture = 0x00010000;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Stopped {};  // another workgroup of the launch has failed

enum class Format : uint8_t {
  kSop1,
  kSop2,
  kSopk,
  kSopc,
  kSopp,
  kSmem,
  kVop1,
  kVop2,
  kVopc,
  kVop3,
  kVop3p,
  kDs,
  kFlat,
  kGlobal,
  kFormats
};

struct Wave;
struct Instruction;
using Execute = void (*)(Wave&, const Instruction&);

// What a table row says about an instruction beyond its number.
enum : unsigned {
  kLiteralFollows = 1,  // a constant word belongs to it whatever its operands are
  kClamps = 2,          // its semantics here know the clamp bit
  kTruthTable = 4,      // omod, abs and neg are a truth table
  kScalarResult = 8,    // the destination field names a scalar register
  kCarries = 16,        // VOP3: a scalar destination in place of abs and op_sel
};

struct Opcode {
  Format format;
  uint16_t number;  // VOP1, VOP2 and VOPC have another one as VOP3, which follows from this
  const char* name;
  Execute execute;
  unsigned flags = 0;
};

// A part of a 32-bit operand, in SDWA's numbers: bytes 0 to 3, words 4 and 5, all of it 6.
struct Part {
  uint8_t select = 6;
  bool sign_extend = false;
};

struct Instruction {
  const Opcode* opcode = nullptr;  // null: not one that is known
  Execute execute = nullptr;
  uint32_t encoding[2]{};
  uint32_t literal = 0;
  int32_t offset = 0;             // bytes in memory; words of a branch; SOPK's and SOPP's constant
  int16_t dst = -1, sdst = -1;    // VGPR; scalar register
  int16_t src[3] = {-1, -1, -1};  // operand numbers
  int16_t saddr = -1;             // scalar base of a global address
  uint8_t words = 1;
  uint8_t absolute = 0, negate = 0, negate_high = 0, op_sel = 0, op_sel_hi = 0, omod = 0;
  uint8_t offsets[2]{};                 // of an LDS instruction with two addresses
  uint8_t keep = 0;                     // SDWA: 2 keeps the rest of the destination, 0 makes it zero
  bool clamp = false, returns = false;  // returns: an atomic's old value
  bool plain = true;                    // neither SDWA nor DPP
  Part part[2], dst_part;
  int16_t dpp = -1;  // control; masks below
  uint8_t row_mask = 15, bank_mask = 15;
  bool bound_zero = false;
};

struct Gpu {
  std::string name;
  bool fp8_is_fnuz, flushes_16_bit;
};

// Memory instructions under way, oldest first, and which registers they will write.
struct Pending {
  enum Kind : uint8_t { kScalar, kLds, kFlat, kGlobal } kind;
  bool writes_memory;
  int16_t first, count;  // registers; scalar ones for kScalar
};
class Queue {
 public:
  void push(const Pending& p) { entries_.push_back(p); }
  size_t size() const { return entries_.size() - head_; }
  Pending pop() { return entries_[head_++]; }
  auto begin() const { return entries_.begin() + static_cast<ptrdiff_t>(head_); }
  auto end() const { return entries_.end(); }
  void tidy() {
    if (head_ == entries_.size()) clear();
  }
  void clear() { entries_.clear(), head_ = 0; }

 private:
  std::vector<Pending> entries_;
  size_t head_ = 0;
};

struct Workgroup;

struct Wave {
  enum class State { kRunning, kAtBarrier, kDone };

  alignas(64) uint32_t v[kVgprs][kLanes];
  alignas(64) uint32_t active[kLanes];  // all ones in lanes that exec names, else 0; set_exec keeps it
  alignas(64) uint32_t temporary[8][kLanes];
  int temporaries = 0;
  std::array<uint32_t, kSgprs> s;
  bool scc;
  State state;
  int id, registers;        // registers: VGPRs that the kernel descriptor allots
  const Instruction* code;  // by word
  const uint32_t* text;     // the words themselves
  size_t code_words, pc, next;
  uint64_t branches_back;
  std::array<uint8_t, kVgprs> pending_v;  // loads under way to the register; 255: not allotted
  std::array<uint8_t, kSgprs> pending_s;
  Queue vm, lgkm;  // the two counters of s_waitcnt
  Allocations::Range last_range;
  Workgroup* group;

  uint64_t exec() const { return s[kExec] | uint64_t{s[kExec + 1]} << 32; }
  void set_exec(uint64_t mask);
  uint64_t vcc() const {
    touch_scalar(kVcc, "reads");
    return s[kVcc] | uint64_t{s[kVcc + 1]} << 32;
  }

  // ---- registers. Reading or writing one whose load was not waited for is a fault.
  void touch(int vgpr, const char* how) const {
    if (pending_v[static_cast<size_t>(vgpr)]) fault_vgpr(vgpr, how);
  }
  // A load may follow others into the same register (lanes of two branches) if they come back in order.
  void touch_for_load(int vgpr, const Queue& queue, Pending::Kind kind) const;
  void touch_scalar(int sgpr, const char* how) const {
    if (sgpr < kSgprs && pending_s[static_cast<size_t>(sgpr)]) fault_sgpr(sgpr, how);
  }
  uint32_t* vgpr(int index, const char* how) {
    touch(index, how);
    return v[index];
  }
  uint32_t scalar(const Instruction& i, int operand) const;
  uint64_t scalar64(const Instruction& i, int operand) const;
  void set_scalar(int sgpr, uint32_t value);
  void set_scalar64(int sgpr, uint64_t value);
  uint32_t* scratch() { return temporary[temporaries++ & 7]; }
  const uint32_t* broadcast(uint32_t value) {
    uint32_t* lanes = scratch();
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = value;
    return lanes;
  }
  // 64 lanes of source k, after SDWA and DPP; as floats, after abs and neg; the two halves of 64 bits.
  const uint32_t* source(const Instruction& i, int k) {
    const int operand = i.src[k];
    const uint32_t* x =
        operand >= kFirstVgpr ? vgpr(operand - kFirstVgpr, "reads") : broadcast(scalar(i, operand));
    return i.plain || k > 1 ? x : rearranged(i, k, x);
  }
  const float* source_float(const Instruction& i, int k) {
    const uint32_t* x = source(i, k);
    if ((i.absolute | i.negate) >> k & 1) x = with_sign(i, k, x);
    return reinterpret_cast<const float*>(x);
  }
  struct Pair {
    const uint32_t *low, *high;
    uint64_t operator[](int lane) const { return low[lane] | uint64_t{high[lane]} << 32; }
  };
  Pair source64(const Instruction& i, int k);
  // Of the lanes that exec names.
  void write(const Instruction& i, const uint32_t* result) {
    if (i.dst_part.select != 6) return write_part(i, result);
    uint32_t* d = vgpr(i.dst, "writes");
    for (int lane = 0; lane < kLanes; ++lane) d[lane] ^= (d[lane] ^ result[lane]) & active[lane];
  }
  void write64(const Instruction& i, const uint64_t* result);
  void write_mask(int sgpr, uint64_t mask) { set_scalar64(sgpr, mask & exec()); }

  // ---- memory instructions under way
  void issue(Queue& queue, const Pending& p);
  void wait(unsigned counters);  // s_waitcnt's constant

  [[noreturn]] void fault(const std::string& what) const;
  [[noreturn]] void fault_vgpr(int vgpr, const char* how) const;
  [[noreturn]] void fault_sgpr(int sgpr, const char* how) const;

 private:
  void write_part(const Instruction& i, const uint32_t* result);
  const uint32_t* rearranged(const Instruction& i, int k, const uint32_t* x);
  const uint32_t* with_sign(const Instruction& i, int k, const uint32_t* x);
  const uint32_t* select(const uint32_t* x, Part part);
  const uint32_t* permute(const Instruction& i, const uint32_t* x);
};

// Who has touched a byte of LDS since the last barrier: 0 nobody, a wave's number + 1, or several.
struct LdsShadow {
  static constexpr uint8_t kSeveral = 255;
  std::vector<uint8_t> writer, reader;
};

struct Workgroup {
  const Gpu* gpu;
  const std::string* kernel;
  const std::atomic<bool>* stop;
  const Allocations::Snapshot* memory;
  std::vector<uint8_t> lds;
  LdsShadow shadow;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<uint64_t> executed;  // how often, by word of the kernel; empty if nobody asks
};

// Decodes one instruction; `words` has room for two words behind it.
Instruction decode(const uint32_t* words);
// "v_add_f32 v3, s2, v4": for messages and for tests against LLVM's text.
std::string describe(const Instruction& i);

// The tables of instructions, each beside its semantics.
struct Table {
  const Opcode* first;
  size_t count;
};
Table scalar_table();
Table vector_table();
Table compare_table();
Table wide_table();
Table matrix_table();
Table memory_table();

}  // namespace emulator
