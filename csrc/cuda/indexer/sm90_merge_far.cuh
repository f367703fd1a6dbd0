#pragma once
// Part of index_topk's merge on Hopper: arguments, and the choice among keys without room in shared memory.
#include "cuda/device/copy.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/indexer/merge.cuh"
#include "cuda/indexer/sm90_rows.cuh"
#include "cuda/indexer/sm90_team.cuh"
#include "cuda/indexer/thread_keys.cuh"

namespace mla_fp8::gpu::sm90_index {

// Entries of 8 bytes for which a CTA has room. Two CTAs share a multiprocessor if they are alone, that is not
// in clusters. If there are more candidates, the CTA reads the workspace again.
MLA_HD constexpr int merge_entries(bool are_alone) { return are_alone ? 76 * kTileKeys / 2 : 24 * 1024; }
inline constexpr int kAloneEntries =
    12 * 1024;  // of candidates or columns; up to so many, the cluster's first CTA takes all

struct MergeArgs {
  IndexTopkArgs topk;
  int near_keys;      // columns: of a longer row no keys are copied to shared memory
  int most_gathered;  // tiles of a unit, if all units may be gathered; else 0
  bool are_short;     // no row has more columns than kGroupColumns
};
// A warpgroup has a quarter of a block's memory. A row may begin within a tile, so it is a tile shorter.
inline constexpr int kGroupKeys = 2 * merge_entries(true) / kMergeGroups,
                     kGroupColumns = kGroupKeys - kTileKeys;
static_assert(kGroupKeys % kTileKeys == 0 && kGroupKeys <= ThreadKeys::most(kGroup) &&
              kMaxIndexTopk <= kGroupKeys);

// Answers a row of `total` candidates. `candidates` are the calling CTA's, which lie in columns [begin, end).
template <class Team, class Candidates>
__device__ __forceinline__ void answer(const IndexTopkArgs& args, const IndexAnswer& row, const Team& team,
                                       const Candidates& candidates, int32_t total, int64_t begin,
                                       int64_t end) {
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

// The bin of the k-th key of a row that the scan has counted. Every block reads the row's bins by itself.
template <class Team>
__device__ __forceinline__ KthBin kth_of_row(const Team& team, const IndexRowBins& row, int32_t k) {
  constexpr int kHalf = IndexRowBins::kBins / 2;  // the upper half of the bins is that of positive keys
  constexpr int kEach = kHalf / kMergeThreads;
  SelectScalars& s = team.scalars();
  int32_t before = 0;
  if (threadIdx.x == 0) s.kth = {0, k, 0};
#pragma unroll 1
  for (int end = IndexRowBins::kBins; end > 0 && before < k; end -= kHalf) {
    const int first = end - (threadIdx.x + 1) * kEach;
    static_assert(kEach == 8);
    const auto* words = reinterpret_cast<const int4*>(row.bins + first);
    const int4 low = words[0], high = words[1];
    const int32_t counts[kEach] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    int32_t own = 0;
#pragma unroll
    for (const int32_t count : counts) own += count;
    const int32_t last = before + team_inclusive_sum(team, own);
    int32_t above = last - own;
    if (above < k && k <= last) {
#pragma unroll
      for (int i = kEach - 1; i >= 0; --i) {
        if (above < k && k <= above + counts[i]) s.kth = {first + i, k - above, counts[i]};
        above += counts[i];
      }
    }
    if (threadIdx.x == kMergeThreads - 1) s.kept = last;
    team.sync();
    before = s.kept;
  }
  team.sync();
  if (threadIdx.x == 0) s.kept = 0;
  team.sync();
  return s.kth;
}

// Answers a row with few keys in the k-th's bin. A bin is the upper bits of a key, from bit `shift` on. A
// bitmap in `words` has a bit for each key of the calling CTA: whether it is chosen.
template <class Team>
__device__ __forceinline__ void mark_and_emit(const MergeArgs& merge_args, const IndexAnswer& row,
                                              const Team& team, const FarKeys& keys, const KthBin& kth,
                                              int shift, uint32_t* words) {
  const int num_words = keys.all.count / 32;
  for (int i = threadIdx.x; i < num_words; i += kMergeThreads) words[i] = 0;
  team.sync();
  const auto* few = reinterpret_cast<const uint64_t*>(team.bins());
  int32_t* count = &team.scalars().kept;
  const auto bin = static_cast<uint32_t>(kth.bin);
  keys.visit_keys(team, [&](int32_t i, const uint32_t (&four)[4]) {
    uint32_t above = 0;
    bool any = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      above |= static_cast<uint32_t>(four[j] >> shift > bin) << j;
      any |= four[j] >> shift == bin;
    }
    if (above != 0) atomicOr(words + i / 32, above << i % 32);
    if (!any) return;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (four[j] >> shift == bin) put_where_bins_were(team, order_of(four[j], keys.all.column + i + j));
  });
  team.sync();
  const int own_few = *count;
  const uint64_t low = static_cast<uint64_t>(kth.bin) << (shift + 32);
  const uint64_t least = kth_order(AloneTeam{team.s}, CandidateList{team.gathered(few), kth.here},
                                   kth.remaining, low, low | ((uint64_t{1} << (shift + 32)) - 1));
  for (int j = threadIdx.x; j < own_few; j += kMergeThreads) {
    const int32_t i = column_of(few[j]) - keys.all.column;
    if (few[j] >= least) atomicOr(words + i / 32, 1u << i % 32);
  }
  team.sync();
  const int each = (num_words + kMergeThreads - 1) / kMergeThreads, first = threadIdx.x * each;
  const int end = min(first + each, num_words);
  int32_t own = 0;
  for (int i = first; i < end; ++i) own += __popc(words[i]);
  const int32_t last = team_inclusive_sum(team, own);
  if (threadIdx.x == kMergeThreads - 1) *count = last;
  int32_t* to = team.staged() + last - own;
  for (int i = first; i < end; ++i)
    for (uint32_t left = words[i]; left != 0; left &= left - 1)
      *to++ = keys.all.column + 32 * i + __ffs(static_cast<int>(left)) - 1;
  team.sync();
  const int32_t chosen = *count;
  write_columns(team, row, team.sums(chosen).before, chosen,
                [&](const IndexRow& where, int32_t column) { return merge_args.topk.slot(where, column); });
  if (team.rank == 0) emit_end(team, row.p, row.row, row.p.topk);
}

// Least and largest key in the bin that begins with the order `least`. If many keys are equal, the range of
// these two divides the bin well: little but columns is left to tell apart.
template <class Team>
__device__ __forceinline__ Survey survey_from(const Team& team, const FarKeys& keys, uint64_t least,
                                              int shift) {
  const auto first = static_cast<uint32_t>(least >> 32),
             last = first | static_cast<uint32_t>((uint64_t{1} << (shift - 32)) - 1);
  Survey own{0, UINT32_MAX, 0};
  keys.visit_keys(team, [&](int32_t, const uint32_t (&four)[4]) {
#pragma unroll
    for (const uint32_t key : four) {
      if (key < first || key > last) continue;
      own.low = min(own.low, key);
      own.high = max(own.high, key);
    }
  });
  team.sync();
  return team.together(survey_of(team, own));
}

// Answers a row whose keys have no room in shared memory. Bins are of keys' upper bits: no pass has to find
// the range of keys first, and the scan may have counted. If the k-th's bin has few keys, mark_and_emit
// answers. Else keys from a bound on, at most `entries`, go to the first CTA's `list`, and that one answers.
template <class Team>
__device__ __forceinline__ void choose_far(const MergeArgs& merge_args, const IndexAnswer& row, Team team,
                                           const FarKeys& keys, const IndexRowBins* counted, uint64_t* list,
                                           int entries) {
  const int32_t topk = row.p.topk;
  int shift = IndexRowBins::kShift;
  KthBin kth;
  if (counted != nullptr) {
    kth = kth_of_row(team, *counted, topk);
  } else {
    shift = 32 - 11;
    static_assert(MergeShared::kBins == 1 << 11);
    clear_bins(team);
    const uint32_t own_bins = shared_address(team.bins());
    keys.visit_keys(team, [&](int32_t, const uint32_t (&four)[4]) {
#pragma unroll
      for (const uint32_t key : four) add_shared_1(own_bins + 4 * (key >> shift));
    });
    kth = kth_of_bins(team, topk);
  }
  if (kth.bin > 0 && kth.here <= MergeShared::kMostFew && keys.all.count <= entries * 64)
    return mark_and_emit(merge_args, row, team, keys, kth, shift, reinterpret_cast<uint32_t*>(list));
  shift += 32;  // from bits of a key to bits of an order
  uint64_t least = max(static_cast<uint64_t>(kth.bin) << shift, kLeastOrder);
  const int32_t room = entries - topk;
  if (const int32_t others = kth.here - kth.remaining; others > room) {
    const Survey bin = survey_from(team, keys, least, shift);
    least = kth_bound(team, keys, kth.remaining, room, order_of(bin.low, row.where.end - 1),
                      order_of(bin.high, row.where.begin));
  }
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
  const auto sums = team.sums(own);
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

}  // namespace mla_fp8::gpu::sm90_index
