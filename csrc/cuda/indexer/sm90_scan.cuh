#pragma once
// The scan of index_topk on Hopper: the shares of scan.cuh, with lists in shared memory. The warps that
// multiply meet only when a list is nearly full: each counts its rounds (a tile), and looks at the round two
// before its own, which all have finished, for whether a list was nearly full then.
//
//   barrier     arrivals            a phase is
//   round[i]    16 warps            a round of the same parity, its logits in the lists
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_math.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kListSlack = 2 * kTileKeys;  // what joins a list after a look at it
MLA_HD constexpr int list_capacity(int topk) { return topk > 2048 ? 2 * topk : 4096; }

struct ScanShared {
  Barriers ring;
  uint64_t round[2];
  IndexShare share;  // with the first unit, and every other one behind it
  IndexUnit other;
  union {
    MathTeam::Smem select;
    GroupTeam::Smem group_select[kGroups];
  };
  uint64_t low[kIndexGroupRows], high[kIndexGroupRows];  // no candidate is outside
  uint32_t threshold[kIndexGroupRows];                   // keys from here on join
  float cut[kIndexGroupRows];                            // no logit up to here does
  int32_t count[kIndexGroupRows];
  uint32_t nearly_full[4];  // by round
};

// The largest logit of a key, or NaN, which no logit is below.
__device__ __forceinline__ float logit_of(uint32_t key) {
  return bits_float(key & kSignMask ? key ^ kSignMask : ~key);
}

template <int kHeads>
class Scan {
 public:
  __device__ __forceinline__ Scan(const IndexTopkArgs& args, const Memory& memory, ScanShared& shared)
      : args_(args), p_(args.p), rows_(args.p.problem.rows), memory_(memory), s_(shared) {}

  __device__ __forceinline__ void run() {
    const int cta = blockIdx.x;
    if (threadIdx.x == 0) {
      s_.ring.init();
      for (uint64_t& bar : s_.round)
        mbarrier_init(shared_address(&bar), kMathThreads / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
    find_share<kThreads>(rows_, args_.group_rows, kTileKeys, cta, args_.num_ctas, s_.share);
    __syncthreads();
    begin_ = cta * s_.share.per_cta;
    end_ = min(s_.share.total, begin_ + s_.share.per_cta);
    if (threadIdx.x == 0) {
      args_.state(cta)->unit = -1;
      args_.state(cta)->per_cta = s_.share.per_cta;
    }
    if (begin_ >= end_) return;
    if (threadIdx.x >= kMathThreads) {
      give_up_registers<kProducerRegisters>();
      produce();
    } else {
      take_registers<kMathRegisters>();
      consume();
    }
  }

 private:
  // Part of a unit that this CTA scans.
  struct Work {
    const IndexUnit& unit;
    int64_t unit_begin, unit_end;  // tiles
    int32_t column;
    int tiles;
  };
  __device__ __forceinline__ Work work(int i, int64_t unit_begin) const {
    const IndexUnit& unit = i % 2 ? s_.other : s_.share.unit;
    const int64_t unit_end = unit_begin + num_tiles(unit, kTileKeys);
    const int64_t first = max(begin_, unit_begin), last = min(end_, unit_end);
    return {unit, unit_begin, unit_end, static_cast<int32_t>(unit.begin + (first - unit_begin) * kTileKeys),
            static_cast<int>(last - first)};
  }

  __device__ __forceinline__ void produce() {
    Producer producer(p_.problem.keys, args_.page_size, memory_, s_.ring);
    int64_t unit_begin = s_.share.first_tile;
    for (int i = 0;; ++i) {
      const Work w = work(i, unit_begin);
      producer.run(w.unit, w.column, w.tiles);
      if (w.unit_end >= end_) return;
      if (threadIdx.x == kMathThreads)
        next_unit(rows_, args_.group_rows, w.unit, i % 2 ? s_.share.unit : s_.other);
      block_barrier<kThreads>();
      unit_begin = w.unit_end;
    }
  }

  __device__ __forceinline__ void consume() {
    Math<kHeads> math(memory_, s_.ring);
    const int lane = threadIdx.x % kWarpSize;
    const bool has_pins = p_.pin_first > 0 || p_.pin_last > 0;
    int64_t unit_begin = s_.share.first_tile;
    int round = 0;
    for (int i = 0;; ++i) {
      const Work w = work(i, unit_begin);
      const int num_rows = w.unit.num_rows;
      load_queries<kHeads>(p_.problem.queries, w.unit, memory_);
      if (threadIdx.x < kIndexGroupRows) {
        const int r = threadIdx.x;
        s_.count[r] = 0;
        s_.threshold[r] = 0;
        s_.cut[r] = logit_of(0);
        s_.low[r] = 0;
        s_.nearly_full[r] = 0;
      }
      MathTeam::sync();
      math.begin(num_rows);
      for (int t = 0; t < w.tiles; ++t, ++round) {
        if (round >= 2) {
          mbarrier_wait(shared_address(&s_.round[round % 2]), (round / 2 - 1) & 1);
          if (s_.nearly_full[(round - 2) % 4]) shrink_lists(num_rows);
        }
        const int32_t first = w.column + t * kTileKeys;
        math.next_tile([&](int r, bool valid, int key, float logit, bool present, auto is_pair) {
          const bool passes = valid && (has_pins || !(logit <= s_.cut[r]));
          if (__any_sync(kFullWarp, passes))
            join<is_pair>(w.unit, r, passes && present, first + key, logit, round);
        });
        mbarrier_arrive_warp(shared_address(&s_.round[round % 2]), lane);
      }
      math.end(w.tiles);
      finish(w);
      if (w.unit_end >= end_) return;
      block_barrier<kThreads>();
      unit_begin = w.unit_end;
    }
  }

  __device__ __forceinline__ uint64_t* list(int r) const {
    return reinterpret_cast<uint64_t*>(memory_.end()) + r * list_capacity(p_.topk);
  }
  __device__ __forceinline__ int32_t limit() const { return list_capacity(p_.topk) - kListSlack; }

  // The columns of a warp that the rows of the unit may choose join their lists.
  template <bool kIsPair>
  __device__ __forceinline__ void join(const IndexUnit& unit, int r, bool joins, int32_t column, float logit,
                                       int round) const {
    const IndexRow& where = unit.rows[r];
    uint32_t rank = order_key(logit);
    joins = joins && column >= where.begin && column < where.end;
    if (p_.is_pinned(where, column)) rank = kPinnedKey;
    joins = joins && rank >= s_.threshold[r];
    const uint32_t lanes = __ballot_sync(kFullWarp, joins);
    if (lanes == 0) return;
    const int lane = threadIdx.x % kWarpSize, leader = kIsPair ? lane & 2 : 0;
    const uint32_t own = kIsPair ? lanes & 0x33333333u << leader : lanes;  // of the same row
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
      s_.cut[r] = logit_of(key);
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
  __device__ __forceinline__ void finish(const Work& w) const {
    const IndexUnit& unit = w.unit;
    const bool is_earlier = begin_ > w.unit_begin, is_whole = !is_earlier && w.unit_end <= end_;
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
      write_state(*args_.state(blockIdx.x), unit, is_earlier, w.unit_begin, w.unit_end, s_.count);
  }

  const IndexTopkArgs& args_;
  const IndexTopkParams& p_;
  const IndexRows& rows_;
  const Memory& memory_;
  ScanShared& s_;
  int64_t begin_ = 0, end_ = 0;  // tiles of the CTA's share
};

}  // namespace mla_fp8::gpu::sm90_index
