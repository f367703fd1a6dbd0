#pragma once
// A CTA with one item: its roles from the survey to the output. Barriers and who waits for whom: smem.cuh.
#include "cuda/sparse_attention/sm90/many_heads/logits.cuh"
#include "cuda/sparse_attention/sm90/many_heads/values.cuh"

namespace mla_fp8::gpu {

// The classes of the warps that compute (runs.cuh has others).
template <class C>
struct Roles {
  using Logits = SplitLogits<C>;
  using Values = SplitValues<C>;
};

// All threads call it, once the item is known.
template <class C>
__device__ __forceinline__ void attend_to_item(const KernelParams& params, typename C::Item& w, uint8_t* smem,
                                               int warp, int lane) {
  const int thread = threadIdx.x;
  // Warp 0 has made Q's barrier. If all have met since, warp 1 copies Q: it need not wait for the tile.
  if (warp == (params.num_tiles > 0)) WgmmaQuery<C>::copy(params.p, w, shared_address(smem), lane);
  if constexpr (C::kNeighbours) block_barrier<C::kThreads>();  // what they share is there
  w.template begin<C>(params, thread);
  if (Producers<C>::run_early(params, w, smem, warp - C::kFirstProducer, lane)) return;
  KeySurvey survey;
  if constexpr (C::Item::kIsListed) {
    survey = w.template survey_list<C>(params, thread);
  } else {
    survey_part<C>(params, w, smem, warp, lane, [] {});
    if constexpr (C::kFetchesEarly) {
      if (warp >= C::kFirstProducer) {
        give_up_registers<C::kProducerRegisters>();
        return run_early<C>(params, w, smem, warp - C::kFirstProducer, lane);
      }
    }
    survey = end_survey<C>(params, w, smem, warp, lane);
  }

  if (!C::kFetchesEarly && warp >= C::kFirstProducer) {
    Producers<C>::run(params, w, survey, smem, warp - C::kFirstProducer, lane_of_role<C>(lane));
  } else if (warp >= kConsumerWarps) {
    set_registers<C::kLogitRegisters, C::kThreads>();
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    typename Roles<C>::Logits(params, w, smem, warp - kConsumerWarps, lane_of_role<C>(lane)).run();
  } else {
    take_registers<C::kValueRegisters>();
    WgmmaQuery<C> q;
    q.load_copied(params.p, w, smem, warp, lane);
    named_barrier(kBarrierQ, kConsumerThreads);
    q.store(smem, warp, lane);
    named_barrier(kBarrierWorkersQ, C::kWorkers);
    typename Roles<C>::Values values(smem, warp, lane_of_role<C>(lane));
    values.run(params, w);
    if (w.is_whole()) {
      values.store(params.p, w, thread);
    } else if constexpr (!C::kRuns) {
      values.leave(QueryPart<C>(params, blockIdx.x));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_heads_split_kernel(const __grid_constant__ KernelParams params) {
  const auto init = [](uint8_t* smem) { init_barriers<C>(smem); };
  run_cta(init, [&](uint8_t* smem, int warp, int lane) {
    Producers<C>::let_begin(warp);
    begin_grid(params.follows);
    typename C::Item w;
    w = C::Item::template find<C>(params, smem, warp, lane);
    if (w.is_left_out(params)) return leave_grid(params.follows);
    attend_to_item<C>(params, w, smem, warp, lane);
    end_grid(params.follows);
  });
}

}  // namespace mla_fp8::gpu
