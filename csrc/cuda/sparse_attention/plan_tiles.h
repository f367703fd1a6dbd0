#pragma once
// Plans on sm_90 for tiles of queries, whose heads are the rows of one CTA.
#include <algorithm>
#include <cmath>

#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

// Positions stay far from 2^31.
inline constexpr int64_t kMaxKeys = int64_t{1} << 26;

// A CTA for each tile.
inline Priced tiles_alone(const SparseAttentionParams& tiles, const Variant& v, const Price& price,
                          int num_sms) {
  const HeadsClass c{v.kernel, v.heads, price, {}, {}};
  return {{v}, time_of(tiles, c, kSplitClasses[0], tiles.num_tokens, num_sms)};
}

// A CTA of 32, of 48 and of 64 rows over all entries of the past, with the memory's time and the second
// launch: fitted to one H200, 32 requests of 8192 and 1024 entries; each part of a tile, to one request.
struct EntryPrice {
  int rows;
  double ns_per_key, fixed_us;
};
inline constexpr EntryPrice kEntryPrices[] = {{32, 29.0, 19.0}, {48, 33.0, 19.0}, {64, 35.5, 19.0}};
inline constexpr double kUsOfPart = 0.35;
// What queries alone take longer than their prices say: their CTAs survey all pages of a query.
inline constexpr double kUsOfPagePerKey = 1.1e-3;
// Than tiles with as many CTAs each, if lengths are equal: they seldom are.
inline constexpr double kMostOfEqualTiles = 1.05;

// Of the union of the windows, and the entries. A tile that requests end in has the keys of each.
inline int64_t keys_of_entry_tile(const SparseAttentionParams& p) {
  const int queries = entry_tile_queries(p);
  const int64_t requests = std::max<int64_t>(p.window.num_requests, 1), keys = num_keys(p) + queries - 1;
  const int64_t tiles = ceil_div(p.num_tokens, int64_t{queries});
  return p.num_tokens % (requests * queries) != 0 && queries > 1 ? keys + keys * (requests - 1) / tiles
                                                                 : keys;
}

// Tiles whose keys all SMs share: no wave is partly empty, and a request has SMs as it has keys. The parts
// meet in the workspace, in a second launch.
inline Priced shared_tiles(const SparseAttentionParams& p, int num_sms) {
  const int rows = rows_of_entry_tile(p);
  const int64_t tiles = num_entry_tiles(p);
  const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kSplit, rows, p.layouts());
  if (!p.has_entry_pages || p.batch_invariant || !v || !attends_to_tiles(*v, p.layouts()) ||
      tiles > num_sms || num_keys(p) + kMaxTileQueries >= kMaxKeys)
    return {};
  Plan plan{*v};
  plan.ctas = static_cast<int>(std::min<int64_t>(num_sms, tiles * kMaxTileParts));
  plan.tile_queries = entry_tile_queries(p);
  if (workspace_size(plan, p) > p.workspace_floats) return {};
  const int64_t parts = plan.ctas / tiles, keys = keys_of_entry_tile(p);
  for (const EntryPrice& price : kEntryPrices)
    if (price.rows == rows)
      return {plan, price.fixed_us + kUsOfPart * static_cast<double>(parts) +
                        price.ns_per_key * 1e-3 * static_cast<double>(ceil_div(keys, parts))};
  return {};
}

// Neighbours that attend to all entries, over FP8 pages. A CTA of 32 and of 64 rows has the price that a
// query of as many heads had on an H100. None if queries go alone.
inline constexpr Price kTilePrices[2] = {{19.8, 8.4}, {27.1, 11.0}};
inline Priced cheapest_tiles(const SparseAttentionParams& p, int num_sms) {
  Priced best;
  const int tile_queries = entry_tile_queries(p);
  if (tile_queries == 1 || num_keys(p) + tile_queries >= kMaxKeys) return best;
  SparseAttentionParams tiles = p;
  tiles.num_tokens = ceil_div(p.num_tokens, int64_t{tile_queries});
  const int rows = rows_of_entry_tile(p);
  tiles.num_q_heads = rows;                  // of 48 none was timed
  tiles.scopes[0].topk += tile_queries - 1;  // the union of the windows
  // A tile that requests end in has the keys of each.
  const int64_t requests = std::max<int64_t>(p.window.num_requests, 1);
  if (p.num_tokens % (requests * tile_queries) != 0)
    for (KvScope& scope : tiles.scopes) scope.topk += scope.topk * (requests - 1) / tiles.num_tokens;
  const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kSplit, rows, p.layouts());
  if (v && attends_to_tiles(*v, p.layouts())) best = tiles_alone(tiles, *v, kTilePrices[rows > 32], num_sms);
  best.plan.tile_queries = tile_queries;
  return best;
}

