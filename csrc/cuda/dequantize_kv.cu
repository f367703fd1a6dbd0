// dequantize_kv on CUDA: one warp gathers a token of the cache and writes it as bf16. HBM-bound:
// bytes_per_token read, 2 * head_dim_qk bytes written. docs/notebook/kernels/cache_ops.md has the
// measurements behind the shape.

#include "ops/dequantize_kv.h"

#include "common/fp8.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

// Outputs of this many bytes or more do not stay in the L2 until the next kernel reads them.
inline constexpr int64_t kStreamingBytes = int64_t{64} << 20;

template <class Params>
struct DequantizeKvArgs {
  Params p;
  Divider page_size;
  bool streaming;

  explicit DequantizeKvArgs(const Params& params)
      : p(params),
        page_size(params.page_size),
        streaming(params.num_rows * kv_layout(params.layout).head_dim_qk() * 2 >= kStreamingBytes) {}
};

namespace {

constexpr int64_t kSlotsAhead = 16384;  // slots are prefetched to the L2 for a later block

// The stored scales that a lane needs: all of a token's, or, with kOwnScales, those of its own tiles.
template <KvLayoutId kId>
struct Scales {
  using C = LatentChunks<kId>;
  Words<C::kOwnScales ? C::kPasses : C::kScaleWords> words;

  __device__ __forceinline__ void load(const uint8_t* record, int lane, bool wanted) {
    if constexpr (C::kOwnScales) {
#pragma unroll
      for (int pass = 0; pass < C::kPasses; ++pass)
        words[pass] = wanted ? record[pass * C::kPassTiles + lane / C::kTileLanes] : 0;
    } else {
      words = load_if<C::kScaleWords>(record, wanted);
    }
  }

  // The scale of the lane's tile in `pass`.
  __device__ __forceinline__ float of_tile(int pass, int lane) const {
    if constexpr (C::kOwnScales) {
      static_assert(C::kL.scale_format == ScaleFormat::kE4m3);
      return unpack_e4m3<Format::kE4m3fn>(words[pass]).x;
    } else {
      constexpr int kPerWord = 4 / C::kL.scale_itemsize(), kPassWords = C::kPassTiles / kPerWord;
      static_assert(C::kPassTiles % kPerWord == 0);  // a pass begins with a word
      const int first = pass * kPassWords, tile = lane / C::kTileLanes;
      uint32_t word = words[first];
#pragma unroll
      for (int i = 1; i < kPassWords; ++i)
        if (tile >= i * kPerWord) word = words[first + i];
      if constexpr (C::kL.scale_format == ScaleFormat::kUe8m0)
        return ue8m0_to_float(static_cast<uint8_t>(word >> (8 * (tile % 4))));
      else return bits_float(word);
    }
  }
};

template <KvLayoutId kId>
__device__ __forceinline__ void dequantize_row(const CacheRow& from, int64_t page_size, const float* scale,
                                               uint16_t* dst, bool streaming) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  const int lane = threadIdx.x % kWarpSize;
  const uint8_t* src = from.page + kL.token_offset(from.row);

  Words<C::kLeadWords> lead[C::kPasses];
  Words<4> rope[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    if (C::element(pass, 0) < C::kLeadDim)
      lead[pass] = load_if<C::kLeadWords>(src + C::lead_offset(element), from.valid && element < C::kLeadDim);
    if (C::element(pass + 1, 0) > C::kLeadDim && !C::kUniform)
      rope[pass] = load_if<4>(src + C::rope_offset(element),
                              from.valid && element >= C::kLeadDim && element < C::kDim);
  }
  Scales<kId> scales;
  float layer_scale = 0.0f;
  if constexpr (C::kHasTiles) {
    scales.load(from.page + kL.scale_offset(from.row, page_size), lane, from.valid);
  } else if constexpr (kL.scale_format == ScaleFormat::kPerLayer) {
    if (from.valid) layer_scale = *scale;
  }

#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    Words<4> out = rope[pass];
    if (C::element(pass, 0) < C::kLeadDim && element < C::kLeadDim) {
      float s = layer_scale;
      if constexpr (C::kHasTiles) s = scales.of_tile(pass, lane);
      out = decode8<kL.nope_format>(lead[pass], s);
    }
    if (element < C::kDim) store(dst + element, out, streaming);
  }
}

}  // namespace

