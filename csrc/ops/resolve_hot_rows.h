#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Finds chosen entries in a hot buffer, where each request has `num_hot` slots. The request's state says
// which entry a slot holds, and lists slots in order of last use. All that one call uses is of one age;
// within that, loaded slots come before those that were there.
struct ResolveHotRowsParams {
  int32_t num_rows, topk, num_requests, num_states, num_hot, next_n;
  const int32_t* entries;  // [num_rows, topk]
  int64_t entries_stride_row;
  const void* row_to_request;  // [num_rows] or null: row / next_n is the request
  bool requests_are_int64;
  const int32_t* state_rows;      // [num_requests] or null: a request's number is its state's
  const int32_t* num_valid_rows;  // [1] or null
  const void* entry_lens;         // [num_rows] or null
  bool lens_are_int64;

  const void* host_pages;  // [num_requests, num_host_pages] or null: an entry's number is its host row
  bool host_pages_are_int64;
  int64_t host_pages_stride;
  int32_t num_host_pages, host_page_size, num_host_rows;
  int32_t first_page;             // smaller page numbers are no pages
  bool by_entry;                  // the state names entries, not their host rows
  const int32_t* resident_pages;  // [num_states, num_resident_pages] or null
  int64_t resident_pages_stride;
  const int32_t* hot_pages;  // [num_requests, num_hot_pages] or null: slot 0 of state s is row s * num_hot
  int64_t hot_pages_stride;
  int32_t num_resident_pages, num_hot_pages, hot_page_size;

  int32_t* hot_entries;  // [num_states, num_hot]
  int64_t hot_entries_stride;
  int16_t* hot_order;  // [num_states, num_hot], the oldest first
  int64_t hot_order_stride;
  int64_t* counters;  // [2] or null: counts of entries found and loaded

  int32_t* hot_rows;  // [num_rows, topk]
  int64_t hot_rows_stride;
  int32_t* attention_rows;  // hot_rows for pages that lie attention_page_stride rows apart; or null
  int64_t attention_rows_stride, attention_page_stride;
  int32_t* hit_rows;  // hot_rows without those of the plan; or null
  int64_t hit_rows_stride;
  int32_t* lens;         // [num_rows] or null
  void* miss_host_rows;  // [num_rows, topk]
  bool miss_host_rows_are_int64;
  int64_t miss_host_rows_stride;
  int32_t* miss_hot_rows;  // [num_rows, topk]
  int64_t miss_hot_rows_stride;
  int32_t* miss_counts;  // [num_rows]
};

inline constexpr int32_t kMaxHotRows = 1 << 15;  // slots are int16
inline constexpr int32_t kMaxHotDrafts = 64;

// Divides by the page sizes, by topk and by next_n. GPU kernels have a form with Dividers.
struct PlainHotDivision {
  int32_t host_size, hot_size, row_size, group_size;
  MLA_HD int32_t host(int32_t n) const { return n / host_size; }
  MLA_HD int32_t hot(int32_t n) const { return n / hot_size; }
  MLA_HD int32_t row(int32_t n) const { return n / row_size; }
  MLA_HD int32_t group(int32_t n) const { return n / group_size; }
};

MLA_HD int64_t hot_int(const void* values, bool are_int64, int32_t i) {
  return are_int64 ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}
// Where row i >= 0 begins. The cast saves GPUs a product.
MLA_HD int64_t hot_offset(int32_t i, int64_t stride) { return static_cast<uint32_t>(i) * stride; }

// The request of a row; -1 if it has none, as padding.
template <class Division>
MLA_HD int32_t hot_request(const ResolveHotRowsParams& p, const Division& by, int32_t row) {
  if (p.num_valid_rows && row >= *p.num_valid_rows) return -1;
  if (!p.row_to_request) return by.group(row) < p.num_requests ? by.group(row) : -1;
  const int64_t request = hot_int(p.row_to_request, p.requests_are_int64, row);
  return request < 0 || request >= p.num_requests ? -1 : static_cast<int32_t>(request);
}
MLA_HD int32_t hot_state(const ResolveHotRowsParams& p, int32_t request) {
  if (request < 0) return -1;
  const int32_t state = p.state_rows ? p.state_rows[request] : request;
  return state < 0 || state >= p.num_states ? -1 : state;
}

// The tables of one request and its state.
struct HotTables {
  int64_t first_slot;  // its row without hot_pages
  const void* host_pages;
  const int32_t *hot_pages, *resident_pages;
};
MLA_HD HotTables hot_tables(const ResolveHotRowsParams& p, int32_t request, int32_t state) {
  const int64_t host = hot_offset(request, p.host_pages_stride) * (p.host_pages_are_int64 ? 8 : 4);
  return {hot_offset(state, p.num_hot), static_cast<const char*>(p.host_pages) + host,
          p.hot_pages + hot_offset(request, p.hot_pages_stride),
          p.resident_pages + hot_offset(state, p.resident_pages_stride)};
}

