// quantize_index_k on the CPU: per key its amax, its scales, its codes; bound by memory.
#include "common/fp4.h"
#include "cpu/encode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

constexpr int kVectors = kIndexDim / kLanes;  // of a key

// Sums and differences of elements whose numbers differ in one bit, each of those of the vector's number from
// `first` on.
MLA_SIMD void add_butterflies(F32 (&x)[kVectors], int first) {
  for (int bit = first; bit < kVectors; bit *= 2) {
    F32 y[kVectors];
    for (int i = 0; i < kVectors; ++i) y[i] = (i & bit) == 0 ? add(x[i], x[i ^ bit]) : sub(x[i ^ bit], x[i]);
    for (int i = 0; i < kVectors; ++i) x[i] = y[i];
  }
}

// The Walsh-Hadamard transform times 128^-0.5: the butterflies of neighbours first. The seven bits of an
// element's number are those of its vector and of its lane, which transpose() rotates by four.
MLA_SIMD void rotate(F32 (&x)[kVectors]) {
  static_assert(kVectors == 8);
  transpose(x);  // vectors: bits 2, 1, 0
  add_butterflies(x, 1);
  transpose(x);  // vectors: bits 5, 4, 3
  add_butterflies(x, 1);
  F32 y[kVectors];
  for (int i = 0; i < kVectors / 2; ++i) unzip(x[2 * i], x[2 * i + 1], &y[i], &y[i + kVectors / 2]);
  add_butterflies(y, kVectors / 2);  // vectors: bits 6, 5, 4
  for (int i = 0; i < kVectors; ++i)
    x[i] = from_bits(shift_left<16>(to_bf16(mul(y[i], set1(0x1.6a09e6p-4f)))));
}

MLA_SIMD void encode_fp8(const QuantizeIndexKParams& p, const F32 (&x)[kVectors], uint8_t* values,
                         uint8_t* scale_at) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp8);
  const float amax = finite_amax(kVectors, [&](int i) __attribute__((always_inline)) { return x[i]; });
  float scale, factor;
  if (p.scale_format == IndexScaleFormat::kUe8m0) {
    const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
    scale = ue8m0_to_float(exponent), factor = ue8m0_reciprocal(exponent);
  } else {
    scale = (amax > p.amax_floor ? amax : p.amax_floor) / kL.value_max;
    factor = 1.0f / scale;
  }
  const bool divides = p.scale_format == IndexScaleFormat::kF32;
  for (int i = 0; i < kVectors; ++i) {
    const F32 scaled = divides ? div(x[i], set1(scale)) : mul(x[i], set1(factor));
    store_u8(values + i * kLanes, to_e4m3<Format::kE4m3fn>(scaled, kL.value_max));
  }
  memcpy(scale_at, &scale, 4);
}

MLA_SIMD void encode_fp4(const QuantizeIndexKParams& p, const F32 (&x)[kVectors], uint8_t* values,
                         uint8_t* scales) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp4);
  constexpr int kOfTile = kE2m1Tile / kLanes;
  for (int tile = 0; tile < kIndexDim / kE2m1Tile; ++tile) {
    const F32* first = x + tile * kOfTile;
    const float amax = finite_amax(kOfTile, [&](int i) __attribute__((always_inline)) { return first[i]; });
    const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
    F32 nans = set1(0.0f);
    for (int i = 0; i < kOfTile; ++i) {
      nans = select(is_nan(first[i]), set1(1.0f), nans);
      const F32 scaled = mul(first[i], set1(ue8m0_reciprocal(exponent)));
      store_e2m1(values + (tile * kOfTile + i) * kLanes / 2, to_e2m1(scaled, kE2m1OfNan));
    }
    scales[tile] = reduce_max(nans) > 0 ? uint8_t{255} : exponent;
  }
}

template <Dtype kDtype>
void quantize_key(const QuantizeIndexKParams& p, int64_t token) {
  const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[token]
                                         : static_cast<const int32_t*>(p.slot_mapping)[token];
  if (slot < 0 || slot >= p.num_slots) return;
  const IndexLayout l = index_layout(p.layout);
  const int64_t row = slot % p.page_size;
  uint8_t* page = p.kv_cache + slot / p.page_size * p.kv_cache_stride_page;

  constexpr int kItemsize = kDtype == Dtype::kF32 ? 4 : 2;
  const void* source = static_cast<const uint8_t*>(p.k) + token * p.k_stride_token * kItemsize;
  F32 x[kVectors];
  for (int i = 0; i < kVectors; ++i) x[i] = load_latent<kDtype>(source, i * kLanes);
  if (p.hadamard) rotate(x);
  uint8_t *values = page + l.value_offset(row), *scales = page + l.scale_offset(row, p.page_size);
  if (p.layout == IndexLayoutId::kIndexFp4) encode_fp4(p, x, values, scales);
  else encode_fp8(p, x, values, scales);
}

}  // namespace

void quantize_index_k(const QuantizeIndexKParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_dtype(p.dtype, [&](auto dtype) {
    for (int64_t token = begin; token < end; ++token) quantize_key<dtype>(p, token);
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
