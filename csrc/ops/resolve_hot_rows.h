#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Chosen entries become rows of a hot buffer. Each request has `num_hot` slots there. Its state says which
// entry a slot holds, and the slots in order of last use: what one call uses is of one age, and within it
// what was loaded comes before what was there.
struct ResolveHotRowsParams {
  int64_t num_rows, topk, num_requests, num_states, num_hot, next_n;
  const int32_t* entries;  // [num_rows, topk]
  int64_t entries_stride_row;
  const void* row_to_request;  // [num_rows] or null: row / next_n
  bool requests_are_int64;
  const int32_t* state_rows;      // [num_requests] or null: the request
  const int32_t* num_valid_rows;  // [1] or null
  const void* entry_lens;         // [num_rows] or null
  bool lens_are_int64;

  const void* host_pages;  // [num_requests, num_host_pages] or null: an entry is its host row
  bool host_pages_are_int64;
  int64_t host_pages_stride, num_host_pages, host_page_size, num_host_rows;
  int64_t first_page;             // those below are none
  bool by_entry;                  // the state names entries; without it their host rows
  const int32_t* resident_pages;  // [num_requests, num_resident_pages] or null
  int64_t resident_pages_stride, num_resident_pages;
  const int32_t* hot_pages;  // [num_requests, num_hot_pages] or null: slot 0 of a state is num_hot times it
  int64_t hot_pages_stride, num_hot_pages, hot_page_size;

  int32_t* hot_entries;  // [num_states, num_hot]
  int64_t hot_entries_stride;
  int16_t* hot_order;  // [num_states, num_hot], the oldest first
  int64_t hot_order_stride;
  int64_t* counters;  // [2] or null: found, loaded

  int32_t* hot_rows;  // [num_rows, topk]
  int64_t hot_rows_stride;
  int32_t* attention_rows;  // the same with pages attention_page_stride rows apart, or null
  int64_t attention_rows_stride, attention_page_stride;
  int32_t* lens;         // [num_rows] or null
  void* miss_host_rows;  // [num_rows, topk]
  bool miss_host_rows_are_int64;
  int64_t miss_host_rows_stride;
  int32_t* miss_hot_rows;  // [num_rows, topk]
  int64_t miss_hot_rows_stride;
  int32_t* miss_counts;  // [num_rows]
};

inline constexpr int64_t kMaxHotRows = int64_t{1} << 15;  // slots are int16
inline constexpr int64_t kMaxHotDrafts = 64;

// Divides by the page sizes, and by topk.
struct PlainHotDivision {
  int64_t host_size, hot_size, row_size;
  MLA_HD int64_t host(int64_t n) const { return n / host_size; }
  MLA_HD int64_t hot(int64_t n) const { return n / hot_size; }
  MLA_HD int64_t row(int64_t n) const { return n / row_size; }
};

MLA_HD int64_t hot_int(const void* values, bool are_int64, int64_t i) {
  return are_int64 ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
}

// Of a row; -1 is none, as for padding.
MLA_HD int64_t hot_request(const ResolveHotRowsParams& p, int64_t row) {
  if (p.num_valid_rows && row >= *p.num_valid_rows) return -1;
  const int64_t request =
      p.row_to_request ? hot_int(p.row_to_request, p.requests_are_int64, row) : row / p.next_n;
  return request < 0 || request >= p.num_requests ? -1 : request;
}
MLA_HD int64_t hot_state(const ResolveHotRowsParams& p, int64_t request) {
  if (request < 0) return -1;
  const int64_t state = p.state_rows ? int64_t{p.state_rows[request]} : request;
  return state < 0 || state >= p.num_states ? -1 : state;
}

// The row in the hot buffer of a slot, or -1.
template <class Division>
MLA_HD int32_t hot_row_of_slot(const ResolveHotRowsParams& p, const Division& by, int64_t request,
                               int64_t state, int64_t slot) {
  int64_t row = state * p.num_hot + slot;
  if (p.hot_pages) {
    const int64_t index = by.hot(slot);
    if (index >= p.num_hot_pages) return -1;
    const int64_t page = p.hot_pages[request * p.hot_pages_stride + index];
    if (page < 0) return -1;
    row = page * p.hot_page_size + (slot - index * p.hot_page_size);
  }
  return row > INT32_MAX ? -1 : static_cast<int32_t>(row);
}

