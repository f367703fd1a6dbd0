// Registers that are never in use at once share a number: a warp's file then fits the caches.
#include <algorithm>
#include <bit>
#include <map>

#include "emulator/ptx/program.h"

namespace emulator::ptx {
namespace {

// The places, as the text goes, between which a register may hold what is still to be read.
struct Use {
  uint32_t first = ~0u, last = 0;
  void extend(uint32_t at) { first = std::min(first, at), last = std::max(last, at); }
};
// A bit for each register.
class Set {
 public:
  explicit Set(size_t size) : words_((size + 63) / 64) {}
  bool has(size_t r) const { return words_[r / 64] >> (r % 64) & 1; }
  void add(size_t r) { words_[r / 64] |= uint64_t{1} << (r % 64); }
  // Those of `other` that `without` has not. Whether any is new.
  bool add(const Set& other, const Set& without) {
    bool is_new = false;
    for (size_t w = 0; w < words_.size(); ++w) {
      const uint64_t more = other.words_[w] & ~without.words_[w] & ~words_[w];
      words_[w] |= more;
      is_new |= more != 0;
    }
    return is_new;
  }
  template <class F>
  void each(F f) const {
    for (size_t w = 0; w < words_.size(); ++w)
      for (uint64_t left = words_[w]; left; left &= left - 1)
        f(w * 64 + static_cast<size_t>(std::countr_zero(left)));
  }

 private:
  std::vector<uint64_t> words_;
};
struct Block {
  uint32_t begin, end;
  Set writes, live;  // registers: written here; that hold at the begin what somebody reads
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
    if (begins[at]) blocks.push_back({at, at, Set(num_regs), Set(num_regs)});
    Block& b = blocks.back();
    b.end = at + 1;
    const auto read = [&](size_t r) {
      if (!b.writes.has(r)) b.live.add(r);
    };
    operands_of(code[at], read, [&](size_t r) { b.writes.add(r); });
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
  const auto each_next = [&](size_t k, auto f) {  // block that may follow
    const Instruction& last = code[blocks[k].end - 1];
    const bool jumps = last.target != Instruction::kNowhere;
    if (jumps) f(blocks[block_at(last.target)]);
    if ((!jumps || last.guard >= 0) && k + 1 < blocks.size()) f(blocks[k + 1]);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t k = blocks.size(); k-- > 0;)
      each_next(k, [&](const Block& next) { changed |= blocks[k].live.add(next.live, blocks[k].writes); });
  }
  for (size_t k = 0; k < blocks.size(); ++k) {
    blocks[k].live.each([&](size_t r) { uses[r].extend(blocks[k].begin); });
    each_next(
        k, [&](const Block& next) { next.live.each([&](size_t r) { uses[r].extend(blocks[k].end - 1); }); });
  }
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
