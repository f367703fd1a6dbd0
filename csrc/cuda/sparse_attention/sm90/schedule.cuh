#pragma once
// Launching a variant of few_heads or many_heads.
#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;
inline constexpr int kSlotTokens = 16;  // tokens that one producer warp fetches at once: M of an mma
inline constexpr int kGroupHeads = 8;   // N of an mma
inline constexpr int kMaxSmemBytes = 232448;

struct TeamParams {
  SparseAttentionParams p;
  int num_splits;       // CTAs of one cluster, which share one row's tokens
  int num_head_blocks;  // CTAs of kHeads heads for one row
};

template <class C>
void launch_items(void (*kernel)(TeamParams), const SparseAttentionParams& p, const Plan& plan,
                  gpuStream_t stream) {
  const TeamParams params{p, plan.splits, ceil_div(p.num_q_heads, C::kHeads)};
  const int64_t items = p.num_tokens * params.num_head_blocks;
  const bool walks = plan.variant.schedule == Schedule::kWalk;
  launch(
      kernel,
      {.grid = walks ? std::min<int64_t>(ceil_div(items, int64_t{C::kRows}), plan.ctas) : items * plan.splits,
       .block = C::kThreads,
       .stream = stream,
       .smem = C::kSmemBytes,
       .cluster = plan.splits},
      params);
}

}  // namespace mla_fp8::gpu
