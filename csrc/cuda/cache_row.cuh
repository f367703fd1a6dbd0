#pragma once
// How a warp shares a latent: 8 elements a lane and pass, lane 0 first. Sizes are those of kv_layout.h.
#include "common/kv_layout.h"
#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

inline constexpr int kChunk = 8;                     // elements of a lane in a pass
inline constexpr int kPassDim = kChunk * kWarpSize;  // elements of a pass

// A warp takes one latent, a block four. DRAM is fastest with few bytes in flight a warp, and many warps and
// blocks in order (docs/kernels/overview.md).
inline constexpr int kLatentsPerBlock = 4;
inline constexpr int kLatentBlock = kLatentsPerBlock * kWarpSize;

template <KvLayoutId kId>
struct LatentChunks {
  static constexpr KvLayout kL = kv_layout(kId);
  static constexpr int kDim = kL.head_dim_qk();
  static constexpr int kPasses = ceil_div(kDim, kPassDim);
  // The leading elements are in nope_format, one after another. The rest, if any, are bf16 at rope_offset.
  static constexpr bool kUniform = kL.nope_format == kL.rope_format;
  static constexpr int kLeadDim = kUniform ? kDim : kL.nope_dim;
  static constexpr int kLeadBytes = kChunk * format_bits(kL.nope_format) / 8;  // bytes of a lane in a pass
  static constexpr int kLeadWords = kLeadBytes / 4;
  // A number of its own: clang would load kL on the device and compute kL.rope_offset() there.
  static constexpr int kRopeOffset = kL.rope_offset();
  static_assert(!kUniform || kL.rope_offset() == kL.nope_bytes());
  static_assert(kUniform || kL.rope_format == Format::kBf16);
  static_assert(kL.nope_dim % kChunk == 0 && kL.rope_dim % kChunk == 0);

  static constexpr bool kHasTiles = kL.num_tiles() > 0;
  // Scales are read and written in one piece. If that is too large, each lane takes those of its own tiles.
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

// Where a token's row lies in the cache. It is dereferenced only if `valid`.
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
