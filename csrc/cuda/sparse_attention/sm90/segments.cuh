#pragma once
// batch_invariant: a query's result is that of a fixed tree of segments of its keys, whoever works on them.
//
// The blocks of the valid keys are dealt to `segments * kTeams` runs (plan.h), as even as can be. A run is
// what a team adds up from zero. Two neighbours in the tree are merged by one rule: both are brought to the
// larger base, product by product, and added; so a merge has the same bits in registers, in shared memory
// and between CTAs, and its two sides may be swapped. A CTA takes neighbouring segments, a team of it
// neighbouring runs: subtrees. At the bottom of the tree C::kChain runs are merged in a row, in registers;
// what waits for its neighbour above lies in local memory. A run without keys changes nothing wherever it is
// merged, or left out; zeros lose their sign at the end.
#include <bit>
#include <cstdint>

#include "cuda/device/cluster.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"

namespace mla_fp8::gpu {

// Never one instruction: a fused one would round once, and not the same with its sides swapped.
__device__ inline float merged(float a, float a_factor, float b, float b_factor) {
  return __fadd_rn(__fmul_rn(a, a_factor), __fmul_rn(b, b_factor));
}
// What a chain takes up next: its sides are never swapped.
__device__ inline float appended(float a, float a_factor, float b, float b_factor) {
  return fmaf(b, b_factor, __fmul_rn(a, a_factor));
}
__device__ inline float4 appended(float4 a, float a_factor, float4 b, float b_factor) {
  return {appended(a.x, a_factor, b.x, b_factor), appended(a.y, a_factor, b.y, b_factor),
          appended(a.z, a_factor, b.z, b_factor), appended(a.w, a_factor, b.w, b_factor)};
}
__device__ inline float4 merged(float4 a, float a_factor, float4 b, float b_factor) {
  return {merged(a.x, a_factor, b.x, b_factor), merged(a.y, a_factor, b.y, b_factor),
          merged(a.z, a_factor, b.z, b_factor), merged(a.w, a_factor, b.w, b_factor)};
}

// What one CTA works on: the runs of its teams. first_block and num_blocks: all of one team's; of several
// num_blocks is no less than what there is of the ring's sequence.
template <int kTeams>
struct SegmentItem : SplitItem {
  static constexpr int kNumTeams = kTeams;
  int runs;           // of a team
  unsigned all_log2;  // of the runs of the query
  int blocks;         // of the query

  SegmentItem() = default;
  __device__ SegmentItem(const SplitItem& item, const KernelParams& params)
      : SplitItem(item),
        runs(params.runs),
        all_log2(params.segments_log2 + std::countr_zero(unsigned{kTeams})) {}

  template <class C>
  __device__ void take_share(int num_keys, const Divider&) {
    blocks = ceil_div(num_keys, C::kBlockKeys);
    if constexpr (kTeams == 1) {
      first_block = first_block_of(first_run(0));
      num_blocks = first_block_of(first_run(1)) - first_block;
    } else {
      num_blocks = kTeams * ceil_div(blocks * runs, 1 << all_log2);
    }
  }
  __device__ int first_run(int team) const { return (split * kTeams + team) * runs; }
  __device__ int first_block_of(int run) const {
    return static_cast<int>(static_cast<unsigned>(run) * static_cast<unsigned>(blocks) >> all_log2);
  }
};

// What a team merges when a run with keys has ended.
template <int kChain>
class RunTree {
 public:
  // Calls merge(level) for each subtree that waits for the one which ends, save(level) if that has to wait.
  template <class Item, class Merge, class Save>
  __device__ __forceinline__ void end(const Item& w, int team, int run, Merge&& merge, Save&& save) {
    const int first = w.first_run(team), end = w.first_block_of(first + run + 1);
    const auto ends_at = [&](int run) { return w.first_block_of(first + run) == end; };
    int size = min(kChain, w.runs), i = run / size;
    if (!ends_at((i + 1) * size)) return;
#pragma unroll 1
    for (int level = 0; size < w.runs; ++level, size *= 2, i /= 2) {
      if (i % 2 == 1) {
        if (waiting_ >> level & 1) merge(level);
        waiting_ &= ~(1u << level);
      } else if (!ends_at((i + 2) * size)) {
        save(level);
        waiting_ |= 1u << level;
        return;
      }
    }
  }

