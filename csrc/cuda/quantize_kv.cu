// quantize_kv on CUDA: one warp per token finds the scale of each tile, encodes, and writes the cache row.
// Traffic per token: reads head_dim_qk elements, writes bytes_per_token. HBM-bound; docs/cache_ops.md has the
// measurements behind the shape.

#include "ops/quantize_kv.h"

#include "common/fp8.h"
#include "cuda/convert.cuh"
#include "cuda/latent.cuh"
#include "cuda/launch.cuh"
#include "cuda/vec.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {
namespace {

struct Args {
  QuantizeKvParams p;
  Divider page_size;
};

constexpr int kSectorBytes = 32;  // the unit in which DRAM is written

// Sectors that this token fills only in part have to come from DRAM: ask for them while the latent is on its way.
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
      record[tile] = float_bits(ue8m0_to_float(static_cast<uint8_t>(e)));
    }
  }
  return record;
}

// A full multiprocessor where 32 registers are enough.
template <Dtype kDtype>
inline constexpr int kBlocksPerSm = kMaxThreadsPerSm / kLatentBlock * (kDtype == Dtype::kBf16 ? 4 : 3) / 4;

template <KvLayoutId kId, Dtype kDtype>
__global__ void __launch_bounds__(kLatentBlock, kBlocksPerSm<kDtype>)
    quantize_kv_kernel(const __grid_constant__ Args args) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  constexpr int kSourceItemsize = kDtype == Dtype::kF32 ? 4 : 2;
  const QuantizeKvParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = int64_t{blockIdx.x} * kLatentsPerBlock + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();

  // Slot and latent are read at the same time.
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  const int64_t mate =
      load_index(p.slot_mapping, p.slots_are_int64, (token ^ 1) < p.num_tokens ? token ^ 1 : token);
  const uint8_t* nope = static_cast<const uint8_t*>(p.nope) + token * p.nope_stride_token * kSourceItemsize;
  const uint8_t* rope = static_cast<const uint8_t*>(p.rope) + token * p.rope_stride_token * kSourceItemsize;
  Words<4> x[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    const uint8_t* src = element < kL.nope_dim ? nope + element * kSourceItemsize
                                               : rope + (element - kL.nope_dim) * kSourceItemsize;
    x[pass] = load_bf16x8<kDtype>(src, element < C::kDim);
  }

  const CacheRow to = find_row(p, args.page_size, slot);
  if (!to.valid) return;
  if (mate != slot + 1 && mate != slot - 1) prefetch_partial_sectors<kId>(to, p.page_size);
  uint8_t* page = const_cast<uint8_t*>(to.page);
  uint8_t* dst = page + kL.token_offset(to.row);

  Words<C::kLeadWords> codes[C::kPasses];
  uint8_t exponents[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    if (C::element(pass, 0) >= C::kLeadDim) continue;
    if constexpr (C::kHasTiles) {
      const float amax = bf16_to_float(lanes_max<C::kTileLanes>(finite_amax8(x[pass])));
      exponents[pass] = tile_scale_exponent(amax, kL.amax_floor, kL.scale_floor, p.fp8_max);
      const float inverse = ue8m0_reciprocal(exponents[pass]);
      codes[pass] = encode8<kL.nope_format>(x[pass], p.fp8_max, [&](float value) { return value * inverse; });
    } else {
      const float scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
      codes[pass] = encode8<kL.nope_format>(x[pass], p.fp8_max, [&](float value) { return value / scale; });
    }
  }

#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    if (C::element(pass, 0) < C::kLeadDim && element < C::kLeadDim)
      store(dst + C::lead_offset(element), codes[pass], true);
    else if (element < C::kDim) store(dst + C::rope_offset(element), x[pass], true);
  }
  if constexpr (C::kHasTiles) {
    const auto record = scale_record<kId>(exponents);
    if (lane == 0) store(page + kL.scale_offset(to.row, p.page_size), record);
  }
}

}  // namespace

void quantize_kv(const QuantizeKvParams& p, gpuStream_t stream) {
  const int64_t num_blocks = ceil_div<int64_t>(p.num_tokens, kLatentsPerBlock);
  with_kv_layout(p.layout, [&](auto id) {
    with_dtype(p.dtype, [&](auto dtype) {
      launch(quantize_kv_kernel<id, dtype>, {.grid = num_blocks, .block = kLatentBlock, .stream = stream},
             Args{p, Divider(p.page_size)});
    });
  });
}

}  // namespace mla_fp8::gpu
