#pragma once
#include "common/index_layout.h"
#include "ops/compress_kv.h"

namespace mla_fp8 {

// Every kPoolSize tokens of a request become one index key, which the last of them writes: per dim the mean
// of their keys, weighted by the softmax of score + ape; Hadamard; an entry of index_fp8. The state of a
// request holds key and score of its last tokens, position p in row p % depth.
//
// A pool is one function of its tokens' rows, wherever they come from. One unit of work has all of a call
// that touches a request's state: it closes the pool that began before the call, then writes rows.
inline constexpr int kPoolSize = 4;

struct PoolIndexKParams {
  int64_t num_tokens, num_requests;
  const uint16_t *k, *score;  // [num_tokens, kIndexDim] bf16; strides in elements
  int64_t k_stride_token, score_stride_token;
  const int32_t* query_start_loc;   // [num_requests + 1], element 0 is subtracted
  const int32_t* start_pos;         // [num_requests]
  uint16_t *state_k, *state_score;  // [num_states, depth, kIndexDim] bf16
  int64_t num_states, depth;
  int64_t state_k_stride_slot, state_k_stride_row, state_score_stride_slot, state_score_stride_row;
  const void* state_slots;  // [num_requests]; outside [0, num_states): the request is skipped
  bool state_slots_are_int64;
  const float* ape;          // [kPoolSize, kIndexDim]
  const void* slot_mapping;  // [num_tokens]: of the key that the token writes
  bool slots_are_int64;
  int64_t num_slots, page_size;
  IndexScaling scaling;
  uint8_t* kv_cache;  // of index keys
  int64_t kv_cache_stride_page;

  // Rows of a token of the call.
  MLA_HD const uint16_t* key_row(int64_t token) const { return k + token * k_stride_token; }
  MLA_HD const uint16_t* score_row(int64_t token) const { return score + token * score_stride_token; }
  // Rows of a state; `row` is position % depth.
  MLA_HD uint16_t* kept_key(int64_t state, int64_t row) const {
    return state_k + state * state_k_stride_slot + row * state_k_stride_row;
  }
  MLA_HD uint16_t* kept_score(int64_t state, int64_t row) const {
    return state_score + state * state_score_stride_slot + row * state_score_stride_row;
  }
};

// A token that ends a pool, and how many of the pool's tokens came before the call.
struct PoolEnd {
  int64_t token, position;  // token: of the call; negative: there is none
  int before;

  // The position may be beyond the call.
  MLA_HD static PoolEnd at(const CompressRequest& r, int64_t position) {
    const bool exists = r.state >= 0 && CompressRequest::closes(position, kPoolSize) && position < r.end();
    const int64_t before = r.start - (position + 1 - kPoolSize);
    return {exists ? r.first + position - r.start : -1, position, before > 0 ? static_cast<int>(before) : 0};
  }
};
// The first position whose row the call leaves in the state.
MLA_HD int64_t first_kept(const CompressRequest& r, int64_t depth) {
  return r.end() - depth > r.start ? r.end() - depth : r.start;
}

namespace cpu {
void pool_index_k(const PoolIndexKParams& params);
}
namespace gpu {
void pool_index_k(const PoolIndexKParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
