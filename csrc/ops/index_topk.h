#pragma once
// The exact top-k of index_logits under a total order: larger logit, then lower position; NaN last.
#include "ops/index_logits.h"

namespace mla_fp8 {

inline constexpr int kMaxIndexTopk = 4096, kMaxIndexBlocks = 4096;
// Candidates of a list: at most so many that four lists have no more columns than a row may see entries.
inline constexpr int64_t kMaxIndexCandidates = kMaxIndexEntries / (4 * IndexList::kBlock);

// The order key of a logit: larger keys are chosen first. -0 counts as 0, each NaN is 1, and 0 means no
// logit. A pinned entry's key is above all others.
inline constexpr uint32_t kPinnedKey = 0xfffffffeu, kLeastBlockKey = 0x00800000u;  // above the key of -inf
MLA_HD uint32_t order_key_unless_minus_zero(float logit) {
  const uint32_t u = float_bits(logit);
  const uint32_t key = u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | kSignMask);
  return logit != logit ? 1 : key;
}
MLA_HD uint32_t order_key(float logit) { return order_key_unless_minus_zero(logit + 0.0f); }
// The logit of a key that is not NaN's; -0 has become 0.
MLA_HD float logit_of(uint32_t key) {
  return bits_float(~(key ^ (static_cast<uint32_t>(static_cast<int32_t>(key) >> 31) & ~kSignMask)));
}
// The total order as one number: a larger key, then a lower column. No two entries of a row share one.
MLA_HD uint64_t order_of(uint32_t key, int32_t column) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(~column);
}
MLA_HD int32_t column_of(uint64_t order) { return static_cast<int32_t>(~static_cast<uint32_t>(order)); }

struct IndexTopkParams {
  IndexProblem problem;
  int topk;
  int64_t pin_first, pin_last;  // entries of a row that are chosen before all others

  const int32_t* slot_page_table;  // the keys' page table, unless the caller gave another
  int64_t slot_page_table_stride_request, slot_max_pages, slot_page_size;
  const void* k_slots;  // ragged: [num_columns], or null: the column itself
  bool k_slots_are_int64;

  // Rows choose only among blocks of IndexList::kBlock entries, if has_candidates: [rows or requests,
  // num_candidates], in any order and with any numbers.
  bool has_candidates;
  const int32_t* candidates;
  int64_t candidates_stride, num_candidates;
  bool candidates_are_of_rows;

  int32_t* positions;  // [num_rows, topk] ascending, then -1
  int64_t positions_stride_row;
  int32_t* slots;  // [num_rows, topk] or null
  int64_t slots_stride_row;
  int32_t* lens;  // [num_rows]
  float* scores;  // [num_rows, topk] logits of positions, then -inf; or null
  int64_t scores_stride_row;
  // The blocks of each row with the largest logits: [num_rows, num_blocks] ascending, then -1; or null.
  int32_t* blocks;
  int64_t blocks_stride_row;
  int num_blocks;

  uint8_t* workspace;  // on GPUs
  int64_t workspace_bytes;
  uint8_t* counters;  // gpu::IndexCounters, all 0; or null: in the workspace, which may hold anything

  // The position of a column of a row, and the column of the keys where its entry is.
  struct Place {
    int32_t position, column;
  };
  MLA_HD Place place(int64_t i, const IndexRow& row, int32_t column) const {
    const IndexList& list = problem.keys.list;
    if (list.elements == nullptr) return {column - row.begin, column};
    const int32_t position = list.position_of(i, column);
    return {position, problem.keys.page_table ? position : static_cast<int32_t>(row.request) + position};
  }
  MLA_HD bool is_pinned(int64_t i, const IndexRow& row, int32_t column) const {
    const IndexList& list = problem.keys.list;
    if (list.elements == nullptr) return column - row.begin < pin_first || row.end - column <= pin_last;
    const int32_t position = list.position_of(i, column);
    return position < pin_first || list.ends[i] - position <= pin_last;
  }
  // The slot of a column, or -1. find_page divides by slot_page_size.
  template <class FindPage>
  MLA_HD int32_t slot(const IndexRow& row, int32_t column, const FindPage& find_page) const {
    if (problem.keys.page_table == nullptr) {
      if (k_slots == nullptr) return column;
      const int64_t slot = k_slots_are_int64 ? static_cast<const int64_t*>(k_slots)[column]
                                             : static_cast<const int32_t*>(k_slots)[column];
      return slot == static_cast<int32_t>(slot) ? static_cast<int32_t>(slot) : -1;
    }
    const int64_t page_index = find_page(column);
    if (page_index >= slot_max_pages) return -1;
    const int64_t page = slot_page_table[row.request * slot_page_table_stride_request + page_index];
    const int64_t slot = page * slot_page_size + (column - page_index * slot_page_size);
    return page < 0 || slot > INT32_MAX ? -1 : static_cast<int32_t>(slot);
  }
};

