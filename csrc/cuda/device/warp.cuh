#pragma once
// Sums, maxima and broadcasts over the lanes of a warp or the threads of a block.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/platform.cuh"

namespace mla_fp8::gpu {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// The maximum over each group of kLanes neighbouring lanes, in all of them.
template <int kLanes = kWarpSize>
__device__ __forceinline__ uint32_t lanes_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kLanes == kWarpSize) return __reduce_max_sync(kFullWarp, x);
  else
#endif
  {
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, offset));
    return x;
  }
}

// Returns x of `lane`; lanes may ask for different ones.
template <class T>
__device__ __forceinline__ T broadcast(T x, int lane) {
  static_assert(sizeof(T) % 4 == 0 && std::is_trivially_copyable_v<T>);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &x, sizeof x);
#pragma unroll
  for (uint32_t& word : words) word = __shfl_sync(kFullWarp, word, lane);
  memcpy(&x, words, sizeof x);
  return x;
}

template <int kLanes = kWarpSize, class T>
__device__ __forceinline__ T lanes_sum(T x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kLanes == kWarpSize && sizeof(T) == 4) return __reduce_add_sync(kFullWarp, x);
  else
#endif
  {
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
    return x;
  }
}

// The sum over lanes up to and including this one.
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T below = __shfl_up_sync(kFullWarp, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

// The sum over the block's threads up to and including this one. All threads of its kWarps warps call it.
template <int kWarps, class T>
__device__ __forceinline__ T block_inclusive_sum(T x) {
  static_assert(kWarps <= kWarpSize);
  // Alignment keeps a vector load of the sums from reading, and racing with, the variable beside them.
  struct alignas(16) Sums {
    T of_warp[kWarpSize];
  };
  MLA_SHARED(Sums, sums);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  x = warp_inclusive_sum(x);
  __syncthreads();  // the last call's sums have been read
  if (lane == kWarpSize - 1) sums.of_warp[warp] = x;
  __syncthreads();
  return x + lanes_sum(lane < warp ? sums.of_warp[lane] : T{0});
}

}  // namespace mla_fp8::gpu
