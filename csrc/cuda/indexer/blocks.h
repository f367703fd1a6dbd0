#pragma once
// The two levels of the indexer: make_lists makes lists of the blocks that rows choose among, choose_blocks
// writes the blocks that rows publish.
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

// Rows of a call for which lists are made: `count` rows from `first` on. Each `rows` neighbours share one
// list, and those beyond `count` see nothing.
struct ListedRows {
  int64_t first, count;
  int rows;
  int32_t *origins, *ends,
      *columns;       // [count, rounded up to whole lists]; columns: how many columns of its list a row sees
  int32_t* elements;  // [lists, stride]: the elements of an IndexList
  int64_t stride;
  int64_t most_whole;  // entries; a list is whole if none of its rows sees more
};
// Makes the lists. Without candidates it writes origins and ends alone.
void make_lists(const IndexTopkParams& params, const ListedRows& listed, gpuStream_t stream);

// The largest order key of each block of each row: 0 where no entry is present.
struct BlockKeys {
  uint32_t* words = nullptr;
  int64_t pitch = 0;
};
void clear_block_keys(const BlockKeys& keys, int64_t num_rows, gpuStream_t stream);
// Writes the best blocks of each row to params.blocks.
void choose_blocks(const IndexTopkParams& params, const BlockKeys& keys, gpuStream_t stream);

}  // namespace mla_fp8::gpu
