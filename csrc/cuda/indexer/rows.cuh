#pragma once
// A unit is up to kIndexGroupRows neighbouring rows of one request, which see about the same columns; it is
// named by its first row. How many tiles of keys it has.
#include "cuda/device/divide.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

struct IndexUnit {
  int64_t first_row, request;  // the list, where columns are those of one
  int num_rows;
  int32_t begin, end;  // columns that any of its rows sees
  IndexRow rows[kIndexGroupRows];
  int in_list;  // the number of the first row there
};

// Where the key of a column of a unit lies, and which rows have it: bit i for row i.
struct KeyPlace {
  int64_t page, row;  // page -1: it is absent
  uint32_t members;
};
// Of the element of a list: which rows of the unit have it, and where its positions count from.
__device__ __forceinline__ uint32_t unit_members(const IndexList& list, const IndexUnit& unit,
                                                 int32_t element) {
  return list.members(element) >> unit.in_list & ((1u << unit.num_rows) - 1);
}
__device__ __forceinline__ KeyPlace key_place(const IndexKeys& keys, const Divider& page_size,
                                              const IndexUnit& unit, int64_t column) {
  const IndexList& list = keys.list;
  int64_t request = unit.request;
  uint32_t members = ~0u;
  if (list.elements != nullptr) {
    const int32_t element = list.element(unit.request, static_cast<int32_t>(column));
    members = unit_members(list, unit, element);
    if (members == 0) return {-1, 0, 0};
    request = unit.rows[__ffs(static_cast<int>(members)) - 1].request;
    const int32_t position = list.position(element, static_cast<int32_t>(column));
    column = keys.page_table ? position : request + position;
    if (column >= list.num_positions) return {-1, 0, 0};
  }
  const int64_t page_index = keys.page_table ? page_size(column) : 0;
  return {keys.page(request, page_index), column - page_index * page_size.divisor(), members};
}

// The row: one by one, a division of 64 bits would be a call of a hundred instructions.
__device__ __forceinline__ IndexRow find_row(const IndexRows& rows, int64_t row) {
  if (rows.k_start || rows.query_start_loc) return rows[row];
  const auto index = static_cast<uint32_t>(row), next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t request = index / next_n;
  const int32_t end = rows.visible(row, request, index - request * next_n, next_n);
  return {rows.origins ? rows.origins[row] : int64_t{request}, 0, end};
}

// find_unit where rows of requests vary in number.
__device__ __forceinline__ bool find_uneven_unit(const IndexRows& rows, int64_t row, int group_rows,
                                                 IndexUnit& unit) {
  const IndexRow first = rows[row];
  // Rows of no request go alone; the others are counted from the first of their request.
  const int64_t origin =
      first.request < 0 ? row : int64_t{rows.query_start_loc[first.request]} - rows.query_start_loc[0];
  const int offset = static_cast<int>((row - origin) % group_rows);
  bool is_alone = first.request < 0;
  if (offset != 0) {  // in the unit before, unless a query_start_loc that decreases tears it apart
    for (int i = 1; i <= offset; ++i) is_alone |= rows[row - i].request != first.request;
    if (!is_alone) return false;
  }
  unit.first_row = row;
  unit.request = first.request;
  unit.in_list = 0;
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

// The unit that begins with a row of a request, where all requests have as many, or all rows are of one
// request. Rows that do not exist are left as they are.
template <bool kIsRagged>
__device__ __forceinline__ void set_even_unit(const IndexRows& rows, uint32_t request, uint32_t in_request,
                                              int group_rows, IndexUnit& unit) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const int64_t row = int64_t{request} * next_n + in_request;
  const int64_t left = min(kIsRagged ? rows.num_rows : int64_t{next_n} - in_request, rows.num_rows - row);
  const int num_rows = static_cast<int>(min(left, int64_t{group_rows}));
  int32_t begin = INT32_MAX, end = 0;
#pragma unroll 1  // what runs once takes as long as its instructions take to arrive
  for (int i = 0; i < num_rows; ++i) {
    IndexRow own{request, 0, 0};
    if (kIsRagged) {
      own.begin = rows.clamp(rows.k_start[row + i]);
      own.end = max(rows.clamp(rows.k_end[row + i]), own.begin);
    } else {
      own.end = rows.visible(row + i, request, in_request + i, next_n);
      if (rows.origins) own.request = rows.origins[row + i];
    }
    begin = min(begin, own.begin);
    end = max(end, own.end);
    unit.rows[i] = own;
  }
  unit.first_row = row;
  unit.request = rows.origins && !rows.are_listed ? unit.rows[0].request : request;
  unit.in_list = static_cast<int>(in_request);
  unit.num_rows = num_rows;
  unit.begin = begin - begin % 4;  // scales are copied in sixteens of bytes
  unit.end = end;
}
template <bool kIsRagged>
__device__ __forceinline__ bool find_even_unit(const IndexRows& rows, int64_t row, int group_rows,
                                               IndexUnit& unit) {
  const auto index = static_cast<uint32_t>(row), next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t request = kIsRagged ? 0 : index / next_n, in_request = index - request * next_n;
  if (in_request % static_cast<uint32_t>(group_rows) != 0) return false;
  set_even_unit<kIsRagged>(rows, request, in_request, group_rows, unit);
  return true;
}

