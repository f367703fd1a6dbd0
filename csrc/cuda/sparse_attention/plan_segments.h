#pragma once
// Plans on sm_90 for batch_invariant with up to 32 heads over FP8 rows of one layout: the segments of a query
// follow from its heads and keys, and who works on them changes no bits (sm90/segments.cuh). So the batch may
// say how many CTAs share a query.
#include <algorithm>
#include <bit>
#include <iterator>

#include "cuda/sparse_attention/plan_model.h"

namespace mla_fp8::gpu::model {

struct Segments {
  int64_t least_keys;  // of one
  int most;            // a power of two
  int chain;           // a CTA has one, or a multiple of so many
  double us_of_run, us_of_saved_run;
};
// Times fitted by eye to one H200, whose plans by them are within 4 % of the best.
inline constexpr Segments kSegmentsOfFew{160, 8, 1, 0.8, 2.0}, kSegmentsOfMany{64, 16, 4, 0.6, 2.0};
inline const Segments& segments_by(const Variant& v) {
  return v.kernel == Kernel::kFewHeads ? kSegmentsOfFew : kSegmentsOfMany;
}
inline int num_segments(const SparseAttentionParams& p, const Segments& s) {
  int segments = 1;
  while (segments < s.most && num_keys(p) >= 2 * segments * s.least_keys) segments *= 2;
  return segments;
}
inline bool can_share(const Segments& s, int segments, int splits) {
  if (splits < 1 || !std::has_single_bit(static_cast<unsigned>(splits)) || segments % splits != 0)
    return false;
  return segments == splits || segments / splits % std::min(s.chain, segments) == 0;
}
inline const Variant* variant_of_segments(const SparseAttentionParams& p) {
  const int octets = ceil_div(p.num_q_heads, kOctet);
  if (octets > 4) return nullptr;
  return find_variant(octets <= 2 ? Kernel::kFewHeads : Kernel::kManyHeads, Schedule::kSegments,
                      octets == 1   ? 8
                      : octets == 2 ? 16
                                    : 32,
                      0, p.layouts());
}
// Of a query that a test shares among so many, at least one for each; 0: it cannot be.
inline int forced_segments(const SparseAttentionParams& p, const Variant& v, int splits) {
  const Segments& by = segments_by(v);
  const int segments = std::max(num_segments(p, by), splits);
  return segments <= by.most && can_share(by, segments, splits) ? segments : 0;
}
inline Plan plan_segments(const SparseAttentionParams& p, const Variant& v, int num_sms) {
  const Segments& by = segments_by(v);
  const int segments = num_segments(p, by);
  const auto price =
      std::find_if(std::begin(kHeadsClasses), std::end(kHeadsClasses),
                   [&](const HeadsClass& c) { return c.kernel == v.kernel && c.heads == v.heads; });
  Priced best{{v}};
  for (const SplitClass& s : kSplitClasses) {
    if (!can_share(by, segments, s.splits)) continue;
    const int runs = segments / s.splits, saved = std::max(runs / std::max(by.chain, 2), 1) - 1;
    const auto waves = static_cast<double>(ceil_div(p.num_tokens, resident(s, num_sms)));
    const double us = time_of(p, *price, s, p.num_tokens, num_sms) +
                      waves * (runs * by.us_of_run + saved * by.us_of_saved_run);
    if (us < best.us) best.plan.splits = s.splits, best.us = us;
  }
  best.plan.segments = segments;
  return best.plan;
}

}  // namespace mla_fp8::gpu::model
