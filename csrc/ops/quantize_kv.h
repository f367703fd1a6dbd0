#pragma once
#include "common/dtype.h"
#include "common/stream.h"

namespace mla_fp8 {

// Writes token i of the latent into cache slot slot_mapping[i]; slots outside [0, num_slots) are skipped.
struct QuantizeKvParams {
  KvLayoutId layout;
  int64_t num_tokens;  // entries of slot_mapping; further latent rows are padding
  int64_t num_slots, page_size;

  Dtype dtype;
  const void* nope;  // [num_tokens, nope_dim]; strides in elements
  int64_t nope_stride_token;
  const void* rope;  // [num_tokens, rope_dim], or null: zeros
  int64_t rope_stride_token;
  const void* slot_mapping;  // [num_tokens] int64 or int32, slot = page * page_size + row
  bool slots_are_int64;
  const float* scale;  // one value for the layer (uniform FP8 layouts), else null
  float fp8_max;       // the largest magnitude written

  uint8_t* kv_cache;  // [num_pages, page_bytes]
  int64_t kv_cache_stride_page;
};

namespace cpu {
void quantize_kv(const QuantizeKvParams& params);
}
namespace gpu {
void quantize_kv(const QuantizeKvParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
