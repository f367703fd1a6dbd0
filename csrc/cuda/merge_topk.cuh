#pragma once
// A block merges a row's lists of candidates. Its threads keep the first 4096 of them, and read the others
// from the L2 in each pass. Histograms of indexer/select.cuh between the least and the largest score find the
// k-th candidate. Those not below it are gathered in shared memory and sorted. Bound by the latency of four
// passes and some thirty barriers.
#include "cuda/device/divide.cuh"
#include "cuda/indexer/select.cuh"
#include "ops/merge_topk.h"

namespace mla_fp8::gpu {

inline constexpr int kMergeTopkThreads = 1024;
using MergeTopkTeam = BlockTeam<kMergeTopkThreads>;

struct MergeTopkSmem {
  MergeTopkTeam::Smem team;
  int32_t equals;
};

// Each thread has four candidates that are `threads` apart, of every 4 * threads. It keeps the first four.
class RankCandidates {
 public:
  template <class Team>
  __device__ __forceinline__ RankCandidates(const Team& team, const MergeTopkParams& p,
                                            const Divider& per_list, int64_t row)
      : p_(p), per_list_(per_list), row_(row) {
    load(team, 0, kept_);
  }

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    Four found;
#pragma unroll
    for (int j = 0; j < 4; ++j) found[j] = kept_[j];
#pragma unroll 1
    for (int64_t first = 4 * team.threads();; first += 4 * team.threads()) {
      visit_four(found);
      if (first >= p_.num_candidates()) break;
      load(team, first, found);
    }
  }

 private:
  template <class Team>
  __device__ __forceinline__ void load(const Team& team, int64_t first, Four& found) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t i = first + team.thread() + j * team.threads(), list = per_list_(i);
      found[j] = i < p_.num_candidates() ? p_.order(row_, i, list, i - list * p_.per_list) : kNoCandidate;
    }
  }

  const MergeTopkParams& p_;
  const Divider& per_list_;
  const int64_t row_;
  Four kept_;
};

// Sorts numbers, ascending, by a bitonic network. Runs of 128 numbers are those of a warp, four in each lane:
// steps within them take shuffles, and longer ones shared memory. x has room for the next power of two of
// `count` from 128 on.
template <class Team>
__device__ __forceinline__ void sort_ascending(const Team& team, int32_t* x, int32_t count) {
  constexpr int kEach = 4, kRun = kEach * kWarpSize;
  const int own = kEach * team.thread();
  int places = kRun;
  while (places < count) places *= 2;
  for (int i = count + team.thread(); i < places; i += team.threads()) x[i] = INT32_MAX;
#pragma unroll 1
  for (int size = kRun; size <= places; size *= 2) {
    for (int step = size / 2; step >= kRun; step /= 2) {
      team.sync();
      for (int i = team.thread(); i < places / 2; i += team.threads()) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const int32_t low = min(x[a], x[b]), high = max(x[a], x[b]);
        const bool ascends = (a & size) == 0;
        x[a] = ascends ? low : high;
        x[b] = ascends ? high : low;
      }
    }
    team.sync();
    if (own >= places) continue;  // whole warps
    int32_t v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) v[j] = x[own + j];
    // The first time a run is sorted from pairs on; later it only ends a merge.
#pragma unroll 1
    for (int part = size == kRun ? 2 : size; part <= size; part *= 2) {
#pragma unroll 1
      for (int step = min(part, kRun) / 2; step >= kEach; step /= 2) {
        const bool takes_low = ((own & part) == 0) == ((own & step) == 0);
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int32_t other = __shfl_xor_sync(kFullWarp, v[j], step / kEach);
          v[j] = takes_low ? min(v[j], other) : max(v[j], other);
        }
      }
#pragma unroll
      for (int step = kEach / 2; step > 0; step /= 2) {
        if (step >= part) continue;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          if (j & step) continue;
          const int32_t low = min(v[j], v[j + step]), high = max(v[j], v[j + step]);
          const bool ascends = ((own + j) & part) == 0;
          v[j] = ascends ? low : high;
          v[j + step] = ascends ? high : low;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[own + j] = v[j];
  }
  team.sync();
}

// Writes the positions of a row. Returns how many there are; they are in smem.team.staged, too.
__device__ __forceinline__ int32_t merge_row(const MergeTopkParams& p, const Divider& per_list, int64_t row,
                                             MergeTopkSmem& smem) {
  const MergeTopkTeam team{smem.team};
  const RankCandidates candidates(team, p, per_list, row);
  int32_t* const staged = smem.team.staged;
  const Survey found = survey(team, candidates);
  uint64_t least = kLeastOrder;
  if (found.count > p.topk)
    least = kth_order(team, candidates, p.topk, uint64_t{found.low} << 32,
                      uint64_t{found.high} << 32 | UINT32_MAX);
  if (team.thread() == 0) smem.equals = smem.team.scalars.kept = 0;
  team.sync();
  // If the caller gave entries twice, more than topk may be not below `least`: the surplus equals `least`.
  candidates.visit(team, [&](const Four& orders) {
    int32_t positions[4];
    uint32_t keep = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      positions[j] = orders[j] > least ? p.answer(row, orders[j]) : -1;
      keep |= static_cast<uint32_t>(positions[j] >= 0) << j;
      if (orders[j] == least) atomicAdd(&smem.equals, 1);
    }
    append(team, positions, keep, staged);
  });
  team.sync();
  const int32_t above = smem.team.scalars.kept, filled = min(smem.equals, p.topk - above);
  const int32_t last = filled > 0 ? p.answer(row, least) : -1;
  const int32_t count = last < 0 ? above : above + filled;
  for (int32_t i = above + team.thread(); i < count; i += team.threads()) staged[i] = last;
  sort_ascending(team, staged, count);
  int32_t* out = p.out_positions + row * p.out_positions_stride_row;
  for (int i = team.thread(); i < p.topk; i += team.threads()) out[i] = i < count ? staged[i] : -1;
  return count;
}

}  // namespace mla_fp8::gpu
