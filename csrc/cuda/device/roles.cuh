#pragma once
// Barriers among some warps of a block, and registers by role, for kernels whose warps have different roles.
#include <cstdint>

namespace mla_fp8::gpu {

__device__ inline void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// A barrier of the whole block for warps that call it in different places, as they may not __syncthreads.
template <int kThreads>
__device__ inline void block_barrier() {
  named_barrier(0, kThreads);
}
// Counts as one of the barrier's threads without waiting.
__device__ inline void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// named_barrier, which also tells whether `x` holds in any of its threads.
__device__ inline bool named_barrier_any(int id, int num_threads, bool x) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 q, %3, 0; barrier.cta.red.or.pred p, %1, %2, q; selp.u32 %0, 1, 0, p; }"
      : "=r"(any)
      : "r"(id), "r"(num_threads), "r"(static_cast<uint32_t>(x))
      : "memory");
  return any;
}

// ---- sm_90 ----
// Moves registers between the warpgroups of a CTA. Every warp of a warpgroup calls it.
template <int kRegisters>
__device__ inline void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Changes a warp's registers from the even share of a block of kThreads to kRegisters.
template <int kRegisters, int kThreads>
__device__ inline void set_registers() {
  if constexpr (kRegisters < 65536 / kThreads) give_up_registers<kRegisters>();
  else take_registers<kRegisters>();
}

}  // namespace mla_fp8::gpu
