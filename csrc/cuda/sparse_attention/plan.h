#pragma once
// The only policy of sparse attention: which kernel runs a problem, and how it is cut into CTAs. It looks at
// shapes, never at lengths. So a captured graph stays right when lengths change, and a query's result does
// not depend on other queries' contents. Queries that share keys are an exception: the bits of a tile depend
// on the keys of all its queries and, where CTAs share tiles (sm90/many_heads/shares.cuh), on all lengths.
#include <algorithm>
#include <concepts>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "ops/shared_keys.h"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

enum class Op { kDecode, kPrefill };

enum class Kernel {
  kPortable,   // every GPU from sm_80 on, every layout
  kFewHeads,   // sm90/few_heads
  kManyHeads,  // sm90/many_heads
  kBf16Tiles,  // sm90/bf16_tiles
};
enum class Schedule {
  // A CTA takes one query and one block of heads. In few_heads a cluster of CTAs shares the query's keys.
  kSplit,
  kWalk,  // about as many CTAs as SMs go through the queries
  // Like kSplit, but keys are dealt to runs: the result has the same bits whoever works on which run.
  kSegments,
  // CTAs share a query without a cluster, and a second grid adds up what they leave in the workspace. More of
  // them fit on a GPU than of clusters (sm90/many_heads/parts.cuh).
  kParts,
  // Like kSegments, but CTAs without a cluster leave their runs in the workspace for a second grid.
  kRuns,
};
constexpr bool deals_runs(Schedule s) { return s == Schedule::kSegments || s == Schedule::kRuns; }
constexpr bool leaves_parts(Schedule s) { return s == Schedule::kParts || s == Schedule::kRuns; }

// A set of the kinds of rows that a kernel reads. Each layout alone is a kind, and each of kMixedPairs.
struct Rows {
  uint32_t kinds = 0;  // one bit per kind

  static constexpr int kind(KvPair pair) {  // the pair can_attend
    int i = kNumKvLayouts;
    if (!pair.is_mixed()) return static_cast<int>(pair.first);
    for (const KvPair& p : kMixedPairs)
      if (p.first != pair.first || p.extra != pair.extra) ++i;
      else break;
    return i;
  }
  constexpr bool has(KvPair pair) const { return can_attend(pair) && kinds >> kind(pair) & 1; }
  constexpr Rows operator|(Rows other) const { return {kinds | other.kinds}; }
};
constexpr Rows rows_of(std::same_as<KvLayoutId> auto... layouts) {
  return {((1u << Rows::kind({layouts, layouts})) | ...)};
}
constexpr Rows rows_in(Format nope_format) {  // all layouts of that format
  Rows rows;
  for (int i = 0; i < kNumKvLayouts; ++i)
    if (const auto id = static_cast<KvLayoutId>(i); kv_layout(id).nope_format == nope_format)
      rows = rows | rows_of(id);
  return rows;
}
constexpr Rows pairs_in(Format nope_format) {  // all pairs whose first layout is of that format
  Rows rows;
  for (const KvPair& pair : kMixedPairs)
    if (kv_layout(pair.first).nope_format == nope_format) rows.kinds |= 1u << Rows::kind(pair);
  return rows;
}
inline constexpr Rows kBf16Rows = rows_in(Format::kBf16), kFp8Rows = rows_in(Format::kE4m3fn),
                      kFp8Pairs = pairs_in(Format::kE4m3fn),
                      kFnuzRows = rows_in(Format::kE4m3fnuz) | pairs_in(Format::kE4m3fnuz);
inline constexpr Rows kDsv4Rows = rows_of(KvLayoutId::kDsv4);
// FP8 layouts that were timed on Hopper. For the others no schedule but kSplit was shown to gain.
inline constexpr Rows kTimedFp8Rows = rows_of(KvLayoutId::kDsv32, KvLayoutId::kDsv4, KvLayoutId::kDsv41);
// Layouts that walk: GLM-5.3-Flash sends prompts of dsv32_nope.
inline constexpr Rows kPromptRows = kTimedFp8Rows | rows_of(KvLayoutId::kDsv32Nope);

