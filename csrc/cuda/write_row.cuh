#pragma once
// A warp writes a cache row: the scale of each tile, codes, rope. This is what quantize_kv does with a latent
// in registers. Ops that make latents themselves end with it, so that their bytes are quantize_kv's.
#include <utility>

#include "common/fp8.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

inline constexpr int kSectorBytes = 32;  // DRAM is written in pieces of this size

// Prefetches, while the latent is loaded, sectors that the row fills only in part: they come from DRAM.
template <KvLayoutId kId>
__device__ __forceinline__ void prefetch_partial_sectors(const CacheRow& to, int64_t page_size) {
  constexpr KvLayout kL = kv_layout(kId);
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kL.scale_placement == ScalePlacement::kPageTail) {
    if (kL.scale_bytes() < kSectorBytes && lane == 0)
      prefetch_l2(to.page + kL.scale_offset(to.row, page_size));
  } else if constexpr (kL.token_stride() % kSectorBytes != 0) {
    const uint8_t* edge = to.page + kL.token_offset(to.row + lane);  // of lanes 0 and 1
    if (lane < 2 && reinterpret_cast<uintptr_t>(edge) % kSectorBytes != 0) prefetch_l2(edge);
  }
}

// A token's scale record, from the exponents that the first lanes of its tiles hold. Unused bytes are 0.
// There is no loop: an array that a loop indexes would lie in memory on AMD's GPUs.
template <KvLayoutId kId, int... kTiles>
__device__ __forceinline__ Words<LatentChunks<kId>::kScaleWords> scale_record(
    const uint8_t (&exponents)[LatentChunks<kId>::kPasses], std::integer_sequence<int, kTiles...>) {
  using C = LatentChunks<kId>;
  Words<C::kScaleWords> record{};
  const auto add = [&](auto tile) {
    const uint32_t exponent = exponents[tile / C::kPassTiles];
    const uint32_t e = __shfl_sync(kFullWarp, exponent, tile % C::kPassTiles * C::kTileLanes);
    if constexpr (C::kL.scale_format == ScaleFormat::kUe8m0) {
      record[tile / 4] |= e << (tile % 4 * 8);
    } else {
      record[tile] = e << 23;  // the float 2^(e - 127); e is neither 0 nor 255
    }
  };
  (add(constant<kTiles>{}), ...);
  return record;
}
template <KvLayoutId kId>
__device__ __forceinline__ auto scale_record(const uint8_t (&exponents)[LatentChunks<kId>::kPasses]) {
  return scale_record<kId>(exponents, std::make_integer_sequence<int, kv_layout(kId).num_tiles()>{});
}

// x / scale for bf16 x, correctly rounded, with one reciprocal for the whole latent. q = x * (1 / scale) is
// off by (q * scale - x) / scale; less that, it is exact for every 8-bit mantissa of x and every mantissa of
// scale (tried: all 2^30). The sign of a zero is kept.
struct DivideByScale {
  // Moves an extreme scale, and x, to where neither 1 / scale nor the remainder leaves the normal range.
  float factor, scale, reciprocal;
  float limit;  // of moved x: the bf16 next to fp8_max * scale; its quotient has the code of fp8_max

  __device__ DivideByScale(float layer_scale, float fp8_max)
      : factor(layer_scale < 0x1p-60f  ? 0x1p64f
               : layer_scale > 0x1p60f ? 0x1p-64f
                                       : 1.0f),
        scale(layer_scale * factor),
        reciprocal(1.0f / scale),
        limit(bf16_to_float(float_to_bf16(fp8_max * scale))) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float q = x * reciprocal;
    return fmaf(fmaf(q, scale, -x), -reciprocal, q);
  }
};

// Writes a latent, as bf16: x[pass] of a lane are elements pass * 256 + lane * 8 and the next seven. All
// lanes of the warp call it, and the row is valid.
template <KvLayoutId kId>
__device__ __forceinline__ void write_row(const CacheRow& to, int64_t page_size, float layer_scale,
                                          float fp8_max, const Words<4> (&x)[LatentChunks<kId>::kPasses]) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  constexpr bool kScalesBeforeRope = kL.scale_inline() && kL.rope_dim > 0;
  const int lane = threadIdx.x % kWarpSize;
  uint8_t* page = const_cast<uint8_t*>(to.page);
  uint8_t* dst = page + kL.token_offset(to.row);
  const DivideByScale divide(layer_scale, fp8_max);
  Words<C::kLeadWords> codes[C::kPasses];
  uint8_t scales[C::kPasses];  // of this lane's tiles: an exponent each, or an e4m3
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    if (C::element(pass, 0) >= C::kLeadDim) continue;
    if constexpr (kL.nope_format == Format::kE2m1) {
      const float amax = bf16_to_float(lanes_max<C::kTileLanes>(finite_amax8_or_nan(x[pass])));
      scales[pass] = e2m1_tile_scale(amax, kL.scale_floor);
      codes[pass] = encode_e2m1x8(x[pass], e4m3_to_float<Format::kE4m3fn>(scales[pass]));
    } else if constexpr (C::kHasTiles) {
      const float amax = bf16_to_float(lanes_max<C::kTileLanes>(finite_amax8(x[pass])));
      scales[pass] = tile_scale_exponent(amax, kL.amax_floor, kL.scale_floor, fp8_max);
      codes[pass] = encode8<kL.nope_format>(x[pass], ue8m0_reciprocal(scales[pass]), fp8_max,
                                            [](float quotient) { return quotient; });
    } else {
      codes[pass] = encode8<kL.nope_format>(x[pass], divide.factor, divide.limit, divide);
    }
  }

#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    if (C::element(pass, 0) < C::kLeadDim && element < C::kLeadDim)
      store(dst + C::lead_offset(element), codes[pass], true);
    else if (element < C::kDim && !(kScalesBeforeRope && pass == C::kPasses - 1))
      store(dst + C::rope_offset(element), x[pass], true);
  }
  if constexpr (kScalesBeforeRope) {
    // Scales share a sector with the beginning of rope: the first lane without rope writes them with it.
    constexpr int kFirst = (C::kPasses - 1) * kPassDim, kScaleLane = (C::kDim - kFirst) / kChunk;
    static_assert(C::kScaleWords == 4 && kFirst >= kL.nope_dim && kScaleLane < kWarpSize);
    const auto record = scale_record<kId>(scales);
    const bool has_scales = lane == kScaleLane;
    Words<4> last;  // chosen word by word: a choice of two arrays would put them into memory on AMD
#pragma unroll
    for (int i = 0; i < 4; ++i) last[i] = has_scales ? record[i] : x[C::kPasses - 1][i];
    const int offset = has_scales ? kL.nope_bytes() : C::rope_offset(kFirst + lane * kChunk);
    if (lane <= kScaleLane) store(dst + offset, last, true);
  } else if constexpr (C::kOwnScales) {
    uint8_t* own = page + kL.scale_offset(to.row, page_size) + lane / C::kTileLanes;
#pragma unroll
    for (int pass = 0; pass < C::kPasses; ++pass)
      if (lane % C::kTileLanes == 0) own[pass * C::kPassTiles] = scales[pass];
  } else if constexpr (C::kHasTiles) {
    const auto record = scale_record<kId>(scales);
    if (lane == 0) store(page + kL.scale_offset(to.row, page_size), record);
  }
}

}  // namespace mla_fp8::gpu
