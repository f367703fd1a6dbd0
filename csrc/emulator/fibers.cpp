#include "emulator/fibers.h"

#include <xmmintrin.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#if !defined(__x86_64__)
#error "the fibers are written for x86-64"
#endif

// emulator_switch(from, to): saves the callee-saved registers and the stack pointer, takes up the others.
// A fiber starts in the kernel itself: its stack holds the address that the kernel returns to and, where the
// calling convention wants a struct passed by value, the parameters.
extern "C" void emulator_switch(void** from, void* to);
extern "C" void emulator_return();
extern "C" void emulator_finished();
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.globl emulator_return
.hidden emulator_return
emulator_return:
  call emulator_finished
)");

namespace emulator {
namespace {

constexpr size_t kStackBytes = 128 << 10, kSharedBytes = 160 << 10;  // shared: the largest of any GPU here

enum class State { kReady, kAtBarrier, kExchanging, kFinished };

struct Fiber {
  State state;
  int group;  // of the exchange it waits in
  void* stack_pointer;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  unsigned exchanges;  // parity picks the buffer: the fast may start the next before the slow have read
};

struct Block {
  explicit Block(unsigned threads) : fibers(threads), words(2 * threads * kWords), shared(kSharedBytes) {}
  unsigned index;
  unsigned current;
  void* scheduler;
  std::vector<Fiber> fibers;
  std::vector<uint32_t> words;
  std::vector<unsigned char> shared;
  size_t shared_used;
  std::unordered_map<const void*, void*> variables;
};
Block* block;

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "emulator: %s (block %u)\n", what, block->index);
  std::abort();
}

void wait(State state) {
  Fiber& fiber = block->fibers[block->current];
  fiber.state = state;
  emulator_switch(&fiber.stack_pointer, block->scheduler);
}

void start(Fiber& fiber, const void* kernel, const void* params, size_t params_size) {
  fiber.state = State::kReady;
  fiber.exchanges = 0;
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + kStackBytes) - params_size;
  top &= ~uintptr_t{63};
  std::memcpy(reinterpret_cast<void*>(top), params, params_size);
  void** slot = reinterpret_cast<void**>(top);
  *--slot = reinterpret_cast<void*>(&emulator_return);
  *--slot = const_cast<void*>(kernel);
  slot -= 6;  // rbp, rbx, r12 to r15
  fiber.stack_pointer = slot;
}

// Lets every fiber go that what it waits for has come; false if there is none.
bool release() {
  auto& fibers = block->fibers;
  const auto count = [&](State state) {
    return std::count_if(fibers.begin(), fibers.end(), [&](const Fiber& f) { return f.state == state; });
  };
  const auto at_barrier = static_cast<size_t>(count(State::kAtBarrier));
  if (at_barrier == fibers.size()) {
    for (Fiber& f : fibers) f.state = State::kReady;
    return true;
  }
  bool released = false;
  for (size_t t = 0; t < fibers.size(); t += 32) {
    const auto lanes = static_cast<size_t>(fibers[t].group);
    if (fibers[t].state != State::kExchanging || t % lanes != 0 || t + lanes > fibers.size()) continue;
    const auto begin = fibers.begin() + static_cast<long>(t), end = begin + static_cast<long>(lanes);
    const bool all = std::all_of(begin, end, [&](const Fiber& f) {
      return f.state == State::kExchanging && f.group == static_cast<int>(lanes);
    });
    if (!all) continue;
    std::for_each(begin, end, [](Fiber& f) { f.state = State::kReady; });
    released = true;
  }
  return released;
}

// Without `random`, all threads go on in turns. With it, the waves have ranks, new ones in each block, and a
// lower one goes on only while no other can: what a barrier should have ordered is far out of order.
void run_block(const void* kernel, const void* params, size_t params_size, std::mt19937* random) {
  constexpr size_t kWave = 64;
  auto& fibers = block->fibers;
  std::fill(block->shared.begin(), block->shared.end(), 0xff);
  block->shared_used = 0;
  block->variables.clear();
  std::vector<std::vector<unsigned>> waves((fibers.size() + kWave - 1) / kWave);
  for (unsigned t = 0; t < fibers.size(); ++t) {
    start(fibers[t], kernel, params, params_size);
    waves[t / kWave].push_back(t);
  }
  if (random) std::shuffle(waves.begin(), waves.end(), *random);
  for (;;) {
    bool ran = false;
    for (std::vector<unsigned>& wave : waves) {
      if (random && ran) break;
      if (random) std::shuffle(wave.begin(), wave.end(), *random);
      for (unsigned t : wave) {
        if (fibers[t].state != State::kReady) continue;
        ran = true;
        block->current = t;
        emulator_switch(&block->scheduler, fibers[t].stack_pointer);
      }
    }
    const bool finished =
        std::all_of(fibers.begin(), fibers.end(), [](const Fiber& f) { return f.state == State::kFinished; });
    if (finished) return;
    if (!release() && !ran) die("threads wait for others that do not come");
  }
}

}  // namespace

void run_on_fibers(const void* kernel, const void* params, size_t params_size, const Grid& grid,
                   unsigned seed) {
  Block own(grid.threads);
  block = &own;
  const unsigned callers_mode = _mm_getcsr();
  constexpr unsigned kSubnormalsKept = 0x1f80;  // no kernel sees the caller's mode
  _mm_setcsr(kSubnormalsKept);
  std::mt19937 random(seed);
  for (own.index = 0; own.index < grid.blocks; ++own.index)
    run_block(kernel, params, params_size, seed ? &random : nullptr);
  _mm_setcsr(callers_mode);
  block = nullptr;
}

unsigned thread_index() { return block->current; }
unsigned block_index() { return block->index; }
unsigned block_dim() { return static_cast<unsigned>(block->fibers.size()); }
void block_barrier() { wait(State::kAtBarrier); }

void* shared(const void* tag, size_t size, size_t alignment) {
  void*& variable = block->variables[tag];
  if (variable == nullptr) {
    block->shared_used = (block->shared_used + alignment - 1) / alignment * alignment;
    variable = block->shared.data() + block->shared_used;
    block->shared_used += size;
    if (block->shared_used > kSharedBytes) die("more shared memory than any GPU has");
  }
  return variable;
}

const uint32_t* exchange(const uint32_t (&words)[kWords], int lanes) {
  const unsigned t = block->current;
  Fiber& fiber = block->fibers[t];
  uint32_t* buffer = block->words.data() + (fiber.exchanges++ % 2) * block->fibers.size() * kWords;
  std::memcpy(buffer + t * kWords, words, sizeof words);
  fiber.group = lanes;
  wait(State::kExchanging);
  return buffer + t / static_cast<unsigned>(lanes) * static_cast<unsigned>(lanes) * kWords;
}

}  // namespace emulator

extern "C" void emulator_finished() {
  emulator::wait(emulator::State::kFinished);
  std::abort();  // never scheduled again
}