// Layouts whose neighbouring queries may share lists of keys (ops/shared_keys.h).
inline constexpr Rows kListedRows = kDsv4Rows | rows_of(KvLayoutId::kDsv32);

// The choices that a kernel is compiled for, besides the layout.
struct Variant {
  Kernel kernel;
  Schedule schedule;
  int heads;      // at most, in a CTA
  int producers;  // warps that gather
  // Rows of queries that go alone; of tiles of queries that attend to all entries; of tiles that have lists.
  Rows rows, tiles = {}, lists = {};

  constexpr uint32_t kinds() const { return (rows | tiles | lists).kinds; }
  constexpr bool reads(KvPair pair) const { return Rows{kinds()}.has(pair); }
};
inline constexpr Variant kVariants[] = {
    {Kernel::kPortable, Schedule::kSplit, 16, 8, kFp8Rows | kFp8Pairs | kFnuzRows | kBf16Rows},
    {Kernel::kPortable, Schedule::kSplit, 32, 8, kFp8Rows | kFp8Pairs | kFnuzRows | kBf16Rows},
    {Kernel::kPortable, Schedule::kSplit, 64, 8, kFp8Rows | kFp8Pairs | kFnuzRows},
    {Kernel::kFewHeads, Schedule::kSplit, 8, 8, kFp8Rows | kFp8Pairs | kBf16Rows},
    {Kernel::kFewHeads, Schedule::kSplit, 16, 4, kFp8Rows | kBf16Rows},
    {Kernel::kFewHeads, Schedule::kSplit, 16, 8, kFp8Pairs},
    {Kernel::kFewHeads, Schedule::kSplit, 32, 4, kBf16Rows},
    {Kernel::kFewHeads, Schedule::kSegments, 8, 8, kTimedFp8Rows},
    {Kernel::kFewHeads, Schedule::kSegments, 16, 4, kTimedFp8Rows},
    {Kernel::kFewHeads, Schedule::kWalk, 8, 8, kPromptRows | kFp8Pairs | kBf16Rows},
    {Kernel::kFewHeads, Schedule::kWalk, 16, 8, kPromptRows | kFp8Pairs},
    {Kernel::kManyHeads, Schedule::kSplit, 32, 4, kFp8Rows, kDsv4Rows, kListedRows},
    {Kernel::kManyHeads, Schedule::kSplit, 32, 8, kFp8Pairs},
    {Kernel::kManyHeads, Schedule::kSplit, 48, 4, {}, kDsv4Rows, kDsv4Rows},
    {Kernel::kManyHeads, Schedule::kSplit, 64, 4, kFp8Rows | kFp8Pairs, kDsv4Rows, kListedRows},
    {Kernel::kManyHeads, Schedule::kParts, 32, 4, kTimedFp8Rows},
    {Kernel::kManyHeads, Schedule::kParts, 32, 8, kFp8Pairs},
    {Kernel::kManyHeads, Schedule::kParts, 64, 4, kTimedFp8Rows | kFp8Pairs},
    {Kernel::kManyHeads, Schedule::kSegments, 32, 4, kTimedFp8Rows},
    {Kernel::kManyHeads, Schedule::kSegments, 64, 4, kTimedFp8Rows},
    {Kernel::kManyHeads, Schedule::kRuns, 32, 4, kTimedFp8Rows},
    {Kernel::kManyHeads, Schedule::kRuns, 64, 4, kTimedFp8Rows},
    {Kernel::kManyHeads, Schedule::kWalk, 32, 4, kPromptRows},
    {Kernel::kManyHeads, Schedule::kWalk, 32, 8, kFp8Pairs},
    {Kernel::kManyHeads, Schedule::kWalk, 64, 4, kPromptRows},
    {Kernel::kBf16Tiles, Schedule::kWalk, 64, 4, kBf16Rows | kDsv4Rows},
    {Kernel::kBf16Tiles, Schedule::kWalk, 64, 4, kFp8Pairs},
};

