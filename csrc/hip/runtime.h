#pragma once
// Launching on AMD GPUs, for cuda/device/launch.cuh on the device side and ops/ on the host side.
#include <cstddef>

#include "common/launch_config.h"

namespace mla_fp8::gpu {

// Runs the kernel that host code knows by this address, with one argument.
void launch_kernel(const void* kernel, const LaunchConfig& config, const void* params, size_t params_size);

int num_processors();  // of the current device

// Loads every kernel of the library on the current device. A launch does so for its own; that is no
// operation for a stream under capture.
void load_all_kernels();

}  // namespace mla_fp8::gpu
