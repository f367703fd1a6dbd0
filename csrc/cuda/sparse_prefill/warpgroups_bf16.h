#pragma once
// Sparse prefill over bf16 rows for Hopper, 64 heads per CTA (docs/sparse_prefill.md).
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

// Whether the kernel is the one for this problem: plain bf16 rows, more than 32 heads, and at least half as
// many (query, 64 heads) as SMs; with fewer, decode's kernels share a query among SMs.
inline bool prefill_warpgroups_bf16_fits(const SparseAttentionParams& p, int num_sms) {
  return (p.layout == KvLayoutId::kBf16 || p.layout == KvLayoutId::kBf16D512) && p.num_scopes == 1 &&
         p.scopes[0].page_size == 1 && p.scopes[0].topk < (int64_t{1} << 30) && p.num_q_heads > 32 &&
         2 * p.num_tokens * ceil_div(p.num_q_heads, 64) >= num_sms;
}
void launch_prefill_warpgroups_bf16(const SparseAttentionParams& p, gpuStream_t stream);

}  // namespace mla_fp8::gpu
