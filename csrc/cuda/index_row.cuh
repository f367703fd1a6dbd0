#pragma once
// Eight lanes hold a key, or a query's head, of the indexer: its Hadamard transform, its codes and their
// scales. Ops that make keys themselves end with this, so that their bytes are quantize_index_k's.
//
// A lane has two chunks of eight elements. The four bits of a chunk's number are, highest first: bit 2 of the
// lane; which of the lane's two; bits 1 and 0 of the lane. So elements i and i + 32 of 64, which RoPE by
// halves rotates as a pair, are in one lane. The 32 elements that share a ue8m0 are in four lanes.
#include "common/fp4.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

inline constexpr int kIndexLanes = 8;
inline constexpr int kIndexChunks = kIndexDim / kChunk / kIndexLanes;
static_assert(kIndexChunks == 2);

struct IndexRow {
  Words<4> x[kIndexChunks];  // bf16

  // The first element of chunk i of this lane.
  static __device__ __forceinline__ int element(int i) {
    const int lane = threadIdx.x % kIndexLanes;
    return ((lane & 4) * 2 + i * 4 + (lane & 3)) * kChunk;
  }
};

// Replaces x of two lanes by their sum, in the lower lane, and their difference, in the upper one.
__device__ __forceinline__ void add_lanes(float (&x)[kChunk], int distance) {
  const bool is_upper = (threadIdx.x & distance) != 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, x[i], distance);
    x[i] = is_upper ? other - x[i] : x[i] + other;
  }
}

// The Walsh-Hadamard transform, neighbours first, times 128^-0.5, rounded to bf16.
__device__ __forceinline__ void hadamard(IndexRow& row) {
  float x[kIndexChunks][kChunk];
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Dtype::kBf16>(row.x[c][i]);
      x[c][2 * i] = pair.x;
      x[c][2 * i + 1] = pair.y;
    }
#pragma unroll
    for (int width = 1; width < kChunk; width *= 2)
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if ((i & width) == 0) {
          const float low = x[c][i], high = x[c][i + width];
          x[c][i] = low + high;
          x[c][i + width] = low - high;
        }
    add_lanes(x[c], 1);
    add_lanes(x[c], 2);
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float low = x[0][i], high = x[1][i];
    x[0][i] = low + high;
    x[1][i] = low - high;
  }
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    add_lanes(x[c], 4);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      row.x[c][i] = pack<Dtype::kBf16>({x[c][2 * i] * 0x1.6a09e6p-4f, x[c][2 * i + 1] * 0x1.6a09e6p-4f});
  }
}

// Words of codes in a chunk.
template <IndexLayoutId kId>
inline constexpr int kIndexCodeWords = kId == IndexLayoutId::kIndexFp8 ? 2 : 1;
// A row's codes, which all lanes of a warp make together. `scale` is the row's: a float's bits or four ue8m0.
template <IndexLayoutId kId>
struct IndexCodes {
  Words<kIndexCodeWords<kId>> chunk[kIndexChunks];
  uint32_t scale;
};

__device__ __forceinline__ Words<2> index_quotients(const Words<4>& x, float scale, bool reciprocal) {
  const float factor = 1.0f / scale;
  Words<2> codes{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack<Dtype::kBf16>(x[i]);
    const float low = reciprocal ? v.x * factor : v.x / scale, high = reciprocal ? v.y * factor : v.y / scale;
    codes[i / 2] |= uint32_t{pack_e4m3<Format::kE4m3fn>({low, high})} << (i % 2 * 16);
  }
  return codes;
}

__device__ __forceinline__ bool has_nan(const Words<4>& x) {
  uint32_t nan = 0;  // bit 15 of a half: its magnitude is above infinity
#pragma unroll
  for (int i = 0; i < 4; ++i) nan |= (x[i] & 0x7fff7fffu) + 0x007f007fu;
  return (nan & 0x80008000u) != 0;
}

