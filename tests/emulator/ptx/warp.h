#pragma once
// The state of warps, CTAs and clusters, and what instructions do to the lanes of a warp.
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/machine/allocations.h"
#include "emulator/machine/formats.h"
#include "emulator/ptx/program.h"
#include "emulator/ptx/races.h"

namespace emulator::ptx {

inline constexpr int kLanes = 32;
using Mask = uint32_t;
using Lanes = uint64_t[kLanes];  // a register: the low bits of each, the others as they fall

struct Launch {
  const Kernel* kernel;
  const char* params;
  unsigned grid, block, cluster, dynamic_shared;
  unsigned seed;           // 0: warps in order and copies at once; else a random order, copies late
  bool is_descending;      // the last cluster begins first, and ends before another begins
  unsigned most_clusters;  // behind which the launch is killed
  const Allocations::Snapshot* memory;
};

struct Cluster;

// bar.sync and its kin: `expected` threads meet.
struct NamedBarrier {
  unsigned expected = 0, arrived = 0;
  uint64_t generation = 0;
  unsigned saying = 0, last_saying = 0;  // lanes, of barrier.red
};

// What a product of a warpgroup reads of shared memory until somebody has waited for it: 16 bytes each.
struct InFlight {
  unsigned warp, group;
  std::vector<uint16_t> chunks;
};

struct Cta {
  Cluster* cluster;
  unsigned index, rank;
  std::vector<char> shared;  // from kSharedBase on
  // Of each 16 bytes the warp, counted from 1, that has written them by ordinary stores and has made no proxy
  // fence since: wgmma and the copy engine may not see it.
  std::vector<uint8_t> unfenced;
  std::vector<InFlight> in_flight;
  std::vector<uint16_t> readers;  // by chunk: how many of those read it
  NamedBarrier barriers[16];
  unsigned warps_left = 0;
};

// Lanes that are at the same place.
struct Group {
  uint32_t pc;
  Mask lanes;
  enum Wait { kNone, kLanesOf, kMbarrier, kBarrier } wait = kNone;  // kLanesOf: for others of the warp
  bool has_arrived = false;                                         // at a barrier, whose generation that was
  uint64_t generation = 0;
};

struct Warp {
  Cta* cta;
  const Launch* launch;
  unsigned id;  // in its CTA
  struct Register {
    Lanes lane;
  };
  std::vector<Register> file;
  int own = 0;                          // registers in it; behind their numbers come constants
  const uint64_t* constants = nullptr;  // of the kernel
  std::vector<char> local;              // of 32 threads, one behind the other
  std::vector<Group> groups;
  size_t running = 0;               // which of them
  uint64_t cluster_generation = 0;  // in which it has arrived at the cluster's barrier
  Mask active = 0;    // lanes that execute the instruction: of the group, those whose guard holds
  uint32_t next = 0;  // where the group goes on
  // cp.async: of each lane, copies that have not been made, groups ended.
  struct Copy {
    char* to;
    const char* from;
    uint32_t bytes, zeros;  // behind them
  };
  std::vector<Copy> copies[kLanes];
  unsigned products = 0;     // groups of wgmma that it has committed
  Allocations::Range range;  // of the last access to global memory

  // A register, or a constant.
  uint64_t* reg(int number) {
    return number < own ? file[static_cast<size_t>(number)].lane
                        : const_cast<uint64_t*>(constants + size_t(number - own) * kLanes);
  }
  const uint64_t* operand(const Instruction& i, int k) { return reg(i.regs[k]); }
  uint64_t* result(const Instruction& i, int k = 0) { return reg(i.regs[k]); }
  Mask alive() const {
    Mask all = 0;
    for (const Group& g : groups) all |= g.lanes;
    return all;
  }
  Group& group() { return groups[running]; }
  // The group waits here, and executes the instruction again when what it waits for may have come.
  void wait(Group::Wait what) {
    group().wait = what;
    next = group().pc;
  }
  void finish_copies(int lane);
  [[noreturn]] void fail(const std::string& what) const;
  // Until it waits, or for so many instructions. Whether it has executed any.
  bool run(int instructions);
};

// A copy under way, or an arrival that follows one.
using Async = std::function<void()>;

struct Cluster {
  const Launch* launch;
  std::vector<Cta> ctas;
  std::vector<Warp> warps;
  std::mt19937 random;
  std::deque<Async> pending;
  std::unique_ptr<Races> races;  // null: nobody asks
  unsigned warps_arrived = 0;    // at the cluster's barrier
  uint64_t generation = 0;

