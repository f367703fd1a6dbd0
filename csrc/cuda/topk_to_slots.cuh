#pragma once
// Slots of a row's positions: several columns a thread, whose lookups are in flight together.
#include "cuda/device/divide.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "ops/topk_to_slots.h"

namespace mla_fp8::gpu {

struct TopkToSlotsArgs {
  TopkToSlotsParams p;
  Divider page_size, group_size, turn, pieces;  // pieces: of a row
};

inline constexpr int kColumnsAtOnce = 4;

// The slots of kColumnsAtOnce columns of a row, from `first` on, `step` apart. A column behind the row's end
// has slot -1.
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

// Writes row `r` of the slots of one of several ranks, packed, and how many they are. A block of kThreads
// calls it: each thread has neighbouring columns and learns from a sum how many slots come before them.
template <int kThreads>
__device__ __forceinline__ void pack_slots(const TopkToSlotsArgs& args, const TopkToSlotsRow& row,
                                           const int32_t* positions, int64_t r) {
  const TopkToSlotsParams& p = args.p;
  const int64_t length = row.length(p.group_size);
  int32_t* out = p.out_slots + r * p.out_slots_stride_row;
  MLA_SHARED(int32_t, all_of_piece);
  int64_t packed = 0;
  for (int64_t begin = 0; begin < length; begin += kThreads * kColumnsAtOnce) {
    int32_t slots[kColumnsAtOnce], own = 0;
    find_slots(args, row, positions, begin + threadIdx.x * kColumnsAtOnce, 1, slots);
#pragma unroll
    for (const int32_t slot : slots) own += slot >= 0;
    const int32_t end = block_inclusive_sum<kThreads / kWarpSize>(own);
    if (threadIdx.x == kThreads - 1) all_of_piece = end;
    int32_t* to = out + packed + end - own;
#pragma unroll
    for (const int32_t slot : slots)
      if (slot >= 0) *to++ = slot;
    __syncthreads();
    packed += all_of_piece;
  }
  for (int64_t c = packed + threadIdx.x; c < p.width; c += kThreads) out[c] = -1;
  if (threadIdx.x == 0) p.out_lens[r] = static_cast<int32_t>(packed);
}

}  // namespace mla_fp8::gpu
