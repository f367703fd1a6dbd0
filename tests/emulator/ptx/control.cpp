// Where a warp goes on, what its lanes tell each other, and barriers.
#include <algorithm>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {
namespace {

void branch(Warp& w, const Instruction& i) {
  const Mask others = w.group().lanes & ~w.active;
  if (others != 0) {
    w.group().lanes = others;
    w.groups.push_back({i.target, w.active});
  } else {
    w.next = i.target;
  }
}
void end(Warp& w, const Instruction&) {
  each_lane(w.active, [&](int l) { w.finish_copies(l); });
  w.group().lanes &= ~w.active;
}
void nothing(Warp&, const Instruction&) {}

// Lanes of a member mask, once all of them that live are here.
template <Handler kHandler, int kFromEnd = 1>
void together(Warp& w, const Instruction& i) {
  const uint64_t* members = w.operand(i, i.num_regs - kFromEnd);
  const auto wanted = static_cast<Mask>(members[std::countr_zero(w.active)]);
  if (wanted & w.alive() & ~w.active) return w.wait(Group::kLanesOf);
  if (w.active & ~wanted) w.fail("a lane that is not in its own member mask");
  kHandler(w, i);
}

void shuffle(Warp& w, const Instruction& i) {  // d(|p), a, b, c, members; extra: how
  const int first = i.num_regs - 4;
  uint64_t* d = w.result(i);
  uint64_t* p = first > 1 ? w.result(i, 1) : nullptr;
  const uint64_t *b = w.operand(i, first + 1), *c = w.operand(i, first + 2);
  Lanes a;
  std::memcpy(a, w.operand(i, first), sizeof a);
  each_lane(w.active, [&](int l) {
    const int segment = static_cast<int>(c[l] >> 8 & 31), clamp = static_cast<int>(c[l] & 31),
              by = static_cast<int>(b[l] & 31);
    const int low = l & segment, high = low | (clamp & ~segment);
    int from;
    bool inside;
    switch (static_cast<char>(i.extra)) {
      case 'u': from = l - by, inside = from >= high; break;
      case 'd': from = l + by, inside = from <= high; break;
      case 'b': from = l ^ by, inside = from <= high; break;
      default: from = low | (by & ~segment), inside = from <= high; break;
    }
    if (!inside) from = l;
    if (!(w.active >> from & 1)) w.fail("shfl from lane " + std::to_string(from) + ", which is not here");
    d[l] = a[from];
    if (p) p[l] = inside;
  });
}
Mask votes(Warp& w, const Instruction& i) {
  const Mask yes = true_lanes(w.operand(i, 1));
  return w.active & (i.extra ? ~yes : yes);  // extra: !p
}
void ballot(Warp& w, const Instruction& i) {
  const Mask yes = votes(w, i);
  uint64_t* d = w.result(i);
  each_lane_alone(w.active, [&](int l) { d[l] = yes; });
}
void any(Warp& w, const Instruction& i) {
  const Mask yes = votes(w, i);
  each_lane(w.active, [&](int l) { w.result(i)[l] = yes != 0; });
}
void all(Warp& w, const Instruction& i) {
  const Mask yes = votes(w, i);
  each_lane(w.active, [&](int l) { w.result(i)[l] = yes == w.active; });
}
template <class T, auto kFunction>
void reduce(Warp& w, const Instruction& i) {
  const uint64_t* a = w.operand(i, 1);
  T result = get<T>(a[std::countr_zero(w.active)]);
  each_lane(w.active & (w.active - 1), [&](int l) { result = kFunction(result, get<T>(a[l])); });
  each_lane(w.active, [&](int l) { w.result(i)[l] = put(result); });
}
template <class T>
Handler find_reduction(const Opcode& opcode) {
  if (has(opcode, "add"))
    return together<reduce<T, ([](T a, T b) {
                             return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
                           })>>;
  if (has(opcode, "max")) return together<reduce<T, ([](T a, T b) { return a > b ? a : b; })>>;
  if (has(opcode, "min")) return together<reduce<T, ([](T a, T b) { return a < b ? a : b; })>>;
  if (has(opcode, "or")) return together<reduce<T, ([](T a, T b) { return static_cast<T>(a | b); })>>;
  if (has(opcode, "and")) return together<reduce<T, ([](T a, T b) { return static_cast<T>(a & b); })>>;
  return nullptr;
}
void match_any(Warp& w, const Instruction& i) {
  Lanes a;
  std::memcpy(a, w.operand(i, 1), sizeof a);
  each_lane(w.active, [&](int l) {
    Mask same = 0;
    each_lane(w.active,
              [&](int o) { same |= Mask{static_cast<uint32_t>(a[o]) == static_cast<uint32_t>(a[l])} << o; });
    w.result(i)[l] = same;
  });
}

// ---- barriers of a CTA ----------------------------------------------------------------------------------
//
// Warps arrive with all their lanes. extra: 's' to wait, 'a' to arrive only, 'o' to wait for whether any lane
// says so, 'p' for how many do, of the whole block.

void barrier(Warp& w, const Instruction& i) {
  if (w.active != w.alive()) return w.wait(Group::kLanesOf);
  const auto how = static_cast<char>(i.extra);
  const bool reduces = how == 'o' || how == 'p';
  const int first = reduces;  // behind the result
  const uint64_t id = w.operand(i, first)[0];
  if (id >= 16) w.fail("barrier " + std::to_string(id));
  NamedBarrier& b = w.cta->barriers[id];
  Group& g = w.group();
  if (!g.has_arrived) {
    const bool counted = how == 'o' || (!reduces && i.num_regs > 1);
    const unsigned expected =
        counted ? static_cast<unsigned>(w.operand(i, first + 1)[0]) : w.cta->warps_left * kLanes;
    if (b.arrived > 0 && b.expected != expected)
      w.fail("barrier " + std::to_string(id) + " of " + std::to_string(b.expected) + " and of " +
             std::to_string(expected) + " threads");
    if (reduces) {
      const uint64_t* p = w.operand(i, how == 'o' ? 3 : 2);
      each_lane(w.active, [&](int l) { b.saying += p[l] & 1; });
    }
    b.expected = expected;
    b.arrived += kLanes;
    Races* const races = w.cta->cluster->races.get();
    if (races) races->arrive(w, &b);
    g.generation = b.generation;
    if (b.arrived > expected) w.fail("more threads than barrier " + std::to_string(id) + " expects");
    if (b.arrived == expected) {
      ++b.generation, b.arrived = 0, b.last_saying = b.saying, b.saying = 0;
      if (races) races->end_phase(&b);
    }
    if (how == 'a') return;
    g.has_arrived = true;
  }
  if (b.generation == g.generation) return w.wait(Group::kBarrier);
  g.has_arrived = false;
  if (w.cta->cluster->races) w.cta->cluster->races->wait(w, &b);
  if (reduces)
    each_lane(w.active, [&](int l) { w.result(i)[l] = how == 'o' ? b.last_saying > 0 : b.last_saying; });
}

void trap(Warp& w, const Instruction&) { w.fail("trap"); }

void proxy_fence(Warp& w, const Instruction&) {
  const auto own = static_cast<uint8_t>(w.id + 1);
  for (uint8_t& writer : w.cta->unfenced) writer = writer == own ? 0 : writer;
}

// ---- the barrier of a cluster ---------------------------------------------------------------------------

void cluster_arrive(Warp& w, const Instruction&) {
  if (w.active != w.alive()) return w.wait(Group::kLanesOf);
  Cluster& c = *w.cta->cluster;
  w.cluster_generation = c.generation;
  unsigned warps = 0;
  for (const Cta& cta : c.ctas) warps += cta.warps_left;
  if (c.races) c.races->arrive(w, &c.generation);
  if (++c.warps_arrived < warps) return;
  ++c.generation, c.warps_arrived = 0;
  if (c.races) c.races->end_phase(&c.generation);
}
void cluster_wait(Warp& w, const Instruction&) {
  if (w.active != w.alive()) return w.wait(Group::kLanesOf);
  Cluster& c = *w.cta->cluster;
  if (c.generation == w.cluster_generation) return w.wait(Group::kBarrier);
  if (c.races) c.races->wait(w, &c.generation);
}

}  // namespace

