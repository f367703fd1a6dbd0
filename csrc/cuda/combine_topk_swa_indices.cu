// combine_topk_swa_indices on CUDA: one block per row, one 16-byte piece per thread, every output word
// written once. Traffic per row: reads topk, writes width int32. HBM-bound. The topk entries are on their way
// before the row's request is known; entries that turn out not to count are read in vain.
// The ragged form counts the kept entries of each row, sums the counts, then writes the rows: three launches.

#include "ops/combine_topk_swa_indices.h"

#include <algorithm>
#include <cstdint>

#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {
namespace {

constexpr int kRowsPerBlock = 8;  // of the ragged form, one warp each
constexpr int kBlock = kRowsPerBlock * kWarpSize;
constexpr int kPiece = 4;           // columns of one thread in one load
constexpr int kMaxRowBlock = 1024;  // threads; wider rows take several rounds

// kVector: rows in and out are 16-byte aligned.
template <bool kVector>
__device__ __forceinline__ Words<4> load_piece(const int32_t* entries, uint32_t column, uint32_t end) {
  const bool whole = kVector && column + kPiece <= end;
  Words<4> w = load_if<4>(entries + column, whole);
  if (!whole && column < end) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (column + i < end) w[i] = static_cast<uint32_t>(entries[column + i]);
  }
  return w;
}

}  // namespace

template <bool kVector>
__global__ void __launch_bounds__(kMaxRowBlock)
    combine_topk_swa_indices_kernel(const __grid_constant__ CombineTopkSwaIndicesParams p) {
  MLA_SHARED(TopkSwaRow, shared_row);
  const int64_t token = blockIdx.x;
  wait_for_previous_grid();
  const int32_t* entries = p.topk_indices + token * p.topk_indices_stride_token;
  int32_t* out = p.out_indices + token * p.out_indices_stride_token;

  // The columns fit int32, one round past them fits uint32.
  const uint32_t width = static_cast<uint32_t>(p.width), round = blockDim.x * kPiece;
  uint32_t column = threadIdx.x * kPiece;
  Words<4> piece = load_piece<kVector>(entries, column, static_cast<uint32_t>(p.topk));
  if (threadIdx.x < kWarpSize) {
    const TopkSwaRow row = topk_swa_row(p, token);
    if (threadIdx.x == 0) {
      shared_row = row;
      p.out_lens[token] = row.length;
    }
  }
  __syncthreads();
  const TopkSwaRow row = shared_row;

  while (column < width) {
    Words<4> w;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const int32_t c = static_cast<int32_t>(column) + i;
      const int32_t window = c >= row.window_begin && c < row.window_end ? row.window(c) : -1;
      w[i] = c < row.num_topk ? row.rebased(static_cast<int32_t>(piece[i])) : window;
    }
    if constexpr (kVector) {
      store(out + column, w, true);
    } else {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) out[column + i] = static_cast<int32_t>(w[i]);
    }
    column += round;
    if (column < width) piece = load_piece<kVector>(entries, column, row.num_topk);
  }
}

// ---- ragged -----------------------------------------------------------------------------------------------

using RaggedParams = CombineTopkSwaIndicesRaggedParams;

// A warp's next entries, one per lane and load: all loads are in flight before the first use.
constexpr int kEntryLoads = 8, kEntriesAtOnce = kEntryLoads * kWarpSize;
struct Entries {
  int32_t entry[kEntryLoads];
  uint32_t kept;  // bit i: entry[i] stays

  __device__ __forceinline__ Entries(const TopkSwaRow& row, const int32_t* entries, int32_t first, int lane)
      : kept(0) {
#pragma unroll
    for (int i = 0; i < kEntryLoads; ++i) {
      const int32_t c = first + i * kWarpSize + lane;
      entry[i] = c < row.num_topk ? entries[c] : -1;  // -1 is never kept
    }
#pragma unroll
    for (int i = 0; i < kEntryLoads; ++i) kept |= static_cast<uint32_t>(row.keeps(entry[i])) << i;
  }
};

__global__ void __launch_bounds__(kBlock)
    combine_ragged_count_kernel(const __grid_constant__ RaggedParams params) {
  const CombineTopkSwaIndicesParams& p = params.rows;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();
  const TopkSwaRow row = topk_swa_row(p, token);
  const int32_t* entries = p.topk_indices + token * p.topk_indices_stride_token;
  int32_t kept = 0;
  for (int32_t first = 0; first < row.num_topk; first += kEntriesAtOnce)
    kept += __popc(Entries(row, entries, first, lane).kept);
  kept = __reduce_add_sync(kFullWarp, kept);
  if (lane == 0) params.out_indptr[token + 1] = kept + row.window_end - row.window_begin;
}

