#pragma once
// A key, or a query's head, of the indexer in eight vectors: its Hadamard transform, its codes and their
// scales. Ops that make keys themselves end with this, so that their bytes are quantize_index_k's.
#include "common/fp4.h"
#include "cpu/encode.h"

namespace mla_fp8::cpu::MLA_ISA {

constexpr int kIndexVectors = kIndexDim / kLanes;  // vectors of a key

// Replaces elements whose numbers differ in one bit by their sum and difference, for each bit of the vector's
// number from `first` on.
MLA_SIMD void add_butterflies(F32 (&x)[kIndexVectors], int first) {
  for (int bit = first; bit < kIndexVectors; bit *= 2) {
    F32 y[kIndexVectors];
    for (int i = 0; i < kIndexVectors; ++i)
      y[i] = (i & bit) == 0 ? add(x[i], x[i ^ bit]) : sub(x[i ^ bit], x[i]);
    for (int i = 0; i < kIndexVectors; ++i) x[i] = y[i];
  }
}

// The Walsh-Hadamard transform, neighbours first, times 128^-0.5. The seven bits of an element's number are
// its vector's three and its lane's four; transpose() rotates them by four.
MLA_SIMD void hadamard(F32 (&x)[kIndexVectors]) {
  static_assert(kIndexVectors == 8);
  transpose(x);  // vectors: bits 2, 1, 0 of an element's number
  add_butterflies(x, 1);
  transpose(x);  // vectors: bits 5, 4, 3
  add_butterflies(x, 1);
  F32 y[kIndexVectors];
  for (int i = 0; i < kIndexVectors / 2; ++i) unzip(x[2 * i], x[2 * i + 1], &y[i], &y[i + kIndexVectors / 2]);
  add_butterflies(y, kIndexVectors / 2);  // vectors: bits 6, 5, 4
  for (int i = 0; i < kIndexVectors; ++i)
    x[i] = from_bits(shift_left<16>(to_bf16(mul(y[i], set1(0x1.6a09e6p-4f)))));
}

// Writes the codes and returns the scale.
MLA_SIMD float encode_index_fp8(const IndexScaling& scaling, const F32 (&x)[kIndexVectors], uint8_t* values) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp8);
  const float amax = finite_amax(kIndexVectors, [&](int i) __attribute__((always_inline)) { return x[i]; });
  float scale, factor;
  if (scaling.format == IndexScaleFormat::kUe8m0) {
    const uint8_t exponent = tile_scale_exponent(amax, scaling.amax_floor, 0.0f, kL.value_max);
    scale = ue8m0_to_float(exponent), factor = ue8m0_reciprocal(exponent);
  } else {
    scale = (amax > scaling.amax_floor ? amax : scaling.amax_floor) / kL.value_max;
    factor = 1.0f / scale;
  }
  const bool divides = scaling.format == IndexScaleFormat::kF32;
  for (int i = 0; i < kIndexVectors; ++i) {
    const F32 scaled = divides ? div(x[i], set1(scale)) : mul(x[i], set1(factor));
    store_u8(values + i * kLanes, to_e4m3<Format::kE4m3fn>(scaled, kL.value_max));
  }
  return scale;
}

// Writes codes and scales.
MLA_SIMD void encode_index_fp4(const IndexScaling& scaling, const F32 (&x)[kIndexVectors], uint8_t* values,
                               uint8_t* scales) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp4);
  constexpr int kOfTile = kE2m1Tile / kLanes;
  for (int tile = 0; tile < kIndexDim / kE2m1Tile; ++tile) {
    const F32* first = x + tile * kOfTile;
    const float amax = finite_amax(kOfTile, [&](int i) __attribute__((always_inline)) { return first[i]; });
    const uint8_t exponent = tile_scale_exponent(amax, scaling.amax_floor, 0.0f, kL.value_max);
    F32 nans = set1(0.0f);
    for (int i = 0; i < kOfTile; ++i) {
      nans = select(is_nan(first[i]), set1(1.0f), nans);
      const F32 scaled = mul(first[i], set1(ue8m0_reciprocal(exponent)));
      store_e2m1(values + (tile * kOfTile + i) * kLanes / 2, to_e2m1(scaled, kE2m1OfNan));
    }
    scales[tile] = reduce_max(nans) > 0 ? uint8_t{255} : exponent;
  }
}

}  // namespace mla_fp8::cpu::MLA_ISA