  void issue(Async what) {
    if (launch->seed == 0) what();
    else pending.push_back(std::move(what));
  }
};

template <class F>
inline void each_lane(Mask lanes, F&& f) {
  if (lanes == ~Mask{0}) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
  }
}

// The same where no lane reads what another writes: the compiler may take several at once.
template <class F>
inline void each_lane_alone(Mask lanes, F&& f) {
  if (lanes != ~Mask{0}) return each_lane(lanes, f);
#pragma GCC ivdep
  for (int l = 0; l < kLanes; ++l) f(l);
}
// The lanes whose predicate is true.
inline Mask true_lanes(const uint64_t* predicate) {
  Mask all = 0;
  for (int l = 0; l < kLanes; l += 4) {
    const __m256i lowest =
        _mm256_slli_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(predicate + l)), 63);
    all |= static_cast<Mask>(_mm256_movemask_pd(_mm256_castsi256_pd(lowest))) << l;
  }
  return all;
}

template <class T>
inline T get(uint64_t lane) {
  T value;
  std::memcpy(&value, &lane, sizeof value);
  return value;
}
// Signed numbers fill the whole register: a wider one may be read from it.
template <class T>
inline uint64_t put(T value) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<uint32_t>(value);
  else if constexpr (std::is_same_v<T, double>) return std::bit_cast<uint64_t>(value);
  else if constexpr (std::is_signed_v<T>) return static_cast<uint64_t>(static_cast<int64_t>(value));
  else return value;
}

// ---- memory (memory.cpp) --------------------------------------------------------------------------------

// Generic addresses: the computer's own, but for these windows. Of shared memory the low 32 bits are the
// address in shared::cluster, where CTA r of a cluster begins at (r + 1) << 24.
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 60, kLocalWindow = uint64_t{1} << 61;
inline constexpr int kClusterShift = 24;

// `bytes` at an address, checked; the thread is that of `lane`.
char* at_shared(Warp& warp, uint32_t address, size_t bytes);
// The same to write there: by a store, or by what needs no proxy fence.
char* to_shared(Warp& warp, uint32_t address, size_t bytes, bool is_store);
// What the race detector is told of an access there, if there is one.
void note_read(Warp& warp, uint32_t address, size_t bytes);
void note_write(Warp& warp, uint32_t address, size_t bytes, Races::How how);
char* at_global(Warp& warp, uint64_t address, size_t bytes);
char* at_local(Warp& warp, int lane, uint64_t address, size_t bytes);
char* at_generic(Warp& warp, int lane, uint64_t address, size_t bytes);

// ---- f16, bf16 and e4m3: as in formats.h, but for NVIDIA's one NaN --------------------------------------

inline uint32_t float_to_f16(float x) { return x != x ? 0x7fff : to_f16(x); }
inline uint32_t float_to_bf16(float x) { return x != x ? 0x7fff : to_bf16(x); }
extern const std::array<float, 256> kE4m3Values;  // convert.cpp
inline float e4m3_to_float(uint8_t x) { return kE4m3Values[x]; }

// ---- one file each --------------------------------------------------------------------------------------

using Operands = std::vector<Operand>;
Handler find_arithmetic(const Opcode&, const Operands&, Instruction&);
Handler find_float(const Opcode&, const Operands&, Instruction&);
Handler find_conversion(const Opcode&, const Operands&, Instruction&);
Handler find_memory(const Opcode&, const Operands&, Instruction&);
Handler find_async(const Opcode&, const Operands&, Instruction&);
Handler find_matrix(const Opcode&, const Operands&, Instruction&);
Handler find_control(const Opcode&, const Operands&, Instruction&);
std::string describe_wait(Warp& warp);  // of the running group: what an mbarrier lacks
void run_grid(const Launch& launch);

}  // namespace emulator::ptx
