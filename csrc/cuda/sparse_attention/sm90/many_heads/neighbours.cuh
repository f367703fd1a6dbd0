#pragma once
// Tiles: items of several queries. Neighbours with 8, 16 or 32 heads each fill the 64 rows of a CTA, so a key
// is fetched and converted once for all of them.
//
//   keys    over windows and all entries of the past: request by request the union of the windows, then the
//           entries up to the last that any query sees. Over an indexer's choice: the tile's list
//           (ops/shared_keys.h)
//   marks   a key in the ring has a bit for each query that attends to it (over lists: for each octet of
//           heads)
//   S       where a query does not attend to a key, the logit is -inf
//
// Most tiles of entries have queries of one request. One that holds the end of a request and the beginning of
// others has their keys one after another; marks tell which queries see them.
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/many_heads/shares.cuh"

namespace mla_fp8::gpu {

// The numbers with which the logits warps read marks.
struct TileMarks {
  uint32_t all_queries;  // the marks of a key that all attend to
  int octets_log2;       // octets of a query; unused over lists, whose marks are of octets

  __device__ void describe(const SparseAttentionParams& p, int num_queries) {
    all_queries = (1u << num_queries) - 1;
    octets_log2 = num_queries == 1 ? 3 : __ffs(p.num_q_heads / kOctetHeads) - 1;
  }
};
// Turns marks of queries into those of their octets, 8 in all.
__device__ __forceinline__ uint32_t marks_of_octets(const SparseAttentionParams& p, uint32_t queries) {
  if (p.num_q_heads == kOctetHeads) return queries;
  const int octets = p.num_q_heads / kOctetHeads;  // 2 or 4
  uint32_t marks = 0;
#pragma unroll
  for (int i = 0; i < kMaxTileQueries / 2; ++i) marks |= (queries >> i & 1) << i * octets;
  return marks * ((1u << octets) - 1);
}

// The queries of a tile that belong to one request, and the positions of their keys in the tile.
struct TileRequest {
  const int32_t *window_pages, *entry_pages;
  unsigned first, first_entry, end;  // first window key, first entry, behind the last
  unsigned window_first;             // the first window key's position in the request
  unsigned least_entries;            // fewest entries that one of the queries sees
  int position;                      // position of the first query in the request
  int first_query, num_queries;
};
struct Tile {
  TileMarks marks;
  TileRequest requests[kMaxTileQueries];
  unsigned lens[kMaxTileQueries];  // entries that a query sees
  unsigned length;                 // positions of all
};

// The keys of a tile: a source for survey_keys and ValidKeys (keys.cuh).
class TileKeys {
 public:
  // A key as it was found. is_valid looks at the page later, when the load of its number is over.
  struct Key {
    int page;
    unsigned in_page;
    int scope;
    uint32_t queries;
    __device__ uint8_t marks() const { return static_cast<uint8_t>(queries); }
  };
  // Has `length` of the tile's positions, from `first` on, and numbers them from 0.
  __device__ __forceinline__ TileKeys(const KernelParams& params, const Tile& tile, unsigned first,
                                      unsigned length)
      : params_(params), p_(params.p), tile_(tile), first_(first), length_(length) {}
  __device__ __forceinline__ unsigned length() const { return length_; }
  __device__ __forceinline__ static constexpr bool is_window() { return true; }
  // survey_keys calls these for queries without a window only.
  __device__ __forceinline__ int entry(unsigned) const { return -1; }
  __device__ __forceinline__ bool is_slot(int, unsigned) const { return false; }
  __device__ __forceinline__ bool is_valid(Key key) const {
    const KvScope& scope = p_.scopes[key.scope];
    return key.page >= 0 && key.page * scope.page_size + key.in_page < scope.num_slots;
  }

