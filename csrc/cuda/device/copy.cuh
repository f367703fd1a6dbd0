#pragma once
// Copies that need no registers: between global and shared memory, between shared memories, to the L2.
#include <cstdint>

namespace mla_fp8::gpu {

// Copies 16 bytes from global to shared memory, past the L1 or through it. If not `valid` it writes zeros.
template <bool kThroughL1 = false>
__device__ inline void cp_async_16(uint32_t dst, const void* src, bool valid) {
  if constexpr (kThroughL1)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ inline void cp_async_8(uint32_t dst, const void* src, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(valid ? 8 : 0)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- sm_90 ----
// The copy engine copies global to shared memory and completes the bytes at mbarrier `bar`. Addresses and
// size are multiples of 16 bytes.
__device__ inline void bulk_copy(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// bulk_copy of bytes that are not read again soon: they leave the L2 before others.
__device__ inline void bulk_copy_once(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile(
      "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], first; }" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// bulk_copy from this CTA's shared memory to another's of the cluster; `dst` and `bar` are cluster addresses.
__device__ inline void bulk_copy_to_cluster(uint32_t dst, uint32_t src, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          dst),
      "r"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// Prefetches global memory to the L2. Address and size are multiples of 16 bytes.
__device__ inline void bulk_prefetch_l2(const void* src, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}
// Makes shared memory written by ordinary stores visible to the copy engine and to wgmma.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace mla_fp8::gpu
