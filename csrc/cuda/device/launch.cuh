#pragma once
// Launches kernels on the caller's stream, without allocation or synchronisation: graphs can capture any op.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/launch_config.h"
#include "common/macros.h"
#include "cuda/device/platform.cuh"
#if !MLA_FP8_PTX
#include "hip/runtime.h"
#endif

namespace mla_fp8::gpu {

#if __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
inline constexpr int kMaxThreadsPerSm = 1536;
#else
inline constexpr int kMaxThreadsPerSm = 2048;
#endif

#if MLA_FP8_PTX
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("mla_fp8: ") + what + ": " + cudaGetErrorString(status));
}

inline int device_attribute(cudaDeviceAttr attribute) {  // of the current device
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}
inline int num_processors() { return device_attribute(cudaDevAttrMultiProcessorCount); }
inline int compute_major() { return device_attribute(cudaDevAttrComputeCapabilityMajor); }

// Every kernel calls this before its first access to global memory: the grid before it may still be running.
// Blocks of the next grid may then take what this one leaves of the SMs; they wait for its end in turn.
__device__ __forceinline__ void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Lets blocks of the next grid begin as this one's leave, even before this one's own wait.
__device__ __forceinline__ void let_next_grid_come() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// wait_for_previous_grid in two parts, for a kernel that may follow one on which it does not depend. That one
// has waited for what came before, so begin_grid does not. end_grid must: the next grid waits for this alone.
__device__ __forceinline__ void begin_grid(bool follows) {
#if __CUDA_ARCH__ >= 900
  if (!follows) asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void end_grid(bool follows) {
#if __CUDA_ARCH__ >= 900
  if (follows) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class Params>
void launch(void (*kernel)(Params), const LaunchConfig& c, const Params& params) {
  check_grid(c);
  if (c.smem > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, c.smem), "smem opt-in");
  if (c.cluster > 8)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster opt-in");
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(c.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(c.grid));
  config.blockDim = dim3(static_cast<unsigned>(c.block));
  config.dynamicSmemBytes = static_cast<size_t>(c.smem);
  config.stream = c.stream;
  config.attrs = attributes;
  config.numAttrs = c.cluster > 1 ? 2 : compute_major() >= 9 ? 1 : 0;  // from Hopper on
  check(cudaLaunchKernelEx(&config, kernel, params), "kernel launch");
}

#else

__device__ __forceinline__ void wait_for_previous_grid() {}  // HIP streams run one grid after another

template <class Params>
void launch(void (*kernel)(Params), const LaunchConfig& c, const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params>);
  check_grid(c);
  launch_kernel(reinterpret_cast<const void*>(kernel), c, &params, sizeof params);
}

#endif

}  // namespace mla_fp8::gpu
