#pragma once
// The rows of a call of the indexer, and the tiles of keys that they make. Start here: the indexer scores
// each key that a row sees; index_topk answers with the best ones. A scan (scan.cuh; Hopper: sm90_scan.cuh)
// finds logits, and a merge (merge.cuh) chooses among what several CTAs found. Words of this folder:
//
//   row          a query token with its heads
//   column       the number of a key: in the request's context, among gathered keys, or in a list of blocks
//   unit         up to four neighbouring rows of one request, for which a CTA reads keys once
//   tile, item   neighbouring columns that a CTA scores together: 256 on Hopper, else 128; 64 of them
//   scored tile  a tile of a unit that has a row with more than topk columns: other units need no logits
//   step         a piece of work: a scored tile, or as much time as one takes
//   share        the consecutive steps of one CTA. It may begin and end within a unit.
//   aligned      shares: each unit begins with a share. Uniform: and all units have equally many shares
//   lane         (of CTAs) all CTAs that scan the i-th unit of every request; lanes work side by side
//   place        a row where a unit may begin (UnitPlaces); a stage of the ring and its phase (Place)
//   key, order   a logit as an unsigned number (order_key); key and column in one number (order_of)
//   chunk        columns whose order keys lie in shared memory at a time
//   candidate    an order that may be among the best topk; a list holds candidates of one row
//   kept         the order keys of all scored tiles lie in the workspace
//   gathered     kept, and one of a unit's CTAs reads all keys of the unit and answers its rows
//   counted      kept, and the scan has made a histogram of the row's keys ("binned")
//   near, far    a row whose kept keys have room in the shared memory of the merge, or have not
//   rehearsed    executed so that instructions are in the L2 when they are needed; nothing is written
#include "cuda/device/divide.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

struct IndexUnit {
  int64_t first_row, request;  // or the number of the list, if columns are those of a list
  int num_rows;
  int32_t begin, end;  // columns that any of its rows sees lie in [begin, end)
  IndexRow rows[kIndexGroupRows];
  int in_list;  // the number of the unit's first row among the rows of its list
};

// Where the key of a column of a unit lies, and which rows of the unit see it (bit i: row i).
struct KeyPlace {
  int64_t page, row;  // page -1: the key is absent
  uint32_t members;
};
// The rows of the unit that have the block of a list's element: bit i for row i.
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

// Row number `row`, without the 64-bit division of rows[row]: that is a call of a hundred instructions.
__device__ __forceinline__ IndexRow find_row(const IndexRows& rows, int64_t row) {
  if (rows.k_start || rows.query_start_loc) return rows[row];
  const auto index = static_cast<uint32_t>(row), next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t request = index / next_n;
  const int32_t end = rows.visible(row, request, index - request * next_n, next_n);
  return {rows.origins ? rows.origins[row] : int64_t{request}, 0, end};
}

