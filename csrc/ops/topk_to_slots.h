#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Turns positions of a request into slots of its pages. A position stands for group_size tokens.
struct TopkToSlotsParams {
  int64_t num_rows, topk, width;  // topk: of positions; width: of slots
  int64_t num_requests, max_pages, page_size, next_n, group_size;
  const int32_t* positions;  // [num_rows, topk]
  int64_t positions_stride_row;
  const int32_t* page_table;  // [num_requests, max_pages]
  int64_t page_table_stride_request;
  const int32_t* row_to_request;  // [num_rows] or null: row / next_n is the request
  const int32_t* token_lens;      // [num_rows] or null
  const int32_t* lens;            // [num_rows] or null
  // Several ranks take turns of `interleave` positions, or (by_slot) of slots that page_table names. Only the
  // slots of this rank's rows are then written, one after another.
  int64_t world_size, rank, interleave;
  bool by_slot;

  int32_t* out_slots;  // [num_rows, width]
  int64_t out_slots_stride_row;
  int32_t* out_lens;  // [num_rows]

  MLA_HD bool is_packed() const { return world_size > 1; }
  MLA_HD int64_t turn() const { return world_size * interleave; }  // numbers of a turn of all ranks
};

// A row of slots. Column c < num_groups * group_size is token c % group_size of position c / group_size.
// Tokens [tail, tail + num_tail) follow.
struct TopkToSlotsRow {
  int64_t request;     // -1: none
  int64_t num_groups;  // columns of positions that count
  int64_t tail;
  int64_t num_tail;

  MLA_HD int64_t length(int64_t group_size) const { return num_groups * group_size + num_tail; }
};

// Finds a row. Without lens it ends behind its last position >= 0: last() returns the end.
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

// This rank's number for one that ranks share, or -1 if another rank has it. find_turn divides by turn().
template <class FindTurn>
MLA_HD int64_t number_of_rank(const TopkToSlotsParams& p, int64_t number, const FindTurn& find_turn) {
  const int64_t turn = find_turn(number), within = number - turn * p.turn() - p.rank * p.interleave;
  return within < 0 || within >= p.interleave ? -1 : turn * p.interleave + within;
}

// The slot of a token, or -1. find_page divides by the page size.
template <class FindPage, class FindTurn>
MLA_HD int32_t token_slot(const TopkToSlotsParams& p, int64_t request, int64_t token,
                          const FindPage& find_page, const FindTurn& find_turn) {
  if (p.is_packed() && !p.by_slot && token >= 0) token = number_of_rank(p, token, find_turn);
  if (token < 0) return -1;
  const int64_t page_index = find_page(token);
  if (page_index >= p.max_pages) return -1;
  const int64_t page = p.page_table[request * p.page_table_stride_request + page_index];
  int64_t slot = page * p.page_size + (token - page_index * p.page_size);
  if (page < 0 || slot >= (p.world_size << 31)) return -1;
  if (p.is_packed() && p.by_slot) slot = number_of_rank(p, slot, find_turn);
  return slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
}

namespace cpu {
void topk_to_slots(const TopkToSlotsParams& params);
}
namespace gpu {
void topk_to_slots(const TopkToSlotsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
