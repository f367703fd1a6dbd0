// inverse_rope and inverse_rope_quantize on CUDA. A warp walks along the heads of a token, a chunk of eight
// elements a lane, four in flight. For e4m3 the lanes of a tile agree on its scale. A block has eight tokens,
// as scales of neighbouring tokens lie beside each other. HBM-bound.

#include "ops/inverse_rope.h"

#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"

namespace mla_fp8::gpu {

struct InverseRopeArgs {
  InverseRopeParams p;
  HeadChunks chunks;  // chunks of a token
};
struct InverseRopeQuantizeArgs {
  InverseRopeQuantizeParams p;
  HeadChunks chunks;  // chunks of a token's group of heads
  Divider groups;
};

inline constexpr int kRopeBlock = 256;
inline constexpr int kRopeWarps = kRopeBlock / kWarpSize;
inline constexpr int kInFlight = 4;   // chunks in flight of a lane
inline constexpr int kTogether = 2;   // chunks that are rotated and written together
inline constexpr int kMaxSteps = 16;  // steps of a warp
inline constexpr int kWholeHead = kHeadDimV / kChunk;

// Rotates a lane's chunks back and calls work(x, at, position, step) with two of them at a time: numbers
// `step` and `step` + 1, which lie at `at`. A chunk that does not exist is in no place. The first chunks are
// in flight while the token's position and rotation are read.
template <class Work>
__device__ __forceinline__ void walk_heads(const AttendedHeads& h, const HeadChunks& chunks, int64_t token,
                                           int64_t first_head, int part, const Work& work) {
  const uint16_t* row = h.o + token * h.o_stride_token + first_head * h.o_stride_head;
  HeadWalk walk(chunks, part);
  Words<4> x[kInFlight];
  const auto load = [&](bool wanted) {
    HeadWalk at = walk;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, at.step(chunks))
      x[i] = load_if<4>(row + at.head * h.o_stride_head + at.element(chunks), wanted && at.exists());
  };
  const auto prefetch = [&](int step) {  // prefetches the next chunks, if heads are whole
    const int first = (part * chunks.steps + step + kInFlight) * kWarpSize / kWholeHead;
    const int lane = threadIdx.x % kWarpSize, head = first + lane;
    if (lane < kInFlight * kWarpSize / kWholeHead && chunks.per_head == kWholeHead &&
        step + kInFlight < chunks.steps && head * kWholeHead < chunks.num_chunks)
      prefetch_bytes(row + head * h.o_stride_head, kWholeHead * kChunk * 2);
  };
  prefetch(0);
  load(true);
  const Position position = load_position(h.table, token);
  if (!position.valid) {
#pragma unroll
    for (Words<4>& chunk : x) chunk = {};
  }
  HeldRotation held;
#pragma unroll 1
  for (int step = 0;;) {
#pragma unroll
    for (int i = 0; i < kInFlight; i += kTogether) {
      Words<4> now[kTogether];
      HeadWalk at[kTogether] = {walk, walk};
#pragma unroll
      for (int k = 0; k < kTogether; ++k, walk.step(chunks)) {
        now[k] = x[i + k];
        at[k] = walk;
        const int pair = walk.pair(chunks);
        if (pair < 0 || !position.valid) continue;
        held.hold(h.table, position.at, pair);
        now[k] = pack8(rotate8<true>(unpack8(now[k]), held.rotation));
      }
      work(now, at, position, step + i);
    }
    step += kInFlight;
    if (step >= chunks.steps) break;
    prefetch(step);
    load(position.valid);
  }
}

__global__ void __launch_bounds__(kRopeBlock, 4)
    inverse_rope_kernel(const __grid_constant__ InverseRopeArgs args) {
  const InverseRopeParams& p = args.p;
  const HeadChunks& chunks = args.chunks;
  wait_for_previous_grid();
  const int64_t warp = int64_t{blockIdx.x} * kRopeWarps + threadIdx.x / kWarpSize;
  const int64_t token = chunks.part(warp);
  if (token >= p.heads.num_tokens) return;
  uint16_t* row = p.out + token * p.out_stride_token;
  const auto write = [&](const Words<4>(&x)[kTogether], const HeadWalk(&at)[kTogether],
                         const Position& position, int) {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (!at[k].exists()) continue;
      uint16_t* head = row + at[k].head * p.out_stride_head;
      store(head + at[k].element(chunks), x[k], true);
      if (!position.valid)  // zeroes the head's dims before first_dim, too
        for (int d = at[k].chunk * kChunk; d < chunks.first_dim; d += chunks.rope_dim)
          store(head + d, Words<4>{}, true);
    }
  };
  walk_heads(p.heads, chunks, token, 0, static_cast<int>(warp - token * chunks.parts), write);
}

// The scales of a block's tokens, which are written as columns.
struct ScaleShared {
  float scale[kMaxSteps * kPassDim / 32][kRopeWarps];
};

