#pragma once
// Chooses plans on sm_90 by modelled time: how many CTAs share a query, how, and which queries share a CTA.
// The model is the work of a launch, times prices.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "cuda/sparse_attention/prices.h"

namespace mla_fp8::gpu::model {

inline constexpr int kOctet = 8;  // fewest heads of a CTA

inline bool is_bf16(const SparseAttentionParams& p) {
  return kv_layout(p.layout).nope_format == Format::kBf16;
}
inline Reads reads_of(const SparseAttentionParams& p) {
  return p.layouts().is_mixed() ? Reads::kPair : is_bf16(p) ? Reads::kBf16 : Reads::kFp8;
}
inline double cold_us(const Price& price, const SparseAttentionParams& p) {
  return kv_layout(p.layout).nope_dim < kHeadDimV ? price.cold_us.bf16_values : price.cold_us.fp8_values;
}
inline double bytes_of_keys(const SparseAttentionParams& p) {  // rows of all queries
  double bytes = 0;
  for (int i = 0; i < p.num_scopes; ++i)
    bytes += static_cast<double>(p.scopes[i].topk) *
             kv_layout(i == 0 ? p.layout : p.extra_layout).bytes_per_token();
  return static_cast<double>(p.num_tokens) * bytes;
}
inline SparseAttentionParams with_queries(SparseAttentionParams p, int64_t queries) {
  p.num_tokens = queries;
  return p;
}
inline SparseAttentionParams with_a_quarter_of_keys(SparseAttentionParams p) {
  for (KvScope& scope : p.scopes) scope.topk = ceil_div(scope.topk, int64_t{4});
  return p;
}

// Clusters of each size that are resident at once: 132, 66, 30, 17, 15 and 7 on 132 SMs.
struct ClusterSize {
  int ctas;
  double per_sm;
};
inline constexpr ClusterSize kClusterSizes[] = {{1, 1.0},        {2, 0.5},        {4, 30 / 132.0},
                                                {6, 17 / 132.0}, {8, 15 / 132.0}, {16, 7 / 132.0}};
inline int64_t resident(int ctas, int num_sms) {  // clusters
  for (const ClusterSize& size : kClusterSizes)
    if (size.ctas == ctas) return std::max<int64_t>(static_cast<int64_t>(size.per_sm * num_sms + 0.5), 1);
  return 1;
}

// ---- time ----------------------------------------------------------------------------------------------

// Runs of a query of `blocks` blocks, of at most `most`.
inline int64_t num_runs(const SparseAttentionParams& p, int64_t blocks, int most) {
  const int longest =
      longest_run(static_cast<int>(blocks), run_blocks(p), std::countr_zero(static_cast<unsigned>(most)));
  return std::max<int64_t>(ceil_div(blocks, int64_t{longest}), 1);
}

inline constexpr double kUsPerByteAgain = 0.02e-6;  // rows read again from L2 by each further block of heads
inline constexpr int kMinKeysPerCta = 96;
// The last round of a walk takes this share of a full one, with up to half of all places filled and with
// more: a query that has an SM nearly for itself takes longer than its share.
inline constexpr double kHalfRound = 0.62, kLastRound = 0.92;

// Returns the us of all queries by a plan: what the longest CTA of each wave does, times prices.
inline double us_of(const SparseAttentionParams& p, const Price& price, const Plan& plan, int num_sms) {
  const int ctas = plan.splits, block = price.heads == kOctet ? 32 : 64;
  const int num_teams = price.kernel == Kernel::kFewHeads ? 32 / price.heads : 1;
  const int64_t keys = num_keys(p), blocks = ceil_div(keys, int64_t{block});
  const int64_t head_blocks = ceil_div(p.num_q_heads, price.heads), items = p.num_tokens * head_blocks;
  double waves = 1, keys_of_cta = 0, runs = 0, waits = 0;  // in a wave; `waits`: results in local memory
  double leaves = 0, others_us = 0;  // results left for a second grid, for each SM; us without a price
  if (price.schedule == Schedule::kWalk) {
    const double rounds = static_cast<double>(p.num_tokens) / (num_sms * num_teams),
                 full = std::floor(rounds);
    const double last = rounds == full ? 0.0 : rounds - full <= 0.5 ? kHalfRound : kLastRound;
    waves = std::max(full + last, 1.0) * num_teams, keys_of_cta = static_cast<double>(keys);
  } else if (price.schedule == Schedule::kParts) {
    keys_of_cta = static_cast<double>(std::max<int64_t>(ceil_div(blocks, int64_t{ctas}), 1) * block);
    leaves = static_cast<double>(items) * ctas / num_sms;
  } else if (price.schedule == Schedule::kSplit) {
    const auto longest = std::ceil(static_cast<double>(std::max<int64_t>(keys, 1)) / ctas / block) * block;
    keys_of_cta = std::max<double>(longest, kMinKeysPerCta);
  } else {
    const int64_t all = num_runs(p, blocks, kSegmentsOfQuery * num_teams);
    const int64_t of_team = ceil_div(all, int64_t{ctas} * num_teams);
    const int64_t most_blocks = std::min(ceil_div(all, int64_t{ctas}) * ceil_div(blocks, all), blocks);
    runs = static_cast<double>(of_team), keys_of_cta = static_cast<double>(most_blocks * block);
    if (price.schedule == Schedule::kRuns) {
      leaves = static_cast<double>(items) * plan.most_runs / num_sms;
    } else {
      const auto places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(of_team)));
      const bool first_in_registers = price.heads < 64;
      waits = static_cast<double>(first_in_registers ? std::max<int64_t>(places / 2, 1) - 1 : of_team - 1);
    }
  }
  if (price.schedule == Schedule::kSplit || price.schedule == Schedule::kSegments) {
    waves = static_cast<double>(ceil_div(items, resident(ctas, num_sms)));
    others_us = bytes_of_keys(p) * static_cast<double>(head_blocks - 1) * kUsPerByteAgain;
  }
  const auto& of = price.of;
  const double in_cluster = leaves_parts(price.schedule) || ctas == 1 ? 0.0 : of.cluster_us;
  return waves * (of.wave_us + in_cluster + of.key_ns * 1e-3 * keys_of_cta + of.run_us * runs +
                  of.wait_us * waits) +
         of.leave_us * leaves + of.byte_ps * 1e-6 * bytes_of_keys(p) + others_us;
}

