#pragma once
// The warps of a CTA with one query that do not compute: of one layout producers (gather.cuh), of two also
// warps that expand (mixed_gather.cuh, mixed_expand.cuh).
#include "cuda/device/roles.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"
#include "cuda/sparse_attention/sm90/mixed_gather.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// The warps of a CTA with one query that do not compute, but for early producers.
template <class C>
__device__ __forceinline__ void run_producers(const KernelParams& params, const typename C::Item& w,
                                              const KeySurvey& survey, uint8_t* smem, int warp, int lane) {
  if constexpr (C::kExpanders > 0) {
    give_up_registers<C::kExpanderRegisters>();
    StageExpander<C>(smem, lane).run(warp - C::kProducers, w.num_blocks * C::kBlockStages);
  } else if constexpr (!kProducersAreEarly<C>) {
    give_up_registers<C::kProducerRegisters>();
    SplitProducer<C>(params, w, survey, smem, warp, lane).run();
  }
}
// These: true if this warp is one. They survey nothing and give up their registers at once, for which the
// consumers wait.
template <class C>
__device__ __forceinline__ bool run_early_producers(const KernelParams& params, typename C::Item& w,
                                                    uint8_t* smem, int warp, int lane) {
  if constexpr (kProducersAreEarly<C>) {
    if (warp >= 0 && warp < C::kProducers) {
      give_up_registers<C::kProducerRegisters>();
      MixedProducer<C>(params, smem, warp, lane_of_role<C>(lane)).run_early(w);
      return true;
    }
  }
  return false;
}
// After the barriers are made, by warp 0.
template <class C>
__device__ __forceinline__ void let_producers_begin(int warp) {
  if constexpr (kProducersAreEarly<C>)
    if (warp == 0) MixedProducer<C>::let_begin();
  if constexpr (C::kFetchesEarly)
    if (warp == 0) named_barrier_arrive(kBarrierBegin, kBeginThreads<C>);
}

}  // namespace mla_fp8::gpu
