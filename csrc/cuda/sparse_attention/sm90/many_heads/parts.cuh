#pragma once
// Merges CTAs that share a query, or a tile of queries, without a cluster. Clusters leave SMs without work:
// on 132 SMs 15 of eight CTAs run at once, or 17 of six. Here any number of CTAs shares a query. Each leaves
// a part of the result in the workspace, and a second grid adds parts up in the order of the keys.
//
// A value warp leaves its accumulators as they lie in its registers. A lane has eight values of a head, which
// become f16 times a power of two of their own. Runs of segments stay floats (runs.cuh).
#include "cuda/sparse_attention/sm90/many_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// Two adjacent dims of O as bf16; `dim` is the first one, among a value warp's 16 of a chunk.
struct DimPair {
  uint32_t values;
  int dim;
};
// Pairs a lane's values of fragment rows g and g + 8. They are dims 2g, 2g + 1. bf16 values are dims g, g +
// 8: neighbours swap.
__device__ __forceinline__ DimPair pair_dims(bool is_bf16, int g, float of_g, float of_g8) {
  uint32_t low = __float_as_uint(of_g), high = __float_as_uint(of_g8);
  int dim = 2 * g;
  if (is_bf16) {
    const bool odd = g % 2;
    const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? low : high, 4);
    (odd ? low : high) = got;
    dim = odd ? g + 7 : g;
  }
  return {pack_bf16(__uint_as_float(low), __uint_as_float(high)), dim};
}

// Has an address computed here, not where it is used.
template <class T>
__device__ __forceinline__ void keep_found(T*& address) {
  asm volatile("" : "+l"(address));
}

// The values that a lane leaves at once, and a lane of the second grid reads.
template <class C>
struct PartValues {
  static constexpr int kCount = 8, kFloatsOfHead = kFloatsOfQueryPart;
  uint4 values;
  uint32_t exponent;

  // Writes them to place `at` of a part with `lanes` places.
  __device__ static void write(uint8_t* part, int lanes, int at, const float (&x)[kCount]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, kLeastExponent);
    const float factor = __uint_as_float((kLargest + 2 * 127 - exponent) << 23);
    reinterpret_cast<uint4*>(part)[at] = {
        pack_f16(x[0] * factor, x[1] * factor), pack_f16(x[2] * factor, x[3] * factor),
        pack_f16(x[4] * factor, x[5] * factor), pack_f16(x[6] * factor, x[7] * factor)};
    part[lanes * 16 + at] = static_cast<uint8_t>(exponent);
  }
  // The address of a lane's values in a part.
  struct Place {
    const uint8_t *values, *exponent;
    __device__ Place(const uint8_t* part, int lanes, int at)
        : values(part + at * 16), exponent(part + lanes * 16 + at) {
      keep_found(values), keep_found(exponent);
    }
    // Reads those of the part `offset` bytes further; zeros, without an access, if it is not there.
    __device__ PartValues read(int offset, bool is_there) const {
      PartValues x{{}, kLeastExponent};
      if (is_there) x = {__ldcg(reinterpret_cast<const uint4*>(values + offset)), __ldcg(exponent + offset)};
      return x;
    }
  };
  __device__ void add_to(float (&sum)[kCount], float weight) const {
    const float factor = weight * __uint_as_float((exponent - kLargest) << 23);
    const uint32_t words[] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      const float2 pair = unpack<Dtype::kF16>(words[j]);
      sum[2 * j] = fmaf(pair.x, factor, sum[2 * j]), sum[2 * j + 1] = fmaf(pair.y, factor, sum[2 * j + 1]);
    }
  }

 private:
  static constexpr uint32_t kLargest = 14, kLeastExponent = 16;  // f16 below 2^15; both factors are normal
};

