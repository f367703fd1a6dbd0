#pragma once
// Queries, keys, and which entries a row sees, for index_logits and index_topk. Words: an entry is one index
// key. A row is a query token with its index heads. A column is what a row's logits count: positions of the
// request (paged) or indices of k (ragged).
#include <cstdint>

#include "common/fp4.h"
#include "common/requests.h"
#include "common/stream.h"

namespace mla_fp8 {

inline constexpr int kMaxIndexHeads = 64;
inline constexpr int64_t kMaxIndexEntries = int64_t{1} << 24;  // entries that a row may see

struct IndexQueries {
  int64_t num_rows;
  int num_heads;
  bool is_fp4;       // only over FP4 keys
  const uint8_t* q;  // [num_rows, num_heads, 128 or 64 bytes], heads one after another
  int64_t q_stride_row;
  const void* q_scale;  // e2m1: ue8m0 [num_rows, num_heads, 4]; e4m3: float [num_rows, num_heads] or null
  int64_t q_scale_stride_row;  // bytes
  const void* weights;         // [num_rows, num_heads] float or bf16
  int64_t weights_stride_row;  // elements
  bool weights_are_bf16;

  // The weight of a head's relu(q . k), for q as e4m3.
  MLA_HD float weight(int64_t row, int head) const {
    const int64_t i = row * weights_stride_row + head;
    const float w = weights_are_bf16 ? bf16_to_float(static_cast<const uint16_t*>(weights)[i])
                                     : static_cast<const float*>(weights)[i];
    if (q_scale == nullptr) return w;
    const uint8_t* scale = static_cast<const uint8_t*>(q_scale) + row * q_scale_stride_row + 4 * head;
    if (is_fp4) return w * E2m1Scales{scale[0], scale[1], scale[2], scale[3]}.scale();
    return w * *reinterpret_cast<const float*>(scale);
  }
};

// A list, where a row's columns are not all of its entries. An element of a list is one entry, or one block
// of entries. Positions count a row's entries. Rows of a list that share an element have the same entries.
// A whole list has an element for each block that its rows see, so its columns are positions.
struct IndexList {
  static constexpr int kBlockShift = 3, kBlock = 1 << kBlockShift;  // entries of a block
  static constexpr int kNumberBits = 24;  // of an element: the block's or entry's number; above, its rows

  const int32_t* elements;  // of all lists, negative for none; if null, no other member means anything
  int64_t stride;           // from a list to the next
  int shift;                // kBlockShift; or 0: elements are entries, without bits of rows
  int rows;                 // neighbouring rows that share a list
  int64_t num_positions;    // of any row: entries beyond are absent
  int64_t most_whole;       // the list is whole if none of its rows sees more entries
  const int32_t* origins;   // [num_rows] the request; without a page table, the column of position 0
  const int32_t* ends;      // [num_rows] entries that a row sees, in its list or not

  MLA_HD int32_t element(int64_t list, int32_t column) const {
    return elements[list * stride + (column >> shift)];
  }
  // Bit i: whether row i of the list has the element.
  MLA_HD uint32_t members(int32_t element) const {
    if (element < 0) return 0;
    return shift == 0 ? 1 : static_cast<uint32_t>(element) >> kNumberBits;
  }
  MLA_HD int32_t position(int32_t element, int32_t column) const {
    return (element & ((1 << kNumberBits) - 1)) << shift | (column & ((1 << shift) - 1));
  }
  MLA_HD int64_t list_of(int64_t row) const {
    return static_cast<uint32_t>(row) / static_cast<uint32_t>(rows);
  }
  MLA_HD int32_t position_of(int64_t row, int32_t column) const {
    return position(element(list_of(row), column), column);
  }
};

// Entries in pages. Without a table (ragged) all are in one page of any size.
struct IndexKeys {
  IndexLayoutId layout;
  const uint8_t* values;
  int64_t values_stride_page, values_stride_row;
  const uint8_t* scales;  // four bytes an entry, contiguous in a page
  int64_t scales_stride_page;
  int64_t num_pages, page_size;
  const int32_t* page_table;  // [num_requests, max_pages], or null
  int64_t page_table_stride_request;
  IndexList list;  // the lists, if columns are those of lists

  MLA_HD const uint8_t* value(int64_t page, int64_t row) const {
    return values + page * values_stride_page + row * values_stride_row;
  }
  MLA_HD const uint8_t* scale(int64_t page, int64_t row) const {
    return scales + page * scales_stride_page + 4 * row;
  }
  // The page of the columns from page_index * page_size on; -1 if their entries are absent.
  MLA_HD int64_t page(int64_t request, int64_t page_index) const {
    if (page_table == nullptr) return 0;
    const int64_t page = page_table[request * page_table_stride_request + page_index];
    return page >= 0 && page < num_pages ? page : -1;
  }
};

struct IndexRow {
  int64_t request;     // -1: the row is none's
  int32_t begin, end;  // columns that it sees
};

// The columns that each row sees.
struct IndexRows {
  int64_t num_rows, num_requests, next_n, compress_ratio;
  int64_t num_columns;             // of a request: max_pages * page_size; ragged: of k
  const int32_t* seq_lens;         // [num_requests] tokens, with those of the rows
  const int32_t* row_lens;         // [num_rows] entries, or null
  const int32_t* query_start_loc;  // [num_requests + 1]; if null, row / next_n is the request
  const int32_t* k_start;  // ragged: [num_rows]; then of the members above only the numbers mean something
  const int32_t* k_end;
  // [num_requests * next_n], if a row's number does not say its request; row_lens is given then, too. Either
  // each row is a request of its own, or (are_listed) next_n rows share an IndexList. With are_listed alone
  // all lists are whole, and rows are those of the call without lists.
  const int32_t* origins;
  bool are_listed;

  MLA_HD int32_t clamp(int64_t column) const {
    return static_cast<int32_t>(column < 0 ? 0 : column > num_columns ? num_columns : column);
  }
  MLA_HD IndexRow operator[](int64_t row) const {
    if (k_start) {
      const int32_t begin = clamp(k_start[row]), end = clamp(k_end[row]);
      return {0, begin, end < begin ? begin : end};
    }
    int64_t request = row / next_n, first = request * next_n, rows = next_n;
    if (query_start_loc) {
      request = find_request(query_start_loc, num_requests, row);
      if (request < 0) return {-1, 0, 0};
      first = int64_t{query_start_loc[request]} - query_start_loc[0];
      rows = int64_t{query_start_loc[request + 1]} - query_start_loc[request];
    }
    return {request, 0, visible(row, request, row - first, rows)};
  }
  // Entries that row `i` of a request's `rows` sees; it is row `row` of all.
  MLA_HD int32_t visible(int64_t row, int64_t request, int64_t i, int64_t rows) const {
    if (row_lens) return clamp(row_lens[row]);
    const int64_t tokens = seq_lens[request] - rows + 1 + i;
    if (tokens <= 0) return 0;
    return clamp(compress_ratio == 1 ? tokens : tokens / compress_ratio);
  }
};

struct IndexProblem {
  IndexQueries queries;
  IndexKeys keys;
  IndexRows rows;
};

struct IndexLogitsParams {
  IndexProblem problem;
  int64_t width;  // columns of out; ragged: of k
  float* out;     // [num_rows, width]
  int64_t out_stride_row;
};

namespace cpu {
void index_logits(const IndexLogitsParams& params);
}
namespace gpu {
void index_logits(const IndexLogitsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
