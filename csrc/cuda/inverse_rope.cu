// inverse_rope and inverse_rope_quantize on CUDA: a warp walks along the heads of a token, a chunk of eight
// elements per lane, four in flight. For e4m3 the lanes of a tile agree on its scale; a block of threads has
// eight tokens, as scales of neighbouring tokens lie beside each other. HBM-bound.

#include "ops/inverse_rope.h"

#include "cuda/device/launch.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"

namespace mla_fp8::gpu {

struct InverseRopeArgs {
  InverseRopeParams p;
  HeadChunks chunks;  // of a token
};
struct InverseRopeQuantizeArgs {
  InverseRopeQuantizeParams p;
  HeadChunks chunks;  // of a token's group
  Divider groups;
};

inline constexpr int kRopeBlock = 256;
inline constexpr int kRopeWarps = kRopeBlock / kWarpSize;
inline constexpr int kInFlight = 4;   // chunks of a lane
inline constexpr int kMaxSteps = 16;  // of a warp
inline constexpr int kWholeHead = kHeadDimV / kChunk;

// Calls work(x, walk, position, step) with each chunk of a lane, rotated back: number `step`, where `walk`
// is; nothing is there if it does not exist. The first are on their way while the token's position and
// rotation are read.
template <class Work>
__device__ __forceinline__ void walk_heads(const AttendedHeads& h, const HeadChunks& chunks, int64_t token,
                                           int64_t first_head, int part, const Work& work) {
  const uint16_t* row = h.o + token * h.o_stride_token + first_head * h.o_stride_head;
  HeadWalk walk(chunks, part);
  Words<4> x[kInFlight];
  const auto load = [&] {
    HeadWalk at = walk;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, at.step(chunks))
      x[i] = load_if<4>(row + at.head * h.o_stride_head + at.element(chunks), at.exists());
  };
  const auto prefetch = [&](int step) {  // the next chunks, where they are whole heads
    const int first = (part * chunks.steps + step + kInFlight) * kWarpSize / kWholeHead;
    const int lane = threadIdx.x % kWarpSize, head = first + lane;
    if (lane < kInFlight * kWarpSize / kWholeHead && chunks.per_head == kWholeHead &&
        step + kInFlight < chunks.steps && head * kWholeHead < chunks.num_chunks)
      prefetch_bytes(row + head * h.o_stride_head, kWholeHead * kChunk * 2);
  };
  prefetch(0);
  load();
  const Position position = load_position(h.table, token);
  HeldRotation held;
#pragma unroll 1
  for (int step = 0;;) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, walk.step(chunks)) {
      const int pair = walk.pair(chunks);
      if (!position.valid) {
        x[i] = Words<4>{};
      } else if (pair >= 0) {
        held.hold(h.table, position.at, pair);
        x[i] = pack8(rotate8<true>(unpack8(x[i]), held.rotation));
      }
      work(x[i], walk, position, step + i);
    }
    step += kInFlight;
    if (step >= chunks.steps) break;
    prefetch(step);
    load();
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
  const auto write = [&](const Words<4>& x, const HeadWalk& at, const Position& position, int) {
    if (!at.exists()) return;
    uint16_t* head = row + at.head * p.out_stride_head;
    store(head + at.element(chunks), x, true);
    if (!position.valid)  // the rest of a head of which only the end is worked on
      for (int d = at.chunk * kChunk; d < chunks.first_dim; d += chunks.rope_dim)
        store(head + d, Words<4>{}, true);
  };
  walk_heads(p.heads, chunks, token, 0, static_cast<int>(warp - token * chunks.parts), write);
}

// The scales of a block of threads, on their way from tokens to columns.
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
  const auto write = [&](const Words<4>& x, const HeadWalk& at, const Position&, int step) {
    const float amax = bf16_to_float(lanes_max<kTileLanes>(finite_amax8(x)));
    float scale;
    Words<2> codes;
    if constexpr (kPowerOfTwo) {
      const uint8_t exponent = tile_scale_exponent(amax, p.kAmaxFloor, 0.0f, format_max(kFormat));
      scale = ue8m0_to_float(exponent);
      codes = encode8<kFormat>(x, ue8m0_reciprocal(exponent), format_max(kFormat),
                               [](float quotient) { return quotient; });
    } else {
      scale = (amax > p.kAmaxFloor ? amax : p.kAmaxFloor) / format_max(kFormat);
      const DivideByScale divide(scale, format_max(kFormat));
      codes = encode8<kFormat>(x, divide.factor, divide.limit, divide);
    }
    if (!at.exists()) return;
    store(out + int64_t{at.index} * kChunk, codes, true);
    if (lane % kTileLanes == 0) shared.scale[step * kStepTiles + lane / kTileLanes][warp] = scale;
  };
  if (token < p.heads.num_tokens)
    walk_heads(p.heads, chunks, token, group * p.heads_per_group(), part, write);
  __syncthreads();
  // Rows behind the last token only pad the scales.
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
