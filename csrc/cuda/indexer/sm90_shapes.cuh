#pragma once
// Chooses the kernel for a call of index_topk or index_logits on Hopper, and whether its keys come as boxes.
#include <algorithm>

#include "cuda/indexer/sm90.h"
#include "cuda/indexer/sm90_rows.cuh"

namespace mla_fp8::gpu::sm90_index {

// How consumers divide a unit: lines of queries a row, rows a warpgroup, warpgroups that share the rows.
template <int kLines, int kRowsEach, int kParts, bool kIsFp4 = false, Keeping kKeys = Keeping::kMaybe>
struct Shape {
  static constexpr int kHeads = kLines, kRows = kRowsEach, kShares = kParts, kUnitRows = kRows * kShares;
  static constexpr int kQueryLines = kHeads * kUnitRows;
  static constexpr bool kFp4 = kIsFp4;
  static constexpr Keeping kKeeping = kKeys;
  using WithFp4 = Shape<kLines, kRowsEach, kParts, true>;
  template <Keeping kOther>
  using With = Shape<kLines, kRowsEach, kParts, kIsFp4, kOther>;
};
// Calls fn with the shape for units of `unit_rows` rows.
template <class Fn>
void with_shape(int num_heads, int unit_rows, bool is_fp4, const Fn& fn) {
  const auto with_keys = [&](auto shape) {
    if (is_fp4) fn(typename decltype(shape)::WithFp4{});
    else fn(shape);
  };
  if (num_heads <= 16) return with_keys(Shape<16, 4, 1>{});
  if (num_heads <= 32) return unit_rows <= 2 ? with_keys(Shape<32, 2, 1>{}) : with_keys(Shape<32, 4, 1>{});
  if (unit_rows == 1) return with_keys(Shape<64, 1, 1>{});
  return unit_rows == 2 ? with_keys(Shape<64, 2, 1>{}) : with_keys(Shape<64, 2, 2>{});
}

// Launches the scan of shape S (index_scan_sm90.cu).
template <class S>
void launch_scan(const LaunchConfig& config, const ScanArgs& args);

// Rows of a unit, at most `most`, so that the units of a request are about equal. With more than 32 heads
// three rows take as long as four, so five to eight rows of a request are units of two.
inline int unit_rows(const IndexRows& rows, int64_t most, int num_heads) {
  most = std::min(most, rows.num_rows);
  if (rows.k_start || rows.query_start_loc) return static_cast<int>(most);
  if (num_heads > 32 && rows.next_n >= 5 && rows.next_n <= 8) most = std::min<int64_t>(most, 2);
  const int64_t units = (rows.next_n + most - 1) / most;
  return static_cast<int>((rows.next_n + units - 1) / units);
}
inline bool has_fp4_keys(const IndexProblem& problem) {
  return problem.keys.layout == IndexLayoutId::kIndexFp4;
}

inline KeyBoxes key_boxes(const IndexProblem& problem, int unit_rows) {
  const IndexKeys& keys = problem.keys;
  KeyBoxes boxes{};
  const bool is_paged = keys.page_table != nullptr, is_listed = keys.list.elements != nullptr;
  boxes.are_read_again =
      problem.rows.k_start || problem.rows.query_start_loc || problem.rows.next_n > unit_rows;
  const int64_t rows = is_paged || is_listed ? keys.page_size : problem.rows.num_columns;
  const uintptr_t scales = reinterpret_cast<uintptr_t>(keys.scales) | keys.scales_stride_page;
  const int row_bytes = has_fp4_keys(problem) ? kIndexDim / 2 : kIndexDim,
            box_keys = is_listed ? IndexList::kBlock : kItemKeys;
  if ((is_listed && keys.list.shift != IndexList::kBlockShift) ||
      (is_paged && keys.page_size % box_keys != 0) || keys.values_stride_row != row_bytes ||
      (!is_listed && scales % 16 != 0) || keys.num_pages > INT32_MAX || keys.num_pages < 1 || rows < 1)
    return boxes;
  boxes.are_used = true;
  boxes.are_whole =
      is_listed && keys.list.most_whole > 0 && keys.page_size % kItemKeys == 0 && scales % 16 == 0;
  if (!has_fp4_keys(problem)) {  // FP4 keys of an item are contiguous: no swizzle, so no tensor map
    const int64_t page_stride = keys.num_pages > 1 ? keys.values_stride_page : rows * kIndexDim;
    const auto make = [&](CUtensorMap& map, int keys_of_box) {
      return make_tensor_map(map, keys.values, kIndexDim, rows, keys.num_pages, kIndexDim, page_stride,
                             keys_of_box);
    };
    boxes.are_used = make(is_listed ? boxes.block_map : boxes.map, box_keys);
    boxes.are_whole = boxes.are_whole && make(boxes.map, kItemKeys);
  }
  boxes.are_blocks = is_listed && boxes.are_used;
  return boxes;
}

}  // namespace mla_fp8::gpu::sm90_index
