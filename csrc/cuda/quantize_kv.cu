// quantize_kv on CUDA: one warp a token finds the scale of each tile, encodes, and writes the cache row.
// HBM-bound: a token is head_dim_qk elements read, bytes_per_token written.
// docs/notebook/kernels/cache_ops.md has the measurements behind the shape.

#include "ops/quantize_kv.h"

#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/write_row.cuh"

namespace mla_fp8::gpu {

struct QuantizeKvArgs {
  QuantizeKvParams p;
  Divider page_size;
};

namespace {

// Blocks that fill a multiprocessor if 32 registers are enough, else three quarters of it.
template <bool kIsBf16>
inline constexpr int kBlocksPerSm = kMaxThreadsPerSm / kLatentBlock * (kIsBf16 ? 4 : 3) / 4;

}  // namespace

// kIsBf16: latents are bf16; else fp16 or float.
template <KvLayoutId kId, bool kIsBf16>
__global__ void __launch_bounds__(kLatentBlock, kBlocksPerSm<kIsBf16>)
    quantize_kv_kernel(const __grid_constant__ QuantizeKvArgs args) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  const QuantizeKvParams& p = args.p;
  const bool is_float = !kIsBf16 && p.dtype == Dtype::kF32;
  const int itemsize = is_float ? 4 : 2;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * kLatentsPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();

  // Slot, scale and latent are loaded at the same time.
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  const int64_t mate =
      load_index(p.slot_mapping, p.slots_are_int64, (token ^ 1) < p.num_tokens ? token ^ 1 : token);
  const uint8_t* nope = static_cast<const uint8_t*>(p.nope) + token * p.nope_stride_token * itemsize;
  const uint8_t* rope = static_cast<const uint8_t*>(p.rope) + token * p.rope_stride_token * itemsize;
  const int given = p.rope != nullptr ? C::kDim : kL.nope_dim;  // without a rope, rope is zero
  Words<4> x[C::kPasses], more[C::kPasses];                     // more: the second four of eight floats
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    const uint8_t* src =
        element < kL.nope_dim ? nope + element * itemsize : rope + (element - kL.nope_dim) * itemsize;
    x[pass] = load_if<4>(src, element < given);
    if constexpr (!kIsBf16) more[pass] = load_if<4>(src + 16, element < given && is_float);
  }

  const CacheRow to = find_row(p, args.page_size, slot);
  if (!to.valid) return;
  if (mate != slot + 1 && mate != slot - 1) prefetch_partial_sectors<kId>(to, p.page_size);

  if constexpr (!kIsBf16) {
#pragma unroll
    for (int pass = 0; pass < C::kPasses; ++pass) x[pass] = to_bf16x8(is_float, x[pass], more[pass]);
  }
  write_row<kId>(to, p.page_size, layer_scale, p.fp8_max, x);
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
