#pragma once
#include <cstdint>

#include "common/stream.h"

namespace mla_fp8 {

// Row t of the output: the token's topk entries rebased by compressed_base, its window behind them, -1 to the
// width. A position outside [0, seq_len) or a token past the last request gives -1 everywhere, length 0.
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

// The same rows as CSR with the holes (-1) compacted left: row t is indices[indptr[t] .. indptr[t + 1]);
// -1 from indptr[num_tokens] to the capacity. Here out_indices is flat.
struct CombineTopkSwaIndicesRaggedParams {
  CombineTopkSwaIndicesParams rows;  // out_indices [capacity], out_lens unused
  int64_t capacity;                  // num_tokens * (topk + window_size)
  int32_t* out_indptr;               // [num_tokens + 1]
};

namespace cpu {
void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& params);
void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& params);
}  // namespace cpu
namespace gpu {
void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& params, gpuStream_t stream);
void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
