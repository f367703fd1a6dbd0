// Sparse MLA attention on Hopper over FP8 rows, for CTAs of 32 or 64 heads (tiles of queries: also 48).
//
// The output of 64 heads fills the registers of two warpgroups, so every warpgroup has one task, where a warp
// of few_heads has all. Softmax and conversions of one block go on beside the products of another.
//
//   all        survey the keys of the query (split)
//   producers  4 warps gather as in few_heads, into a ring of 12 or 16 stages of 16 raw rows. Over two
//              layouts rows of one kind are made of these (mixed_expand.cuh), by four more warps or by the
//              producers
//   logits     4 warps: S^T[64 keys x heads] = K Q^T by wgmma, K from the raw rows through registers, Q from
//              shared memory; softmax; weights P^T and value scales to shared memory, double buffered
//   values     2 x 4 warps: O^T[256 dims x heads] += V^T P^T by wgmma, V from the raw rows through registers
//
// K and V are converted once per key whatever the heads. That takes most of a warpgroup's time, not the
// tensor cores. Tile scales multiply the f16 elements (powers of two: exact), so a product has one
// accumulator.
//
// Split (split.cuh): a CTA takes one query. The values of a block wait for QK of the next block, whose
// softmax leaves the tensor cores to them. Bound: the gather, 35 clocks per key at 4.3 TB/s; with 64 heads
// also the tensor cores, 34.
// Parts: as split, with a share of the query's keys. The CTAs of a query meet in a second grid (parts.cuh).
//
// Extensions, which split.cuh does not include:
//   runs.cuh          batch_invariant. Segments: as split, in runs that are added up in one order whoever has
//                     them. Runs: a CTA has some of these, and leaves the result of each to the second grid
//   walk.cuh          a CTA goes through queries, with split's roles and its bits
//   neighbours.cuh    the heads of a CTA are those of several queries
//   mixed_gather.cuh  two layouts: other producers, and scales behind a stage's rows
#include <type_traits>

#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/sm90/many_heads/neighbours.cuh"
#include "cuda/sparse_attention/sm90/many_heads/runs.cuh"
#include "cuda/sparse_attention/sm90/many_heads/walk.cuh"
#include "cuda/sparse_attention/sm90/mixed_gather.cuh"

namespace mla_fp8::gpu {

// The scales of a stage over two layouts lie behind its rows.
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders, bool kHasKeyTable>
struct StageScales<MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>> {
  int e;
  bool is_nan[2];

  template <class C>
  __device__ void load(const uint8_t* smem, int stage, int g, int) {
    e = reinterpret_cast<const int*>(smem + MLA_SMEM(C, stage_exponents))[stage];
    const uint8_t* const valid = smem + MLA_SMEM(C, valid) + stage * kStageRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) is_nan[i] = valid[g + 8 * i] & kNanKey;
  }
  __device__ void store(uint8_t*, int, int) const {}
};

template <Schedule kSchedule>  // the work of a CTA with one query
using QueryItem = std::conditional_t<
    kSchedule == Schedule::kSegments, SegmentItem<1>,
    std::conditional_t<kSchedule == Schedule::kRuns, RunItem,
                       std::conditional_t<kSchedule == Schedule::kParts, PartItem, SplitItem>>>;

template <>
bool launch_slice<Kernel::kManyHeads, MLA_SLICE>(const SparseAttentionParams& p, const Plan& plan,
                                                 gpuStream_t stream) {
  const auto run = [&](auto variant, auto layout, auto extra) {
    constexpr Variant kVariant = kVariants[variant()];
    constexpr KvPair kPair{layout(), extra()};
    constexpr int kOctets = kVariant.heads / kOctetHeads;
    constexpr bool kWalks = kVariant.schedule == Schedule::kWalk;
    constexpr int kExpanders = kVariant.producers == 8 ? 4 : 0;  // producers that only expand
    constexpr bool kHasKeyTable = kExpanders > 0 || (kOctets == 8 && !kWalks);
    using R = CachedRow<layout(), extra(), kExpanders, kHasKeyTable>;
    constexpr ManyHeadsTraits kTraits{
        .octets = kOctets, .producers = kVariant.producers, .schedule = kVariant.schedule};
    const auto split = [&]<class Item>(std::type_identity<Item>) {
      using C = ManyHeads<R, kTraits, Item>;
      const KernelParams params = launch_items<C>(many_heads_split_kernel<C>, p, plan, stream);
      if constexpr (C::kParts || std::is_same_v<Item, TileItem>)
        if (C::kParts || params.num_tiles > 0) launch_merge_parts<C>(params, stream);
    };
    if constexpr (kVariant.tiles.has(kPair))
      if (plan.tile_queries > 1 || plan.ctas > 0) return split(std::type_identity<TileItem>{});
    if constexpr (kVariant.lists.has(kPair))
      if (plan.takes_lists) return split(std::type_identity<ListItem>{});
    if constexpr (kWalks) {
      using C = ManyHeads<R, kTraits>;
      launch_items<C>(many_heads_walk_kernel<C>, p, plan, stream);
    } else if constexpr (kVariant.rows.has(kPair)) {
      split(std::type_identity<QueryItem<kVariant.schedule>>{});
    } else {
      throw no_such_kernel(plan);  // a variant for tiles only
    }
  };
  return with_variant_of_slice<Kernel::kManyHeads, MLA_SLICE, MLA_SLICES>(p, plan, run);
}

}  // namespace mla_fp8::gpu
