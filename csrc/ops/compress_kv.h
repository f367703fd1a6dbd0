#pragma once
#include "common/dtype.h"
#include "common/requests.h"
#include "common/stream.h"
#include "ops/rope_table.h"

namespace mla_fp8 {

// Compresses `ratio` consecutive tokens of a request into a cache row, which the last one closes: a softmax
// over a window of tokens for each dim, then RMSNorm, RoPE at the first token's position, quantize_kv's row.
//
//   ratio  width of a token's row                                window            bias
//   4      2048: kv as previous, kv, score as previous, score    8 tokens          [4, 1024]
//   128    1024: kv, score                                       128 tokens        [128, 512]
//   2      1024: kv, score                                       2 tokens          none
//   1      512: kv                                               1, no softmax     none
//
// A window of ratio 4 is two blocks: the one before by its "as previous" halves, then its own. A request's
// state holds the raw rows of its last tokens, position p in row p % depth. Online (ratio 128 alone) it holds
// max, sum and mean of the block so far, after each token.
//
// One call over [a, b) gives the bits of every chain of calls over it. A row is one function of its window's
// float32 rows, in one order, wherever they come from.
struct CompressKvParams {
  int ratio;
  bool online, round_pooled;
  int64_t num_tokens, num_requests;
  RopeTable table;       // positions are the blocks' own
  const void* kv_score;  // [num_tokens, width] float, or bf16; strides in elements
  bool is_bf16;
  int64_t kv_score_stride_token;
  const int32_t* query_start_loc;  // [num_requests + 1], element 0 is subtracted
  const int32_t* start_pos;        // [num_requests]
  float* state;                    // [num_states, depth, state_width]; null for ratio 1
  int64_t num_states, depth, state_stride_slot, state_stride_row;
  const void* state_slots;  // [num_requests]; outside [0, num_states): the request is skipped
  bool state_slots_are_int64;
  const float* ape;         // [ratio, width / 2], or null
  const void* norm_weight;  // [kHeadDimV] bf16 or float
  bool weight_is_float;
  float eps;
  const void* slot_mapping;  // [num_tokens]: slots of the rows that tokens close
  bool slots_are_int64;
  KvLayoutId layout;
  int64_t num_slots, page_size;
  const float* scale;
  uint8_t* kv_cache;
  int64_t kv_cache_stride_page;
  uint16_t* out_latent;  // [num_tokens, kHeadDimV] bf16 before RoPE, for closing tokens alone; or null
  int64_t out_latent_stride_token;

  MLA_HD static constexpr int window_of(int ratio) { return ratio == 4 ? 8 : ratio; }
  MLA_HD int window() const { return window_of(ratio); }
  MLA_HD int width() const { return kHeadDimV * (ratio == 1 ? 1 : ratio == 4 ? 4 : 2); }
  MLA_HD int state_width() const { return online ? 3 * kHeadDimV : width(); }
};

// One request's part of a call: tokens first to first + count - 1, the first at position `start`.
struct CompressRequest {
  int64_t first, count, start;
  int64_t state;  // the number of its state; negative: the request is skipped

  // Whether the token at position p closes a block.
  MLA_HD static bool closes(int64_t p, int ratio) { return (p + 1) % ratio == 0; }
  // The position of the first token, from `start` on, that closes a block.
  MLA_HD int64_t first_close(int ratio) const { return start + (ratio - 1 - start % ratio); }
  MLA_HD int64_t end() const { return start + count; }
  // The oldest position before the call that a block closed in it needs; `start` if none does.
  MLA_HD int64_t oldest(int ratio) const {
    const int64_t close = first_close(ratio);
    if (close >= end()) return start;
    const int64_t position = close + 1 - CompressKvParams::window_of(ratio);
    return position < 0 ? 0 : position < start ? position : start;
  }
  // Whether the call leaves the token at position q in the state: it is one of the last `depth`.
  MLA_HD bool is_kept(int64_t q, int64_t depth) const { return q >= end() - depth; }
  // Whether a row of the state holds what a block closed in this call needs: then it is written after that
  // was read. The row is `distance` behind that of `oldest`, modulo depth.
  MLA_HD bool is_late(int64_t distance, int64_t oldest_position) const {
    return distance < start - oldest_position;
  }
};

// has_state: ratio > 1. Where the compiler knows it, no load waits for another.
template <class Params>
MLA_HD CompressRequest compress_request(const Params& p, int64_t r, bool has_state) {
  const int64_t base = p.query_start_loc[0];
  int64_t first = p.query_start_loc[r] - base, last = p.query_start_loc[r + 1] - base;
  first = first < 0 ? 0 : first;
  last = last > p.num_tokens ? p.num_tokens : last;
  const int64_t start = p.start_pos[r];
  int64_t state = 0;
  if (has_state) {
    state = p.state_slots_are_int64 ? static_cast<const int64_t*>(p.state_slots)[r]
                                    : static_cast<const int32_t*>(p.state_slots)[r];
    if (state >= p.num_states) state = -1;
  }
  if (start < 0 || last <= first) state = -1;
  return {first, last - first, start, state};
}

namespace cpu {
void compress_kv(const CompressKvParams& params);
}
namespace gpu {
void compress_kv(const CompressKvParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