// ---- queries that share keys (ops/shared_keys.h) -------------------------------------------------------

// What a query brings that those of its tile before it have not, of its keys: what a tile is priced at.
inline constexpr double kLikelyNew = 0.1;
// A CTA over lists, with the memory's time: fitted to one H200, V4, 128 tiles of 645 to 2179 keys; of 48 rows
// to 128 tiles of 898 alone. The launch for queries that go alone, if there are none.
struct ListPrice {
  int rows;
  Price price;
};
inline constexpr ListPrice kListPrices[] = {
    {32, {29.7, 8.4, 0.0, 0.0}}, {48, {32.3, 9.4, 0.0, 0.0}}, {64, {37.0, 10.3, 0.0, 0.0}}};
inline constexpr double kNobodyAloneUs = 4.0;
// What a call that makes lists takes longer, of an entry that an SM's CTAs look at. (One H200: V4 and V3.2 in
// 64 to 128 tiles of 2560 to 12288 entries: 5 to 32 us, within 3 in the mean.)
inline constexpr double kListsUs = 3.0, kListsUsPerEntry = 1.4e-3;
inline double time_of_lists(const SparseAttentionParams& p, int num_sms) {
  const SharedKeysShape shape(p);
  const int64_t ctas = shape.num_tiles * ceil_div(shape.entries, int64_t{kListPartEntries});
  const double of_sm = std::max(static_cast<double>(ctas) / num_sms, 1.0);
  return kListsUs + kListsUsPerEntry * of_sm * static_cast<double>(shape.entries);
}
// What a tile may take of its queries alone. Tiles of both kinds in one call cost nearly what both cost, so
// the line between them lies where few tiles are (an overlap of about 0.4).
inline constexpr double kMostOfAlone = 1.25;
// What split queries take for a byte where they are more than a wave: most rows come while others are worked
// on. (One H200, 256 queries of V4 with 8 and 32 heads 31 and 47 us, 192 and 384 of V3.2 with 8 heads 65 and
// 106 to 111; at their whole price 42, 56, 95 and 163.)
inline constexpr double kSeenUsPerByte = 0.03e-6;
// A walk of few_heads, with 32 heads of many_heads, an SM: a key, and what lies between two queries. (One
// H200: 4096 queries of 640 and 2048 keys, 76efeb85. With 32 heads a guess that was not fitted.)
struct WalkPrice {
  int heads, places;  // queries that a CTA has at once
  double ns_per_key, fixed_us;
};
inline constexpr WalkPrice kWalkPrices[] = {{8, 4, 14.2, 2.1}, {16, 2, 19.0, 3.4}, {32, 1, 25.0, 5.0}};
// A query that has an SM nearly for itself takes longer than its share: of a round, the last one with up to
// half of all places and with more. (One H200, V4 with 8 and 16 heads, rounds and us: 0.82 to 1, 44 and 32;
// 1.1 to 1.5, 71 to 74 and 50 to 51; 1.7 to 1.94, 85 to 87 and 59 to 60; 2.2, 114. V3.2: 0.97, 134; 1.14 to
// 1.45, 207 to 212.)
inline constexpr double kHalfRound = 0.62, kLastRound = 0.92;
inline double time_of_walk(const WalkPrice& w, const SparseAttentionParams& p, int num_sms) {
  const double rounds = static_cast<double>(p.num_tokens) / (num_sms * w.places), full = std::floor(rounds);
  const double last = rounds == full ? 0.0 : rounds - full <= 0.5 ? kHalfRound : kLastRound;
  return std::max(full + last, 1.0) * w.places *
         (w.fixed_us + w.ns_per_key * 1e-3 * static_cast<double>(num_keys(p)));
}
// The call without groups.
inline double time_alone(const Plan& plan, const SparseAttentionParams& p, int num_sms) {
  if (plan.variant.schedule == Schedule::kSplit) {
    const Priced all = cheapest_split(p, p.num_tokens, num_sms);
    const auto rest_us = [&](int64_t queries) { return cheapest_split(p, queries, num_sms).us; };
    const double us = plan.queries > 0 ? cheapest_launches(p, all.us, num_sms, rest_us).us : all.us;
    const double hidden = std::max(price_of(*all.heads, p).us_per_byte - kSeenUsPerByte, 0.0);
    return us - hidden * static_cast<double>(p.num_tokens) * bytes_of_keys(p);
  }
  for (const WalkPrice& w : kWalkPrices)
    if (w.heads == plan.variant.heads) return time_of_walk(w, p, num_sms);
  return 0.0;
}

}  // namespace mla_fp8::gpu::model
