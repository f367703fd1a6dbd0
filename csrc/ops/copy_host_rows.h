#pragma once
#include <cstdint>

#include "common/kv_layout.h"
#include "common/stream.h"

namespace mla_fp8 {

inline constexpr int kMaxCopyLayers = 16;  // of a launch

// The caches of several layers, alike but for where they lie.
struct RowPages {
  uint8_t* data[kMaxCopyLayers];  // of `from` only read
  const uint64_t* addresses;      // [layers] in memory of the device, in place of `data`; or null
  int64_t stride_page;            // bytes
  int64_t page_size, num_rows;
};

// Rows of one layout from caches to others. A negative row, and one past the end of `to`, is skipped; one
// past the end of `from` leaves zeros.
struct CopyRowsParams {
  KvLayoutId layout;
  int64_t num_layers;
  RowPages from, to;
  int64_t lists, width;
  const void* from_rows;  // [lists, width]
  bool from_rows_are_int64;
  int64_t from_rows_stride;
  const void* to_rows;  // the same
  bool to_rows_are_int64;
  int64_t to_rows_stride;
  const int32_t* counts;     // [lists] or null: of each list, how many
  const int32_t* num_lists;  // [1] or null: lists behind are none
  int64_t max_blocks;        // of the GPU
};

namespace cpu {
void copy_rows(const CopyRowsParams& params);
}
namespace gpu {
void copy_rows(const CopyRowsParams& params, gpuStream_t stream);
// The address that kernels have for this memory: of a GPU, or of the host if it is pinned; else null.
void* address_on_gpu(const void* p);
}  // namespace gpu

}  // namespace mla_fp8
