// build_swa_token_ids on CUDA: one thread an id. Each block sums requests' lengths up to its own ids itself,
// a tile of requests at a time. So one launch is enough, and shared memory does not grow with the batch.
// Bound by the latency of two dependent table loads.

#include "ops/build_swa_token_ids.h"

#include <cstdint>

#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {
namespace {

constexpr int kWarps = 8;
constexpr int kBlock = kWarps * kWarpSize;  // also the requests of a tile

using Begins = int64_t[kBlock];  // the first id of each request of the tile

// The last request of the tile that begins at or before `offset`. An empty request begins where the next one
// does, so the last one has the id.
__device__ __forceinline__ int find_in_tile(const Begins& begins, int64_t offset) {
  int low = 0;
#pragma unroll
  for (int step = kBlock / 2; step > 0; step /= 2)
    if (begins[low + step] <= offset) low += step;
  return low;
}

}  // namespace

__global__ void __launch_bounds__(kBlock)
    build_swa_token_ids_kernel(const __grid_constant__ BuildSwaTokenIdsParams p) {
  wait_for_previous_grid();
  MLA_SHARED(Begins, begins);
  MLA_SHARED(int64_t, tile_end);
  const bool writes_requests = blockIdx.x == 0;
  const int64_t first_id = int64_t{blockIdx.x} * kBlock, i = first_id + threadIdx.x;

  int64_t base = 0;  // ids before the tile
  for (int64_t tile = 0; tile < p.num_requests && (writes_requests || base < first_id + kBlock);
       tile += kBlock) {
    const int64_t r = tile + threadIdx.x;
    const int64_t len = r < p.num_requests ? swa_gather_len(p, r) : 0;
    const int64_t end = base + block_inclusive_sum<kWarps>(len);
    begins[threadIdx.x] = end - len;
    if (threadIdx.x == kBlock - 1) tile_end = end;
    __syncthreads();
    if (writes_requests && r < p.num_requests) {
      p.first_pos[r] = static_cast<int32_t>(p.seq_lens[r] - len);
      p.gather_lens[r] = static_cast<int32_t>(len);
      p.offsets[r + 1] = static_cast<int32_t>(min(end, int64_t{INT32_MAX}));
    }
    if (i < p.capacity && i >= base && i < tile_end) {
      const int found = find_in_tile(begins, i);
      const int64_t owner = tile + found;
      const int64_t first_pos = p.seq_lens[owner] - swa_gather_len(p, owner);
      const int64_t pool_row = load_index(p.req_pool_indices, p.req_pool_indices_are_int64, owner);
      p.ids[i] = swa_token_id(p, pool_row, first_pos + i - begins[found]);
    }
    base = tile_end;
    __syncthreads();  // before the next tile overwrites the offsets
  }
  if (i < p.capacity && i >= base) p.ids[i] = -1;
  if (writes_requests && threadIdx.x == 0) p.offsets[0] = 0;
}

void build_swa_token_ids(const BuildSwaTokenIdsParams& p, gpuStream_t stream) {
  const int64_t num_blocks = p.capacity > 0 ? ceil_div<int64_t>(p.capacity, kBlock) : 1;
  launch(build_swa_token_ids_kernel, {.grid = num_blocks, .block = kBlock, .stream = stream}, p);
}

}  // namespace mla_fp8::gpu