// Where an entry lies in host memory, or -1.
template <class Division>
MLA_HD int64_t host_row_of_entry(const ResolveHotRowsParams& p, const Division& by, int64_t request,
                                 int64_t entry) {
  int64_t row = entry;
  if (p.host_pages) {
    const int64_t index = by.host(entry);
    if (index >= p.num_host_pages) return -1;
    const int64_t page = hot_int(p.host_pages, p.host_pages_are_int64, request * p.host_pages_stride + index);
    if (page < p.first_page || page > p.num_host_rows) return -1;
    row = page * p.host_page_size + (entry - index * p.host_page_size);
  }
  return row >= p.num_host_rows ? -1 : row;
}

// What is known of an entry without the state: a row that it has in any case (-1: none), or its key there.
struct HotEntry {
  int32_t row;
  int32_t key;  // -1: `row` is the answer
};
template <class Division>
MLA_HD HotEntry hot_entry(const ResolveHotRowsParams& p, const Division& by, int64_t row, int64_t request,
                          int64_t state, int64_t entry) {
  if (entry < 0) return {-1, -1};
  if (p.entry_lens) {
    const int64_t len = hot_int(p.entry_lens, p.lens_are_int64, row);
    if (entry >= len) return {-1, -1};
    if (len <= p.num_hot) return {hot_row_of_slot(p, by, request, state, entry), -1};
    if (entry == len - 1) return {hot_row_of_slot(p, by, request, state, p.num_hot), -1};
  }
  if (p.resident_pages) {
    const int64_t index = by.hot(entry);
    if (index < p.num_resident_pages) {
      const int64_t page = p.resident_pages[request * p.resident_pages_stride + index];
      if (page >= p.first_page) {
        const int64_t at = page * p.hot_page_size + (entry - index * p.hot_page_size);
        return {at > INT32_MAX ? -1 : static_cast<int32_t>(at), -1};
      }
    }
  }
  const int64_t host = host_row_of_entry(p, by, request, entry);
  return {-1, host < 0 ? -1 : static_cast<int32_t>(p.by_entry ? entry : host)};
}

// An answer, where attention looks for it, too.
template <class Division>
MLA_HD void write_hot_row(const ResolveHotRowsParams& p, const Division& by, int64_t row, int64_t column,
                          int32_t hot_row) {
  p.hot_rows[row * p.hot_rows_stride + column] = hot_row;
  if (!p.attention_rows) return;
  int64_t at = hot_row;
  if (hot_row >= 0) {
    const int64_t page = by.hot(hot_row);
    at = page * p.attention_page_stride + (hot_row - page * p.hot_page_size);
  }
  p.attention_rows[row * p.attention_rows_stride + column] = at > INT32_MAX ? -1 : static_cast<int32_t>(at);
}

// The `rank`-th row to load for the request whose rows begin at `first`.
template <class Division>
MLA_HD void write_miss(const ResolveHotRowsParams& p, const Division& by, int64_t first, int64_t rank,
                       int64_t host_row, int32_t hot_row) {
  const int64_t row = by.row(rank), column = rank - row * p.topk;
  const int64_t at = (first + row) * p.miss_host_rows_stride + column;
  if (p.miss_host_rows_are_int64) static_cast<int64_t*>(p.miss_host_rows)[at] = host_row;
  else static_cast<int32_t*>(p.miss_host_rows)[at] = static_cast<int32_t>(host_row);
  p.miss_hot_rows[(first + row) * p.miss_hot_rows_stride + column] = hot_row;
}

// The rows of a request that begin at `first`: as many as follow with the same request, at most next_n.
MLA_HD int64_t hot_group_size(const ResolveHotRowsParams& p, int64_t first, int64_t request) {
  int64_t n = 1;
  while (n < p.next_n && first + n < p.num_rows && hot_request(p, first + n) == request) ++n;
  return n;
}

namespace cpu {
void resolve_hot_rows(const ResolveHotRowsParams& params);
}
namespace gpu {
void resolve_hot_rows(const ResolveHotRowsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