template <KvLayoutId kId>
__global__ void __launch_bounds__(kLatentBlock)
    dequantize_kv_kernel(const __grid_constant__ DequantizeKvArgs<DequantizeKvParams> args) {
  const DequantizeKvParams& p = args.p;
  const int64_t i = int64_t{blockIdx.x} * kLatentsPerBlock + threadIdx.x / kWarpSize;
  if (i >= p.num_rows) return;
  wait_for_previous_grid();
  const int64_t slot = load_index(p.slots, p.slots_are_int64, i);
  if (threadIdx.x == 0 && i + kSlotsAhead < p.num_rows)
    prefetch_l2(static_cast<const uint8_t*>(p.slots) + (i + kSlotsAhead) * (p.slots_are_int64 ? 8 : 4));
  dequantize_row<kId>(find_row(p, args.page_size, slot), p.page_size, p.scale, p.out + i * p.out_stride_row,
                      args.streaming);
}

namespace {

// The request to which an output row belongs: the last one if several claim it, -1 if none does. Offsets come
// in any order, so all requests are looked at, 32 at a time.
__device__ __forceinline__ int64_t find_request(const DequantizeKvPagedParams& p, int64_t row) {
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t first = (p.num_requests - 1) / kWarpSize * kWarpSize; first >= 0; first -= kWarpSize) {
    const int64_t r = first + lane;
    bool owns = false;
    if (r < p.num_requests) {
      const int64_t j = row - p.row_offsets[r];
      owns = j >= 0 && j < p.gather_lens[r];
    }
    const uint32_t owners = __ballot_sync(kFullWarp, owns);
    if (owners) return first + (kWarpSize - 1 - __clz(owners));
  }
  return -1;
}

}  // namespace

template <KvLayoutId kId>
__global__ void __launch_bounds__(kLatentBlock)
    dequantize_kv_paged_kernel(const __grid_constant__ DequantizeKvArgs<DequantizeKvPagedParams> args) {
  const DequantizeKvPagedParams& p = args.p;
  const int64_t i = int64_t{blockIdx.x} * kLatentsPerBlock + threadIdx.x / kWarpSize;
  if (i >= p.num_rows) return;
  wait_for_previous_grid();
  const int64_t r = find_request(p, i);
  if (r < 0) return;

  const int64_t pos = int64_t{p.seq_lens[r]} - p.gather_lens[r] + (i - p.row_offsets[r]);
  const int64_t page_index = args.page_size(pos >= 0 ? pos : 0);
  int64_t slot = -1;
  if (pos >= 0 && page_index < p.max_pages) {
    const int64_t page = p.page_table[r * p.page_table_stride_request + page_index];
    if (page >= 0) slot = page * p.page_size + (pos - page_index * p.page_size);
  }
  dequantize_row<kId>(find_row(p, args.page_size, slot), p.page_size, p.scale, p.out + i * p.out_stride_row,
                      args.streaming);
}

namespace {

int64_t num_blocks(int64_t num_rows) { return ceil_div<int64_t>(num_rows, kLatentsPerBlock); }

}  // namespace

void dequantize_kv(const DequantizeKvParams& p, gpuStream_t stream) {
  with_kv_layout(p.layout, [&](auto id) {
    launch(dequantize_kv_kernel<id>,
           {.grid = num_blocks(p.num_rows), .block = kLatentBlock, .stream = stream}, DequantizeKvArgs(p));
  });
}

void dequantize_kv_paged(const DequantizeKvPagedParams& p, gpuStream_t stream) {
  with_kv_layout(p.layout, [&](auto id) {
    launch(dequantize_kv_paged_kernel<id>,
           {.grid = num_blocks(p.num_rows), .block = kLatentBlock, .stream = stream}, DequantizeKvArgs(p));
  });
}

}  // namespace mla_fp8::gpu
