// quantize_index_k on CUDA: sixteen lanes a key, eight elements a lane. Traffic per key: reads 128 elements,
// writes 132 or 68 bytes. HBM-bound.

#include "ops/quantize_index_k.h"

#include "common/fp4.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct QuantizeIndexKArgs {
  QuantizeIndexKParams p;
  Divider page_size;
};

namespace {

constexpr int kKeyLanes = kIndexDim / kChunk;
constexpr int kKeyBlock = 128;
constexpr int kKeysPerBlock = kKeyBlock / kKeyLanes;

// The Walsh-Hadamard transform times 128^-0.5, neighbours first, rounded to bf16.
__device__ __forceinline__ Words<4> rotate(const Words<4>& packed) {
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Dtype::kBf16>(packed[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
#pragma unroll
  for (int width = 1; width < kChunk; width *= 2)
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if ((i & width) == 0) {
        const float low = x[i], high = x[i + width];
        x[i] = low + high;
        x[i + width] = low - high;
      }
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int step = 1; step < kKeyLanes; step *= 2)
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float other = __shfl_xor_sync(kFullWarp, x[i], step);
      x[i] = (lane & step) == 0 ? x[i] + other : other - x[i];
    }
  Words<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = pack<Dtype::kBf16>({x[2 * i] * 0x1.6a09e6p-4f, x[2 * i + 1] * 0x1.6a09e6p-4f});
  return out;
}

__device__ __forceinline__ bool has_nan(const Words<4>& x) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) found |= (x[i] & 0x7fffu) > 0x7f80u || (x[i] >> 16 & 0x7fffu) > 0x7f80u;
  return found;
}

// Caches need not be more than 4-byte aligned.
__device__ __forceinline__ void store_words(uint8_t* to, const Words<2>& w) {
  if (reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    store(to, w, true);
  } else {
    reinterpret_cast<uint32_t*>(to)[0] = w[0];
    reinterpret_cast<uint32_t*>(to)[1] = w[1];
  }
}

__device__ __forceinline__ Words<2> quotients(const Words<4>& x, float scale, bool reciprocal) {
  const float factor = 1.0f / scale;
  Words<2> codes{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack<Dtype::kBf16>(x[i]);
    const float low = reciprocal ? v.x * factor : v.x / scale, high = reciprocal ? v.y * factor : v.y / scale;
    const uint32_t pair = float_to_e4m3<Format::kE4m3fn>(low) | uint32_t{float_to_e4m3<Format::kE4m3fn>(high)}
                                                                    << 8;
    codes[i / 2] |= pair << (i % 2 * 16);
  }
  return codes;
}

}  // namespace

template <IndexLayoutId kId, bool kIsBf16>
__global__ void __launch_bounds__(kKeyBlock)
    quantize_index_k_kernel(const __grid_constant__ QuantizeIndexKArgs args) {
  constexpr IndexLayout kL = index_layout(kId);
  const QuantizeIndexKParams& p = args.p;
  const int lane = threadIdx.x % kKeyLanes;
  const int64_t token = int64_t{blockIdx.x} * kKeysPerBlock + threadIdx.x / kKeyLanes;
  const bool exists = token < p.num_tokens;  // all lanes of a warp go on: they shuffle
  wait_for_previous_grid();
  const bool is_float = !kIsBf16 && p.dtype == Dtype::kF32;
  const int itemsize = is_float ? 4 : 2;
  const int64_t slot = exists ? load_index(p.slot_mapping, p.slots_are_int64, token) : -1;
  const uint8_t* source =
      static_cast<const uint8_t*>(p.k) + ((exists ? token : 0) * p.k_stride_token + lane * kChunk) * itemsize;
  Words<4> x = load_if<4>(source, exists);
  if constexpr (!kIsBf16) x = to_bf16x8(is_float, x, load_if<4>(source + 16, exists && is_float));
  if (p.hadamard) x = rotate(x);

  const CacheRow to = find_row(p, args.page_size, slot);
  uint8_t* page = const_cast<uint8_t*>(to.page);
  uint8_t* values = page + kL.value_offset(to.row);
  uint8_t* scales = page + kL.scale_offset(to.row, p.page_size);
  if constexpr (kId == IndexLayoutId::kIndexFp8) {
    const float amax = bf16_to_float(static_cast<uint16_t>(lanes_max<kKeyLanes>(finite_amax8(x))));
    float scale;
    Words<2> codes;
    if (p.scale_format == IndexScaleFormat::kUe8m0) {
      const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
      scale = ue8m0_to_float(exponent);
      codes = encode8<Format::kE4m3fn>(x, ue8m0_reciprocal(exponent), kL.value_max,
                                       [](float quotient) { return quotient; });
    } else {
      scale = (amax > p.amax_floor ? amax : p.amax_floor) / kL.value_max;
      codes = quotients(x, scale, p.scale_format == IndexScaleFormat::kF32Reciprocal);
    }
    if (!to.valid) return;
    store_words(values + lane * kChunk, codes);
    if (lane == 0) *reinterpret_cast<float*>(scales) = scale;
  } else {
    constexpr int kTileLanes = kE2m1Tile / kChunk;
    const float amax = bf16_to_float(static_cast<uint16_t>(lanes_max<kTileLanes>(finite_amax8(x))));
    const bool nan = lanes_max<kTileLanes>(has_nan(x)) != 0;
    const uint8_t exponent = tile_scale_exponent(amax, p.amax_floor, 0.0f, kL.value_max);
    const float factor = ue8m0_reciprocal(exponent);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack<Dtype::kBf16>(x[i]);
      const uint32_t low = float_to_e2m1(v.x * factor, kE2m1OfNan),
                     high = float_to_e2m1(v.y * factor, kE2m1OfNan);
      codes |= (low | high << 4) << (8 * i);
    }
    if (!to.valid) return;
    reinterpret_cast<uint32_t*>(values)[lane] = codes;
    if (lane % kTileLanes == 0) scales[lane / kTileLanes] = nan ? uint8_t{255} : exponent;
  }
}

void quantize_index_k(const QuantizeIndexKParams& p, gpuStream_t stream) {
  const LaunchConfig config{
      .grid = (p.num_tokens + kKeysPerBlock - 1) / kKeysPerBlock, .block = kKeyBlock, .stream = stream};
  const QuantizeIndexKArgs args{p, Divider(p.page_size)};
  constexpr IndexLayoutId kFp8 = IndexLayoutId::kIndexFp8, kFp4 = IndexLayoutId::kIndexFp4;
  const bool is_bf16 = p.dtype == Dtype::kBf16;
  if (p.layout == kFp8)
    launch(is_bf16 ? quantize_index_k_kernel<kFp8, true> : quantize_index_k_kernel<kFp8, false>, config,
           args);
  else
    launch(is_bf16 ? quantize_index_k_kernel<kFp4, true> : quantize_index_k_kernel<kFp4, false>, config,
           args);
}

}  // namespace mla_fp8::gpu
