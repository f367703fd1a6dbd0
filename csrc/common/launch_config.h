#pragma once
// The launch configuration of a kernel, for every platform.
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/stream.h"

namespace mla_fp8::gpu {

struct LaunchConfig {
  int64_t grid;  // blocks
  int block;     // threads
  gpuStream_t stream;
  int smem = 0;     // dynamic shared memory, bytes
  int cluster = 1;  // blocks per cluster (sm_90)
};

inline void check_grid(const LaunchConfig& c) {
  if (c.grid < 1 || c.grid > INT_MAX)
    throw std::runtime_error("mla_fp8: the grid must have 1 to 2^31 - 1 blocks, got " +
                             std::to_string(c.grid));
}

}  // namespace mla_fp8::gpu