  // The key at a position; page -1 past the end.
  __device__ __forceinline__ Key at(unsigned position) const {
    if (position >= length_) return {-1, 0, 0, 0};
    const Place place = find(position);
    const TileRequest& r = *place.request;
    const int64_t max_pages = place.extra ? p_.entry_pages.max_pages : p_.window.max_pages;
    if (place.page >= max_pages) return {-1, 0, 0, 0};
    return {
        .page = __ldg(place.pages() + place.page),
        .in_page = place.in_request - place.page * static_cast<unsigned>(p_.scopes[place.extra].page_size),
        .scope = place.extra,
        .queries = (place.extra ? see_entry(r, place.in_request) : see(r, place.in_request)) << r.first_query,
    };
  }
  // All threads bring the numbers of all pages close, before the survey asks for one after another.
  __device__ void fetch_pages(int thread, int num_threads) const {
    constexpr unsigned kLine = 32;  // a line of a table has at least as many keys
    for (unsigned position = thread * kLine; position < length_; position += num_threads * kLine) {
      const Place place = find(position);
      if (place.page < (place.extra ? p_.entry_pages.max_pages : p_.window.max_pages))
        prefetch_l1(place.pages() + place.page);
    }
  }

 private:
  struct Place {
    const TileRequest* request;
    bool extra;
    unsigned in_request, page;  // position in the request, number of the page
    __device__ __forceinline__ const int32_t* pages() const {
      return extra ? request->entry_pages : request->window_pages;
    }
  };
  __device__ __forceinline__ Place find(unsigned position) const {
    position += first_;
    int i = 0;
    while (position >= tile_.requests[i].end) ++i;
    const TileRequest& r = tile_.requests[i];
    const bool extra = position >= r.first_entry;
    const unsigned in_request = extra ? position - r.first_entry : r.window_first + (position - r.first);
    return {&r, extra, in_request, static_cast<unsigned>(params_.page_size[extra](in_request))};
  }
  // Bits of the request's queries whose windows have a position. It is `ahead` of the first query's.
  __device__ __forceinline__ uint32_t see(const TileRequest& r, unsigned in_request) const {
    const int ahead = static_cast<int>(in_request) - r.position;
    const auto window = static_cast<int>(min(p_.window.window_size, int64_t{1} << 29));
    const int first = max(ahead, 0), last = min(ahead + window, r.num_queries);
    return first < last ? (1u << last) - (1u << first) : 0;
  }
  __device__ __forceinline__ uint32_t see_entry(const TileRequest& r, unsigned entry) const {
    if (entry < r.least_entries) return (1u << r.num_queries) - 1;
    uint32_t queries = 0;
    for (int i = 0; i < r.num_queries; ++i)
      queries |= static_cast<uint32_t>(entry < tile_.lens[r.first_query + i]) << i;
    return queries;
  }

  const KernelParams& params_;
  const SparseAttentionParams& p_;
  const Tile& tile_;
  const unsigned first_, length_;
};

// The keys of a tile's list, all of them valid.
class ListedKeys {
 public:
  struct Key {
    int slot, scope;
    uint32_t octets;
    __device__ uint8_t marks() const { return static_cast<uint8_t>(octets); }
  };
  ListedKeys() = default;
  __device__ ListedKeys(const KernelParams& params, unsigned tile)
      : slots_(params.shared.list(tile) + kListHead),
        marks_(reinterpret_cast<const uint8_t*>(slots_ + params.shared.capacity)),
        p_(&params.p) {}
  // A slot outside its cache, as in a list for other caches, is a key that no query attends to.
  __device__ __forceinline__ Key at(unsigned position) const {
    const auto slot = static_cast<unsigned>(__ldg(slots_ + position));
    const uint32_t queries = __ldg(marks_ + position);
    const int in_cache = slot & ~(1u << 31), scope = slot >> 31;
    const int64_t num_slots = scope ? +p_->scopes[1].num_slots : +p_->scopes[0].num_slots;
    return in_cache < num_slots ? Key{in_cache, scope, marks_of_octets(*p_, queries)} : Key{0, 0, 0};
  }
  // All threads bring some keys close, as a survey does with entries: a line each.
  __device__ void fetch_lines(int first, int count, int thread) const {
    constexpr int kSlots = 32, kMarks = 128;  // in a line
    if (thread * kSlots < count) prefetch_l1(slots_ + first + thread * kSlots);
    if (thread * kMarks < count) prefetch_l1(marks_ + first + thread * kMarks);
  }
  // ValidKeys has these, but nothing to ask of a list.
  __device__ __forceinline__ static constexpr unsigned length() { return 0; }
  __device__ __forceinline__ static constexpr bool is_valid(Key) { return true; }

