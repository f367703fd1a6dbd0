#pragma once
// A CTA of many_heads that takes one item: its barriers, and what its warps do.
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/many_heads/neighbours.cuh"
#include "cuda/sparse_attention/sm90/many_heads/query.cuh"
#include "cuda/sparse_attention/sm90/many_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/many_heads/values.cuh"
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/producers.cuh"

namespace mla_fp8::gpu {

// One thread calls it.
template <class C>
__device__ void init_split(uint8_t* smem) {
  Ring<C>{shared_address(smem)}.init();
  BlockExchange<C>(smem).init();
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
  if constexpr (C::kFetchesEarly) {
    survey_part<C>(params, w, smem, warp, lane, [] {});
    if (warp >= kConsumerWarps + C::kLogitWarps) {
      give_up_registers<C::kProducerRegisters>();
      run_early<C>(params, w, smem, warp - kConsumerWarps - C::kLogitWarps, lane);
      return;
    }
    survey = end_survey<C>(params, w, smem, warp, lane);
  } else if constexpr (C::kTiles == Tiles::kLists) {
    survey = KeySurvey::of_valid(w.num_keys);
    w.template take_share<C>(w.num_keys, params.splits);
    w.keys.fetch_lines(w.first_block * C::kBlockKeys, w.num_blocks * C::kBlockKeys, thread);
  } else {
    survey = survey_query<C>(params, w, smem, warp, lane, [] {});
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

}  // namespace mla_fp8::gpu
