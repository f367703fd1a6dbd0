#pragma once
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
// is reached, and why not more: docs/sparse_decode.md.
#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_decode/group_merge.cuh"
#include "cuda/sparse_decode/group_query.cuh"
#include "cuda/sparse_decode/launch_clusters.cuh"
#include "cuda/sparse_decode/logit_warp.cuh"
#include "cuda/sparse_decode/merge.cuh"
#include "cuda/sparse_decode/value_warp.cuh"

namespace mla_fp8::gpu {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sparse_decode_groups_kernel(const __grid_constant__ TeamParams params) {
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
    LogitWarp<C> logits(params, w, smem, warp - kConsumerWarps, lane);
    logits.run();
    __syncwarp();
    if (split) cluster_sync(), cluster_sync();
  } else {
    take_registers<C::kValueRegisters>();
    q.store(smem, warp, lane);
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    ValueWarp<C> values(smem, warp, lane);
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

template <KvLayoutId kId>
void launch_warpgroups(const SparseAttentionParams& p, const TeamPlan& plan, gpuStream_t stream) {
  const auto launch = [&]<class C>(C) {
    launch_clusters<C>(sparse_decode_groups_kernel<C>, p, plan.num_splits, stream);
  };
  const auto with_heads = [&]<bool kFindsLargest>(constant<kFindsLargest>) {
    if (plan.head_groups == 8) launch(GroupConfig<kId, 8, kFindsLargest>{});
    else launch(GroupConfig<kId, 4, kFindsLargest>{});
  };
  if (p.max_logits) with_heads(constant<true>{});
  else with_heads(constant<false>{});
}

}  // namespace mla_fp8::gpu
