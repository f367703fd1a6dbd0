#pragma once
// Accesses to global memory in pieces of 4, 8 and 16 bytes a lane.
#include <cstdint>

#include "common/fp8.h"
#include "cuda/device/platform.cuh"

namespace mla_fp8::gpu {

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t data[kWords];
  __device__ uint32_t& operator[](int i) { return data[i]; }
  __device__ const uint32_t& operator[](int i) const { return data[i]; }
};

#if MLA_FP8_PTX

// The words at p, or zeros without an access. There is no branch, so all loads of a row are in flight before
// the first is used. They do not go into the L1: the bytes are read once.
template <int kWords>
__device__ __forceinline__ Words<kWords> load_if(const void* p, bool wanted) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  Words<kWords> w;
  if constexpr (kWords == 1) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n"
        "@p ld.global.L1::no_allocate.u32 %0, [%1];\n}"
        : "=&r"(w[0])
        : "l"(p), "r"(static_cast<uint32_t>(wanted)));
  } else if constexpr (kWords == 2) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
        "@p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
        : "=&r"(w[0]), "=&r"(w[1])
        : "l"(p), "r"(static_cast<uint32_t>(wanted)));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 "
        "%3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(w[0]), "=&r"(w[1]), "=&r"(w[2]), "=&r"(w[3])
        : "l"(p), "r"(static_cast<uint32_t>(wanted)));
  }
  return w;
}

// Streaming stores are for bytes that no kernel reads soon: they leave the L2 first.
__device__ __forceinline__ void store(void* p, const Words<1>& w, bool streaming = false) {
  streaming ? __stcs(static_cast<unsigned*>(p), w[0]) : void(*static_cast<uint32_t*>(p) = w[0]);
}
__device__ __forceinline__ void store(void* p, const Words<2>& w, bool streaming = false) {
  const uint2 v{w[0], w[1]};
  streaming ? __stcs(static_cast<uint2*>(p), v) : void(*static_cast<uint2*>(p) = v);
}
__device__ __forceinline__ void store(void* p, const Words<4>& w, bool streaming = false) {
  const uint4 v{w[0], w[1], w[2], w[3]};
  streaming ? __stcs(static_cast<uint4*>(p), v) : void(*static_cast<uint4*>(p) = v);
}

// Prefetches a line to the L1. No kernel may write it meanwhile.
__device__ __forceinline__ void prefetch_l1(const void* p) {
  [[maybe_unused]] uint32_t unused;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(unused) : "l"(p));
}
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#else

template <int kWords>
__device__ __forceinline__ Words<kWords> load_global(const void* p) {
  const auto* const from =
      mla_global_pointer(static_cast<const uint32_t*>(__builtin_assume_aligned(p, 4 * kWords)));
  Words<kWords> w;
#pragma unroll
  for (int i = 0; i < kWords; ++i) w[i] = from[i];
  return w;
}
template <int kWords>
__device__ __forceinline__ Words<kWords> load_if(const void* p, bool wanted) {
  Words<kWords> w{};
  if (wanted) w = load_global<kWords>(p);
  return w;
}

template <int kWords>
__device__ __forceinline__ void store(void* p, const Words<kWords>& w, bool = false) {
  *static_cast<Words<kWords>*>(p) = w;
}

__device__ __forceinline__ void prefetch_l2(const void*) {}

#endif

// Element i of an index tensor of int32 or int64.
__device__ __forceinline__ int64_t load_index(const void* indices, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

}  // namespace mla_fp8::gpu