constexpr int kScanWarps = 32;
constexpr int kScanBlock = kScanWarps * kWarpSize;
constexpr int kScanItems = 8;  // neighbouring counts of one thread

// Counts to offsets, in place, by one block.
__global__ void __launch_bounds__(kScanBlock)
    combine_ragged_sum_kernel(const __grid_constant__ RaggedParams params) {
  wait_for_previous_grid();
  int32_t* counts = params.out_indptr + 1;
  const int64_t num_tokens = params.rows.num_tokens;
  MLA_SHARED(int32_t, tile_sum);
  int32_t base = 0;
  for (int64_t first = 0; first < num_tokens; first += kScanBlock * kScanItems) {
    const int64_t mine = first + threadIdx.x * kScanItems;
    int32_t sums[kScanItems], sum = 0;
#pragma unroll
    for (int i = 0; i < kScanItems; ++i) sums[i] = sum += mine + i < num_tokens ? counts[mine + i] : 0;
    const int32_t inclusive = block_inclusive_sum<kScanWarps>(sum);
    if (threadIdx.x == kScanBlock - 1) tile_sum = inclusive;
#pragma unroll
    for (int i = 0; i < kScanItems; ++i)
      if (mine + i < num_tokens) counts[mine + i] = base + inclusive - sum + sums[i];
    __syncthreads();
    base += tile_sum;  // the next write of tile_sum is behind the barriers of the next sum
  }
  if (threadIdx.x == 0) params.out_indptr[0] = 0;
}

__global__ void __launch_bounds__(kBlock)
    combine_ragged_write_kernel(const __grid_constant__ RaggedParams params) {
  const CombineTopkSwaIndicesParams& p = params.rows;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();
  const TopkSwaRow row = topk_swa_row(p, token);
  const int32_t* entries = p.topk_indices + token * p.topk_indices_stride_token;
  int32_t* out = p.out_indices + params.out_indptr[token];
  const uint32_t lanes_below = (1u << lane) - 1;
  for (int32_t first = 0; first < row.num_topk; first += kEntriesAtOnce) {
    const Entries e(row, entries, first, lane);
#pragma unroll
    for (int i = 0; i < kEntryLoads; ++i) {
      const bool keep = e.kept >> i & 1;
      const uint32_t lanes = __ballot_sync(kFullWarp, keep);
      if (keep) out[__popc(lanes & lanes_below)] = row.rebased(e.entry[i]);
      out += __popc(lanes);
    }
  }
  for (int32_t c = row.window_begin + lane; c < row.window_end; c += kWarpSize)
    out[c - row.window_begin] = row.window(c);

  // The rows' shares of the capacity tile it: each fills what the end of the indices left of its share.
  const int64_t share = p.topk + p.window_size, total = params.out_indptr[p.num_tokens];
  for (int64_t i = max(token * share, total) + lane; i < (token + 1) * share; i += kWarpSize)
    p.out_indices[i] = -1;
}

namespace {

bool is_aligned(const int32_t* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % kPiece == 0;
}

}  // namespace

void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& p, gpuStream_t stream) {
  const int64_t block = std::clamp<int64_t>(p.width / kPiece, kWarpSize, kMaxRowBlock);  // width % 128 == 0
  const LaunchConfig config{.grid = p.num_tokens, .block = static_cast<int>(block), .stream = stream};
  const bool vector = is_aligned(p.topk_indices, p.topk_indices_stride_token) &&
                      is_aligned(p.out_indices, p.out_indices_stride_token);
  launch(vector ? combine_topk_swa_indices_kernel<true> : combine_topk_swa_indices_kernel<false>, config, p);
}

void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& p, gpuStream_t stream) {
  const int64_t num_blocks = ceil_div<int64_t>(p.rows.num_tokens, kRowsPerBlock);
  const LaunchConfig rows{.grid = num_blocks, .block = kBlock, .stream = stream};
  if (num_blocks > 0) launch(combine_ragged_count_kernel, rows, p);
  launch(combine_ragged_sum_kernel, {.grid = 1, .block = kScanBlock, .stream = stream}, p);
  if (num_blocks > 0) launch(combine_ragged_write_kernel, rows, p);
}

}  // namespace mla_fp8::gpu
