#pragma once
// How a problem is cut into CTAs. Looks at shapes only, never at lengths: a captured graph stays right when
// they change, and a row's result does not depend on what the other rows hold.
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

struct TeamPlan {
  int head_groups;  // of 8 heads, per CTA: 1, 2 or 4 (warp teams), 4 or 8 (warpgroups)
  int num_splits;   // CTAs per row and head block: 1, 2, 4, 8 or 16
  bool warpgroups = false;
};
TeamPlan plan_sparse_decode(const SparseAttentionParams& p, int num_sms);

// Rows that sparse_decode's Hopper kernels take: the grid stays far from 2^31.
inline constexpr int64_t kMaxDecodeTokens = int64_t{1} << 20;
bool hopper_kernels_fit(const SparseAttentionParams& p);

// Explicit instances, one source file per family of layouts: they compile in parallel.
template <KvLayoutId kId>
void launch_warp_teams(const SparseAttentionParams& p, const TeamPlan& plan, gpuStream_t stream);
template <KvLayoutId kId>
void launch_warpgroups(const SparseAttentionParams& p, const TeamPlan& plan, gpuStream_t stream);

inline int64_t total_topk(const SparseAttentionParams& p) {
  return p.scopes[0].topk + (p.num_scopes > 1 ? p.scopes[1].topk : 0);
}

}  // namespace mla_fp8::gpu
