#pragma once
// The shared memory of bf16_tiles, its barriers, and the items of a CTA.
#include <cstddef>

#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/sm90/bf16_tiles/mask.cuh"

namespace mla_fp8::gpu {

inline constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;

// The keys of a tile: a plain selection (is_plain_selection); windows of neighbours; these and the first
// entries of their request, by its pages; the window of one query, in a ring of keys that moves on with the
// queries; any other keys of one query; the same in FP8 pages, for a pair of CTAs with 64 heads each.
enum class KeysOfTile { kSelected, kNeighbours, kEntries, kRing, kAny, kPair };

//   barrier              arrivals of a phase          waits   protects
//   q_full               the gather, and the item     math    q, item: may be read
//   q_empty              8 math warps                 gather  the same: may be written
//   full[buffer][piece]  the gather, and the mask     math    a piece of the block's panels, masks[buffer]
//   half_empty, empty    4 math warps (of a pair 8,   gather  keys 0 to 31 of a part, all: may be filled
//   [buffer][part]       of both CTAs)
//   weights_full         4 warps of one group         other   weights, handover
//   kBarrierGroup0, 1    a group                      same    its keys are read: weights may lie over them
//   kBarrierTurn         both groups                  second  nothing: products of the first go first
//   kBarrierGather       the gather                   same    map

// Q and K blocks are panels of 64 rows x 64 dims, swizzled (wgmma.cuh).
template <KvLayoutId kId_, KeysOfTile kKeys, KvLayoutId kExtraId_ = kId_>
struct Bf16Tiles {
  static constexpr KvLayoutId kId = kId_, kExtraId = kExtraId_;  // layouts of both caches
  static constexpr bool kSelected = kKeys == KeysOfTile::kSelected;
  static constexpr bool kEntries = kKeys == KeysOfTile::kEntries;
  static constexpr bool kNeighbours = kKeys == KeysOfTile::kNeighbours || kEntries;
  static constexpr bool kRing = kKeys == KeysOfTile::kRing;
  static constexpr bool kPair = kKeys == KeysOfTile::kPair;
  static constexpr bool kAny = kKeys == KeysOfTile::kAny || kPair;
  static constexpr bool kCounted = kSelected || (kAny && !kPair);  // invalid keys are left out
  static constexpr int kDims = kv_layout(kId).head_dim_qk();
  static constexpr int kHeads = 64;
  static_assert(kMaxQHeads <= 2 * kHeads, "a query has one or two tiles: indices are halved");
  static constexpr int kPanelDims = 64, kPanelBytes = 64 * kPanelDims * 2;
  static constexpr int kPanels = kDims / kPanelDims;
  static constexpr int kValuePanels = kHeadDimV / kPanelDims;
  static constexpr bool kHasRope = kPanels > kValuePanels;
  static_assert(kPanels - kValuePanels <= 1);
  static_assert(!kPair || !kHasRope);  // weights may not lie over keys that are being copied to the other CTA

  // Keys of a block in either buffer. Windows of neighbours have a few keys more than one window, which is
  // often two blocks. So the first block takes eight more, if there is room for them.
  static constexpr int kTail = kNeighbours && !kEntries && !kHasRope ? 8 : 0;
  __device__ static constexpr int keys(int buffer) { return buffer == 0 ? 64 + kTail : 64; }
  static constexpr int kPairKeys = 128 + kTail;
  __device__ static int num_blocks(int length) {
    if constexpr (kRing) return 2;
    const int rest = length % kPairKeys;
    return length / kPairKeys * 2 + (rest > 0) + (rest > keys(0));
  }
  __device__ static int first_key(int block) { return block / 2 * kPairKeys + block % 2 * keys(0); }

  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kMathRegisters = kPair || kCounted ? 208 : 224;
  static constexpr int kGatherRegisters = 504 - 2 * kMathRegisters;

  // A block arrives in pieces of two panels of values (kPair: four), then rope. It is freed in parts: the
  // values of group 0, those of group 1, each in halves of 32 keys, and rope.
  static constexpr int kPiecePanels = kPair ? 4 : 2, kRopePiece = kValuePanels / kPiecePanels;
  static constexpr int kPieces = kRopePiece + kHasRope, kParts = kHasRope ? 3 : 2, kRopePart = 2;
  __device__ static constexpr int first_panel(int piece) { return kPiecePanels * piece; }
  __device__ static constexpr int num_panels(int piece) { return piece == kRopePiece ? 1 : kPiecePanels; }

