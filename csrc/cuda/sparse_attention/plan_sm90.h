#pragma once
// Chooses plans on sm_90 by modelled time: how many CTAs share a query, how, and which queries share a CTA.
// The model is the work of a launch, times prices.
#include <algorithm>
#include <bit>
#include <concepts>

#include "cuda/sparse_attention/prices.h"

namespace mla_fp8::gpu::model {

inline constexpr int kOctet = 8;  // fewest heads of a CTA

inline bool is_bf16(const SparseAttentionParams& p) {
  return kv_layout(p.layout).nope_format == Format::kBf16;
}
inline Reads reads_of(const SparseAttentionParams& p) {
  return p.layouts().is_mixed() ? Reads::kPair : is_bf16(p) ? Reads::kBf16 : Reads::kFp8;
}
inline double bytes_of_keys(const SparseAttentionParams& p) {  // rows of all queries
  double bytes = 0;
  for (int i = 0; i < p.num_scopes; ++i)
    bytes += static_cast<double>(p.num_tokens * p.scopes[i].topk) *
             kv_layout(i == 0 ? p.layout : p.extra_layout).bytes_per_token();
  return bytes;
}
inline SparseAttentionParams with_queries(SparseAttentionParams p, int64_t queries) {
  p.num_tokens = queries;
  return p;
}
inline SparseAttentionParams with_a_quarter_of_keys(SparseAttentionParams p) {
  for (KvScope& scope : p.scopes) scope.topk = ceil_div(scope.topk, int64_t{4});
  return p;
}

// ---- time ----------------------------------------------------------------------------------------------

// How many clusters of so many CTAs 132 SMs have room for at once.
struct ClusterSize {
  int ctas, on_132_sms;
};
inline constexpr ClusterSize kClusterSizes[] = {{1, 132}, {2, 66}, {4, 30}, {6, 17}, {8, 15}, {16, 7}};
inline int64_t resident(int ctas, int num_sms) {  // clusters
  for (const ClusterSize& size : kClusterSizes)
    if (size.ctas == ctas) return std::max((size.on_132_sms * num_sms + 66) / 132, 1);
  return 1;
}
// Runs of a query of `blocks` blocks, of at most `most`.
inline int64_t num_runs(const SparseAttentionParams& p, int64_t blocks, int most) {
  const int longest =
      longest_run(static_cast<int>(blocks), run_blocks(p), std::countr_zero(static_cast<unsigned>(most)));
  return std::max<int64_t>(ceil_div(blocks, int64_t{longest}), 1);
}

inline constexpr int64_t kMinKeysPerCta = 96;  // fewer take as long
// Further blocks of heads read a query's rows again, from L2: this share of the bytes is added for each.
inline constexpr double kBytesAgain = 1 / 7.0;

// Returns what the longest CTA of each wave does, and what all queries have.
inline Work work_of(const SparseAttentionParams& p, const Plan& plan, int num_sms) {
  const Schedule schedule = plan.variant.schedule;
  const int ctas = plan.splits, heads = plan.variant.heads, block = heads == kOctet ? 32 : 64;
  const int num_teams = plan.variant.kernel == Kernel::kFewHeads ? 32 / heads : 1;
  const int64_t head_blocks = ceil_div(p.num_q_heads, heads), items = p.num_tokens * head_blocks;
  const int64_t blocks = ceil_div(num_keys(p), int64_t{block});
  const double items_of_sm = static_cast<double>(items) / num_sms;
  int64_t keys = ceil_div(blocks, int64_t{ctas}) * block;
  Work work{.waves = 1, .bytes = bytes_of_keys(p)};
  if (schedule == Schedule::kWalk) work.waves = std::max<double>(items_of_sm, num_teams);
  if (schedule == Schedule::kSplit) keys = std::max(keys, kMinKeysPerCta);
  if (shares_tiles(plan)) {
    const int64_t parts = plan.ctas / items;
    keys = ceil_div(num_keys(p), parts), work.runs = static_cast<double>(parts);
  } else if (deals_runs(schedule)) {
    const int64_t runs = num_runs(p, blocks, kSegmentsOfQuery * num_teams);
    keys = std::min(ceil_div(runs, int64_t{ctas}) * ceil_div(blocks, runs), blocks) * block;
    work.runs = static_cast<double>(ceil_div(runs, int64_t{ctas} * num_teams));
  }
  if (leaves_parts(schedule)) {
    work.left = items_of_sm * (schedule == Schedule::kRuns ? plan.most_runs : ctas);
  } else if (schedule != Schedule::kWalk) {
    work.waves = static_cast<double>(ceil_div(items, resident(ctas, num_sms)));
    work.merges = ctas > 1 ? work.waves : 0.0;
    work.bytes *= 1 + kBytesAgain * static_cast<double>(head_blocks - 1);
  }
  work.keys = work.waves * static_cast<double>(keys), work.runs *= work.waves;
  return work;
}

// Returns the price of the variant's CTA, or of the next larger one.
inline const Price& price_of(const Variant& v, Reads reads) {
  return *std::find_if(std::begin(kPrices), std::end(kPrices), [&](const Price& c) {
    return c.kernel == v.kernel && c.schedule == v.schedule && c.reads == reads && c.heads >= v.heads;
  });
}
// Returns us of a launch between an engine's other kernels: the mean of queries with all their keys, which
// count twice, and of queries with a quarter.
inline double us_of(const SparseAttentionParams& p, const Plan& plan, Reads reads, int num_sms) {
  const Price& price = price_of(plan.variant, reads);
  const Work full = work_of(p, plan, num_sms), quarter = work_of(with_a_quarter_of_keys(p), plan, num_sms);
  return (2 * price.us_of(full) + price.us_of(quarter)) / 3 +
         (kv_layout(p.layout).nope_dim < kHeadDimV ? price.cold_us.bf16_values : price.cold_us.fp8_values);
}

struct Priced {
  Plan plan;
  double us = 1e30;
};

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
// True if the variant's CTAs can share a query so: in segments all take equally many.
inline bool can_share(const Variant& v, int splits) {
  if (splits < 1 || (v.schedule == Schedule::kSegments && kSegmentsOfQuery % splits != 0)) return false;
  if (leaves_parts(v.schedule)) return splits <= kMostQueryParts;
  return splits <= (v.kernel == Kernel::kFewHeads && v.schedule != Schedule::kWalk ? 16 : 1);
}
// True if such CTAs gain: a cluster of a usual size, or CTAs that are all resident, have work, and have room
// for what they leave. Two CTAs of 32 heads lose to CTAs of 64 where keys or queries are many.
inline bool may_gain(const SparseAttentionParams& p, const Plan& plan, int num_sms) {
  const Variant& v = plan.variant;
  if (!can_share(v, plan.splits)) return false;
  if (!leaves_parts(v.schedule))
    return std::ranges::count(kClusterSizes, plan.splits, &ClusterSize::ctas) > 0;
  const bool runs = v.schedule == Schedule::kRuns, two_gain = num_keys(p) <= 768 && p.num_tokens < 32;
  const int64_t most =
      runs ? num_runs(p, ceil_div(num_keys(p), int64_t{64}), kSegmentsOfQuery) : kMostQueryParts;
  return plan.splits >= (runs || v.heads > 32 || two_gain ? 2 : 3) && plan.splits <= most &&
         p.num_tokens * ceil_div(p.num_q_heads, v.heads) * plan.splits <= num_sms &&
         floats_of_parts(p, plan) <=
             std::min(p.workspace_floats,
                      sparse_attention_floats(p.num_tokens, p.num_q_heads, num_sms, p.batch_invariant));
}
// Calls fn(plan, us) for each plan of a schedule that reads the problem and is not mostly empty. Heads alone
// decide which kernel has a query's segments.
template <class Fn>
void for_each_plan(const SparseAttentionParams& p, Schedule schedule, int num_sms, Fn&& fn) {
  const int heads = p.num_q_heads;
  for (const Variant& v : kVariants) {
    const bool few = v.kernel == Kernel::kFewHeads, fits = v.heads < 2 * align_up(heads, kOctet);
    if (v.kernel == Kernel::kPortable || v.schedule != schedule || !v.rows.has(p.layouts()) || !fits)
      continue;
    if (schedule == Schedule::kSegments && (few ? heads > v.heads : heads <= 16)) continue;
    Plan plan{.variant = v, .most_runs = schedule == Schedule::kRuns ? most_runs(p) : 1};
    for (plan.splits = 1; plan.splits <= 16; ++plan.splits)
      if (may_gain(p, plan, num_sms)) fn(plan, us_of(p, plan, reads_of(p), num_sms));
  }
}
// Returns the plan of least time of these schedules.
inline Priced cheapest(const SparseAttentionParams& p, int num_sms,
                       std::same_as<Schedule> auto... schedules) {
  Priced best;
  const auto compare = [&](const Plan& plan, double us) {
    if (us < best.us) best = {plan, us};
  };
  (for_each_plan(p, schedules, num_sms, compare), ...);
  return best;
}

// us that a second launch adds (measured: 3 to 16, least with many queries), and the share of one launch's
// time that two may take.
inline constexpr double kNextLaunchUs = 5.0, kMostOfOneLaunch = 0.92;

// Returns the plan of least time. If the last wave would be mostly empty, it is a plan for the queries of
// full waves: the others get a plan of their own, with more CTAs for each.
inline Priced plan_split(const SparseAttentionParams& p, int num_sms) {
  if (p.is_window) return cheapest(p, num_sms, Schedule::kSplit);
  const Priced all = cheapest(p, num_sms, Schedule::kSplit, Schedule::kParts);
  if (all.plan.variant.schedule == Schedule::kParts) return all;
  Priced best{all.plan, all.us * kMostOfOneLaunch};
  for_each_plan(p, Schedule::kSplit, num_sms, [&](Plan plan, double) {
    const int64_t per_wave = resident(plan.splits, num_sms),
                  head_blocks = ceil_div(p.num_q_heads, plan.variant.heads);
    plan.queries = p.num_tokens * head_blocks / per_wave * per_wave / head_blocks;
    if (plan.queries == 0 || plan.queries == p.num_tokens) return;
    const SparseAttentionParams first = with_queries(p, plan.queries),
                                rest = with_queries(p, p.num_tokens - plan.queries);
    const double us = us_of(first, plan, reads_of(p), num_sms) + kNextLaunchUs +
                      cheapest(rest, num_sms, Schedule::kSplit, Schedule::kParts).us;
    if (us < best.us) best = {plan, us};
  });
  return best.plan.queries > 0 ? best : all;
}

// ---- tiles of neighbours that attend to all entries ----------------------------------------------------

inline constexpr int64_t kMaxKeys = int64_t{1} << 26;  // positions stay far from 2^31

// The problem with tiles as queries. A tile in which requests end has the keys of several.
inline SparseAttentionParams as_tiles(SparseAttentionParams p) {
  const int queries = entry_tile_queries(p);
  const int64_t requests = std::max<int64_t>(p.window.num_requests, 1);
  const bool ends = p.num_tokens % (requests * queries) != 0;
  p.num_tokens = ceil_div(p.num_tokens, int64_t{queries}), p.num_q_heads *= queries;
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
inline std::optional<Plan> plan_entry_tiles(const SparseAttentionParams& p, int num_sms) {
  const int queries = entry_tile_queries(p);
  const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kSplit, queries * p.num_q_heads,
                                        p.layouts(), &Variant::tiles);
  if (!v || num_keys(p) + kMaxTileQueries >= kMaxKeys) return {};
  const SparseAttentionParams tiles = queries > 1 ? as_tiles(p) : p;
  std::optional<Plan> best;
  double least = cheapest(p, num_sms, Schedule::kSplit).us;
  const auto compare = [&](const Plan& plan, Reads reads) {
    if (const double us = us_of(tiles, plan, reads, num_sms); us < least) least = us, best = plan;
  };
  const Plan shared = share_tiles(*v, p, num_sms);
  if (queries > 1) compare({.variant = *v, .tile_queries = queries}, Reads::kTiles);  // with a CTA each
  if (num_entry_tiles(p) <= num_sms && workspace_size(shared, p) <= p.workspace_floats)
    compare(shared, Reads::kSharedTiles);
  return best;
}

// ---- queries that share keys (ops/shared_keys.h) -------------------------------------------------------

// Tiles of requests share if the mean of their queries is at least this share of a full tile. With one in
// eight short a call takes 0.78 of its queries' time alone, with a mean of 0.6 more than they do.
inline constexpr double kFullEnough = 0.85;
// Prices assume that a query adds this share of its keys to those of its tile's earlier queries.
inline constexpr double kLikelyNew = 0.1;
// us that making lists adds to a call, and adds for each entry that an SM's CTAs look at; the launch for
// queries that go alone adds some, if there are none.
inline constexpr double kListsUs = 2.25, kListsUsPerEntry = 1.05e-3, kEmptyLaunchUs = 3.0;
inline double us_of_lists(const SparseAttentionParams& p, int num_sms) {
  const SharedKeysShape shape(p);
  const int64_t ctas = shape.num_tiles * ceil_div(shape.entries, int64_t{kListPartEntries});
  const double of_sm = std::max(static_cast<double>(ctas) / num_sms, 1.0);
  return kListsUs + kListsUsPerEntry * of_sm * static_cast<double>(shape.entries);
}
// A tile may take this share of the time of its queries alone.
inline constexpr double kMostOfAlone = 1.3;

}  // namespace mla_fp8::gpu::model