struct Priced {
  Plan plan;
  double us = 1e30;
  const Price* price = nullptr;
};

// Returns the price of the variant's CTA, or of the next larger one.
inline const Price& price_of(const Variant& v, Reads reads) {
  return *std::find_if(std::begin(kPrices), std::end(kPrices), [&](const Price& c) {
    return c.kernel == v.kernel && c.schedule == v.schedule && c.reads == reads && c.heads >= v.heads;
  });
}

// ---- one query in a CTA, or in several -----------------------------------------------------------------

// Most runs of a query in kRuns, whichever keys are valid: fewer blocks may be dealt to more runs.
inline int most_runs(const SparseAttentionParams& p) {
  const int64_t blocks = ceil_div(num_keys(p), int64_t{64});
  if (blocks > kMostQueryParts * kMostQueryParts) return kSegmentsOfQuery;
  int64_t most = 1;
  for (int64_t some = 1; some <= blocks; ++some) most = std::max(most, num_runs(p, some, kSegmentsOfQuery));
  return static_cast<int>(most);
}
// Floats that the CTAs of all queries leave for a second grid.
inline int64_t floats_of_parts(const SparseAttentionParams& p, const Plan& plan) {
  const int64_t of_head = plan.variant.schedule == Schedule::kRuns ? plan.most_runs * kFloatsOfRun
                                                                   : plan.splits * kFloatsOfQueryPart;
  return p.num_tokens * align_up(p.num_q_heads, plan.variant.heads) * of_head;
}
// Two CTAs of 32 heads a query lose to CTAs of 64 where keys or queries are many.
inline constexpr int kLeastParts = 2;
inline constexpr int64_t kMostKeysOfTwoParts = 768, kMostQueriesOfTwoParts = 31;
inline int least_parts(const SparseAttentionParams& p, int heads, int num_sms) {
  const bool five_fit = 5 * p.num_tokens * ceil_div(p.num_q_heads, 64) <= num_sms;
  const bool gain =
      p.layouts().is_mixed() ? p.num_q_heads > 32 && !five_fit : p.num_tokens <= kMostQueriesOfTwoParts;
  return heads > 32 || (num_keys(p) <= kMostKeysOfTwoParts && gain) ? kLeastParts : kLeastParts + 1;
}

