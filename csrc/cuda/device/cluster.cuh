#pragma once
// The CTAs of a cluster (sm_90): their barrier, and accesses to each other's shared memory.
#include <cstdint>

#include "cuda/device/mbarrier.cuh"

namespace mla_fp8::gpu {

__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// A barrier of the cluster after which others read nothing but what each block has written to its own shared
// memory. It takes a fence of the block; cluster_sync waits for all stores of the GPU.
__device__ inline void cluster_sync_shared() {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  cluster_wait();
#else
  cluster_sync();
#endif
}
// The barrier before a block ends whose shared memory others read. Callers have used all that they read
// there, so no read is under way. Nobody waits for their writes: outputs may still be on their way to memory.
__device__ inline void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  cluster_wait();
}
// The address, in the cluster's window, of the same byte of block `rank`'s shared memory.
__device__ inline uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ inline float load_cluster_float(uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline float2 load_cluster_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ inline float4 load_cluster_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ inline uint32_t load_cluster_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint4 load_cluster_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ inline void store_cluster_4(uint32_t address, uint32_t v) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ inline void store_cluster_8(uint32_t address, uint64_t v) {
  asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline unsigned cluster_index() {  // of the cluster in its grid; without clusters, of the block
  unsigned index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ inline int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
__device__ inline void store_cluster_float(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// Arrives at a barrier anywhere in the cluster, after reads. The scope is the block: the cluster's, which
// writes would need, would take a fence of the GPU for each arrival.
__device__ inline void mbarrier_arrive_cluster_warp(uint32_t bar, int lane) {
  __syncwarp();
  if (kWarpArrivals > 1 || lane == 0)
    asm volatile("mbarrier.arrive.release.cta.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

}  // namespace mla_fp8::gpu
