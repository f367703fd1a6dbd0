#pragma once
// Plans on sm_90 of many_heads without clusters: the CTAs of a query meet in a second grid.
#include <algorithm>
#include <iterator>
#include <optional>

#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

// Of one wave of CTAs. `all_us`: what they take longer together, if each SM has one: what they leave in the
// workspace is read again. Fitted to 580 forced plans on an H200, full rows and such with a quarter to a half
// of their keys, 1 to 64 queries of 32 to 128 heads: times within 3 % in the mean. Cold code is set so that
// the choice is good in 117 of these cells, timed alone and between other kernels. Of 51 that leave clusters
// 39 were timed, and gain 2 to 26 % (full rows counted twice, contexts of a quarter once).
struct PartsPrice {
  int heads;
  double ns_per_key, fixed_us, all_us, us_per_byte;
  ColdCode cold;
} inline constexpr kPartsPrices[] = {{32, 20.4, 7.5, 2.8, 0.08e-6, {1.2, 2.0}},
                                     {64, 29.0, 9.0, 3.7, 0.06e-6, {2.0, 5.2}}};
// What full rows, which count twice, and such with a quarter of their keys may take of the clusters' time in
// the mean. Two CTAs of a query gained at most 4 % where a cluster of two takes what they do.
inline constexpr double kMostOfClusters = 0.97;
inline constexpr int kLeastParts = 3;

inline double time_of_parts(const SparseAttentionParams& p, const PartsPrice& price, int parts, int num_sms) {
  const int64_t ctas = p.num_tokens * ceil_div(p.num_q_heads, price.heads) * parts;
  const int64_t blocks = std::max<int64_t>(ceil_div(ceil_div(num_keys(p), int64_t{64}), int64_t{parts}), 1);
  const bool has_bf16_values = kv_layout(p.layout).nope_dim < kHeadDimV;
  return price.fixed_us + price.ns_per_key * 64e-3 * static_cast<double>(blocks) +
         price.all_us * static_cast<double>(ctas) / num_sms +
         price.us_per_byte * static_cast<double>(p.num_tokens) * bytes_of_keys(p) +
         (has_bf16_values ? price.cold.bf16_values_us : price.cold.fp8_values_us);
}

// That the CTAs of all queries leave.
inline int64_t floats_of_parts(const SparseAttentionParams& p, const Plan& plan) {
  const int heads = plan.variant.heads;
  return p.num_tokens * ceil_div(p.num_q_heads, heads) * plan.splits * heads * kFloatsOfQueryPart;
}

// Whether heads and queries leave room for parts: without it nobody need ask for a plan, or a workspace.
inline bool may_have_parts(Op op, const SparseAttentionParams& p, int num_sms) {
  constexpr int kMostHeads = kPartsPrices[std::size(kPartsPrices) - 1].heads;
  return op == Op::kDecode && p.query_groups <= 1 && !p.batch_invariant && !p.is_window &&
         !p.layouts().is_mixed() && 2 * align_up(p.num_q_heads, kOctet) > kPartsPrices[0].heads &&
         kLeastParts * p.num_tokens * ceil_div(p.num_q_heads, kMostHeads) <= num_sms;
}

// Of decode, in place of clusters, or none.
inline std::optional<Plan> plan_parts(Op op, const SparseAttentionParams& p, const Priced& clusters,
                                      int num_sms) {
  if (!may_have_parts(op, p, num_sms)) return {};
  SparseAttentionParams quarter = p;
  for (KvScope& scope : quarter.scopes) scope.topk = ceil_div(scope.topk, int64_t{4});
  const double quarter_us = time_of(quarter, *clusters.heads, *clusters.splits, p.num_tokens, num_sms) +
                            cold_us(*clusters.heads, p);
  std::optional<Plan> best;
  double least = 3 * kMostOfClusters;
  for (const PartsPrice& price : kPartsPrices) {
    const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kParts, price.heads, 0, p.layouts());
    if (!v || price.heads >= 2 * align_up(p.num_q_heads, kOctet)) continue;
    const int64_t items = p.num_tokens * ceil_div(p.num_q_heads, price.heads);
    for (int parts = kLeastParts; parts <= std::min<int64_t>(kMostQueryParts, num_sms / items); ++parts) {
      const double of_clusters = 2 * time_of_parts(p, price, parts, num_sms) / clusters.there_us +
                                 time_of_parts(quarter, price, parts, num_sms) / quarter_us;
      const Plan plan{*v, parts};
      if (of_clusters >= least || floats_of_parts(p, plan) > p.workspace_floats) continue;
      least = of_clusters, best = plan;
    }
  }
  return best;
}

}  // namespace mla_fp8::gpu::model
