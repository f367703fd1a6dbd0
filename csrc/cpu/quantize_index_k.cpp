// quantize_index_k on the CPU: per key its amax, its scales, its codes; bound by memory.
#include "common/fp4.h"
#include "cpu/encode.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu::MLA_ISA {
namespace {

// The Walsh-Hadamard transform times 128^-0.5: the butterflies of neighbours first.
MLA_SIMD void rotate(float (&x)[kIndexDim]) {
  for (int width = 1; width < kIndexDim; width *= 2) {
    float y[kIndexDim];
    for (int i = 0; i < kIndexDim; ++i) y[i] = (i & width) == 0 ? x[i] + x[i ^ width] : x[i ^ width] - x[i];
    for (int i = 0; i < kIndexDim; ++i) x[i] = y[i];
  }
  for (int i = 0; i < kIndexDim; ++i) x[i] = bf16_to_float(float_to_bf16(x[i] * 0x1.6a09e6p-4f));
}

void encode_fp8(const QuantizeIndexKParams& p, const float (&x)[kIndexDim], float amax, uint8_t* values,
                uint8_t* scale_at) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp8);
  float scale, scaled[kIndexDim];
  if (p.scale_format == IndexScaleFormat::kUe8m0) {
    const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
    const float factor = ue8m0_reciprocal(exponent);
    scale = ue8m0_to_float(exponent);
    for (int i = 0; i < kIndexDim; ++i) scaled[i] = x[i] * factor;
  } else {
    scale = (amax > p.amax_floor ? amax : p.amax_floor) / kL.value_max;
    const float factor = 1.0f / scale;
    if (p.scale_format == IndexScaleFormat::kF32Reciprocal)
      for (int i = 0; i < kIndexDim; ++i) scaled[i] = x[i] * factor;
    else
      for (int i = 0; i < kIndexDim; ++i) scaled[i] = x[i] / scale;
  }
  for (int i = 0; i < kIndexDim; i += kLanes)
    store_u8(values + i, to_e4m3<Format::kE4m3fn>(load(scaled + i), kL.value_max));
  memcpy(scale_at, &scale, 4);
}

void encode_fp4(const QuantizeIndexKParams& p, const float (&x)[kIndexDim], uint8_t* values,
                uint8_t* scales) {
  constexpr IndexLayout kL = index_layout(IndexLayoutId::kIndexFp4);
  for (int tile = 0; tile < kIndexDim / kE2m1Tile; ++tile) {
    const float* first = x + tile * kE2m1Tile;
    bool has_nan = false;
    for (int i = 0; i < kE2m1Tile; ++i) has_nan |= first[i] != first[i];
    const float amax = finite_amax<Dtype::kF32>(first, 0, kE2m1Tile);
    const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
    const float factor = ue8m0_reciprocal(exponent);
    uint8_t codes[kE2m1Tile];
    for (int i = 0; i < kE2m1Tile; ++i) codes[i] = float_to_e2m1(first[i] * factor, kE2m1OfNan);
    for (int i = 0; i < kE2m1Tile / 2; ++i)
      values[tile * kE2m1Tile / 2 + i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    scales[tile] = has_nan ? uint8_t{255} : exponent;
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
  float x[kIndexDim];
  for (int i = 0; i < kIndexDim; i += kLanes) store(x + i, load_latent<kDtype>(source, i));
  if (p.hadamard) rotate(x);
  uint8_t *values = page + l.value_offset(row), *scales = page + l.scale_offset(row, p.page_size);
  if (p.layout == IndexLayoutId::kIndexFp4) encode_fp4(p, x, values, scales);
  else encode_fp8(p, x, finite_amax<Dtype::kF32>(x, 0, kIndexDim), values, scales);
}

}  // namespace

void quantize_index_k(const QuantizeIndexKParams& p, int64_t begin, int64_t end) {
  const SubnormalMode mode(Subnormals::kKeep);
  with_dtype(p.dtype, [&](auto dtype) {
    for (int64_t token = begin; token < end; ++token) quantize_key<dtype>(p, token);
  });
}

}  // namespace mla_fp8::cpu::MLA_ISA
