#pragma once
// PTX as the machine executes it: registers as numbers, labels as places, one function per instruction.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/machine/allocations.h"
#include "emulator/ptx/text.h"

namespace emulator::ptx {

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

// Operands are numbers of registers, constants among them, in the order of the text; the members of {a, b}
// and of [address, {x, y}] one by one. `_` is a register that nobody reads.
struct Instruction {
  static constexpr uint32_t kNowhere = ~0u;

  Handler run = nullptr;
  int guard = -1;  // the register of @p; -1: none
  bool if_not = false;
  bool accumulates = false;    // its results are operands, too
  uint32_t line = 0;           // of the PTX text
  uint32_t target = kNowhere;  // of a branch
  int* regs = nullptr;         // operands, the results first
  int num_regs = 0, results = 0;
  int64_t offset[2] = {0, 0};           // of the addresses among them
  uint64_t extra = 0;                   // what else run wants to know
  const std::string* opcode = nullptr;  // with everything behind its dots
};

// A register that holds something before a thread starts: %tid.x, or an address that the launch decides.
struct Special {
  std::string name;
  int reg;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  int num_regs = 0;                 // of a lane
  std::vector<uint64_t> constants;  // their registers come behind those: each 32 times
  std::vector<Special> specials;
  uint32_t static_shared = 0, local_bytes = 0, params_bytes = 0;  // of a CTA, a thread, a launch
  std::vector<Allocations::Range> globals;                        // its module's variables
  std::vector<std::unique_ptr<int[]>> operands;
};

// Where shared memory begins, as on Hopper: an address of 0 is none. Dynamic shared memory lies behind the
// static one, at a multiple of this.
inline constexpr uint32_t kSharedBase = 1024;
inline uint32_t static_bytes(const Kernel& k) {
  return (k.static_shared + kSharedBase - 1) / kSharedBase * kSharedBase;
}

// The PTX of one source file. Kernels are compiled when they are launched first.
struct Module {
  std::deque<std::string> texts;  // which the code below is part of
  struct Code {
    std::string_view text;  // (results) name (parameters) ... { body }
    uint32_t line;
  };
  std::map<std::string, Code> kernels, functions;
  std::map<std::string, std::vector<char>> globals;  // zeros at first
  std::map<std::string, Variable> shared;            // of CTAs; 0 bytes: as many as the launch says
  std::map<std::string, std::unique_ptr<Kernel>> compiled;
  std::map<std::string, std::string> opcodes;
};

void load(Module& module, std::string ptx);
const Kernel& compile(Module& module, const std::string& name);
void share_registers(Kernel& kernel, size_t num_regs);

// An operand as it is written.
struct Operand {
  enum Kind { kRegister, kConstant, kVector, kAddress, kSymbol, kSink } kind;
  std::vector<int> regs;  // of an address: its base, then coordinates
  int64_t offset = 0;     // of an address
  std::string name;       // of a label, a function, a variable
  bool negated = false;   // !%p
};
using Opcode = std::vector<std::string>;  // its parts between dots
inline bool has(const Opcode& opcode, std::string_view part) {
  return std::find(opcode.begin(), opcode.end(), part) != opcode.end();
}
inline std::string joined(const Opcode& opcode) {
  std::string name;
  for (const std::string& part : opcode) name += (name.empty() ? "" : ".") + part;
  return name;
}
// What runs an opcode; adds to the instruction what only that function knows. Null: unknown.
Handler find_handler(const Opcode& opcode, const std::vector<Operand>& operands, Instruction& instruction);

}  // namespace emulator::ptx
