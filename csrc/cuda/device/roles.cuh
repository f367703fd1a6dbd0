#pragma once
// What warps with roles of their own need: barriers among some of them, and registers by role.
#include <cstdint>

namespace mla_fp8::gpu {

__device__ inline void named_barrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Of the whole block, for warps with roles of their own, which come from different places: __syncthreads must
// be the same call for all.
template <int kThreads>
__device__ inline void block_barrier() {
  named_barrier(0, kThreads);
}
// Counts as one of the threads without waiting.
__device__ inline void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// As named_barrier, and tells whether `x` holds in any of the threads.
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
// Moves registers between the warpgroups of a CTA; every warp of a warpgroup calls it.
template <int kRegisters>
__device__ inline void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// From the share that a block of kThreads is launched with to kRegisters.
template <int kRegisters, int kThreads>
__device__ inline void set_registers() {
  if constexpr (kRegisters < 65536 / kThreads) give_up_registers<kRegisters>();
  else take_registers<kRegisters>();
}

}  // namespace mla_fp8::gpu
