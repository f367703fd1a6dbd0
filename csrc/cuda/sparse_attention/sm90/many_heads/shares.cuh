#pragma once
// Tiles whose keys all CTAs of a grid share, as many as there are SMs. A tile gets CTAs by what its queries
// may see: the largest part of any is as small as they allow. So one long request among short ones has most
// of the GPU. Every CTA finds its own part, from the same numbers.
//
//   part    some blocks of a tile's keys: what one CTA takes. It writes the output of a tile that has no
//           other part, else it leaves (maximum, sum), largest logit and output of each row in the workspace
//   merge   a second grid adds up, in their order, what the parts of a tile have left
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// Blocks of keys that a part has at least: with fewer, its Q and its output would be most of its work.
inline constexpr int kShareBlockKeys = 64, kLeastBlocksOfPart = 2;

struct TileShare {
  int tile, part, num_parts;  // no parts: there is nothing to do
};

// What parts leave in the workspace. A part has the number of its CTA, those of a tile follow each other.
struct TileParts {
  float* base;
  int64_t rows, count;  // of a part, of all
  struct OfTile {
    int first, count;
  };
  __device__ explicit TileParts(const KernelParams& params)
      : base(params.p.workspace), rows(params.tile_rows), count(int64_t{params.share_ctas} * rows) {}
  __device__ float* out(int part, int row) const { return base + (part * rows + row) * kHeadDimV; }
  __device__ float2& stats(int part, int row) const {
    return reinterpret_cast<float2*>(base + count * kHeadDimV)[part * rows + row];
  }
  __device__ OfTile& of_tile(int tile) const {
    return reinterpret_cast<OfTile*>(base + count * (kHeadDimV + 2))[tile];
  }
  __device__ float& largest(int part, int row, int num_tiles) const {
    return base[count * (kHeadDimV + 2) + 2 * num_tiles + part * rows + row];
  }
};

// By all threads, with room in shared memory for an int a tile and a share behind them. A tile's keys are
// counted as what its first query sees and what the first query of each further request does.
template <int kThreads>
__device__ TileShare find_share(const KernelParams& params, uint8_t* room, int thread) {
  const SparseAttentionParams& p = params.p;
  const int num_tiles = params.num_tiles;
  auto* const blocks = reinterpret_cast<int*>(room);
  auto* const share = reinterpret_cast<TileShare*>(blocks + num_tiles);
  const auto blocks_seen_by = [&](int64_t query) {
    const KvScope& entries = p.scopes[1];
    const int64_t seen = entries.topk_length ? entries.topk_length[query] : entries.topk;
    return static_cast<int>(
        ceil_div(min(max(seen, int64_t{0}), entries.topk) + p.scopes[0].topk, int64_t{kShareBlockKeys}));
  };
  for (int tile = thread; tile < num_tiles; tile += kThreads) blocks[tile] = 0;
  block_barrier<kThreads>();
  // The first threads take tiles, the last requests: their loads are on their way together. All that will be
  // asked of the requests is in the L1 then.
  for (int tile = thread; tile < num_tiles; tile += kThreads)
    atomicAdd(blocks + tile, blocks_seen_by(int64_t{tile / params.num_head_blocks()} * params.tile_queries));
  for (int64_t i = kThreads - 1 - thread; i < p.window.num_requests; i += kThreads) {
    prefetch_l1(p.window.seq_lens + i);
    const int64_t first = int64_t{p.window.query_start_loc[i]} - p.window.query_start_loc[0];
    if (first > 0 && first < p.num_tokens && first % params.tile_queries != 0)
      atomicAdd(blocks + first / params.tile_queries, blocks_seen_by(first));
  }
  block_barrier<kThreads>();
  if (thread < kWarpSize) {
    const int cta = blockIdx.x, num_ctas = gridDim.x, lane = thread;
    int most = 0, total = 0;
    for (int tile = lane; tile < num_tiles; tile += kWarpSize)
      most = max(most, blocks[tile]), total += blocks[tile];
    most = __reduce_max_sync(kFullWarp, most), total = lanes_sum(total);
    const auto num_parts = [&](int tile, int size) {
      return tile < num_tiles ? max(ceil_div(blocks[tile], size), 1) : 0;
    };
    // The least size for which the CTAs are enough: that of the longest tile always is one.
    int size = max(max(ceil_div(total, num_ctas), ceil_div(most, kMaxTileParts)), kLeastBlocksOfPart);
    for (int enough = max(size, most); size < enough;) {
      const int between = (size + enough) / 2;
      int count = 0;
      for (int tile = lane; tile < num_tiles; tile += kWarpSize) count += num_parts(tile, between);
      if (lanes_sum(count) <= num_ctas) enough = between;
      else size = between + 1;
    }
    if (lane == 0) *share = {};
    __syncwarp();
    int before = 0;  // CTAs of the tiles before these
    for (int first = 0; first < num_tiles; first += kWarpSize) {
      const int tile = first + lane, parts = num_parts(tile, size);
      const int end = before + warp_inclusive_sum(parts), part = cta - (end - parts);
      if (part >= 0 && part < parts) {
        *share = {tile, part, parts};
        if (part == 0) TileParts(params).of_tile(tile) = {cta, parts};
      }
      before = __shfl_sync(kFullWarp, end, kWarpSize - 1);
    }
  }
  block_barrier<kThreads>();
  return *share;
}

