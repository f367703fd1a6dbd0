// combine_topk_swa_indices on CUDA: one warp a row; each word of the output is written once. HBM-bound: topk
// int32 read, width written a row. A row's topk entries are loaded before its request is known; those that do
// not count are read in vain.
//
// The ragged form places each row behind all rows before it, in the pass that writes it. A launch before that
// resets the words in which blocks tell each other their sums.

#include "ops/combine_topk_swa_indices.h"

#include <cstdint>

#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct CombineArgs {
  CombineTopkSwaIndicesParams p;
  Divider compress_ratio;

  explicit CombineArgs(const CombineTopkSwaIndicesParams& params)
      : p(params), compress_ratio(params.compress_ratio) {}
};

struct CombineRaggedArgs {
  CombineArgs rows;
  int64_t capacity;
  int32_t* out_indptr;
};

namespace {

constexpr int kRowBlock = kWaveSize;  // a block is a wave, so that a row waits for no other
constexpr int kPiece = 4;             // columns of a lane in one load
// Loads in flight: 1152 columns in a round; 640 on AMD's GPUs, where the library has to stay small.
constexpr int kPieces = MLA_FP8_WAVE64 ? 5 : 9;
constexpr int kPieceStride = kPiece * kWarpSize;

// The row `token`, as topk_swa_row finds it, by a warp. Each lane computes what the row would be if its
// request had the token. So the row is one memory access away, not one for each step of a search.
__device__ __forceinline__ TopkSwaRow find_row(const CombineArgs& args, int64_t token) {
  const CombineTopkSwaIndicesParams& p = args.p;
  const int32_t* starts = p.query_start_loc;
  const int lane = threadIdx.x % kWarpSize;
  int64_t first = 0, end = p.num_requests;
  bisect(first, end, int64_t{kWarpSize},
         [&](int64_t request) { return starts[request] <= token + starts[0]; });

  TopkSwaRequest request;
  bool has_started = false;
  if (first + lane < end) {
    request = topk_swa_request(p, first + lane);
    has_started = starts[first + lane] <= token + request.query_origin;
  }
  const TopkSwaRow row = topk_swa_row(p, token, request, args.compress_ratio);
  const uint32_t started = __ballot_sync(kFullWarp, has_started);
  int low = max(__popc(started) - 1, 0);
  if ((started & (started + 1)) != 0) {  // query_start_loc decreases: the same choice as the CPU's
    low = 0;
    int high = static_cast<int>(end - first);
    bisect(low, high, 1, [started](int i) { return (started >> i & 1) != 0; });
  }
  return broadcast(row, low);
}

// kVector: rows of the input and the output are 16-byte aligned.
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
__global__ void __launch_bounds__(kRowBlock)
    combine_topk_swa_indices_kernel(const __grid_constant__ CombineArgs args) {
  const CombineTopkSwaIndicesParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * (kRowBlock / kWarpSize) + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();
  const int32_t* entries = p.topk_indices + token * p.topk_indices_stride_token;
  int32_t* out = p.out_indices + token * p.out_indices_stride_token;

  // Columns fit int32; one round past them fits uint32.
  const uint32_t width = static_cast<uint32_t>(p.width);
  Words<4> pieces[kPieces];
  const auto load_round = [&](uint32_t first, uint32_t end) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = load_piece<kVector>(entries, first + i * kPieceStride, end);
  };
  uint32_t first = lane * kPiece;
  load_round(first, static_cast<uint32_t>(p.topk));
  const TopkSwaRow row = find_row(args, token);
  if (lane == 0) p.out_lens[token] = row.length;

  while (true) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t column = first + i * kPieceStride;
      if (column >= width) return;
      Words<4> w;
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        const int32_t c = static_cast<int32_t>(column) + k;
        const int32_t window = c >= row.window_begin && c < row.window_end ? row.window(c) : -1;
        w[k] = c < row.num_topk ? row.rebased(static_cast<int32_t>(pieces[i][k])) : window;
      }
      if constexpr (kVector) {
        store(out + column, w, true);
      } else {
#pragma unroll
        for (int k = 0; k < kPiece; ++k) out[column + k] = static_cast<int32_t>(w[k]);
      }
    }
    first += kPieces * kPieceStride;
    load_round(first, row.num_topk);
  }
}

// ---- ragged -----------------------------------------------------------------------------------------------

constexpr int kRowsPerBlock = 16;  // one warp each
constexpr int kBlock = kRowsPerBlock * kWarpSize;

