#pragma once
// Where everything lies in shared memory, its barriers, and which queries a CTA works on.
#include "common/kv_layout.h"
#include "cuda/async.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

inline constexpr int kGroupThreads = 4 * kWarpSize;  // of a warpgroup

// Q and K blocks are tiles of 64 rows x 64 dims, swizzled (wgmma.cuh).
template <KvLayoutId kId>
struct RowsConfig {
  static constexpr int kDims = kv_layout(kId).head_dim_qk();
  static constexpr int kHeads = 64, kBlockTokens = 64;
  static constexpr int kTileDims = 64, kTileBytes = 64 * kTileDims * 2;
  static constexpr int kTiles = kDims / kTileDims;
  static constexpr int kValueTiles = kHeadDimV / kTileDims;
  static constexpr bool kHasRope = kTiles > kValueTiles;
  static_assert(kTiles - kValueTiles <= 1);

  static constexpr int kThreads = 3 * kGroupThreads;
  static constexpr int kMathRegisters = 224, kGatherRegisters = 56;

  // A block arrives in pieces of two tiles of values, then rope, and is freed in parts: the values of group
  // 0, those of group 1, rope.
  static constexpr int kPieces = kHasRope ? 5 : 4, kRopePiece = 4, kParts = kHasRope ? 3 : 2, kRopePart = 2;
  __device__ static constexpr int first_tile(int piece) { return 2 * piece; }
  __device__ static constexpr int num_tiles(int piece) { return piece == kRopePiece ? 1 : 2; }

  // The weights of a block lie over its rope keys, which are no longer needed once there are weights.
  static constexpr int kQ = 0;
  static constexpr int kBlocks = kTiles * kTileBytes;
  static constexpr int kBlockBytes = (kValueTiles + 1) * kTileBytes;
  static constexpr int kWeightsTile = kValueTiles;
  // Output leaves by the copy engine from where the last block's values were, one tile per math warp: 16 rows
  // of kOutPitch, so that rows start in different banks. That is a little too much: the last row lies apart.
  static constexpr int kOutBytes = kHeadDimV / 2 * 2;  // of one row and group: half of the dims, bf16
  static constexpr int kOutPitch = kOutBytes + 16;
  static constexpr int kLastRow = kBlocks + 2 * kBlockBytes, kLastRowBytes = 640, kLastRowOffset = 7 * 16;
  static_assert(15 * kOutPitch <= kTileBytes && kLastRowOffset + kOutBytes <= kLastRowBytes);

  // What a group tells the other, by parity of the item: (sum, base), and the second its largest logits.
  static constexpr int kHandover = kLastRow + 8 * kLastRowBytes;   // float2 [parity][group][head]
  static constexpr int kLargest = kHandover + 2 * 2 * kHeads * 8;  // float [parity][head]
  static constexpr int kMask = kLargest + 2 * kHeads * 4;          // uint64_t [buffer]
  static constexpr int kBarriers = kMask + 16;
  static constexpr int kNumBarriers = 4 + 2 * (kPieces + kParts);
  static constexpr int kSmemBytes = kBarriers + kNumBarriers * 8;
  static_assert(kSmemBytes <= 232448);
};

struct RowsParams {
  SparseAttentionParams p;
  int num_head_blocks;
  int64_t num_items;  // (query, head block)
};

template <class C>
struct RowsSmem {
  uint32_t smem;
  __device__ uint32_t q_tile(int tile) const { return smem + C::kQ + tile * C::kTileBytes; }
  __device__ uint32_t tile(int buffer, int tile) const {
    return smem + C::kBlocks + buffer * C::kBlockBytes + tile * C::kTileBytes;
  }
  __device__ uint32_t weights(int buffer) const { return tile(buffer, C::kWeightsTile); }

  __device__ uint32_t q_full() const { return smem + C::kBarriers; }
  __device__ uint32_t q_empty() const { return q_full() + 8; }
  __device__ uint32_t weights_full(int buffer) const { return q_full() + 16 + buffer * 8; }
  __device__ uint32_t full(int buffer, int piece) const {
    return q_full() + 32 + (buffer * C::kPieces + piece) * 8;
  }
  __device__ uint32_t empty(int buffer, int part) const {
    return full(2, 0) + (buffer * C::kParts + part) * 8;
  }

  __device__ void init() const {
    mbarrier_init(q_full(), kGroupThreads);
    mbarrier_init(q_empty(), 8 * kWarpArrivals);  // both math groups
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(weights_full(buffer), 4 * kWarpArrivals);
      for (int piece = 0; piece < C::kPieces; ++piece)
        mbarrier_init(full(buffer, piece), kGroupThreads + (piece == 0));  // and the mask
      for (int part = 0; part < C::kParts; ++part) mbarrier_init(empty(buffer, part), 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
};

// One query token, 64 of its heads.
struct RowsItem {
  int64_t token;
  int first_head, length, num_blocks;  // of selected tokens
};

// The items of a CTA, every gridDim.x-th; the head blocks of a token run at the same time, so that its rows
// come from L2 once more. The next item is known early: nobody waits for its length.
template <class C>
class RowsItems {
 public:
  __device__ explicit RowsItems(const RowsParams& params) : params_(params), index_(blockIdx.x) {
    now_ = read(index_);
    next_ = read(index_ + gridDim.x);
  }
  __device__ bool valid() const { return index_ < params_.num_items; }
  __device__ const RowsItem& operator*() const { return now_; }
  __device__ const RowsItem& next() const { return next_; }
  __device__ bool has_next() const { return index_ + gridDim.x < params_.num_items; }
  __device__ void advance() {
    index_ += gridDim.x;
    now_ = next_;
    next_ = read(index_ + gridDim.x);
  }

 private:
  __device__ RowsItem read(int64_t index) const {
    RowsItem item{0, 0, 0, 0};
    if (index >= params_.num_items) return item;
    const KvScope& s = params_.p.scopes[0];
    item.token = params_.num_head_blocks == 1 ? index : index / 2;
    item.first_head = params_.num_head_blocks == 1 ? 0 : static_cast<int>(index % 2) * C::kHeads;
    const int topk = static_cast<int>(s.topk);
    item.length = s.topk_length ? max(0, min(__ldg(s.topk_length + item.token), topk)) : topk;
    item.num_blocks = ceil_div(item.length, C::kBlockTokens);
    return item;
  }
  const RowsParams& params_;
  int64_t index_;
  RowsItem now_, next_;
};

}  // namespace mla_fp8::gpu
