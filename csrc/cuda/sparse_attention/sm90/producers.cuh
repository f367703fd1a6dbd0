#pragma once
// Runs the warps that do not compute in a CTA with one query: producers (gather.cuh) and, over two layouts,
// warps that expand rows (mixed_gather.cuh, mixed_expand.cuh).
#include "cuda/sparse_attention/sm90/mixed_gather.cuh"

namespace mla_fp8::gpu {

// Runs such a warp, unless it is an early producer.
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
// Runs an early producer, and returns whether this warp is one. It surveys nothing, and gives up its
// registers at once: the consumers wait for them.
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
// Lets early producers begin. Called when warp 0 has made the barriers.
template <class C>
__device__ __forceinline__ void let_producers_begin(int warp) {
  if constexpr (kProducersAreEarly<C>)
    if (warp == 0) MixedProducer<C>::let_begin();
  if constexpr (C::kFetchesEarly)
    if (warp == 0) named_barrier_arrive(kBarrierBegin, kBeginThreads<C>);
}

}  // namespace mla_fp8::gpu
