#pragma once
// The best of several lists of candidates, one list from each rank that has chosen among its own entries.
#include <limits>

#include "ops/index_topk.h"

namespace mla_fp8 {

struct MergeTopkParams {
  int64_t num_lists, num_rows, per_list;
  int topk;
  const float* scores;  // [num_lists, num_rows, per_list]
  int64_t scores_stride_list, scores_stride_row;
  // The same shape, or of list `own` alone; then a candidate's place among all stands for its position.
  const int32_t* positions;
  int64_t positions_stride_list, positions_stride_row;
  int64_t own;          // or -1
  int interleave_bits;  // of the neighbours that a rank owns, where it numbers its own entries alone; or -1

  int32_t* out_positions;  // [num_rows, topk] ascending, then -1
  int64_t out_positions_stride_row;
  int32_t* out_lens;  // [num_rows]

  MLA_HD int64_t num_candidates() const { return num_lists * per_list; }
  // The order of candidate i of all of a row, which is number `place` of `list`; 0 if there is none.
  MLA_HD uint64_t order(int64_t row, int64_t i, int64_t list, int64_t place) const {
    const float score = scores[list * scores_stride_list + row * scores_stride_row + place];
    if (own >= 0) return score == kNone ? 0 : order_of(order_key(score), static_cast<int32_t>(i));
    const int32_t own_position = positions[list * positions_stride_list + row * positions_stride_row + place];
    const int32_t position = of_request(own_position, list);
    return position < 0 ? 0 : order_of(order_key(score), position);
  }
  // The position that is written for a chosen candidate, or -1 for nothing.
  MLA_HD int32_t answer(int64_t row, uint64_t order) const {
    if (own < 0) return column_of(order);
    const int64_t place = column_of(order) - own * per_list;
    if (place < 0 || place >= per_list) return -1;
    return of_request(positions[row * positions_stride_row + place], own);
  }

 private:
  // The position of a list's entry in the request; -1 if that is no int32.
  MLA_HD int32_t of_request(int32_t position, int64_t list) const {
    if (interleave_bits < 0 || position < 0) return position;
    const int64_t turn = position >> interleave_bits, of_others = turn * (num_lists - 1) + list;
    const int64_t number = position + (of_others << interleave_bits);
    return number > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(number);
  }

  static constexpr float kNone = -std::numeric_limits<float>::infinity();
};

namespace cpu {
void merge_topk(const MergeTopkParams& params);
}
namespace gpu {
void merge_topk(const MergeTopkParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