template <int kTile, bool kPowerOfTwo>
__global__ void __launch_bounds__(kRopeBlock, 4)
    inverse_rope_quantize_kernel(const __grid_constant__ InverseRopeQuantizeArgs args) {
  constexpr int kTileLanes = kTile / kChunk, kStepTiles = kWarpSize / kTileLanes;
  constexpr Format kFormat = Format::kE4m3fn;
  const InverseRopeQuantizeParams& p = args.p;
  const HeadChunks& chunks = args.chunks;
  MLA_SHARED(ScaleShared, shared);
  wait_for_previous_grid();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t row = chunks.part(blockIdx.x);
  const int part = static_cast<int>(blockIdx.x - row * chunks.parts);
  const int64_t tokens = args.groups(row), group = row - tokens * p.num_groups;
  const int64_t first_token = tokens * kRopeWarps, token = first_token + warp;
  uint8_t* out = p.out + token * p.out_stride_token + group * p.out_stride_group;
  const auto write = [&](const Words<4>(&x)[kTogether], const HeadWalk(&at)[kTogether], const Position&,
                         int step) {
    constexpr float kMax = format_max(kFormat);
    // The floor's power of two is that of its bf16, cut off.
    uint32_t amax = finite_amax8x2(x[0], x[1], kPowerOfTwo ? both_bf16(p.kAmaxFloor) : 0);
#pragma unroll
    for (int offset = 1; offset < kTileLanes; offset *= 2)
      amax = larger_bf16x2(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    const uint32_t scales = kPowerOfTwo ? tile_scales_bf16x2(amax, kMax) : amax;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      float scale = bits_float(k == 0 ? scales << 16 : scales & 0xffff0000u);
      Words<2> codes;
      if constexpr (kPowerOfTwo) {
        codes = encode8<kFormat>(x[k], reciprocal(scale));
      } else {
        scale = (scale > p.kAmaxFloor ? scale : p.kAmaxFloor) / kMax;
        const DivideByScale divide(scale, kMax);
        codes = encode8<kFormat>(x[k], divide.factor, divide.limit, divide);
      }
      if (!at[k].exists()) continue;
      store(out + int64_t{at[k].index} * kChunk, codes, true);
      if (lane % kTileLanes == 0) shared.scale[(step + k) * kStepTiles + lane / kTileLanes][warp] = scale;
    }
  };
  if (token < p.heads.num_tokens)
    walk_heads(p.heads, chunks, token, group * p.heads_per_group(), part, write);
  __syncthreads();
  // Rows behind the last token are padding of the scales.
  const int first_tile = part * chunks.steps * kStepTiles, num_tiles = chunks.num_chunks / kTileLanes;
  for (int i = threadIdx.x; i < chunks.steps * kStepTiles * kRopeWarps; i += kRopeBlock) {
    const int64_t scale_row = first_token + i % kRopeWarps;
    const int tile = first_tile + i / kRopeWarps;
    if (scale_row >= p.num_scale_rows || tile >= num_tiles) continue;
    p.out_scale[scale_row * p.scale_stride_token + group * p.scale_stride_group +
                tile * p.scale_stride_tile] =
        scale_row < p.heads.num_tokens ? shared.scale[i / kRopeWarps][i % kRopeWarps] : 0.0f;
  }
}

void inverse_rope(const InverseRopeParams& p, gpuStream_t stream) {
  const AttendedHeads& h = p.heads;
  const InverseRopeArgs args{p, HeadChunks(h.num_tokens, h.num_heads, h.head_dim, p.first_dim(),
                                           h.table.dim(), kInFlight, kMaxSteps)};
  if (args.chunks.num_chunks == 0) return;  // in place, and nothing is rotated
  const LaunchConfig config{.grid = ceil_div<int64_t>(h.num_tokens * args.chunks.parts, kRopeWarps),
                            .block = kRopeBlock,
                            .stream = stream};
  launch(inverse_rope_kernel, config, args);
}

void inverse_rope_quantize(const InverseRopeQuantizeParams& p, gpuStream_t stream) {
  const AttendedHeads& h = p.heads;
  const InverseRopeQuantizeArgs args{p,
                                     HeadChunks(h.num_tokens * p.num_groups, p.heads_per_group(), h.head_dim,
                                                0, h.table.dim(), kInFlight, kMaxSteps),
                                     Divider(p.num_groups)};
  const int64_t rows = ceil_div<int64_t>(p.num_scale_rows, kRopeWarps) * p.num_groups;
  const LaunchConfig config{.grid = rows * args.chunks.parts, .block = kRopeBlock, .stream = stream};
  const auto kernel = p.tile == 32 ? (p.power_of_two ? inverse_rope_quantize_kernel<32, true>
                                                     : inverse_rope_quantize_kernel<32, false>)
                                   : (p.power_of_two ? inverse_rope_quantize_kernel<128, true>
                                                     : inverse_rope_quantize_kernel<128, false>);
  launch(kernel, config, args);
}

}  // namespace mla_fp8::gpu
