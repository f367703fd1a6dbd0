#pragma once
#include <cstdint>

#include "common/stream.h"

namespace mla_fp8 {

// The SWA-cache slots of the tokens that a chunk's windows reach, all requests in a row:
//   gather_len = clamp(min(seq_len, extend_len + window_size - 1), >= 0),  first_pos = seq_len - gather_len
//   ids[offsets[r] + j] = full_to_swa[req_to_token[req_pool_indices[r], first_pos + j]]
// -1 where a table does not hold the entry, and from offsets[num_requests] to the capacity.
struct BuildSwaTokenIdsParams {
  int64_t num_requests, window_size, capacity;
  const int32_t *seq_lens, *extend_seq_lens;  // [num_requests]
  const void* req_pool_indices;               // [num_requests] int64 or int32
  bool req_pool_indices_are_int64;
  const int32_t* req_to_token;  // [num_pool_rows, max_tokens]
  int64_t req_to_token_stride_row, num_pool_rows, max_tokens;
  const int64_t* full_to_swa;  // [num_full_slots]
  int64_t num_full_slots;
  int32_t* ids;                                // [capacity]
  int32_t *first_pos, *gather_lens, *offsets;  // [num_requests], [num_requests], [num_requests + 1]
};

namespace cpu {
void build_swa_token_ids(const BuildSwaTokenIdsParams& params);
}
namespace gpu {
void build_swa_token_ids(const BuildSwaTokenIdsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
