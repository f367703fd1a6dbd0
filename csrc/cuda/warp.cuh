#pragma once
// Reductions over groups of kLanes neighbouring lanes; every lane of the group gets the result.
#include <cstdint>

#include "cuda/launch.cuh"

namespace mla_fp8::gpu {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

template <int kLanes = kWarpSize>
__device__ __forceinline__ uint32_t lanes_max(uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

}  // namespace mla_fp8::gpu