  // Weights of a block lie over its rope keys, which nobody needs by then. A tail's lie behind them, without
  // swizzle; as products take 16 keys, eight of these weights are zero.
  // Bytes from a panel of keys to the next, and from eight keys to the next eight. In a pair eight keys of
  // all panels lie together, so that one copy takes them to the other CTA.
  __device__ static constexpr int key_panel_bytes(int buffer) {
    return (kPair ? 8 : keys(buffer)) * kPanelDims * 2;
  }
  static constexpr int kEightKeysBytes = 8 * kPanelDims * 2 * (kPair ? kValuePanels + 1 : 1);
  static constexpr int kTailWeightsBytes = kTail * 2 * kHeads * 2;
  static constexpr int kBlockBytes = (kValuePanels + 1) * kPanelBytes;
  static constexpr int kFirstBlockBytes = kBlockBytes + kTail * kHeadDimV * 2 + kTailWeightsBytes;
  static constexpr int kWeightsPanel = kValuePanels;
  // Output leaves through pieces of 8 rows of each math warp, in full lines if there is room for them.
  static constexpr int kPieceDims = kTail > 0 ? 32 : 64, kPieceBytes = 8 * kPieceDims * 2;
  static constexpr int kStagingPieces = kHasRope || kPieceDims < 64 ? 1 : 2;
  static constexpr int kStagingBytes = kStagingPieces * kPieceBytes;

  struct Smem {
    alignas(16) uint8_t q[kPanels][kPanelBytes];
    uint8_t blocks[kFirstBlockBytes + kBlockBytes];
    uint8_t staging[8][kStagingBytes];  // [math warp]
    float2 handover[2][2][kHeads];  // (sum, base) [parity of the item][group]: what a group tells the other
    float largest[2][kHeads];       // largest logits of the second group [parity]
    uint8_t masks[2][16];           // KeyMask
    uint64_t item[3];               // RowTile
    uint8_t map[kCounted ? kMapBytes : 0];  // map of the next item's valid keys
    uint64_t q_full, q_empty, weights_full[2], full[2][kPieces], empty[2][kParts], half_empty[2][2];
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= kMaxSharedBytes && offsetof(Smem, masks) % 16 == 0 &&
                offsetof(Smem, q_full) % 8 == 0);
};

// Rows of Q come in tiles of 64: tile_heads heads of each of tile_queries queries.
struct TileParams {
  SparseAttentionParams p;
  int num_head_blocks, tile_queries;
  unsigned tile_heads;
  int64_t num_tiles;
  int64_t row_stride;    // bytes from a slot to the next, of a plain selection
  Divider page_size[2];  // one for each scope
};

// The query and the head in row `row` of a tile.
struct QueryHead {
  int query, head;
};
template <class C>
__device__ QueryHead query_head(const TileParams& params, unsigned row) {
  if constexpr (!C::kNeighbours) return {0, static_cast<int>(row)};
  return {static_cast<int>(row / params.tile_heads), static_cast<int>(row % params.tile_heads)};
}

// The queries of a tile that have keys in common, and the number of these: the keys of one query; or the
// windows of neighbours in one request, then the entries of the neighbour that has most. The last neighbour's
// window ends with the last window key, the one before it a key earlier.
struct RowTile {
  int64_t query;
  int num_queries, first_head, length;  // num_queries 0: there is nothing left to do
  int first_length = 0;                 // keys of the first cache, which come first

  __device__ bool has(QueryHead place, int num_q_heads) const {
    return place.query < num_queries && first_head + place.head < num_q_heads;
  }
};

enum TileBarrier { kBarrierGroup0 = 1, kBarrierGroup1, kBarrierTurn, kBarrierGather };

template <class C>
struct TileSmem {
  uint32_t smem;
  __device__ uint32_t q_panel(int panel) const { return smem + MLA_SMEM(C, q) + panel * C::kPanelBytes; }
  __device__ uint32_t panel(int buffer, int panel) const {
    return smem + MLA_SMEM(C, blocks) + buffer * C::kFirstBlockBytes + panel * C::key_panel_bytes(buffer);
  }
  __device__ uint32_t weights(int buffer) const { return panel(buffer, C::kWeightsPanel); }
  __device__ uint32_t tail_weights() const { return weights(0) + C::kPanelBytes; }

