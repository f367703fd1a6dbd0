#pragma once
// mbarriers (sm_90). A phase ends when `count` arrivals and all expected bytes have come.
#include <cstdint>

namespace mla_fp8::gpu {

__device__ inline void mbarrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void mbarrier_arrive_expect(uint32_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Whether this build is for racecheck, which does not follow all that orders accesses.
#if MLA_FP8_RACECHECK
inline constexpr bool kForRacecheck = true;
#else
inline constexpr bool kForRacecheck = false;
#endif
// Arrivals of a warp at a barrier that counts warps: one lane arrives for all, after __syncwarp. racecheck
// takes what the other lanes did for unordered, so in a build for it every lane arrives.
inline constexpr int kWarpArrivals = kForRacecheck ? 32 : 1;
__device__ inline void mbarrier_arrive_warp(uint32_t bar, int lane) {
  __syncwarp();
  if (kWarpArrivals > 1 || lane == 0) mbarrier_arrive(bar);
}
__device__ inline void mbarrier_arrive_expect_warp(uint32_t bar, int bytes, int lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive_expect(bar, bytes);
  else if (kWarpArrivals > 1) mbarrier_arrive(bar);
}
// Arrives once the copies of the calling thread's cp.async so far have landed.
__device__ inline void mbarrier_arrive_cp_async(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
// Waits until the phase with this parity has ended.
__device__ inline void mbarrier_wait(uint32_t bar, int parity) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra WAIT; }" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// Whether the phase with this parity has ended.
__device__ inline bool mbarrier_test(uint32_t bar, int parity) {
  uint32_t ended;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(ended)
               : "r"(bar), "r"(parity)
               : "memory");
  return ended != 0;
}

// Waits at a ring: use i goes to place i % kPlaces, and each place has a barrier `bar`. wait_until_full waits
// until use i has come; wait_until_free waits until the use before it at that place is no longer needed.
template <int kPlaces>
__device__ inline void wait_until_full(uint32_t bar, int i) {
  mbarrier_wait(bar, i / kPlaces & 1);
}
template <int kPlaces>
__device__ inline void wait_until_free(uint32_t bar, int i) {
  mbarrier_wait(bar, (i / kPlaces & 1) ^ 1);
}

}  // namespace mla_fp8::gpu
