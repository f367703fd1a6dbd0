#pragma once
// Lists of the keys that neighbouring queries share: drafts of a request, or neighbours in a prompt, choose
// mostly the same keys. Groups of consecutive queries are cut into tiles, whose heads fill a CTA of 64 rows.
// A tile's list has each key of its queries once, with a mark: one bit for each query that attends to it. A
// tile whose list would not pay has none, and its queries go alone.
#include <cstdint>

#include "common/macros.h"
#include "ops/sparse_attention.h"

namespace mla_fp8 {

inline constexpr int kMaxTileQueries = 8;  // a mark has a bit for each
inline constexpr int64_t kMaxQueryGroup = 1 << 16;
inline constexpr unsigned kFewTiles = 48;  // fewer tiles leave SMs idle

// Cuts queries into groups of `group` consecutive ones (the last may have fewer), and groups into tiles.
struct QueryTiles {
  unsigned num_queries, group;
  unsigned tile;      // queries of a tile, at most
  unsigned of_group;  // tiles of a group

  QueryTiles() = default;
  MLA_HD QueryTiles(int64_t queries, int64_t group_size, int num_q_heads)
      : num_queries(static_cast<unsigned>(queries)), group(1) {
    if (group_size > 1) group = static_cast<unsigned>(group_size < queries ? group_size : queries);
    if (group == 0) group = 1;
    const unsigned most = num_q_heads <= 8 ? kMaxTileQueries : num_q_heads >= 64 ? 1 : 64 / num_q_heads;
    of_group = ceil_div(group, most);
    if (count() <= kFewTiles && group >= 4 * of_group) of_group *= 2;  // CTAs do not share a tile: make two
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

// A tile's list in 4-byte words: its length, or -1 for no list; padding up to kListHead; `capacity` slots,
// with the sign bit for the second cache; `capacity` marks, a byte each. Keys that all queries attend to come
// first. Next in the order are the part that a key's hash names, its first query, and its place in that
// query.
inline constexpr int kListHead = 4;

// The sizes of a problem's lists.
struct SharedKeysShape {
  QueryTiles queries;
  int64_t num_tiles;
  int64_t entries;          // keys of a tile's queries, at most
  int64_t capacity, words;  // slots and 4-byte words of a list

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
// Writes the lists of params' indices to its workspace. All lengths are -1 where no kernel would use a list.
void plan_shared_keys(const SparseAttentionParams& params, gpuStream_t stream);
}  // namespace gpu

}  // namespace mla_fp8
