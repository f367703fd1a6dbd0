// inverse_rope and inverse_rope_quantize on CUDA: a lane holds two chunks of eight elements, wherever in the
// heads those lie; the lanes of a tile agree on its scale. HBM-bound.

#include "ops/inverse_rope.h"

#include "cuda/device/launch.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"

namespace mla_fp8::gpu {

struct InverseRopeArgs {
  InverseRopeParams p;
  HeadChunks chunks;
};
struct InverseRopeQuantizeArgs {
  InverseRopeQuantizeParams p;
  HeadChunks chunks;
  Divider heads_per_group;
};

inline constexpr int kRopeBlock = 128;
inline constexpr int kRopePasses = 2;  // chunks of a lane, in flight at once
inline constexpr int kUnit = kRopePasses * kWarpSize;

// Two chunks per lane, rotated back, and where they lie.
struct RotatedChunks {
  HeadChunk at[kRopePasses];
  bool exists[kRopePasses], known[kRopePasses];  // known: the token's position
  Words<4> x[kRopePasses];
};

__device__ __forceinline__ RotatedChunks load_chunks(const AttendedHeads& h, const HeadChunks& chunks) {
  const int64_t warp = int64_t{blockIdx.x} * (kRopeBlock / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t first = warp * kUnit + threadIdx.x % kWarpSize;
  RotatedChunks r;
  int64_t position[kRopePasses];
#pragma unroll
  for (int pass = 0; pass < kRopePasses; ++pass) {
    r.exists[pass] = first + pass * kWarpSize < chunks.num_chunks;
    r.at[pass] = find_chunk(chunks, r.exists[pass] ? first + pass * kWarpSize : 0);
    const HeadChunk& c = r.at[pass];
    r.x[pass] =
        load_if<4>(h.o + c.token * h.o_stride_token + c.head * h.o_stride_head + c.element, r.exists[pass]);
    const Position of_token = load_position(h.table, c.token);
    position[pass] = of_token.at;
    r.known[pass] = of_token.valid;
  }
#pragma unroll
  for (int pass = 0; pass < kRopePasses; ++pass) {
    if (!r.known[pass]) r.x[pass] = Words<4>{};
    else if (r.at[pass].pair >= 0)
      r.x[pass] =
          pack8(rotate8<true>(unpack8(r.x[pass]), load_rotation(h.table, position[pass], r.at[pass].pair)));
  }
  return r;
}

__global__ void __launch_bounds__(kRopeBlock)
    inverse_rope_kernel(const __grid_constant__ InverseRopeArgs args) {
  const InverseRopeParams& p = args.p;
  wait_for_previous_grid();
  const RotatedChunks r = load_chunks(p.heads, args.chunks);
#pragma unroll
  for (int pass = 0; pass < kRopePasses; ++pass) {
    if (!r.exists[pass]) continue;
    const HeadChunk& c = r.at[pass];
    uint16_t* dst = p.out + c.token * p.out_stride_token + c.head * p.out_stride_head;
    store(dst + c.element, r.x[pass], true);
    if (!r.known[pass])  // the rest of a head of which only the end is worked on
      for (int64_t d = c.element - args.chunks.first_dim; d < args.chunks.first_dim;
           d += args.chunks.rope_dim)
        store(dst + d, Words<4>{}, true);
  }
}

template <int kTile, bool kPowerOfTwo>
__global__ void __launch_bounds__(kRopeBlock)
    inverse_rope_quantize_kernel(const __grid_constant__ InverseRopeQuantizeArgs args) {
  constexpr int kTileLanes = kTile / kChunk;
  constexpr Format kFormat = Format::kE4m3fn;
  const InverseRopeQuantizeParams& p = args.p;
  wait_for_previous_grid();
  if (blockIdx.x == 0) {  // rows that only pad the scales
    const int64_t tiles = p.heads_per_group() * p.heads.head_dim / kTile;
    const int64_t pad_rows = p.num_scale_rows - p.heads.num_tokens;
    for (int64_t i = threadIdx.x; i < pad_rows * p.num_groups * tiles; i += kRopeBlock) {
      const int64_t tile = i % tiles, group = i / tiles % p.num_groups;
      const int64_t row = p.heads.num_tokens + i / tiles / p.num_groups;
      p.out_scale[row * p.scale_stride_token + group * p.scale_stride_group + tile * p.scale_stride_tile] = 0;
    }
  }
  const RotatedChunks r = load_chunks(p.heads, args.chunks);
#pragma unroll
  for (int pass = 0; pass < kRopePasses; ++pass) {
    const float amax = bf16_to_float(lanes_max<kTileLanes>(finite_amax8(r.x[pass])));
    float scale;
    Words<2> codes;
    if constexpr (kPowerOfTwo) {
      const uint8_t exponent = tile_scale_exponent(amax, p.kAmaxFloor, 0.0f, format_max(kFormat));
      scale = ue8m0_to_float(exponent);
      codes = encode8<kFormat>(r.x[pass], ue8m0_reciprocal(exponent), format_max(kFormat),
                               [](float quotient) { return quotient; });
    } else {
      scale = (amax > p.kAmaxFloor ? amax : p.kAmaxFloor) / format_max(kFormat);
      const DivideByScale divide(scale, format_max(kFormat));
      codes = encode8<kFormat>(r.x[pass], divide.factor, divide.limit, divide);
    }
    if (!r.exists[pass]) continue;
    const HeadChunk& c = r.at[pass];
    const int64_t group = args.heads_per_group(c.head);
    const int64_t column = (c.head - group * args.heads_per_group.divisor()) * p.heads.head_dim + c.element;
    store(p.out + c.token * p.out_stride_token + group * p.out_stride_group + column, codes, true);
    if (threadIdx.x % kTileLanes == 0)
      p.out_scale[c.token * p.scale_stride_token + group * p.scale_stride_group +
                  column / kTile * p.scale_stride_tile] = scale;
  }
}

namespace {

LaunchConfig config_of(const HeadChunks& chunks, gpuStream_t stream) {
  const int64_t units = ceil_div<int64_t>(chunks.num_chunks, kUnit);
  return {.grid = ceil_div<int64_t>(units, kRopeBlock / kWarpSize), .block = kRopeBlock, .stream = stream};
}

}  // namespace

void inverse_rope(const InverseRopeParams& p, gpuStream_t stream) {
  const AttendedHeads& h = p.heads;
  const InverseRopeArgs args{p,
                             HeadChunks(h.num_tokens, h.num_heads, h.head_dim, p.first_dim(), h.table.dim())};
  if (args.chunks.num_chunks == 0) return;  // in place, and nothing is rotated
  launch(inverse_rope_kernel, config_of(args.chunks, stream), args);
}

void inverse_rope_quantize(const InverseRopeQuantizeParams& p, gpuStream_t stream) {
  const AttendedHeads& h = p.heads;
  const InverseRopeQuantizeArgs args{p, HeadChunks(h.num_tokens, h.num_heads, h.head_dim, 0, h.table.dim()),
                                     Divider(p.heads_per_group())};
  const auto kernel = p.tile == 32 ? (p.power_of_two ? inverse_rope_quantize_kernel<32, true>
                                                     : inverse_rope_quantize_kernel<32, false>)
                                   : (p.power_of_two ? inverse_rope_quantize_kernel<128, true>
                                                     : inverse_rope_quantize_kernel<128, false>);
  launch(kernel, config_of(args.chunks, stream), args);
}

}  // namespace mla_fp8::gpu
