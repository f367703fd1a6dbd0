#pragma once
// The model of time on sm_90 that plan.cpp chooses by.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu::model {

inline constexpr int kOctet = 8;  // heads: the least that a CTA takes

inline bool is_bf16(const SparseAttentionParams& p) {
  return kv_layout(p.layout).nope_format == Format::kBf16;
}
inline double bytes_of_keys(const SparseAttentionParams& p) {  // of a query
  const auto of_scope = [&](int i, KvLayoutId layout) {
    return i < p.num_scopes ? static_cast<double>(p.scopes[i].topk) * kv_layout(layout).bytes_per_token()
                            : 0.0;
  };
  return of_scope(0, p.layout) + of_scope(1, p.extra_layout);
}

// The variant like this that reads the layouts.
inline const Variant* find_variant(Kernel kernel, Schedule schedule, int heads, KvPair layouts) {
  const auto is_it = [&](const Variant& v) {
    return v.kernel == kernel && v.schedule == schedule && v.heads == heads && v.reads(layouts);
  };
  const auto found = std::find_if(std::begin(kVariants), std::end(kVariants), is_it);
  return found == std::end(kVariants) ? nullptr : found;
}
inline const Variant& variant(Kernel kernel, Schedule schedule, int heads, KvPair layouts) {
  const Variant* const found = find_variant(kernel, schedule, heads, layouts);
  if (!found) throw std::logic_error("mla_fp8: a plan names a variant that is not in kVariants");
  return *found;
}

// ---- sm_90: which kernel, and how many SMs share a query ------------------------------------------------
//
// All prices and thresholds are those of H200s and H100s (132 SMs).

struct SplitClass {
  int splits;
  double clusters_per_sm;  // that are resident at once: 132, 66, 30, 17, 15, 7 on 132 SMs
};
// Of 7 CTAs no more than of 8 are resident, of 9 to 15 hardly more than of 16. 3 gained nothing, 5 gained 4 %
// with 20 queries of 8 heads and nothing elsewhere.
inline constexpr SplitClass kSplitClasses[] = {{1, 1.0},        {2, 0.5},        {4, 30 / 132.0},
                                               {6, 17 / 132.0}, {8, 15 / 132.0}, {16, 7 / 132.0}};
inline int64_t resident(const SplitClass& s, int num_sms) {  // clusters
  return std::max<int64_t>(static_cast<int64_t>(s.clusters_per_sm * num_sms + 0.5), 1);
}

// Of one CTA, but for the memory; a wave of CTAs costs what one does.
struct Price {
  double ns_per_key, fixed_us, cluster_us = 0.0;
  double us_per_byte = 0.14e-6;  // of all queries' rows
};
// What is added between an engine's other kernels, which leave nothing of ours in the instruction caches.
// Rows with values in bf16 (dsv4) take more code.
struct ColdCode {
  double fp8_values_us = 0.0, bf16_values_us = 0.0;
};
struct HeadsClass {
  Kernel kernel;
  int heads;
  Price fp8, bf16, pair;  // rows; of two layouts, which producers make one
  ColdCode cold;          // of FP8 rows
};
// Fitted to forced plans on an H100, at 1 to 128 queries of 640 and 2048 keys: times within 3 to 6 % in the
// mean. Pairs of layouts are fitted to 353 forced plans of 1 to 256 queries of 640 keys, within 3 to 4 %; in
// 89 cells no choice was more than 3.1 % from the best plan. Those of 16 heads over FP8 rows and of cold code
// are fitted to 71 forced plans of 4 to 64 queries on an H200, alone and between an engine's kernels: times
// there are within 4 to 7 % in the mean. Cold code of many_heads is fitted to 30 more cells of 2 to 132
// queries, in which no choice was 2 % from the best plan.
inline constexpr HeadsClass kHeadsClasses[] = {
    {Kernel::kFewHeads, 8, {11.8, 6.6, 1.2}, {17.3, 7.6, 0.8}, {16.6, 4.9, 2.0}, {0.5, 2.2}},
    {Kernel::kFewHeads, 16, {16.0, 8.6, 0.7, 0.05e-6}, {17.4, 8.5, 1.3}, {18.6, 6.2, 1.5}, {1.2, 2.2}},
    {Kernel::kFewHeads, 32, {}, {24.0, 7.3, 4.2}, {}},
    {Kernel::kManyHeads, 32, {19.8, 8.4}, {}, {26.0, 6.1}, {2.0, 6.0}},
    {Kernel::kManyHeads, 64, {27.1, 11.0, 0.0, 0.08e-6}, {}, {31.6, 10.8}, {5.2, 7.2}}};
inline const Price& price_of(const HeadsClass& c, const SparseAttentionParams& p) {
  return p.layouts().is_mixed() ? c.pair : is_bf16(p) ? c.bf16 : c.fp8;
}
inline double cold_us(const HeadsClass& c, const SparseAttentionParams& p) {
  if (p.layouts().is_mixed() || is_bf16(p)) return 0.0;
  return kv_layout(p.layout).nope_dim < kHeadDimV ? c.cold.bf16_values_us : c.cold.fp8_values_us;
}
inline constexpr double kUsPerByteAgain = 0.02e-6;  // from the L2, for each further block of heads
inline constexpr int kMinKeysPerCta = 96;
// Two launches for the queries of one: what the second adds (3 to 16 us more than the two take alone, least
// with many queries), and what they may take together, of one.
inline constexpr double kNextLaunchUs = 10.0, kMostOfOneLaunch = 0.92;
// What tiles of neighbours may take of their queries' time alone, where both are prices.
inline constexpr double kMostOfQueriesAlone = 0.95;

