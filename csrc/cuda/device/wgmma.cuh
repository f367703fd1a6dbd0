#pragma once
// Warpgroup matrix instructions of sm_90a: D[64 x N] += A[64 x 16] B[16 x N], with B from shared memory and A
// from registers or shared memory. Warp w of four owns rows 16 w .. 16 w + 15. Its A and D fragments are
// those of mma.cuh, D one for each group of 8 columns.
#include <cstdint>

namespace mla_fp8::gpu {

// Describes B in shared memory without swizzle. An 8x8 core matrix is 128 contiguous bytes; 16 bytes are one
// column of B, 8 consecutive k. `stride_k`, `stride_n`: bytes between core matrices in that direction.
__device__ inline uint64_t wgmma_descriptor(uint32_t address, int stride_k, int stride_n) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(stride_k >> 4) << 16 |
         static_cast<uint64_t>(stride_n >> 4) << 32;
}
// Describes A or B in swizzled panels of 64 elements x any number of rows, at multiples of 1024 bytes. A row
// is 128 contiguous bytes; its eight 16-byte chunks lie in the order chunk ^ row % 8. Elements of a row are
// consecutive in k, or, for the _t forms of B, in n; `stride_n` is then bytes from a panel to the next in n.
// 16 further in k is +32 bytes in a row, or +16 rows (2048 bytes). `stride_8`: bytes between eights of rows.
__device__ inline uint64_t wgmma_panel_descriptor(uint32_t address, int stride_n = 0, int stride_8 = 1024) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(stride_n >> 4) << 16 |
         static_cast<uint64_t>(stride_8 >> 4) << 32 | uint64_t{1} << 62;
}
// The descriptor of what lies `bytes` further on.
__device__ inline uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);  // no carry: addresses have 18 bits
  return descriptor & ~uint64_t{0xffffffff} | low;
}
// Orders register and shared memory accesses of this warp before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups are in flight.
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

#define MLA_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MLA_WGMMA_N16(name, type)                                                                          \
  __device__ inline void name(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." type \
                 "." type " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"      \
                 : MLA_D4(d, 0), MLA_D4(d, 1)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                   \
  }
#define MLA_WGMMA_N32(name, type)                                                                          \
  __device__ inline void name(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
    asm volatile(                                                                                          \
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, "  \
        "%20, p, 1, 1, 0; }"                                                                               \
        : MLA_D4(d, 0), MLA_D4(d, 1), MLA_D4(d, 2), MLA_D4(d, 3)                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
  }
#define MLA_WGMMA_N48(name, type)                                                                           \
  __device__ inline void name(float (&d)[6][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {       \
    asm volatile(                                                                                           \
        "{ .reg .pred p; setp.ne.b32 p, %29, 0; wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type  \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
        "%21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0; }"                                          \
        : MLA_D4(d, 0), MLA_D4(d, 1), MLA_D4(d, 2), MLA_D4(d, 3), MLA_D4(d, 4), MLA_D4(d, 5)                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
  }
#define MLA_WGMMA_N64(name, type)                                                                           \
  __device__ inline void name(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {       \
    asm volatile(                                                                                           \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type  \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"  \
        : MLA_D4(d, 0), MLA_D4(d, 1), MLA_D4(d, 2), MLA_D4(d, 3), MLA_D4(d, 4), MLA_D4(d, 5), MLA_D4(d, 6), \
          MLA_D4(d, 7)                                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
  }
MLA_WGMMA_N16(wgmma_bf16, "bf16")
MLA_WGMMA_N16(wgmma_f16, "f16")
MLA_WGMMA_N32(wgmma_bf16, "bf16")
MLA_WGMMA_N32(wgmma_f16, "f16")
MLA_WGMMA_N48(wgmma_bf16, "bf16")
MLA_WGMMA_N48(wgmma_f16, "f16")
MLA_WGMMA_N64(wgmma_bf16, "bf16")
MLA_WGMMA_N64(wgmma_f16, "f16")
#undef MLA_WGMMA_N64
#undef MLA_WGMMA_N48
#undef MLA_WGMMA_N32
#undef MLA_WGMMA_N16

// bf16 from swizzled panels: N = 64 or 72 with B along k, N = 256 with B along n.
#define MLA_D32(d, i)                                                                                     \
  MLA_D4(d, i), MLA_D4(d, i + 1), MLA_D4(d, i + 2), MLA_D4(d, i + 3), MLA_D4(d, i + 4), MLA_D4(d, i + 5), \
      MLA_D4(d, i + 6), MLA_D4(d, i + 7)
#define MLA_R32                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_R128                                                                                \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
  "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, "  \
  "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "  \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, "    \
  "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "  \
  "%123, %124, %125, %126, %127"
__device__ inline void wgmma_bf16_ss(float (&d)[8][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MLA_R32
      "}, %32, %33, p, 1, 1, 0, 0; }"
      : MLA_D32(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void wgmma_bf16_ss(float (&d)[9][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %38, 0; wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 " MLA_R32
      ", %32, %33, %34, %35}, %36, %37, p, 1, 1, 0, 0; }"
      : MLA_D32(d, 0), MLA_D4(d, 8)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void wgmma_bf16_ss_t(float (&d)[32][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " MLA_R128 "}, %128, %129, p, 1, 1, 0, 1; }"
      : MLA_D32(d, 0), MLA_D32(d, 8), MLA_D32(d, 16), MLA_D32(d, 24)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void wgmma_bf16_t(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %133, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " MLA_R128
      "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1; }"
      : MLA_D32(d, 0), MLA_D32(d, 8), MLA_D32(d, 16), MLA_D32(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#undef MLA_R128
#undef MLA_R32
#undef MLA_D32
#undef MLA_D4

}  // namespace mla_fp8::gpu
