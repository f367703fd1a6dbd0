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

}  // namespace mla_fp8::gpu::model
