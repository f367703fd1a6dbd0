#pragma once
// How rows and tiles of keys are shared among CTAs. A unit is up to kIndexGroupRows neighbouring rows of one
// request, which see about the same columns; it is named by its first row. All units' tiles lie one after
// another, and each CTA takes an equal share of them: which depends on lengths that the device alone knows,
// so each finds its own.
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

struct IndexUnit {
  int64_t first_row, request;
  int num_rows;
  int32_t begin, end;  // columns that any of its rows sees
  IndexRow rows[kIndexGroupRows];
};

// Of at most `group_rows` rows. Whether `row` begins one; then `unit` is that.
__device__ __forceinline__ bool find_unit(const IndexRows& rows, int64_t row, int group_rows,
                                          IndexUnit& unit) {
  const IndexRow first = rows[row];
  // Rows of no request go alone; the others are counted from the first of their request.
  int64_t origin = 0;
  if (rows.query_start_loc) {
    if (first.request < 0) origin = row;
    else origin = int64_t{rows.query_start_loc[first.request]} - rows.query_start_loc[0];
  } else if (!rows.k_start) {
    origin = first.request * rows.next_n;
  }
  const int offset = static_cast<int>((row - origin) % group_rows);
  bool is_alone = first.request < 0;
  if (offset !=
      0) {  // in the unit of the rows before, unless a query_start_loc that decreases tears it apart
    if (rows.query_start_loc == nullptr) return false;
    for (int i = 1; i <= offset; ++i) is_alone |= rows[row - i].request != first.request;
    if (!is_alone) return false;
  }
  unit.first_row = row;
  unit.request = first.request;
  unit.num_rows = 1;
  unit.begin = first.begin;
  unit.end = first.end;
  unit.rows[0] = first;
#pragma unroll
  for (int i = 1; i < kIndexGroupRows; ++i) {
    unit.rows[i] = {-1, 0, 0};
    if (is_alone || i >= group_rows || unit.num_rows < i || row + i >= rows.num_rows) continue;
    const IndexRow next = rows[row + i];
    if (next.request != first.request) continue;
    unit.rows[i] = next;
    unit.num_rows = i + 1;
    unit.begin = min(unit.begin, next.begin);
    unit.end = max(unit.end, next.end);
  }
  return true;
}

// A unit that sees nothing has a tile too, so that its rows are written.
__device__ __forceinline__ int64_t num_tiles(const IndexUnit& unit, int tile_keys) {
  const int64_t tiles = (int64_t{unit.end} - unit.begin + tile_keys - 1) / tile_keys;
  return tiles > 0 ? tiles : 1;
}
__device__ __forceinline__ int64_t num_tiles(const IndexRows& rows, int64_t row, int group_rows,
                                             int tile_keys) {
  IndexUnit unit;
  return row < rows.num_rows && find_unit(rows, row, group_rows, unit) ? num_tiles(unit, tile_keys) : 0;
}

// Tiles before `first_row`'s unit, and the share of a CTA.
struct IndexShare {
  int64_t total, per_cta;   // tiles
  int64_t row, first_tile;  // of the unit in which the share begins
  int64_t so_far;
};

// All kThreads threads of the block call it. `cta` of `num_ctas` begins at tile cta * per_cta, if there is
// one.
template <int kThreads>
__device__ __forceinline__ IndexShare find_share(const IndexRows& rows, int group_rows, int tile_keys,
                                                 int cta, int num_ctas) {
  constexpr int kWarps = kThreads / kWarpSize;
  MLA_SHARED(IndexShare, share);
  int64_t mine = 0;
  for (int64_t row = threadIdx.x; row < rows.num_rows; row += kThreads)
    mine += num_tiles(rows, row, group_rows, tile_keys);
  mine = block_inclusive_sum<kWarps>(mine);
  if (threadIdx.x == kThreads - 1) {
    share.total = mine;
    share.per_cta = (mine + num_ctas - 1) / num_ctas;
    share.row = -1;
  }
  __syncthreads();
  const int64_t begin = cta * share.per_cta;
  int64_t before = 0;
  for (int64_t first = 0; first < rows.num_rows; first += kThreads) {
    const int64_t row = first + threadIdx.x;
    const int64_t tiles = num_tiles(rows, row, group_rows, tile_keys);
    const int64_t end = before + block_inclusive_sum<kWarps>(tiles);
    if (tiles > 0 && end - tiles <= begin && begin < end) {
      share.row = row;
      share.first_tile = end - tiles;
    }
    if (threadIdx.x == kThreads - 1) share.so_far = end;
    __syncthreads();
    before = share.so_far;
    if (share.row >= 0) break;
    __syncthreads();
  }
  __syncthreads();
  return share;
}

}  // namespace mla_fp8::gpu
