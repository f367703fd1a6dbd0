#pragma once
// The merge of index_topk on Hopper, of what the scan has not answered, in one of two ways: where that kept
// all keys, it chooses for each row among its keys; else for each row that several CTAs scanned among what
// they left. A row is a cluster's, each CTA with a part of the candidates in shared memory; one of few
// candidates is the first CTA's alone, as a barrier of a cluster takes a fence of the GPU.
#include "cuda/device/cluster.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/indexer/merge.cuh"
#include "cuda/indexer/sm90_rows.cuh"
#include "cuda/indexer/thread_keys.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kMergeThreads = 512;
// Entries that a CTA holds, alone on a multiprocessor or with another; of more it reads the workspace again.
inline constexpr int kMergeEntries = 24 * 1024, kMergeEntriesOfTwo = 10 * 1024;
inline constexpr int kAloneEntries =
    12 * 1024;  // or columns, up to which the first CTA of a cluster takes all

struct MergeArgs {
  IndexTopkArgs topk;
  int entries;  // that a CTA has room for, of 8 bytes
};

struct MergeShared {
  static constexpr int kBins = 2048;
  alignas(16) uint32_t bins[kBins];
  alignas(16) uint32_t totals[kBins];
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
  // At most as many as threads, brought together where the totals were.
  __device__ __forceinline__ const uint64_t* gathered(const uint64_t* orders) const {
    if (size == 1) return orders;
    cluster_sync();
    const auto own = static_cast<int>(of_lanes_block(&s.select.kept));
    const int end = warp_inclusive_sum(own);  // of the blocks up to the lane's
    int block = 0, before = 0;
#pragma unroll
    for (int r = 0; r < kMostBlocks - 1; ++r) {
      const int place = __shfl_sync(kFullWarp, end, r);
      if (r < size - 1 && static_cast<int>(threadIdx.x) >= place) block = r + 1, before = place;
    }
    if (static_cast<int>(threadIdx.x) < __shfl_sync(kFullWarp, end, size - 1)) {
      const uint32_t from = cluster_address(shared_address(orders + threadIdx.x - before), block);
      const uint32_t low = load_cluster_4(from), high = load_cluster_4(from + 4);
      reinterpret_cast<uint64_t*>(s.totals)[threadIdx.x] = uint64_t{high} << 32 | low;
    }
    cluster_sync();  // nobody reads this block's any more
    return reinterpret_cast<const uint64_t*>(s.totals);
  }
  // What the blocks found of their own.
  __device__ __forceinline__ Survey together(Survey own) const {
    if (size == 1) return own;
    cluster_sync();
    const uint32_t count = of_lanes_block(&s.select.kept), low = of_lanes_block(&s.select.low),
                   high = of_lanes_block(&s.select.high);
    const bool is_block = threadIdx.x % kWarpSize < static_cast<unsigned>(size);
    const Survey all{static_cast<int32_t>(lanes_sum(is_block ? count : 0)), ~lanes_max(is_block ? ~low : 0),
                     lanes_max(is_block ? high : 0)};
    cluster_sync();
    return all;
  }
  // The sum of the blocks before this one. Behind it, nobody may change what is summed before a cluster_sync.
  __device__ __forceinline__ int32_t sum_before(int32_t own) const {
    if (threadIdx.x == 0) s.kept = own;
    cluster_sync();
    const uint32_t kept = of_lanes_block(&s.kept);
    return static_cast<int32_t>(lanes_sum(threadIdx.x % kWarpSize < static_cast<unsigned>(rank) ? kept : 0));
  }

 private:
  // A word of the block whose rank is the lane; of others their own.
  template <class T>
  __device__ __forceinline__ uint32_t of_lanes_block(const T* word) const {
    static_assert(sizeof(T) == 4);
    const int lane = threadIdx.x % kWarpSize;
    return load_cluster_4(cluster_address(shared_address(word), lane < size ? lane : rank));
  }
};

// Parts [first, last) of a job.
struct ScatteredParts {
  const IndexTopkArgs& args;
  const MergeJob& job;
  int first, last;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    for (int i = first; i < last; ++i) job.part(args, i).visit(team, visit_four);
  }
};