 private:
  unsigned waiting_ = 0;  // bit i: a subtree of 2^i chains
};
inline constexpr int kSavedLevels = 2;

// ---- the CTAs of a cluster ------------------------------------------------------------------------------

// As merge_quads, of a power of two of CTAs.
// `kChain`: of so many the first ones are merged in a row, the chains in a tree.
template <class C, int kSplits, int kRounds, int kChain>
__device__ __forceinline__ void merge_tree(const KernelParams& params, const typename C::Item& w,
                                           uint32_t smem, int piece, int lane) {
  const int quad = piece * kWarpSize + lane, head = quad / kOutQuads;
  if (!w.has_head(params.p, head)) return;
  float2 stats = {kNoMax, 0.0f};  // lane r holds split r's
  if (lane < kSplits)
    stats = load_cluster_float2(cluster_address(smem + MLA_SMEM(C, stats) + head * 8, lane));
  const uint32_t mine = smem + MLA_SMEM(C, ring) + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
  // Each begins with its own chain, and meets its neighbours in the tree: nobody is asked by all.
  const int own = w.split / kChain * kChain;
  float4 x[kSplits][kRounds];
#pragma unroll
  for (int k = 0; k < kSplits; ++k)
#pragma unroll
    for (int i = 0; i < kRounds; ++i)
      x[k][i] = load_cluster_float4(cluster_address(mine, own ^ k) +
                                    i * kWarpSize * static_cast<int>(sizeof(float4)));
  float base = stats.x, sum = stats.y;
  if constexpr (kChain > 1) {
    const float all_base = base, all_sum = sum;
    base = __shfl_sync(kFullWarp, all_base, lane / kChain * kChain);
    sum = __shfl_sync(kFullWarp, all_sum, lane / kChain * kChain);
#pragma unroll
    for (int j = 1; j < kChain; ++j) {
      const float next = __shfl_sync(kFullWarp, all_base, lane / kChain * kChain + j);
      const float both = fmaxf(base, next);
      const float f[2] = {fast_exp2(base - both), fast_exp2(next - both)};
      sum = merged(sum, f[0], __shfl_sync(kFullWarp, all_sum, lane / kChain * kChain + j), f[1]);
      base = both;
#pragma unroll
      for (int k = 0; k < kSplits; k += kChain) {
        const float a = __shfl_sync(kFullWarp, f[0], own ^ k), b = __shfl_sync(kFullWarp, f[1], own ^ k);
#pragma unroll
        for (int i = 0; i < kRounds; ++i) x[k][i] = appended(x[k][i], a, x[k + j][i], b);
      }
    }
  }
#pragma unroll
  for (int step = kChain; step < kSplits; step *= 2) {
    const float both = fmaxf(base, __shfl_xor_sync(kFullWarp, base, step));
    const float f = fast_exp2(base - both);
    sum = __fmul_rn(sum, f);
    sum = __fadd_rn(sum, __shfl_xor_sync(kFullWarp, sum, step));
    base = both;
#pragma unroll
    for (int k = 0; k < kSplits; k += 2 * step) {
      const float a = __shfl_sync(kFullWarp, f, own ^ k), b = __shfl_sync(kFullWarp, f, own ^ (k + step));
#pragma unroll
      for (int i = 0; i < kRounds; ++i) x[k][i] = merged(x[k][i], a, x[k + step][i], b);
    }
  }
  float factor = 0.0f;
  if (lane == 0) factor = finish_head<typename C::R>(params.p, w, head, base, sum);
  factor = __shfl_sync(kFullWarp, factor, 0);
  uint2* const out = place_of_head(params.p, w, head) + quad % kOutQuads;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) out[i * kWarpSize] = to_unsigned_bf16(x[0][i], factor);
}

// Eight warps: each CTA finishes an equal share of the pieces of 32 quads.
template <class C>
__device__ void merge_segments(const KernelParams& params, const typename C::Item& w, uint8_t* smem, int warp,
                               int lane) {
  constexpr int kOfHead = kOutQuads / kWarpSize, kAll = C::kHeads * kOfHead;
  const auto merge = [&](auto splits) {
    constexpr int kSplits = splits(), kShare = kAll / kSplits;  // pieces
    constexpr int kOfWarp = kShare / kConsumerWarps, kRounds = kOfWarp < 1         ? 1
                                                               : kOfWarp < kOfHead ? kOfWarp
                                                                                   : kOfHead;
    static_assert(kOfHead % kRounds == 0);
#pragma unroll 1
    for (int piece = warp * kRounds; piece < kShare; piece += kConsumerWarps * kRounds) {
      const int first = w.split * kShare + piece;
      const auto merge_by = [&](auto chain) {
        merge_tree<C, kSplits, kRounds, chain()>(params, w, shared_address(smem), first, lane);
      };
      // Between CTAs there are chains only where each has one run.
      if constexpr (C::Item::kNumTeams == 1)
        if (w.runs == 1) {
          merge_by(constant<(C::kChain < kSplits ? C::kChain : kSplits)>{});
          continue;
        }
      if constexpr (kSplits <= C::kMostSharing) merge_by(constant<1>{});
    }
  };
  const int splits = params.num_splits();
  if (splits == 2) merge(constant<2>{});
  else if (splits == 4) merge(constant<4>{});
  else if (splits == 8) merge(constant<8>{});
  else if constexpr (C::Item::kNumTeams == 1) merge(constant<16>{});
}

}  // namespace mla_fp8::gpu
