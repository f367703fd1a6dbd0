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
// of a row (first rows in, merge: about 9 K clocks); 32 heads by the tensor cores. See
// docs/kernels/few_heads.md.
//
// Sparse MLA prefill for Hopper, few heads: the warp-team kernel of sparse_decode with 4 / G rows in a CTA at
// once (G = groups of 8 heads), a team of 2 G warps on each (bf16 rows: two teams of G). Every place for a
// row goes through its rows without a word to the others: while one row ends and the next begins, the others
// keep the tensor cores busy, and the producers already gather what comes next.
//
//   8 or 4 producer warps   2 or 4 for a team (bf16 rows: 1), row after row
//   8 consumer warps        as in decode; where a row has two teams, its blocks alternate between them.
//                           Before a row they survey the keys of the one after it: producers need not wait
//   end of a row            the output is written straight from the fragments; two teams exchange halves of O
//                           through the place of Q first
//
// Bound: the gather from L2 for 8 heads, latency in the consumers for 16.
// See docs/kernels/few_heads.md.
#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/sm90/few_heads/finish.cuh"
#include "cuda/sparse_attention/sm90/few_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"
#include "cuda/sparse_attention/sm90/walk.cuh"

namespace mla_fp8::gpu {
namespace {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    few_heads_split_kernel(const __grid_constant__ TeamParams params) {
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

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    few_heads_walk_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    for (int row = 0; row < C::kRows; ++row) RowSurveys<C>(smem, row).init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();

  block_barrier<C::kThreads>();
  if (warp >= kConsumerWarps) {
    give_up_registers<C::kProducerRegisters>();
    RowProducer<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    constexpr int kRowWarps = C::kRowTeams * C::kMembers;
    take_registers<C::kConsumerRegisters>();
    Consumer<C> consumer(params, smem, warp, lane);
    RowFinish<C> finish(params, consumer, smem, lane);
    const int row = consumer.row(), warp_in_row = warp % kRowWarps;
    int block = consumer.team();  // in the ring's sequence
    const RowSurveys<C> surveys(smem, row);
    // Row n of the place; before it the keys of row n + 1 are surveyed.
    unsigned i = Unit<C>::first(row) - Unit<C>::stride();
    for (int n = -1; n < 0 || i < Unit<C>::count(params); ++n, i += Unit<C>::stride()) {
      const Unit<C> unit(params, i), next(params, i + Unit<C>::stride());
      const bool has_next = i + Unit<C>::stride() < Unit<C>::count(params);
      int lane = thread % kWarpSize;
      asm volatile("" : "+r"(lane));  // else all addresses of Q would be found once, and spilled
      Query<C, kRowWarps> q;
      if (n >= 0) q.load(params.p, unit.token, unit.first_head, warp_in_row, lane);
      if (has_next) surveys.write(n + 1, params.p, Keys(params.p, next.token), warp_in_row, lane);
      if (n < 0) continue;
      finish.barrier(row);  // the place of Q is free again
      q.store(smem + C::kQ + row * C::kQBytes, reinterpret_cast<float*>(smem + C::kQScale) + row * C::kHeads,
              warp_in_row, lane);
      finish.barrier(row);
      consumer.init();
      if (has_next) q.prefetch(params.p, next.token, next.first_head, warp_in_row, lane);
      const int num_keys = surveys.read(n, lane).num_keys;
      for (int first = consumer.team() % C::kRowTeams * C::kBlockTokens; first < num_keys;
           first += C::kRowTeams * C::kBlockTokens, block += C::kTeams)
        consumer.attend(block);
      finish.run(unit.token, unit.first_head);
    }
  }
#endif
}

}  // namespace

void launch_few_heads(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  with_variant<Kernel::kFewHeads>(p, plan, [&](auto variant, auto layout) {
    constexpr Variant kVariant = kVariants[variant()];
    constexpr bool kWalks = kVariant.schedule == Schedule::kWalk;
    constexpr int kGroups = kVariant.heads / kGroupHeads;
    using C = TeamConfig<layout(), kGroups, kVariant.producers, kWalks ? 4 / kGroups : 1>;
    if constexpr (kWalks) launch_items<C>(few_heads_walk_kernel<C>, p, plan, stream);
    else launch_items<C>(few_heads_split_kernel<C>, p, plan, stream);
  });
}

}  // namespace mla_fp8::gpu
