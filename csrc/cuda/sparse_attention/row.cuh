#pragma once
// What a cached row looks like once it is in shared memory, per layout.
#include "common/kv_layout.h"

namespace mla_fp8::gpu {

inline constexpr int kChunkDims = 64;  // value dims that share one scale in every layout
inline constexpr int kNumChunks = kHeadDimV / kChunkDims;

// A latent is kFp8Dims e4m3 elements, then kBf16Dims bf16 elements; either may be absent.
template <KvLayoutId kId>
struct Row {
  static constexpr KvLayout kL = kv_layout(kId);
  static constexpr bool kUniformFp8 = kL.scale_format == ScaleFormat::kPerLayer;
  static constexpr int kDims = kL.head_dim_qk();
  static constexpr int kFp8Dims = kL.nope_format == Format::kBf16 ? 0 : kUniformFp8 ? kDims : kL.nope_dim;
  static constexpr int kBf16Dims = kDims - kFp8Dims;
  static constexpr int kBf16Offset = kFp8Dims == 0 ? 0 : kL.rope_offset();

  static constexpr int kNumScales = kL.num_tiles();  // stored with the token
  static constexpr int kTileDims = kNumScales ? kL.tile_dim : kChunkDims;
  static constexpr int kNumTiles = kFp8Dims / kTileDims;
  static constexpr bool kScalesApart = kL.scale_placement == ScalePlacement::kPageTail;

  static constexpr int kBytes = kL.token_stride();  // one copy per token
  static constexpr int kScaleOffset = kScalesApart ? kBytes : kL.nope_bytes();
  // An odd multiple of 16 bytes: the 8 rows of an ldmatrix then fall into different banks.
  static constexpr int kPitch = (align_up(kBytes + (kScalesApart ? kL.scale_bytes() : 0), 16) | 16);

  // The first chunks of V are e4m3, the rest bf16.
  static constexpr int kFp8Chunks = kFp8Dims < kHeadDimV ? kFp8Dims / kChunkDims : kNumChunks;
  MLA_HD static constexpr int tile_of_chunk(int chunk) { return chunk * kChunkDims / kTileDims; }
  MLA_HD static constexpr bool new_tile(int chunk) {  // does its scale differ from that of the chunk before?
    return kNumScales ? chunk * kChunkDims % kTileDims == 0 : chunk == 0;
  }
};

}  // namespace mla_fp8::gpu