// A warp takes kMergeDims dims of a head of a query.
inline constexpr int kMergeDims = 4 * kWarpSize, kMergeWarps = kHeadDimV / kMergeDims, kMergeAtOnce = 8;

template <class R>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    merge_parts_kernel(const __grid_constant__ KernelParams params) {
  const SparseAttentionParams& p = params.p;
  const TileParts parts(params);
  const int lane = threadIdx.x % kWarpSize, dim = static_cast<int>(threadIdx.x) * 4;
  const auto query = static_cast<int>(blockIdx.x) / p.num_q_heads;
  const int head = static_cast<int>(blockIdx.x) - query * p.num_q_heads;
  const int block = head / params.tile_rows;  // of its heads, where a tile has no more
  const int tile =
      params.tile_queries > 1 ? query / params.tile_queries : query * params.num_head_blocks() + block;
  const int row = params.tile_queries > 1 ? query % params.tile_queries * p.num_q_heads + head
                                          : head - block * params.tile_rows;
  wait_for_previous_grid();
  const TileParts::OfTile own = parts.of_tile(tile);
  if (own.count == 1) return;

  float2 stats = {kNoPartial, 0.0f};  // lane i: of part i
  float largest = -INFINITY;
  static_assert(kMaxTileParts <= kWarpSize);
  if (lane < own.count) {
    stats = parts.stats(own.first + lane, row);
    if (p.max_logits) largest = parts.largest(own.first + lane, row, params.num_tiles);
  }
  float max = stats.x;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  const float weight = fast_exp2(stats.x - max);
  float total = stats.y * weight;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullWarp, total, offset);

  float4 sum{};
  for (int first = 0; first < own.count; first += kMergeAtOnce) {
    float4 x[kMergeAtOnce];
#pragma unroll
    for (int i = 0; i < kMergeAtOnce; ++i)
      x[i] = first + i < own.count
                 ? *reinterpret_cast<const float4*>(parts.out(own.first + first + i, row) + dim)
                 : float4{};
#pragma unroll
    for (int i = 0; i < kMergeAtOnce; ++i)
      add(sum, x[i], __shfl_sync(kFullWarp, weight, min(first + i, own.count - 1)));
  }
  *reinterpret_cast<uint2*>(p.out + query * p.out_stride_token + head * p.out_stride_head + dim) =
      to_bf16<false>(sum, output_factor<R>(p, head, max, total));
  if (threadIdx.x == 0) write_head(p, query, head, max, total, largest);
}

template <class R>
void launch_merge_parts(const KernelParams& params, gpuStream_t stream) {
  launch(merge_parts_kernel<R>,
         {.grid = params.p.num_tokens * params.p.num_q_heads,
          .block = kMergeWarps * kWarpSize,
          .stream = stream},
         params);
}

}  // namespace mla_fp8::gpu