// True if `splits` CTAs can share a query: in segments all take equally many.
inline bool can_share(const Variant& v, int splits) {
  if (splits < 1 || (v.schedule == Schedule::kSegments && kSegmentsOfQuery % splits != 0)) return false;
  if (leaves_parts(v.schedule)) return splits <= kMostQueryParts;
  return splits <= (v.kernel == Kernel::kFewHeads && v.schedule != Schedule::kWalk ? 16 : 1);
}
// Calls fn(price, plan) for each plan of that schedule that reads the problem, is not mostly empty, and has
// room for its parts.
template <class Fn>
void for_each_plan(const SparseAttentionParams& p, Schedule schedule, int num_sms, Fn&& fn) {
  const int heads = p.num_q_heads;
  const int64_t room =
      std::min(p.workspace_floats, sparse_attention_floats(p.num_tokens, heads, num_sms, p.batch_invariant));
  for (const Price& c : kPrices) {
    const bool few = c.kernel == Kernel::kFewHeads;
    if (c.schedule != schedule || c.reads != reads_of(p) || c.heads >= 2 * align_up(heads, kOctet)) continue;
    if (schedule == Schedule::kSegments && (few ? heads > c.heads : heads <= 16)) continue;
    const Variant* const v = find_variant(c.kernel, schedule, c.heads, p.layouts());
    if (!v) continue;
    Plan plan{*v};
    if (!leaves_parts(schedule)) {
      for (const ClusterSize& size : kClusterSizes) {
        plan.splits = size.ctas;
        if (can_share(*v, plan.splits)) fn(c, plan);
      }
      continue;
    }
    const bool runs = schedule == Schedule::kRuns;
    if (runs) plan.most_runs = most_runs(p);
    const int64_t parts =
        runs ? num_runs(p, ceil_div(num_keys(p), int64_t{64}), kSegmentsOfQuery) : kMostQueryParts;
    const int64_t most = std::min(parts, num_sms / (p.num_tokens * ceil_div(heads, c.heads)));
    for (plan.splits = runs ? kLeastParts : least_parts(p, c.heads, num_sms); plan.splits <= most;
         ++plan.splits)
      if (floats_of_parts(p, plan) <= room) fn(c, plan);
  }
}
// us between an engine's other kernels.
inline double engine_us(const SparseAttentionParams& p, const Price& c, const Plan& plan, int num_sms) {
  return us_of(p, c, plan, num_sms) + cold_us(c, p);
}
// Returns the split of least time there.
inline Priced cheapest_split(const SparseAttentionParams& p, int num_sms) {
  Priced best;
  double least = 1e30;
  for_each_plan(p, Schedule::kSplit, num_sms, [&](const Price& c, const Plan& plan) {
    if (const double us = engine_us(p, c, plan, num_sms); us < least)
      least = us, best = {plan, us_of(p, c, plan, num_sms), &c};
  });
  return best;
}

// Parts may take kMostOfOthers of the time of the plan without parts: in the mean of a query with all its
// keys, which counts twice, and of one with a quarter. few_heads over one layout fetches early, and takes
// kEarlyFetchUs less than its prices say.
inline constexpr double kMostOfOthers = 1.01, kEarlyFetchUs = 0.7;

// Returns a plan with parts that beats `other`, or none.
inline std::optional<Priced> plan_parts(const SparseAttentionParams& p, const Priced& other, int num_sms) {
  const SparseAttentionParams quarter = with_a_quarter_of_keys(p);
  const bool fetches_early = other.price->kernel == Kernel::kFewHeads && !p.layouts().is_mixed();
  const double less_us = fetches_early ? kEarlyFetchUs : 0.0;
  const double full_us = engine_us(p, *other.price, other.plan, num_sms) - less_us;
  const double quarter_us = engine_us(quarter, *other.price, other.plan, num_sms) - less_us;
  std::optional<Priced> best;
  double least = 3 * kMostOfOthers;
  for_each_plan(p, Schedule::kParts, num_sms, [&](const Price& c, const Plan& plan) {
    const double of_other =
        2 * engine_us(p, c, plan, num_sms) / full_us + engine_us(quarter, c, plan, num_sms) / quarter_us;
    if (of_other < least) least = of_other, best = {plan, us_of(p, c, plan, num_sms)};
  });
  return best;
}

// Two launches in place of one. The second adds kNextLaunchUs (measured: 3 to 16 us, least with many
// queries). Together they may take kMostOfOneLaunch of the one.
inline constexpr double kNextLaunchUs = 10.0, kMostOfOneLaunch = 0.92;

// Returns the plan of least time. If the last wave would be mostly empty, it is a plan for the queries of
// full waves: the others get a plan of their own, with more CTAs for each.
inline Priced plan_split(const SparseAttentionParams& p, int num_sms) {
  const Priced all = cheapest_split(p, num_sms);
  if (p.is_window) return all;
  if (const auto parts = plan_parts(p, all, num_sms)) return *parts;
  Priced best = all;
  double least = all.us * kMostOfOneLaunch;
  for_each_plan(p, Schedule::kSplit, num_sms, [&](const Price& c, Plan plan) {
    const int64_t per_wave = resident(plan.splits, num_sms), head_blocks = ceil_div(p.num_q_heads, c.heads);
    plan.queries = p.num_tokens * head_blocks / per_wave * per_wave / head_blocks;
    if (plan.queries == 0 || plan.queries == p.num_tokens) return;
    const SparseAttentionParams first = with_queries(p, plan.queries),
                                rest = with_queries(p, p.num_tokens - plan.queries);
    const Priced alone = cheapest_split(rest, num_sms);
    const double us =
        us_of(first, c, plan, num_sms) + kNextLaunchUs + plan_parts(rest, alone, num_sms).value_or(alone).us;
    if (us < least) least = us, best = {.plan = plan, .us = us, .price = all.price};
  });
  return best;
}