 private:
  const int32_t* slots_;
  const uint8_t* marks_;
  const SparseAttentionParams* p_;
};

// ---- what is no number ----------------------------------------------------------------------------------

// A query that does not attend to a key gives it a weight of zero, but zero times NaN is NaN. So NaN and
// infinite elements become zero in the stage's suspects (a lane's keys g and g + 8). Scales are zero already.
// Queries that attend to such a key have NaN among their weights, and need no second one.
template <class R>
__device__ __noinline__ void clear_values(uint8_t* rows, const bool (&suspects)[2], int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t lanes = __ballot_sync(kFullWarp, suspects[half]);
    for (int g = 0; g < 8; ++g) {
      if (!(lanes >> 4 * g & 0xf)) continue;
      uint8_t* const row = rows + (g + 8 * half) * R::kPitch;
      for (int at = lane * 4; at < R::kFp8Dims; at += kWarpSize * 4) {
        uint32_t& x = *reinterpret_cast<uint32_t*>(row + at);
        x &= ~__vcmpeq4(x & 0x7f7f7f7fu, 0x7f7f7f7fu);
      }
      for (int at = lane * 4; at < R::kBf16Dims * 2; at += kWarpSize * 4) {
        uint32_t& x = *reinterpret_cast<uint32_t*>(row + R::kBf16Offset + at);
        x &= ~__vcmpeq2(x & 0x7f807f80u, 0x7f807f80u);
      }
    }
  }
  __syncwarp();
}

// ---- items ----------------------------------------------------------------------------------------------

// Describes a tile. One warp calls it, with a query in each lane.
__device__ inline void describe_tile(const SparseAttentionParams& p, int64_t first, int count, Tile& tile,
                                     int lane) {
  WindowQuery query;
  int64_t begin = 0, end = 0;  // window of this lane's query, in the request
  unsigned entries = 0;
  if (lane < count) {
    query = find_query(p.window, first + lane);
    const Selection window(p, 0, first + lane, query);
    begin = window.first_position();
    end = begin + window.length();
    entries = static_cast<unsigned>(Selection(p, 1, first + lane, query).length());
    tile.lens[lane] = entries;
  }
  const auto request = static_cast<int>(query.request);
  const auto position = static_cast<int>(max(query.position, -(int64_t{1} << 30)));
  int num_requests = 0;
  unsigned length = 0;
  for (int i = 0; i < count;) {
    const int own = __shfl_sync(kFullWarp, request, i);
    const bool is_in = lane >= i && lane < count && request == own;
    const uint32_t in = __ballot_sync(kFullWarp, is_in) >> i;
    const int num_queries = __ffs(~in) - 1;  // up to the next of another request
    const bool counts = is_in && lane < i + num_queries;
    const unsigned most = __reduce_max_sync(kFullWarp, counts ? entries : 0);
    const unsigned least = __reduce_min_sync(kFullWarp, counts ? entries : ~0u);
    const bool has_window = counts && end > begin;
    const unsigned from = __reduce_min_sync(kFullWarp, has_window ? static_cast<unsigned>(begin) : ~0u);
    const unsigned to = __reduce_max_sync(kFullWarp, has_window ? static_cast<unsigned>(end) : 0);
    const unsigned window = to > from ? to - from : 0;
    const int first_position = __shfl_sync(kFullWarp, position, i);
    if (own >= 0) {
      if (lane == 0)
        tile.requests[num_requests++] = {
            .window_pages = p.window.page_table + own * p.window.page_table_stride_request,
            .entry_pages = p.entry_pages.page_table + own * p.entry_pages.page_table_stride_request,
            .first = length,
            .first_entry = length + window,
            .end = length + window + most,
            .window_first = from,
            .least_entries = least,
            .position = first_position,
            .first_query = i,
            .num_queries = num_queries,
        };
      length += window + most;
    }
    i += num_queries;
  }
  if (lane > 0) return;
  tile.length = length;
  tile.marks.describe(p, count);
}

