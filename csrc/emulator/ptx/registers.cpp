// Registers that are never in use at once share a number: a warp's file then fits the caches.
#include <algorithm>
#include <map>

#include "emulator/ptx/program.h"

namespace emulator::ptx {
namespace {

// The places, as the text goes, between which a register may hold what is still to be read.
struct Use {
  uint32_t first = ~0u, last = 0;
  void extend(uint32_t at) { first = std::min(first, at), last = std::max(last, at); }
};
struct Block {
  uint32_t begin, end;
  std::vector<bool> writes, live;  // by register: here; holds at the begin what somebody reads
};

template <class Read, class Write>
void operands_of(const Instruction& i, Read read, Write write) {
  if (i.guard >= 0) read(static_cast<size_t>(i.guard));
  for (int k = 0; k < i.num_regs; ++k)
    if (i.regs[k] >= 0 && (k >= i.results || i.accumulates)) read(static_cast<size_t>(i.regs[k]));
  for (int k = 0; k < i.results; ++k)
    if (i.guard < 0) write(static_cast<size_t>(i.regs[k]));
    else read(static_cast<size_t>(i.regs[k]));  // some lanes keep what they have
}

std::vector<Block> blocks_of(const std::vector<Instruction>& code, size_t num_regs) {
  std::vector<bool> begins(code.size() + 1);
  begins[0] = true;
  for (size_t at = 0; at < code.size(); ++at)
    if (code[at].target != Instruction::kNowhere) begins[code[at].target] = begins[at + 1] = true;
  std::vector<Block> blocks;
  for (uint32_t at = 0; at < code.size(); ++at) {
    if (begins[at]) blocks.push_back({at, at, std::vector<bool>(num_regs), std::vector<bool>(num_regs)});
    Block& b = blocks.back();
    b.end = at + 1;
    operands_of(
        code[at], [&](size_t r) { b.live[r] = b.live[r] || !b.writes[r]; },
        [&](size_t r) { b.writes[r] = true; });
  }
  return blocks;
}

std::vector<Use> find_uses(const std::vector<Instruction>& code, size_t num_regs) {
  std::vector<Use> uses(num_regs);
  std::vector<Block> blocks = blocks_of(code, num_regs);
  const auto block_at = [&](uint32_t at) {
    const auto ends_behind = [](uint32_t x, const Block& b) { return x < b.end; };
    return static_cast<size_t>(std::upper_bound(blocks.begin(), blocks.end(), at, ends_behind) -
                               blocks.begin());
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t k = blocks.size(); k-- > 0;) {
      Block& b = blocks[k];
      const Instruction& last = code[b.end - 1];
      const bool jumps = last.target != Instruction::kNowhere;
      for (const size_t next :
           {jumps ? block_at(last.target) : blocks.size(), jumps && last.guard < 0 ? blocks.size() : k + 1}) {
        if (next >= blocks.size()) continue;
        for (size_t r = 0; r < num_regs; ++r) {
          if (!blocks[next].live[r]) continue;
          uses[r].extend(b.end - 1);
          if (!b.live[r] && !b.writes[r]) b.live[r] = changed = true;
        }
      }
    }
  }
  for (const Block& b : blocks)
    for (size_t r = 0; r < num_regs; ++r)
      if (b.live[r]) uses[r].extend(b.begin);
  for (uint32_t at = 0; at < code.size(); ++at) {
    const auto touch = [&](size_t r) { uses[r].extend(at); };
    operands_of(code[at], touch, touch);
  }
  return uses;
}

}  // namespace

void share_registers(Kernel& kernel, size_t num_regs) {
  std::vector<Use> uses = find_uses(kernel.code, num_regs);
  for (const Special& s : kernel.specials) uses[static_cast<size_t>(s.reg)].extend(0);
  std::vector<size_t> order;
  for (size_t r = 0; r < num_regs; ++r)
    if (uses[r].first <= uses[r].last) order.push_back(r);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return uses[a].first < uses[b].first; });
  std::vector<int> numbers(num_regs, 0), free;
  std::multimap<uint32_t, int> busy;  // numbers by the last use of who has them
  for (const size_t r : order) {
    while (!busy.empty() && busy.begin()->first < uses[r].first)
      free.push_back(busy.begin()->second), busy.erase(busy.begin());
    if (free.empty()) free.push_back(kernel.num_regs++);
    numbers[r] = free.back();
    free.pop_back();
    busy.emplace(uses[r].last, numbers[r]);
  }
  // Constants come behind them.
  const auto renumber = [&](int& r) {
    r = r < 0 ? kernel.num_regs - 1 - r : numbers[static_cast<size_t>(r)];
  };
  for (Instruction& i : kernel.code) {
    if (i.guard >= 0) renumber(i.guard);
    for (int k = 0; k < i.num_regs; ++k) renumber(i.regs[k]);
  }
  for (Special& s : kernel.specials) renumber(s.reg);
}

}  // namespace emulator::ptx
