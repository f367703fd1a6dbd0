#pragma once
// Sparse attention for Hopper over rows that are bf16 or become it on their way, of prefill and of large
// decode steps, in tiles of 64 rows of Q (docs/sparse_prefill.md).
#include "common/kv_layout.h"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

// Slots of one cache, whose rows lie at multiples of them: pages of one row, or without gaps between pages.
inline bool is_plain_selection(const SparseAttentionParams& p) {
  const KvScope& s = p.scopes[0];
  return !p.is_window && p.num_scopes == 1 &&
         (s.page_size == 1 || s.kv_cache_stride_page == s.page_size * kv_layout(p.layout).token_stride());
}
inline bool is_window_alone(const SparseAttentionParams& p) { return p.is_window && p.num_scopes == 1; }
// Query tokens of a tile: one, or as many neighbours as fill it, whose windows are mostly the same.
inline int rows_tile_tokens(const SparseAttentionParams& p) {
  return is_window_alone(p) && p.num_q_heads <= 64 ? 64 / p.num_q_heads : 1;
}
inline int64_t num_rows_tiles(const SparseAttentionParams& p) {
  return ceil_div(p.num_tokens, int64_t{rows_tile_tokens(p)}) * ceil_div(p.num_q_heads, 64);
}

// Whether the kernel is the one for this problem: bf16 rows, windows alone or more than 16 heads, or dsv4 and
// more than 64 heads; and at least half as many tiles as SMs, as with fewer decode's kernels share a query
// among SMs.
inline bool prefill_warpgroups_bf16_fits(const SparseAttentionParams& p, int num_sms) {
  const bool bf16 = p.layout == KvLayoutId::kBf16 || p.layout == KvLayoutId::kBf16D512;
  const bool pair = p.layout == KvLayoutId::kDsv4 && p.num_q_heads > 64;
  return (pair || (bf16 && (is_window_alone(p) || p.num_q_heads > 16))) && 2 * num_rows_tiles(p) >= num_sms;
}
void launch_prefill_warpgroups_bf16(const SparseAttentionParams& p, gpuStream_t stream);

}  // namespace mla_fp8::gpu
