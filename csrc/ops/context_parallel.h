#pragma once
// The exchange between ranks of one host around attention and top-k, through memory that each maps of all
// others.
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"
#include "ops/merge_topk.h"
#include "ops/topk_to_slots.h"

namespace mla_fp8 {

struct PeerMemory {
  static constexpr int kMaxRanks = 16;
  int world_size, rank;
  int64_t offsets[kMaxRanks];  // bytes from an address in this rank's memory to the same place in each rank's
  // CTA i of a call sets flags[rank][i] of every rank to the call's number when its stores are there.
  uint32_t* flags;  // [world_size, num_ctas]
  int64_t num_ctas;
  // For this rank alone: the number of the last call, and how many CTAs of the running call have ended.
  uint32_t* calls;
  int64_t time_limit;  // nanoseconds
};

struct GatherQueriesParams {
  PeerMemory memory;
  int64_t num_tokens, num_heads, head_dim;  // heads of a rank; bf16
  const uint16_t* q;
  int64_t q_stride_token, q_stride_head;
  int64_t first_rope;  // dims of q; behind them come those of q_rope, if there are more in a head
  const uint16_t* q_rope;
  int64_t q_rope_stride_token, q_rope_stride_head;
  uint16_t* queries;  // [max_tokens, world_size * num_heads, head_dim], one in each rank's memory
};

struct ExchangeStatesParams {
  PeerMemory memory;
  int64_t num_tokens, num_heads, head_dim, max_tokens;  // heads of a rank; bf16
  const uint16_t* out;                                  // [num_tokens, world_size * num_heads, head_dim]
  int64_t out_stride_token, out_stride_head;
  const float* lse;  // [num_tokens, world_size * num_heads] contiguous
  const float* attn_sink;
  float log_base;
  uint16_t* outs;  // [2, world_size, max_tokens, num_heads, head_dim], one in each rank's memory
  float* lses;     // [2, world_size, max_tokens, num_heads]
  uint16_t* merged;
  int64_t merged_stride_token, merged_stride_head;
  float* merged_lse;  // [num_tokens, num_heads] contiguous
};

struct ExchangeScoresParams {
  PeerMemory memory;
  const float* scores;  // [num_rows, per_list] of this rank's list, and the same of positions
  int64_t scores_stride_row;
  const int32_t* positions;
  int64_t positions_stride_row;
  // [2, world_size, max_rows, 2, most per list], one in each rank's memory: a row's scores, then positions.
  int32_t* candidates;
  MergeTopkParams merge;    // of the first half of candidates
  TopkToSlotsParams slots;  // of this rank, if there is a page_table
};

namespace gpu {
void gather_queries(const GatherQueriesParams& params, gpuStream_t stream);
void exchange_states(const ExchangeStatesParams& params, gpuStream_t stream);
void exchange_scores(const ExchangeScoresParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
