// topk_to_slots on CUDA. A block takes a piece of a row, four columns a thread, whose lookups are in flight
// together. HBM-bound: a row is topk int32 read, width written, and the page table's entries that it needs.

#include "ops/topk_to_slots.h"

#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct TopkToSlotsArgs {
  TopkToSlotsParams p;
  Divider page_size, group_size, turn, pieces;  // pieces: of a row
};

namespace {

constexpr int kSlotsBlock = 256;
constexpr int kColumnsAtOnce = 4;
constexpr int kPieceColumns = kSlotsBlock * kColumnsAtOnce;

// The index behind the last position that is not negative.
__device__ __forceinline__ int64_t find_last(const int32_t* positions, int64_t topk) {
  struct Last {
    uint32_t of_warp[kSlotsBlock / kWarpSize];
  };
  MLA_SHARED(Last, last);
  uint32_t own = 0;
  for (int64_t i = threadIdx.x; i < topk; i += kSlotsBlock)
    if (positions[i] >= 0) own = static_cast<uint32_t>(i) + 1;
  own = lanes_max(own);
  if (threadIdx.x % kWarpSize == 0) last.of_warp[threadIdx.x / kWarpSize] = own;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kSlotsBlock / kWarpSize; ++w) own = max(own, last.of_warp[w]);
  return own;
}

// The slots of kColumnsAtOnce columns of a row, from `first` on, `step` apart. Their lookups are in flight
// together. A column behind the row's end has slot -1.
__device__ __forceinline__ void find_slots(const TopkToSlotsArgs& args, const TopkToSlotsRow& row,
                                           const int32_t* positions, int64_t first, int64_t step,
                                           int32_t (&slots)[kColumnsAtOnce]) {
  const TopkToSlotsParams& p = args.p;
  const int64_t grouped = row.num_groups * p.group_size, length = row.length(p.group_size);
  int64_t tokens[kColumnsAtOnce];
#pragma unroll
  for (int i = 0; i < kColumnsAtOnce; ++i) {
    const int64_t c = first + i * step;
    tokens[i] = -1;
    if (c < grouped) {
      const int64_t group = args.group_size(c), position = positions[group];
      if (position >= 0) tokens[i] = position * p.group_size + (c - group * p.group_size);
    } else if (c < length) {
      tokens[i] = row.tail + (c - grouped);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumnsAtOnce; ++i)
    slots[i] = tokens[i] < 0 ? -1 : token_slot(p, row.request, tokens[i], args.page_size, args.turn);
}

}  // namespace

__global__ void __launch_bounds__(kSlotsBlock)
    topk_to_slots_kernel(const __grid_constant__ TopkToSlotsArgs args) {
  const TopkToSlotsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t r = args.pieces(blockIdx.x), piece = int64_t{blockIdx.x} - r * args.pieces.divisor();
  const int32_t* positions = p.positions + r * p.positions_stride_row;
  const int64_t last = p.lens ? 0 : find_last(positions, p.topk);
  const TopkToSlotsRow row = topk_to_slots_row(p, r, [last] { return last; });
  const int64_t first = piece * kPieceColumns + threadIdx.x;
  int32_t slots[kColumnsAtOnce];
  find_slots(args, row, positions, first, kSlotsBlock, slots);
  int32_t* out = p.out_slots + r * p.out_slots_stride_row;
#pragma unroll
  for (int i = 0; i < kColumnsAtOnce; ++i)
    if (first + i * kSlotsBlock < p.width) out[first + i * kSlotsBlock] = slots[i];
  if (piece == 0 && threadIdx.x == 0) p.out_lens[r] = static_cast<int32_t>(row.length(p.group_size));
}

// topk_to_slots for one of several ranks, which packs its slots. A block takes a row; each thread has
// neighbouring columns and learns from a sum how many slots come before them.
__global__ void __launch_bounds__(kSlotsBlock)
    topk_to_packed_slots_kernel(const __grid_constant__ TopkToSlotsArgs args) {
  const TopkToSlotsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t r = blockIdx.x;
  const int32_t* positions = p.positions + r * p.positions_stride_row;
  const int64_t last = p.lens ? 0 : find_last(positions, p.topk);
  const TopkToSlotsRow row = topk_to_slots_row(p, r, [last] { return last; });
  const int64_t length = row.length(p.group_size);
  int32_t* out = p.out_slots + r * p.out_slots_stride_row;
  MLA_SHARED(int32_t, all_of_piece);
  int64_t packed = 0;
  for (int64_t begin = 0; begin < length; begin += kPieceColumns) {
    int32_t slots[kColumnsAtOnce], own = 0;
    find_slots(args, row, positions, begin + threadIdx.x * kColumnsAtOnce, 1, slots);
#pragma unroll
    for (const int32_t slot : slots) own += slot >= 0;
    const int32_t end = block_inclusive_sum<kSlotsBlock / kWarpSize>(own);
    if (threadIdx.x == kSlotsBlock - 1) all_of_piece = end;
    int32_t* to = out + packed + end - own;
#pragma unroll
    for (const int32_t slot : slots)
      if (slot >= 0) *to++ = slot;
    __syncthreads();
    packed += all_of_piece;
  }
  for (int64_t c = packed + threadIdx.x; c < p.width; c += kSlotsBlock) out[c] = -1;
  if (threadIdx.x == 0) p.out_lens[r] = static_cast<int32_t>(packed);
}

void topk_to_slots(const TopkToSlotsParams& p, gpuStream_t stream) {
  const int64_t pieces = p.width > 0 && !p.is_packed() ? ceil_div<int64_t>(p.width, kPieceColumns) : 1;
  launch(p.is_packed() ? topk_to_packed_slots_kernel : topk_to_slots_kernel,
         {.grid = p.num_rows * pieces, .block = kSlotsBlock, .stream = stream},
         TopkToSlotsArgs{p, Divider(p.page_size), Divider(p.group_size), Divider(p.turn()), Divider(pieces)});
}

}  // namespace mla_fp8::gpu
