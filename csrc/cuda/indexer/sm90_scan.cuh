#pragma once
// The scan of index_topk on Hopper: the shares of scan.cuh, with lists in shared memory. Warps meet only
// when a list is nearly full: each counts its rounds (a tile), and looks at the round two before its own,
// which all have finished, for whether a list was nearly full then.
//
//   barrier     arrivals            a phase is
//   round[i]    16 warps            a round of the same parity, its logits in the lists
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_lists.cuh"
#include "cuda/indexer/sm90_math.cuh"

namespace mla_fp8::gpu::sm90_index {

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
        memory_(dynamic_memory(args.num_stages, args.lines, args.panels,
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
    else if (scan_.boxes.are_used && threadIdx.x == 0) prefetch_tensor_map(scan_.boxes.map);
    find_share<kThreads>(rows_, p_.topk, args_.group_rows, kTileKeys, cta, args_.num_ctas, s_.share,
                         s_.units[0]);
    __syncthreads();
    const int64_t begin = cta * s_.share.per_cta, end = min(s_.share.total, begin + s_.share.per_cta);
    if (threadIdx.x == 0) {
      args_.state(cta)->unit = -1;
      args_.state(cta)->per_cta = s_.share.per_cta;
      s_.begin = begin;
      s_.end = end;
      if (begin < end) set_work(0, s_.share.first_tile);  // else there is no unit
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

  __device__ __forceinline__ IndexUnit& unit(int i) const { return s_.units[i % 2]; }
  __device__ __forceinline__ void set_work(int i, int64_t unit_begin) const {
    const int64_t unit_end = unit_begin + num_tiles(unit(i), kTileKeys, p_.topk);
    const int64_t first = max(s_.begin, unit_begin), last = min(s_.end, unit_end);
    const auto column = static_cast<int32_t>(unit(i).begin + (first - unit_begin) * kTileKeys);
    const auto tiles = static_cast<int>(last - first);
    int32_t begin = unit(i).rows[0].begin, end = unit(i).rows[0].end;
    for (int r = 1; r < unit(i).num_rows; ++r) {
      begin = max(begin, unit(i).rows[r].begin);
      end = min(end, unit(i).rows[r].end);
    }
    const int inside = max(begin - column + kTileKeys - 1, 0) / kTileKeys;
    const int num_inside = scan_.has_pins ? 0 : min(max(end - column, 0) / kTileKeys, tiles) - inside;
    s_.works[i % 2] = {unit_begin, unit_end, column, tiles, inside, max(num_inside, 0)};
  }

  // The unit behind the i-th.
  __device__ __forceinline__ void prepare_next(int i) const {
    const ScanWork& work = s_.works[i % 2];
    if (threadIdx.x != kThreads - 1 || work.unit_end >= s_.end) return;
    next_unit(rows_, args_.group_rows, unit(i), unit(i + 1));
    set_work(i + 1, work.unit_end);
  }

  __device__ __forceinline__ void scan_units() {
    using TileMath = Math<kHeads>;
    TileMath math(memory_, s_.ring, scan_.boxes.are_used, scan_.may_take_two);
    Fetch fetch(p_.problem.keys, scan_.boxes, args_.page_size, memory_, s_.ring);
    const int lane = threadIdx.x % kWarpSize, chunk = list_chunk(args_.group_rows);
    int round = 0;
    for (int i = 0;; ++i) {
      const IndexUnit& unit = this->unit(i);
      const ScanWork& work = s_.works[i % 2];
      const int32_t column = work.column;
      const int tiles = work.tiles;
      if (takes_all(unit, p_.topk)) {
        prepare_next(i);
        call_answer_all(scan_, i);
        if (work.unit_end >= s_.end) return;
        __syncthreads();
        continue;
      }
      fetch.begin(unit, column, tiles, math.place());
      load_queries<kHeads>(p_.problem.queries, unit, memory_);
      math.begin(unit.num_rows);
      if (threadIdx.x < kIndexGroupRows) {
        const int r = threadIdx.x;
        s_.count[r] = math.row_warps() * chunk;
        s_.unfilled[r] = 0;
        s_.threshold[r] = 0;
        s_.low[r] = 0;
        s_.nearly_full[r] = 0;
      }
      prepare_next(i);
      __syncthreads();
      math.load_weights();
      // No logit of the lane's row up to here joins; the comparison is false for all that a pin may lift.
      float cuts[TileMath::kPairs];
      // The warp's places of the lists, from the next one on.
      int32_t places[TileMath::kPairs], ends[TileMath::kPairs];
#pragma unroll
      for (int pair = 0; pair < TileMath::kPairs; ++pair) {
        cuts[pair] = math.has_row(pair) ? NAN : INFINITY;
        places[pair] = math.row_warp() * chunk;
        ends[pair] = places[pair] + chunk;
      }
      for (int t = 0; t < tiles; ++round) {
        const bool takes_two = math.takes_two() && t + 1 < tiles;
        fetch.next_tile(unit, column, tiles, t + takes_two);
        if (round >= 2) {
          mbarrier_wait(shared_address(&s_.round[round % 2]), (round / 2 - 1) & 1);
          if (s_.nearly_full[(round - 2) % 4]) {
            settle(math, places, ends);
            call_shrink_lists(scan_, unit.num_rows);
#pragma unroll
            for (int pair = 0; pair < TileMath::kPairs; ++pair) {
              if (!math.has_row(pair)) continue;
              const int r = math.row(pair), kept = s_.kept[r];
              if (!scan_.has_pins) cuts[pair] = cut_of(s_.threshold[r]);
              if (kept < 0) continue;
              places[pair] = kept + math.row_warp() * chunk;
              ends[pair] = places[pair] + chunk;
            }
            math.load_weights();
          }
        }
        const int32_t first = column + t * kTileKeys;
        const int inside = t - work.inside;  // of all rows
        const bool is_inside = inside >= 0 && inside + takes_two < work.num_inside;
        const auto sink = [&](int pair, int key, float logit, bool present) {
          bool joins = !(logit <= cuts[pair]);
          if (!__any_sync(kFullWarp, joins)) return;
          joins &= present & math.has_row(pair);
          const int32_t column = first + key;
          uint32_t rank = order_key(logit);
          if (is_inside) joins &= rank > 0 || isnan(cuts[pair]);  // once a list shrank, not with a NaN
          else
            joins = joins && may_join(unit.rows[math.row(pair)], s_.threshold[math.row(pair)], column, rank);
          join(math, math.row(pair), joins, order_of(rank, column), places[pair], ends[pair], round);
        };
        if (takes_two) math.next_two_tiles(sink);
        else math.next_tile(sink);
        mbarrier_arrive_warp(shared_address(&s_.round[round % 2]), lane);
        t += 1 + takes_two;
      }
      math.end();
      settle(math, places, ends);
      call_finish(scan_, i);
      if (work.unit_end >= s_.end) return;
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint64_t* list(int r) const {
    return reinterpret_cast<uint64_t*>(memory_.end()) + r * scan_.capacity;
  }
  __device__ __forceinline__ int32_t limit(int warps) const {
    return scan_.capacity - list_slack(args_.group_rows, warps);
  }
  // Of any column. A pin lifts its rank.
  __device__ __forceinline__ bool may_join(const IndexRow& where, uint32_t threshold, int32_t column,
                                           uint32_t& rank) const {
    if (scan_.has_pins && p_.is_pinned(where, column)) rank = kPinnedKey;
    return column >= where.begin && column < where.end && rank >= threshold;
  }

  // What joins goes to the warp's places of the list of row r, the lane's; `place` to `end` are free.
  __device__ __forceinline__ void join(const Math<kHeads>& math, int r, bool joins, uint64_t order,
                                       int32_t& place, int32_t& end, int round) const {
    const uint32_t lanes = __ballot_sync(kFullWarp, joins), own = lanes & math.row_lanes();
    const int lane = threadIdx.x % kWarpSize, count = __popc(own), left = end - place;
    if (list_chunk(args_.group_rows) == 0) {
      if (lanes != 0) join_at_once(r, joins, order, own, round);
      return;
    }
    int32_t to = place + __popc(own & ((1u << lane) - 1));
    place += count;
    if (__any_sync(kFullWarp, count > left)) {
      const int chunk = list_chunk(args_.group_rows), leader = __ffs(math.row_lanes()) - 1;
      int32_t next = 0;
      if (lane == leader && count > left) {
        next = atomicAdd(&s_.count[r], chunk);
        if (next + chunk > limit(math.row_warps())) s_.nearly_full[round % 4] = 1;
      }
      next = __shfl_sync(kFullWarp, next, leader);
      if (count > left) {
        if (to >= end) to += next - end;
        place += next - end;
        end = next + chunk;
      }
    }
    if (joins) list(r)[to] = order;
  }

  // The same, of lists without places of a warp; the upper lanes of each quad have the second row.
  __device__ __forceinline__ void join_at_once(int r, bool joins, uint64_t order, uint32_t own,
                                               int round) const {
    const int lane = threadIdx.x % kWarpSize, leader = lane & 2;
    int32_t to = 0;
    if (lane == leader && own) {
      to = atomicAdd(&s_.count[r], __popc(own));
      if (to + __popc(own) > limit(0)) s_.nearly_full[round % 4] = 1;
    }
    to = __shfl_sync(kFullWarp, to, leader) + __popc(own & ((1u << lane) - 1));
    if (joins) list(r)[to] = order;
  }

  // Before all threads look at the lists: fillers to places that were not filled.
  __device__ __forceinline__ void settle(const Math<kHeads>& math,
                                         const int32_t (&places)[Math<kHeads>::kPairs],
                                         const int32_t (&ends)[Math<kHeads>::kPairs]) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t lanes = math.row_lanes();
#pragma unroll
    for (int pair = 0; pair < Math<kHeads>::kPairs; ++pair) {
      if (!math.has_row(pair)) continue;
      const int r = math.row(pair), before = __popc(lanes & ((1u << lane) - 1));
      for (int i = places[pair] + before; i < ends[pair]; i += __popc(lanes)) list(r)[i] = kFiller;
      if (before == 0) atomicAdd(&s_.unfilled[r], ends[pair] - places[pair]);
    }
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
  // Candidates of a list.
  __device__ __forceinline__ int32_t filled(int r) const { return s_.count[r] - s_.unfilled[r]; }

  __device__ __forceinline__ void shrink_lists(int num_rows) const {
    const int warps = kThreads / kWarpSize / (kHeads == 64 && num_rows > 2 ? 2 : 1);
    const int32_t room = limit(warps) - p_.topk, places = warps * list_chunk(args_.group_rows);
    for_rows(num_rows, [&](const auto& team, int r, auto& select) {
      using Team = std::decay_t<decltype(team)>;
      const bool shrinks = filled(r) > p_.topk + room / 2;
      if (shrinks) shrink(team, r, room / 8, select);
      Team::sync();
      if (Team::thread() == 0) {
        s_.kept[r] = shrinks ? s_.count[r] : -1;
        s_.count[r] += shrinks ? places : 0;
        s_.unfilled[r] = 0;
      }
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
        const int32_t total = filled(r);
        const uint64_t high = total > p_.topk ? highest<Team>(r, candidates) : 0;
        select_and_emit<Team>(
            {p_, unit.first_row + r, unit.rows[r]}, candidates, total, s_.low[r], high,
            [&](const IndexRow& where, int32_t c) { return args_.slot(where, c); }, select);
        return;
      }
      if (filled(r) > p_.topk) shrink(team, r, 0, select);
      leave<Team>(r, is_earlier ? args_.earlier(blockIdx.x, r) : args_.list(blockIdx.x, r), select);
    });
    if (!is_whole && threadIdx.x == 0)
      write_state(*args_.state(blockIdx.x), unit, is_earlier, work.unit_begin, work.unit_end, s_.count);
  }

  // The candidates of a list, in any order.
  template <class Team>
  __device__ __forceinline__ void leave(int r, uint64_t* to, typename Team::Smem& select) const {
    if (Team::thread() == 0) select.kept = 0;
    Team::sync();
    const int32_t count = s_.count[r], lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int32_t first = Team::thread() - lane; first < count; first += Team::kThreads) {
      const uint64_t order = first + lane < count ? list(r)[first + lane] : kFiller;
      const uint32_t lanes = __ballot_sync(kFullWarp, order != kFiller);
      int32_t place = 0;
      if (lane == 0) place = atomicAdd(&select.kept, __popc(lanes));
      place = __shfl_sync(kFullWarp, place, 0) + __popc(lanes & ((1u << lane) - 1));
      if (order != kFiller) to[place] = order;
    }
    Team::sync();
    if (Team::thread() == 0) s_.count[r] = select.kept;
  }

  // Calls, so that they take no registers of the tiles' loop; of no object, or that would lie in memory.
  __device__ __noinline__ static void call_shrink_lists(const ScanArgs& args, int num_rows) {
    Scan(args).shrink_lists(num_rows);
  }
  __device__ __noinline__ static void call_finish(const ScanArgs& args, int i) { Scan(args).finish(i); }
  __device__ __noinline__ static void call_answer_all(const ScanArgs& args, int i) {
    args.topk.answer_all<MathTeam>(shared().units[i % 2], shared().select);
  }

  const ScanArgs& scan_;
  const IndexTopkArgs& args_;
  const IndexTopkParams& p_;
  const IndexRows& rows_;
  const Memory memory_;
  ScanShared& s_;
};

}  // namespace mla_fp8::gpu::sm90_index
