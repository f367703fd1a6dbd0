#pragma once
// The merge of index_topk on Hopper answers the rows that the scan left, in one of two ways. If the scan kept
// all keys, it chooses among the keys of each row. Else it chooses, for each row that several CTAs scanned,
// among the lists that they left. A cluster takes a row, each CTA a part of its candidates in shared memory.
// A row of few candidates is the first CTA's alone, as a barrier of a cluster takes a fence of the GPU.
#include "cuda/indexer/sm90_merge_far.cuh"

namespace mla_fp8::gpu::sm90_index {

// The threads that choose: of a block (kAlone: no clusters, two blocks on a multiprocessor), or of a cluster.
template <bool kAlone>
__device__ __forceinline__ ClusterTeam<kAlone> merge_team(MergeShared& s) {
  if constexpr (kAlone) return {s, 1, 0};
  return {s, cluster_size(), cluster_rank()};
}

// The first row of the calling cluster of `size` blocks.
__device__ __forceinline__ int64_t first_row(int size) { return blockIdx.x / static_cast<unsigned>(size); }

// About the range of a row's keys: that of a sample, 512 pieces of four keys spread over the row.
template <class Team>
__device__ __forceinline__ Survey sample(const Team& team, const CandidateKeys& all) {
  const int step = max(all.count / 4 / kMergeThreads, 1), i = static_cast<int>(threadIdx.x) * step;
  uint4 four{};
  if (4 * i < all.count) four = reinterpret_cast<const uint4*>(all.keys)[i];
  const uint32_t read[] = {four.x, four.y, four.z, four.w};
  Survey own{0, UINT32_MAX, 0};
#pragma unroll
  for (const uint32_t key : read) {
    if (key == 0) continue;
    own.low = min(own.low, key);
    own.high = max(own.high, key);
  }
  return survey_of(team, own);
}

// Answers rows whose keys were kept. Clusters take rows in turns: `where` is the cluster's first one, and
// `own` says where its keys are, if it was scored.
template <bool kAlone>
__device__ __forceinline__ void choose(const MergeArgs& merge_args, MergeShared& s, uint64_t* held,
                                       IndexRow where, const KeptRow& own) {
  const IndexTopkArgs& args = merge_args.topk;
  const IndexTopkParams& p = args.p;
  const KeptKeys kept(args);
  const ClusterTeam<kAlone> all = merge_team<kAlone>(s);
  const int size = all.size, rank = all.rank;
  const bool has_pins = p.pin_first > 0 || p.pin_last > 0;
  const uint32_t bar = shared_address(&s.copied);
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
  }
  uint32_t phase = 0;
  const auto slot = [&](const IndexRow& where, int32_t column) { return args.slot(where, column); };
  for (int64_t row = first_row(size); row < p.problem.rows.num_rows; row += gridDim.x / size) {
    if (row > first_row(size)) where = find_row(p.problem.rows, row);
    const KeptRow first = row == first_row(size) ? own : kept.rows[row];
    const IndexAnswer answer{p, row, where};
    ClusterTeam<kAlone> team = all;
    __syncthreads();
    if (where.end - where.begin <= p.topk) {
      if (rank == 0)
        emit_all(team, answer, [&](int32_t column) { return args.is_there(row, where, column); }, slot);
      continue;
    }
    const int tiles = (where.end - first.column + kTileKeys - 1) / kTileKeys;
    if (tiles * kTileKeys <= kAloneEntries) team.size = 1;
    if (rank >= team.size) continue;
    const int begin = tiles * rank / team.size, end = tiles * (rank + 1) / team.size;
    CandidateKeys keys{kept.tile(first.tile + begin), first.column + begin * kTileKeys,
                       (end - begin) * kTileKeys, 1};
    if (tiles * kTileKeys > merge_args.near_keys) {
      IndexRowBins* counted = args.state(0)->are_binned ? args.counters.bins + row : nullptr;
      choose_far(merge_args, answer, team, {keys}, counted, held, merge_entries(kAlone));
      if (counted != nullptr) {  // all blocks have read the counts
        const int last = IndexRowBins::kBins / 4 * (rank + 1) / size;
        for (int i = IndexRowBins::kBins / 4 * rank / size + threadIdx.x; i < last; i += kMergeThreads)
          store(counted->bins + 4 * i, Words<4>{});
      }
      continue;
    }
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(bar, keys.count * 4);
      bulk_copy(shared_address(held), keys.keys, keys.count * 4, bar);
    }
    // All blocks read the same sample. Keys beyond its range may still be chosen.
    const Survey range = has_pins ? Survey{0, UINT32_MAX, 0}
                                  : sample(team, {kept.tile(first.tile), first.column, tiles * kTileKeys, 1});
    mbarrier_wait(bar, phase);
    phase ^= 1;
    keys.keys = reinterpret_cast<const uint32_t*>(held);
    const ThreadKeys mine(team, keys);
    uint64_t chosen = 0, least = kLeastOrder;
    int32_t total = p.topk;
    const bool are_few_near = mine.choose_by_bins<true>(team, p.topk, range, least, chosen);
    if (!are_few_near) {
      team.sync();  // bins are used again: the sample has been read
      const Survey found = team.together(mine.survey(team));
      chosen = mine.chosen(team, p.topk, found, least);
      total = min(found.count, p.topk);
    }
    write_chosen(team, answer, mine, chosen, slot, [&](int32_t count) {
      return are_few_near ? team.chosen_before(least) : team.sums(count).before;
    });
    if (rank == 0) emit_end(team, p, row, total);
  }
}

