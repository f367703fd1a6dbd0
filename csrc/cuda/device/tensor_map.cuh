#pragma once
// Boxes of tensors in global memory, for the copy engine (sm_90). A map is a kernel argument; the host makes
// it without touching the device.
#include <cuda.h>

#include <cstdint>

#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

// Makes a map of bytes [planes, rows, row_bytes]. The address and strides are multiples of 16 bytes. A box is
// 128 bytes of `box_rows` rows of a plane, swizzled; bytes outside the tensor are zeros. False: the driver
// knows no maps, or refuses.
inline bool make_tensor_map(CUtensorMap& map, const void* base, uint64_t row_bytes, uint64_t rows,
                            uint64_t planes, uint64_t row_stride, uint64_t plane_stride, uint32_t box_rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found)
                                                                          : nullptr;
  }();
  if (encode == nullptr) return false;
  const cuuint64_t sizes[] = {row_bytes, rows, planes}, strides[] = {row_stride, plane_stride};
  const cuuint32_t box[] = {128, box_rows, 1}, steps[] = {1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

__device__ inline void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box that begins at byte `byte` of row `row` of plane `plane` to `dst`, a multiple of 1024 bytes,
// and completes at mbarrier `bar`. Bytes that are not read again leave the L2 before all others.
__device__ inline void tensor_copy(uint32_t dst, const CUtensorMap& map, int byte, int row, int plane,
                                   uint32_t bar, bool is_read_again) {
  if (is_read_again)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
        "l"(&map), "r"(byte), "r"(row), "r"(plane), "r"(bar)
        : "memory");
  else
    asm volatile(
        "{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], first; }" ::"r"(dst),
        "l"(&map), "r"(byte), "r"(row), "r"(plane), "r"(bar)
        : "memory");
}

}  // namespace mla_fp8::gpu
