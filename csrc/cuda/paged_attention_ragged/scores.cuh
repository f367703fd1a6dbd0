#pragma once
// Computes S = q . k and its online softmax.
#include "cuda/device/math.cuh"
#include "cuda/device/soft_cap.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/paged_attention_ragged/load.cuh"

namespace mla_fp8::gpu::ragged {

// s.partial = q . k over this wave's share of the dims, for its 16 keys.
template <class Cache, Dtype kDtype>
__device__ __forceinline__ void compute_scores(Shared<Cache>& s, const Operand (&q)[kShareSteps<Cache>],
                                               int key_tile, int share) {
  constexpr int kLeadSteps = Cache::kLeadDim / kTile / kShares;
  constexpr int kTileSteps = Cache::kTileDim / kTile / kShares;
  static_assert(Cache::kLeadDim % (kTile * kShares) == 0 && Cache::kTileDim % (kTile * kShares) == 0);
  Accumulators sum = {}, tile_sum = {};
#pragma unroll
  for (int step = 0; step < kShareSteps<Cache>; ++step) {
    const int k = (step * kShares + share) * kTile + operand_k();
    Operand keys;
#pragma unroll
    for (int i = 0; i < kOperandRows; ++i) {
      const int key = key_tile * kTile + operand_row(i);
      if (step < kLeadSteps)
        keys.row[i] = load_k4<Cache::kStored, kDtype>(s.k[key] + k * kStoredBytes<Cache::kStored>);
      else keys.row[i] = *reinterpret_cast<const Words<2>*>(s.rope[key] + (k - Cache::kLeadDim));
    }
    if (Cache::kTiles == 0 || step >= kLeadSteps) {
      multiply_tiles<kDtype>(sum, q[step], keys);
      continue;
    }
    multiply_tiles<kDtype>(tile_sum, q[step], keys);
    if (step % kTileSteps == kTileSteps - 1) {
#pragma unroll
      for (int i = 0; i < kTileAccumulators; ++i) {
        sum[i] += tile_sum[i] * s.scales[step / kTileSteps][key_tile * kTile + accumulator_column(i)];
        tile_sum[i] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTileAccumulators; ++i)
    s.partial[share][accumulator_row(i)][key_tile * kTile + accumulator_column(i)] = sum[i];
}

// A row's softmax so far, the same in its kRowThreads threads.
struct Running {
  float max = -INFINITY, sum = 0.0f;  // max: a logit in base 2; sum: of 2^(logit - max)
};

// Turns s.partial of this thread's row into s.weights and s.rescale.
template <class Cache>
__device__ __forceinline__ void online_softmax(Shared<Cache>& s, const Rows& rows, Running& running,
                                               const PagedAttentionRaggedParams& p, float logit_scale,
                                               int64_t num_visible) {
  const int thread = this_thread(), row = thread / kRowThreads, first = thread % kRowThreads;
  float logits[kRowKeys], largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kRowKeys; ++i) {
    const int key = first + i * kRowThreads;
    float x = 0.0f;
#pragma unroll
    for (int share = 0; share < kShares; ++share) x += s.partial[share][row][key];
    if constexpr (Cache::kTiles == 0) x *= kUnit<Cache>;  // in a layer's scale it might overflow
    x *= logit_scale;
    if (p.logits_soft_cap > 0.0f) x = soft_cap(x * kLn2 / p.logits_soft_cap, p.logits_soft_cap);
    logits[i] = rows.k[key] && key < num_visible ? x : -INFINITY;
    largest = logits[i] > largest ? logits[i] : largest;
  }
#pragma unroll
  for (int offset = kRowThreads / 2; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  largest = fmaxf(largest, running.max);
  // While every logit is -inf, the base is 0: weights become 0, not NaN.
  const float base = largest == -INFINITY ? 0.0f : largest;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowKeys; ++i) {
    const float weight = fast_exp2(logits[i] - base);
    s.weights[row][first + i * kRowThreads] = weight;
    sum += weight;
  }
#pragma unroll
  for (int offset = kRowThreads / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
  const float rescale = fast_exp2(running.max - base);
  running = {largest, running.sum * rescale + sum};
  if (first == 0) s.rescale[row] = rescale;
}

}  // namespace mla_fp8::gpu::ragged