// ---- batch_invariant over FP8 rows of one layout -------------------------------------------------------
//
// Who works on a query's segments changes no bits (sm90/segments.cuh): neither how many CTAs share it, nor in
// many_heads how many of its heads a CTA takes. So the batch may decide both.

// Returns none if there are no segments. A query with all its keys, which counts twice, and one with a
// quarter should both take little longer than their fastest plans.
inline std::optional<Plan> plan_segments(Op op, const SparseAttentionParams& p, int num_sms) {
  const SparseAttentionParams quarter = with_a_quarter_of_keys(p);
  struct Timed {
    Plan plan;
    double us, quarter_us;
  };
  std::vector<Timed> all;
  double least_us = 1e30, least_quarter_us = 1e30, least = 1e30;
  const auto add = [&](const Price& c, const Plan& plan) {
    all.push_back({plan, us_of(p, c, plan, num_sms), us_of(quarter, c, plan, num_sms)});
    least_us = std::min(least_us, all.back().us);
    least_quarter_us = std::min(least_quarter_us, all.back().quarter_us);
  };
  for_each_plan(p, Schedule::kSegments, num_sms, add);
  if (op == Op::kDecode) for_each_plan(p, Schedule::kRuns, num_sms, add);
  std::optional<Plan> best;
  for (const Timed& x : all)
    if (const double longer = 2 * x.us / least_us + x.quarter_us / least_quarter_us; longer < least)
      least = longer, best = x.plan;
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
inline Plan share_tiles(const Variant& v, const SparseAttentionParams& p, int num_sms) {
  return {.variant = v,
          .ctas = static_cast<int>(std::min<int64_t>(num_sms, num_entry_tiles(p) * kMaxTileParts)),
          .tile_queries = entry_tile_queries(p)};
}
// Returns a plan of tiles that beats that of queries alone, or none. If all SMs can share the tiles, no wave
// is partly empty, and a request has SMs in proportion to its keys. Parts meet in the workspace then, in a
// second launch.
inline std::optional<Priced> plan_entry_tiles(const SparseAttentionParams& p, int num_sms) {
  const int queries = entry_tile_queries(p);
  const Variant* const v =
      find_variant(Kernel::kManyHeads, Schedule::kSplit, rows_of_entry_tile(p), p.layouts());
  if (!v || !v->tiles.has(p.layouts()) || num_keys(p) + kMaxTileQueries >= kMaxKeys) return {};
  SparseAttentionParams tiles = queries > 1 ? as_tiles(p) : p;
  tiles.num_q_heads = v->heads;
  Priced each{{.variant = *v, .tile_queries = queries}};  // with a CTA each
  if (queries > 1) each.us = us_of(tiles, price_of(*v, Reads::kTiles), each.plan, num_sms);
  const double alone_us = cheapest_split(p, num_sms).us,
               pages_us = kUsOfPagePerKey * static_cast<double>(num_keys(p));
  Priced shared{share_tiles(*v, p, num_sms)};
  if (num_entry_tiles(p) <= num_sms && workspace_size(shared.plan, p) <= p.workspace_floats) {
    const Price::Of& of = price_of(*v, Reads::kSharedTiles).of;
    const int64_t parts = shared.plan.ctas / num_entry_tiles(p);
    shared.us = of.wave_us + of.key_ns * 1e-3 * static_cast<double>(ceil_div(num_keys(tiles), parts)) +
                of.run_us * static_cast<double>(parts);
    if (shared.us < std::min(kMostOfEqualTiles * each.us, alone_us + pages_us)) return shared;
  }
  if (each.us < kMostOfQueriesAlone * alone_us) return each;
  return {};
}

// ---- queries that share keys (ops/shared_keys.h) -------------------------------------------------------

// Tiles of requests share if the mean of their queries is at least this share of a full tile. With one in
// eight short a call takes 0.78 of its queries' time alone, with a mean of 0.6 more than they do.
inline constexpr double kFullEnough = 0.85;
// Prices assume that a query adds this share of its keys to those of its tile's earlier queries.
inline constexpr double kLikelyNew = 0.1;
// us of the launch for queries that go alone, if there are none.
inline constexpr double kEmptyLaunchUs = 4.0;
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

}  // namespace mla_fp8::gpu::model
