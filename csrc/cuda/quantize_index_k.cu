// quantize_index_k on CUDA: sixteen lanes a key, eight elements a lane; of many keys a lane reads four at
// once. Traffic per key: reads 128 elements, writes 132 or 68 bytes. HBM-bound.

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
constexpr int kKeysPerBlock = kKeyBlock / kKeyLanes;  // that are read at once
constexpr int kManyKeys = 4;

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

// Writes a key of which each lane has eight elements.
template <IndexLayoutId kId>
__device__ __forceinline__ void write_key(const QuantizeIndexKParams& p, const CacheRow& to,
                                          const Words<4>& x) {
  constexpr IndexLayout kL = index_layout(kId);
  const int lane = threadIdx.x % kKeyLanes;
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
    uint32_t four = uint32_t{nan ? uint8_t{255} : exponent} << (lane / kTileLanes * 8);
    four |= __shfl_xor_sync(kFullWarp, four, kTileLanes);
    four |= __shfl_xor_sync(kFullWarp, four, 2 * kTileLanes);
    if (!to.valid) return;
    reinterpret_cast<uint32_t*>(values)[lane] = codes;
    if (lane == 0) *reinterpret_cast<uint32_t*>(scales) = four;
  }
}

}  // namespace

// kAtOnce keys to a lane.
template <IndexLayoutId kId, bool kIsBf16, int kAtOnce>
__global__ void __launch_bounds__(kKeyBlock)
    quantize_index_k_kernel(const __grid_constant__ QuantizeIndexKArgs args) {
  const QuantizeIndexKParams& p = args.p;
  const int lane = threadIdx.x % kKeyLanes;
  const int64_t first = int64_t{blockIdx.x} * kKeysPerBlock * kAtOnce + threadIdx.x / kKeyLanes;
  wait_for_previous_grid();
  const bool is_float = !kIsBf16 && p.dtype == Dtype::kF32;
  const int itemsize = is_float ? 4 : 2;
  int64_t slots[kAtOnce];
  Words<4> x[kAtOnce], more[kAtOnce];  // more: of eight floats
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t token = first + i * kKeysPerBlock;
    const bool exists = token < p.num_tokens;  // all lanes of a warp go on: they shuffle
    slots[i] = exists ? load_index(p.slot_mapping, p.slots_are_int64, token) : -1;
    const uint8_t* source = static_cast<const uint8_t*>(p.k) +
                            ((exists ? token : 0) * p.k_stride_token + lane * kChunk) * itemsize;
    x[i] = load_if<4>(source, exists);
    if constexpr (!kIsBf16) more[i] = load_if<4>(source + 16, exists && is_float);
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if constexpr (!kIsBf16) x[i] = to_bf16x8(is_float, x[i], more[i]);
    if (p.hadamard) x[i] = rotate(x[i]);
    write_key<kId>(p, find_row(p, args.page_size, slots[i]), x[i]);
  }
}

// Few keys go each to a lane of their own: what they take is one key's latency.
template <IndexLayoutId kId, bool kIsBf16>
void quantize_index_keys(const QuantizeIndexKArgs& args, gpuStream_t stream) {
  const auto launch_blocks = [&](auto at_once) {
    const int64_t keys = kKeysPerBlock * at_once;
    launch(quantize_index_k_kernel<kId, kIsBf16, at_once>,
           {.grid = (args.p.num_tokens + keys - 1) / keys, .block = kKeyBlock, .stream = stream}, args);
  };
  const int64_t keys_at_once = int64_t{num_processors()} * (kMaxThreadsPerSm / kKeyLanes);
  if (args.p.num_tokens <= keys_at_once) launch_blocks(constant<1>{});
  else launch_blocks(constant<kManyKeys>{});
}

void quantize_index_k(const QuantizeIndexKParams& p, gpuStream_t stream) {
  const QuantizeIndexKArgs args{p, Divider(p.page_size)};
  constexpr IndexLayoutId kFp8 = IndexLayoutId::kIndexFp8, kFp4 = IndexLayoutId::kIndexFp4;
  const bool is_bf16 = p.dtype == Dtype::kBf16;
  if (p.layout == kFp8)
    return is_bf16 ? quantize_index_keys<kFp8, true>(args, stream)
                   : quantize_index_keys<kFp8, false>(args, stream);
  if (is_bf16) quantize_index_keys<kFp4, true>(args, stream);
  else quantize_index_keys<kFp4, false>(args, stream);
}

}  // namespace mla_fp8::gpu
