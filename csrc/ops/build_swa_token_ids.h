#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Finds the sliding-window cache's slots for tokens that a chunk's windows reach, request after request:
//   gather_len = clamp(min(seq_len, extend_len + window_size - 1), >= 0),  first_pos = seq_len - gather_len
//   ids[offsets[r] + j] = full_to_swa[req_to_token[req_pool_indices[r], first_pos + j]]
// An id is -1 where a table lacks the entry (negative, or past int32), and from offsets[num_requests] to the
// capacity. Ids past the capacity are dropped. Offsets saturate at INT32_MAX.
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

MLA_HD int64_t swa_gather_len(const BuildSwaTokenIdsParams& p, int64_t request) {
  const int64_t seq_len = p.seq_lens[request], reach = p.extend_seq_lens[request] + p.window_size - 1;
  const int64_t len = seq_len < reach ? seq_len : reach;
  return len > 0 ? len : 0;
}

// The id of position `pos` of the request in row `pool_row` of req_to_token.
MLA_HD int32_t swa_token_id(const BuildSwaTokenIdsParams& p, int64_t pool_row, int64_t pos) {
  if (pool_row < 0 || pool_row >= p.num_pool_rows || pos < 0 || pos >= p.max_tokens) return -1;
  const int64_t full_slot = p.req_to_token[pool_row * p.req_to_token_stride_row + pos];
  if (full_slot < 0 || full_slot >= p.num_full_slots) return -1;
  const int64_t id = p.full_to_swa[full_slot];
  return id >= 0 && id <= INT32_MAX ? static_cast<int32_t>(id) : -1;
}

namespace cpu {
void build_swa_token_ids(const BuildSwaTokenIdsParams& params);
}
namespace gpu {
void build_swa_token_ids(const BuildSwaTokenIdsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
