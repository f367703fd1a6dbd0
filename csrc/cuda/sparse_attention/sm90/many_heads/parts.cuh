#pragma once
// CTAs that share a query without a cluster. Clusters leave SMs without work: on 132 SMs 15 of eight CTAs
// run at once, or 17 of six. Here any number of CTAs shares a query. Each leaves a part of its result in the
// workspace, and a second grid adds them up in the order of the keys.
//
// A value warp leaves its accumulators as they lie in its registers: a lane has eight values of a head, which
// become f16 times a power of two of their own.
#include "cuda/device/convert.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"

namespace mla_fp8::gpu {

// A column: of each octet of heads the lanes with one t have heads 2t and 2t + 1.
template <int kHeads>
class QueryPart {
 public:
  static constexpr int kColumns = kHeads / 4, kValues = 8;  // of a lane; of a column
  static_assert(kHeads * (2 * kHeadDimV + kHeadDimV / kValues + 8) == kHeads * kFloatsOfQueryPart * 4);

  // The `number`-th of all.
  __device__ QueryPart(const SparseAttentionParams& p, int64_t number)
      : base_(reinterpret_cast<uint8_t*>(p.workspace) + number * (kHeads * kFloatsOfQueryPart * 4)) {}

  // (base, sum) of a head.
  __device__ float2& stats(int head) const {
    return reinterpret_cast<float2*>(base_ + kHeads * (2 * kHeadDimV + kHeadDimV / kValues))[head];
  }
  __device__ __forceinline__ void write(int value_warp, int column, int lane,
                                        const float (&x)[kValues]) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, kLeastExponent);
    const float factor = __uint_as_float((kLargest + 2 * 127 - exponent) << 23);
    const int at = place(value_warp, column, lane);
    values()[at] = {pack_f16(x[0] * factor, x[1] * factor), pack_f16(x[2] * factor, x[3] * factor),
                    pack_f16(x[4] * factor, x[5] * factor), pack_f16(x[6] * factor, x[7] * factor)};
    exponents()[at] = static_cast<uint8_t>(exponent);
  }

  // What was written, and what it is to be multiplied by.
  struct Written {
    uint4 values;
    uint32_t exponent;
    __device__ float factor() const { return __uint_as_float((exponent - kLargest) << 23); }
  };
  __device__ __forceinline__ Written read(int value_warp, int column, int lane) const {
    const int at = place(value_warp, column, lane);
    return {values()[at], exponents()[at]};
  }

 private:
  static constexpr uint32_t kLargest = 14, kLeastExponent = 16;  // f16 below 2^15; both factors are normal

  __device__ static int place(int value_warp, int column, int lane) {
    return (value_warp * kColumns + column) * kWarpSize + lane;
  }
  __device__ uint4* values() const { return reinterpret_cast<uint4*>(base_); }
  __device__ uint8_t* exponents() const { return base_ + kHeads * 2 * kHeadDimV; }

  uint8_t* const base_;
};

inline constexpr int kPartsMergeWarps = 4;

// A warp: a column of a value warp.
template <class C>
__global__ void __launch_bounds__(kPartsMergeWarps* kWarpSize)
    merge_query_parts_kernel(const __grid_constant__ KernelParams params) {
  using Part = QueryPart<C::kHeads>;
  constexpr int kBlocksOfWarp = Part::kColumns / kPartsMergeWarps;
  const SparseAttentionParams& p = params.p;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const unsigned item = blockIdx.x / (kBlocksOfWarp * kConsumerWarps);
  const int value_warp = blockIdx.x / kBlocksOfWarp % kConsumerWarps;
  const int column = blockIdx.x % kBlocksOfWarp * kPartsMergeWarps + threadIdx.x / kWarpSize;
  const QueryHeads heads = heads_of_item<C>(params, item);
  const int head = column / 2 * kOctetHeads + 2 * t + column % 2, splits = params.num_splits();
  wait_for_previous_grid();
  if (!heads.has_head(p, column / 2 * kOctetHeads)) return;
  const auto part = [&](int i) { return Part(p, int64_t{item} * splits + i); };

  static_assert(kMostQueryParts == kWarpSize / 4);
  float2 stats = {kNoPartial, 0.0f};  // of part g
  if (g < splits) stats = part(g).stats(head);
  typename Part::Written x[kMostQueryParts];
#pragma unroll
  for (int i = 0; i < kMostQueryParts; ++i)
    if (i < splits) x[i] = part(i).read(value_warp, column, lane);
  const float max = max_over_g(stats.x), weight = fast_exp2(stats.x - max);
  const float total = sum_over_g(stats.y * weight);
  float sum[Part::kValues] = {};
#pragma unroll
  for (int i = 0; i < kMostQueryParts; ++i) {
    if (i >= splits) break;
    const float factor = __shfl_sync(kFullWarp, weight, 4 * i + t) * x[i].factor();
    const uint32_t words[] = {x[i].values.x, x[i].values.y, x[i].values.z, x[i].values.w};
#pragma unroll
    for (int j = 0; j < Part::kValues / 2; ++j) {
      const float2 pair = unpack<Dtype::kF16>(words[j]);
      sum[2 * j] = fmaf(pair.x, factor, sum[2 * j]), sum[2 * j + 1] = fmaf(pair.y, factor, sum[2 * j + 1]);
    }
  }
  const bool is_head = heads.has_head(p, head);
  const int first_chunk = value_warp / 4 * C::kChunks;
  const float factor = output_factor<typename C::R>(p, heads.first_head + head, max, total);
  uint16_t* const out = p.out + heads.query * p.out_stride_token +
                        (heads.first_head + head) * p.out_stride_head + first_chunk * kChunkDims +
                        value_warp % 4 * 16;
#pragma unroll
  for (int chunk = 0; chunk < C::kChunks; ++chunk) {
    const bool is_bf16 = first_chunk + chunk >= C::R::kFp8Chunks;
    const DimPair pair = pair_dims(is_bf16, g, sum[2 * chunk] * factor, sum[2 * chunk + 1] * factor);
    if (is_head) *reinterpret_cast<uint32_t*>(out + chunk * kChunkDims + pair.dim) = pair.values;
  }
  if (value_warp == 0 && g == 0 && is_head)
    write_head(p, heads.query, heads.first_head + head, max, total, -INFINITY);
}

template <class C>
void launch_merge_query_parts(const KernelParams& params, gpuStream_t stream) {
  const int64_t items = params.p.num_tokens * ceil_div(params.p.num_q_heads, C::kHeads);
  launch(merge_query_parts_kernel<C>,
         {.grid = items * (kConsumerWarps * QueryPart<C::kHeads>::kColumns / kPartsMergeWarps),
          .block = kPartsMergeWarps * kWarpSize,
          .stream = stream},
         params);
}

}  // namespace mla_fp8::gpu
