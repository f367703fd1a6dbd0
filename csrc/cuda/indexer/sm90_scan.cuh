#pragma once
// The scan of index_topk on Hopper: the shares of scan.cuh, with lists in shared memory. Warps meet only
// when a list is nearly full: each counts its rounds (a tile), and looks at the round two before its own,
// which all have finished, for whether a list was nearly full then.
//
//   barrier     arrivals            a phase is
//   round[i]    16 warps            a round of the same parity, its logits in the lists
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_math.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kListSlack = 2 * kTileKeys;  // what joins a list after a look at it
// So that lists of that many rows, at most two of more than 2048, leave room for eight stages.
MLA_HD constexpr int list_capacity(int topk, int rows) {
  return topk > 2048 || rows == 1 ? 7168 : rows > 2 ? 3584 : 4096;
}

// The part of a unit that a CTA scans.
struct ScanWork {
  int64_t unit_begin, unit_end;  // tiles
  int32_t column;                // the first
  int tiles;
};

// What the units' loop needs lies here: registers are for the tiles' loop.
struct ScanShared {
  Barriers ring;
  uint64_t round[2];
  IndexShare share;  // with the first unit, and every other one behind it
  IndexUnit other;
  int64_t begin, end;  // tiles of the CTA's share
  ScanWork works[2];   // of those units
  union {
    MathTeam::Smem select;
    GroupTeam::Smem group_select[kGroups];
  };
  uint64_t low[kIndexGroupRows], high[kIndexGroupRows];  // no candidate is outside
  uint32_t threshold[kIndexGroupRows];                   // keys from here on join
  int32_t count[kIndexGroupRows];
  uint32_t nearly_full[4];  // by round
};

struct ScanArgs {
  KeyBoxes boxes;
  IndexTopkArgs topk;
  int num_stages, lines;
  int capacity;  // of a list
  bool has_pins;
};

// No logit up to here has a key of `threshold`; NaN where all have.
__device__ __forceinline__ float cut_of(uint32_t threshold) {
  const uint32_t key = threshold - (threshold > 0);
  return bits_float(key & kSignMask ? key ^ kSignMask : ~key);
}

template <int kHeads>
class Scan {
 public:
  __device__ __forceinline__ explicit Scan(const ScanArgs& args)
      : scan_(args),
        args_(args.topk),
        p_(args.topk.p),
        rows_(args.topk.p.problem.rows),
        memory_(dynamic_memory(args.num_stages, args.lines,
                               args.topk.p.problem.keys.layout == IndexLayoutId::kIndexFp4)),
        s_(shared()) {}

