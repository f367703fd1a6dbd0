#pragma once
// Deals the keys of all tiles to the CTAs of a grid, at most one per SM. A tile gets CTAs by what its queries
// may see, such that the largest part is as small as can be. So one long request among short ones has most of
// the GPU. Every CTA finds its own part from the same numbers.
//
// A part is a range of blocks of a tile's keys, and has one CTA. It writes the output of a tile without other
// parts, else it leaves its part of the result for a second grid (parts.cuh).
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// Keys of a block; fewest blocks of a part: with fewer, its Q and its output would be most of its work.
inline constexpr int kShareBlockKeys = 64, kLeastBlocksOfPart = 2;

struct TileShare {
  int tile, part, num_parts;  // num_parts 0: there is nothing to do
};

// The parts of a tile, numbered as their CTAs. A table of these lies in the workspace before all parts.
struct PartsOfTile {
  int first, count;
};
__device__ inline PartsOfTile& parts_of_tile(const KernelParams& params, int tile) {
  return reinterpret_cast<PartsOfTile*>(params.p.workspace)[tile];
}

// All threads call it; `room` in shared memory is for an int a tile, and a share. A tile's keys are counted
// as what its first query sees, and what the first query of each further request in it sees.
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
  // The first threads take tiles, the last requests, so that their loads go on together. They bring to L1
  // what will be asked of the requests.
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
    // Finds the least size of parts for which the CTAs are enough. The size of the longest tile always is.
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
        if (part == 0) parts_of_tile(params, tile) = {cta, parts};
      }
      before = __shfl_sync(kFullWarp, end, kWarpSize - 1);
    }
  }
  block_barrier<kThreads>();
  return *share;
}

}  // namespace mla_fp8::gpu