  // Stores by address: through pointers the compiler loses sight of what is uniform, and every arrival of the
  // gather on a barrier becomes a loop.
  __device__ void set_item(const RowTile& item) const {
    store_shared_8(smem + MLA_SMEM(C, item), item.query);
    store_shared_8(smem + MLA_SMEM(C, item) + 8, item.num_queries | static_cast<uint64_t>(item.first_head)
                                                                        << 32);
    store_shared_8(smem + MLA_SMEM(C, item) + 16,
                   static_cast<unsigned>(item.length) | static_cast<uint64_t>(item.first_length) << 32);
  }
  __device__ RowTile item() const {
    const uint2 query = load_shared_8(smem + MLA_SMEM(C, item)),
                tokens_head = load_shared_8(smem + MLA_SMEM(C, item) + 8),
                lengths = load_shared_8(smem + MLA_SMEM(C, item) + 16);
    return {static_cast<int64_t>(query.x | uint64_t{query.y} << 32), static_cast<int>(tokens_head.x),
            static_cast<int>(tokens_head.y), static_cast<int>(lengths.x), static_cast<int>(lengths.y)};
  }
  // Stores a gather warp's part of a mask: bits 0 to 7 of `found` for its eight of the first 32 keys, then
  // its eight of the others, then a tail.
  __device__ void set_mask(int buffer, int warp, uint32_t found) const {
    const uint32_t mask = smem + MLA_SMEM(C, masks) + buffer * 16;
    store_shared_1(mask + warp, found);
    store_shared_1(mask + 4 + warp, found >> 8);
    if (C::kTail > 0 && warp == 0) store_shared_1(mask + 8, found >> 16);
  }
  __device__ KeyMask mask(int buffer) const {
    const uint32_t mask = smem + MLA_SMEM(C, masks) + buffer * 16;
    const uint2 keys = load_shared_8(mask);
    const bool has_tail = C::kTail > 0 && buffer == 0;
    return {keys.x | uint64_t{keys.y} << 32, has_tail ? load_shared_8(mask + 8).x & 0xff : 0xff};
  }

  __device__ uint32_t q_full() const { return smem + MLA_SMEM(C, q_full); }
  __device__ uint32_t q_empty() const { return smem + MLA_SMEM(C, q_empty); }
  __device__ uint32_t weights_full(int buffer) const { return smem + MLA_SMEM(C, weights_full) + buffer * 8; }
  __device__ uint32_t full(int buffer, int piece) const {
    return smem + MLA_SMEM(C, full) + (buffer * C::kPieces + piece) * 8;
  }
  __device__ uint32_t empty(int buffer, int part) const {
    return smem + MLA_SMEM(C, empty) + (buffer * C::kParts + part) * 8;
  }
  // The first 32 keys of a part. In a pair the first CTA has these, and waits for both CTAs at its `empty`.
  __device__ uint32_t half_empty(int buffer, int part) const {
    return smem + MLA_SMEM(C, half_empty) + (buffer * 2 + part) * 8;
  }

