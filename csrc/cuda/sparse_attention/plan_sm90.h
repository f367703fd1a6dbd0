#pragma once
// Chooses plans on sm_90 by modelled time: how many CTAs share a query, how, and which queries share a CTA.
#include <algorithm>
#include <iterator>
#include <optional>

#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/plan_model.h"
#include "cuda/sparse_attention/prices.h"

namespace mla_fp8::gpu::model {

struct Priced {
  Plan plan;
  double us = 1e30, there_us = 1e30;  // alone; between an engine's other kernels
  const Price* price = nullptr;
};

// Returns the price of the smallest CTA with room for `heads`.
inline const Price& price_of(Kernel kernel, Schedule schedule, Reads reads, int heads) {
  return *std::find_if(std::begin(kPrices), std::end(kPrices), [&](const Price& c) {
    return c.kernel == kernel && c.schedule == schedule && c.reads == reads && c.heads >= heads;
  });
}
// Calls fn(price, variant) for each kernel of that schedule that reads the problem and is not mostly empty.
template <class Fn>
void for_each_price(const SparseAttentionParams& p, Schedule schedule, Fn&& fn) {
  for (const Price& c : kPrices)
    if (c.schedule == schedule && c.reads == reads_of(p) && c.heads < 2 * align_up(p.num_q_heads, kOctet))
      if (const Variant* const v = find_variant(c.kernel, schedule, c.heads, p.layouts())) fn(c, *v);
}

// ---- each query alone, or in a cluster -----------------------------------------------------------------

template <class Fn>
void for_each_split(const SparseAttentionParams& p, Fn&& fn) {  // fn(price, plan)
  for_each_price(p, Schedule::kSplit, [&](const Price& c, const Variant& v) {
    for (const ClusterSize& size : kClusterSizes)
      if (size.ctas == 1 || c.kernel == Kernel::kFewHeads) fn(c, Plan{v, size.ctas});
  });
}
// Returns the split of least time between an engine's other kernels.
inline Priced cheapest_split(const SparseAttentionParams& p, int num_sms) {
  Priced best;
  for_each_split(p, [&](const Price& c, const Plan& plan) {
    const double us = us_of(p, c, plan, num_sms), there_us = us + cold_us(c, p);
    if (there_us < best.there_us) best = {plan, us, there_us, &c};
  });
  return best;
}

// Two launches in place of one. The second adds kNextLaunchUs (measured: 3 to 16 us, least with many
// queries). Together they may take kMostOfOneLaunch of the one.
inline constexpr double kNextLaunchUs = 10.0, kMostOfOneLaunch = 0.92;
// Returns a plan for the first queries in full waves; a launch for the rest takes rest_us(the rest). Its
// `queries` is 0 if no two launches together take less than `most_us`.
template <class Fn>
Priced cheapest_launches(const SparseAttentionParams& p, double most_us, int num_sms, Fn&& rest_us) {
  Priced best{{}, most_us};
  for_each_split(p, [&](const Price& c, Plan plan) {
    const int64_t per_wave = resident(plan.splits, num_sms), head_blocks = ceil_div(p.num_q_heads, c.heads);
    plan.queries = p.num_tokens * head_blocks / per_wave * per_wave / head_blocks;
    if (plan.queries == 0 || plan.queries == p.num_tokens) return;
    const double us = us_of(with_queries(p, plan.queries), c, plan, num_sms) + kNextLaunchUs +
                      rest_us(with_queries(p, p.num_tokens - plan.queries));
    if (us < best.us) best = {plan, us};
  });
  return best;
}

// ---- CTAs that share a query of many_heads meet in a second grid ---------------------------------------

// Parts may take kMostOfOthers of the time of the plan without parts: in the mean of a query with all its
// keys, which counts twice, and of one with a quarter. few_heads over one layout fetches early, and takes
// kFewHeadsLessUs less than its prices say.
inline constexpr double kMostOfOthers = 1.01, kFewHeadsLessUs = 0.7;
// Two CTAs of 32 heads a query lose to CTAs of 64 where keys or queries are many.
inline constexpr int kLeastParts = 2;
inline constexpr int64_t kMostKeysOfTwoParts = 768, kMostQueriesOfTwoParts = 31;
inline int least_parts(const SparseAttentionParams& p, int heads, int num_sms) {
  const bool five_fit = 5 * p.num_tokens * ceil_div(p.num_q_heads, 64) <= num_sms;
  const bool gain =
      p.layouts().is_mixed() ? p.num_q_heads > 32 && !five_fit : p.num_tokens <= kMostQueriesOfTwoParts;
  return heads > 32 || (num_keys(p) <= kMostKeysOfTwoParts && gain) ? kLeastParts : kLeastParts + 1;
}

constexpr bool leaves_parts(Schedule s) { return s == Schedule::kParts || s == Schedule::kRuns; }
// Floats that the CTAs of all queries leave.
inline int64_t floats_of_parts(const SparseAttentionParams& p, const Plan& plan) {
  const int64_t of_head = plan.variant.schedule == Schedule::kRuns ? plan.most_runs * kFloatsOfRun
                                                                   : plan.splits * kFloatsOfQueryPart;
  return p.num_tokens * align_up(p.num_q_heads, plan.variant.heads) * of_head;
}
// True if heads and queries leave room for parts or runs.
inline bool may_leave_parts(Op op, const SparseAttentionParams& p, int num_sms) {
  return (op == Op::kDecode || !p.batch_invariant) && !p.is_window && p.num_q_heads > 16 &&
         kLeastParts * p.num_tokens * ceil_div(p.num_q_heads, 64) <= num_sms;
}

// Returns a plan with parts that beats `other`, or none.
inline std::optional<Priced> plan_parts(Op op, const SparseAttentionParams& p, const Priced& other,
                                        int num_sms) {
  if (!may_leave_parts(op, p, num_sms)) return {};
  const SparseAttentionParams quarter = with_a_quarter_of_keys(p);
  const bool fetches_early = other.price->kernel == Kernel::kFewHeads && !p.layouts().is_mixed();
  const double less_us = fetches_early ? kFewHeadsLessUs : 0.0, full_us = other.there_us - less_us;
  const double quarter_us =
      us_of(quarter, *other.price, other.plan, num_sms) + cold_us(*other.price, p) - less_us;
  std::optional<Priced> best;
  double least = 3 * kMostOfOthers;
  for_each_price(p, Schedule::kParts, [&](const Price& c, const Variant& v) {
    const int64_t items = p.num_tokens * ceil_div(p.num_q_heads, c.heads);
    for (int parts = least_parts(p, c.heads, num_sms);
         parts <= std::min<int64_t>(kMostQueryParts, num_sms / items); ++parts) {
      const Plan plan{v, parts};
      const double us = us_of(p, c, plan, num_sms), cold = cold_us(c, p);
      const double of_other =
          2 * (us + cold) / full_us + (us_of(quarter, c, plan, num_sms) + cold) / quarter_us;
      if (of_other < least && floats_of_parts(p, plan) <= p.workspace_floats)
        least = of_other, best = {plan, us};
    }
  });
  return best;
}

// ---- batch_invariant over FP8 rows of one layout -------------------------------------------------------
//
// Who works on a query's segments changes no bits (sm90/segments.cuh): neither how many CTAs share it, nor in
// many_heads how many of its heads a CTA takes. So the batch may decide both.

// True if `splits` CTAs can share the segments of a query: in a cluster all take equally many.
inline bool can_share_segments(const Variant& v, int splits) {
  return v.schedule == Schedule::kRuns || (splits > 0 && kSegmentsOfQuery % splits == 0);
}
inline void deal_runs(const SparseAttentionParams& p, Plan& plan) {
  plan.segments = kSegmentsOfQuery, plan.run_blocks = run_blocks(p), plan.most_runs = most_runs(p);
}

// Returns none if there are no segments. A query with all its keys, which counts twice, and one with a
// quarter should both take little longer than their fastest plans.
inline std::optional<Plan> plan_segments(Op op, const SparseAttentionParams& p, int num_sms) {
  const int64_t room =
      std::min(p.workspace_floats, sparse_attention_floats(p.num_tokens, p.num_q_heads, num_sms, true));
  const int heads = p.num_q_heads,
            most_ctas = static_cast<int>(num_runs(p, num_blocks(p, 64), kSegmentsOfQuery));
  const SparseAttentionParams quarter = with_a_quarter_of_keys(p);
  Plan dealt{};
  deal_runs(p, dealt);
  const auto each = [&](auto&& fn) {  // fn(plan, us with all keys, with a quarter)
    const auto tell = [&](const Price& c, const Variant& v, int ctas) {
      Plan plan = dealt;
      plan.variant = v, plan.splits = ctas;
      if (!leaves_parts(v.schedule) || floats_of_parts(p, plan) <= room)
        fn(plan, us_of(p, c, plan, num_sms), us_of(quarter, c, plan, num_sms));
    };
    for_each_price(p, Schedule::kSegments, [&](const Price& c, const Variant& v) {
      const bool few = c.kernel == Kernel::kFewHeads;
      if (few ? heads > c.heads : heads <= 16) return;
      for (const ClusterSize& size : kClusterSizes)
        if (can_share_segments(v, size.ctas) && (size.ctas == 1 || few)) tell(c, v, size.ctas);
    });
    if (!may_leave_parts(op, p, num_sms)) return;
    for_each_price(p, Schedule::kRuns, [&](const Price& c, const Variant& v) {
      const int64_t items = p.num_tokens * ceil_div(heads, c.heads);
      for (int ctas = kLeastParts; ctas <= std::min<int64_t>(most_ctas, num_sms / items); ++ctas)
        tell(c, v, ctas);
    });
  };
  double full_us = 1e30, quarter_us = 1e30, least = 1e30;
  each([&](const Plan&, double full, double short_us) {
    full_us = std::min(full_us, full), quarter_us = std::min(quarter_us, short_us);
  });
  std::optional<Plan> best;
  each([&](const Plan& plan, double full, double short_us) {
    const double longer = 2 * full / full_us + short_us / quarter_us;
    if (longer < least) least = longer, best = plan;
  });
  return best;
}

// ---- tiles of neighbours that attend to all entries ----------------------------------------------------

inline constexpr int64_t kMaxKeys = int64_t{1} << 26;  // positions stay far from 2^31
// us per key that queries alone take beyond their prices: their CTAs survey all pages of a query.
inline constexpr double kUsOfPagePerKey = 1.1e-3;
// Tiles that all CTAs share may take kMostOfEqualTiles of tiles with a CTA each, whose lengths are seldom
// equal. Those may take kMostOfQueriesAlone of their queries' time alone.
inline constexpr double kMostOfEqualTiles = 1.05, kMostOfQueriesAlone = 0.95;

// The problem with tiles as queries. A tile in which requests end has the keys of several.
inline SparseAttentionParams as_tiles(SparseAttentionParams p) {
  const int queries = entry_tile_queries(p);
  const int64_t requests = std::max<int64_t>(p.window.num_requests, 1);
  const bool ends = p.num_tokens % (requests * queries) != 0;
  p.num_tokens = ceil_div(p.num_tokens, int64_t{queries});
  p.scopes[0].topk += queries - 1;  // the union of the windows
  if (ends)
    for (KvScope& scope : p.scopes) scope.topk += scope.topk * (requests - 1) / p.num_tokens;
  return p;
}
inline const Variant* variant_of_tiles(const SparseAttentionParams& p) {
  const Variant* const v =
      find_variant(Kernel::kManyHeads, Schedule::kSplit, rows_of_entry_tile(p), p.layouts());
  return v && attends_to_tiles(*v, p.layouts()) ? v : nullptr;
}

// Tiles whose keys all SMs share: no wave is partly empty, and a request has SMs in proportion to its
// keys. The parts meet in the workspace, in a second launch.
inline Priced shared_tiles(const SparseAttentionParams& p, int num_sms) {
  const Variant* const v = variant_of_tiles(p);
  const int64_t tiles = num_entry_tiles(p);
  if (p.batch_invariant || !v || tiles > num_sms || num_keys(p) + kMaxTileQueries >= kMaxKeys) return {};
  Plan plan{*v};
  plan.ctas = static_cast<int>(std::min<int64_t>(num_sms, tiles * kMaxTileParts));
  plan.tile_queries = entry_tile_queries(p);
  if (workspace_size(plan, p) > p.workspace_floats) return {};
  const int64_t parts = plan.ctas / tiles, keys = num_keys(plan.tile_queries > 1 ? as_tiles(p) : p);
  const Price& price = price_of(v->kernel, v->schedule, Reads::kSharedTiles, v->heads);
  return {plan, us_of(price, {.keys = static_cast<double>(ceil_div(keys, parts)),
                              .runs = static_cast<double>(parts)})};
}
// Tiles with a CTA each. Without tiles the time stays infinite.
inline Priced cheapest_tiles(const SparseAttentionParams& p, int num_sms) {
  const Variant* const v = variant_of_tiles(p);
  const int queries = entry_tile_queries(p);
  if (queries == 1 || num_keys(p) + queries >= kMaxKeys || !v) return {};
  SparseAttentionParams tiles = as_tiles(p);
  tiles.num_q_heads = v->heads;
  Plan plan{*v};
  plan.tile_queries = queries;
  return {plan, us_of(tiles, price_of(v->kernel, v->schedule, Reads::kTiles, v->heads), plan, num_sms)};
}

// ---- queries that share keys (ops/shared_keys.h) -------------------------------------------------------

// Prices assume that a query adds this share of its keys to those of its tile's earlier queries.
inline constexpr double kLikelyNew = 0.1;
// us of the launch for queries that go alone, if there are none.
inline constexpr double kNobodyAloneUs = 4.0;
// us that making lists adds to a call, and adds for each entry that an SM's CTAs look at.
inline constexpr double kListsUs = 3.0, kListsUsPerEntry = 1.4e-3;
inline double us_of_lists(const SparseAttentionParams& p, int num_sms) {
  const SharedKeysShape shape(p);
  const int64_t ctas = shape.num_tiles * ceil_div(shape.entries, int64_t{kListPartEntries});
  const double of_sm = std::max(static_cast<double>(ctas) / num_sms, 1.0);
  return kListsUs + kListsUsPerEntry * of_sm * static_cast<double>(shape.entries);
}
// A tile may take this share of the time of its queries alone.
inline constexpr double kMostOfAlone = 1.25;
// ps per byte of split queries that are more than a wave: most rows come while others are worked on.
inline constexpr double kSeenPsPerByte = 0.03;
// us of the call without groups.
inline double us_alone(const Plan& plan, const SparseAttentionParams& p, int num_sms) {
  const Variant& v = plan.variant;
  if (v.schedule != Schedule::kSplit)
    return us_of(p, price_of(v.kernel, v.schedule, reads_of(p), v.heads), plan, num_sms);
  const Priced all = cheapest_split(p, num_sms);
  const auto rest_us = [&](const SparseAttentionParams& rest) { return cheapest_split(rest, num_sms).us; };
  const double us = plan.queries > 0 ? cheapest_launches(p, all.us, num_sms, rest_us).us : all.us;
  return us - std::max(all.price->of.byte_ps - kSeenPsPerByte, 0.0) * 1e-6 * bytes_of_keys(p);
}

// Returns the variant of many_heads over lists with room for a tile's heads, or null.
inline const Variant* variant_of_lists(const SparseAttentionParams& p) {
  const int heads = p.num_q_heads;
  if (p.query_groups < 2 || p.num_tokens < 2 || p.is_window || p.batch_invariant ||
      (heads != 8 && heads != 16 && heads != 32))
    return nullptr;
  const SharedKeysShape shape(p);
  const int64_t rows = shape.queries.tile * heads;
  if (shape.queries.tile < 2 || shape.entries == 0 || shape.entries > kMaxListedEntries) return nullptr;
  for (const Variant& v : kVariants)  // the fewest heads first
    if (v.heads >= rows && attends_to_lists(v, p.layouts()) && v.reads(p.layouts())) return &v;
  return nullptr;
}

}  // namespace mla_fp8::gpu::model
