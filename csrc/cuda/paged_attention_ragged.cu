// paged_attention_ragged on every GPU here (sm_80 and newer; CDNA through csrc/hip), and its latent form on
// CDNA. On NVIDIA's GPUs the latent form is in paged_attention_ragged_latent.cu.
//
// A block takes 16 rows and one split of their request's keys. A row is a (query token, head of the group) of
// one request and KV head. For each block of 32 keys:
//   locate   finds the keys' addresses, through the page list
//   stage    copies their bytes to shared memory as they are, or halved (kIsHalved). Masked keys become
//            zeros, so no 0 * NaN can happen
//   S        2 waves x 2: 16 keys each, half of the dims each; registers widen FP8 to bf16, exactly
//   P        online softmax in base 2; weights stay float and are rounded once, to q's dtype
//   O        4 waves, a quarter of the value dims each
// Scales of a layer or head multiply the logits and the result. Scales of a latent's tiles multiply the float
// sums of S and the weights of O. Splits of a request leave parts in the workspace, which a second kernel
// merges. The size of the workspace does not depend on the context length.
//
// Bound: the memory if few rows share a key. Otherwise widening K and V, which every 16 rows do anew.

#include "ops/paged_attention_ragged.h"

#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/paged_attention_ragged/latent.h"
#include "cuda/paged_attention_ragged/scores.cuh"
#include "cuda/paged_attention_ragged/values.cuh"