  __device__ __forceinline__ void run() {
    const int cta = blockIdx.x;
    s_.ring.init(scan_.boxes.are_used);
    if (threadIdx.x < 2) {
      mbarrier_init(shared_address(&s_.round[threadIdx.x]), kThreads / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
    if (memory_.is_fp4) s_.ring.init_magnitudes();
    find_share<kThreads>(rows_, args_.group_rows, kTileKeys, cta, args_.num_ctas, s_.share);
    __syncthreads();
    const int64_t begin = cta * s_.share.per_cta, end = min(s_.share.total, begin + s_.share.per_cta);
    if (threadIdx.x == 0) {
      args_.state(cta)->unit = -1;
      args_.state(cta)->per_cta = s_.share.per_cta;
      s_.begin = begin;
      s_.end = end;
      set_work(0, s_.share.first_tile);
    }
    if (begin >= end) return;
    __syncthreads();
    scan_units();
  }

 private:
  __device__ __forceinline__ static ScanShared& shared() {
    __shared__ ScanShared memory;
    return memory;
  }

  __device__ __forceinline__ IndexUnit& unit(int i) const { return i % 2 ? s_.other : s_.share.unit; }
  __device__ __forceinline__ void set_work(int i, int64_t unit_begin) const {
    const int64_t unit_end = unit_begin + num_tiles(unit(i), kTileKeys);
    const int64_t first = max(s_.begin, unit_begin), last = min(s_.end, unit_end);
    s_.works[i % 2] = {unit_begin, unit_end,
                       static_cast<int32_t>(unit(i).begin + (first - unit_begin) * kTileKeys),
                       static_cast<int>(last - first)};
  }

  __device__ __forceinline__ void scan_units() {
    Math<kHeads> math(memory_, s_.ring, scan_.boxes.are_used);
    Fetch fetch(p_.problem.keys, scan_.boxes, args_.page_size, memory_, s_.ring);
    const int lane = threadIdx.x % kWarpSize;
    int round = 0;
    for (int i = 0;; ++i) {
      const IndexUnit& unit = this->unit(i);
      const ScanWork& work = s_.works[i % 2];
      fetch.begin(unit, work.column, work.tiles, math.place());
      load_queries<kHeads>(p_.problem.queries, unit, memory_);
      if (threadIdx.x < kIndexGroupRows) {
        const int r = threadIdx.x;
        s_.count[r] = 0;
        s_.threshold[r] = 0;
        s_.low[r] = 0;
        s_.nearly_full[r] = 0;
      }
      if (threadIdx.x == kThreads - 1 && work.unit_end < s_.end) {
        next_unit(rows_, args_.group_rows, unit, this->unit(i + 1));
        set_work(i + 1, work.unit_end);
      }
      __syncthreads();
      math.begin(unit.num_rows);
      // No logit of the lane's row up to here joins; the comparison is false for all that a pin may lift.
      float cuts[Math<kHeads>::kPairs];
      const auto find_cuts = [&] {
#pragma unroll
        for (int pair = 0; pair < Math<kHeads>::kPairs; ++pair)
          cuts[pair] = !math.has_row(pair) ? INFINITY
                       : scan_.has_pins    ? NAN
                                           : cut_of(s_.threshold[math.row(pair)]);
      };
      find_cuts();
      for (int t = 0; t < work.tiles; ++t, ++round) {
        fetch.next_tile(unit, work.column, work.tiles, t);
        if (round >= 2) {
          mbarrier_wait(shared_address(&s_.round[round % 2]), (round / 2 - 1) & 1);
          if (s_.nearly_full[(round - 2) % 4]) {
            call_shrink_lists(scan_, unit.num_rows);
            find_cuts();
            math.load_weights();
          }
        }
        const int32_t first = work.column + t * kTileKeys;
        math.next_tile([&](int pair, int key, float logit, bool present) {
          const bool passes = !(logit <= cuts[pair]);
          if (__any_sync(kFullWarp, passes))
            join(unit, math.row(pair), passes && present && math.has_row(pair), first + key, logit, round);
        });
        mbarrier_arrive_warp(shared_address(&s_.round[round % 2]), lane);
      }
      math.end();
      call_finish(scan_, i);
      if (work.unit_end >= s_.end) return;
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint64_t* list(int r) const {
    return reinterpret_cast<uint64_t*>(memory_.end()) + r * scan_.capacity;
  }
  __device__ __forceinline__ int32_t limit() const { return scan_.capacity - kListSlack; }

  // The columns of a warp that its two rows may choose join their lists; the upper lanes of each quad have
  // the second row.
  __device__ __forceinline__ void join(const IndexUnit& unit, int r, bool joins, int32_t column, float logit,
                                       int round) const {
    const IndexRow& where = unit.rows[r];
    uint32_t rank = order_key(logit);
    if (scan_.has_pins && p_.is_pinned(where, column)) rank = kPinnedKey;
    joins &= (column >= where.begin) & (column < where.end) & (rank >= s_.threshold[r]);
    const uint32_t lanes = __ballot_sync(kFullWarp, joins);
    if (lanes == 0) return;
    const int lane = threadIdx.x % kWarpSize, leader = lane & 2;
    const uint32_t own = lanes & 0x33333333u << leader;  // of the same row
    int32_t place = 0;
    if (lane == leader && own) {
      place = atomicAdd(&s_.count[r], __popc(own));
      if (place + __popc(own) > limit()) s_.nearly_full[round % 4] = 1;
    }
    place = __shfl_sync(kFullWarp, place, leader) + __popc(own & ((1u << lane) - 1));
    if (joins) list(r)[place] = order_of(rank, column);
  }

  // Calls fn(team, r, memory) for each row: a row to a warpgroup, or all warpgroups for the only one.
  template <class Fn>
  __device__ __forceinline__ void for_rows(int num_rows, const Fn& fn) const {
    MathTeam::sync();
    if (num_rows == 1) {
      fn(MathTeam{}, 0, s_.select);
    } else if (const int r = threadIdx.x / kGroup; r < num_rows) {
      fn(GroupTeam{}, r, s_.group_select[r]);
    }
    MathTeam::sync();
  }

  // The largest candidate of a list.
  template <class Team>
  __device__ __forceinline__ uint64_t highest(int r, const CandidateList& candidates) const {
    if (Team::thread() == 0) s_.high[r] = 0;
    Team::sync();
    uint64_t own = 0;
    candidates.visit<Team>([&](uint64_t order) { own = max(own, order); });
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2)
      own = max(own, __shfl_xor_sync(kFullWarp, own, offset));
    if (threadIdx.x % kWarpSize == 0) atomicMax(reinterpret_cast<unsigned long long*>(&s_.high[r]), own);
    Team::sync();
    return s_.high[r];
  }

  // To the best topk and at most `spare` more.
  template <class Team>
  __device__ __forceinline__ void shrink(const Team& team, int r, int32_t spare,
                                         typename Team::Smem& select) const {
    const CandidateList candidates{list(r), s_.count[r]};
    const uint64_t least =
        kth_order(team, candidates, p_.topk, spare, s_.low[r], highest<Team>(r, candidates), select);
    keep_from<Team>(least, list(r), candidates.count, select);
    if (Team::thread() == 0) {
      const uint32_t key = static_cast<uint32_t>(least >> 32);
      s_.count[r] = select.kept;
      s_.low[r] = least;
      s_.threshold[r] = key + 1;  // an equal one that comes later is behind topk others
    }
    Team::sync();
  }

  __device__ __forceinline__ void shrink_lists(int num_rows) const {
    const int32_t room = limit() - p_.topk;
    for_rows(num_rows, [&](const auto& team, int r, auto& select) {
      if (s_.count[r] > p_.topk + room / 2) shrink(team, r, room / 8, select);
    });
    if (threadIdx.x < 4) s_.nearly_full[threadIdx.x] = 0;
    MathTeam::sync();
  }

  // Answers a unit that this CTA saw whole; leaves what it has of another for the merge.
  __device__ __forceinline__ void finish(int i) const {
    const IndexUnit& unit = this->unit(i);
    const ScanWork& work = s_.works[i % 2];
    const bool is_earlier = s_.begin > work.unit_begin, is_whole = !is_earlier && work.unit_end <= s_.end;
    for_rows(unit.num_rows, [&](const auto& team, int r, auto& select) {
      using Team = std::decay_t<decltype(team)>;
      if (is_whole) {
        const CandidateList candidates{list(r), s_.count[r]};
        const uint64_t high = candidates.count > p_.topk ? highest<Team>(r, candidates) : 0;
        select_and_emit<Team>(
            {p_, unit.first_row + r, unit.rows[r]}, candidates, candidates.count, s_.low[r], high,
            [&](const IndexRow& where, int32_t c) { return args_.slot(where, c); }, select);
        return;
      }
      if (s_.count[r] > p_.topk) shrink(team, r, 0, select);
      uint64_t* to = is_earlier ? args_.earlier(blockIdx.x, r) : args_.list(blockIdx.x, r);
      for (int i = Team::thread(); i < s_.count[r]; i += Team::kThreads) to[i] = list(r)[i];
    });
    if (!is_whole && threadIdx.x == 0)
      write_state(*args_.state(blockIdx.x), unit, is_earlier, work.unit_begin, work.unit_end, s_.count);
  }

  // Calls, so that they take no registers of the tiles' loop; of no object, or that would lie in memory.
  __device__ __noinline__ static void call_shrink_lists(const ScanArgs& args, int num_rows) {
    Scan(args).shrink_lists(num_rows);
  }
  __device__ __noinline__ static void call_finish(const ScanArgs& args, int i) { Scan(args).finish(i); }

  const ScanArgs& scan_;
  const IndexTopkArgs& args_;
  const IndexTopkParams& p_;
  const IndexRows& rows_;
  const Memory memory_;
  ScanShared& s_;
};

}  // namespace mla_fp8::gpu::sm90_index
