#pragma once
#include "common/dtype.h"
#include "common/stream.h"

namespace mla_fp8 {

// out[i] is the latent in slot slots[i] as bf16; zeros if the slot is outside [0, num_slots).
struct DequantizeKvParams {
  KvLayoutId layout;
  int64_t num_rows, num_slots, page_size;
  const uint8_t* kv_cache;  // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;
  const void* slots;  // [num_rows] int64 or int32
  bool slots_are_int64;
  const float* scale;  // one value for the layer (uniform FP8 layouts), else null
  uint16_t* out;       // [num_rows, head_dim_qk] bf16
  int64_t out_stride_row;
};

// The last gather_lens[r] tokens of request r go to rows row_offsets[r], row_offsets[r] + 1, ... of out. Rows
// outside [0, num_rows) are not written. Positions or pages outside their table give zeros.
struct DequantizeKvPagedParams {
  KvLayoutId layout;
  int64_t num_rows, num_requests, num_slots, page_size;
  const uint8_t* kv_cache;
  int64_t kv_cache_stride_page;
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request, max_pages;
  const int32_t *seq_lens, *gather_lens, *row_offsets;  // [num_requests]
  const float* scale;
  uint16_t* out;
  int64_t out_stride_row;
};

namespace cpu {
void dequantize_kv(const DequantizeKvParams& params);
void dequantize_kv_paged(const DequantizeKvPagedParams& params);
}  // namespace cpu
namespace gpu {
void dequantize_kv(const DequantizeKvParams& params, gpuStream_t stream);
void dequantize_kv_paged(const DequantizeKvPagedParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
