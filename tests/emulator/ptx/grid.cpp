// Runs a grid: clusters one after the other on each of this computer's threads, the warps of a cluster in
// turns.
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {
namespace {

constexpr uint64_t kJunk = 0x7fc1a5a57fc1a5a5;  // NaNs: what registers and shared memory hold at first
constexpr int kTurn = 400;                      // instructions of a warp before others have theirs

std::string readable(const std::string& name) {
  return name.size() > 160 ? name.substr(0, 160) + "..." : name;
}

uint64_t special_value(const Warp& w, int lane, const std::string& name) {
  const Launch& l = *w.launch;
  const unsigned thread = w.id * kLanes + static_cast<unsigned>(lane);
  if (name.starts_with(".params+")) return reinterpret_cast<uint64_t>(l.params) + std::stoull(name.substr(8));
  if (name == ".dynamic_shared") return kSharedBase + static_bytes(*l.kernel);
  if (name == "%tid.x") return thread;
  if (name == "%ntid.x") return l.block;
  if (name == "%ctaid.x") return w.cta->index;
  if (name == "%nctaid.x") return l.grid;
  if (name == "%globaltimer") return 0;  // time stands still: no limit of a wait is reached
  if (name == "%laneid") return static_cast<unsigned>(lane);
  if (name == "%cluster_ctarank") return w.cta->rank;
  if (name == "%cluster_nctarank") return l.cluster;
  if (name == "%clusterid.x") return w.cta->index / l.cluster;
  if (name == "%tid.y" || name == "%tid.z" || name == "%ctaid.y" || name == "%ctaid.z") return 0;
  if (name == "%ntid.y" || name == "%ntid.z" || name == "%nctaid.y" || name == "%nctaid.z") return 1;
  throw std::runtime_error("unknown register " + name);
}

// In place of one of the last cluster's, whose memory it takes.
void start(Warp& w, Cta& cta, const Launch& launch, unsigned id) {
  w = {.cta = &cta, .launch = &launch, .id = id, .file = std::move(w.file), .local = std::move(w.local)};
  const Kernel& k = *launch.kernel;
  w.file.resize(static_cast<size_t>(k.num_regs));
  w.own = k.num_regs, w.constants = k.constants.data();
  for (auto& r : w.file) std::fill(std::begin(r.lane), std::end(r.lane), kJunk);
  for (const Special& s : k.specials)
    for (int l = 0; l < kLanes; ++l) w.file[static_cast<size_t>(s.reg)].lane[l] = special_value(w, l, s.name);
  w.local.assign(static_cast<size_t>(k.local_bytes) * kLanes, '\xa5');
  const unsigned threads = std::min(launch.block - id * kLanes, unsigned{kLanes});
  w.groups.assign(1, {0, threads == kLanes ? ~Mask{0} : (Mask{1} << threads) - 1});
}

// Whatever the caller's thread does: rounded to the nearest, subnormal numbers kept.
struct FloatMode {
  const unsigned before = _mm_getcsr();
  FloatMode() { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(before); }
};

void run_cluster(const Launch& launch, unsigned index, Cluster& c) {
  c.launch = &launch;
  c.random.seed(launch.seed * 7919u + index);
  const unsigned warps = (launch.block + kLanes - 1) / kLanes;
  c.ctas.resize(launch.cluster);
  c.warps.resize(static_cast<size_t>(launch.cluster) * warps);
  c.pending.clear();
  c.warps_arrived = 0, c.generation = 0;
  c.races.reset();
  const size_t shared = static_bytes(*launch.kernel) + launch.dynamic_shared;
  for (unsigned r = 0; r < launch.cluster; ++r) {
    Cta& cta = c.ctas[r];
    cta = {.cluster = &c,
           .index = index * launch.cluster + r,
           .rank = r,
           .shared = std::move(cta.shared),
           .unfenced = std::move(cta.unfenced),
           .in_flight = {},
           .readers = std::move(cta.readers),
           .warps_left = warps};
    cta.shared.resize(shared);
    cta.unfenced.assign(shared / 16 + 1, 0), cta.readers.assign(shared / 16 + 1, 0);
    for (size_t at = 0; at + 8 <= shared; at += 8) std::memcpy(cta.shared.data() + at, &kJunk, 8);
    for (unsigned i = 0; i < warps; ++i) start(c.warps[r * warps + i], cta, launch, i);
  }
  if (Races::are_wanted()) c.races = std::make_unique<Races>(launch.cluster, warps, shared);
  std::vector<Warp*> order;
  for (Warp& w : c.warps) order.push_back(&w);
  const auto make_some = [&](bool one) {  // of the copies under way
    bool any = false;
    while (!c.pending.empty() && (one || c.random() % 3 == 0)) {
      const auto which = c.pending.begin() + static_cast<std::ptrdiff_t>(c.random() % c.pending.size());
      const Async what = std::move(*which);
      c.pending.erase(which);
      what();
      any = true;
      if (one) break;
    }
    return any;
  };
  while (!order.empty()) {
    bool any = false;
    if (launch.seed != 0) std::shuffle(order.begin(), order.end(), c.random);
    for (Warp*& w : order) {
      const int turn = launch.seed == 0 ? kTurn : 1 + static_cast<int>(c.random() % kTurn);
      any |= w->run(turn);
      if (launch.seed != 0) any |= make_some(false);
      if (!w->groups.empty()) continue;
      --w->cta->warps_left;
      w = nullptr;
    }
    std::erase(order, nullptr);
    if (any || order.empty() || make_some(true)) continue;
    std::string where;
    for (Warp* w : order)
      for (w->running = 0; w->running < w->groups.size(); ++w->running) {
        const Instruction& i = launch.kernel->code[w->group().pc];
        where += "\n  CTA " + std::to_string(w->cta->index) + " warp " + std::to_string(w->id) + ": line " +
                 std::to_string(i.line) + ", " + *i.opcode + describe_wait(*w);
      }
    throw std::runtime_error("nobody can go on in " + readable(launch.kernel->name) + ":" + where);
  }
  while (!c.pending.empty()) make_some(true);
}

}  // namespace

void Warp::fail(const std::string& what) const {
  const Group& g = groups[running];
  const Instruction& i = launch->kernel->code[g.pc];
  throw std::runtime_error(readable(launch->kernel->name) + ", CTA " + std::to_string(cta->index) +
                           ", warp " + std::to_string(id) + ", PTX line " + std::to_string(i.line) + " (" +
                           *i.opcode + "): " + what);
}

bool Warp::run(int instructions) {
  const std::vector<Instruction>& code = launch->kernel->code;
  for (Group& g : groups)
    if (g.wait != Group::kLanesOf) g.wait = Group::kNone;
  bool any = false;
  for (; instructions > 0; --instructions) {
    running = 0;
    if (groups.size() > 1) {  // the one that is behind the others, so that they meet again
      running = groups.size();
      for (size_t k = 0; k < groups.size(); ++k)
        if (groups[k].wait == Group::kNone && (running == groups.size() || groups[k].pc < groups[running].pc))
          running = k;
      if (running == groups.size()) break;
    } else if (group().wait != Group::kNone) {
      break;
    }
    const uint32_t pc = group().pc;
    const Instruction& i = code[pc];
    active = group().lanes;
    if (i.guard >= 0) {
      const Mask holds = true_lanes(reg(i.guard));
      active &= i.if_not ? ~holds : holds;
    }
    next = pc + 1;
    if (active != 0) i.run(*this, i);
    Group& g = groups[running];
    if (g.wait != Group::kNone) continue;
    any = true;
    g.pc = next;
    if (g.lanes == 0) {
      groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(running));
      for (Group& other : groups)  // which may have waited for these
        if (other.wait == Group::kLanesOf) other.wait = Group::kNone;
    }
    if (groups.size() > 1) {
      for (size_t k = 0; k < groups.size(); ++k)
        for (size_t o = k + 1; o < groups.size();)
          if (groups[o].pc == groups[k].pc && !groups[o].has_arrived && !groups[k].has_arrived) {
            groups[k].lanes |= groups[o].lanes, groups[k].wait = Group::kNone;
            groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(o));
          } else {
            ++o;
          }
    }
    if (groups.empty()) break;
  }
  return any;
}

void run_grid(const Launch& launch) {
  const unsigned all = launch.grid / launch.cluster, clusters = std::min(all, launch.most_clusters);
  std::atomic<unsigned> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  const auto work = [&] {
    const FloatMode mode;
    Cluster c;
    for (unsigned i = next++; i < clusters; i = next++) try {
        run_cluster(launch, launch.is_descending ? all - 1 - i : i, c);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        next = clusters;
      }
  };
  std::vector<std::jthread> threads;
  const unsigned at_once = launch.is_descending ? 1 : std::thread::hardware_concurrency();
  for (unsigned t = 1; t < std::min(clusters, at_once); ++t) threads.emplace_back(work);
  work();
  threads.clear();
  if (error) std::rethrow_exception(error);
  if (clusters < all) throw std::runtime_error("killed: no more clusters begin");
}

}  // namespace emulator::ptx
