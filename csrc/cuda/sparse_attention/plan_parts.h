#pragma once
// Plans on sm_90 of many_heads whose CTAs share a query: they meet in a second grid.
#include <algorithm>
#include <iterator>
#include <optional>

#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

// Of one wave of CTAs. `all_us`: what they take longer together, if each SM has one: what they leave in the
// workspace is read again. `pair`: of two layouts. Fitted to 308 forced plans of one layout and 444 of two on
// an H200, full rows and contexts of 512 tokens, 1 to 44 queries of 32 to 128 heads: times within 2 to 3 % in
// the mean. Cold code is that of a fit to 580 plans before, alone and between other kernels.
struct PartsPrice {
  int heads;
  struct OfRows {
    double ns_per_key, fixed_us, all_us, us_per_byte;
  } fp8, pair;
  ColdCode cold;
} inline constexpr kPartsPrices[] = {{32, {22.9, 6.5, 2.7, 0.05e-6}, {25.1, 6.3, 2.7, 0.11e-6}, {1.2, 2.0}},
                                     {64, {30.6, 7.9, 3.9, 0.03e-6}, {32.4, 8.1, 3.6, 0.14e-6}, {2.0, 5.2}}};
// What full rows, which count twice, and such with a quarter of their keys may take in the mean of the time
// of the plan without parts. How much less few_heads takes over one layout than its prices say, since it
// fetches early: 8.1 to 17.6 us where these are 9.0 to 19.7.
inline constexpr double kMostOfOthers = 1.01, kFewHeadsLessUs = 0.7;
// Two CTAs of 32 heads with many keys lose to five of 64 (12 queries of 128 heads: 1152 keys 22.5 against
// 19.0 us, over two layouts 640 keys 17.0 against 16.0), and from 32 queries of one layout on to two of 64,
// between an engine's other kernels.
inline constexpr int kLeastParts = 2, kLeastCtasOfRuns = 2;
inline constexpr int64_t kMostKeysOfTwoParts = 768, kMostQueriesOfTwoParts = 31;
inline int least_parts(const SparseAttentionParams& p, int heads, int num_sms) {
  const bool five_fit = 5 * p.num_tokens * ceil_div(p.num_q_heads, 64) <= num_sms;
  const bool gain =
      p.layouts().is_mixed() ? p.num_q_heads > 32 && !five_fit : p.num_tokens <= kMostQueriesOfTwoParts;
  return heads > 32 || (num_keys(p) <= kMostKeysOfTwoParts && gain) ? kLeastParts : kLeastParts + 1;
}

// Alone.
inline double time_of_parts(const SparseAttentionParams& p, const PartsPrice& price, int parts, int num_sms) {
  const int64_t ctas = p.num_tokens * ceil_div(p.num_q_heads, price.heads) * parts;
  const int64_t blocks = std::max<int64_t>(ceil_div(ceil_div(num_keys(p), int64_t{64}), int64_t{parts}), 1);
  const PartsPrice::OfRows& by = p.layouts().is_mixed() ? price.pair : price.fp8;
  return by.fixed_us + by.ns_per_key * 64e-3 * static_cast<double>(blocks) +
         by.all_us * static_cast<double>(ctas) / num_sms +
         by.us_per_byte * static_cast<double>(p.num_tokens) * bytes_of_keys(p);
}

constexpr bool leaves_parts(Schedule s) { return s == Schedule::kParts || s == Schedule::kRuns; }
// That the CTAs of all queries leave.
inline int64_t floats_of_parts(const SparseAttentionParams& p, const Plan& plan) {
  const int heads = plan.variant.heads;
  const int64_t of_head = plan.variant.schedule == Schedule::kRuns ? plan.most_runs * kFloatsOfRun
                                                                   : plan.splits * kFloatsOfQueryPart;
  return p.num_tokens * ceil_div(p.num_q_heads, heads) * heads * of_head;
}

// Whether heads and queries leave room for parts: without it nobody need ask for a plan, or a workspace.
inline bool may_have_parts(Op op, const SparseAttentionParams& p, int num_sms) {
  constexpr int kMostHeads = kPartsPrices[std::size(kPartsPrices) - 1].heads;
  return (op == Op::kDecode || !p.batch_invariant) && !p.is_window &&
         2 * align_up(p.num_q_heads, kOctet) > kPartsPrices[0].heads &&
         (p.batch_invariant ? kLeastCtasOfRuns : kLeastParts) * p.num_tokens *
                 ceil_div(p.num_q_heads, kMostHeads) <=
             num_sms;
}

// In place of another plan, or none.
inline std::optional<Priced> plan_parts(Op op, const SparseAttentionParams& p, const Priced& other,
                                        int num_sms) {
  if (!may_have_parts(op, p, num_sms)) return {};
  SparseAttentionParams quarter = p;
  for (KvScope& scope : quarter.scopes) scope.topk = ceil_div(scope.topk, int64_t{4});
  const bool is_mixed = p.layouts().is_mixed(), has_bf16 = kv_layout(p.layout).nope_dim < kHeadDimV;
  const double less_us = other.heads->kernel == Kernel::kFewHeads && !is_mixed ? kFewHeadsLessUs : 0.0;
  const double full_us = other.there_us - less_us;
  const double quarter_us = time_of(quarter, *other.heads, *other.splits, p.num_tokens, num_sms) +
                            cold_us(*other.heads, p) - less_us;
  std::optional<Priced> best;
  double least = 3 * kMostOfOthers;
  for (const PartsPrice& price : kPartsPrices) {
    const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kParts, price.heads, p.layouts());
    if (!v || price.heads >= 2 * align_up(p.num_q_heads, kOctet)) continue;
    const int64_t items = p.num_tokens * ceil_div(p.num_q_heads, price.heads);
    const double cold = is_mixed ? 0.0 : has_bf16 ? price.cold.bf16_values_us : price.cold.fp8_values_us;
    const auto most = static_cast<int>(std::min<int64_t>(kMostQueryParts, num_sms / items));
    for (int parts = least_parts(p, price.heads, num_sms); parts <= most; ++parts) {
      const double of_other = 2 * (time_of_parts(p, price, parts, num_sms) + cold) / full_us +
                              (time_of_parts(quarter, price, parts, num_sms) + cold) / quarter_us;
      const Plan plan{*v, parts};
      if (of_other >= least || floats_of_parts(p, plan) > p.workspace_floats) continue;
      least = of_other, best = {plan, time_of_parts(p, price, parts, num_sms)};
    }
  }
  return best;
}

}  // namespace mla_fp8::gpu::model
