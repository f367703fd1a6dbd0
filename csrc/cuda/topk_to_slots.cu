// topk_to_slots on CUDA. A block takes a piece of a row, four columns a thread, whose lookups are in flight
// together. HBM-bound: a row is topk int32 read, width written, and the page table's entries that it needs.

#include "ops/topk_to_slots.h"

#include "cuda/device/launch.cuh"
#include "cuda/topk_to_slots.cuh"

namespace mla_fp8::gpu {

namespace {

constexpr int kSlotsBlock = 256;
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

// topk_to_slots for one of several ranks, which packs its slots. A block takes a row.
__global__ void __launch_bounds__(kSlotsBlock)
    topk_to_packed_slots_kernel(const __grid_constant__ TopkToSlotsArgs args) {
  const TopkToSlotsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t r = blockIdx.x;
  const int32_t* positions = p.positions + r * p.positions_stride_row;
  const int64_t last = p.lens ? 0 : find_last(positions, p.topk);
  pack_slots<kSlotsBlock>(args, topk_to_slots_row(p, r, [last] { return last; }), positions, r);
}

void topk_to_slots(const TopkToSlotsParams& p, gpuStream_t stream) {
  const int64_t pieces = p.width > 0 && !p.is_packed() ? ceil_div<int64_t>(p.width, kPieceColumns) : 1;
  launch(p.is_packed() ? topk_to_packed_slots_kernel : topk_to_slots_kernel,
         {.grid = p.num_rows * pieces, .block = kSlotsBlock, .stream = stream},
         TopkToSlotsArgs{p, Divider(p.page_size), Divider(p.group_size), Divider(p.turn()), Divider(pieces)});
}

}  // namespace mla_fp8::gpu
