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
  static constexpr int kBins = 2048, kMostBlocks = 8;
  alignas(16) uint32_t bins[2][kBins];
  int32_t staged[kMaxIndexTopk];
  SelectScalars select;
  uint64_t copied;
  int32_t total, own;  // candidates of the cluster, places of the block
  // What the blocks of the cluster have told this one, and how many candidates of the k-th's bin it has.
  Survey surveys[kMostBlocks];
  int32_t sums[kMostBlocks], few;
};

// The threads of a cluster; each block has a histogram of its own candidates. A barrier of a cluster takes
// most of a microsecond, so each exchange has one: what a block tells has a place of its own, and histograms
// have two in turns. Whoever writes to a place again has passed the barrier of another exchange, behind all
// who read there.
struct ClusterTeam {
  static constexpr int kMostBlocks = MergeShared::kMostBlocks;
  static constexpr int kBinsPerThread = MergeShared::kBins / kMergeThreads;
  static_assert(kBinsPerThread == 4);
  MergeShared& s;
  int size, rank;
  mutable int turn = 0;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return s.bins[turn]; }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
  __device__ __forceinline__ int32_t* staged() const { return s.staged; }
  // The four bins that kth_of_bins asks the calling thread for, of all blocks: nobody else asks for them.
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const {
    if (size == 1) return bins;
    cluster_sync();
    const int first = MergeShared::kBins - 4 - 4 * threadIdx.x;
    constexpr int kAtOnce = 4;  // loads in flight
    uint4 sum{};
#pragma unroll 1
    for (int block = 0; block < size; block += kAtOnce) {
      uint4 parts[kAtOnce]{};
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        if (block + r < size)
          parts[r] = load_cluster_16(cluster_address(shared_address(bins + first), block + r));
#pragma unroll
      for (const uint4& part : parts) {
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
    }
    turn ^= 1;
    *reinterpret_cast<uint4*>(s.bins[turn] + first) = sum;
    return s.bins[turn];
  }
  // At most as many as threads, brought together where the last histogram was.
  __device__ __forceinline__ const uint64_t* gathered(const uint64_t* orders) const {
    if (size == 1) return orders;
    if (threadIdx.x == 0) s.few = s.select.kept;
    cluster_sync();
    const int lane = threadIdx.x % kWarpSize;
    const auto own =
        static_cast<int>(load_cluster_4(cluster_address(shared_address(&s.few), lane < size ? lane : rank)));
    const int end = warp_inclusive_sum(own);  // of the blocks up to the lane's
    int block = 0, before = 0;
#pragma unroll
    for (int r = 0; r < kMostBlocks - 1; ++r) {
      const int place = __shfl_sync(kFullWarp, end, r);
      if (r < size - 1 && static_cast<int>(threadIdx.x) >= place) block = r + 1, before = place;
    }
    auto* all = reinterpret_cast<uint64_t*>(s.bins[turn ^ 1]);
    if (static_cast<int>(threadIdx.x) < __shfl_sync(kFullWarp, end, size - 1)) {
      const uint32_t from = cluster_address(shared_address(orders + threadIdx.x - before), block);
      const uint32_t low = load_cluster_4(from), high = load_cluster_4(from + 4);
      all[threadIdx.x] = uint64_t{high} << 32 | low;
    }
    __syncthreads();
    return all;
  }
  // What the blocks found of their own.
  __device__ __forceinline__ Survey together(Survey own) const {
    if (size == 1) return own;
    tell(s.surveys, own);
    cluster_sync();
    const unsigned lane = threadIdx.x % kWarpSize;
    const Survey one = lane < static_cast<unsigned>(size) ? s.surveys[lane] : Survey{0, UINT32_MAX, 0};
    return {static_cast<int32_t>(lanes_sum(one.count)), ~lanes_max(~one.low), lanes_max(one.high)};
  }
  // The sums of the blocks before this one, and of all. Behind it, nobody reads another's memory.
  struct Sums {
    int32_t before, all;
  };
  __device__ __forceinline__ Sums sums(int32_t own) const {
    if (size == 1) return {0, own};
    tell(s.sums, own);
    cluster_sync();
    const unsigned lane = threadIdx.x % kWarpSize;
    const int32_t one = lane < static_cast<unsigned>(size) ? s.sums[lane] : 0;
    return {lanes_sum(lane < static_cast<unsigned>(rank) ? one : 0), lanes_sum(one)};
  }

 private:
  // To the block's place in all blocks.
  template <class T>
  __device__ __forceinline__ void tell(T* places, const T& own) const {
    if (threadIdx.x >= static_cast<unsigned>(size)) return;
    const uint32_t to = cluster_address(shared_address(places + rank), threadIdx.x);
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &own, sizeof own);
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; ++i) store_cluster_4(to + 4 * i, words[i]);
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

