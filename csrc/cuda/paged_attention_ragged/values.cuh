#pragma once
// Computes O += weights . V.
#include "cuda/device/convert.cuh"
#include "cuda/paged_attention_ragged/config.cuh"

namespace mla_fp8::gpu::ragged {

// This wave's accumulators: kTiles tiles of 16 columns. Tiles come in sets of kSet, whose columns share a
// scale. A lane's columns in the tiles of a set are neighbours in memory.
template <class Cache>
struct Columns {
  static constexpr int kPerWave = Cache::kDimV / kWaves, kTiles = kPerWave / kTile;
  static constexpr int kScaleTiles = Cache::kTileDim / kTile;
  static constexpr int kSet = kTiles < 4 ? kTiles : kScaleTiles < 4 ? kScaleTiles : 4;
  static_assert(kPerWave % (kTile * kSet) == 0 && Cache::kTileDim % (kTile * kSet) == 0);
  static __device__ __forceinline__ int first(int tile) {  // of the tile's set
    return threadIdx.x / kWaveSize * kPerWave + tile / kSet * kSet * kTile;
  }
  static __device__ __forceinline__ int column(int tile, int i) {
    return first(tile) + accumulator_column(i) * kSet + tile % kSet;
  }
  // Whether the tile's set is of rope. If no wave's is, the compiler knows.
  static __device__ __forceinline__ bool in_rope(int tile) {
    const int last = (kWaves - 1) * kPerWave + tile / kSet * kSet * kTile;
    return last >= Cache::kLeadDim && first(tile) >= Cache::kLeadDim;
  }
};

// Adds the keys from `first` on, which not every row of the block sees, one by one. A matrix product would
// multiply unseen keys by 0, and a NaN stays one. Afterwards these keys are zeros in s.
template <class Cache, Dtype kDtype>
__device__ void take_last_keys(Shared<Cache>& s, const Rows& rows,
                               Accumulators (&acc)[Columns<Cache>::kTiles], int64_t position, int64_t first,
                               int64_t end) {
  const int begin = first > position ? static_cast<int>(first - position) : 0;
  const int limit = end - position < kKeys ? static_cast<int>(end - position) : kKeys;
  using C = Columns<Cache>;
  float sums[C::kTiles][kTileAccumulators];  // not vectors: their elements would go through many branches
#pragma unroll
  for (int i = 0; i < C::kTiles * kTileAccumulators; ++i)
    sums[i / kTileAccumulators][i % kTileAccumulators] = acc[i / kTileAccumulators][i % kTileAccumulators];
  for (int key = begin; key < limit; ++key) {
    if (rows.k[key] == nullptr) continue;
#pragma unroll
    for (int set = 0; set < C::kTiles; set += C::kSet) {
      const int first_column = C::first(set);
      const bool in_rope = C::in_rope(set);
      const float scale =
          Cache::kTiles > 0 && !in_rope ? s.scales[first_column / Cache::kTileDim][key] : 1.0f;
#pragma unroll
      for (int i = 0; i < kTileAccumulators; ++i) {
        const int row = accumulator_row(i), column = first_column + accumulator_column(i) * C::kSet;
        float v[C::kSet];
        if (in_rope) {
          const auto* rope = reinterpret_cast<const uint8_t*>(s.rope[key] + (column - Cache::kLeadDim));
          load_floats<CacheDtype::kBf16, kDtype>(rope, v);
        } else {
          const uint8_t* staged = Cache::kIsLatent ? s.k[key] : s.v[Cache::kIsLatent ? 0 : key];
          load_floats<Cache::kStored, kDtype>(staged + column * kStoredBytes<Cache::kStored>, v);
        }
        if (position + key >= s.visible[row]) continue;
        const float weight = s.weights[row][key] * scale;
#pragma unroll
        for (int j = 0; j < C::kSet; ++j) sums[set + j][i] += weight * v[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < C::kTiles * kTileAccumulators; ++i)
    acc[i / kTileAccumulators][i % kTileAccumulators] = sums[i / kTileAccumulators][i % kTileAccumulators];
  __syncthreads();
  // Not unrolled: this runs rarely, and there are many of these kernels.
  const int count = limit - begin;
  uint8_t* first_row = Cache::kIsLatent ? s.k[begin] : s.v[Cache::kIsLatent ? 0 : begin];
  auto* staged = reinterpret_cast<Words<4>*>(first_row);
#pragma unroll 1
  for (int i = threadIdx.x; i < count * Shared<Cache>::kPitch / 16; i += kThreads) staged[i] = {};
  if constexpr (Cache::kRopeDim > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Cache::kRopeDim; i += kThreads)
      s.rope[begin + i / Cache::kRopeDim][i % Cache::kRopeDim] = 0;
  }
  if constexpr (Cache::kTiles > 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count * Cache::kTiles; i += kThreads)
      s.scales[i % Cache::kTiles][begin + i / Cache::kTiles] = 0.0f;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kRows; i += kThreads) s.weights[i % kRows][begin + i / kRows] = 0.0f;
  __syncthreads();
}

// acc += weights . V
template <class Cache, Dtype kDtype>
__device__ __forceinline__ void accumulate_values(Shared<Cache>& s,
                                                  Accumulators (&acc)[Columns<Cache>::kTiles]) {
  using C = Columns<Cache>;
#pragma unroll
  for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
    const int key = key_tile * kTile + operand_k();
#pragma unroll
    for (int set = 0; set < C::kTiles; set += C::kSet) {
      const int first = C::first(set);
      const bool in_rope = C::in_rope(set);
      Operand weights;
#pragma unroll
      for (int i = 0; i < kOperandRows; ++i) {
        const float* w = s.weights[operand_row(i)] + key;
        float x[4] = {w[0], w[1], w[2], w[3]};
        if (Cache::kTiles > 0 && !in_rope) {
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] *= s.scales[first / Cache::kTileDim][key + j];
        }
        weights.row[i] = {pack_weights<kDtype>({x[0], x[1]}), pack_weights<kDtype>({x[2], x[3]})};
      }
      Words<2> columns[kOperandRows][C::kSet];
#pragma unroll
      for (int i = 0; i < kOperandRows; ++i) {
        const int column = first + operand_row(i) * C::kSet;
        if (in_rope) {
          const auto* rope = reinterpret_cast<const uint8_t*>(s.rope[key] + (column - Cache::kLeadDim));
          load_columns<CacheDtype::kBf16, kDtype>(rope, sizeof s.rope[0], columns[i]);
        } else {
          const uint8_t* row = Cache::kIsLatent ? s.k[key] : s.v[Cache::kIsLatent ? 0 : key];
          load_columns<Cache::kStored, kDtype>(row + column * kStoredBytes<Cache::kStored>,
                                               Shared<Cache>::kPitch, columns[i]);
        }
      }
#pragma unroll
      for (int j = 0; j < C::kSet; ++j) {
        Operand values;
#pragma unroll
        for (int i = 0; i < kOperandRows; ++i) values.row[i] = columns[i][j];
        multiply_tiles<kDtype>(acc[set + j], weights, values);
      }
    }
  }
}

// Stores a lane's neighbouring columns in one piece.
template <int kCount>
__device__ __forceinline__ void store_floats(float* to, const float (&x)[kCount]) {
  Words<kCount> w;
#pragma unroll
  for (int j = 0; j < kCount; ++j) w[j] = float_bits(x[j]);
  *reinterpret_cast<Words<kCount>*>(to) = w;
}
template <Dtype kDtype, int kCount>
__device__ __forceinline__ void store_rounded(uint16_t* to, const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    *to = from_float<kDtype>(x[0]);
  } else {
    Words<kCount / 2> w;
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) w[j] = pack<kDtype>({x[2 * j], x[2 * j + 1]});
    *reinterpret_cast<Words<kCount / 2>*>(to) = w;
  }
}

}  // namespace mla_fp8::gpu::ragged
