// k_norm_rope_insert and qk_norm_rope_insert on CUDA, one launch. The first warps take a latent each
// (insert_latent.cuh). Each other warp takes heads of a token if heads are normed, else chunks of eight
// elements a lane, wherever in the heads they lie. HBM-bound: q read and written, latents, rows.

#include "ops/norm_rope_insert.h"

#include "cuda/device/launch.cuh"
#include "cuda/insert_latent.cuh"

namespace mla_fp8::gpu {

struct NormRopeInsertArgs {
  NormRopeInsertParams p;
  Divider page_size;
  HeadChunks heads;
  int64_t kv_blocks;  // the first blocks of the grid
};

inline constexpr int kInsertWarps = 8;
inline constexpr int kInsertBlock = kInsertWarps * kWarpSize;
inline constexpr int kInsertBlocksPerSm = kMaxThreadsPerSm / kInsertBlock / 2;  // 64 registers
inline constexpr int kHeadPasses = 4;                                           // chunks in flight of a lane
inline constexpr int kHeadsInFlight = 2;  // heads in flight of a warp that norms: as many chunks
inline constexpr int kMaxHeadSteps = 16;  // steps of a warp
static_assert(2 * kMaxRopeHalf <= kPassDim);

// Norms and rotates `count` heads of a token, kHeadsInFlight at once.
__device__ __forceinline__ void norm_heads(const NormRopeInsertParams& p, int64_t token, int64_t first,
                                           int count) {
  constexpr int kLast = kNormPasses - 1;  // the rotated dims lie in the last pass
  const int lane = threadIdx.x % kWarpSize;
  const int pair = (kLast * kPassDim + lane * kChunk - kHeadDimV + p.table.dim()) / 2;
  const uint16_t* src = p.q + token * p.q_stride_token + first * p.q_stride_head + lane * kChunk;
  uint16_t* dst = p.out_q + token * p.out_q_stride_token + first * p.out_q_stride_head + lane * kChunk;
  const int64_t left = p.num_q_heads - first;
  const int real = static_cast<int>(left < 0 ? 0 : left < count ? left : count);
  struct Heads {
    Words<4> x[kHeadsInFlight][kNormPasses];
  };
  const auto load = [&](int at) {
    Heads heads;
#pragma unroll
    for (int i = 0; i < kHeadsInFlight; ++i)
#pragma unroll
      for (int pass = 0; pass < kNormPasses; ++pass)
        heads.x[i][pass] = load_if<4>(src + (at + i) * p.q_stride_head + pass * kPassDim, at + i < real);
    return heads;
  };
  const auto prefetch = [&](int at) {
    if (lane < kHeadsInFlight && at + lane < real)
      prefetch_bytes(p.q + token * p.q_stride_token + (first + at + lane) * p.q_stride_head, kHeadDimV * 2);
  };
  wait_for_previous_grid();
  Heads now = load(0);
  const Position position = load_position(p.table, token);
  prefetch(kHeadsInFlight);
  HeldRotation held;
  if (position.valid) held.hold(p.table, position.at, pair);
  const int normed = position.valid ? real : 0;
#pragma unroll 1
  for (int at = 0; at < normed;) {
#pragma unroll
    for (int i = 0; i < kHeadsInFlight; ++i, dst += p.out_q_stride_head) {
      if (at + i >= normed) break;
      Words<4>(&x)[kNormPasses] = now.x[i];
      Floats8 v[kNormPasses];
#pragma unroll
      for (int pass = 0; pass < kNormPasses; ++pass) v[pass] = unpack8(x[pass]);
      const float factor = rms_factor(v, p.eps);
#pragma unroll
      for (int pass = 0; pass < kNormPasses; ++pass) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) v[pass].x[j] = __fmul_rn(v[pass].x[j], factor);
        x[pass] = pack8(v[pass]);
      }
      if (pair >= 0) x[kLast] = pack8(rotate8(unpack8(x[kLast]), held.rotation));
#pragma unroll
      for (int pass = 0; pass < kNormPasses; ++pass) store(dst + pass * kPassDim, x[pass], true);
    }
    at += kHeadsInFlight;
    if (at >= normed) break;
    prefetch(at + kHeadsInFlight);
    now = load(at);
  }