// Neighbouring queries whose heads are the rows of a CTA; or one query, and maybe some of its heads.
struct NeighbourHeads : QueryHeads {
  int num_queries, num_rows;

  NeighbourHeads() = default;
  __device__ NeighbourHeads(const SparseAttentionParams& p, int64_t first_query, int count, int first,
                            int most_rows)
      : QueryHeads{first_query, first},
        num_queries(count),
        num_rows(min(count * p.num_q_heads - first, most_rows)) {}
  // The heads of a tile of entries.
  template <class C>
  __device__ static NeighbourHeads of_item(const KernelParams& params, unsigned tile) {
    const unsigned index = tile / params.num_head_blocks();
    const int64_t first = int64_t{index} * params.tile_queries;
    return {params.p, first, static_cast<int>(min(int64_t{params.tile_queries}, params.p.num_tokens - first)),
            static_cast<int>(tile - index * params.num_head_blocks()) * C::kHeads, C::kHeads};
  }

  __device__ int num_heads(const SparseAttentionParams&, int) const { return num_rows; }
  __device__ bool has_head(const SparseAttentionParams&, int row) const { return row < num_rows; }
  __device__ int64_t query_of(const SparseAttentionParams& p, int row) const {
    return query + row / p.num_q_heads;
  }
  __device__ int head_of(const SparseAttentionParams& p, int row) const {
    return first_head + row % p.num_q_heads;
  }
  __device__ const uint16_t* q_of_head(const SparseAttentionParams& p, int row) const {
    return p.q + query_of(p, row) * p.q_stride_token + head_of(p, row) * p.q_stride_head;
  }
  __device__ bool is_q_dense(const SparseAttentionParams& p, int dims) const {
    return p.q_stride_head == dims && p.q_stride_token == int64_t{p.num_q_heads} * dims;
  }

  // Masks in tiles: a key counts for the heads of some queries, and not for others. NaN or infinity in a key
  // must not meet the zero weight of a query that does not attend to it.
  template <class C, class Scales>
  __device__ __forceinline__ static void mask(uint8_t* smem, int stage, const Scales& scales, int lane,
                                              float (&s)[C::kOctets][4]) {
    constexpr int kOctets = C::kOctets;
    const TileMarks& tile = *reinterpret_cast<const TileMarks*>(smem + MLA_SMEM(C, tile));
    const uint8_t* const valid = smem + MLA_SMEM(C, valid) + stage * kStageRows;
    const int g = lane / 4;
    const uint32_t queries[2] = {valid[g], valid[g + 8]}, all = tile.all_queries;
    if (!__any_sync(kFullWarp,
                    queries[0] != all || queries[1] != all || scales.is_nan[0] || scales.is_nan[1]))
      return;
    // NaN or infinity in a key shows in all its logits, with any Q: one of them tells.
    const auto is_finite = [](float x) { return fabsf(x) < INFINITY; };
    const bool suspects[2] = {queries[0] != all && (scales.is_nan[0] || !is_finite(s[0][0])),
                              queries[1] != all && (scales.is_nan[1] || !is_finite(s[0][2]))};
    if (__any_sync(kFullWarp, suspects[0] || suspects[1] || scales.is_nan[0] || scales.is_nan[1]))
        [[unlikely]] {
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (scales.is_nan[c / 2]) s[n][c] = NAN;
      clear_values<typename C::R>(smem + MLA_SMEM(C, ring) + stage * C::kStageBytes, suspects, lane);
    }
    const int octets_log2 = C::Item::kIsListed ? 0 : tile.octets_log2;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const bool attends[2] = {(queries[0] >> (n >> octets_log2) & 1) != 0,
                               (queries[1] >> (n >> octets_log2) & 1) != 0};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (!attends[c / 2]) s[n][c] = -INFINITY;
    }
  }
};

