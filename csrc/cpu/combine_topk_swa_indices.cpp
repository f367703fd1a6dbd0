// combine_topk_swa_indices on the CPU: a row's arithmetic once (topk_swa_row), then loops over its columns,
// which the compiler vectorises; bound by memory. The ragged form counts entries, sums counts, then writes.
#include "ops/combine_topk_swa_indices.h"

#include <algorithm>

#include "common/parallel.h"

namespace mla_fp8::cpu {
namespace {

constexpr int64_t kGrain = 16;  // rows a thread takes at least

void write_row(const TopkSwaRow row, int64_t width, const int32_t* __restrict entries,
               int32_t* __restrict out) {
  for (int32_t c = 0; c < row.num_topk; ++c) out[c] = row.rebased(entries[c]);
  std::fill(out + row.num_topk, out + row.window_begin, -1);
  for (int32_t c = row.window_begin; c < row.window_end; ++c) out[c] = row.window(c);
  std::fill(out + row.window_end, out + width, -1);
}

int32_t count_row(const TopkSwaRow row, const int32_t* entries) {
  int32_t count = row.window_end - row.window_begin;
  for (int32_t c = 0; c < row.num_topk; ++c) count += row.keeps(entries[c]);
  return count;
}

void write_row_without_holes(const TopkSwaRow row, const int32_t* entries, int32_t* out) {
  for (int32_t c = 0; c < row.num_topk; ++c)
    if (row.keeps(entries[c])) *out++ = row.rebased(entries[c]);
  for (int32_t c = row.window_begin; c < row.window_end; ++c) *out++ = row.window(c);
}

}  // namespace

void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& p) {
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const TopkSwaRow row = topk_swa_row(p, t);
      write_row(row, p.width, p.topk_indices + t * p.topk_indices_stride_token,
                p.out_indices + t * p.out_indices_stride_token);
      p.out_lens[t] = row.length;
    }
  });
}

void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& params) {
  const CombineTopkSwaIndicesParams& p = params.rows;
  int32_t* indptr = params.out_indptr;
  const auto entries = [&](int64_t t) { return p.topk_indices + t * p.topk_indices_stride_token; };
  indptr[0] = 0;
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) indptr[t + 1] = count_row(topk_swa_row(p, t), entries(t));
  });
  for (int64_t t = 0; t < p.num_tokens; ++t) indptr[t + 1] += indptr[t];
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      write_row_without_holes(topk_swa_row(p, t), entries(t), p.out_indices + indptr[t]);
  });
  std::fill(p.out_indices + indptr[p.num_tokens], p.out_indices + params.capacity, -1);
}

}  // namespace mla_fp8::cpu
