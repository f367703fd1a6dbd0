#pragma once
// Sparse FP8 MLA decode for Hopper: one CTA takes one query token, 8, 16 or 32 of its heads, and a share of
// its selected tokens.
//
//   all warps               survey the keys of the query; the CTAs of a row share the valid ones
//   4 or 8 producer warps   index -> row address -> one cp.async.bulk per row, into a ring of 8 or 16 slots
//                           of 16 rows as they lie in the cache: nothing is converted or copied again
//   8 consumer warps        in teams of W = 2 G warps, of bf16 rows G (G = groups of 8 heads). A team owns
//                           whole blocks of 16 W tokens and its own bases: teams wait for nobody
//       S^T = K Q^T         a warp: 16 tokens, all heads. Q stays in shared memory as the B operand, K comes
//                           from the raw rows by ldmatrix and a conversion; tile scales multiply accumulators
//       P = 2^(S - base)    one exchange per block inside a team (none for W = 1); a base moves, and O with
//                           it, only when a logit has passed it by 2^8
//       O^T += V^T P^T      a warp: 512 / W value dims, all heads: 64 accumulators, of bf16 rows 128. V comes
//                           from the same rows by ldmatrix.trans, scales multiply the weights
//   merge                   teams in shared memory, then the CTAs that share a row (a cluster) in distributed
//                           shared memory: one launch, no workspace, a fixed order of additions
//
// Bound, H200: 8 and 16 heads by the row gather (35 clocks per token and SM at 4.3 TB/s) plus the fixed cost
// of a row (first rows in, merge: about 9 K clocks); 32 heads by the tensor cores. See docs/sparse_decode.md.
#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_decode/launch_clusters.cuh"
#include "cuda/sparse_decode/merge.cuh"

namespace mla_fp8::gpu {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sparse_decode_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();
  Work w = find_work<C>(params);
  Query<C> q;
  const KeySurvey survey = survey_row<C>(params, w, smem, warp, lane, [&] {
    if (warp < kConsumerWarps) q.load(params.p, w.token, w.first_head, warp, lane);
  });

  if (warp >= kConsumerWarps) {
    give_up_registers<C::kProducerRegisters>();
    Producer<C>(params, w, survey, smem, warp - kConsumerWarps, lane).run();
    merge_stats<C>(params, w, smem, warp == kConsumerWarps, lane);
    __syncwarp();
    if (params.num_splits > 1) {
      cluster_sync();  // sums are written
      cluster_sync();  // sums are read: shared memory may go
    }
  } else {
    take_registers<C::kConsumerRegisters>();
    Consumer<C> consumer(params, smem, warp, lane);
    q.store(smem + C::kQ, reinterpret_cast<float*>(smem + C::kQScale), warp, lane);
    named_barrier(kBarrierQ, kConsumerThreads);
    consumer.init();
    for (int block = consumer.team(); block < w.num_blocks; block += C::kTeams) consumer.attend(block);
    write_partials<C>(consumer, smem, warp, lane);
    merge_teams<C>(params, w, smem, thread);
    if (params.num_splits > 1) {
      __syncwarp();
      cluster_sync();
      merge_splits<C>(params, w, smem, thread);
      __syncwarp();
      cluster_sync();
    }
  }
#endif
}

// The variants of one layout.
template <KvLayoutId kId>
void launch_warp_teams(const SparseAttentionParams& p, const TeamPlan& plan, gpuStream_t stream) {
  const int64_t tokens = total_topk(p);
  switch (plan.head_groups) {
    case 1:
      // Cheap tokens and many of them: 4 producer warps would be the limit.
      if (tokens / plan.num_splits >= 512)
        return launch_clusters<TeamConfig<kId, 1, 8>>(sparse_decode_kernel<TeamConfig<kId, 1, 8>>, p,
                                                      plan.num_splits, stream);
      return launch_clusters<TeamConfig<kId, 1, 4>>(sparse_decode_kernel<TeamConfig<kId, 1, 4>>, p,
                                                    plan.num_splits, stream);
    case 2:
      return launch_clusters<TeamConfig<kId, 2, 4>>(sparse_decode_kernel<TeamConfig<kId, 2, 4>>, p,
                                                    plan.num_splits, stream);
    default:
      if constexpr (kv_layout(kId).nope_format == Format::kBf16)
        launch_clusters<TeamConfig<kId, 4, 4>>(sparse_decode_kernel<TeamConfig<kId, 4, 4>>, p,
                                               plan.num_splits, stream);
  }
}

}  // namespace mla_fp8::gpu
