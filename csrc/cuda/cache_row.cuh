#pragma once
// How one warp shares one latent: 8 elements per lane and pass, lane 0 first. Written against kv_layout.h.
#include "common/kv_layout.h"
#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

inline constexpr int kChunk = 8;                     // elements of one lane in one pass
inline constexpr int kPassDim = kChunk * kWarpSize;  // elements of one pass

// One latent per warp and four warps per block: the DRAM likes few bytes in flight per warp, many warps and
// blocks in order (docs/kernels/overview.md).
inline constexpr int kLatentsPerBlock = 4;
inline constexpr int kLatentBlock = kLatentsPerBlock * kWarpSize;

template <KvLayoutId kId>
struct LatentChunks {
  static constexpr KvLayout kL = kv_layout(kId);
  static constexpr int kDim = kL.head_dim_qk();
  static constexpr int kPasses = ceil_div(kDim, kPassDim);
  // The leading elements lie one after another in nope_format. The rest, if any, is bf16 at rope_offset.
  static constexpr bool kUniform = kL.nope_format == kL.rope_format;
  static constexpr int kLeadDim = kUniform ? kDim : kL.nope_dim;
  static constexpr int kLeadBytes = kChunk * format_bits(kL.nope_format) / 8;  // of a lane in one pass
  static constexpr int kLeadWords = kLeadBytes / 4;
  // A number, not kL.rope_offset() where it is used: clang would load kL on the device and compute there.
  static constexpr int kRopeOffset = kL.rope_offset();
  static_assert(!kUniform || kL.rope_offset() == kL.nope_bytes());
  static_assert(kUniform || kL.rope_format == Format::kBf16);
  static_assert(kL.nope_dim % kChunk == 0 && kL.rope_dim % kChunk == 0);

  static constexpr bool kHasTiles = kL.num_tiles() > 0;
  // Read and written in one piece, unless there are so many that each lane takes those of its own tiles.
  static constexpr int kScaleWords = kHasTiles ? kL.scale_bytes() / 4 : 2;
  static constexpr bool kOwnScales = kScaleWords > 4;
  static constexpr int kTileLanes = kHasTiles ? kL.tile_dim / kChunk : kWarpSize;
  static constexpr int kPassTiles = kWarpSize / kTileLanes;
  static_assert(!kOwnScales || (kL.scale_itemsize() == 1 && kL.nope_dim % kPassDim == 0));

  static __device__ __forceinline__ int element(int pass, int lane) {
    return pass * kPassDim + lane * kChunk;
  }
  // Offsets in bytes from the token's record.
  static __device__ __forceinline__ int lead_offset(int element) { return element / kChunk * kLeadBytes; }
  static __device__ __forceinline__ int rope_offset(int element) {
    return kRopeOffset + (element - kL.nope_dim) * 2;
  }
};

// A token's place in the cache. Never dereferenced unless `valid`.
struct CacheRow {
  bool valid;
  const uint8_t* page;
  int64_t row;
};

template <class Params>
__device__ __forceinline__ CacheRow find_row(const Params& p, const Divider& page_size, int64_t slot) {
  const bool valid = slot >= 0 && slot < p.num_slots;
  if (!valid) slot = 0;
  const int64_t page = page_size(slot);
  return {valid, p.kv_cache + page * p.kv_cache_stride_page, slot - page * page_size.divisor()};
}

}  // namespace mla_fp8::gpu
