#pragma once
// Accesses to shared memory by 32-bit address: words, and 8x8 matrices for the matrix instructions (mma.cuh).
// Compilers keep such addresses uniform where they would not keep a pointer.
#include <cstddef>
#include <cstdint>

#include "cuda/device/platform.cuh"

// The offset of a field in the struct C::Smem, which describes a kernel's shared memory.
#define MLA_SMEM(C, field) static_cast<int>(offsetof(typename C::Smem, field))

namespace mla_fp8::gpu {

inline constexpr int kMaxSharedBytes = 227 * 1024;  // most bytes of a block on sm_90

#if MLA_FP8_PTX

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ inline uint32_t load_shared_1(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint32_t load_shared_2(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint32_t load_shared_4(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ inline uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ inline void store_shared_1(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ inline void store_shared_2(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(v)) : "memory");
}
__device__ inline void store_shared_4(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ inline void store_shared_4_if(bool stores, uint32_t address, uint32_t v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b32 [%0], %1; }" ::"r"(address), "r"(v),
               "r"(static_cast<int>(stores))
               : "memory");
}
__device__ inline void store_shared_8(uint32_t address, uint64_t v) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ inline void store_shared_16(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Adds 1 to a word, atomically.
__device__ inline void add_shared_1(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8. Register
// m gets columns 2t, 2t + 1 of row g of matrix m; in the _trans form, rows 2t, 2t + 1 of column g.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Transposes an 8x8 matrix of 16-bit elements in the registers of a warp: a C fragment becomes a B fragment.
__device__ inline uint32_t movmatrix_trans(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// ---- sm_90 ----
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ inline void stmatrix_x2_trans(uint32_t address, uint32_t x, uint32_t y) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y)
               : "memory");
}

#else

__device__ inline uint32_t shared_address(const void* p) { return mla_shared_address(p); }
__device__ inline uint32_t load_shared_4(uint32_t address) { return *mla_shared_pointer<uint32_t>(address); }
__device__ inline uint2 load_shared_8(uint32_t address) {
  return {load_shared_4(address), load_shared_4(address + 4)};
}
__device__ inline void store_shared_4(uint32_t address, uint32_t v) {
  *mla_shared_pointer<uint32_t>(address) = v;
}

#endif

}  // namespace mla_fp8::gpu