// Of `total` candidates, the calling CTA's in columns [begin, end).
template <class Candidates>
__device__ __forceinline__ void answer(const IndexTopkArgs& args, const IndexAnswer& row,
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
    place = team.sums(kept).before;
  }
  emit_from(team, row, candidates, least, {place, kept, begin, end},
            [&](const IndexRow& where, int32_t column) { return args.slot(where, column); });
  if (team.rank == 0) emit_end(team, p, row.row, min(total, p.topk));
}

// Of a cluster of so many blocks.
__device__ __forceinline__ int64_t first_row(int size) { return blockIdx.x / static_cast<unsigned>(size); }

// The answer of a row whose keys are too many for shared memory: from the k-th's bin on they are few, which
// the first CTA gets in its `list`. Bins are of the upper bits of keys: no pass looks for a range first.
__device__ __forceinline__ void choose_far(const MergeArgs& merge_args, const IndexAnswer& row,
                                           ClusterTeam team, const FarKeys& keys, uint64_t* list) {
  const int32_t topk = row.p.topk;
  constexpr int kShift = 64 - 11;  // of an order
  static_assert(MergeShared::kBins == 1 << (64 - kShift));
  clear_bins(team);
  const uint32_t own_bins = shared_address(team.bins());
  keys.visit_keys(team, [&](int32_t, const uint32_t (&four)[4]) {
#pragma unroll
    for (const uint32_t key : four) add_shared_1(own_bins + 4 * (key >> (kShift - 32)));
  });
  const KthBin kth = kth_of_bins(team, topk);
  uint64_t least = max(static_cast<uint64_t>(kth.bin) << kShift, kLeastOrder);
  const int32_t room = merge_args.entries - topk;
  if (const int32_t others = kth.here - kth.remaining; others > room)
    least = kth_bound(team, keys, kth.remaining, room, least, least | ((uint64_t{1} << kShift) - 1));
  int32_t* count = &team.scalars().kept;
  keys.visit_keys(team, [&](int32_t i, const uint32_t (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (four[j] >= least >> 32)
        if (const uint64_t order = order_of(four[j], keys.all.column + i + j); order >= least)
          list[atomicAdd(count, 1)] = order;
  });
  __syncthreads();
  const int32_t own = *count;
  const ClusterTeam::Sums sums = team.sums(own);
  if (team.size > 1) {
    if (team.rank > 0)
      for (int i = threadIdx.x; i < own; i += kMergeThreads)
        store_cluster_8(cluster_address(shared_address(list + sums.before + i), 0), list[i]);
    cluster_sync();
    if (team.rank > 0) return;
    team.size = 1;
  }
  answer(merge_args.topk, row, team, CandidateList{list, sums.all}, sums.all, row.where.begin, row.where.end);
}

// The answers of rows whose keys were kept; `where` is the first one. Rows take turns among the clusters.
__device__ __forceinline__ void choose(const MergeArgs& merge_args, MergeShared& s, uint64_t* held,
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
    if (tiles * kTileKeys > team.size * min(2 * merge_args.entries, ThreadKeys::most(kMergeThreads))) {
      choose_far(merge_args, answer, team, {keys}, held);
      continue;
    }
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(bar, keys.count * 4);
      bulk_copy(shared_address(held), keys.keys, keys.count * 4, bar);
    }
    mbarrier_wait(bar, phase);
    phase ^= 1;
    keys.keys = reinterpret_cast<const uint32_t*>(held);
    const ThreadKeys own(team, keys);
    const Survey found = team.together(own.survey(team));
    answer_from(team, answer, own, found, slot,
                [&](int32_t own_count) { return team.sums(own_count).before; });
    if (rank == 0) emit_end(team, p, row, min(found.count, p.topk));
  }
}

__device__ __forceinline__ void merge(const MergeArgs& merge_args, MergeShared& s, uint64_t* held) {
  const IndexTopkArgs& args = merge_args.topk;
  ClusterTeam team{s, cluster_size(), cluster_rank()};
  begin_grid(true);  // the next grid may begin: it waits for this one, which waits for the scan
  // What the caller gave: the scan has waited for the grids that it may come from.
  const IndexRow where = find_row(args.p.problem.rows, first_row(team.size));
  cluster_arrive();
  wait_for_previous_grid();
  cluster_wait();  // all blocks have begun: they may be told something
  if (args.state(0)->are_answered) return;
  if (args.state(0)->are_kept) return choose(merge_args, s, held, where);
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
  const IndexAnswer row{args.p, job.out_row, job.where};
  const int64_t begin_column = job.part_begin(args, first), end_column = job.part_begin(args, last);
  if (s.own > merge_args.entries) {
    const ScatteredParts scattered{args, job, first, last};
    return answer(args, row, team, scattered, s.total, begin_column, end_column);
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
  answer(args, row, team, CandidateList{held, s.own}, s.total, begin_column, end_column);
}

}  // namespace mla_fp8::gpu::sm90_index