Handler find_control(const Opcode& opcode, const Operands& operands, Instruction& i) {
  const std::string& what = opcode[0];
  if (what == "bra") return branch;
  if (what == "ret" || what == "exit") return end;
  if (what == "shfl") {
    i.extra = static_cast<uint64_t>(opcode[2][0]);
    return together<shuffle>;
  }
  if (what == "vote") {
    i.extra = operands[1].negated;
    if (has(opcode, "ballot")) return together<ballot>;
    return has(opcode, "any") ? together<any> : has(opcode, "all") ? together<all> : nullptr;
  }
  if (what == "redux")
    return opcode.back() == "s32" ? find_reduction<int32_t>(opcode) : find_reduction<uint32_t>(opcode);
  if (what == "match" && opcode[1] == "any") return together<match_any>;
  if (what == "bar" && opcode[1] == "warp") return together<nothing>;
  if (what == "barrier" && opcode[1] == "cluster")
    return opcode[2] == "arrive" ? cluster_arrive : cluster_wait;
  if (what == "bar" || what == "barrier") {
    char how = 0;
    if (has(opcode, "red")) how = has(opcode, "or") ? 'o' : has(opcode, "popc") ? 'p' : 0;
    else how = has(opcode, "sync") ? 's' : has(opcode, "arrive") ? 'a' : 0;
    if (how == 0) return nullptr;
    i.extra = static_cast<uint64_t>(how);
    return barrier;
  }
  if (what == "trap") return trap;
  if (what == "fence" && has(opcode, "proxy") && opcode[2] == "async") return proxy_fence;
  // Warps of a grid run one after the other, grids too, and what is written is there at once.
  for (const char* name : {"fence", "membar", "setmaxnreg", "griddepcontrol", "nanosleep", "discard"})
    if (what == name) return nothing;
  return nullptr;
}

Handler find_handler(const Opcode& opcode, const Operands& operands, Instruction& i) {
  for (const auto find :
       {find_arithmetic, find_float, find_conversion, find_memory, find_async, find_control, find_matrix})
    if (const Handler found = find(opcode, operands, i)) return found;
  return nullptr;
}

}  // namespace emulator::ptx