// A part in the workspace. A lane has columns 2 n + c: eight values of head 8 n + 2 t + c.
template <class C>
class QueryPart {
 public:
  using Values = PartValues<C>;
  static constexpr int kColumns = C::kHeads / 4, kValues = Values::kCount;  // in a lane; in a column
  static constexpr int kLanes = kConsumerWarps * kColumns * kWarpSize;
  static constexpr int kBytes = C::kHeads * Values::kFloatsOfHead * 4;
  static_assert(kLanes * kValues == C::kHeads * kHeadDimV);

  // The `number`-th part of all.
  __device__ QueryPart(const KernelParams& params, int64_t number)
      : base_(reinterpret_cast<uint8_t*>(params.p.workspace + floats_of_parts_table(params.num_tiles)) +
              number * kBytes) {}
  // A run of this CTA's query.
  __device__ static QueryPart of_run(const KernelParams& params, int run) {
    return {params, int64_t{params.splits.word(blockIdx.x)} * params.most_runs + run};
  }

  // A head's (base, sum), and its largest logit, which runs have not.
  __device__ float2& stats(int head) const {
    return reinterpret_cast<float2*>(base_ + kBytes)[head - C::kHeads];
  }
  __device__ float& largest(int head) const {
    return reinterpret_cast<float*>(base_ + kBytes)[head - 3 * C::kHeads];
  }
  __device__ __forceinline__ void write(int value_warp, int column, int lane,
                                        const float (&x)[kValues]) const {
    Values::write(base_, kLanes, place(value_warp, column, lane), x);
  }
  __device__ typename Values::Place values(int value_warp, int column, int lane) const {
    return {base_, kLanes, place(value_warp, column, lane)};
  }

 private:
  __device__ static int place(int value_warp, int column, int lane) {
    return (value_warp * kColumns + column) * kWarpSize + lane;
  }

  uint8_t* const base_;
};

// An item of the second grid: its heads and its parts.
template <class C>
struct ItemParts {
  static constexpr bool kOfTiles = C::kNeighbours;
  typename C::Item::Heads heads;
  int64_t first;
  int count;

  __device__ ItemParts(const KernelParams& params, unsigned item)
      : heads(C::Item::Heads::template of_item<C>(params, item)) {
    if constexpr (!kOfTiles) {
      count = C::Item::num_parts(params);
      first = int64_t{item} * count;
    }
  }
  // Finds a tile's parts, once the first grid is over. False: there is one, whose CTA wrote the output.
  __device__ bool find(const KernelParams& params, unsigned item) {
    const auto own = C::Item::parts_of(params, static_cast<int>(item));
    first = own.first, count = own.count;
    return count > 1;
  }
};

inline constexpr int kPartsMergeWarps = 4;

