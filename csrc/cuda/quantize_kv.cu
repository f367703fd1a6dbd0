// quantize_kv on CUDA: one warp per token finds the scale of each tile, encodes, and writes the cache row.
// Traffic per token: reads head_dim_qk elements, writes bytes_per_token. HBM-bound;
// docs/kernels/cache_ops.md has the measurements behind the shape.

#include "ops/quantize_kv.h"

#include "common/fp8.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct QuantizeKvArgs {
  QuantizeKvParams p;
  Divider page_size;
};

namespace {

constexpr int kSectorBytes = 32;  // the unit in which DRAM is written

// Sectors that this token fills only in part have to come from DRAM: ask for them while the latent is on
// its way.
template <KvLayoutId kId>
__device__ __forceinline__ void prefetch_partial_sectors(const CacheRow& to, int64_t page_size) {
  constexpr KvLayout kL = kv_layout(kId);
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (kL.scale_placement == ScalePlacement::kPageTail) {
    if (lane == 0) prefetch_l2(to.page + kL.scale_offset(to.row, page_size));
  } else if constexpr (kL.token_stride() % kSectorBytes != 0) {
    const uint8_t* edge = to.page + kL.token_offset(to.row + lane);  // of lanes 0 and 1
    if (lane < 2 && reinterpret_cast<uintptr_t>(edge) % kSectorBytes != 0) prefetch_l2(edge);
  }
}

// The scale record of a token from the exponents that the first lanes of its tiles hold; unused bytes are 0.
template <KvLayoutId kId>
__device__ __forceinline__ Words<LatentChunks<kId>::kScaleWords> scale_record(
    const uint8_t (&exponents)[LatentChunks<kId>::kPasses]) {
  using C = LatentChunks<kId>;
  Words<C::kScaleWords> record{};
#pragma unroll
  for (int tile = 0; tile < C::kL.num_tiles(); ++tile) {
    const uint32_t exponent = exponents[tile / C::kPassTiles];
    const uint32_t e = __shfl_sync(kFullWarp, exponent, tile % C::kPassTiles * C::kTileLanes);
    if constexpr (C::kL.scale_format == ScaleFormat::kUe8m0) {
      record[tile / 4] |= e << (tile % 4 * 8);
    } else {
      record[tile] = e << 23;  // the float 2^(e - 127); e is neither 0 nor 255
    }
  }
  return record;
}

// x / scale for bf16 x, correctly rounded, with one reciprocal for the whole latent: what q = x * (1 / scale)
// is off by, (q * scale - x) / scale, makes it exact for every 8-bit mantissa of x and every mantissa of
// scale (tried, all 2^30), and keeps the sign of a zero.
struct DivideByScale {
  // An extreme scale is moved, with x, to where neither 1 / scale nor the remainder leaves the normal range.
  float factor, scale, reciprocal;
  float limit;  // of x, moved: the bf16 next to fp8_max * scale, whose quotient has the code of fp8_max

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

// A full multiprocessor where 32 registers are enough.
template <bool kIsBf16>
inline constexpr int kBlocksPerSm = kMaxThreadsPerSm / kLatentBlock * (kIsBf16 ? 4 : 3) / 4;

}  // namespace

// kIsBf16: of the latents, else fp16 or float.
template <KvLayoutId kId, bool kIsBf16>
__global__ void __launch_bounds__(kLatentBlock, kBlocksPerSm<kIsBf16>)
    quantize_kv_kernel(const __grid_constant__ QuantizeKvArgs args) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  constexpr bool kScalesBeforeRope = kL.scale_inline() && kL.rope_dim > 0;
  const QuantizeKvParams& p = args.p;
  const bool is_float = !kIsBf16 && p.dtype == Dtype::kF32;
  const int itemsize = is_float ? 4 : 2;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * kLatentsPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();

  // Slot, scale and latent are read at the same time.
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  const int64_t mate =
      load_index(p.slot_mapping, p.slots_are_int64, (token ^ 1) < p.num_tokens ? token ^ 1 : token);
  const uint8_t* nope = static_cast<const uint8_t*>(p.nope) + token * p.nope_stride_token * itemsize;
  const uint8_t* rope = static_cast<const uint8_t*>(p.rope) + token * p.rope_stride_token * itemsize;
  Words<4> x[C::kPasses], more[C::kPasses];  // more: of eight floats
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    const uint8_t* src =
        element < kL.nope_dim ? nope + element * itemsize : rope + (element - kL.nope_dim) * itemsize;
    x[pass] = load_if<4>(src, element < C::kDim);
    if constexpr (!kIsBf16) more[pass] = load_if<4>(src + 16, element < C::kDim && is_float);
  }

  const CacheRow to = find_row(p, args.page_size, slot);
  if (!to.valid) return;
  if (mate != slot + 1 && mate != slot - 1) prefetch_partial_sectors<kId>(to, p.page_size);
  uint8_t* page = const_cast<uint8_t*>(to.page);
  uint8_t* dst = page + kL.token_offset(to.row);

  if constexpr (!kIsBf16) {
#pragma unroll
    for (int pass = 0; pass < C::kPasses; ++pass) x[pass] = to_bf16x8(is_float, x[pass], more[pass]);
  }
  const DivideByScale divide(layer_scale, p.fp8_max);
  Words<C::kLeadWords> codes[C::kPasses];
  uint8_t exponents[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    if (C::element(pass, 0) >= C::kLeadDim) continue;
    if constexpr (C::kHasTiles) {
      const float amax = bf16_to_float(lanes_max<C::kTileLanes>(finite_amax8(x[pass])));
      exponents[pass] = tile_scale_exponent(amax, kL.amax_floor, kL.scale_floor, p.fp8_max);
      codes[pass] = encode8<kL.nope_format>(x[pass], ue8m0_reciprocal(exponents[pass]), p.fp8_max,
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
    // They lie in one sector with the beginning of rope: the first lane without rope writes them along.
    constexpr int kFirst = (C::kPasses - 1) * kPassDim, kScaleLane = (C::kDim - kFirst) / kChunk;
    static_assert(C::kScaleWords == 4 && kFirst >= kL.nope_dim && kScaleLane < kWarpSize);
    const auto record = scale_record<kId>(exponents);
    const bool has_scales = lane == kScaleLane;
    Words<4> last;  // chosen word by word: a choice of two arrays would put them into memory on AMD
#pragma unroll
    for (int i = 0; i < 4; ++i) last[i] = has_scales ? record[i] : x[C::kPasses - 1][i];
    const int offset = has_scales ? kL.nope_bytes() : C::rope_offset(kFirst + lane * kChunk);
    if (lane <= kScaleLane) store(dst + offset, last, true);
  } else if constexpr (C::kHasTiles) {
    const auto record = scale_record<kId>(exponents);
    if (lane == 0) store(page + kL.scale_offset(to.row, p.page_size), record);
  }
}

void quantize_kv(const QuantizeKvParams& p, gpuStream_t stream) {
  const LaunchConfig config{
      .grid = ceil_div<int64_t>(p.num_tokens, kLatentsPerBlock), .block = kLatentBlock, .stream = stream};
  const QuantizeKvArgs args{p, Divider(p.page_size)};
  with_kv_layout(p.layout, [&](auto id) {
    if (p.dtype == Dtype::kBf16) launch(quantize_kv_kernel<id, true>, config, args);
    else launch(quantize_kv_kernel<id, false>, config, args);
  });
}

}  // namespace mla_fp8::gpu
