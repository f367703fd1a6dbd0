#pragma once
// The model of time on sm_90 that plan.cpp chooses by.
#include <algorithm>
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

// The first variant like this that reads the layouts. `producers` 0: any number.
inline const Variant* find_variant(Kernel kernel, Schedule schedule, int heads, int producers,
                                   KvPair layouts) {
  const auto is_it = [&](const Variant& v) {
    return v.kernel == kernel && v.schedule == schedule && v.heads == heads &&
           (producers == 0 || v.producers == producers) && v.reads(layouts);
  };
  const auto found = std::find_if(std::begin(kVariants), std::end(kVariants), is_it);
  return found == std::end(kVariants) ? nullptr : found;
}
inline const Variant& variant(Kernel kernel, Schedule schedule, int heads, KvPair layouts,
                              int producers = 0) {
  const Variant* const found = find_variant(kernel, schedule, heads, producers, layouts);
  if (!found) throw std::logic_error("mla_fp8: a plan names a variant that is not in kVariants");
  return *found;
}

// ---- sm_90: which kernel, and how many SMs share a query ------------------------------------------------
//
// All prices and thresholds are those of one H200 (132 SMs).

struct SplitClass {
  int splits;
  double clusters_per_sm;  // that are resident at once: 132, 66, 30, 15, 7 on 132 SMs
};
inline constexpr SplitClass kSplitClasses[] = {
    {1, 1.0}, {2, 0.5}, {4, 30 / 132.0}, {8, 15 / 132.0}, {16, 7 / 132.0}};
inline int64_t resident(const SplitClass& s, int num_sms) {  // clusters
  return std::max<int64_t>(static_cast<int64_t>(s.clusters_per_sm * num_sms + 0.5), 1);
}

// Of one CTA, when nothing but itself limits it; a wave of CTAs costs what one does.
struct Price {
  double ns_per_key, fixed_us, cluster_us;
};
struct HeadsClass {
  Kernel kernel;
  int heads;
  Price fp8, bf16, pair;  // rows; of two layouts, which producers make one
};
// FP8 rows: fitted to forced plans at 1 to 256 queries of 640 and 2048 keys, within 8 % (b6179ba6); pairs to
// those at 1 to 128 queries of 640 keys, within 10 % (485d11aa, but that it copies codes in bulk). The others
// to the order of the choices in the run of commit 70ebf54; their values are rough.
inline constexpr HeadsClass kHeadsClasses[] = {
    {Kernel::kFewHeads, 8, {14.4, 6.9, 0.5}, {11.5, 6.4, 1.2}, {25.0, 5.7, 2.6}},
    {Kernel::kFewHeads, 16, {16.6, 8.6, 0.4}, {17.5, 5.0, 3.0}, {29.0, 6.3, 3.6}},
    {Kernel::kFewHeads, 32, {}, {27.0, 7.0, 4.0}, {}},
    {Kernel::kManyHeads, 32, {22.8, 8.4, 1.4}, {}, {33.0, 6.5, 2.7}},
    {Kernel::kManyHeads, 64, {30.0, 10.3, 3.5}, {}, {42.0, 12.7, 1.9}}};
inline const Price& price_of(const HeadsClass& c, const SparseAttentionParams& p) {
  return p.layouts().is_mixed() ? c.pair : is_bf16(p) ? c.bf16 : c.fp8;
}
inline constexpr double kHbmBytesPerUs = 3.9e6, kL2BytesPerUs = 8e6;
inline constexpr int kMinKeysPerCta = 128;
// Two launches for the queries of one: what the second adds (3 to 16 us more than the two take alone, least
// with many queries), and what they may take together, of one.
inline constexpr double kNextLaunchUs = 10.0, kMostOfOneLaunch = 0.95;
// What tiles of neighbours may take of their queries' time alone, where both are prices.
inline constexpr double kMostOfQueriesAlone = 0.95;

// 8 heads, FP8 rows: cheap keys and many of them. 4 warps that gather would be the limit (commit 70ebf54). Of
// two layouts they always are.
inline constexpr int64_t kKeysForMoreProducers = 512;

inline Plan few_or_many(const SparseAttentionParams& p, Kernel kernel, int heads, int splits) {
  int producers = 0;
  if (p.layouts().is_mixed()) producers = heads < 64 ? 8 : 4;
  else if (kernel == Kernel::kFewHeads && heads == 8)
    producers = num_keys(p) / splits >= kKeysForMoreProducers ? 8 : 4;
  return {variant(kernel, Schedule::kSplit, heads, p.layouts(), producers), splits};
}

// The model's time of `queries` of a problem, with a cluster for each and block of heads.
inline double time_of(const SparseAttentionParams& p, const HeadsClass& c, const SplitClass& s,
                      int64_t queries, int num_sms) {
  const double keys = static_cast<double>(std::max<int64_t>(num_keys(p), 1));
  const double bytes = static_cast<double>(queries) * bytes_of_keys(p);
  const int head_blocks = ceil_div(p.num_q_heads, c.heads);
  const Price& price = price_of(c, p);
  const auto waves = static_cast<double>(ceil_div(queries * head_blocks, resident(s, num_sms)));
  const double fixed = price.fixed_us + (s.splits > 1 ? price.cluster_us : 0.0);
  const double per_cta = std::max(keys / s.splits, static_cast<double>(kMinKeysPerCta));
  const double compute_us = waves * (fixed + price.ns_per_key * 1e-3 * per_cta);
  const double memory_us = bytes / kHbmBytesPerUs + (head_blocks - 1) * bytes / kL2BytesPerUs + fixed;
  return std::max(compute_us, memory_us);
}

// Calls fn(heads class, split class) for what may run the problem.
template <class Fn>
void for_each_split(const SparseAttentionParams& p, Fn&& fn) {
  for (const HeadsClass& c : kHeadsClasses) {
    if (!find_variant(c.kernel, Schedule::kSplit, c.heads, 0, p.layouts())) continue;
    if (c.heads >= 2 * align_up(p.num_q_heads, kOctet)) continue;  // mostly empty
    for (const SplitClass& s : kSplitClasses) fn(c, s);
  }
}

struct Priced {
  Plan plan;
  double us = 1e30;
};
inline Priced cheapest_split(const SparseAttentionParams& p, int64_t queries, int num_sms) {
  Priced best;
  for_each_split(p, [&](const HeadsClass& c, const SplitClass& s) {
    const double us = time_of(p, c, s, queries, num_sms);
    if (us < best.us) best = {few_or_many(p, c.kernel, c.heads, s.splits), us};
  });
  return best;
}

}  // namespace mla_fp8::gpu::model
