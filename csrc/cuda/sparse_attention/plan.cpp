#include "cuda/sparse_attention/plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace mla_fp8::gpu {
namespace {

constexpr const char* kKernelNames[] = {"portable", "few_heads", "many_heads", "bf16_tiles"};
constexpr const char* kScheduleNames[] = {"split", "walk"};

constexpr int kOctet = 8;  // heads: the least that a CTA takes

bool is_bf16(const SparseAttentionParams& p) { return kv_layout(p.layout).nope_format == Format::kBf16; }
int64_t num_keys(const SparseAttentionParams& p) {
  return p.scopes[0].topk + (p.num_scopes > 1 ? p.scopes[1].topk : 0);
}

double bytes_of_keys(const SparseAttentionParams& p) {  // of a query
  const auto of_scope = [&](int i, KvLayoutId layout) {
    return i < p.num_scopes ? static_cast<double>(p.scopes[i].topk) * kv_layout(layout).bytes_per_token()
                            : 0.0;
  };
  return of_scope(0, p.layout) + of_scope(1, p.extra_layout);
}

// The first variant like this that reads the layouts. `producers` 0: any number.
const Variant* find_variant(Kernel kernel, Schedule schedule, int heads, int producers, KvPair layouts) {
  const auto is_it = [&](const Variant& v) {
    return v.kernel == kernel && v.schedule == schedule && v.heads == heads &&
           (producers == 0 || v.producers == producers) && v.reads(layouts);
  };
  const auto found = std::find_if(std::begin(kVariants), std::end(kVariants), is_it);
  return found == std::end(kVariants) ? nullptr : found;
}
const Variant& variant(Kernel kernel, Schedule schedule, int heads, KvPair layouts, int producers = 0) {
  const Variant* const found = find_variant(kernel, schedule, heads, producers, layouts);
  if (!found) throw std::logic_error("mla_fp8: a plan names a variant that is not in kVariants");
  return *found;
}

// ---- every GPU ------------------------------------------------------------------------------------------

// CTAs of 64 heads are alone on an SM, of fewer there are two at once where it has the shared memory. 64
// heads are for queries enough to fill the SMs so (one H200, dsv32, 64 heads: 1 query 13.6 -> 17.5 us, 16
// queries 52.0 -> 48.8). A CTA of a query has at least two blocks of keys, or the merge would cost more than
// it saves. With batch_invariant the number of heads changes nothing.
constexpr int64_t kMinKeysOfSplit = 64, kKeysOfInvariantSplit = 512;

const Variant& portable_variant(int heads, KvPair layouts) {
  if (heads > 32)
    if (const Variant* const v = find_variant(Kernel::kPortable, Schedule::kSplit, 64, 0, layouts)) return *v;
  return variant(Kernel::kPortable, Schedule::kSplit, heads > 16 ? 32 : 16, layouts);
}
int64_t floats_of_split(const SparseAttentionParams& p) {
  return p.num_tokens * p.num_q_heads * kFloatsOfPart;
}

Plan plan_portable(const SparseAttentionParams& p, const Gpu& gpu) {
  const int64_t keys = std::max<int64_t>(num_keys(p), 1), most_splits = ceil_div(keys, kMinKeysOfSplit);
  const bool few = p.num_tokens * ceil_div(p.num_q_heads, 64) * most_splits < gpu.num_sms;
  const int heads = p.batch_invariant ? 32 : few ? std::min(p.num_q_heads, 32) : p.num_q_heads;
  const Variant& v = portable_variant(heads, p.layouts());
  int64_t splits;
  if (p.batch_invariant) {
    splits = std::min(ceil_div(keys, kKeysOfInvariantSplit), kMaxInvariantSplits);
  } else {
    const int64_t ctas = p.num_tokens * ceil_div(p.num_q_heads, v.heads);
    const int64_t at_once = int64_t{gpu.num_sms} * (v.heads == 64 ? 1 : gpu.ctas_per_sm);
    splits = std::min({at_once / ctas, most_splits, kMaxPortableSplits});
  }
  return {v, static_cast<int>(std::max<int64_t>(splits, 1))};
}

// ---- sm_90: which kernel, and how many SMs share a query ------------------------------------------------
//
// All prices and thresholds are those of one H200 (132 SMs).

// Positions and grids stay far from 2^31.
constexpr int64_t kMaxKeys = int64_t{1} << 26;
constexpr int64_t kMaxSplitQueries = int64_t{1} << 20, kMaxWalkQueries = int64_t{1} << 27;

struct SplitClass {
  int splits;
  double clusters_per_sm;  // that are resident at once: 132, 66, 30, 15, 7 on 132 SMs
};
constexpr SplitClass kSplitClasses[] = {
    {1, 1.0}, {2, 0.5}, {4, 30 / 132.0}, {8, 15 / 132.0}, {16, 7 / 132.0}};
int64_t resident(const SplitClass& s, int num_sms) {  // clusters
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
// FP8 rows: fitted to forced plans at 1 to 256 queries of 640 and 2048 keys, within 8 % (b6179ba6). The
// others to the order of the choices in the runs of commits 70ebf54 and b110e36; their values are rough.
constexpr HeadsClass kHeadsClasses[] = {
    {Kernel::kFewHeads, 8, {14.4, 6.9, 0.5}, {11.5, 6.4, 1.2}, {27.5, 6.4, 1.2}},
    {Kernel::kFewHeads, 16, {16.6, 8.6, 0.4}, {17.5, 5.0, 3.0}, {35.0, 5.0, 3.0}},
    {Kernel::kFewHeads, 32, {}, {27.0, 7.0, 4.0}, {}},
    {Kernel::kManyHeads, 32, {22.8, 8.4, 1.4}, {}, {36.0, 7.8, 2.5}},
    {Kernel::kManyHeads, 64, {30.0, 10.3, 3.5}, {}, {53.0, 8.0, 5.5}}};
const Price& price_of(const HeadsClass& c, const SparseAttentionParams& p) {
  return p.layouts().is_mixed() ? c.pair : is_bf16(p) ? c.bf16 : c.fp8;
}
constexpr double kHbmBytesPerUs = 3.9e6, kL2BytesPerUs = 8e6;
constexpr int kMinKeysPerCta = 128;
// Two launches for the queries of one: what the second adds (3 to 16 us more than the two take alone, least
// with many queries), and what they may take together, of one.
constexpr double kNextLaunchUs = 10.0, kMostOfOneLaunch = 0.95;
// What tiles of neighbours may take of their queries' time alone, where both are prices.
constexpr double kMostOfQueriesAlone = 0.95;

// 8 heads, FP8 rows: cheap keys and many of them. 4 warps that gather would be the limit (commit 70ebf54). Of
// two layouts they always are.
constexpr int64_t kKeysForMoreProducers = 512;

Plan few_or_many(const SparseAttentionParams& p, Kernel kernel, int heads, int splits) {
  int producers = 0;
  if (p.layouts().is_mixed()) producers = heads < 64 ? 8 : 4;
  else if (kernel == Kernel::kFewHeads && heads == 8)
    producers = num_keys(p) / splits >= kKeysForMoreProducers ? 8 : 4;
  return {variant(kernel, Schedule::kSplit, heads, p.layouts(), producers), splits};
}

// The model's time of `queries` of a problem, with a cluster for each and block of heads.
double time_of(const SparseAttentionParams& p, const HeadsClass& c, const SplitClass& s, int64_t queries,
               int num_sms) {
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
Priced cheapest_split(const SparseAttentionParams& p, int64_t queries, int num_sms) {
  Priced best;
  for_each_split(p, [&](const HeadsClass& c, const SplitClass& s) {
    const double us = time_of(p, c, s, queries, num_sms);
    if (us < best.us) best = {few_or_many(p, c.kernel, c.heads, s.splits), us};
  });
  return best;
}

// In any batch the same: by heads and keys alone. A CTA of few heads has at least as many keys as the first
// says, of more heads as the second: what is right for one query is wrong for many, and with many heads more
// so, as each CTA pays for Q and for its part of the merge.
constexpr int64_t kKeysOfInvariantFew = 320, kKeysOfInvariantMany = 576;

Plan plan_in_any_batch(const SparseAttentionParams& p) {
  const int heads = p.num_q_heads;
  const bool few = heads <= 16;
  int64_t splits = 1;
  while (num_keys(p) >= 2 * splits * (few ? kKeysOfInvariantFew : kKeysOfInvariantMany) && splits < 16)
    splits *= 2;
  return few_or_many(p, few || is_bf16(p) ? Kernel::kFewHeads : Kernel::kManyHeads,
                     heads <= 8                  ? 8
                     : few                       ? 16
                     : heads <= 32 || is_bf16(p) ? 32
                                                 : 64,
                     static_cast<int>(splits));
}

// A cluster for each query: which variant and how many CTAs is the least time by the model above. Where the
// last wave would be mostly empty, its queries go to a plan of their own, which shares each among more CTAs
// (67 queries of 128 heads, 2048 keys: 66 of them fill the SMs).
Plan plan_split(const SparseAttentionParams& p, int num_sms) {
  if (p.batch_invariant) return plan_in_any_batch(p);
  const Priced all = cheapest_split(p, p.num_tokens, num_sms);
  if (p.is_window) return all.plan;
  Priced best = {all.plan, all.us * kMostOfOneLaunch};
  for_each_split(p, [&](const HeadsClass& c, const SplitClass& s) {
    const int64_t per_wave = resident(s, num_sms), head_blocks = ceil_div(p.num_q_heads, c.heads);
    const int64_t queries = p.num_tokens * head_blocks / per_wave * per_wave / head_blocks;
    if (queries == 0 || queries == p.num_tokens) return;
    const double us = time_of(p, c, s, queries, num_sms) + kNextLaunchUs +
                      cheapest_split(p, p.num_tokens - queries, num_sms).us;
    if (us >= best.us) return;
    best = {few_or_many(p, c.kernel, c.heads, s.splits), us};
    best.plan.queries = queries;
  });
  return best.plan;
}

// Neighbours that attend to all entries, over FP8 pages: the time of a tile of them is that of a query with
// 64 heads. None if queries go alone.
Priced cheapest_tiles(const SparseAttentionParams& p, int num_sms) {
  Priced best;
  const int tile_queries = entry_tile_queries(p);
  if (tile_queries == 1 || num_keys(p) + tile_queries >= kMaxKeys) return best;
  SparseAttentionParams tiles = p;
  tiles.num_tokens = ceil_div(p.num_tokens, int64_t{tile_queries});
  tiles.num_q_heads = 64;
  tiles.scopes[0].topk += tile_queries - 1;  // the union of the windows
  // A tile that requests end in has the keys of each.
  const int64_t requests = std::max<int64_t>(p.window.num_requests, 1);
  if (p.num_tokens % (requests * tile_queries) != 0)
    for (KvScope& scope : tiles.scopes) scope.topk += scope.topk * (requests - 1) / tiles.num_tokens;
  for (const HeadsClass& c : kHeadsClasses) {
    const Variant* const v = find_variant(c.kernel, Schedule::kSplit, c.heads, 0, p.layouts());
    if (!v || !attends_to_tiles(*v, p.layouts())) continue;
    const auto time = [&](const SplitClass& s, int64_t count) {
      return time_of(tiles, c, s, count, num_sms);
    };
    const auto propose = [&](const SplitClass& s, double us, int64_t last_tiles, int last_splits) {
      if (us >= best.us) return;
      best = {{*v, s.splits}, us};
      best.plan.tile_queries = tile_queries;
      best.plan.last_tiles = last_tiles, best.plan.last_splits = last_splits;
    };
    for (const SplitClass& s : kSplitClasses) {
      propose(s, time(s, tiles.num_tokens), 0, 1);
      const int64_t last = tiles.num_tokens % resident(s, num_sms);
      if (last == 0 || last == tiles.num_tokens) continue;
      for (const SplitClass& more : kSplitClasses)
        propose(s, time(s, tiles.num_tokens - last) + kNextLaunchUs + time(more, last), last, more.splits);
    }
  }
  return best;
}

// bf16 rows, keys that neighbours share or more than 16 heads; dsv4 and more than 64 heads, which two CTAs
// convert for each other (128 + 1024 keys, 256 queries: 191.5 -> 177.5 us). With fewer tiles than half the
// SMs the other kernels' way of sharing a query among SMs is faster (64 heads, 66 queries of 2048 keys: 70
// against 67 us).
// Tiles of neighbours with all their entries gain sooner (8192 entries: 8 heads, 128 and 256 queries, 213
// against 246 and 369 against 236 us; 16 heads, 128 and 256, 238 against 237 and 405 against 224; 64 heads,
// 64 queries, 269 against 223).
bool bf16_tiles_fit(const SparseAttentionParams& p, int num_sms) {
  const bool pair =
      p.layout == KvLayoutId::kDsv4 && !p.layouts().is_mixed() && p.num_q_heads > 64 && !p.has_entry_pages;
  const bool bf16 = is_bf16(p) && (neighbours_share_keys(p) || p.num_q_heads > 16);
  const int enough = !p.has_entry_pages || p.num_q_heads > 16 ? 2 : p.num_q_heads > 8 ? 4 : 6;
  return (pair || bf16) && enough * num_tiles(p) >= num_sms;
}
Plan plan_tiles(const SparseAttentionParams& p, int num_sms) {
  return {variant(Kernel::kBf16Tiles, Schedule::kWalk, 64, p.layouts()), 1, num_sms};
}

Plan plan_decode(const SparseAttentionParams& p, int num_sms) {
  if (p.num_tokens >= kMaxSplitQueries) return plan_portable(p, {.major = 9, .num_sms = num_sms});
  // With 24 and 32 heads tiles gained 0 to 5 % from 100 queries on and lost 16 to 30 % at 66; with 64 nothing
  // need be split, and they are up to 1.8 times as fast (132 queries of 2048 keys: 136 -> 86 us; 0bff452).
  if (p.num_q_heads > 32 && !p.batch_invariant && bf16_tiles_fit(p, num_sms)) return plan_tiles(p, num_sms);
  return plan_split(p, num_sms);
}

Plan plan_prefill(const SparseAttentionParams& p, int num_sms) {
  if (p.num_tokens >= kMaxWalkQueries) return plan_portable(p, {.major = 9, .num_sms = num_sms});
  if (bf16_tiles_fit(p, num_sms)) return plan_tiles(p, num_sms);
  if (const Priced tiles = cheapest_tiles(p, num_sms);
      tiles.plan.tile_queries > 1 &&
      tiles.us < kMostOfQueriesAlone * cheapest_split(p, p.num_tokens, num_sms).us)
    return tiles.plan;
  const bool fp8 = !is_bf16(p), many_heads = fp8 && p.num_q_heads > 32;
  // few_heads has 4 queries of 8 heads on an SM at once. With far fewer, or few more, it would be half
  // empty, where several SMs can share a query instead (256 queries of 16 heads, V3.2: 95 -> 82 us by
  // walking; ed110fa). With many heads sharing is the faster one anyway, up to the queries that it takes.
  const int64_t enough = fp8 && p.num_q_heads <= 16 ? 3 : 8;  // queries of 8 heads for an SM
  if (p.num_tokens * ceil_div(p.num_q_heads, kOctet) < enough * num_sms ||
      (many_heads && p.num_tokens < kMaxSplitQueries))
    return plan_decode(p, num_sms);
  if (many_heads) return {variant(Kernel::kManyHeads, Schedule::kSplit, 64, p.layouts())};
  const Kernel kernel = fp8 && p.num_q_heads > 16 ? Kernel::kManyHeads : Kernel::kFewHeads;
  const int heads = kernel == Kernel::kManyHeads ? 32 : p.num_q_heads <= 8 ? 8 : 16;
  return {variant(kernel, Schedule::kWalk, heads, p.layouts()), 1, num_sms};
}

bool sm90_reads(const SparseAttentionParams& p) {
  const auto reads = [&](const Variant& v) { return v.kernel != Kernel::kPortable && v.reads(p.layouts()); };
  return std::any_of(std::begin(kVariants), std::end(kVariants), reads) && num_keys(p) < kMaxKeys;
}
Plan plan_sm90(Op op, const SparseAttentionParams& p, int num_sms) {
  return op == Op::kDecode ? plan_decode(p, num_sms) : plan_prefill(p, num_sms);
}

// ---- architectures --------------------------------------------------------------------------------------

// GPUs with kernels of their own, as far as these are built; all others, and what they do not read, take the
// portable kernel.
struct Architecture {
  int major;
  bool (*reads)(const SparseAttentionParams&);
  Plan (*plan)(Op, const SparseAttentionParams&, int num_sms);
};
constexpr Architecture kArchitectures[] = {
#if MLA_FP8_WITH_SM90A
    {9, sm90_reads, plan_sm90},
#endif
    {0, nullptr, nullptr},
};
const Architecture* own_kernels(const SparseAttentionParams& p, const Gpu& gpu) {
  for (const Architecture& a : kArchitectures)
    if (a.major != 0 && a.major == gpu.major && a.reads(p)) return &a;
  return nullptr;
}

// Two CTAs of 64 heads each convert rows of dsv4 for each other, by index or of windows.
bool runs(const Variant& v, const SparseAttentionParams& p) {
  return v.kernel != Kernel::kBf16Tiles || is_bf16(p) || (p.num_q_heads > 64 && !p.has_entry_pages);
}

}  // namespace

const char* name(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }
const char* name(Schedule schedule) { return kScheduleNames[static_cast<int>(schedule)]; }

std::string to_string(const Plan& plan) {
  const Variant& v = plan.variant;
  std::ostringstream out;
  out << name(v.kernel);
  out << ' ' << name(v.schedule) << ", " << v.heads << " heads";
  if (v.schedule == Schedule::kSplit)
    out << ", " << plan.splits << (plan.splits > 1 ? " CTAs" : " CTA") << " a query";
  if (v.kernel == Kernel::kFewHeads) out << ", " << v.producers << " producers";
  if (plan.tile_queries > 1) out << ", " << plan.tile_queries << " queries a tile";
  if (plan.last_tiles > 0) out << ", " << plan.last_splits << " CTAs for the last " << plan.last_tiles;
  if (plan.queries > 0) out << ", for " << plan.queries << " queries";
  return out.str();
}

int64_t workspace_size(const Plan& plan, const SparseAttentionParams& p) {
  return plan.variant.kernel == Kernel::kPortable && plan.splits > 1 ? plan.splits * floats_of_split(p) : 0;
}
int64_t workspace_size(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return own_kernels(p, gpu) ? 0 : workspace_size(plan(op, p, gpu), p);
}
Plan within_workspace(Plan plan, const SparseAttentionParams& p) {
  if (workspace_size(plan, p) > p.workspace_floats)
    plan.splits = static_cast<int>(std::max<int64_t>(p.workspace_floats / floats_of_split(p), 1));
  return plan;
}

Plan forced_plan(const WantedKernel& wanted, const SparseAttentionParams& p, const Gpu& gpu) {
  if (wanted.kernel == name(Kernel::kPortable)) {
    if (wanted.splits == 0) return plan_portable(p, gpu);  // its own
    return {portable_variant(wanted.heads, p.layouts()),
            static_cast<int>(std::clamp<int64_t>(wanted.splits, 1, kMaxPortableSplits))};
  }
  for (const Variant& v : kVariants) {
    const bool named = wanted.kernel == name(v.kernel) && wanted.schedule == name(v.schedule) &&
                       wanted.heads == v.heads && (wanted.producers == 0 || wanted.producers == v.producers);
    const bool split = v.schedule == Schedule::kSplit;
    const bool has_splits =
        split ? wanted.splits >= 1 && wanted.splits <= 16 && !(wanted.splits & (wanted.splits - 1))
              : wanted.splits == 1;
    if (named && has_splits && v.reads(p.layouts()) && runs(v, p) && own_kernels(p, gpu)) {
      Plan plan{v, wanted.splits, split ? 0 : gpu.num_sms};
      if (split && attends_to_tiles(v, p.layouts())) plan.tile_queries = entry_tile_queries(p);
      return plan;
    }
  }
  std::ostringstream what;
  what << "mla_fp8: kernel must be one of kVariants that reads " << kv_layout(p.layout).name
       << (p.layouts().is_mixed() ? " + " : "")
       << (p.layouts().is_mixed() ? kv_layout(p.extra_layout).name : "") << " with " << p.num_q_heads
       << " heads on this GPU, got " << wanted.kernel << ' ' << wanted.schedule << ", " << wanted.heads
       << " heads, " << wanted.splits << " splits, " << wanted.producers << " producers";
  throw std::runtime_error(what.str());
}

Plan plan(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  const Architecture* const own = own_kernels(p, gpu);
  return own ? own->plan(op, p, gpu.num_sms) : plan_portable(p, gpu);
}

}  // namespace mla_fp8::gpu
