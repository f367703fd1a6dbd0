#pragma once
// Keys that neighbouring queries share: the drafts of a request choose mostly the same ones, and so do
// neighbours in a prompt. Groups of consecutive queries are cut into tiles, whose heads fill a CTA of 64
// rows. A tile has a list of the keys of all its queries, each once, with a mark: a bit for each query that
// attends to it. A tile whose list would not pay has none: its queries go alone.
#include <cstdint>

#include "common/macros.h"
#include "ops/sparse_attention.h"

namespace mla_fp8 {

inline constexpr int kMaxTileQueries = 8;  // a bit each
inline constexpr int64_t kMaxQueryGroup = 1 << 16;
inline constexpr unsigned kFewTiles = 48;  // fewer leave SMs idle

// Consecutive queries, `group` to a group (the last may have fewer).
struct QueryTiles {
  unsigned num_queries, group;
  unsigned tile;      // queries of a tile, at most
  unsigned of_group;  // tiles

  QueryTiles() = default;
  MLA_HD QueryTiles(int64_t queries, int64_t group_size, int num_q_heads)
      : num_queries(static_cast<unsigned>(queries)), group(1) {
    if (group_size > 1) group = static_cast<unsigned>(group_size < queries ? group_size : queries);
    if (group == 0) group = 1;
    const unsigned most = num_q_heads <= 8 ? kMaxTileQueries : num_q_heads >= 64 ? 1 : 64 / num_q_heads;
    of_group = ceil_div(group, most);
    if (count() <= kFewTiles && group >= 4 * of_group) of_group *= 2;  // in place of CTAs that share a tile
    tile = ceil_div(group, of_group);
  }
  MLA_HD unsigned count() const { return ceil_div(num_queries, group) * of_group; }
  MLA_HD unsigned first(unsigned i) const { return i / of_group * group + i % of_group * tile; }
  MLA_HD unsigned size(unsigned i) const {  // 0 past the end of a group that is short
    const unsigned begin = first(i), end_of_group = (i / of_group + 1) * group;
    const unsigned end = end_of_group < num_queries ? end_of_group : num_queries;
    return begin >= end ? 0 : end - begin < tile ? end - begin : tile;
  }
  MLA_HD unsigned of(unsigned query) const { return query / group * of_group + query % group / tile; }
};

// The list of a tile, in 4-byte words: its length, or -1 where there is none; kListHead; then `capacity`
// slots, those of the second cache with the sign bit; then as many marks, a byte each. In the order of
// (whether all queries attend to it, first if they do; the part that its hash names; the first query that
// attends to it, its place there).
inline constexpr int kListHead = 4;

// Of a problem's lists together.
struct SharedKeysShape {
  QueryTiles queries;
  int64_t num_tiles;
  int64_t entries;          // of a tile, at most: keys of each of its queries
  int64_t capacity, words;  // of a list

  explicit SharedKeysShape(const SparseAttentionParams& p)
      : queries(p.num_tokens, p.query_groups, p.num_q_heads),
        num_tiles(queries.count()),
        entries(queries.tile * num_keys(p)),
        capacity(align_up(entries, int64_t{16})),
        words(kListHead + capacity + capacity / 4) {}
};

namespace cpu {
void plan_shared_keys(const SparseAttentionParams& params);
}
namespace gpu {
// The lists of params' indices to its workspace. -1 for all lengths where no kernel would take one.
void plan_shared_keys(const SparseAttentionParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
