// Plans of the portable kernel, which every NVIDIA GPU from sm_80 on and AMD's have.
#include <algorithm>

#include "cuda/sparse_attention/plan.h"
#include "ops/paged_attention_ragged.h"

namespace mla_fp8::gpu {
namespace {

// A CTA of a query has at least two blocks of keys; with fewer the merge costs more than it saves. CTAs of 64
// heads are alone on an SM, and need enough queries to fill the SMs. With batch_invariant all have 32 heads.
constexpr int64_t kMinKeysOfSplit = 64, kKeysOfInvariantSplit = 512;

// Returns how many CTAs the splits of `ctas` CTAs should make. Two CTAs of up to 32 heads fit on an SM of 228
// KB of shared memory (sm_90 to sm_110). Other NVIDIA GPUs get a second wave if the first would be less than
// three quarters full.
int64_t ctas_that_fill(const Variant& v, int64_t ctas, const Gpu& gpu) {
  const bool two_fit = v.heads < 64 && gpu.major >= 9 && gpu.major < 12;
  const int64_t wave = int64_t{gpu.num_sms} * (two_fit ? 2 : 1), in_first = wave / ctas * ctas;
  const bool has_second = !two_fit && v.heads < 64 && gpu.major > 0 && 4 * in_first < 3 * wave;
  return has_second ? 2 * wave : wave;
}

}  // namespace

Plan plan_portable(const SparseAttentionParams& p, const Gpu& gpu) {
  const int64_t keys = std::max<int64_t>(num_keys(p), 1), most_splits = ceil_div(keys, kMinKeysOfSplit);
  const bool few = p.num_tokens * ceil_div(p.num_q_heads, 64) * most_splits < gpu.num_sms;
  const int heads = p.batch_invariant ? 32 : few ? std::min(p.num_q_heads, 32) : p.num_q_heads;
  const Variant& v = variant(Kernel::kPortable, Schedule::kSplit, heads, p.layouts());
  int64_t splits;
  if (p.batch_invariant) {
    splits = std::min(ceil_div(keys, kKeysOfInvariantSplit), kMaxInvariantSplits);
  } else {
    const int64_t ctas = p.num_tokens * ceil_div(p.num_q_heads, v.heads);
    splits = std::min({ctas_that_fill(v, ctas, gpu) / ctas, most_splits, kMaxPortableSplits});
  }
  return {v, static_cast<int>(std::max<int64_t>(splits, 1))};
}

Plan plan_ragged(const SparseAttentionParams& p, int q_len, int64_t keys, const Gpu& gpu) {
  const int rows = q_len * p.num_q_heads;
  const Variant& v = variant(Kernel::kPortable, Schedule::kSplit, rows, p.layouts());
  const int64_t ctas = std::max<int64_t>(p.num_tokens / q_len * ceil_div(rows, v.heads), 1);
  const int64_t splits = std::min(ctas_that_fill(v, ctas, gpu) / ctas, ceil_div(keys, kMinKeysOfSplit));
  return {v, static_cast<int>(std::clamp<int64_t>(splits, 1, kMaxRaggedSplits))};
}

}  // namespace mla_fp8::gpu
