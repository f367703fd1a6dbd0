#pragma once
#include <cstdint>

#include "common/requests.h"
#include "common/stream.h"

namespace mla_fp8 {

// Row t of the output is the token's topk entries rebased by compressed_base, then its window, then -1 to the
// width. A position outside [0, seq_len), or a token past the last request, gives -1 everywhere and length 0.
struct CombineTopkSwaIndicesParams {
  int64_t num_tokens, num_requests;
  int64_t topk, window_size, compress_ratio, width;  // width = align_up(topk + window_size, 128)
  const int32_t* topk_indices;                       // [num_tokens, >= topk], request-local
  int64_t topk_indices_stride_token;
  const int32_t* query_start_loc;  // [num_requests + 1], element 0 is subtracted
  const int32_t *seq_lens, *gather_lens, *compressed_base, *swa_base;  // [num_requests]
  const int32_t* compressed_lens;                                      // [num_requests] or null
  const int32_t* query_pos;                                            // [num_tokens] or null
  int32_t* out_indices;                                                // [num_tokens, width]
  int64_t out_indices_stride_token;
  int32_t* out_lens;  // [num_tokens]
};

// The rows as CSR, without holes (-1): row t is indices[indptr[t] .. indptr[t + 1]), and there is -1 from
// indptr[num_tokens] to the capacity. out_indices is flat here.
struct CombineTopkSwaIndicesRaggedParams {
  CombineTopkSwaIndicesParams rows;  // out_indices [capacity], out_lens unused
  int64_t capacity;                  // num_tokens * (topk + window_size), fits int32
  int32_t* out_indptr;               // [num_tokens + 1]
};

// An output row with its arithmetic done: each column needs 32 bits only.
struct TopkSwaRow {
  int32_t length;                    // columns that count
  int32_t num_topk;                  // columns [0, num_topk) have the topk entries
  int32_t min_entry, max_entry;      // entries outside are holes
  int32_t compressed_base;           // added to other entries
  int32_t window_begin, window_end;  // columns [window_begin, window_end) have swa_row + column
  int32_t swa_row;

  MLA_HD bool keeps(int32_t entry) const { return (entry >= min_entry) & (entry <= max_entry); }
  MLA_HD int32_t rebased(int32_t entry) const {
    const uint32_t hole = static_cast<uint32_t>(keeps(entry)) - 1;  // all ones or zero: no branch
    return static_cast<int32_t>((static_cast<uint32_t>(entry) + static_cast<uint32_t>(compressed_base)) |
                                hole);
  }
  MLA_HD int32_t window(int32_t column) const {
    return static_cast<int32_t>(static_cast<uint32_t>(swa_row) + static_cast<uint32_t>(column));
  }
};

// All that a row needs of its request. By default it is a request without queries.
struct TopkSwaRequest {
  int32_t query_origin = 0, query_end = 0;  // query_start_loc[0], query_start_loc[request + 1]
  int32_t seq_len, gather_len, compressed_base, swa_base;
  int64_t compressed_len;
};

MLA_HD TopkSwaRequest topk_swa_request(const CombineTopkSwaIndicesParams& p, int64_t request) {
  return {
      .query_origin = p.query_start_loc[0],
      .query_end = p.query_start_loc[request + 1],
      .seq_len = p.seq_lens[request],
      .gather_len = p.gather_lens[request],
      .compressed_base = p.compressed_base[request],
      .swa_base = p.swa_base[request],
      .compressed_len = p.compressed_lens ? p.compressed_lens[request] : INT64_MAX,
  };
}

// Row `token`, if `request` is the last one that begins at or before it. per_entry(n) is n / compress_ratio.
// Numbers have 32 bits where that is enough: a row on a GPU waits for this.
template <class PerEntry>
MLA_HD TopkSwaRow topk_swa_row(const CombineTopkSwaIndicesParams& p, int64_t token,
                               const TopkSwaRequest& request, const PerEntry& per_entry) {
  constexpr int64_t kMaxRow = INT32_MAX;  // rows of the workspace are in [0, kMaxRow]; others become -1
  const auto min = [](auto a, decltype(a) b) { return a < b ? a : b; };
  const auto max = [](auto a, decltype(a) b) { return a > b ? a : b; };
  const int64_t queries_left = int64_t{request.query_end} - request.query_origin - token;
  if (queries_left <= 0) return {};
  const int64_t any_pos = p.query_pos ? p.query_pos[token] : request.seq_len - queries_left;
  if (any_pos < 0 || any_pos >= request.seq_len) return {};

  const int32_t pos = static_cast<int32_t>(any_pos);
  const int32_t num_topk = static_cast<int32_t>(min(per_entry(pos + 1), p.topk));
  const int64_t base = request.compressed_base;
  const int64_t min_entry = max(int64_t{0}, -base);
  const int64_t max_entry = min(min(kMaxRow, kMaxRow - base), request.compressed_len - 1);
  const bool none = min_entry > max_entry;

  // The gathered tokens are [first_gathered, seq_len). No index refers to others.
  const int32_t first_gathered = request.seq_len - max(request.gather_len, 0);
  const int32_t start = max(max(pos - static_cast<int32_t>(p.window_size) + 1, first_gathered), 0);
  const int32_t num_window = max(pos - start + 1, 0);
  const int64_t first_row = int64_t{request.swa_base} + start - first_gathered;
  const int64_t num_below = min(max(int64_t{0}, -first_row), num_window);
  const int64_t num_within = min(max(int64_t{0}, kMaxRow + 1 - first_row), num_window);
  return {
      .length = num_topk + num_window,
      .num_topk = num_topk,
      .min_entry = none ? 1 : static_cast<int32_t>(min_entry),
      .max_entry = none ? 0 : static_cast<int32_t>(max_entry),
      .compressed_base = request.compressed_base,
      .window_begin = num_topk + static_cast<int32_t>(num_below),
      .window_end = num_topk + static_cast<int32_t>(num_within),
      .swa_row = static_cast<int32_t>(static_cast<uint32_t>(first_row) - static_cast<uint32_t>(num_topk)),
  };
}

// Row `token`, after a search for its request.
MLA_HD TopkSwaRow topk_swa_row(const CombineTopkSwaIndicesParams& p, int64_t token) {
  const int64_t request = find_request(p.query_start_loc, p.num_requests, token);
  if (request < 0) return {};
  return topk_swa_row(p, token, topk_swa_request(p, request),
                      [&](int64_t n) { return n / p.compress_ratio; });
}

namespace cpu {
void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& params);
void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& params);
}  // namespace cpu
namespace gpu {
void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& params, gpuStream_t stream);
void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