// find_unit for requests with different numbers of rows (query_start_loc).
__device__ __forceinline__ bool find_uneven_unit(const IndexRows& rows, int64_t row, int group_rows,
                                                 IndexUnit& unit) {
  const IndexRow first = rows[row];
  // A row of no request is a unit of its own. Other rows are counted from the first row of their request.
  const int64_t origin =
      first.request < 0 ? row : int64_t{rows.query_start_loc[first.request]} - rows.query_start_loc[0];
  const int offset = static_cast<int>((row - origin) % group_rows);
  bool is_alone = first.request < 0;
  if (offset != 0) {  // the row is inside a unit, unless a query_start_loc that decreases splits that unit
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

// Sets `unit` to the one that begins at row `in_request` of a request. All requests have next_n rows, or
// (kIsRagged) all rows are of one request. Entries of unit.rows behind num_rows keep their values.
template <bool kIsRagged>
__device__ __forceinline__ void set_even_unit(const IndexRows& rows, uint32_t request, uint32_t in_request,
                                              int group_rows, IndexUnit& unit) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const int64_t row = int64_t{request} * next_n + in_request;
  const int64_t left = min(kIsRagged ? rows.num_rows : int64_t{next_n} - in_request, rows.num_rows - row);
  const int num_rows = static_cast<int>(min(left, int64_t{group_rows}));
  int32_t begin = INT32_MAX, end = 0;
#pragma unroll 1  // short code: what runs once waits for its instructions
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
  unit.begin = begin - begin % 4;  // scales are copied in pieces of 16 bytes, four keys each
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

// Whether a unit of at most `group_rows` rows begins at `row`; then `unit` is set to it.
__device__ __forceinline__ bool find_unit_here(const IndexRows& rows, int64_t row, int group_rows,
                                               IndexUnit& unit) {
  if (rows.query_start_loc) return find_uneven_unit(rows, row, group_rows, unit);
  if (!rows.k_start) return find_even_unit<false>(rows, row, group_rows, unit);
  return find_even_unit<true>(rows, row, group_rows, unit);
}

// find_unit_here as a call: code that runs once waits for its instructions, so there is one copy of it.
__device__ __noinline__ inline bool find_unit(const IndexRows& rows, int64_t row, int group_rows,
                                              IndexUnit& unit) {
  return find_unit_here(rows, row, group_rows, unit);
}

// Makes the columns of a one-row unit those of a list of entries that belongs to this row alone.
__device__ __forceinline__ void list_row(const IndexKeys& keys, int64_t width, IndexUnit& unit) {
  if (keys.page_table == nullptr) unit.rows[0].request = unit.rows[0].begin;
  unit.request = unit.first_row;
  unit.in_list = 0;
  unit.begin = unit.rows[0].begin = 0;
  unit.end = unit.rows[0].end = static_cast<int32_t>(width);
}

// Whether every row of the unit sees at most `topk` columns. Each then takes all of them, without logits.
__device__ __forceinline__ bool takes_all(const IndexUnit& unit, int topk) {
#pragma unroll 1
  for (int i = 0; i < unit.num_rows; ++i)
    if (unit.rows[i].end - unit.rows[i].begin > topk) return false;
  return true;
}
// Tiles of the unit that need logits.
__device__ __forceinline__ int64_t scored_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  if (takes_all(unit, topk)) return 0;
  return (int64_t{unit.end} - unit.begin + tile_keys - 1) / tile_keys;
}
// Tiles of the unit, at least one: a unit without scored tiles still has an answer to write.
__device__ __forceinline__ int64_t num_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  return max(scored_tiles(unit, tile_keys, topk), int64_t{1});
}
// scored_tiles of the unit that begins at row `in_request`, if all requests have the same number of rows.
__device__ __forceinline__ int32_t scored_tiles_at(const IndexRows& rows, uint32_t request,
                                                   uint32_t in_request, int group_rows, int tile_keys,
                                                   int topk) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t last = min(in_request + group_rows, next_n) - 1;
  int32_t end = 0;  // without row_lens the last row sees most
  for (uint32_t i = rows.row_lens ? in_request : last; i <= last; ++i)
    end = max(end, rows.visible(int64_t{request} * next_n + i, request, i, next_n));
  return end <= topk ? 0 : (end - 1) / tile_keys + 1;
}
// Whether the request has a unit without scored tiles.
__device__ __forceinline__ bool has_short_unit(const IndexRows& rows, uint32_t request, int group_rows,
                                               int topk) {
  const auto units = rows.row_lens ? static_cast<uint32_t>(rows.next_n) : 1u;  // else the first sees least
#pragma unroll 1
  for (uint32_t i = 0; i < units; i += group_rows)
    if (scored_tiles_at(rows, request, i, group_rows, 1, topk) == 0) return true;
  return false;
}
// Steps of a unit that is chosen on the way: its tiles, and the time of the choice, measured in tiles.
inline constexpr int kChoiceSteps = 3;
__device__ __forceinline__ int64_t num_steps(const IndexUnit& unit, int tile_keys, int topk) {
  return num_tiles(unit, tile_keys, topk) + kChoiceSteps;
}

// Finds the unit behind `unit`, which must not be the last one.
__device__ __forceinline__ void next_unit(const IndexRows& rows, int group_rows, const IndexUnit& unit,
                                          IndexUnit& next) {
  int64_t row = unit.first_row + unit.num_rows;
  while (!find_unit_here(rows, row, group_rows, next)) ++row;
}

}  // namespace mla_fp8::gpu