  __device__ void init() const {
    mbarrier_init(q_full(), kGroupThreads + 1);   // and the item
    mbarrier_init(q_empty(), 8 * kWarpArrivals);  // both math groups
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(weights_full(buffer), 4 * kWarpArrivals);
      for (int piece = 0; piece < C::kPieces; ++piece)
        mbarrier_init(full(buffer, piece),
                      C::kPair ? 4 * kWarpArrivals : kGroupThreads + (piece == 0 ? 4 : 0));  // and the mask
      for (int part = 0; part < C::kParts; ++part)
        mbarrier_init(empty(buffer, part), (C::kPair ? 8 : 4) * kWarpArrivals);  // a pair: of both CTAs
      for (int part = 0; part < 2; ++part) mbarrier_init(half_empty(buffer, part), 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
};

// An item, and where its keys are listed. `length` is the number of valid ones once they are counted.
struct TileSource : RowTile {
  int64_t tile;
  int num_entries;
  unsigned first_position;  // the window's first key in its request
  const int32_t* entries;   // selected slots, or pages of the window's request
  const int32_t* extra;     // slots of the second cache, or pages of the request's entries
};

// Makes items of the tiles, in their order.
template <class C>
class RowTiles {
 public:
  __device__ explicit RowTiles(const TileParams& params) : params_(params) {}
  __device__ int64_t first_query(int64_t tile) const {
    return (params_.num_head_blocks == 1 ? tile : tile / 2) * params_.tile_queries;
  }
  // The item that follows the first `done` queries of a tile.
  __device__ TileSource source(int64_t tile, int done = 0) const {
    const SparseAttentionParams& p = params_.p;
    TileSource x{};
    x.tile = tile;
    if (tile >= params_.num_tiles) return x;
    x.query = first_query(tile) + done;
    x.first_head = params_.num_head_blocks == 1 ? 0 : static_cast<int>(tile % 2) * C::kHeads;
    x.num_queries = C::kNeighbours
                        ? static_cast<int>(min(int64_t{params_.tile_queries - done}, p.num_tokens - x.query))
                        : 1;
    if (C::kNeighbours || (C::kAny && p.is_window)) {
      find_window(x);
    } else {
      x.entries = slots(p.scopes[0], x.query);
      x.first_length = num_slots(p.scopes[0], x.query);
    }
    x.length = x.first_length;
    if (C::kAny && p.num_scopes > 1) {
      x.extra = slots(p.scopes[1], x.query);
      x.length += num_slots(p.scopes[1], x.query);
    }
    if constexpr (C::kEntries)
      if (x.extra) x.length += most_entries(x);
    x.num_entries = x.length;
    return x;
  }
  // The number of slots that a query attends to.
  __device__ static int num_slots(const KvScope& s, int64_t query) {
    const int topk = static_cast<int>(s.topk);
    return s.topk_length ? max(0, min(__ldg(s.topk_length + query), topk)) : topk;
  }

 private:
  __device__ void find_window(TileSource& x) const {
    const SlidingWindow& w = params_.p.window;
    const WindowQuery q = find_query(w, x.query);
    if (q.request < 0) return;
    x.num_queries = static_cast<int>(min(int64_t{x.num_queries}, q.queries));
    x.entries = w.page_table + q.request * w.page_table_stride_request;
    if constexpr (C::kEntries) {
      const EntryPages& pages = params_.p.entry_pages;
      x.extra = pages.page_table + q.request * pages.page_table_stride_request;
    }
    const int64_t first = max(q.position - w.window_size + 1, int64_t{0});
    x.first_position = static_cast<unsigned>(first);
    x.first_length = static_cast<int>(max(q.position + x.num_queries - first, int64_t{0}));
  }
  // The most entries of any of the item's queries. Whole warps call it.
  __device__ int most_entries(const TileSource& x) const {
    int most = 0;
    for (int i = threadIdx.x % kWarpSize; i < x.num_queries; i += kWarpSize)
      most = max(most, num_slots(params_.p.scopes[1], x.query + i));
    return __reduce_max_sync(kFullWarp, most);
  }
  __device__ static const int32_t* slots(const KvScope& s, int64_t query) {
    return s.indices + query * s.indices_stride_token;
  }

  const TileParams& params_;
};

// The items of a CTA, from every gridDim.x-th tile. The head blocks of a query run at the same time, so that
// its rows come from L2 once more.
template <class C>
class TileItems {
 public:
  __device__ explicit TileItems(const TileParams& params)
      : params_(params), tiles_(params), now_(tiles_.source(blockIdx.x)) {}
  __device__ TileSource& operator*() { return now_; }
  __device__ TileSource next() const { return after(now_); }
  __device__ void advance() { now_ = after(now_); }

 private:
  __device__ TileSource after(const TileSource& x) const {
    if constexpr (C::kNeighbours) {
      const int64_t end = x.query + x.num_queries;
      const int done = static_cast<int>(end - tiles_.first_query(x.tile));
      if (x.num_queries > 0 && done < params_.tile_queries && end < params_.p.num_tokens)
        return tiles_.source(x.tile, done);
    }
    return tiles_.source(x.tile + gridDim.x);
  }

  const TileParams& params_;
  const RowTiles<C> tiles_;
  TileSource now_;
};

}  // namespace mla_fp8::gpu
