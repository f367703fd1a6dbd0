#pragma once
// A cached row in shared memory, for each layout: where its dims and scales lie, and its bytes as fragments.
#include <cstdint>

#include "common/kv_layout.h"
#include "cuda/device/convert.cuh"

namespace mla_fp8::gpu {

inline constexpr int kChunkDims = 64;  // dims of a chunk of V
inline constexpr int kNumChunks = kHeadDimV / kChunkDims;

// A latent is kFp8Dims e4m3 (or e2m1) elements, then kBf16Dims bf16 elements; either may be absent.
template <KvLayoutId kId>
struct Row {
  static constexpr KvLayout kL = kv_layout(kId);
  static constexpr bool kMixed = false;  // sm90/mixed_row.cuh
  static constexpr int kExpanders = 0;   // warps of a CTA that expand rows
  static constexpr int kTableBytes = 0;  // bytes behind a stage's rows
  static constexpr bool kUniformFp8 = kL.scale_format == ScaleFormat::kPerLayer;
  static constexpr int kDims = kL.head_dim_qk();
  static constexpr int kFp8Dims = kL.nope_format == Format::kBf16 ? 0 : kUniformFp8 ? kDims : kL.nope_dim;
  static constexpr int kBf16Dims = kDims - kFp8Dims;
  static constexpr int kBf16Offset = kFp8Dims == 0 ? 0 : kL.rope_offset();

  static constexpr int kNumScales = kL.num_tiles();  // stored with the key
  static constexpr int kTileDims = kNumScales ? kL.tile_dim : kChunkDims;
  static constexpr int kNumTiles = kFp8Dims / kTileDims;
  static constexpr int kTilesOfChunk = kTileDims < kChunkDims ? kChunkDims / kTileDims : 1;  // at most 2
  static constexpr bool kScalesApart = kL.scale_placement == ScalePlacement::kPageTail;

  static constexpr int kBytes = kL.token_stride();  // one copy per key
  static constexpr int kScaleOffset = kScalesApart ? kBytes : kL.nope_bytes();
  // An odd multiple of 16 bytes lets the 8 rows of an ldmatrix fall into different banks.
  static constexpr int kPitch = (align_up(kBytes + (kScalesApart ? kL.scale_bytes() : 0), 16) | 16);

  // The first chunks of V are e4m3, the rest bf16.
  static constexpr int kFp8Chunks = kFp8Dims < kHeadDimV ? kFp8Dims / kChunkDims : kNumChunks;
  MLA_HD static constexpr int tile_of(int dim) { return dim / kTileDims; }
  MLA_HD static constexpr bool new_tile(int dim) {  // does its scale differ from that of the dim before?
    return kNumScales ? dim % kTileDims == 0 : dim == 0;
  }
};

// Scales as factors of fragments of K. Rows of one layout have none (two: sm90/mixed_row.cuh).
template <class R>
struct KeyFactors {
  using Words = uint4;
};

// The stored scales of one key.
template <class R>
struct RowScales {
  static constexpr bool kPacked = R::kL.scale_format == ScaleFormat::kUe8m0;
  static constexpr int kWords = kPacked ? ceil_div(R::kNumScales, 4) : 0;
  float value[R::kNumScales > 0 && !kPacked ? R::kNumScales : 1];
  uint32_t exponents[kPacked ? kWords : 1];  // ue8m0, a byte each: registers are short

  static_assert(R::kNumScales == 0 || (kPacked ? kWords == 2 || kWords == 4 : R::kNumScales == 4),
                "load reads 8 or 16 bytes of ue8m0, or 16 of f32");

  // True if a scale is NaN (ue8m0 255), which operator[] turns into infinity.
  __device__ bool nan() const {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int padding = 4 * (i + 1) > R::kNumScales ? 4 * (i + 1) - R::kNumScales : 0;  // bytes
      any |= __vcmpeq4(exponents[i], ~0u) & ~0u >> 8 * padding;
    }
    return any != 0;
  }

  __device__ void load(const uint8_t* row) {
    if constexpr (R::kNumScales == 0) {
      value[0] = 1.0f;
    } else if constexpr (!kPacked) {
      const float4 x = *reinterpret_cast<const float4*>(row + R::kScaleOffset);
      value[0] = x.x, value[1] = x.y, value[2] = x.z, value[3] = x.w;
    } else if constexpr (kWords == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(row + R::kScaleOffset);
      exponents[0] = x.x, exponents[1] = x.y;
    } else {
      const uint4 x = *reinterpret_cast<const uint4*>(row + R::kScaleOffset);
      exponents[0] = x.x, exponents[1] = x.y, exponents[2] = x.z, exponents[3] = x.w;
    }
  }
  __device__ float operator[](int tile) const {
    if constexpr (kPacked) return __uint_as_float((exponents[tile / 4] >> 8 * (tile % 4) & 255u) << 23);
    else return value[R::kNumScales ? tile : 0];
  }

  __device__ static bool is_nan(const uint8_t* row) {
    RowScales scales;
    scales.load(row);
    return scales.nan();
  }

  // The scale of tile 4 i + t, or 0 past the last one: lanes 4g .. 4g + 3 have all scales of a key.
  static constexpr int kPerLane = (R::kNumScales + 3) / 4;
  __device__ float of_lane(const uint8_t* row, int i, int t) const {
    if (4 * i + t >= R::kNumScales) return 0.0f;
    if constexpr (kPacked) return __uint_as_float(__byte_perm(exponents[i], 0, 0x4440 + t) << 23);
    else return read(row, 4 * i + t);
  }

  // One scale, read alone.
  __device__ static float read(const uint8_t* row, int tile) {
    if constexpr (R::kL.scale_format == ScaleFormat::kF32)
      return reinterpret_cast<const float*>(row + R::kScaleOffset)[tile];
    else return __uint_as_float(uint32_t{row[R::kScaleOffset + tile]} << 23);
  }
};

// Converts 32 e4m3 dims of K to A fragments: two k-steps of 16.
__device__ inline void convert_keys(const uint32_t (&bytes)[4], uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  e4m3_to_f16(bytes[0], a0[0], a0[2]);
  e4m3_to_f16(bytes[1], a0[1], a0[3]);
  e4m3_to_f16(bytes[2], a1[0], a1[2]);
  e4m3_to_f16(bytes[3], a1[1], a1[3]);
}
// Converts 32 e4m3 dims of V, read as byte pairs: rows g, g + 8 of a tile of A fragments are dims 2g, 2g + 1.
__device__ inline void convert_values(const uint32_t (&bytes)[4], uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  const auto pair_tokens = [](uint32_t x) { return __byte_perm(x, 0, 0x3120); };
  e4m3_to_f16(pair_tokens(bytes[0]), a0[0], a0[1]);
  e4m3_to_f16(pair_tokens(bytes[1]), a0[2], a0[3]);
  e4m3_to_f16(pair_tokens(bytes[2]), a1[0], a1[1]);
  e4m3_to_f16(pair_tokens(bytes[3]), a1[2], a1[3]);
}

}  // namespace mla_fp8::gpu