// choose for many short rows: each row is a warpgroup's. So eight rows are under way on a multiprocessor; a
// row mostly waits for the latency of one step after another.
__device__ __forceinline__ void choose_short(const MergeArgs& merge_args, MergeShared& s, uint64_t* held) {
  const IndexTopkArgs& args = merge_args.topk;
  const IndexTopkParams& p = args.p;
  const KeptKeys kept(args);
  const int group = threadIdx.x / kGroup;
  auto* keys = reinterpret_cast<uint32_t*>(held) + group * kGroupKeys;
  const GroupTeam team{s, group, reinterpret_cast<int32_t*>(keys)};
  const uint32_t bar = shared_address(&s.group_copied[group]);
  if (team.thread() == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
  }
  uint32_t phase = 0;
  const auto slot = [&](const IndexRow& where, int32_t column) { return args.slot(where, column); };
#pragma unroll 1
  for (int64_t row = int64_t{blockIdx.x} * kMergeGroups + group; row < p.problem.rows.num_rows;
       row += int64_t{gridDim.x} * kMergeGroups) {
    const KeptRow first = kept.rows[row];  // means something only for a row that was scored
    const IndexRow where = find_row(p.problem.rows, row);
    const IndexAnswer answer{p, row, where};
    fence_proxy_async();  // columns were staged where keys come next
    team.sync();
    if (where.end - where.begin <= p.topk) {
      args.answer_all({row, where.request, 1, where.begin, where.end, {where}, 0}, team);
      continue;
    }
    const int count = (where.end - first.column + kTileKeys - 1) / kTileKeys * kTileKeys;
    if (team.thread() == 0) {
      mbarrier_arrive_expect(bar, count * 4);
      bulk_copy(shared_address(keys), kept.tile(first.tile), count * 4, bar);
    }
    mbarrier_wait(bar, phase);
    phase ^= 1;
    const ThreadKeys own(team, {keys, first.column, count, 1});
    const Survey found = own.survey(team);
    uint64_t least;
    const uint64_t chosen = own.chosen(team, p.topk, found, least);
    write_chosen(team, answer, own, chosen, slot, [](int32_t) { return 0; });
    emit_end(team, p, row, min(found.count, p.topk));
  }
}

// Whether all units are so short that the scan answers all rows.
__device__ __forceinline__ bool are_all_gathered(const MergeArgs& merge_args) {
  const IndexTopkArgs& args = merge_args.topk;
  const IndexRows& rows = args.p.problem.rows;
  if (merge_args.most_gathered == 0) return false;
  bool is_long = false;
  for (int64_t i = threadIdx.x; i < args.places.count; i += kMergeThreads) {
    const auto [request, in_request] = args.places(i);
    is_long |= scored_tiles_at(rows, request, in_request, args.places.rows_of_place, kTileKeys, args.taken) >
               merge_args.most_gathered;
  }
  return !named_barrier_any(0, kMergeThreads, is_long);
}

template <bool kAlone>
__device__ __forceinline__ void merge(const MergeArgs& merge_args, MergeShared& s, uint64_t* held) {
  const IndexTopkArgs& args = merge_args.topk;
  ClusterTeam<kAlone> team = merge_team<kAlone>(s);
  begin_grid(true);  // the next grid may begin: it waits for this one, which waits for the scan
  if (are_all_gathered(merge_args)) {  // blocks leave, and the next grid gets all SMs but one
    if (blockIdx.x == 0) wait_for_previous_grid();
    return;
  }
  // Rows come from the caller. The scan has waited for the grids that wrote them, so they are there.
  const IndexRow where = find_row(args.p.problem.rows, first_row(team.size));
  if constexpr (!kAlone) cluster_arrive();
  wait_for_previous_grid();
  if constexpr (!kAlone) cluster_wait();  // all blocks have begun, so others may write to their shared memory
  const KeptRow own = KeptKeys(args).rows[first_row(team.size)];  // loaded while the state is
  const bool are_kept = args.state(0)->are_kept, are_answered = args.state(0)->are_answered;
  if (are_answered) return;
  if constexpr (kAlone)
    if (are_kept && merge_args.are_short) return choose_short(merge_args, s, held);
  if (are_kept) return choose<kAlone>(merge_args, s, held, where, own);
  MergeJob job;
  if (!find_merge<kMergeThreads>(args, static_cast<int>(blockIdx.x) / team.size, job)) return;
  const int parts = job.num_parts(), i = threadIdx.x;
  const CandidateList part = i < parts ? job.part(args, i) : CandidateList{nullptr, 0};
  const int32_t all = team_inclusive_sum(team, part.count);
  if (i == kMergeThreads - 1) s.total = all;
  __syncthreads();
  if (s.total <= kAloneEntries) {  // all blocks have the same total
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
  if (s.own > merge_entries(kAlone)) {
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
