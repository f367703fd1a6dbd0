// Sparse FP8 MLA decode for Hopper, many heads: one CTA takes one query token, 32 or 64 of its heads and a
// share of its selected tokens, in blocks of 64. Where the warp-team kernel has every warp do everything,
// here each warpgroup has one part, so that softmax and conversions of one block go on beside the products of
// another.
//
//   all         survey the keys of the query; the CTAs of a row share the valid ones
//   producers   4 warps: as in the warp-team kernel, a ring of 12 or 16 slots of 16 raw rows
//   logits      4 warps: S^T[64 tokens x heads] = K Q^T by wgmma, K from the raw rows through registers, Q
//               from shared memory; softmax; weights P^T and value scales to shared memory, double buffered
//   values      2 x 4 warps: O^T[256 dims x heads] += V^T P^T by wgmma, V from the raw rows through
//               registers; a block's after QK of the next one, whose softmax leaves the tensor cores to them
//
// Tile scales multiply the f16 elements of K and V here (powers of two: exact), which keeps one accumulator
// per product. Bound: the gather, 35 clocks per token at 4.3 TB/s, and at 64 heads the tensor cores, 34; what
// is reached, and why not more: docs/kernels/many_heads.md.
//
// Sparse FP8 MLA prefill for Hopper, 32 heads: a CTA goes through rows (query tokens) one after
// another, and each warpgroup has one part in all of them. What lies between two rows overlaps: producers
// gather and the logits warps work on the next row while the value warps finish this one.
//
//   producers   4 warps: index -> row address -> one bulk copy per row, into a ring of 16 slots of 16
//   logits      2 warpgroups take blocks of 64 tokens in turns: S^T = K Q^T by wgmma, K from
//               the raw rows through registers, Q from shared memory; softmax; weights to shared memory
//   values      2 warpgroups: O^T[256 dims x heads] += V^T P^T by wgmma, V through registers
//
// K and V are converted once per token whatever the heads: that, not the tensor cores, is what a warpgroup's
// time goes into, so their products are asynchronous and many warps share the conversions. Bases of the
// softmax are common to the CTA and decided on in the order of the blocks: a row's result is the same
// whichever warpgroup is faster. See docs/kernels/many_heads.md.
#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/many_heads/merge.cuh"
#include "cuda/sparse_attention/sm90/many_heads/query.cuh"
#include "cuda/sparse_attention/sm90/many_heads/split_smem.cuh"
#include "cuda/sparse_attention/sm90/many_heads/values.cuh"
#include "cuda/sparse_attention/sm90/many_heads/walk_smem.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"
#include "cuda/sparse_attention/sm90/walk.cuh"

namespace mla_fp8::gpu {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_split_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    Exchange<C>(smem).init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();
  Work w = find_work<C>(params);
  GroupQuery<C> q;
  const KeySurvey survey = survey_row<C>(params, w, smem, warp, lane, [&] {
    if (warp < kConsumerWarps) q.load(params.p, w.token, w.first_head, warp, lane);
  });
  const bool split = params.num_splits > 1;

  if (warp >= kConsumerWarps + C::kLogitWarps) {
    give_up_registers<C::kProducerRegisters>();
    Producer<C>(params, w, survey, smem, warp - kConsumerWarps - C::kLogitWarps, lane).run();
    __syncwarp();
    if (split) cluster_sync(), cluster_sync();  // partials are written; and read: shared memory may go
  } else if (warp >= kConsumerWarps) {
    set_registers<C::kLogitRegisters, C::kThreads>();
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    SplitLogits<C> logits(params, w, smem, warp - kConsumerWarps, lane);
    logits.run();
    __syncwarp();
    if (split) cluster_sync(), cluster_sync();
  } else {
    take_registers<C::kValueRegisters>();
    q.store(smem, warp, lane);
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    SplitValues<C> values(smem, warp, lane);
    values.run(w.num_blocks);
    named_barrier(kBarrierFinish, C::kWorkers);
    if (split) {
      values.write_partial();
      __syncwarp();
      cluster_sync();
      merge_group_splits<C>(params, w, smem, warp, lane);
      __syncwarp();
      cluster_sync();
    } else {
      values.store(params.p, w, thread);
    }
  }
#endif
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_walk_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    RowExchange<C>(smem).init();
    RowSurveys<C>(smem, 0).init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();
  __syncthreads();
  if (warp >= kConsumerWarps + C::kLogitWarps) {
    give_up_registers<C::kProducerRegisters>();
    RowProducer<C>(params, smem, warp - kConsumerWarps - C::kLogitWarps, lane).run();
  } else if (warp >= kConsumerWarps) {
    take_registers<C::kLogitRegisters>();
    WalkLogits<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    take_registers<C::kValueRegisters>();
    WalkValues<C>(params, smem, warp, lane).run();
  }
#endif
}

}  // namespace

void launch_many_heads(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  with_variant<Kernel::kManyHeads>(p, plan, [&](auto variant, auto layout) {
    constexpr Variant kVariant = kVariants[variant()];
    constexpr int kGroups = kVariant.heads / kGroupHeads;
    const auto split = [&]<bool kFindsLargest>(constant<kFindsLargest>) {
      using C = GroupConfig<layout(), kGroups, kFindsLargest>;
      launch_items<C>(many_heads_split_kernel<C>, p, plan, stream);
    };
    if constexpr (kVariant.schedule == Schedule::kWalk) {
      using C = RowGroupConfig<layout()>;
      static_assert(C::kHeads == kVariant.heads);
      launch_items<C>(many_heads_walk_kernel<C>, p, plan, stream);
    } else if (p.max_logits) {
      split(constant<true>{});
    } else {
      split(constant<false>{});
    }
  });
}

}  // namespace mla_fp8::gpu
