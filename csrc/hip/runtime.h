#pragma once
// Launches kernels on AMD GPUs, for cuda/device/launch.cuh and for ops/.
#include <cstddef>

#include "common/launch_config.h"

namespace mla_fp8::gpu {

// Launches the kernel that host code knows by this address, with one argument.
void launch_kernel(const void* kernel, const LaunchConfig& config, const void* params, size_t params_size);

int num_processors();  // of the current device

// Loads every kernel of the library on the current device. A launch loads its own kernel, which a stream
// under capture does not allow.
void load_all_kernels();

}  // namespace mla_fp8::gpu
