#pragma once
// Pieces of the products over raw rows by wgmma: scales, K Q^T, changes of O's bases.
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

// Two adjacent dims of O as bf16; `dim` is the first one, among a value warp's 16 of a chunk.
struct DimPair {
  uint32_t values;
  int dim;
};
// Pairs a lane's values of fragment rows g and g + 8. They are dims 2g, 2g + 1. bf16 values are dims g, g +
// 8: neighbours swap.
__device__ __forceinline__ DimPair pair_dims(bool is_bf16, int g, float of_g, float of_g8) {
  uint32_t low = __float_as_uint(of_g), high = __float_as_uint(of_g8);
  int dim = 2 * g;
  if (is_bf16) {
    const bool odd = g % 2;
    const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? low : high, 4);
    (odd ? low : high) = got;
    dim = odd ? g + 7 : g;
  }
  return {pack_bf16(__uint_as_float(low), __uint_as_float(high)), dim};
}

// The pitch of a block's value scales, f16 [tile][key]: four lanes store those of a key at once, into
// different banks.
inline constexpr int kScalePitch = 64 * 2 + 16;

// The scales of a stage's 16 keys, * 2^-e <= 1. A lane has pairs of f16, of keys g and g + 8, for tiles t, t
// + 4, ...
template <class R>
struct StageScales {
  static constexpr int kPerLane = R::kNumScales > 0 ? RowScales<R>::kPerLane : 1;
  uint32_t of_lane[kPerLane];
  int e = 0;       // 2^e is above them
  bool is_nan[2];  // keys g and g + 8

  // `row`: of this lane's key g. With kNanIsZero a scale that is NaN or infinite becomes 0, so that it says
  // nothing about other keys.
  template <bool kNanIsZero>
  __device__ void load(const uint8_t* row, int t) {
    is_nan[0] = is_nan[1] = false;
    if constexpr (R::kNumScales > 0) {
      float scale[2][kPerLane];
      uint32_t largest[2] = {};  // bits of a key's largest magnitude
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          scale[i][j] =
              4 * j + t < R::kNumScales ? RowScales<R>::read(row + 8 * i * R::kPitch, 4 * j + t) : 0.0f;
          largest[i] = max(largest[i], magnitude(scale[i][j]));
        }
      uint32_t above = __reduce_max_sync(kFullWarp, max(largest[0], largest[1]));
      if (above >= __float_as_uint(INFINITY)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kNanIsZero) {  // four lanes have a key's scales
            uint32_t of_key = max(largest[i], __shfl_xor_sync(kFullWarp, largest[i], 1));
            of_key = max(of_key, __shfl_xor_sync(kFullWarp, of_key, 2));
            is_nan[i] = of_key >= __float_as_uint(INFINITY);
            if (is_nan[i]) largest[i] = 0;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j)
              if (is_nan[i]) scale[i][j] = 0.0f;
          } else {
            is_nan[i] = RowScales<R>::is_nan(row + 8 * i * R::kPitch);
          }
        }
        if constexpr (kNanIsZero) above = __reduce_max_sync(kFullWarp, max(largest[0], largest[1]));
      }
      e = min(max(exponent_above(above), -100), 100);
      const float unit = power_of_two(-e);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) of_lane[j] = pack_f16(scale[0][j] * unit, scale[1][j] * unit);
    }
  }
  __device__ static uint32_t magnitude(float scale) {
    constexpr bool kHasSign = R::kL.scale_format == ScaleFormat::kF32;
    return __float_as_uint(scale) & (kHasSign ? 0x7fffffffu : ~0u);
  }
  // The scales of keys g and g + 8 for a tile.
  __device__ uint32_t of_tile(int tile, int lane) const {
    return __shfl_sync(kFullWarp, of_lane[tile / 4], (lane & ~3) + tile % 4);
  }
  // Stores them in the table of a block; `key`: this lane's g there.
  __device__ void store(uint8_t* table, int key, int t) const {
    if constexpr (R::kNumScales > 0)
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (4 * j + t < R::kNumScales) {
          uint16_t* at = reinterpret_cast<uint16_t*>(table + (4 * j + t) * kScalePitch) + key;
          at[0] = static_cast<uint16_t>(of_lane[j]);
          at[8] = static_cast<uint16_t>(of_lane[j] >> 16);
        }
  }
};

// Over two layouts scales lie behind the stage's rows (mixed_row.cuh).
template <KvLayoutId kFirst, KvLayoutId kSecond, int kExpanders, bool kHasKeyTable>
struct StageScales<MixedRow<kFirst, kSecond, kExpanders, kHasKeyTable>> {
  int e;
  bool is_nan[2];
  __device__ void store(uint8_t*, int, int) const {}
};