// Decode in tiles of bf16_tiles. With 24 and 32 heads they gained 0 to 5 % from 100 queries on and lost 16 to
// 30 % at 66; with 64 nothing need be split, and they are up to 1.8 times as fast (132 queries of 2048 keys:
// 136 -> 86 us; 0bff452). Pairs over FP8 rows keep invalid keys in their places, so wide rows gain less than
// contexts lose (one H200, dsv4, 128 heads, 128 queries, many_heads -> pairs: 640 keys 63.6 -> 60.5 us, 256
// of them valid 39.3 -> 56.2; 1152 keys 96.5 -> 95.4, 256 valid 39.2 -> 86.1).
inline constexpr int64_t kMostKeysOfPairs = 896;
inline bool decodes_in_tiles(const SparseAttentionParams& p) {
  if (!is_bf16(p) && !p.layouts().is_mixed() && num_keys(p) > kMostKeysOfPairs) return false;
  return p.num_q_heads > 32 || p.num_q_heads <= 16;
}

inline Plan few_or_many(const SparseAttentionParams& p, Kernel kernel, int heads, int splits) {
  return {variant(kernel, Schedule::kSplit, heads, p.layouts()), splits};
}

// The model's time of `queries` of a problem, with a cluster for each and block of heads, of which the
// longest CTA takes so many keys.
inline double time_of(const SparseAttentionParams& p, const HeadsClass& c, const SplitClass& s,
                      int64_t queries, int num_sms, double keys_of_cta) {
  const double bytes = static_cast<double>(queries) * bytes_of_keys(p);
  const int head_blocks = ceil_div(p.num_q_heads, c.heads);
  const Price& price = price_of(c, p);
  const auto waves = static_cast<double>(ceil_div(queries * head_blocks, resident(s, num_sms)));
  const double fixed_us = price.fixed_us + (s.splits > 1 ? price.cluster_us : 0.0);
  return waves * (fixed_us + price.ns_per_key * 1e-3 * keys_of_cta) +
         bytes * (price.us_per_byte + (head_blocks - 1) * kUsPerByteAgain);
}
inline double time_of(const SparseAttentionParams& p, const HeadsClass& c, const SplitClass& s,
                      int64_t queries, int num_sms) {
  const double keys = static_cast<double>(std::max<int64_t>(num_keys(p), 1));
  const int block = c.heads == kOctet ? 32 : 64;  // that CTAs share
  return time_of(p, c, s, queries, num_sms,
                 std::max<double>(std::ceil(keys / s.splits / block) * block, kMinKeysPerCta));
}

// Calls fn(heads class, split class) for what may run the problem.
template <class Fn>
void for_each_split(const SparseAttentionParams& p, Fn&& fn) {
  for (const HeadsClass& c : kHeadsClasses) {
    if (!find_variant(c.kernel, Schedule::kSplit, c.heads, p.layouts())) continue;
    if (c.heads >= 2 * align_up(p.num_q_heads, kOctet)) continue;  // mostly empty
    for (const SplitClass& s : kSplitClasses)
      if (s.splits == 1 || c.kernel == Kernel::kFewHeads) fn(c, s);  // many_heads has no clusters
  }
}

struct Priced {
  Plan plan;
  double us = 1e30, there_us = 1e30;  // alone, between an engine's other kernels
  const HeadsClass* heads = nullptr;
  const SplitClass* splits = nullptr;
};
// The least time between an engine's other kernels.
inline Priced cheapest_split(const SparseAttentionParams& p, int64_t queries, int num_sms) {
  Priced best;
  for_each_split(p, [&](const HeadsClass& c, const SplitClass& s) {
    const double us = time_of(p, c, s, queries, num_sms), there_us = us + cold_us(c, p);
    if (there_us < best.there_us) best = {few_or_many(p, c.kernel, c.heads, s.splits), us, there_us, &c, &s};
  });
  return best;
}

// The first queries in full waves, the rest in a launch of its own, which takes rest_us(how many): in less
// than `most_us`, or plan.queries is 0.
template <class Fn>
Priced cheapest_launches(const SparseAttentionParams& p, double most_us, int num_sms, Fn&& rest_us) {
  Priced best{{}, most_us};
  for_each_split(p, [&](const HeadsClass& c, const SplitClass& s) {
    const int64_t per_wave = resident(s, num_sms), head_blocks = ceil_div(p.num_q_heads, c.heads);
    const int64_t queries = p.num_tokens * head_blocks / per_wave * per_wave / head_blocks;
    if (queries == 0 || queries == p.num_tokens) return;
    const double us = time_of(p, c, s, queries, num_sms) + kNextLaunchUs + rest_us(p.num_tokens - queries);
    if (us >= best.us) return;
    best = {few_or_many(p, c.kernel, c.heads, s.splits), us};
    best.plan.queries = queries;
  });
  return best;
}

}  // namespace mla_fp8::gpu::model
