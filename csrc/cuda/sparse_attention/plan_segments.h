#pragma once
// Plans on sm_90 for batch_invariant over FP8 rows of one layout: the segments of a query follow from its
// heads and keys, and who works on them changes no bits (sm90/segments.cuh): neither how many CTAs share a
// query, nor in many_heads how many of its heads a CTA takes. So the batch may say both.
#include <algorithm>
#include <bit>
#include <climits>
#include <iterator>
#include <optional>

#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

// Of a query with so many heads at most.
struct Segments {
  int most_heads;
  Kernel kernel;
  int64_t least_keys;  // of a segment
  int most;            // a power of two
  int run_blocks;      // plan.h
};
// Of more than 32 heads a result that waits costs as much as several blocks.
inline constexpr Segments kSegments[] = {{8, Kernel::kFewHeads, 160, 8, 2},
                                         {16, Kernel::kFewHeads, 128, 8, 2},
                                         {32, Kernel::kManyHeads, 64, 8, 1},
                                         {INT_MAX, Kernel::kManyHeads, 128, 8, 0}};
inline const Segments& segments_of(const SparseAttentionParams& p) {
  return *std::find_if(std::begin(kSegments), std::end(kSegments),
                       [&](const Segments& s) { return p.num_q_heads <= s.most_heads; });
}
inline int num_segments(const SparseAttentionParams& p) {
  const Segments& by = segments_of(p);
  int segments = 1;
  while (segments < by.most && num_keys(p) >= 2 * segments * by.least_keys) segments *= 2;
  return segments;
}
// Of a query whose keys are all valid (sm90/segments.cuh, take_share).
struct Runs {
  int64_t blocks, count;
};
inline Runs runs_of(const SparseAttentionParams& p, int block_keys, int teams) {
  const int64_t blocks = ceil_div(num_keys(p), int64_t{block_keys});
  int64_t least = segments_of(p).run_blocks;
  if (least == 0)
    while (least * least < blocks) ++least;
  const int64_t longest =
      std::max({least, ceil_div(blocks, int64_t{num_segments(p)} * teams), int64_t{1}});
  return {blocks, std::max<int64_t>(ceil_div(blocks, longest), 1)};
}
// CTAs that may take them, fitted to one H200: 808 forced plans of 1 to 256 queries of 640, 1152 and 2048
// keys, times within 4 % in the mean. In each case a plan is chosen that is within 1 % of the fastest.
struct SegmentCtas {
  Kernel kernel;
  int heads;
  int most;  // runs of a team, and CTAs of a query
  int block_keys, teams;
  Price price;
  double us_of_run, us_of_waiting;  // of a team's run, and of a result that waits in local memory
  bool first_waits_in_registers;
};
inline constexpr SegmentCtas kSegmentCtas[] = {
    {Kernel::kFewHeads, 8, 8, 32, 4, {10.0, 6.1, 1.45, 0.094e-6}, 1.1, 1.15, true},
    {Kernel::kFewHeads, 16, 8, 64, 2, {14.1, 8.0, 0.9, 0.074e-6}, 0.8, 2.0, true},
    {Kernel::kManyHeads, 16, 8, 64, 1, {19.4, 6.8, 0.1, 0.001e-6}, 0.8, 1.0, true},
    {Kernel::kManyHeads, 32, 8, 64, 1, {22.1, 7.6, 0.5, 0.033e-6}, 1.2, 1.4, true},
    {Kernel::kManyHeads, 64, 8, 64, 1, {26.3, 11.2, 2.4, 0.070e-6}, 1.1, 6.3, false}};

// Calls fn(variant, its CTAs) for what has the bits of the problem's segments, the fewest heads first.
template <class Fn>
void for_each_segment_variant(const SparseAttentionParams& p, Fn&& fn) {
  const Segments& by = segments_of(p);
  for (const SegmentCtas& c : kSegmentCtas) {
    const bool is_one = by.kernel == Kernel::kFewHeads ? c.heads == by.most_heads : c.heads <= by.most_heads;
    if (c.kernel != by.kernel || !is_one) continue;
    if (const Variant* const v = find_variant(c.kernel, Schedule::kSegments, c.heads, 0, p.layouts()))
      fn(*v, c);
  }
}
// Of a query that a test shares among so many, at least one for each; 0: it cannot be.
inline int forced_segments(const SparseAttentionParams& p, const Variant& v, int splits) {
  const SegmentCtas& ctas =
      *std::find_if(std::begin(kSegmentCtas), std::end(kSegmentCtas),
                    [&](const SegmentCtas& c) { return c.kernel == v.kernel && c.heads == v.heads; });
  if (splits < 1 || splits > ctas.most || !std::has_single_bit(static_cast<unsigned>(splits))) return 0;
  const int segments = std::max(num_segments(p), splits);
  return segments / splits > ctas.most ? 0 : segments;
}
// Null where there are no segments.
inline std::optional<Plan> plan_segments(const SparseAttentionParams& p, int num_sms) {
  const int segments = num_segments(p);
  Priced best;
  for_each_segment_variant(p, [&](const Variant& v, const SegmentCtas& ctas) {
    const HeadsClass price{ctas.kernel, ctas.heads, ctas.price, {}, {}};
    const Runs of_query = runs_of(p, ctas.block_keys, ctas.teams);
    for (const SplitClass& s : kSplitClasses) {
      if (segments % s.splits != 0) continue;
      const int64_t runs = ceil_div(of_query.count, int64_t{s.splits} * ctas.teams);  // of a team
      const int64_t keys = std::min(runs * ceil_div(of_query.blocks, of_query.count) * ctas.teams,
                                    of_query.blocks) *
                           ctas.block_keys;
      const int64_t places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(runs)));
      const int64_t waiting = ctas.first_waits_in_registers ? std::max<int64_t>(places / 2, 1) - 1 : runs - 1;
      const auto waves = static_cast<double>(
          ceil_div(p.num_tokens * ceil_div(p.num_q_heads, v.heads), resident(s, num_sms)));
      const double us =
          time_of(p, price, s, p.num_tokens, num_sms, static_cast<double>(keys)) +
          waves * (static_cast<double>(runs) * ctas.us_of_run + static_cast<double>(waiting) * ctas.us_of_waiting);
      if (us < best.us) best = {{v, s.splits}, us};
    }
  });
  if (best.us == Priced{}.us) return {};
  best.plan.segments = segments, best.plan.run_blocks = segments_of(p).run_blocks;
  return best.plan;
}

}  // namespace mla_fp8::gpu::model
