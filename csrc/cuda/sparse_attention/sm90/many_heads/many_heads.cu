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
// Split: a CTA takes one query. The values of a block wait for QK of the next block, whose softmax leaves the
// tensor cores to them. Bound: the gather, 35 clocks per key at 4.3 TB/s; with 64 heads also the tensor
// cores, 34.
// Parts: as split, with a share of the query's keys. The CTAs of a query meet in a second grid (parts.cuh).
// Segments: as split, in runs that are added up in one order whoever has them (sm90/segments.cuh). Runs: a
// CTA has some of these, and leaves the result of each to the second grid.
// Walk: a CTA goes through queries, with split's roles and its bits. Q comes while the query before ends, and
// the value warps survey the query after the next.
//
// Barriers and who waits for whom: smem.cuh.
#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/many_heads/values.cuh"
#include "cuda/sparse_attention/sm90/producers.cuh"
#include "cuda/sparse_attention/sm90/walk_producers.cuh"

namespace mla_fp8::gpu {
// One thread calls it.
template <class C>
__device__ __forceinline__ void init_barriers(uint8_t* smem) {
  Ring<C>{shared_address(smem)}.init();
  BlockExchange<C>(smem).init();
  if constexpr (C::kWalks) WalkSurveys<C>(smem, 0).init(), QueryEnds<C>(smem).init();
  mbarrier_init(shared_address(smem) + MLA_SMEM(C, q_barrier), 1);
  mbarrier_init_fence();
}

// All threads call it, once the item is known.
template <class C>
__device__ __forceinline__ void attend_to_item(const KernelParams& params, typename C::Item& w, uint8_t* smem,
                                               int warp, int lane) {
  const int thread = threadIdx.x;
  // Warp 0 has made Q's barrier. If all have met since, warp 1 copies Q: it need not wait for the tile.
  if (warp == (params.num_tiles > 0)) WgmmaQuery<C>::copy(params.p, w, shared_address(smem), lane);
  if constexpr (C::kNeighbours) block_barrier<C::kThreads>();  // the tile is known
  if constexpr (C::kTiles == Tiles::kEntries) {
    w.take_part();
    w.source(params).fetch_pages(thread, C::kThreads);
  }
  if (run_early_producers<C>(params, w, smem, warp - kConsumerWarps - C::kLogitWarps, lane)) return;
  KeySurvey survey;
  if constexpr (C::kTiles == Tiles::kLists) {
    survey = KeySurvey::of_valid(w.num_keys);
    w.template take_share<C>(w.num_keys, params.splits);
    w.keys.fetch_lines(w.first_block * C::kBlockKeys, w.num_blocks * C::kBlockKeys, thread);
  } else {
    survey_part<C>(params, w, smem, warp, lane, [] {});
    if constexpr (C::kFetchesEarly) {
      if (warp >= kConsumerWarps + C::kLogitWarps) {
        give_up_registers<C::kProducerRegisters>();
        return run_early<C>(params, w, smem, warp - kConsumerWarps - C::kLogitWarps, lane);
      }
    }
    survey = end_survey<C>(params, w, smem, warp, lane);
  }

  if (!C::kFetchesEarly && warp >= kConsumerWarps + C::kLogitWarps) {
    run_producers<C>(params, w, survey, smem, warp - kConsumerWarps - C::kLogitWarps, lane_of_role<C>(lane));
  } else if (warp >= kConsumerWarps) {
    set_registers<C::kLogitRegisters, C::kThreads>();
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    SplitLogits<C>(params, w, smem, warp - kConsumerWarps, lane_of_role<C>(lane)).run();
  } else {
    take_registers<C::kValueRegisters>();
    WgmmaQuery<C> q;
    q.load_copied(params.p, w, smem, warp, lane);
    named_barrier(kBarrierQ, kConsumerThreads);
    q.store(smem, warp, lane);
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    SplitValues<C> values(smem, warp, lane_of_role<C>(lane));
    if constexpr (C::kRuns) values.run_and_leave(params, w);
    else values.run(w);
    if (w.is_whole()) {
      values.store(params.p, w, thread);
    } else if constexpr (!C::kRuns) {
      values.leave(QueryPart<C>(params, blockIdx.x));
    }
  }
}

namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_split_kernel(const __grid_constant__ KernelParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) init_barriers<C>(smem);
  let_producers_begin<C>(warp);
  begin_grid(params.follows);
  typename C::Item w;
  if constexpr (C::kNeighbours) w = find_tile<C>(params, smem, warp, lane);
  else w = find_item<C>(params);
  if constexpr (C::kTiles == Tiles::kNone)
    if (params.shared.has(w.query)) return leave_grid(params.follows);
  if constexpr (C::kTiles == Tiles::kLists)
    if (w.num_keys < 0) return leave_grid(params.follows);
  if constexpr (C::kTiles == Tiles::kEntries)
    if (w.num_parts == 0) return leave_grid(params.follows);
  attend_to_item<C>(params, w, smem, warp, lane);
  end_grid(params.follows);
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_walk_kernel(const __grid_constant__ KernelParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) init_barriers<C>(smem);
  wait_for_previous_grid();
  if (!WalkItem<C>::has_any(params)) return;
  if (warp >= kConsumerWarps + C::kLogitWarps) {
    run_walk_producers<C>(params, smem, warp - kConsumerWarps - C::kLogitWarps, lane);
  } else if (warp >= kConsumerWarps) {
    set_registers<C::kLogitRegisters, C::kThreads>();
    WalkLogits<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    take_registers<C::kValueRegisters>();
    WalkValues<C>(params, smem, warp, lane).run();
  }
#endif
}

}  // namespace

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
    const auto split = [&]<Tiles kTiles>(constant<kTiles>) {
      constexpr ManyHeadsTraits kTraits{
          .octets = kOctets, .producers = kVariant.producers, .schedule = kVariant.schedule, .tiles = kTiles};
      using C = ManyHeads<R, kTraits>;
      const KernelParams params = launch_items<C>(many_heads_split_kernel<C>, p, plan, stream);
      if constexpr (C::kParts || kTiles == Tiles::kEntries)
        if (C::kParts || params.num_tiles > 0) launch_merge_parts<C>(params, stream);
    };
    if constexpr (kVariant.tiles.has(kPair))
      if (plan.tile_queries > 1 || plan.ctas > 0) return split(constant<Tiles::kEntries>{});
    if constexpr (kVariant.lists.has(kPair))
      if (plan.takes_lists) return split(constant<Tiles::kLists>{});
    if constexpr (kWalks) {
      constexpr ManyHeadsTraits kTraits{
          .octets = kOctets, .producers = kVariant.producers, .schedule = Schedule::kWalk};
      using C = ManyHeads<R, kTraits>;
      launch_items<C>(many_heads_walk_kernel<C>, p, plan, stream);
    } else if constexpr (kVariant.rows.has(kPair)) {
      split(constant<Tiles::kNone>{});
    } else {
      throw no_such_kernel(plan);  // a variant for tiles only
    }
  };
  return with_variant_of_slice<Kernel::kManyHeads, MLA_SLICE, MLA_SLICES>(p, plan, run);
}

}  // namespace mla_fp8::gpu
