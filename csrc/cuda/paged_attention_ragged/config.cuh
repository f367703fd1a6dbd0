#pragma once
// A block of paged_attention_ragged: its constants, the caches that it may read, its shared memory.
#include <cmath>

#include "cuda/device/divide.cuh"
#include "cuda/paged_attention_ragged/matrix_tile.cuh"
#include "ops/paged_attention_ragged.h"

namespace mla_fp8::gpu::ragged {

inline constexpr int kRows = 16;  // rows of a block: M of the matrix instructions
inline constexpr int kKeys = 32;  // keys that are staged at a time
inline constexpr int kWaves = 4;
inline constexpr int kThreads = kWaves * kWaveSize;
inline constexpr int kKeyTiles = kKeys / kTile, kShares = kWaves / kKeyTiles;  // tiles of S; waves a tile
inline constexpr int kRowThreads = kThreads / kRows, kRowKeys = kKeys / kRowThreads;
inline constexpr int kMergeThreads = 128;

struct Args {
  PagedAttentionRaggedParams p;
  int group;           // query heads per KV head
  unsigned row_tiles;  // tiles of 16 rows of a request and KV head
  Divider page_size, num_splits;

  explicit Args(const PagedAttentionRaggedParams& params)
      : p(params),
        group(params.num_q_heads / params.num_kv_heads),
        row_tiles(static_cast<unsigned>(num_row_tiles(params))),
        page_size(p.page_size),
        num_splits(p.num_splits) {}
  static int64_t num_row_tiles(const PagedAttentionRaggedParams& p) {
    return ceil_div(int64_t{p.num_q_heads / p.num_kv_heads} * p.q_len, int64_t{kRows});
  }
  // Keys of each split of a request with num_keys keys: whole blocks of keys.
  __device__ __forceinline__ int64_t keys_per_split(int64_t num_keys) const {
    return align_up(num_splits(num_keys + p.num_splits - 1), int64_t{kKeys});
  }
};

// Separate K and V of up to kDim dims. Dims that a smaller head lacks are zero.
template <int kDim, CacheDtype kStoredDtype>
struct SeparateCaches {
  static constexpr CacheDtype kStored = kStoredDtype;
  static constexpr bool kIsLatent = false;
  static constexpr int kDimQk = kDim, kDimV = kDim, kLeadDim = kDim, kRopeDim = 0, kTiles = 0,
                       kTileDim = kDim;
  static __device__ __forceinline__ const uint8_t* scales(const PagedAttentionRaggedParams&, int64_t,
                                                          int64_t) {
    return nullptr;
  }
  static __device__ __forceinline__ float scale(const uint8_t*, int) { return 1.0f; }
};

// A latent: kLeadDim elements in the stored format, then kRopeDim elements in bf16.
template <KvLayoutId kId>
struct LatentCache {
  static constexpr KvLayout kL = kv_layout(kId);
  static constexpr CacheDtype kStored = kL.nope_format == Format::kBf16     ? CacheDtype::kBf16
                                        : kL.nope_format == Format::kE4m3fn ? CacheDtype::kE4m3fn
                                                                            : CacheDtype::kE4m3fnuz;
  static constexpr bool kIsLatent = true, kIsUniform = kL.nope_format == kL.rope_format;
  static constexpr int kDimQk = kL.head_dim_qk(), kDimV = kHeadDimV;
  static constexpr int kLeadDim = kIsUniform ? kDimQk : kL.nope_dim, kRopeDim = kIsUniform ? 0 : kL.rope_dim;
  static constexpr int kRopeOffset = kL.rope_offset();
  static constexpr int kTiles = kL.num_tiles(), kTileDim = kTiles ? kL.tile_dim : kDimQk;
  static __device__ __forceinline__ const uint8_t* scales(const PagedAttentionRaggedParams& p, int64_t page,
                                                          int64_t row) {
    constexpr KvLayout kLayout = kv_layout(kId);
    return p.k_cache + page * p.k_cache_stride_page + kLayout.scale_offset(row, p.page_size);
  }
  static __device__ __forceinline__ float scale(const uint8_t* scales, int tile) {
    return load_scale<kL.scale_format>(scales, tile);
  }
};

// Tiles' scales are staged times 1/2: then weights times any of them are finite in bf16.
inline constexpr float kStagedScale = 0.5f;
// The factor, at the end, of products of staged rows with their scales: codes may be halved, too.
template <class Cache>
inline constexpr float kUnit =
    (kIsHalved<Cache::kStored> ? 2.0f : 1.0f) * (Cache::kTiles > 0 ? 1.0f / kStagedScale : 1.0f);

// The addresses of keys. A key is masked if k is null.
struct Rows {
  const uint8_t *k[kKeys], *v[kKeys], *scales[kKeys];
};

template <class Cache>
struct Shared {
  static constexpr int kPitch = Cache::kLeadDim * kStoredBytes<Cache::kStored> + 16;  // spreads the banks
  static constexpr int kVRows = Cache::kIsLatent ? 1 : kKeys, kRopeRows = Cache::kRopeDim ? kKeys : 1;
  alignas(16) uint8_t k[kKeys][kPitch];
  alignas(16) uint8_t v[kVRows][kPitch];
  alignas(16) uint16_t rope[kRopeRows][Cache::kRopeDim + 8];
  alignas(16) float weights[kRows][kKeys + 4];
  float partial[kShares][kRows][kKeys + 4];  // sums of S over the dims of each share
  float scales[Cache::kTiles ? Cache::kTiles : 1][kKeys];
  float rescale[kRows], normalizer[kRows];
  int64_t visible[kRows];        // how many keys a row sees, from the first on
  int64_t row[kRows];            // token * num_q_heads + head; -1: no such row
  int64_t q[kRows], out[kRows];  // where the row begins
  int head[kRows];
  Rows rows[2];  // of the staged keys and of the next
};

}  // namespace mla_fp8::gpu::ragged
