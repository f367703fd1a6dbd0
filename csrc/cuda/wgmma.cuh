#pragma once
// Warpgroup matrix instructions of sm_90a: D[64 x N] += A[64 x 16] B[16 x N], N = 32 or 64, A from registers,
// B from shared memory. Warp w of the four owns rows 16 w .. 16 w + 15; its A and D fragments are those of
// mma.cuh, D for each group of 8 columns.
#include <cstdint>

namespace mla_fp8::gpu {

// B in shared memory without swizzle: 8x8 core matrices of 128 contiguous bytes, a row (one column of B, 8
// consecutive k) in 16 bytes. `stride_k`, `stride_n`: bytes from a core matrix to the next in that direction.
__device__ inline uint64_t wgmma_descriptor(uint32_t address, int stride_k, int stride_n) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(stride_k >> 4) << 16 |
         static_cast<uint64_t>(stride_n >> 4) << 32;
}
// Orders register and shared memory accesses of this warp before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending committed groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across a fence or a wait.
template <int kGroups>
__device__ inline void pin_registers(float (&d)[kGroups][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kGroups; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

#define MLA_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MLA_WGMMA_N32(name, type)                                                                          \
  __device__ inline void name(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
    asm volatile(                                                                                          \
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, "  \
        "%20, p, 1, 1, 0; }"                                                                               \
        : MLA_D4(0), MLA_D4(1), MLA_D4(2), MLA_D4(3)                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
  }
#define MLA_WGMMA_N64(name, type)                                                                           \
  __device__ inline void name(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {       \
    asm volatile(                                                                                           \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type  \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"  \
        : MLA_D4(0), MLA_D4(1), MLA_D4(2), MLA_D4(3), MLA_D4(4), MLA_D4(5), MLA_D4(6), MLA_D4(7)            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
  }
MLA_WGMMA_N32(wgmma_bf16, "bf16")
MLA_WGMMA_N32(wgmma_f16, "f16")
MLA_WGMMA_N64(wgmma_bf16, "bf16")
MLA_WGMMA_N64(wgmma_f16, "f16")
#undef MLA_WGMMA_N64
#undef MLA_WGMMA_N32
#undef MLA_D4

}  // namespace mla_fp8::gpu
