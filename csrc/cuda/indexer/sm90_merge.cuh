#pragma once
// The merge of index_topk on Hopper: a cluster for a row, each CTA with some of the parts in shared memory; a
// row of few candidates is the first one's alone, as a barrier of a cluster takes a fence of the GPU.
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/indexer/merge.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kMergeThreads = 512;
inline constexpr int kMergeEntries = 24 * 1024;  // that a CTA holds; of more it reads the workspace again
inline constexpr int kAloneEntries = 12 * 1024;  // up to which the first CTA takes all
inline constexpr int kMergeSharedBytes = kMergeEntries * 8;

struct MergeShared {
  SelectSmem<11> select;
  uint32_t totals[SelectSmem<11>::kBins];
  uint64_t copied;
  int32_t total, own, kept;  // candidates of the cluster, places and chosen ones of the block
};

// The threads of a cluster; each block has a histogram of its own candidates.
struct ClusterTeam {
  static constexpr int kThreads = kMergeThreads, kMostBlocks = 8;
  using Smem = SelectSmem<11>;
  uint32_t* totals;
  int size, rank;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  // Of all blocks.
  __device__ __forceinline__ void sync_all() const {
    if (size == 1) __syncthreads();
    else cluster_sync();
  }
  // Each block adds up its share of the bins, and tells all.
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const {
    if (size == 1) return bins;
    const int share = Smem::kBins / size;
    cluster_sync();
    for (int i = threadIdx.x; i < share; i += kThreads) {
      const int bin = rank * share + i;
      uint32_t parts[kMostBlocks], sum = 0;  // in flight together
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r)
        parts[r] = r < size ? load_cluster_4(cluster_address(shared_address(bins + bin), r)) : 0;
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r) sum += parts[r];
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r)
        if (r < size) store_cluster_4(cluster_address(shared_address(totals + bin), r), sum);
    }
    cluster_sync();
    return totals;
  }
};

// Parts [first, last) of a job.
struct ScatteredParts {
  const IndexTopkArgs& args;
  const MergeJob& job;
  int first, last;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Visit& visit_one) const {
    for (int i = first; i < last; ++i) job.part(args, i).template visit<Team>(visit_one);
  }
};

template <class Candidates>
__device__ __forceinline__ void answer(const IndexTopkArgs& args, const MergeJob& job,
                                       const ClusterTeam& team, const Candidates& candidates, int32_t total,
                                       int64_t begin, int64_t end, MergeShared& s) {
  const IndexTopkParams& p = args.p;
  const uint64_t least =
      total > p.topk ? kth_order(team, candidates, p.topk, 0, 0, ~uint64_t{0}, s.select) : 0;
  int32_t own = 0;
  candidates.template visit<ClusterTeam>([&](uint64_t order) { own += order >= least && order != kFiller; });
  own = team_inclusive_sum<ClusterTeam>(own, s.select.sums);
  if (threadIdx.x == kMergeThreads - 1) s.kept = own;
  team.sync_all();
  int32_t place = 0;
  for (int r = 0; r < team.rank; ++r) place += load_cluster_4(cluster_address(shared_address(&s.kept), r));
  emit_from<ClusterTeam>(
      {p, job.out_row, job.where}, candidates, least, {place, s.kept, begin, end},
      [&](const IndexRow& where, int32_t column) { return args.slot(where, column); }, s.select);
  if (team.rank == 0) emit_end<ClusterTeam>(p, job.out_row, min(total, p.topk));
  team.sync_all();  // nobody reads `kept` any more
}

__device__ __forceinline__ void merge(const IndexTopkArgs& args, MergeShared& s, uint64_t* held) {
  ClusterTeam team{s.totals, cluster_size(), cluster_rank()};
  MergeJob job;
  if (!find_merge<kMergeThreads>(args, static_cast<int>(blockIdx.x) / team.size, job)) return;
  const int parts = job.num_parts(), i = threadIdx.x;
  const CandidateList part = i < parts ? job.part(args, i) : CandidateList{nullptr, 0};
  const int32_t all = team_inclusive_sum<ClusterTeam>(part.count, s.select.sums);
  if (i == kMergeThreads - 1) s.total = all;
  __syncthreads();
  if (s.total <= kAloneEntries) {  // the same in all blocks
    if (team.rank > 0) return;
    team.size = 1;
  }
  const int first = parts * team.rank / team.size, last = parts * (team.rank + 1) / team.size;
  const int32_t entries = i >= first && i < last ? (part.count + 1) / 2 * 2 : 0;
  const uint32_t bar = shared_address(&s.copied);
  if (i == 0) {
    mbarrier_init(bar, kMergeThreads);
    mbarrier_init_fence();
  }
  const int32_t end = team_inclusive_sum<ClusterTeam>(entries, s.select.sums);
  if (i == kMergeThreads - 1) s.own = end;
  __syncthreads();
  const int64_t begin_column = job.part_begin(args, first), end_column = job.part_begin(args, last);
  if (s.own > kMergeEntries) {
    const ScatteredParts scattered{args, job, first, last};
    return answer(args, job, team, scattered, s.total, begin_column, end_column, s);
  }
  if (entries > 0) {
    mbarrier_arrive_expect(bar, entries * 8);
    bulk_copy(shared_address(held + end - entries), part.orders, entries * 8, bar);
  } else {
    mbarrier_arrive(bar);
  }
  mbarrier_wait(bar, 0);
  if (entries > part.count) held[end - 1] = kFiller;
  __syncthreads();
  answer(args, job, team, CandidateList{held, s.own}, s.total, begin_column, end_column, s);
}

}  // namespace mla_fp8::gpu::sm90_index