// Returns the variant with the fewest heads that has room for so many, else that with the most; null if none
// reads the layouts.
inline const Variant* find_variant(Kernel kernel, Schedule schedule, int64_t heads, KvPair layouts,
                                   Rows Variant::* rows = &Variant::rows) {
  const Variant* found = nullptr;
  for (const Variant& v : kVariants)  // of a kernel and a schedule the fewest heads come first
    if (v.kernel == kernel && v.schedule == schedule && (v.*rows).has(layouts) &&
        (!found || found->heads < heads))
      found = &v;
  return found;
}
inline const Variant& variant(Kernel kernel, Schedule schedule, int heads, KvPair layouts) {
  const Variant* const found = find_variant(kernel, schedule, heads, layouts);
  if (!found) throw std::logic_error("mla_fp8: a plan names a variant that is not in kVariants");
  return *found;
}

struct Plan {
  Variant variant;
  int splits = 1;  // CTAs that share a query's keys: at most 16; any number in kPortable
  int ctas = 0;    // kWalk: most CTAs of the grid. kSplit: CTAs that share the keys of all tiles, or 0
  // Queries that this plan takes, the first ones; 0: all. The others get their own plan, launched before.
  int64_t queries = 0;
  bool follows = false;  // another launch of the call comes before this one, which does not need it
  // Where the problem has lists of shared keys: takes the tiles that have a list. Without it few_heads and
  // many_heads take the queries of tiles that have none.
  bool takes_lists = false;
  int tile_queries = 1;  // many_heads: neighbouring queries whose heads form one item
  int most_runs = 1;     // kRuns: most runs of a query, whichever keys are valid
};
// Floats that a CTA leaves of a head for a second grid: its output as f16, a byte of exponent for each eight
// of that, (base, sum), the largest logit. In kRuns it leaves of each run: output, (base, sum).
inline constexpr int kFloatsOfQueryPart = kHeadDimV / 2 + kHeadDimV / 8 / 4 + 3;
inline constexpr int kFloatsOfRun = kHeadDimV + 2, kMostQueryParts = 8;
const char* name(Kernel kernel);
const char* name(Schedule schedule);
std::logic_error no_such_kernel(const Plan& plan);
std::string to_string(const Plan& plan);  // "few_heads split, 16 heads, 2 CTAs a query, 4 producers"

// workspace_size: floats that a plan's CTAs leave for each other in global memory. within_workspace: the plan
// with no more splits than the workspace of `p` has room for.
int64_t workspace_size(const Plan& plan, const SparseAttentionParams& p);
Plan within_workspace(Plan plan, const SparseAttentionParams& p);

struct Gpu {
  int major;  // compute capability; 0 on AMD
  int num_sms;
};
// Plans that need more workspace than `p` has are left out where another kernel needs none.
Plan plan(Op op, const SparseAttentionParams& p, const Gpu& gpu);
// Floats for the plans of all launches: with all the room they want, or within a caller's workspace.
int64_t workspace_of_call(Op op, const SparseAttentionParams& p, const Gpu& gpu);

// Plans of the portable kernel (plan_portable.cpp).
Plan plan_portable(const SparseAttentionParams& p, const Gpu& gpu);
// Plans ragged attention by the portable kernel, for requests that have at most `keys` together. The heads of
// a request's queries and the layout alone decide the variant: a number of splits gives the same bits in any
// batch.
Plan plan_ragged(const SparseAttentionParams& p, int q_len, int64_t keys, const Gpu& gpu);

// Returns the plan that a test asks for. Throws if there is no such variant, or if it does not run `p` here.
Plan forced_plan(const WantedKernel& wanted, const SparseAttentionParams& p, const Gpu& gpu);

// ---- segments: the runs of a query follow from its heads and its valid keys (sm90/segments.cuh) --------

inline constexpr int kSegmentsOfQuery = 8;  // most runs of a query, for each team that it has at once
// Fewest blocks of a run, if the query has more than twice as many; 0: about as many as the query has runs.
// With more than 32 heads a result that waits costs as much as several blocks.
inline int run_blocks(const SparseAttentionParams& p) { return p.num_q_heads <= 32 ? 2 : 0; }
// The longest run, in blocks, of a query of `blocks` blocks. There are as few runs as this allows.
MLA_HD int longest_run(int blocks, int run_blocks, int most_runs_log2) {
  int least = blocks > 2 * run_blocks ? run_blocks : 1;
  if (run_blocks == 0)
    while (least * least < blocks) ++least;
  const int share = (blocks + (1 << most_runs_log2) - 1) >> most_runs_log2;
  return share > least ? share : least;
}