// Of at most `group_rows` rows. Whether `row` begins one; then `unit` is that.
__device__ __forceinline__ bool find_unit_here(const IndexRows& rows, int64_t row, int group_rows,
                                               IndexUnit& unit) {
  if (rows.query_start_loc) return find_uneven_unit(rows, row, group_rows, unit);
  if (!rows.k_start) return find_even_unit<false>(rows, row, group_rows, unit);
  return find_even_unit<true>(rows, row, group_rows, unit);
}

// A call: what a kernel runs once waits for its instructions.
__device__ __noinline__ inline bool find_unit(const IndexRows& rows, int64_t row, int group_rows,
                                              IndexUnit& unit) {
  return find_unit_here(rows, row, group_rows, unit);
}

// Of a unit of one row, whose columns are those of a list of entries of its own.
__device__ __forceinline__ void list_row(const IndexKeys& keys, int64_t width, IndexUnit& unit) {
  if (keys.page_table == nullptr) unit.rows[0].request = unit.rows[0].begin;
  unit.request = unit.first_row;
  unit.in_list = 0;
  unit.begin = unit.rows[0].begin = 0;
  unit.end = unit.rows[0].end = static_cast<int32_t>(width);
}

// Whether every row chooses all that it sees: no logit is asked for. `topk`: up to so many entries.
__device__ __forceinline__ bool takes_all(const IndexUnit& unit, int topk) {
#pragma unroll 1
  for (int i = 0; i < unit.num_rows; ++i)
    if (unit.rows[i].end - unit.rows[i].begin > topk) return false;
  return true;
}
// Tiles whose logits are asked for.
__device__ __forceinline__ int64_t scored_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  if (takes_all(unit, topk)) return 0;
  return (int64_t{unit.end} - unit.begin + tile_keys - 1) / tile_keys;
}
// A unit that asks for no logit has a tile too, so that its rows are written.
__device__ __forceinline__ int64_t num_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  return max(scored_tiles(unit, tile_keys, topk), int64_t{1});
}
// The same of a unit that begins with a row of a request, where all have the same number of rows.
__device__ __forceinline__ int32_t scored_tiles_at(const IndexRows& rows, uint32_t request,
                                                   uint32_t in_request, int group_rows, int tile_keys,
                                                   int topk) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t last = min(in_request + group_rows, next_n) - 1;
  int32_t end = 0;  // without row_lens, later rows see more
  for (uint32_t i = rows.row_lens ? in_request : last; i <= last; ++i)
    end = max(end, rows.visible(int64_t{request} * next_n + i, request, i, next_n));
  return end <= topk ? 0 : (end - 1) / tile_keys + 1;
}
// Whether some unit of a request asks for no logit.
__device__ __forceinline__ bool has_short_unit(const IndexRows& rows, uint32_t request, int group_rows,
                                               int topk) {
  const auto units = rows.row_lens ? static_cast<uint32_t>(rows.next_n) : 1u;  // else the first sees least
#pragma unroll 1
  for (uint32_t i = 0; i < units; i += group_rows)
    if (scored_tiles_at(rows, request, i, group_rows, 1, topk) == 0) return true;
  return false;
}
// Shares are of steps: a unit's tiles, and behind them what choosing takes, measured in tiles.
inline constexpr int kChoiceSteps = 3;
__device__ __forceinline__ int64_t num_steps(const IndexUnit& unit, int tile_keys, int topk) {
  return num_tiles(unit, tile_keys, topk) + kChoiceSteps;
}

// The unit behind one that is not the last.
__device__ __forceinline__ void next_unit(const IndexRows& rows, int group_rows, const IndexUnit& unit,
                                          IndexUnit& next) {
  int64_t row = unit.first_row + unit.num_rows;
  while (!find_unit_here(rows, row, group_rows, next)) ++row;
}

}  // namespace mla_fp8::gpu