template <class Candidates>
__device__ __forceinline__ void answer(const IndexTopkArgs& args, const MergeJob& job,
                                       const ClusterTeam& team, const Candidates& candidates, int32_t total,
                                       int64_t begin, int64_t end) {
  const IndexTopkParams& p = args.p;
  uint64_t least = kLeastOrder;
  if (total > p.topk) least = kth_surveyed(team, candidates, p.topk, team.together(survey(team, candidates)));
  int32_t kept = min(total, p.topk), place = 0;
  if (team.size > 1) {
    int32_t own = 0;
    candidates.visit(team, [&](const Four& orders) {
#pragma unroll
      for (const uint64_t order : orders) own += order >= least;
    });
    own = team_inclusive_sum(team, own);
    if (threadIdx.x == kMergeThreads - 1) team.scalars().kept = own;
    __syncthreads();
    kept = team.scalars().kept;
    place = team.sum_before(kept);
  }
  emit_from(team, IndexAnswer{p, job.out_row, job.where}, candidates, least, {place, kept, begin, end},
            [&](const IndexRow& where, int32_t column) { return args.slot(where, column); });
  if (team.rank == 0) emit_end(team, p, job.out_row, min(total, p.topk));
  if (team.size > 1) cluster_sync();  // nobody reads `kept` any more
}

// Of a cluster of so many blocks.
__device__ __forceinline__ int64_t first_row(int size) { return blockIdx.x / static_cast<unsigned>(size); }

// The answers of rows whose keys were kept; `where` is the first one. Rows take turns among the clusters.
__device__ __forceinline__ void choose(const MergeArgs& merge_args, MergeShared& s, uint32_t* held,
                                       IndexRow where) {
  const IndexTopkArgs& args = merge_args.topk;
  const IndexTopkParams& p = args.p;
  const KeptKeys kept(args);
  const int size = cluster_size(), rank = cluster_rank();
  const uint32_t bar = shared_address(&s.copied);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
  }
  uint32_t phase = 0;
  const auto slot = [&](const IndexRow& where, int32_t column) { return args.slot(where, column); };
  for (int64_t row = first_row(size); row < p.problem.rows.num_rows; row += gridDim.x / size) {
    const KeptRow first = kept.rows[row];  // of a row that was scored
    if (row > first_row(size)) where = find_row(p.problem.rows, row);
    const IndexAnswer answer{p, row, where};
    ClusterTeam team{s, size, rank};
    __syncthreads();
    if (where.end - where.begin <= p.topk) {
      if (rank == 0)
        emit_all(team, answer, [&](int32_t column) { return args.is_there(where, column); }, slot);
      continue;
    }
    const int tiles = (where.end - first.column + kTileKeys - 1) / kTileKeys;
    if (tiles * kTileKeys <= kAloneEntries) team.size = 1;
    if (rank >= team.size) continue;
    const int begin = tiles * rank / team.size, end = tiles * (rank + 1) / team.size;
    CandidateKeys keys{kept.tile(first.tile + begin), first.column + begin * kTileKeys,
                       (end - begin) * kTileKeys, 1};
    if (keys.count <= 2 * merge_args.entries) {
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(bar, keys.count * 4);
        bulk_copy(shared_address(held), keys.keys, keys.count * 4, bar);
      }
      mbarrier_wait(bar, phase);
      phase ^= 1;
      keys.keys = held;
    }
    if (keys.keys == held && keys.count <= ThreadKeys::most(kMergeThreads)) {
      const ThreadKeys own(team, keys);
      const Survey found = team.together(own.survey(team));
      answer_from(team, answer, own, found, slot,
                  [&](int32_t own_count) { return team.size == 1 ? 0 : team.sum_before(own_count); });
      if (rank == 0) emit_end(team, p, row, min(found.count, p.topk));
      if (team.size > 1) cluster_sync();
      continue;
    }
    const Survey found = team.together(survey(team, keys));
    uint64_t least = kLeastOrder;
    if (found.count > p.topk) least = kth_surveyed(team, keys, p.topk, found);
    const ChosenRuns runs = find_chosen(team, keys, least);
    const int32_t place = team.size == 1 ? 0 : team.sum_before(runs.count);
    emit_chosen(team, answer, runs, keys, place, slot);
    if (rank == 0) emit_end(team, p, row, min(found.count, p.topk));
    if (team.size > 1) cluster_sync();  // nobody reads `kept` any more
  }
}

__device__ __forceinline__ void merge(const MergeArgs& merge_args, MergeShared& s, uint64_t* held) {
  const IndexTopkArgs& args = merge_args.topk;
  ClusterTeam team{s, cluster_size(), cluster_rank()};
  begin_grid(true);  // the next grid may begin: it waits for this one, which waits for the scan
  // What the caller gave: the scan has waited for the grids that it may come from.
  const IndexRow where = find_row(args.p.problem.rows, first_row(team.size));
  wait_for_previous_grid();
  if (args.state(0)->are_answered) return;
  if (args.state(0)->are_kept) return choose(merge_args, s, reinterpret_cast<uint32_t*>(held), where);
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