// Computes S^T = K Q^T for the 16 keys of the stage at `rows` and all heads of the CTA. K is code * scale *
// 2^-e, in f16.
template <class C>
__device__ __forceinline__ void multiply_keys(uint32_t rows, const StageScales<typename C::R>& scales,
                                              uint32_t q_smem, int lane, float (&s)[C::kOctets][4]) {
  using R = typename C::R;
  // Units of 32 dims, the bf16 ones first, are two k-steps each. Bytes and scales are fetched two units ahead
  // of their conversion. Products of up to kDepth - 1 units run meanwhile.
  constexpr int kDepth = 4, kBf16Units = R::kBf16Dims / 32, kUnits = R::kDims / 32;
  static_assert(kBf16Units <= 2 && (R::kMixed || R::kTileDims >= 32), "fetching ahead overwrites nothing");
  const uint64_t q = wgmma_descriptor(q_smem, C::kQHalfBytes, C::kQOctetBytes);
  constexpr int kStep = C::kQStepBytes / 16;  // in a descriptor's address
  const int matrix = lane / 8;
  const uint32_t keys = rows + ((matrix & 1) * 8 + lane % 8) * R::kPitch + (matrix >> 1) * 16;
  uint32_t k[kDepth][2][4], bytes[2][4], pair[2] = {};
  uint32_t scale[2] = {};                    // tiles of 32 dims take turns
  typename KeyFactors<R>::Words factors[2];  // a mixed row's units take turns
  const auto new_tile = [](int first_dim) { return R::kNumScales > 0 && R::new_tile(first_dim); };
  const auto place = [](int unit) { return R::kTileDims == 32 ? unit % 2 : 0; };
  const auto fetch = [&](int unit) {
    const int first_dim = (unit - kBf16Units) * 32;
    if (first_dim < 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(k[unit][i], keys + R::kBf16Offset + unit * 64 + i * 32);
      return;
    }
    ldmatrix_x4(bytes[unit % 2], keys + first_dim);
    if constexpr (R::kMixed) factors[unit % 2] = KeyFactors<R>::load(rows, first_dim / 32, lane / 4);
    else if (new_tile(first_dim)) scale[place(unit)] = scales.of_tile(R::tile_of(first_dim), lane);
  };
  const auto convert = [&](int unit) {
    const int first_dim = (unit - kBf16Units) * 32;
    uint32_t (&a)[2][4] = k[unit % kDepth];
    if (first_dim < 0) {
      const float to_unit = power_of_two(-scales.e);
      const uint32_t unit_pair = pack_bf16(to_unit, to_unit);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = mul_bf16x2(a[i / 4][i % 4], unit_pair);
      return;
    }
    convert_keys(bytes[unit % 2], a[0], a[1]);
    if constexpr (R::kMixed) return KeyFactors<R>(factors[unit % 2], lane / 4).apply(a[0], a[1]);
    if (new_tile(first_dim)) {
      pair[0] = __byte_perm(scale[place(unit)], 0, 0x1010);
      pair[1] = __byte_perm(scale[place(unit)], 0, 0x3232);
    }
    if constexpr (R::kNumScales > 0)
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = mul_f16x2(a[i / 4][i % 4], pair[i % 2]);
  };
#pragma unroll
  for (int unit = 0; unit < kBf16Units + 2; ++unit) fetch(unit);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit >= kDepth) wgmma_wait<kDepth - 1>();  // its fragments are free again
    convert(unit);
    if (unit >= kBf16Units && unit + 2 < kUnits) fetch(unit + 2);
    pin_registers(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * unit + i;
      if (unit < kBf16Units)
        wgmma_bf16(s, k[unit % kDepth][i], q + (R::kFp8Dims / 16 + step) * kStep, step > 0);
      else wgmma_f16(s, k[unit % kDepth][i], q + (step - 2 * kBf16Units) * kStep, step > 0);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin_registers(s);
}

// Multiplies O as bases have moved by `changes` [head] (log2).
template <int kChunks, int kOctets>
__device__ __forceinline__ void rescale_values(float (&out)[kChunks][kOctets][4], const float* changes,
                                               int t) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n) {
    float2 f = *reinterpret_cast<const float2*>(changes + n * kOctetHeads + 2 * t);
    f = {fast_exp2(f.x), fast_exp2(f.y)};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      out[chunk][n][0] *= f.x, out[chunk][n][2] *= f.x;
      out[chunk][n][1] *= f.y, out[chunk][n][3] *= f.y;
    }
  }
}

}  // namespace mla_fp8::gpu
