#include "cuda/sparse_decode/plan.h"

#include <algorithm>

namespace mla_fp8::gpu {
namespace {

constexpr int kGroupHeads = 8;

struct SplitClass {
  int splits;
  double clusters_per_sm;  // that are resident at once: 132, 66, 30, 15, 7 on 132 SMs
};
constexpr SplitClass kSplitClasses[] = {
    {1, 1.0}, {2, 0.5}, {4, 30 / 132.0}, {8, 15 / 132.0}, {16, 7 / 132.0}};

struct GroupClass {
  int head_groups;
  bool warpgroups;
  double ns_per_token;  // of one CTA, when nothing but itself limits it
  double fixed_us, cluster_us;
};
// Fitted to the order of the choices on one H200 (docs/sparse_decode.md); their values are rough.
constexpr GroupClass kGroupClasses[] = {{1, false, 11.5, 6.4, 1.2},
                                        {2, false, 17.5, 5.0, 3.0},
                                        {4, false, 27.0, 7.0, 4.0},  // of bf16 rows
                                        {4, true, 18.0, 7.8, 2.5},
                                        {8, true, 24.5, 8.0, 5.5}};
constexpr double kHbmBytesPerUs = 3.9e6, kL2BytesPerUs = 8e6;
constexpr int kMinTokensPerCta = 128;

}  // namespace

TeamPlan plan_sparse_decode(const SparseAttentionParams& p, int num_sms) {
  const int heads = p.num_q_heads;
  const bool has_warpgroups = kv_layout(p.layout).nope_format != Format::kBf16;
  const double tokens = static_cast<double>(std::max<int64_t>(total_topk(p), 1));
  if (p.batch_invariant) {  // the same for any num_tokens and, so that padded heads change nothing, any heads
    return {has_warpgroups ? 8 : 4, tokens > 1024 ? 2 : 1, has_warpgroups};
  }
  const double rows = static_cast<double>(p.num_tokens);
  const double bytes = rows * tokens * kv_layout(p.layout).bytes_per_token();
  TeamPlan best{1, 1};
  double best_us = 1e30;
  for (const GroupClass& g : kGroupClasses) {
    if (g.warpgroups ? !has_warpgroups : g.head_groups == 4 && has_warpgroups) continue;
    if (g.head_groups * kGroupHeads >= 2 * align_up(heads, kGroupHeads)) continue;  // mostly empty
    const int head_blocks = ceil_div(heads, g.head_groups * kGroupHeads);
    for (const SplitClass& s : kSplitClasses) {
      const int64_t resident = std::max<int64_t>(static_cast<int64_t>(s.clusters_per_sm * num_sms + 0.5), 1);
      const auto waves = static_cast<double>(ceil_div(p.num_tokens * head_blocks, resident));
      const double fixed = g.fixed_us + (s.splits > 1 ? g.cluster_us : 0.0);
      const double per_cta = std::max(tokens / s.splits, static_cast<double>(kMinTokensPerCta));
      const double compute_us = waves * (fixed + g.ns_per_token * 1e-3 * per_cta);
      const double memory_us = bytes / kHbmBytesPerUs + (head_blocks - 1) * bytes / kL2BytesPerUs + fixed;
      const double us = std::max(compute_us, memory_us);
      if (us < best_us) best_us = us, best = {g.head_groups, s.splits, g.warpgroups};
    }
  }
  return best;
}

}  // namespace mla_fp8::gpu
