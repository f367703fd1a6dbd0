#pragma once
// The merge of index_topk on Hopper: a cluster for a row, each CTA with some of the parts in shared memory; a
// row of few candidates is the first one's alone, as a barrier of a cluster takes a fence of the GPU.
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/indexer/merge.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kMergeThreads = 512;
// Entries that a CTA holds, alone on a multiprocessor or with another; of more it reads the workspace again.
inline constexpr int kMergeEntries = 24 * 1024, kMergeEntriesOfTwo = 10 * 1024;
inline constexpr int kAloneEntries = 12 * 1024;  // up to which the first CTA of a cluster takes all

struct MergeArgs {
  IndexTopkArgs topk;
  int entries;  // that a CTA has room for
};

struct MergeShared {
  static constexpr int kBins = 2048;
  alignas(16) uint32_t bins[kBins];
  uint32_t totals[kBins];
  int32_t staged[kMaxIndexTopk];
  SelectScalars select;
  uint64_t copied;
  int32_t total, own, kept;  // candidates of the cluster, places and chosen ones of the block
};

// The threads of a cluster; each block has a histogram of its own candidates.
struct ClusterTeam {
  static constexpr int kMostBlocks = 8, kBinsPerThread = MergeShared::kBins / kMergeThreads;
  MergeShared& s;
  int size, rank;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return s.bins; }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
  __device__ __forceinline__ int32_t* staged() const { return s.staged; }
  // Each block adds up its share of the bins, and tells all.
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const {
    if (size == 1) return bins;
    const int share = MergeShared::kBins / size;
    cluster_sync();
    for (int i = threadIdx.x; i < share; i += kMergeThreads) {
      const int bin = rank * share + i;
      uint32_t parts[kMostBlocks], sum = 0;  // in flight together
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r)
        parts[r] = r < size ? load_cluster_4(cluster_address(shared_address(bins + bin), r)) : 0;
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r) sum += parts[r];
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r)
        if (r < size) store_cluster_4(cluster_address(shared_address(s.totals + bin), r), sum);
    }
    cluster_sync();
    return s.totals;
  }
};

// Parts [first, last) of a job.
struct ScatteredParts {
  const IndexTopkArgs& args;
  const MergeJob& job;
  int first, last;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_one) const {
    for (int i = first; i < last; ++i) job.part(args, i).visit(team, visit_one);
  }
  template <class Team>
  __device__ __forceinline__ void mark(const Team& team, uint64_t least, int64_t begin, uint32_t* words,
                                       int num_words) const {
    mark_each(team, *this, least, begin, words, num_words);
  }
};

template <class Candidates>
__device__ __forceinline__ void answer(const IndexTopkArgs& args, const MergeJob& job,
                                       const ClusterTeam& team, const Candidates& candidates, int32_t total,
                                       int64_t begin, int64_t end) {
  const IndexTopkParams& p = args.p;
  MergeShared& s = team.s;
  uint64_t least = kLeastOrder;
  if (total > p.topk && team.size > 1) least = kth_order(team, candidates, p.topk, least, ~uint64_t{0});
  else if (total > p.topk) least = kth_surveyed(team, candidates, p.topk, survey(team, candidates));
  int32_t kept = min(total, p.topk), place = 0;
  if (team.size > 1) {
    int32_t own = 0;
    candidates.visit(team, [&](uint64_t order) { own += order >= least; });
    own = team_inclusive_sum(team, own);
    if (threadIdx.x == kMergeThreads - 1) s.kept = own;
    cluster_sync();
    kept = s.kept;
    for (int r = 0; r < team.rank; ++r) place += load_cluster_4(cluster_address(shared_address(&s.kept), r));
  }
  emit_from(team, IndexAnswer{p, job.out_row, job.where}, candidates, least, {place, kept, begin, end},
            [&](const IndexRow& where, int32_t column) { return args.slot(where, column); });
  if (team.rank == 0) emit_end(team, p, job.out_row, min(total, p.topk));
  if (team.size > 1) cluster_sync();  // nobody reads `kept` any more
}

__device__ __forceinline__ void merge(const MergeArgs& merge_args, MergeShared& s, uint64_t* held) {
  const IndexTopkArgs& args = merge_args.topk;
  ClusterTeam team{s, cluster_size(), cluster_rank()};
  MergeJob job;
  if (!find_merge<kMergeThreads>(args, static_cast<int>(blockIdx.x) / team.size, job)) return;
  const int parts = job.num_parts(), i = threadIdx.x;
  const CandidateList part = i < parts ? job.part(args, i) : CandidateList{nullptr, 0};
  const int32_t all = team_inclusive_sum(team, part.count);
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
  const int32_t end = team_inclusive_sum(team, entries);
  if (i == kMergeThreads - 1) s.own = end;
  __syncthreads();
  const int64_t begin_column = job.part_begin(args, first), end_column = job.part_begin(args, last);
  if (s.own > merge_args.entries) {
    const ScatteredParts scattered{args, job, first, last};
    return answer(args, job, team, scattered, s.total, begin_column, end_column);
  }
  if (entries > 0) {
    mbarrier_arrive_expect(bar, entries * 8);
    bulk_copy(shared_address(held + end - entries), part.orders, entries * 8, bar);
  } else {
    mbarrier_arrive(bar);
  }
  mbarrier_wait(bar, 0);
  if (entries > part.count) held[end - 1] = kNoCandidate;
  __syncthreads();
  answer(args, job, team, CandidateList{held, s.own}, s.total, begin_column, end_column);
}

}  // namespace mla_fp8::gpu::sm90_index
