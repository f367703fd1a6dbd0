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
#include "cuda/sparse_attention/plan_parts.h"

namespace mla_fp8::gpu::model {

// Of a query with so many heads at most.
struct Segments {
  int most_heads;
  Kernel kernel;
  int run_blocks;  // plan.h
};
// Of more than 32 heads a result that waits costs as much as several blocks.
inline constexpr Segments kSegments[] = {{8, Kernel::kFewHeads, 2},
                                         {16, Kernel::kFewHeads, 2},
                                         {32, Kernel::kManyHeads, 2},
                                         {INT_MAX, Kernel::kManyHeads, 0}};
// Whatever width lists have: the runs follow from the keys that are valid.
inline constexpr int kSegmentsOfQuery = 8;
inline const Segments& segments_of(const SparseAttentionParams& p) {
  return *std::find_if(std::begin(kSegments), std::end(kSegments),
                       [&](const Segments& s) { return p.num_q_heads <= s.most_heads; });
}
// Of a query whose keys are all valid, as sm90/segments.cuh deals them.
struct Runs {
  int64_t blocks, count;
};
inline Runs runs_of(const SparseAttentionParams& p, int block_keys, unsigned most) {
  const int64_t blocks = ceil_div(num_keys(p), int64_t{block_keys});
  const int longest =
      longest_run(static_cast<int>(blocks), segments_of(p).run_blocks, std::countr_zero(most));
  return {blocks, std::max<int64_t>(ceil_div(blocks, int64_t{longest}), 1)};
}
// CTAs that may take them, fitted to one H200: 808 forced plans of 1 to 256 queries of 640, 1152 and 2048
// keys, times within 4 % in the mean. In each case a plan is chosen that is within 1 % of the fastest.
struct SegmentCtas {
  Kernel kernel;
  int heads;
  int block_keys, teams;
  Price price;
  double us_of_run, us_of_waiting;  // of a team's run, and of a result that waits in local memory
  bool first_waits_in_registers;
};
inline constexpr SegmentCtas kSegmentCtas[] = {
    {Kernel::kFewHeads, 8, 32, 4, {10.0, 6.1, 1.45, 0.094e-6}, 1.1, 1.15, true},
    {Kernel::kFewHeads, 16, 64, 2, {14.1, 8.0, 0.9, 0.074e-6}, 0.8, 2.0, true},
    {Kernel::kManyHeads, 32, 64, 1, {22.1, 7.6, 0.5, 0.033e-6}, 1.2, 1.4, true},
    {Kernel::kManyHeads, 64, 64, 1, {26.3, 11.2, 2.4, 0.070e-6}, 1.1, 6.3, false}};

// Calls fn(variant, its CTAs) for what has the bits of the problem's segments, the fewest heads first.
template <class Fn>
void for_each_segment_variant(const SparseAttentionParams& p, Fn&& fn) {
  const Segments& by = segments_of(p);
  for (const SegmentCtas& c : kSegmentCtas) {
    const bool is_one = by.kernel == Kernel::kFewHeads ? c.heads == by.most_heads : c.heads <= by.most_heads;
    if (c.kernel != by.kernel || !is_one) continue;
    if (const Variant* const v = find_variant(c.kernel, Schedule::kSegments, c.heads, p.layouts())) fn(*v, c);
  }
}
// Whether the CTAs of a query, as many as a test asks for, can have its segments: in a cluster all as many.
inline bool can_share_segments(const Variant& v, int splits) {
  return v.schedule == Schedule::kRuns || (splits > 0 && kSegmentsOfQuery % splits == 0);
}
// The model's time.
inline double time_of_segments(const SparseAttentionParams& p, const SegmentCtas& ctas, const SplitClass& s,
                               int num_sms) {
  const HeadsClass price{ctas.kernel, ctas.heads, ctas.price, {}, {}};
  const Runs all = runs_of(p, ctas.block_keys, static_cast<unsigned>(kSegmentsOfQuery * ctas.teams));
  const int64_t runs = ceil_div(all.count, int64_t{s.splits} * ctas.teams);  // of a team
  const int64_t blocks =
      std::min(ceil_div(all.count, int64_t{s.splits}) * ceil_div(all.blocks, all.count), all.blocks);
  const auto places = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(runs)));
  const int64_t waiting = ctas.first_waits_in_registers ? std::max<int64_t>(places / 2, 1) - 1 : runs - 1;
  const auto waves =
      static_cast<double>(ceil_div(p.num_tokens * ceil_div(p.num_q_heads, ctas.heads), resident(s, num_sms)));
  return time_of(p, price, s, p.num_tokens, num_sms, static_cast<double>(blocks * ctas.block_keys)) +
         waves *
             (static_cast<double>(runs) * ctas.us_of_run + static_cast<double>(waiting) * ctas.us_of_waiting);
}
// Fewer keys may be dealt to more runs.
inline int most_runs(const SparseAttentionParams& p) {
  const int64_t blocks = ceil_div(num_keys(p), int64_t{64});
  int most = 1;
  if (blocks > kMostQueryParts * kMostQueryParts) return kSegmentsOfQuery;
  for (int some = 1; some <= static_cast<int>(blocks); ++some)
    most = std::max(most, ceil_div(some, longest_run(some, segments_of(p).run_blocks,
                                                     std::countr_zero(unsigned{kSegmentsOfQuery}))));
  return most;
}