// Not an anonymous namespace: csrc/hip finds kernels by name, so types of template arguments need names.
namespace mla_fp8::gpu::ragged {

__device__ __forceinline__ float sink_of(const PagedAttentionRaggedParams& p, int64_t head) {
  return p.attn_sink ? p.attn_sink[head] * kLog2E : -INFINITY;
}

// The workspace: the splits' outputs, [split, token, head, head_dim_v], then their lse in base 2.
__device__ __forceinline__ int64_t rows_per_part(const PagedAttentionRaggedParams& p) {
  return p.num_tokens() * p.num_q_heads;
}
__device__ __forceinline__ float* split_lse(const PagedAttentionRaggedParams& p) {
  return p.workspace + p.num_splits * rows_per_part(p) * p.head_dim_v;
}

template <class Cache, Dtype kDtype>
__global__ void __launch_bounds__(kThreads) MLA_256_REGISTERS
    paged_attention_ragged_kernel(const __grid_constant__ Args args) {
  MLA_SHARED(Shared<Cache>, s);
  wait_for_previous_grid();
  const PagedAttentionRaggedParams& p = args.p;
  const Work w(p, args.row_tiles);
  find_rows(s, args, w);
  __syncthreads();
  const int wave = threadIdx.x / kWaveSize, key_tile = wave % kKeyTiles, share = wave / kKeyTiles;
  // The keys of this split that the block's last row sees.
  const int64_t begin = w.split * args.keys_per_split(w.num_keys), seen = s.visible[kRows - 1];
  const int64_t split_end = begin + args.keys_per_split(w.num_keys),
                end = split_end < seen ? split_end : seen;
  const int64_t seen_by_all = s.visible[0];

  Operand q[kShareSteps<Cache>];
  load_q<Cache>(q, s, p, share);
  const float logit_scale = p.sm_scale * kLog2E * (Cache::kTiles > 0 ? kUnit<Cache> : 1.0f) *
                            (p.k_scale ? p.k_scale[w.kv_head * p.k_scale_stride] : 1.0f);
  const int softmax_row = threadIdx.x / kRowThreads;
  const int64_t row_sees = s.visible[softmax_row];
  Running running;
  Accumulators acc[Columns<Cache>::kTiles] = {};

  locate<Cache>(s.rows[0], args, w, begin, end);
  __syncthreads();
  int now = 0;
  for (int64_t position = begin; position < end; position += kKeys, now ^= 1) {
    const Rows& rows = s.rows[now];
    Rows& next = s.rows[now ^ 1];
    stage_keys(s, rows, p);
    locate<Cache>(next, args, w, position + kKeys, end);
    __syncthreads();
    prefetch_keys<Cache>(next, p);
    compute_scores<Cache, kDtype>(s, q, key_tile, share);
    __syncthreads();
    online_softmax(s, rows, running, p, logit_scale, row_sees - position);
    __syncthreads();
    Accumulators rescale;
#pragma unroll
    for (int i = 0; i < kTileAccumulators; ++i) rescale[i] = s.rescale[accumulator_row(i)];
#pragma unroll
    for (int tile = 0; tile < Columns<Cache>::kTiles; ++tile) scale_accumulators(acc[tile], rescale);
    if (position + kKeys > seen_by_all && seen_by_all < end)
      take_last_keys<Cache, kDtype>(s, rows, acc, position, seen_by_all, end);
    accumulate_values<Cache, kDtype>(s, acc);
    __syncthreads();
  }

  if (threadIdx.x % kRowThreads == 0) {
    const int64_t at = s.row[softmax_row];
    const bool whole = p.num_splits == 1;
    const float lse = running.sum == 0.0f ? -INFINITY : running.max + fast_log2(running.sum);
    const float sink = whole ? fast_exp2(sink_of(p, s.head[softmax_row]) - running.max) : 0.0f;
    s.normalizer[softmax_row] = running.sum == 0.0f ? 0.0f : 1.0f / (running.sum + sink);
    if (at >= 0 && whole) p.lse[at] = lse * kLn2;
    if (at >= 0 && !whole) split_lse(p)[w.split * rows_per_part(p) + at] = lse;
  }
  __syncthreads();
  using C = Columns<Cache>;
  const float out_scale = p.v_scale ? p.v_scale[w.kv_head * p.v_scale_stride] : 1.0f;
#pragma unroll
  for (int i = 0; i < kTileAccumulators; ++i) {
    const int row = accumulator_row(i);
    if (s.row[row] < 0) continue;
    const float factor = s.normalizer[row] * out_scale;
    uint16_t* out = static_cast<uint16_t*>(p.out) + s.out[row];
    float* part = p.workspace + (w.split * rows_per_part(p) + s.row[row]) * p.head_dim_v;
#pragma unroll
    for (int set = 0; set < C::kTiles; set += C::kSet) {
      const int column = C::column(set, i);
      if (!Cache::kIsLatent && column >= p.head_dim_v) continue;
      float x[C::kSet];
#pragma unroll
      for (int j = 0; j < C::kSet; ++j)
        x[j] = acc[set + j][i] * factor * (C::in_rope(set) ? 1.0f : kUnit<Cache>);
      if (p.num_splits == 1) store_rounded<kDtype>(out + column, x);
      else store_floats(part + column, x);
    }
  }
}

using SplitWeights = float[kMaxRaggedSplits];

// A block merges the splits of one token and head.
template <Dtype kDtype>
__global__ void __launch_bounds__(kMergeThreads)
    paged_attention_ragged_merge_kernel(const __grid_constant__ PagedAttentionRaggedParams p) {
  wait_for_previous_grid();
  const unsigned num_heads = static_cast<unsigned>(p.num_q_heads);
  const int64_t at = blockIdx.x, token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
  const int64_t per_part = rows_per_part(p);
  MLA_SHARED(SplitWeights, weights);
  for (int split = threadIdx.x; split < p.num_splits; split += kMergeThreads)
    weights[split] = split_lse(p)[at + split * per_part];
  __syncthreads();
  float largest = -INFINITY;
  for (int split = 0; split < p.num_splits; ++split) largest = fmaxf(largest, weights[split]);
  const float base = largest == -INFINITY ? 0.0f : largest;
  __syncthreads();
  for (int split = threadIdx.x; split < p.num_splits; split += kMergeThreads)
    weights[split] = fast_exp2(weights[split] - base);
  __syncthreads();
  float sum = 0.0f;
  for (int split = 0; split < p.num_splits; ++split) sum += weights[split];
  const float total = sum + fast_exp2(sink_of(p, head) - base);
  uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  for (int column = threadIdx.x; column < p.head_dim_v; column += kMergeThreads) {
    float x = 0.0f;
    // A split of weight 0 counts for nothing; one without keys was not even written.
#pragma unroll 8
    for (int split = 0; split < p.num_splits; ++split)
      if (weights[split] != 0.0f)
        x += weights[split] * p.workspace[(split * per_part + at) * p.head_dim_v + column];
    out[column] = from_float<kDtype>(sum == 0.0f ? 0.0f : x / total);
  }
  if (threadIdx.x == 0) p.lse[at] = sum == 0.0f ? -INFINITY : (largest + fast_log2(sum)) * kLn2;
}

// Calls fn(Cache) for the caches' shape and format; kDtype is that of the matrix units.
template <Dtype kDtype, class Fn>
void with_separate_caches(const PagedAttentionRaggedParams& p, Fn&& fn) {
  const int dim = std::max(p.head_dim, p.head_dim_v);
  const auto with_dim = [&](auto stored) {
    if (dim <= 64) fn(SeparateCaches<64, stored>{});
    else if (dim <= 128) fn(SeparateCaches<128, stored>{});
    else fn(SeparateCaches<256, stored>{});
  };
  switch (p.cache_dtype) {
    case CacheDtype::kE4m3fn: return with_dim(constant<CacheDtype::kE4m3fn>{});
    case CacheDtype::kE4m3fnuz: return with_dim(constant<CacheDtype::kE4m3fnuz>{});
    default: return with_dim(constant<kDtype == Dtype::kF16 ? CacheDtype::kF16 : CacheDtype::kBf16>{});
  }
}

int64_t num_tiles(const PagedAttentionRaggedParams& p) {
  return p.num_requests * p.num_kv_heads * Args::num_row_tiles(p);
}

template <Dtype kDtype>
void run(const PagedAttentionRaggedParams& p, gpuStream_t stream) {
  const LaunchConfig config{.grid = num_tiles(p) * p.num_splits, .block = kThreads, .stream = stream};
  const auto attend = [&](auto cache) {
    launch(paged_attention_ragged_kernel<decltype(cache), kDtype>, config, Args(p));
  };
  if (!p.is_latent) {
    with_separate_caches<kDtype>(p, attend);
  } else if constexpr (kDtype == Dtype::kBf16 && !MLA_FP8_PTX) {
    with_kv_layout(p.layout, [&](auto id) {
      if constexpr (!kv_layout(id).extra_only()) attend(LatentCache<id>{});
    });
  }
  if (p.num_splits > 1)
    launch(paged_attention_ragged_merge_kernel<kDtype>,
           {.grid = p.num_tokens() * p.num_q_heads, .block = kMergeThreads, .stream = stream}, p);
}

}  // namespace mla_fp8::gpu::ragged

namespace mla_fp8::gpu {

int paged_attention_ragged_splits(const PagedAttentionRaggedParams& p) {
  if constexpr (MLA_FP8_PTX)
    if (p.is_latent) return ragged_latent_splits(p);
  constexpr int64_t kBlocksPerProcessor = 2, kMinKeys = 128;
  // No request has more keys than all requests together.
  const int64_t useful = ceil_div(p.num_kv_indices * p.page_size, kMinKeys);
  const int64_t wanted = kBlocksPerProcessor * num_processors() / std::max<int64_t>(1, ragged::num_tiles(p));
  return static_cast<int>(std::clamp<int64_t>(std::min(useful, wanted), 1, kMaxRaggedSplits));
}

void paged_attention_ragged(const PagedAttentionRaggedParams& p, gpuStream_t stream) {
  if constexpr (MLA_FP8_PTX)
    if (p.is_latent) return ragged_latent(p, stream);
  if (p.dtype == Dtype::kF16) ragged::run<Dtype::kF16>(p, stream);
  else ragged::run<Dtype::kBf16>(p, stream);
}

}  // namespace mla_fp8::gpu
