#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Positions of a request become slots of its pages; a position stands for group_size tokens.
struct TopkToSlotsParams {
  int64_t num_rows, topk, width;  // of positions; of slots
  int64_t num_requests, max_pages, page_size, next_n, group_size;
  const int32_t* positions;  // [num_rows, topk]
  int64_t positions_stride_row;
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request;
  const int32_t* row_to_request;  // [num_rows] or null: row / next_n
  const int32_t* token_lens;      // [num_rows] or null
  const int32_t* lens;            // [num_rows] or null

  int32_t* out_slots;  // [num_rows, width]
  int64_t out_slots_stride_row;
  int32_t* out_lens;  // [num_rows]
};

// One row: column c < num_groups * group_size is token c % group_size of position c / group_size, then come
// the tokens [tail, tail + num_tail).
struct TopkToSlotsRow {
  int64_t request;     // -1: none
  int64_t num_groups;  // columns of positions that count
  int64_t tail;
  int64_t num_tail;

  MLA_HD int64_t length(int64_t group_size) const { return num_groups * group_size + num_tail; }
};

// Without lens the row ends behind its last position >= 0, which `last` finds.
template <class Last>
MLA_HD TopkToSlotsRow topk_to_slots_row(const TopkToSlotsParams& p, int64_t row, const Last& last) {
  int64_t request = row / p.next_n;
  if (p.row_to_request) request = p.row_to_request[row];
  if (request < 0 || request >= p.num_requests) return {-1, 0, 0, 0};
  int64_t num_groups = p.lens ? int64_t{p.lens[row]} : last();
  num_groups = num_groups < 0 ? 0 : num_groups > p.topk ? p.topk : num_groups;
  const int64_t tokens = p.token_lens && p.token_lens[row] > 0 ? p.token_lens[row] : 0;
  const int64_t num_tail = tokens % p.group_size;
  return {request, num_groups, tokens - num_tail, num_tail};
}

// The slot of a token, or -1. `find_page` divides by the page size.
template <class FindPage>
MLA_HD int32_t token_slot(const TopkToSlotsParams& p, int64_t request, int64_t token,
                          const FindPage& find_page) {
  if (token < 0) return -1;
  const int64_t page_index = find_page(token);
  if (page_index >= p.max_pages) return -1;
  const int64_t page = p.page_table[request * p.page_table_stride_request + page_index];
  const int64_t slot = page * p.page_size + (token - page_index * p.page_size);
  return page < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

namespace cpu {
void topk_to_slots(const TopkToSlotsParams& params);
}
namespace gpu {
void topk_to_slots(const TopkToSlotsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