#pragma unroll 1
  for (int i = normed; i < count; ++i, dst += p.out_q_stride_head)
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) store(dst + pass * kPassDim, Words<4>{}, true);
}

// Rotates the chunks of heads of warp `part` of a token.
__device__ __forceinline__ void rotate_heads(const NormRopeInsertArgs& args, int64_t token, int part) {
  const NormRopeInsertParams& p = args.p;
  const HeadChunks& chunks = args.heads;
  const uint16_t* src = p.q + token * p.q_stride_token;
  uint16_t* dst = p.out_q + token * p.out_q_stride_token;
  HeadWalk walk(chunks, part);
  const auto is_real = [&](const HeadWalk& at) { return at.exists() && at.head < p.num_q_heads; };
  Words<4> x[kHeadPasses];
  const auto load = [&] {
    HeadWalk at = walk;
#pragma unroll
    for (int i = 0; i < kHeadPasses; ++i, at.step(chunks))
      x[i] = load_if<4>(src + at.head * p.q_stride_head + at.element(chunks), is_real(at));
  };
  wait_for_previous_grid();
  load();
  const Position position = load_position(p.table, token);
  HeldRotation held;
#pragma unroll 1
  for (int step = 0;;) {
#pragma unroll
    for (int i = 0; i < kHeadPasses; ++i, walk.step(chunks)) {
      if (!walk.exists()) continue;
      const int pair = walk.pair(chunks);
      if (!position.valid) {
        x[i] = Words<4>{};
      } else if (pair >= 0 && is_real(walk)) {
        held.hold(p.table, position.at, pair);
        x[i] = pack8(rotate8(unpack8(x[i]), held.rotation));
      }
      uint16_t* head = dst + walk.head * p.out_q_stride_head;
      store(head + walk.element(chunks), x[i], true);
      if (!position.valid)  // zeroes the head's dims before first_dim, too
        for (int d = walk.chunk * kChunk; d < chunks.first_dim; d += chunks.rope_dim)
          store(head + d, Words<4>{}, true);
    }
    step += kHeadPasses;
    if (step >= chunks.steps) break;
    load();
  }
}

// Each part waits for the previous grid only when it knows where to load from, which takes no memory access.
template <KvLayoutId kId>
__global__ void __launch_bounds__(kInsertBlock, kInsertBlocksPerSm)
    norm_rope_insert_kernel(const __grid_constant__ NormRopeInsertArgs args) {
  const NormRopeInsertParams& p = args.p;
  const int warp = threadIdx.x / kWarpSize;
  if (blockIdx.x < args.kv_blocks) {
    const int64_t token = int64_t{blockIdx.x} * kInsertWarps + warp;
    if (token < p.num_insert) insert_latent<kId, false>(p, args.page_size, token);
    return;
  }
  const int64_t unit = (blockIdx.x - args.kv_blocks) * kInsertWarps + warp;
  const int64_t token = args.heads.part(unit);
  const int part = static_cast<int>(unit - token * args.heads.parts);
  if (token >= p.num_tokens) return;
  if (p.norm_q) {
    const int heads = args.heads.steps / kNormPasses, first = part * heads;
    const int left = static_cast<int>(p.num_heads) - first;
    norm_heads(p, token, first, left < heads ? left : heads);
  } else {
    rotate_heads(args, token, part);
  }
}

void norm_rope_insert(const NormRopeInsertParams& p, gpuStream_t stream) {
  NormRopeInsertArgs args{p, Divider(p.page_size),
                          HeadChunks(p.num_tokens, p.num_heads, p.head_dim, p.first_dim(), p.table.dim(),
                                     kHeadPasses, kMaxHeadSteps),
                          ceil_div<int64_t>(p.num_insert, kInsertWarps)};
  const int64_t units = args.heads.num_chunks > 0 ? p.num_tokens * args.heads.parts : 0;
  const LaunchConfig config{.grid = args.kv_blocks + ceil_div<int64_t>(units, kInsertWarps),
                            .block = kInsertBlock,
                            .stream = stream};
  if (config.grid == 0) return;
  with_kv_layout(p.layout, [&](auto id) { launch(norm_rope_insert_kernel<id>, config, args); });
}

}  // namespace mla_fp8::gpu
