#pragma once
// Plans on sm_90 for batch_invariant over FP8 rows of one layout: the segments of a query follow from its
// heads and keys, and who works on them changes no bits (sm90/segments.cuh). So the batch may say how many
// CTAs share a query.
#include <algorithm>
#include <bit>
#include <iterator>

#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

struct Segments {
  Kernel kernel;
  int heads;           // of a CTA
  int64_t least_keys;  // of a segment
  int most;            // a power of two
  // Of a CTA, for each run of a team, and for each result that waits in local memory.
  double us_of_run, us_of_waiting;
  bool first_waits_in_registers;
};
// Times fitted by eye to one H200, beside prices (kHeadsClasses) that have changed since; with fewer than 64
// heads in the form before this.
inline constexpr Segments kSegments[] = {{Kernel::kFewHeads, 8, 160, 8, 0.8, 2.0, true},
                                         {Kernel::kFewHeads, 16, 128, 8, 0.8, 2.0, true},
                                         {Kernel::kManyHeads, 32, 64, 8, 0.6, 2.0, true},
                                         {Kernel::kManyHeads, 64, 288, 4, 0.9, 8.0, false}};
inline const Segments& segments_by(const Variant& v) {
  return *std::find_if(std::begin(kSegments), std::end(kSegments),
                       [&](const Segments& s) { return s.kernel == v.kernel && s.heads == v.heads; });
}
inline int num_segments(const SparseAttentionParams& p, const Segments& s) {
  int segments = 1;
  while (segments < s.most && num_keys(p) >= 2 * segments * s.least_keys) segments *= 2;
  return segments;
}
inline const Variant* variant_of_segments(const SparseAttentionParams& p) {
  const int heads = p.num_q_heads <= 8 ? 8 : p.num_q_heads <= 16 ? 16 : p.num_q_heads <= 32 ? 32 : 64;
  return find_variant(heads <= 16 ? Kernel::kFewHeads : Kernel::kManyHeads, Schedule::kSegments, heads, 0,
                      p.layouts());
}
// Of a query that a test shares among so many, at least one for each; 0: it cannot be.
inline int forced_segments(const SparseAttentionParams& p, const Variant& v, int splits) {
  const Segments& by = segments_by(v);
  if (splits < 1 || splits > by.most || !std::has_single_bit(static_cast<unsigned>(splits))) return 0;
  return std::max(num_segments(p, by), splits);
}
inline Plan plan_segments(const SparseAttentionParams& p, const Variant& v, int num_sms) {
  const Segments& by = segments_by(v);
  const int segments = num_segments(p, by), head_blocks = ceil_div(p.num_q_heads, v.heads);
  const auto price =
      std::find_if(std::begin(kHeadsClasses), std::end(kHeadsClasses),
                   [&](const HeadsClass& c) { return c.kernel == v.kernel && c.heads == v.heads; });
  Priced best{{v}};
  for (const SplitClass& s : kSplitClasses) {
    if (segments % s.splits != 0) continue;
    const int runs = segments / s.splits;
    const int waiting = std::max(by.first_waits_in_registers ? runs / 2 : runs, 1) - 1;
    const auto waves = static_cast<double>(ceil_div(p.num_tokens * head_blocks, resident(s, num_sms)));
    const double us = time_of(p, *price, s, p.num_tokens, num_sms) +
                      waves * (runs * by.us_of_run + waiting * by.us_of_waiting);
    if (us < best.us) best.plan.splits = s.splits, best.us = us;
  }
  best.plan.segments = segments;
  return best.plan;
}

}  // namespace mla_fp8::gpu::model