// A row of a page, or -1 from `end` on.
MLA_HD int32_t row_in_page(int32_t page, int32_t page_size, int32_t in_page, uint32_t end) {
  const uint64_t row = static_cast<uint32_t>(page) * uint64_t{static_cast<uint32_t>(page_size)} +
                       static_cast<uint32_t>(in_page);
  return row < end ? static_cast<int32_t>(row) : -1;
}
inline constexpr uint32_t kHotRowEnd = uint32_t{1} << 31;

// The hot buffer's row that is a slot, or -1.
template <class Division>
MLA_HD int32_t hot_row_of_slot(const ResolveHotRowsParams& p, const Division& by, const HotTables& tables,
                               int32_t slot) {
  if (!p.hot_pages) {
    const int64_t row = tables.first_slot + slot;
    return row < kHotRowEnd ? static_cast<int32_t>(row) : -1;
  }
  const int32_t index = by.hot(slot);
  const int32_t page = index < p.num_hot_pages ? tables.hot_pages[index] : -1;
  return page < 0 ? -1 : row_in_page(page, p.hot_page_size, slot - index * p.hot_page_size, kHotRowEnd);
}

// The host row of an entry, or -1.
template <class Division>
MLA_HD int32_t host_row_of_entry(const ResolveHotRowsParams& p, const Division& by, const HotTables& tables,
                                 int32_t entry) {
  if (!p.host_pages) return entry < p.num_host_rows ? entry : -1;
  const int32_t index = by.host(entry);
  const int64_t page =
      index < p.num_host_pages ? hot_int(tables.host_pages, p.host_pages_are_int64, index) : -1;
  if (page < p.first_page || page > p.num_host_rows) return -1;
  return row_in_page(static_cast<int32_t>(page), p.host_page_size, entry - index * p.host_page_size,
                     static_cast<uint32_t>(p.num_host_rows));
}

// An entry before the state is asked: its row if that is certain (-1: none), or its key in the state.
struct HotEntry {
  int32_t row;
  int32_t key;  // -1: `row` is the answer
};
template <class Division>
MLA_HD HotEntry hot_entry(const ResolveHotRowsParams& p, const Division& by, const HotTables& tables,
                          int32_t row, int32_t entry) {
  if (entry < 0) return {-1, -1};
  if (p.entry_lens) {
    const int64_t len = hot_int(p.entry_lens, p.lens_are_int64, row);
    if (entry >= len) return {-1, -1};
    const bool is_short = len <= p.num_hot;
    if (is_short || entry == len - 1)
      return {hot_row_of_slot(p, by, tables, is_short ? entry : p.num_hot), -1};
  }
  if (p.resident_pages) {
    const int32_t index = by.hot(entry);
    const int32_t page = index < p.num_resident_pages ? tables.resident_pages[index] : -1;
    if (page >= p.first_page)
      return {row_in_page(page, p.hot_page_size, entry - index * p.hot_page_size, kHotRowEnd), -1};
  }
  const int32_t host = host_row_of_entry(p, by, tables, entry);
  return {-1, host >= 0 && p.by_entry ? entry : host};
}

// Writes the hot row of an entry, also for attention if that has rows of its own. `is_there`: it is no miss.
template <class Division>
MLA_HD void write_hot_row(const ResolveHotRowsParams& p, const Division& by, int32_t row, int32_t column,
                          int32_t hot_row, bool is_there) {
  p.hot_rows[hot_offset(row, p.hot_rows_stride) + column] = hot_row;
  if (p.hit_rows) p.hit_rows[hot_offset(row, p.hit_rows_stride) + column] = is_there ? hot_row : -1;
  if (!p.attention_rows) return;
  int64_t at = hot_row;
  if (hot_row >= 0) {
    const int32_t page = by.hot(hot_row);
    at = page * p.attention_page_stride + (hot_row - page * p.hot_page_size);
  }
  p.attention_rows[hot_offset(row, p.attention_rows_stride) + column] =
      at < kHotRowEnd ? static_cast<int32_t>(at) : -1;
}

// Writes the `rank`-th row to load for the request whose rows begin at `first`.
template <class Division>
MLA_HD void write_miss(const ResolveHotRowsParams& p, const Division& by, int32_t first, int32_t rank,
                       int32_t host_row, int32_t hot_row) {
  const int32_t row = by.row(rank), column = rank - row * p.topk;
  const int64_t at = hot_offset(first + row, p.miss_host_rows_stride) + column;
  if (p.miss_host_rows_are_int64) static_cast<int64_t*>(p.miss_host_rows)[at] = host_row;
  else static_cast<int32_t*>(p.miss_host_rows)[at] = host_row;
  p.miss_hot_rows[hot_offset(first + row, p.miss_hot_rows_stride) + column] = hot_row;
}

// The number of rows from `first` on that have the same request, at most next_n.
template <class Division>
MLA_HD int32_t hot_group_size(const ResolveHotRowsParams& p, const Division& by, int32_t first,
                              int32_t request) {
  const int32_t most = p.next_n < p.num_rows - first ? p.next_n : p.num_rows - first;
  int32_t n = 1;
  while (n < most && hot_request(p, by, first + n) == request) ++n;
  return n;
}

namespace cpu {
void resolve_hot_rows(const ResolveHotRowsParams& params);
}
namespace gpu {
void resolve_hot_rows(const ResolveHotRowsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
