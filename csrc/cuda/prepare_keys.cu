// prepare_keys on CUDA, one launch. A warp takes a latent (insert_latent.cuh), or a row of q_a, held in
// registers, or four of the indexer's keys, eight lanes a key (index_row.cuh). HBM-bound: a token is 1152
// bytes read and a row written, q_a twice, 256 bytes read and 132 written. Few tokens: one row's latency.

#include "ops/prepare_keys.h"

#include "cuda/index_rope.cuh"
#include "cuda/index_row.cuh"
#include "cuda/insert_latent.cuh"

namespace mla_fp8::gpu {

struct PrepareKeysArgs {
  PrepareKeysParams p;
  Divider page_size, index_page_size;
  int64_t latents, queries;  // warps of the first two kinds
};

inline constexpr int kKeysWarps = 4;
inline constexpr int kKeysBlock = kKeysWarps * kWarpSize;
inline constexpr int kQaPasses = kMaxQaDim / kPassDim;
inline constexpr int kKeysOfWarp = kWarpSize / kIndexLanes;
inline constexpr int kKeysBlocksPerSm = 5;  // 96 registers

// RMSNorm of q_a. Order of the sum: a lane's eight elements of each pass (fma), then halves of the 32 sums.
__device__ __forceinline__ void norm_q_a(const QaNormParams& p, int64_t token) {
  const int lane = threadIdx.x % kWarpSize;
  const int dim = static_cast<int>(p.dim);
  Words<4> x[kQaPasses];
  wait_for_previous_grid();
#pragma unroll
  for (int pass = 0; pass < kQaPasses; ++pass) {
    const int element = pass * kPassDim + lane * kChunk;
    x[pass] = load_if<4>(p.q_a + token * p.q_a_stride_token + element, element < dim);
  }
  float total = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kQaPasses; ++pass) {
    const Floats8 v = unpack8(x[pass]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) total = fmaf(v.x[i], v.x[i], total);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, offset));
  const float factor = __frsqrt_rn(__fadd_rn(__fdiv_rn(total, static_cast<float>(dim)), p.eps));
#pragma unroll
  for (int pass = 0; pass < kQaPasses; ++pass) {
    const int element = pass * kPassDim + lane * kChunk;
    if (element >= dim) break;
    const Floats8 w = Weights8(p.weight, p.weight_is_float, element).unpack(p.weight_is_float);
    Floats8 v = unpack8(x[pass]);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) v.x[i] = __fmul_rn(__fmul_rn(v.x[i], factor), w.x[i]);
    store(p.out_q_a + token * p.out_q_a_stride_token + element, pack8(v));
  }
}

// The sum of 128 elements in eight lanes: a tree over eight neighbours, then halves of the sixteen sums.
__device__ __forceinline__ float sum_of_row(const Floats8 (&x)[kIndexChunks]) {
  float sums[kIndexChunks];
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    const float* v = x[c].x;
    sums[c] = __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[1]), __fadd_rn(v[2], v[3])),
                        __fadd_rn(__fadd_rn(v[4], v[5]), __fadd_rn(v[6], v[7])));
    sums[c] = __fadd_rn(sums[c], __shfl_xor_sync(kFullWarp, sums[c], 4));
  }
  float total = __fadd_rn(sums[0], sums[1]);
  total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 2));
  return __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 1));
}