namespace cpu {
void index_topk(const IndexTopkParams& params);
}
namespace gpu {

// Each CTA of the GPU kernels has, for each of kIndexGroupRows rows that share keys, a list of candidates,
// and room for the best of a unit that an earlier CTA began. Sizes follow from topk, whatever the context is.
inline constexpr int kIndexGroupRows = 4;
inline constexpr int kIndexListSlack = 256;  // columns between two looks at how full a list is
MLA_HD constexpr int index_list_capacity(int topk) {
  return (2 * topk > 2048 ? 2 * topk : 2048) + kIndexListSlack;
}
struct alignas(64) IndexCtaState {     // what a CTA leaves for the merge
  int64_t per_cta;                     // steps
  int64_t unit;                        // the unit that an earlier CTA began and this one goes on with, or -1
  int64_t first_step, num_tiles;       // of that unit
  int32_t counts[2][kIndexGroupRows];  // of its lists: of a unit that it began, and of an earlier CTA's
  int32_t num_rows, begin;             // rows of the unit; its first column
  bool are_kept, are_answered;         // all tiles' keys; all rows; then only the next means anything
  bool are_binned;                     // keys of long rows are counted
  IndexRow rows[kIndexGroupRows];
};
// Counters that the CTAs of a call on Hopper share. All are 0 before the call, and after it.
struct alignas(16) IndexArrivals {  // of a unit, by the CTA that begins it
  uint32_t shares;                  // shares that have their keys in the workspace
};
struct alignas(16) IndexRowBins {  // of a long row: how many of its keys have the same upper bits
  static constexpr int kBits = 13, kShift = 32 - kBits, kBins = 1 << kBits;
  uint32_t bins[kBins];
};
struct IndexCounters {
  static constexpr int kMostRows = 64;  // rows whose keys are counted
  IndexArrivals* arrivals;
  IndexRowBins* bins;
};
// Entries of a list that is kept for the merge: a multiple of 16 bytes.
MLA_HD constexpr int64_t index_kept_capacity(int topk) { return topk + topk % 2; }
constexpr int64_t index_topk_workspace(int64_t num_rows, int topk, int num_ctas) {
  const int64_t rows = num_rows < kIndexGroupRows ? num_rows : kIndexGroupRows;
  const int64_t entries = rows * (index_list_capacity(topk) + index_kept_capacity(topk));
  return num_ctas * (static_cast<int64_t>(sizeof(IndexCtaState)) + 8 * entries);
}
constexpr int64_t index_topk_counters(int num_ctas) {  // bytes
  return num_ctas * int64_t{sizeof(IndexArrivals)} + IndexCounters::kMostRows * int64_t{sizeof(IndexRowBins)};
}
// Rows that choose among candidates, or publish blocks, have memory behind the scan's workspace. `rows` of
// them have room at a time.
struct IndexSlices {
  static constexpr int64_t kListBytes = 12 << 20, kBlockBytes = 17 << 20;  // of all rows at a time
  static constexpr int64_t kMostScanBytes = 16 << 20;                      // unless more are needed anyway
  static constexpr int kRowBytes = 3 * sizeof(int32_t);                    // origins, ends, columns

  int64_t rows, scan_bytes, row_bytes;

  IndexSlices(const IndexTopkParams& p, int num_ctas) {
    const int64_t all = p.problem.rows.num_rows, list_words = p.num_candidates;
    const int64_t block_words = p.num_blocks > 0 ? block_pitch(p.problem.rows.num_columns) : 0;
    scan_bytes = index_topk_workspace(all, p.topk, num_ctas);
    row_bytes = kRowBytes + 4 * (list_words + block_words);
    const int64_t most = (list_words > 0 ? kListBytes : kBlockBytes) / row_bytes,
                  at_once =
                      most < kIndexGroupRows ? kIndexGroupRows : most / kIndexGroupRows * kIndexGroupRows;
    rows = at_once < all ? at_once : all;
    // Room for the keys of all columns. Lists that several rows share have more columns.
    const int64_t keys = align_up<int64_t>(rows * list_words * IndexList::kBlock * 5, 16);
    const int64_t wanted = keys < kMostScanBytes ? keys : kMostScanBytes;
    if (scan_bytes < wanted) scan_bytes = wanted;
  }
  // Words from the keys of a row's blocks to the next row's.
  static int64_t block_pitch(int64_t num_columns) {
    return align_up<int64_t>(ceil_div<int64_t>(num_columns, IndexList::kBlock), 128);
  }
  // Rows, padded to whole lists however many of them share one.
  int64_t padded_rows() const { return align_up<int64_t>(rows + kIndexGroupRows - 1, kIndexGroupRows); }
  int64_t bytes() const { return scan_bytes + padded_rows() * row_bytes; }
};
inline int64_t index_topk_workspace(const IndexTopkParams& p, int num_ctas) {
  const bool is_plain = p.num_candidates == 0 && p.num_blocks == 0;
  return is_plain ? index_topk_workspace(p.problem.rows.num_rows, p.topk, num_ctas)
                  : IndexSlices(p, num_ctas).bytes();
}
int index_topk_ctas();  // on the current device
void index_topk(const IndexTopkParams& params, gpuStream_t stream);

}  // namespace gpu

}  // namespace mla_fp8
