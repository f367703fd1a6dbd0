#pragma once
// Launching on the caller's stream: no allocation, no synchronisation, so every op can be captured in a
// graph.
#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8::gpu {

inline constexpr int kWarpSize = 32;
#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
inline constexpr int kMaxThreadsPerSm = 1536;
#else
inline constexpr int kMaxThreadsPerSm = 2048;
#endif

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("mla_fp8: ") + what + ": " + cudaGetErrorString(status));
}

// Whether the current device can start a grid while the one before it drains (programmatic dependent launch).
inline bool has_dependent_launch() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major >= 9;
}

// Every kernel calls this before its first access to global memory: the grid before it may still be running.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct LaunchConfig {
  int64_t grid;  // blocks
  int block;     // threads
  gpuStream_t stream;
};

template <class Params>
void launch(void (*kernel)(Params), const LaunchConfig& c, const Params& params) {
  if (c.grid < 1 || c.grid > INT_MAX)
    throw std::runtime_error("mla_fp8: the grid must have 1 to 2^31 - 1 blocks, got " +
                             std::to_string(c.grid));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(c.grid));
  config.blockDim = dim3(static_cast<unsigned>(c.block));
  config.stream = c.stream;
  config.attrs = &overlap;
  config.numAttrs = has_dependent_launch() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

}  // namespace mla_fp8::gpu
