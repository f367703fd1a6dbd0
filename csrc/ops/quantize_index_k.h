#pragma once
#include "common/dtype.h"
#include "common/index_layout.h"
#include "common/stream.h"

namespace mla_fp8 {

// Writes key i into slot slot_mapping[i] of a cache of index keys; slots outside [0, num_slots) are skipped.
struct QuantizeIndexKParams {
  IndexLayoutId layout;
  int64_t num_tokens;  // entries of slot_mapping; further keys are padding
  int64_t num_slots, page_size;

  Dtype dtype;
  const void* k;  // [num_tokens, kIndexDim]; stride in elements
  int64_t k_stride_token;
  const void* slot_mapping;  // [num_tokens] int64 or int32, slot = page * page_size + row
  bool slots_are_int64;
  IndexScaling scaling;
  bool hadamard;

  uint8_t* kv_cache;  // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;
};

namespace cpu {
void quantize_index_k(const QuantizeIndexKParams& params);
}
namespace gpu {
void quantize_index_k(const QuantizeIndexKParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