// ---- neighbours whose heads fill the 64 rows of a CTA ---------------------------------------------------

inline constexpr int kTileRows = 64;  // of heads and neighbours
// True if heads of neighbours fill tiles: all heads of an octet belong to one query.
constexpr bool fills_tiles(int heads) { return heads == 8 || heads == 16 || heads == 32; }
// Queries of a tile that attends to all entries of the past; 1: each goes alone. Tiles count from the call's
// first token. Where all requests may have equally many tokens, most sizes leave no tile with queries of two
// requests.
inline int entry_tile_queries(const SparseAttentionParams& p) {
  const int heads = p.num_q_heads;
  if (!p.has_entry_pages || p.batch_invariant || !fills_tiles(heads)) return 1;
  const int64_t most = kTileRows / heads, requests = p.window.num_requests;
  const bool even = requests > 0 && p.num_tokens % requests == 0;
  const int64_t each = std::max<int64_t>(even ? p.num_tokens / requests : p.num_tokens, 1);
  return static_cast<int>(ceil_div(each, ceil_div(each, most)));
}

inline int64_t num_entry_tiles(const SparseAttentionParams& p) {
  const int queries = entry_tile_queries(p);
  return ceil_div(p.num_tokens, int64_t{queries}) * ceil_div(queries * p.num_q_heads, kTileRows);
}
inline bool shares_tiles(const Plan& plan) {
  return plan.variant.schedule == Schedule::kSplit && plan.ctas > 0;
}
// CTAs that share all tiles (sm90/many_heads/shares.cuh): most parts of a tile; the table of parts.
inline constexpr int kMaxTileParts = 32;
MLA_HD constexpr int64_t floats_of_parts_table(int64_t tiles) { return ceil_div(2 * tiles, int64_t{4}) * 4; }

// ---- queries that share keys (ops/shared_keys.h) --------------------------------------------------------

// Up to 4 CTAs hash the entries of a tile: one for every 8192.
inline constexpr int kListPartEntries = 8192, kMaxListedEntries = 4 * kListPartEntries;

// Two launches: the queries of tiles that have no list (`alone`), then the tiles.
struct Sharing {
  Plan tiles, alone;
  int most_shared = 256;  // the longest list that pays, in 256ths of a tile's valid entries
};
// Returns none if sharing would not pay. The price includes making the lists where `p` has none.
std::optional<Sharing> plan_sharing(Op op, const SparseAttentionParams& p, const Gpu& gpu);
int64_t lists_size(const SparseAttentionParams& p);  // 4-byte words for all tiles

// Returns what a test asks for, or none if it asks for no tiles. Other queries go alone as usual.
std::optional<Sharing> forced_sharing(const WantedKernel& wanted, const SparseAttentionParams& p,
                                      const Gpu& gpu);

// ---- bf16_tiles: 64 rows of Q ---------------------------------------------------------------------------

inline bool is_window_alone(const SparseAttentionParams& p) { return p.is_window && p.num_scopes == 1; }
// True where neighbours in a request attend to mostly the same keys: windows, and entries by their pages.
inline bool neighbours_share_keys(const SparseAttentionParams& p) {
  return is_window_alone(p) || p.has_entry_pages;
}
// Queries of a tile: one, or as many neighbours as fill it.
inline int tile_queries(const SparseAttentionParams& p) {
  return neighbours_share_keys(p) && p.num_q_heads <= 64 ? 64 / p.num_q_heads : 1;
}
inline int64_t num_tiles(const SparseAttentionParams& p) {
  return ceil_div(p.num_tokens, int64_t{tile_queries(p)}) * ceil_div(p.num_q_heads, 64);
}

}  // namespace mla_fp8::gpu