__device__ __forceinline__ IndexCodes<IndexLayoutId::kIndexFp8> encode_index_fp8(const IndexScaling& scaling,
                                                                                 const IndexRow& row) {
  constexpr float kMax = index_layout(IndexLayoutId::kIndexFp8).value_max;
  const uint32_t larger = max(finite_amax8(row.x[0]), finite_amax8(row.x[1]));
  const float amax = bf16_to_float(static_cast<uint16_t>(lanes_max<kIndexLanes>(larger)));
  IndexCodes<IndexLayoutId::kIndexFp8> codes;
  if (scaling.format == IndexScaleFormat::kUe8m0) {
    const uint8_t exponent = tile_scale_exponent(amax, scaling.amax_floor, 0.0f, kMax);
    codes.scale = float_bits(ue8m0_to_float(exponent));
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c)
      codes.chunk[c] = encode8<Format::kE4m3fn>(row.x[c], ue8m0_reciprocal(exponent));
  } else {
    const float scale = (amax > scaling.amax_floor ? amax : scaling.amax_floor) / kMax;
    codes.scale = float_bits(scale);
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c)
      codes.chunk[c] = index_quotients(row.x[c], scale, scaling.format == IndexScaleFormat::kF32Reciprocal);
  }
  return codes;
}

__device__ __forceinline__ IndexCodes<IndexLayoutId::kIndexFp4> encode_index_fp4(const IndexScaling& scaling,
                                                                                 const IndexRow& row) {
  constexpr float kMax = index_layout(IndexLayoutId::kIndexFp4).value_max;
  constexpr int kTileLanes = kE2m1Tile / kChunk;
  static_assert(2 * kTileLanes == kIndexLanes);
  IndexCodes<IndexLayoutId::kIndexFp4> codes;
  uint32_t four = 0;  // the row's exponents
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    const float amax = bf16_to_float(static_cast<uint16_t>(lanes_max<kTileLanes>(finite_amax8(row.x[c]))));
    const bool nan = lanes_max<kTileLanes>(has_nan(row.x[c])) != 0;
    const uint8_t exponent = tile_scale_exponent(amax, scaling.amax_floor, 0.0f, kMax);
    codes.chunk[c] = encode_e2m1x8_by(row.x[c], kE2m1ToHalf * ue8m0_reciprocal(exponent));
    four |= uint32_t{nan ? uint8_t{255} : exponent} << (8 * c);
  }
  four <<= (threadIdx.x & kTileLanes) != 0 ? 16 : 0;
  codes.scale = four | __shfl_xor_sync(kFullWarp, four, kTileLanes);
  return codes;
}

template <IndexLayoutId kId>
__device__ __forceinline__ IndexCodes<kId> encode_index(const IndexScaling& scaling, const IndexRow& row) {
  if constexpr (kId == IndexLayoutId::kIndexFp8) return encode_index_fp8(scaling, row);
  else return encode_index_fp4(scaling, row);
}

// Writes a key into a cache that need be no more than 4-byte aligned.
template <IndexLayoutId kId>
__device__ __forceinline__ void write_index_key(const CacheRow& to, int64_t page_size,
                                                const IndexCodes<kId>& codes) {
  constexpr IndexLayout kL = index_layout(kId);
  constexpr int kChunkBytes = kL.value_bytes * kChunk / kIndexDim;
  if (!to.valid) return;
  uint8_t* page = const_cast<uint8_t*>(to.page);
  uint8_t* values = page + kL.value_offset(to.row);
  const bool is_aligned = reinterpret_cast<uintptr_t>(values) % kChunkBytes == 0;
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) {
    uint8_t* at = values + IndexRow::element(c) / kChunk * kChunkBytes;
    if (is_aligned) {
      store(at, codes.chunk[c], true);
    } else {
#pragma unroll
      for (int i = 0; i < kIndexCodeWords<kId>; ++i) store(at + 4 * i, Words<1>{codes.chunk[c][i]}, true);
    }
  }
  if (threadIdx.x % kIndexLanes == 0)
    *reinterpret_cast<uint32_t*>(page + kL.scale_offset(to.row, page_size)) = codes.scale;
}

}  // namespace mla_fp8::gpu