// A warp's next entries, one a lane and load. All loads are in flight before the first use.
constexpr int kEntryLoads = 8, kEntriesAtOnce = kEntryLoads * kWarpSize;
struct Entries {
  int32_t entry[kEntryLoads];
  uint32_t kept;  // bit i: entry[i] is kept

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

// A tile (a block's rows) tells later tiles how far it is, in the word of out_indptr behind its last row. The
// word is kNothing, then ~(the entries of its rows), then its final value, the entries of all rows so far. A
// word alone needs no order of accesses. out_indptr[0] counts the tiles that have begun, until all have.
constexpr int32_t kNothing = INT32_MIN;

__device__ __forceinline__ volatile int32_t* tile_state(const CombineRaggedArgs& args, int64_t tile) {
  return args.out_indptr + min((tile + 1) * kRowsPerBlock, args.rows.p.num_tokens);
}

__global__ void __launch_bounds__(kBlock)
    combine_ragged_reset_kernel(const __grid_constant__ CombineRaggedArgs args) {
  wait_for_previous_grid();
  const int64_t i = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (i <= args.rows.p.num_tokens) args.out_indptr[i] = i == 0 ? 0 : kNothing;
}

// The entries of all tiles before `tile`, by a warp. It waits only for tiles that began earlier.
__device__ __forceinline__ int32_t entries_before(const CombineRaggedArgs& args, int64_t tile) {
  constexpr int kLooks = 8;
  const int lane = threadIdx.x % kWarpSize;
  int32_t sum = 0;
  for (int64_t last = tile - 1; last >= 0; last -= kLooks * kWarpSize) {
    int32_t states[kLooks];
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int64_t other = last - i * kWarpSize - lane;
      states[i] = other >= 0 ? *tile_state(args, other) : 0;
    }
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      while (states[i] == kNothing) states[i] = *tile_state(args, last - i * kWarpSize - lane);
      const uint32_t complete = __ballot_sync(kFullWarp, states[i] >= 0);
      const uint32_t wanted = complete ^ (complete - 1);  // up to the nearest complete one; all if none is
      const int32_t entries = states[i] >= 0 ? states[i] : ~states[i];
      sum += __reduce_add_sync(kFullWarp, wanted >> lane & 1 ? entries : 0);
      if (complete) return sum;
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kBlock, 3)
    combine_ragged_kernel(const __grid_constant__ CombineRaggedArgs args) {
  const CombineTopkSwaIndicesParams& p = args.rows.p;
  using Counts = int32_t[kRowsPerBlock];
  MLA_SHARED(int32_t, shared_tile);
  MLA_SHARED(int32_t, shared_before);
  MLA_SHARED(Counts, counts);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  wait_for_previous_grid();
  if (threadIdx.x == 0) {  // blocks may begin in any order
    shared_tile = atomicAdd(args.out_indptr, 1);
    if (shared_tile == (p.num_tokens - 1) / kRowsPerBlock) args.out_indptr[0] = 0;
  }
  __syncthreads();
  const int64_t tile = shared_tile, token = tile * kRowsPerBlock + warp;
  const bool exists = token < p.num_tokens;

  const TopkSwaRow row = exists ? find_row(args.rows, token) : TopkSwaRow{};
  const int32_t* entries = p.topk_indices + token * p.topk_indices_stride_token;
  int32_t count = 0;
  for (int32_t first = 0; first < row.num_topk; first += kEntriesAtOnce)
    count += __popc(Entries(row, entries, first, lane).kept);
  count = __reduce_add_sync(kFullWarp, count) + row.window_end - row.window_begin;
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int32_t begin = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kRowsPerBlock; ++w) {
    if (w < warp) begin += counts[w];
    total += counts[w];
  }
  if (warp == 0) {
    if (lane == 0) *tile_state(args, tile) = ~total;
    const int32_t before = entries_before(args, tile);
    if (lane == 0) {
      *tile_state(args, tile) = before + total;
      shared_before = before;
    }
  }
  __syncthreads();
  if (!exists) return;
  begin += shared_before;
  if (lane == 0) args.out_indptr[token + 1] = begin + count;  // of the tile's last row: again the same

  int32_t* out = p.out_indices + begin;
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

  // The capacity that rows up to this one leave of their shares is filled from its end down.
  const int64_t share = p.topk + p.window_size, fill_end = args.capacity - token * share + begin;
  for (int64_t i = fill_end - share + count + lane; i < fill_end; i += kWarpSize) p.out_indices[i] = -1;
}

namespace {

bool is_aligned(const int32_t* p, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % kPiece == 0;
}

}  // namespace

void combine_topk_swa_indices(const CombineTopkSwaIndicesParams& p, gpuStream_t stream) {
  const int64_t num_blocks = ceil_div<int64_t>(p.num_tokens, kRowBlock / kWarpSize);
  const LaunchConfig config{.grid = num_blocks, .block = kRowBlock, .stream = stream};
  const bool vector = is_aligned(p.topk_indices, p.topk_indices_stride_token) &&
                      is_aligned(p.out_indices, p.out_indices_stride_token);
  launch(vector ? combine_topk_swa_indices_kernel<true> : combine_topk_swa_indices_kernel<false>, config,
         CombineArgs(p));
}

void combine_topk_swa_indices_ragged(const CombineTopkSwaIndicesRaggedParams& p, gpuStream_t stream) {
  const CombineRaggedArgs args{CombineArgs(p.rows), p.capacity, p.out_indptr};
  const int64_t num_tokens = p.rows.num_tokens;
  launch(combine_ragged_reset_kernel,
         {.grid = ceil_div<int64_t>(num_tokens + 1, kBlock), .block = kBlock, .stream = stream}, args);
  if (num_tokens > 0)
    launch(combine_ragged_kernel,
           {.grid = ceil_div<int64_t>(num_tokens, kRowsPerBlock), .block = kBlock, .stream = stream}, args);
}

}  // namespace mla_fp8::gpu
