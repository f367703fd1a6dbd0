#include "cuda/sparse_attention/plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>
#include <type_traits>
#include <utility>

#include "cuda/sparse_attention/plan_sm90.h"

namespace mla_fp8::gpu {
namespace {

using namespace model;

constexpr const char* kKernelNames[] = {"portable", "few_heads", "many_heads", "bf16_tiles"};
constexpr const char* kScheduleNames[] = {"split", "walk", "segments", "parts", "runs"};

int64_t floats_of_split(const SparseAttentionParams& p) {
  return p.num_tokens * p.num_q_heads * kFloatsOfPart;
}

// ---- sm_90 ----------------------------------------------------------------------------------------------

// These limits keep grids far below 2^31 CTAs.
constexpr int64_t kMaxSplitQueries = int64_t{1} << 20, kMaxWalkQueries = int64_t{1} << 27;

// Without segments, heads, keys and layouts alone decide a plan of batch_invariant. A CTA of few_heads has at
// least this many keys, with up to 16 heads and with more: each CTA pays for Q and for its part of the merge.
// many_heads has one CTA a query.
constexpr int64_t kKeysOfInvariantFew = 320, kKeysOfInvariantMany = 576;

Plan plan_in_any_batch(Op op, const SparseAttentionParams& p, int num_sms) {
  const Priced segments = op == Op::kDecode ? cheapest(p, num_sms, Schedule::kSegments, Schedule::kRuns)
                                            : cheapest(p, num_sms, Schedule::kSegments);
  if (segments.us < 1e30) return segments.plan;
  const bool few = p.num_q_heads <= 16;
  const Kernel kernel = few || is_bf16(p) ? Kernel::kFewHeads : Kernel::kManyHeads;
  const int most = kernel == Kernel::kFewHeads ? 16 : 1;
  int splits = 1;
  while (splits < most && num_keys(p) >= 2 * splits * (few ? kKeysOfInvariantFew : kKeysOfInvariantMany))
    splits *= 2;
  return {variant(kernel, Schedule::kSplit, p.num_q_heads, p.layouts()), splits};
}

const Variant* walk_variant(const SparseAttentionParams& p) {
  const Kernel kernel = !is_bf16(p) && p.num_q_heads > 16 ? Kernel::kManyHeads : Kernel::kFewHeads;
  return find_variant(kernel, Schedule::kWalk, p.num_q_heads, p.layouts());
}

// Returns whether queries walk. A walk keeps several queries on an SM, and would leave it half empty with too
// few; several SMs then share a query. With 17 to 32 heads sharing pays longer. Walks of more heads pay from
// six items an SM on: they hide all but the first and the last end of an item. bf16 rows with more than 8
// heads take bf16_tiles.
bool walks(const SparseAttentionParams& p, int num_sms) {
  const bool fp8 = !is_bf16(p);
  const int octets = ceil_div(p.num_q_heads, kOctet);  // enough of them for an SM:
  const int64_t enough = !fp8 ? 7 : octets > 4 ? 48 : octets > 2 ? 8 : octets == 2 ? 2 : 3;
  const int most = !fp8 ? 1 : p.layouts().is_mixed() || p.has_entry_pages ? 4 : 16;
  return octets <= most && p.num_tokens * octets > enough * num_sms && walk_variant(p);
}
// bf16_tiles over FP8 rows needs two CTAs of a query, which convert rows for each other, and no entry pages.
bool runs(const Variant& v, const SparseAttentionParams& p) {
  return v.kernel != Kernel::kBf16Tiles || is_bf16(p) || (p.num_q_heads > 64 && !p.has_entry_pages);
}
// Returns whether bf16_tiles takes the call. Its CTAs over FP8 rows do not skip invalid keys: in decode of
// wide rows full queries gain less than short contexts lose. With fewer tiles of bf16 rows than half the SMs,
// other kernels share a query among SMs. Tiles of neighbours with all their entries gain sooner. Up to 16
// heads leave most rows of a tile empty: they pay with two queries an SM, until 8 heads walk. Decode of 17 to
// 32 heads gains nothing.
constexpr int64_t kTilesOfFewRows = 2, kMostKeysOfPairs = 896;
bool takes_bf16_tiles(bool prefills, const SparseAttentionParams& p, int num_sms) {
  const int heads = p.num_q_heads;
  const Variant* const v = find_variant(Kernel::kBf16Tiles, Schedule::kWalk, 64, p.layouts());
  if (!v || !runs(*v, p)) return false;
  if (!is_bf16(p))
    return num_tiles(p) > num_sms && (prefills || p.layouts().is_mixed() || num_keys(p) <= kMostKeysOfPairs);
  const bool few_rows = p.num_tokens >= kTilesOfFewRows * num_sms && (heads > 8 || !walks(p, num_sms));
  const int enough = !p.has_entry_pages || heads > 16 ? 2 : heads > 8 ? 4 : 6;
  return (prefills || heads > 32 || heads <= 16) && (neighbours_share_keys(p) || heads > 16 || few_rows) &&
         enough * num_tiles(p) >= num_sms;
}

// Prefill with batch_invariant takes decode's plan, so a query has the same bits in a prompt and in a step.
Plan plan_sm90(Op op, const SparseAttentionParams& p, int num_sms) {
  const bool prefills = op == Op::kPrefill && !p.batch_invariant;
  if (p.num_tokens >= (prefills ? kMaxWalkQueries : kMaxSplitQueries))
    return plan_portable(p, {.major = 9, .num_sms = num_sms});
  if (p.batch_invariant) return plan_in_any_batch(op, p, num_sms);
  if (takes_bf16_tiles(prefills, p, num_sms))
    return {variant(Kernel::kBf16Tiles, Schedule::kWalk, 64, p.layouts()), 1, num_sms};
  if (prefills && p.has_entry_pages)
    if (const auto tiles = plan_entry_tiles(p, num_sms)) return *tiles;
  if (walks(p, num_sms)) return {*walk_variant(p), 1, num_sms};
  if (p.num_tokens < kMaxSplitQueries) return plan_split(p, num_sms).plan;
  return {variant(Kernel::kManyHeads, Schedule::kSplit, 64, p.layouts())};
}

// True on a GPU with kernels of its own, as far as these are built. Other GPUs, and problems that these do
// not read, take the portable kernel.
bool has_own_kernels(const SparseAttentionParams& p, const Gpu& gpu) {
#if MLA_FP8_WITH_SM90A
  const auto reads = [&](const Variant& v) { return v.kernel != Kernel::kPortable && v.reads(p.layouts()); };
  return gpu.major == 9 && std::any_of(std::begin(kVariants), std::end(kVariants), reads) &&
         num_keys(p) < kMaxKeys;
#else
  return false;
#endif
}

// ---- queries that share keys ----------------------------------------------------------------------------

// Returns the variant of many_heads over lists with room for a tile's heads, or null.
const Variant* variant_of_lists(const SparseAttentionParams& p, const Gpu& gpu) {
  const int heads = p.num_q_heads;
  if (p.query_groups < 2 || p.num_tokens < 2 || p.num_tokens >= kMaxSplitQueries || p.is_window ||
      p.batch_invariant || !fills_tiles(heads) || !has_own_kernels(p, gpu))
    return nullptr;
  const SharedKeysShape shape(p);
  const int64_t rows = shape.queries.tile * heads;
  if (shape.queries.tile < 2 || shape.entries == 0 || shape.entries > kMaxListedEntries ||
      shape.num_tiles >= kMaxSplitQueries)
    return nullptr;
  return find_variant(Kernel::kManyHeads, Schedule::kSplit, rows, p.layouts(), &Variant::lists);
}
// Replaces a plan for some of the queries by one launch for all.
Plan plan_alone(const Plan& plan, const SparseAttentionParams& p, const Gpu& gpu) {
  return plan.queries > 0 ? cheapest(p, gpu.num_sms, Schedule::kSplit).plan : plan;
}

std::optional<Sharing> make_sharing(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  const Variant* const v = variant_of_lists(p, gpu);
  if (!v) return {};
  // Tiles of requests may be short: the host knows the mean of their queries, at most.
  const SharedKeysShape shape(p);
  const double of_tile = std::min<double>(
      shape.queries.tile, static_cast<double>(p.num_tokens) / static_cast<double>(shape.num_tiles));
  if (of_tile < kFullEnough * static_cast<double>(shape.queries.tile)) return {};
  SparseAttentionParams without_room = p;
  without_room.workspace_floats = 0;  // the lists take it
  const Plan own = plan_alone(plan_sm90(op, without_room, gpu.num_sms), p, gpu);
  const double alone_us = us_of(p, own, Reads::kAlone, gpu.num_sms);
  Sharing best{.tiles = {*v}, .alone = own};
  const auto us_of_tiles = [&](double new_keys) {  // `new_keys`: keys of a tile, in those of one query
    SparseAttentionParams tiles = p;
    tiles.num_tokens = shape.num_tiles, tiles.num_q_heads = v->heads;
    for (KvScope& scope : tiles.scopes)
      scope.topk = static_cast<int64_t>(static_cast<double>(scope.topk) * new_keys);
    return us_of(tiles, best.tiles, Reads::kLists, gpu.num_sms);
  };
  const double lists_us = p.shared_keys ? 0.0 : us_of_lists(p, gpu.num_sms);
  if (us_of_tiles(1 + kLikelyNew * (of_tile - 1)) + kEmptyLaunchUs + lists_us >= alone_us) return {};
  for (best.most_shared = 256; best.most_shared > 16; best.most_shared -= 8)
    if (us_of_tiles(best.most_shared / 256.0 * of_tile) <= kMostOfAlone * alone_us) break;
  return best;
}

Plan make_plan(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return has_own_kernels(p, gpu) ? plan_sm90(op, p, gpu.num_sms) : plan_portable(p, gpu);
}

int64_t find_workspace(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  if (make_sharing(op, p, gpu)) return p.shared_keys ? 0 : lists_size(p);
  SparseAttentionParams with_room = p;
  if (!p.workspace) with_room.workspace_floats = INT64_MAX;
  const Plan first = make_plan(op, with_room, gpu);
  if (first.variant.kernel == Kernel::kPortable && has_own_kernels(p, gpu)) return 0;  // too many queries
  const int64_t size = workspace_size(first, p);
  if (first.queries == 0) return size;
  with_room.num_tokens -= first.queries;
  with_room.workspace = p.workspace;
  return std::max(size, find_workspace(op, with_room, gpu));
}

// ---- what the caller asks for again ---------------------------------------------------------------------

// Returns kMake(op, p, gpu), or its earlier result for the same shape if this thread still keeps it. Making a
// plan takes tens of microseconds, more than the rest of a call on the host. The shape is all that plans see.
template <auto kMake>
auto remembered(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  const auto numbers = [](auto... x) { return std::array{static_cast<int64_t>(x)...}; };
  const auto shape =
      numbers(op, gpu.major, gpu.num_sms, p.layout, p.extra_layout, p.num_tokens, p.num_q_heads, p.num_scopes,
              p.scopes[0].topk, p.num_scopes > 1 ? p.scopes[1].topk : 0, p.window.num_requests,
              p.query_groups, p.workspace_floats, p.is_window, p.has_entry_pages, p.batch_invariant,
              p.workspace != nullptr, p.shared_keys != nullptr);
  using Kept = std::pair<std::remove_const_t<decltype(shape)>, decltype(kMake(op, p, gpu))>;
  constexpr size_t kPlaces = 31;
  thread_local std::array<std::optional<Kept>, kPlaces> kept;
  // The place follows from what differs between a model's calls.
  const int64_t mixed = p.num_tokens * 31 + num_keys(p) * 7 + p.num_q_heads * 3 + static_cast<int>(p.layout);
  std::optional<Kept>& place = kept[static_cast<size_t>(mixed) % kPlaces];
  if (!place || place->first != shape) place.emplace(shape, kMake(op, p, gpu));
  return place->second;
}

}  // namespace

const char* name(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }
const char* name(Schedule schedule) { return kScheduleNames[static_cast<int>(schedule)]; }

std::string to_string(const Plan& plan) {
  const Variant& v = plan.variant;
  std::ostringstream out;
  out << name(v.kernel) << ' ' << name(v.schedule) << ", " << v.heads << " heads";
  if (v.schedule != Schedule::kWalk) {
    if (plan.ctas > 0) out << ", " << plan.ctas << " CTAs for all";
    else out << ", " << plan.splits << (plan.splits > 1 ? " CTAs" : " CTA") << " a query";
  }
  if (deals_runs(v.schedule)) out << ", " << kSegmentsOfQuery << " segments";
  if (v.kernel == Kernel::kFewHeads) out << ", " << v.producers << " producers";
  if (plan.tile_queries > 1) out << ", " << plan.tile_queries << " queries a tile";
  if (plan.queries > 0) out << ", for " << plan.queries << " queries";
  return out.str();
}

std::logic_error no_such_kernel(const Plan& plan) {
  return std::logic_error("mla_fp8: no such kernel: " + to_string(plan));
}

int64_t workspace_size(const Plan& plan, const SparseAttentionParams& p) {
  if (shares_tiles(plan)) {
    return int64_t{plan.ctas} * plan.variant.heads * kFloatsOfQueryPart +
           floats_of_parts_table(num_entry_tiles(p));
  }
  if (leaves_parts(plan.variant.schedule)) return floats_of_parts(p, plan);
  return plan.variant.kernel == Kernel::kPortable && plan.splits > 1 ? plan.splits * floats_of_split(p) : 0;
}
int64_t lists_size(const SparseAttentionParams& p) {
  const SharedKeysShape shape(p);
  return shape.num_tiles * shape.words;
}
Plan within_workspace(Plan plan, const SparseAttentionParams& p) {
  if (workspace_size(plan, p) > p.workspace_floats)
    plan.splits = static_cast<int>(std::max<int64_t>(p.workspace_floats / floats_of_split(p), 1));
  return plan;
}

Plan forced_plan(const WantedKernel& wanted, const SparseAttentionParams& p, const Gpu& gpu) {
  if (wanted.kernel == name(Kernel::kPortable)) {
    if (wanted.splits == 0) return plan_portable(p, gpu);  // its own choice
    return {variant(Kernel::kPortable, Schedule::kSplit, wanted.heads, p.layouts()),
            static_cast<int>(std::clamp<int64_t>(wanted.splits, 1, kMaxPortableSplits))};
  }
  for (const Variant& v : kVariants) {
    const bool named = wanted.kernel == name(v.kernel) && wanted.schedule == name(v.schedule) &&
                       wanted.heads == v.heads && (wanted.producers == 0 || wanted.producers == v.producers);
    if (!named || !v.reads(p.layouts()) || !runs(v, p) || !has_own_kernels(p, gpu)) continue;
    const bool tiles = v.tiles.has(p.layouts()) && p.has_entry_pages && !p.batch_invariant &&
                       (entry_tile_queries(p) == 1 || entry_tile_queries(p) * p.num_q_heads <= v.heads);
    if (!tiles && !v.rows.has(p.layouts()) && !variant_of_lists(p, gpu)) continue;
    if (wanted.splits == 0 && tiles && num_entry_tiles(p) <= gpu.num_sms)
      return share_tiles(v, p, gpu.num_sms);
    if (!can_share(v, wanted.splits) || (deals_runs(v.schedule) && p.max_logits)) continue;
    return {.variant = v,
            .splits = wanted.splits,
            .ctas = v.schedule == Schedule::kWalk ? gpu.num_sms : 0,
            .tile_queries = tiles ? entry_tile_queries(p) : 1,
            .most_runs = v.schedule == Schedule::kRuns ? most_runs(p) : 1};
  }
  std::ostringstream what;
  what << "mla_fp8: kernel must be one of kVariants that reads " << kv_layout(p.layout).name
       << (p.layouts().is_mixed() ? " + " : "")
       << (p.layouts().is_mixed() ? kv_layout(p.extra_layout).name : "") << " with " << p.num_q_heads
       << " heads on this GPU, got " << wanted.kernel << ' ' << wanted.schedule << ", " << wanted.heads
       << " heads, " << wanted.splits << " splits, " << wanted.producers << " producers";
  throw std::runtime_error(what.str());
}

std::optional<Sharing> forced_sharing(const WantedKernel& wanted, const SparseAttentionParams& p,
                                      const Gpu& gpu) {
  const Variant* const v = variant_of_lists(p, gpu);
  if (!v || wanted.kernel != name(v->kernel) || wanted.heads < v->heads) return {};
  return Sharing{.tiles = forced_plan(wanted, p, gpu),
                 .alone = plan_alone(plan_sm90(Op::kPrefill, p, gpu.num_sms), p, gpu)};
}

Plan plan(Op op, const SparseAttentionParams& p, const Gpu& gpu) { return remembered<make_plan>(op, p, gpu); }
std::optional<Sharing> plan_sharing(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return remembered<make_sharing>(op, p, gpu);
}
int64_t workspace_of_call(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return remembered<find_workspace>(op, p, gpu);
}

}  // namespace mla_fp8::gpu
