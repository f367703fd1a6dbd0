#pragma once
// What the runtime puts into a CUtensorMap, and the copy engine takes out of it.
#include <cstdint>

#include "emulator/ptx/warp.h"

namespace emulator::ptx {

struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e74;
  static constexpr uint32_t kRowBytes = 128;  // of a box, in eight chunks that are swizzled
  uint64_t magic, base, row_bytes, rows, planes, row_stride, plane_stride;
  uint32_t box_rows;
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emulator::ptx