// The second grid: a warp merges a column of a value warp. While parts are not there yet, it rehearses with
// none: then its code is in the instruction cache, and addresses are known.
template <class C>
__global__ void __launch_bounds__(kPartsMergeWarps* kWarpSize)
    merge_parts_kernel(const __grid_constant__ KernelParams params) {
  using Part = QueryPart<C>;
  constexpr int kBlocksOfWarp = Part::kColumns / kPartsMergeWarps, kAtOnce = kWarpSize / 4;
  constexpr int kRounds = ceil_div(C::Item::kMostParts, kAtOnce);
  const SparseAttentionParams& p = params.p;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const unsigned item = blockIdx.x / (kBlocksOfWarp * kConsumerWarps);
  const int value_warp = blockIdx.x / kBlocksOfWarp % kConsumerWarps;
  const int column = blockIdx.x % kBlocksOfWarp * kPartsMergeWarps + threadIdx.x / kWarpSize;
  ItemParts<C> own(params, item);
  const auto& heads = own.heads;
  const int head = column / 2 * kOctetHeads + 2 * t + column % 2, first_chunk = value_warp / 4 * C::kChunks;
  const bool is_head = heads.has_head(p, head);
  let_next_grid_come();
  if (!heads.has_head(p, column / 2 * kOctetHeads)) return;
  if constexpr (own.kOfTiles) {
    wait_for_previous_grid();
    if (!own.find(params, item)) return;
  }
  const Part first(params, own.first);
  const typename Part::Values::Place values = first.values(value_warp, column, lane);
  const uint8_t* stats_of_g = reinterpret_cast<const uint8_t*>(&first.stats(head)) + g * Part::kBytes;
  uint16_t* out = reinterpret_cast<uint16_t*>(place_of_head(p, heads, head)) + first_chunk * kChunkDims +
                  value_warp % 4 * 16;
  keep_found(stats_of_g), keep_found(out);

  // A rehearsal takes 1 to 8 % of a call with CTAs of 64 heads, or where more blocks come than run at once.
  // Else it saves up to 4 %.
  constexpr unsigned kMostItems = 40;
  const bool rehearses =
      !own.kOfTiles && C::kHeads < 64 && gridDim.x <= kMostItems * kBlocksOfWarp * kConsumerWarps;
#pragma unroll 1
  for (int parts = rehearses ? 0 : own.count;; parts = own.count) {
    const bool is_rehearsal = parts == 0;
    if (!own.kOfTiles && !is_rehearsal) wait_for_previous_grid();
    float2 stats[kRounds];  // part g of each round
    float largest = -INFINITY;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      stats[round] = {kNoPartial, 0.0f};
      const int part = round * kAtOnce + g;
      if (part >= parts) continue;
      stats[round] = __ldcg(reinterpret_cast<const float2*>(stats_of_g + round * kAtOnce * Part::kBytes));
      if constexpr (C::kFindsLargest)
        if (p.max_logits) largest = fmaxf(largest, __ldcg(&Part(params, own.first + part).largest(head)));
    }
    typename Part::Values x[kAtOnce];
    const auto load = [&](int round) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int part = round * kAtOnce + i;
        x[i] = values.read(part * Part::kBytes, part < parts);
      }
    };
    load(0);
    __syncwarp();  // all loads are under way before any is waited for
    float max = stats[0].x, weights[kAtOnce], sum[Part::kValues] = {}, total = 0.0f;
#pragma unroll
    for (int round = 1; round < kRounds; ++round) max = fmaxf(max, stats[round].x);
    max = max_over_g(max);
    if constexpr (C::kRuns) {
      Part::Values::add_up(stats[0], max, t, x, total, sum);
    } else {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        if (round > 0 && round * kAtOnce >= parts) break;
        if (round > 0) load(round);
        const float weight = fast_exp2(stats[round].x - max);
        total += sum_over_g(stats[round].y * weight);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) weights[i] = __shfl_sync(kFullWarp, weight, 4 * i + t);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (round * kAtOnce + i < own.count) x[i].add_to(sum, weights[i]);
      }
    }
    const int of_q = heads.head_of(p, head);
    const float factor = is_head ? output_factor<typename C::R>(p, of_q, max, total) : 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const bool is_bf16 = first_chunk + chunk >= C::R::kFp8Chunks;
      const DimPair pair = pair_dims(is_bf16, g, output_value<C::kSegments>(sum[2 * chunk], factor),
                                     output_value<C::kSegments>(sum[2 * chunk + 1], factor));
      if (is_head && !is_rehearsal)
        *reinterpret_cast<uint32_t*>(out + chunk * kChunkDims + pair.dim) = pair.values;
    }
    if (is_rehearsal) continue;
    if (C::kFindsLargest && p.max_logits) largest = max_over_g(largest);
    if (value_warp == 0 && g == 0 && is_head)
      write_head(p, heads.query_of(p, head), of_q, max, total, largest);
    break;
  }
}

template <class C>
void launch_merge_parts(const KernelParams& params, gpuStream_t stream) {
  const int64_t items = params.num_tiles > 0
                            ? params.num_tiles
                            : params.p.num_tokens * ceil_div(params.p.num_q_heads, C::kHeads);
  launch(merge_parts_kernel<C>,
         {.grid = items * (kConsumerWarps * QueryPart<C>::kColumns / kPartsMergeWarps),
          .block = kPartsMergeWarps * kWarpSize,
          .stream = stream},
         params);
}

}  // namespace mla_fp8::gpu
