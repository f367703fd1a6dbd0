#pragma once
// The model of time on sm_90 (H100 and H200): the work of a launch, times prices (prices.h).
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>

#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu::model {

inline constexpr int kOctet = 8;  // fewest heads of a CTA

// The rows that a CTA reads: a query's in FP8, in bf16, or in two layouts; or FP8 rows for a tile of queries.
// Tiles have a CTA each, share all CTAs, or have lists.
enum class Reads { kFp8, kBf16, kPair, kTiles, kSharedTiles, kLists };

struct Price {
  Kernel kernel;
  Schedule schedule;
  int heads;
  Reads reads;
  struct Of {
    double wave_us, key_ns, byte_ps = 0, cluster_us = 0, run_us = 0, wait_us = 0, leave_us = 0;
  } of;
  // us added between an engine's other kernels, which drive this code out of the instruction caches. Rows
  // with values in bf16 (dsv4) take more code.
  struct {
    double fp8_values = 0, bf16_values = 0;
  } cold_us = {};
};
// The work of a launch. A field counts the longest CTA in each wave, unless it says otherwise.
struct Work {
  double waves = 1, keys = 0;
  double bytes = 0;      // rows of all queries
  double clusters = 0;   // 1 where CTAs share a query in a cluster
  double runs = 0;       // runs of a team; for shared tiles: CTAs of a tile
  double waits = 0;      // results that wait in local memory
  double leaves = 0;     // results left for a second grid, for each SM
  double others_us = 0;  // us without a price of its own
};
inline double us_of(const Price& price, const Work& w) {
  const auto& of = price.of;
  return w.waves * (of.wave_us + of.cluster_us * w.clusters + of.key_ns * 1e-3 * w.keys + of.run_us * w.runs +
                    of.wait_us * w.waits) +
         of.leave_us * w.leaves + of.byte_ps * 1e-6 * w.bytes + w.others_us;
}

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

// Returns the variant with these traits that reads the layouts, or null.
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

inline int teams(const Price& c) { return c.kernel == Kernel::kFewHeads ? 32 / c.heads : 1; }
inline int block_keys(const Price& c) { return c.heads == kOctet ? 32 : 64; }

// ---- segments: the runs of a query follow from its heads and its valid keys (sm90/segments.cuh) --------

inline constexpr int kSegmentsOfQuery = 8;
// Fewest blocks of a run (plan.h). With more than 32 heads a result that waits costs as much as several
// blocks.
inline int run_blocks(const SparseAttentionParams& p) { return p.num_q_heads <= 32 ? 2 : 0; }
inline int64_t num_blocks(const SparseAttentionParams& p, int block_keys) {
  return ceil_div(num_keys(p), int64_t{block_keys});
}
inline int64_t num_runs(const SparseAttentionParams& p, int64_t blocks, int most) {
  const int longest =
      longest_run(static_cast<int>(blocks), run_blocks(p), std::countr_zero(static_cast<unsigned>(most)));
  return std::max<int64_t>(ceil_div(blocks, int64_t{longest}), 1);
}
// Most runs of a query in kRuns, whichever keys are valid: fewer blocks may be dealt to more runs.
inline int most_runs(const SparseAttentionParams& p) {
  const int64_t blocks = num_blocks(p, 64);
  if (blocks > kMostQueryParts * kMostQueryParts) return kSegmentsOfQuery;
  int64_t most = 1;
  for (int64_t some = 1; some <= blocks; ++some) most = std::max(most, num_runs(p, some, kSegmentsOfQuery));
  return static_cast<int>(most);
}

// ---- time ----------------------------------------------------------------------------------------------

inline constexpr double kUsPerByteAgain = 0.02e-6;  // rows read again from L2 by each further block of heads
inline constexpr int kMinKeysPerCta = 96;
// The last round of a walk takes this share of a full one, with up to half of all places filled and with
// more: a query that has an SM nearly for itself takes longer than its share.
inline constexpr double kHalfRound = 0.62, kLastRound = 0.92;

// Returns the work of all queries by a plan.
inline Work work_of(const SparseAttentionParams& p, const Price& c, const Plan& plan, int num_sms) {
  const int ctas = plan.splits;
  const int64_t keys = num_keys(p), head_blocks = ceil_div(p.num_q_heads, c.heads);
  const auto items = static_cast<double>(p.num_tokens * head_blocks);
  const int block = block_keys(c);
  Work w{.bytes = bytes_of_keys(p)};
  if (c.schedule == Schedule::kWalk) {
    const double rounds = static_cast<double>(p.num_tokens) / (num_sms * teams(c)), full = std::floor(rounds);
    const double last = rounds == full ? 0.0 : rounds - full <= 0.5 ? kHalfRound : kLastRound;
    w.waves = std::max(full + last, 1.0) * teams(c), w.keys = static_cast<double>(keys);
    return w;
  }
  if (c.schedule == Schedule::kParts) {
    const int64_t blocks = std::max<int64_t>(ceil_div(num_blocks(p, block), int64_t{ctas}), 1);
    w.keys = static_cast<double>(blocks * block), w.leaves = items * ctas / num_sms;
    return w;
  }
  if (c.schedule == Schedule::kSplit) {
    const auto longest = std::ceil(static_cast<double>(std::max<int64_t>(keys, 1)) / ctas / block) * block;
    w.keys = std::max<double>(longest, kMinKeysPerCta);
  } else {
    const int64_t blocks = num_blocks(p, block), all = num_runs(p, blocks, kSegmentsOfQuery * teams(c));
    const int64_t runs = ceil_div(all, int64_t{ctas} * teams(c));
    w.runs = static_cast<double>(runs);
    w.keys =
        static_cast<double>(std::min(ceil_div(all, int64_t{ctas}) * ceil_div(blocks, all), blocks) * block);
    if (c.schedule == Schedule::kRuns) {
      w.leaves = items * plan.most_runs / num_sms;
      return w;
    }
    const auto places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(runs)));
    const bool first_in_registers = c.heads < 64;
    w.waits = static_cast<double>(first_in_registers ? std::max<int64_t>(places / 2, 1) - 1 : runs - 1);
  }
  w.waves = static_cast<double>(ceil_div(p.num_tokens * head_blocks, resident(ctas, num_sms)));
  w.clusters = ctas > 1;
  w.others_us = w.bytes * static_cast<double>(head_blocks - 1) * kUsPerByteAgain;
  return w;
}
inline double us_of(const SparseAttentionParams& p, const Price& c, const Plan& plan, int num_sms) {
  return us_of(c, work_of(p, c, plan, num_sms));
}

}  // namespace mla_fp8::gpu::model