struct TileItem : ItemOf<NeighbourHeads> {
  using Source = TileKeys;
  using InShared = Tile;
  static constexpr bool kNeighbours = true;
  static constexpr int kMostParts = kMaxTileParts;
  const Tile* tile;
  int part, num_parts;     // this CTA's part of the keys
  unsigned first, length;  // the positions of that part

  __device__ Source source(const KernelParams& params) const { return {params, *tile, first, length}; }
  __device__ bool is_whole() const { return num_parts == 1; }
  __device__ bool is_left_out(const KernelParams&) const { return num_parts == 0; }
  __device__ static PartsOfTile parts_of(const KernelParams& params, int tile) {
    return parts_of_tile(params, tile);
  }

  // All threads call it; a barrier comes before the tile is read.
  template <class C>
  __device__ static TileItem find(const KernelParams& params, uint8_t* smem, int warp, int lane) {
    auto& tile = *reinterpret_cast<Tile*>(smem + MLA_SMEM(C, tile));
    TileItem item;
    NeighbourHeads& heads = item;
    item.split = 0;
    TileShare share{static_cast<int>(blockIdx.x), 0, 1};
    if (params.num_tiles > 0)
      share = find_share<C::kThreads>(params, smem + MLA_SMEM(C, weights_fp8), threadIdx.x);
    heads = of_item<C>(params, share.tile);
    item.tile = &tile, item.part = share.part, item.num_parts = share.num_parts;
    if (warp == 0) describe_tile(params.p, heads.query, heads.num_queries, tile, lane);
    return item;
  }
  // Once the tile is known, finds the positions of this part.
  template <class C>
  __device__ void begin(const KernelParams& params, int thread) {
    const unsigned blocks = ceil_div(tile->length, unsigned{kShareBlockKeys});
    const unsigned each = blocks / num_parts, longer = blocks % num_parts;
    first = min((part * each + min(unsigned(part), longer)) * kShareBlockKeys, tile->length);
    length = min((each + (part < longer)) * kShareBlockKeys, tile->length - first);
    source(params).fetch_pages(thread, C::kThreads);
  }
  // The CTA takes all blocks of its part.
  template <class C>
  __device__ void take_share(int num_keys, const Divider&) {
    static_assert(C::kBlockKeys == kShareBlockKeys);
    first_block = 0, num_blocks = ceil_div(num_keys, C::kBlockKeys);
  }
};
struct ListItem : ItemOf<NeighbourHeads> {
  using Source = ListedKeys;
  using InShared = TileMarks;
  static constexpr bool kNeighbours = true, kIsListed = true;
  Source keys;
  int num_keys;  // < 0: this tile has no list
  __device__ const Source& source(const KernelParams&) const { return keys; }
  __device__ bool is_left_out(const KernelParams&) const { return num_keys < 0; }

  // The same as of TileItem.
  template <class C>
  __device__ static ListItem find(const KernelParams& params, uint8_t* smem, int warp, int lane) {
    const SparseAttentionParams& p = params.p;
    auto& tile = *reinterpret_cast<TileMarks*>(smem + MLA_SMEM(C, tile));
    ListItem item;
    NeighbourHeads& heads = item;
    item.split = 0;
    const QueryTiles::Queries queries = params.shared.queries[blockIdx.x];
    heads = {p, queries.first, static_cast<int>(queries.count), 0, C::kHeads};
    item.keys = ListedKeys(params, blockIdx.x);
    item.num_keys = heads.num_queries > 0 ? params.shared.length(blockIdx.x) : -1;
    if (warp == 0 && lane == 0) {
      tile.describe(p, heads.num_queries);
      tile.all_queries = marks_of_octets(p, tile.all_queries);
    }
    return item;
  }
  // Stands for a survey: all keys of a list are valid. All threads call it.
  template <class C>
  __device__ KeySurvey survey_list(const KernelParams& params, int thread) {
    const KeySurvey survey = KeySurvey::of_valid(num_keys);
    take_share<C>(num_keys, params.splits);
    keys.fetch_lines(first_block * C::kBlockKeys, num_blocks * C::kBlockKeys, thread);
    return survey;
  }
};

}  // namespace mla_fp8::gpu
