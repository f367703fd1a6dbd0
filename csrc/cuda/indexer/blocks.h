#pragma once
// The two levels of the indexer around the choice of entries: lists of the blocks that rows choose among, and
// the blocks that rows publish.
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

// Some rows of a call, whose lists are made: `rows` neighbours have one. Beyond `count`, rows see nothing.
struct ListedRows {
  int64_t first, count;
  int rows;
  int32_t *origins, *ends,
      *columns;       // [count, rounded up to whole lists]; columns: those of the list that a row sees
  int32_t* elements;  // [lists, stride], of an IndexList
  int64_t stride;
};
// Without candidates: origins and ends alone.
void make_lists(const IndexTopkParams& params, const ListedRows& listed, gpuStream_t stream);

// The largest order keys of the blocks of each row: 0 where nothing is present.
struct BlockKeys {
  uint32_t* words = nullptr;
  int64_t pitch = 0;
};
void clear_block_keys(const BlockKeys& keys, int64_t num_rows, gpuStream_t stream);
// To `blocks` of the rows, whose lengths are those of the problem.
void choose_blocks(const IndexTopkParams& params, const BlockKeys& keys, gpuStream_t stream);

}  // namespace mla_fp8::gpu