// (x - mean) / sqrt(variance + eps) * weight + bias. 1 / sqrt is correctly rounded, and so is each step.
__device__ __forceinline__ void layer_norm(const IndexKeyParams& p, const Weights8 (&weight)[kIndexChunks],
                                           const Weights8 (&bias)[kIndexChunks], IndexRow& row) {
  Floats8 x[kIndexChunks], squares[kIndexChunks];
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) x[c] = unpack8(row.x[c]);
  const float mean = __fmul_rn(sum_of_row(x), 1.0f / kIndexDim);
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c)
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[c].x[i] = __fsub_rn(x[c].x[i], mean);
      squares[c].x[i] = __fmul_rn(x[c].x[i], x[c].x[i]);
    }
  const float factor = __frsqrt_rn(__fadd_rn(__fmul_rn(sum_of_row(squares), 1.0f / kIndexDim), p.eps));
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    const Floats8 w = weight[c].unpack(p.weight_is_float), b = bias[c].unpack(p.weight_is_float);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[c].x[i] = __fmul_rn(__fmul_rn(x[c].x[i], factor), w.x[i]);
      if (p.bias != nullptr) x[c].x[i] = __fadd_rn(x[c].x[i], b.x[i]);
    }
    row.x[c] = pack8(x[c]);
  }
}

__device__ __forceinline__ void insert_index_key(const PrepareKeysArgs& args, int64_t first) {
  const IndexKeyParams& p = args.p.index;
  const int64_t token = first + static_cast<int>(threadIdx.x % kWarpSize) / kIndexLanes;
  const bool exists = token < p.num_insert;  // lanes without a key go on: they shuffle
  const int64_t at = exists ? token : 0;
  wait_for_previous_grid();
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, at);
  const Position position = load_position(p.table, at);
  IndexRow row;
  Weights8 weight[kIndexChunks], bias[kIndexChunks]{};
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    row.x[c] = load_if<4>(p.k + at * p.k_stride_token + IndexRow::element(c), true);
    weight[c] = {p.weight, p.weight_is_float, IndexRow::element(c)};
    if (p.bias != nullptr) bias[c] = {p.bias, p.weight_is_float, IndexRow::element(c)};
  }
  const IndexRotation rotation(p.table, position, p.is_neox, p.first_dim);
  CacheRow to = find_row(p, args.index_page_size, slot);
  to.valid &= exists && position.valid;
  layer_norm(p, weight, bias, row);
  rotation.rotate(row);
  if (p.hadamard) hadamard(row);
  if (p.layout == IndexLayoutId::kIndexFp8)
    write_index_key<IndexLayoutId::kIndexFp8>(to, p.page_size, encode_index_fp8(p.scaling, row));
  else write_index_key<IndexLayoutId::kIndexFp4>(to, p.page_size, encode_index_fp4(p.scaling, row));
}

template <KvLayoutId kId>
__global__ void __launch_bounds__(kKeysBlock, kKeysBlocksPerSm)
    prepare_keys_kernel(const __grid_constant__ PrepareKeysArgs args) {
  int64_t unit = int64_t{blockIdx.x} * kKeysWarps + threadIdx.x / kWarpSize;
  if (unit < args.latents) return insert_latent<kId, true>(args.p.latents, args.page_size, unit);
  unit -= args.latents;
  if (unit < args.queries) return norm_q_a(args.p.queries, unit);
  unit = (unit - args.queries) * kKeysOfWarp;
  if (unit < args.p.index.num_insert) insert_index_key(args, unit);
}

void prepare_keys(const PrepareKeysParams& p, gpuStream_t stream) {
  const bool keeps = p.latents.out_kv != nullptr;
  const int64_t latents = keeps ? p.latents.num_tokens : p.latents.num_insert;
  const int64_t queries = p.queries.dim > 0 ? p.latents.num_tokens : 0;
  const int64_t warps = latents + queries + ceil_div<int64_t>(p.index.num_insert, kKeysOfWarp);
  const LaunchConfig config{
      .grid = ceil_div<int64_t>(warps, kKeysWarps), .block = kKeysBlock, .stream = stream};
  if (config.grid == 0) return;
  const PrepareKeysArgs args{p, Divider(p.latents.page_size),
                             Divider(p.index.page_size > 0 ? p.index.page_size : 1), latents, queries};
  with_kv_layout(p.latents.layout, [&](auto id) { launch(prepare_keys_kernel<id>, config, args); });
}

}  // namespace mla_fp8::gpu
