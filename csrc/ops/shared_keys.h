#pragma once
// Lists of the keys that neighbouring queries share: drafts of a request, or neighbours in a prompt, choose
// mostly the same keys. Groups of consecutive queries are cut into tiles, whose heads fill a CTA of 64 rows.
// A tile's list has each key of its queries once, with a mark: one bit for each query that attends to it. A
// tile whose list would not pay has none: its queries go alone, and so do queries of no group.
#include <cstdint>

#include "common/macros.h"
#include "ops/sparse_attention.h"

namespace mla_fp8 {

inline constexpr int kMaxTileQueries = 8;  // a mark has a bit for each
inline constexpr int64_t kMaxQueryGroup = 1 << 16;
inline constexpr unsigned kFewTiles = 48;  // fewer tiles leave SMs idle

// Cuts queries into groups, and groups into tiles. A group has `group` consecutive queries (the last group
// may have fewer), or with a query_start_loc the first `group` queries of a request.
struct QueryTiles {
  unsigned num_queries, group, num_groups;
  unsigned tile;      // queries of a tile, at most
  unsigned of_group;  // tiles of a group
  // query_start_loc is null, or lies on the device: [num_groups + 1]. Its values only say who shares with
  // whom: a tile may have any queries, and a query that no tile has goes alone.
  const int32_t* query_start_loc;

  QueryTiles() = default;
  MLA_HD QueryTiles(int64_t queries, int64_t group_size, int num_q_heads, const int32_t* starts = nullptr,
                    int64_t num_requests = 0)
      : num_queries(static_cast<unsigned>(queries)), group(1), query_start_loc(starts) {
    if (group_size > 1) group = static_cast<unsigned>(group_size < queries ? group_size : queries);
    if (group == 0) group = 1;
    num_groups = starts ? static_cast<unsigned>(num_requests) : ceil_div(num_queries, group);
    const unsigned most = num_q_heads <= 8 ? kMaxTileQueries : num_q_heads >= 64 ? 1 : 64 / num_q_heads;
    of_group = ceil_div(group, most);
    if (count() <= kFewTiles && group >= 4 * of_group) of_group *= 2;  // CTAs do not share a tile: make two
    tile = ceil_div(group, of_group);
  }
  MLA_HD int64_t count() const { return int64_t{num_groups} * of_group; }

  struct Queries {
    unsigned first, count;
  };
  // start_of() may be negative, for values that no engine has. All callers get the same number.
  MLA_HD int start_of(unsigned request) const {
    return static_cast<int>(static_cast<unsigned>(query_start_loc[request]) -
                            static_cast<unsigned>(query_start_loc[0]));
  }
  MLA_HD Queries group_at(unsigned i) const {
    const int all = static_cast<int>(num_queries);
    const int first = query_start_loc ? start_of(i) : static_cast<int>(i * group);
    int end = query_start_loc ? start_of(i + 1) : all;
    if (end > all) end = all;
    if (first < 0 || first >= end) return {0, 0};
    const auto count = static_cast<unsigned>(end - first);
    return {static_cast<unsigned>(first), count < group ? count : group};
  }
  MLA_HD Queries tile_at(unsigned i_group, unsigned in_group) const {
    const Queries all = group_at(i_group);
    const unsigned before = in_group * tile;
    if (before >= all.count) return {0, 0};  // past the end of a group that is short
    return {all.first + before, all.count - before < tile ? all.count - before : tile};
  }
  MLA_HD Queries operator[](unsigned i) const { return tile_at(i / of_group, i % of_group); }
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
      : queries(p.num_tokens, p.query_groups, p.num_q_heads, p.window.query_start_loc, p.window.num_requests),
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