inline void deal_runs(const SparseAttentionParams& p, Plan& plan) {
  plan.segments = kSegmentsOfQuery, plan.run_blocks = segments_of(p).run_blocks;
  plan.most_runs = most_runs(p);
}

// CTAs of many_heads without clusters, which leave runs to a second grid: as kSegmentCtas, of a run that a
// CTA leaves, and of all together, if each SM leaves one. Fitted to 314 forced plans of 2 to 44 queries on an
// H200, times within 3 to 4 % in the mean.
struct RunCtas {
  int heads;
  double ns_per_key, fixed_us, us_of_run, all_us, us_per_byte;
} inline constexpr kRunCtas[] = {{32, 20.0, 6.5, 1.2, 2.5, 0.1e-6}, {64, 29.9, 7.4, 1.0, 5.2, 0.05e-6}};
inline double time_of_runs(const SparseAttentionParams& p, const RunCtas& c, const Plan& plan, int num_sms) {
  const Runs all = runs_of(p, 64, static_cast<unsigned>(plan.segments));
  const int64_t runs = ceil_div(all.count, int64_t{plan.splits});
  const int64_t items = p.num_tokens * ceil_div(p.num_q_heads, c.heads);
  const int64_t blocks = std::min(runs * ceil_div(all.blocks, all.count), all.blocks);
  return c.fixed_us + c.ns_per_key * 64e-3 * static_cast<double>(blocks) +
         c.us_of_run * static_cast<double>(runs) +
         c.all_us * static_cast<double>(items * plan.most_runs) / num_sms +
         c.us_per_byte * static_cast<double>(p.num_tokens) * bytes_of_keys(p);
}
// Whether the workspace, and any that sparse_attention_workspace tells, has room for them.
inline bool have_room(const SparseAttentionParams& p, const Plan& plan, int num_sms) {
  return floats_of_parts(p, plan) <=
         std::min(p.workspace_floats, sparse_attention_floats(p.num_tokens, p.num_q_heads, num_sms, true));
}

// Null where there are no segments. Rows may be full or have few valid keys: what counts is how much longer
// both take than they could, full ones, which count twice, and a quarter of one.
inline std::optional<Plan> plan_segments(Op op, const SparseAttentionParams& p, int num_sms) {
  const bool may_leave_runs = may_have_parts(op, p, num_sms) && segments_of(p).kernel == Kernel::kManyHeads;
  SparseAttentionParams quarter = p;
  for (KvScope& scope : quarter.scopes) scope.topk = ceil_div(scope.topk, int64_t{4});
  Plan dealt{};
  deal_runs(p, dealt);
  const auto plan_of = [&](const Variant& v, int ctas) {
    Plan plan = dealt;
    plan.variant = v, plan.splits = ctas;
    return plan;
  };
  const auto each = [&](auto&& fn) {
    for_each_segment_variant(p, [&](const Variant& v, const SegmentCtas& ctas) {
      for (const SplitClass& s : kSplitClasses)
        if (kSegmentsOfQuery % s.splits == 0 && (s.splits == 1 || v.kernel == Kernel::kFewHeads))
          fn(plan_of(v, s.splits), time_of_segments(p, ctas, s, num_sms),
             time_of_segments(quarter, ctas, s, num_sms));
    });
    for (const RunCtas& c : kRunCtas) {
      const Variant* const v = find_variant(Kernel::kManyHeads, Schedule::kRuns, c.heads, p.layouts());
      if (!may_leave_runs || !v || c.heads >= 2 * align_up(p.num_q_heads, kOctet)) continue;
      const int64_t items = p.num_tokens * ceil_div(p.num_q_heads, c.heads);
      const auto most = static_cast<int>(runs_of(p, 64, kSegmentsOfQuery).count);
      for (int ctas = kLeastCtasOfRuns; ctas <= std::min<int64_t>(most, num_sms / items); ++ctas)
        if (const Plan plan = plan_of(*v, ctas); have_room(p, plan, num_sms))
          fn(plan, time_of_runs(p, c, plan, num_sms), time_of_runs(quarter, c, plan, num_sms));
    }
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

}  // namespace mla_fp8::gpu::model
