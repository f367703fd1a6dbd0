#pragma once
#include <cstdint>

#include "common/kv_layout.h"
#include "common/stream.h"

namespace mla_fp8 {

inline constexpr int kMaxCopyLayers = 16;  // layers of a launch

// The caches of several layers, which differ in their addresses alone.
struct RowPages {
  uint8_t* data[kMaxCopyLayers];  // only read, if this is `from`
  const uint64_t* addresses;      // [layers] in memory of the device, used in place of `data`; or null
  int64_t stride_page;            // bytes
  int64_t page_size, num_rows;
};

// Copies rows of one layout between caches. A pair of rows is skipped if one is negative or `to`'s is past
// its end. A row past the end of `from` writes zeros.
struct CopyRowsParams {
  KvLayoutId layout;
  int64_t num_layers;
  RowPages from, to;
  int64_t lists, width;
  const void* from_rows;  // [lists, width]
  bool from_rows_are_int64;
  int64_t from_rows_stride;
  const void* to_rows;  // as from_rows
  bool to_rows_are_int64;
  int64_t to_rows_stride;
  const int32_t* counts;     // [lists] or null: how many rows of each list
  const int32_t* num_lists;  // [1] or null: later lists are not copied
  int64_t max_blocks;        // blocks of the GPU's kernel
};

namespace cpu {
void copy_rows(const CopyRowsParams& params);
}
namespace gpu {
void copy_rows(const CopyRowsParams& params, gpuStream_t stream);
// The address by which kernels reach p: memory of a GPU, or pinned memory of the host. Null for other memory.
void* address_on_gpu(const void* p);
}  // namespace gpu

}  // namespace mla_fp8
