#pragma once
// A block merges a row's lists of candidates. Histograms of indexer/select.cuh find the k-th of all
// candidates, each in a pass over the lists, which lie in the L2. Candidates not below the k-th are gathered
// and sorted in shared memory. Bound by the latency of four or five passes.
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

struct RankCandidates {
  const MergeTopkParams& p;
  const Divider& per_list;
  int64_t row;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    const int64_t count = p.num_candidates();
#pragma unroll 1
    for (int64_t first = team.thread(); first < count; first += 4 * team.threads()) {
      Four found;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t i = first + j * team.threads();
        const int64_t list = per_list(i);
        found[j] = i < count ? p.order(row, i, list, i - list * p.per_list) : kNoCandidate;
      }
      visit_four(found);
    }
  }
};

// Sorts numbers, ascending, by a bitonic network; x has room up to the next power of two of `count`.
template <class Team>
__device__ __forceinline__ void sort_ascending(const Team& team, int32_t* x, int32_t count) {
  int places = 1;
  while (places < count) places *= 2;
  for (int i = count + team.thread(); i < places; i += team.threads()) x[i] = INT32_MAX;
  for (int size = 2; size <= places; size *= 2)
    for (int step = size / 2; step > 0; step /= 2) {
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
}

// Writes the positions of a row. Returns how many there are; they are in smem.team.staged, too.
__device__ __forceinline__ int32_t merge_row(const RankCandidates& candidates, MergeTopkSmem& smem) {
  const MergeTopkTeam team{smem.team};
  const MergeTopkParams& p = candidates.p;
  int32_t* const staged = smem.team.staged;
  if (team.thread() == 0) smem.equals = 0;
  const uint64_t least = kth_order(team, candidates, p.topk, kLeastOrder, ~uint64_t{0});
  const auto put = [&](uint64_t order) {
    const int32_t position = p.answer(candidates.row, order);
    if (position >= 0) staged[atomicAdd(&smem.team.scalars.kept, 1)] = position;
  };
  // If the caller gave entries twice, more than topk may be not below `least`: the surplus equals `least`.
  candidates.visit(team, [&](const Four& orders) {
#pragma unroll
    for (const uint64_t order : orders) {
      if (order > least) put(order);
      if (order == least) atomicAdd(&smem.equals, 1);
    }
  });
  team.sync();
  const int32_t filled = min(smem.equals, p.topk - smem.team.scalars.kept);
  team.sync();
  for (int32_t i = team.thread(); i < filled; i += team.threads()) put(least);
  team.sync();
  const int32_t count = smem.team.scalars.kept;
  sort_ascending(team, staged, count);
  int32_t* out = p.out_positions + candidates.row * p.out_positions_stride_row;
  for (int i = team.thread(); i < p.topk; i += team.threads()) out[i] = i < count ? staged[i] : -1;
  return count;
}

}  // namespace mla_fp8::gpu
