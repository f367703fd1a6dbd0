// k_norm_rope_insert and qk_norm_rope_insert on CUDA, one launch. The first warps take a latent each: norm,
// RoPE, then quantize_kv's row. The others take a query head each if heads are normed, else two chunks of
// eight elements per lane, wherever in the heads those lie. Traffic: q twice, latents, rows; HBM-bound.

#include "ops/norm_rope_insert.h"

#include "cuda/device/launch.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"

namespace mla_fp8::gpu {

struct NormRopeInsertArgs {
  NormRopeInsertParams p;
  Divider page_size;
  HeadChunks heads;
  int64_t kv_blocks;  // the first of the grid
};

inline constexpr int kInsertBlocksPerSm = kMaxThreadsPerSm / kLatentBlock * 9 / 16;  // 56 registers
inline constexpr int kHeadPasses = 2;  // chunks of a lane, in flight at once
static_assert(2 * kMaxRopeHalf <= kPassDim);

// The bf16 words of a latent's pass, normed and rotated.
template <KvLayoutId kId>
__device__ __forceinline__ void insert_latent(const NormRopeInsertArgs& args, int64_t token) {
  using C = LatentChunks<kId>;
  constexpr KvLayout kL = C::kL;
  const NormRopeInsertParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  const int64_t mate =
      load_index(p.slot_mapping, p.slots_are_int64, (token ^ 1) < p.num_insert ? token ^ 1 : token);
  const Position position = load_position(p.table, token);
  const bool is_alone = mate != slot + 1 && mate != slot - 1;
  Words<4> x[C::kPasses];
#pragma unroll
  for (int pass = 0; pass < C::kPasses; ++pass) {
    const int element = C::element(pass, lane);
    if (pass < kNormPasses) {
      x[pass] = load_if<4>(p.kv + token * p.kv_stride_token + element, true);
    } else {
      const bool wanted = element < C::kDim && p.k_rope != nullptr;
      x[pass] = load_if<4>(p.k_rope + token * p.k_rope_stride_token + (element - kHeadDimV), wanted);
    }
  }
  const CacheRow to = find_row(p, args.page_size, slot);
  if (!to.valid || !position.valid) return;
  if (is_alone) prefetch_partial_sectors<kId>(to, p.page_size);

  if (p.kv_weight != nullptr) {
    Floats8 v[kNormPasses];
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) v[pass] = unpack8(x[pass]);
    const float factor = rms_factor(v, p.eps);
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) {
      const Floats8 w = load_weights(p.kv_weight, p.weight_is_float, C::element(pass, lane));
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[pass].x[i] = __fmul_rn(__fmul_rn(v[pass].x[i], factor), w.x[i]);
      x[pass] = pack8(v[pass]);
    }
  }
  constexpr int kLast = C::kPasses - 1;  // what is rotated lies in it
  const int element = C::element(kLast, lane), pair = (element - C::kDim + p.table.dim()) / 2;
  if (element < C::kDim && element >= C::kDim - p.table.dim())
    x[kLast] = pack8(rotate8(unpack8(x[kLast]), load_rotation(p.table, position.at, pair)));
  const float layer_scale = kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  write_row<kId>(to, p.page_size, layer_scale, format_max(kL.nope_format), x);
}

// Norm and RoPE of one head.
__device__ __forceinline__ void norm_head(const NormRopeInsertParams& p, int64_t token, int64_t head) {
  const int lane = threadIdx.x % kWarpSize;
  const bool real = head < p.num_q_heads;
  const uint16_t* src = p.q + (real ? token * p.q_stride_token + head * p.q_stride_head : 0);
  uint16_t* dst = p.out_q + token * p.out_q_stride_token + head * p.out_q_stride_head;
  const Position position = load_position(p.table, token);
  Words<4> x[kNormPasses];
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass)
    x[pass] = load_if<4>(src + pass * kPassDim + lane * kChunk, real);
  if (real && position.valid) {
    Floats8 v[kNormPasses];
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) v[pass] = unpack8(x[pass]);
    const float factor = rms_factor(v, p.eps);
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) v[pass].x[i] = __fmul_rn(v[pass].x[i], factor);
      x[pass] = pack8(v[pass]);
    }
    constexpr int kLast = kNormPasses - 1;  // what is rotated lies in it
    const int element = kLast * kPassDim + lane * kChunk;
    const int pair = (element - kHeadDimV + p.table.dim()) / 2;
    if (pair >= 0) x[kLast] = pack8(rotate8(unpack8(x[kLast]), load_rotation(p.table, position.at, pair)));
  } else {
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) x[pass] = Words<4>{};
  }
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass) store(dst + pass * kPassDim + lane * kChunk, x[pass], true);
}

// RoPE of two chunks per lane, of any heads.
__device__ __forceinline__ void rotate_heads(const NormRopeInsertArgs& args, int64_t first) {
  const NormRopeInsertParams& p = args.p;
  HeadChunk chunk[kHeadPasses];
  Position position[kHeadPasses];
  Words<4> x[kHeadPasses];
#pragma unroll
  for (int pass = 0; pass < kHeadPasses; ++pass) {
    const int64_t index = first + pass * kWarpSize;
    const bool exists = index < args.heads.num_chunks;
    chunk[pass] = find_chunk(args.heads, exists ? index : 0);
    const HeadChunk& c = chunk[pass];
    const bool real = exists && c.head < p.num_q_heads;
    x[pass] = load_if<4>(p.q + (real ? c.token * p.q_stride_token + c.head * p.q_stride_head + c.element : 0),
                         real);
    position[pass] = load_position(p.table, c.token);
  }
#pragma unroll
  for (int pass = 0; pass < kHeadPasses; ++pass) {
    const HeadChunk& c = chunk[pass];
    if (!position[pass].valid) x[pass] = Words<4>{};
    else if (c.pair >= 0 && c.head < p.num_q_heads)
      x[pass] = pack8(rotate8(unpack8(x[pass]), load_rotation(p.table, position[pass].at, c.pair)));
    if (first + pass * kWarpSize >= args.heads.num_chunks) continue;
    uint16_t* dst = p.out_q + c.token * p.out_q_stride_token + c.head * p.out_q_stride_head;
    store(dst + c.element, x[pass], true);
    if (!position[pass].valid)  // the rest of a head of which only the end is worked on
      for (int64_t d = c.element - args.heads.first_dim; d < args.heads.first_dim; d += args.heads.rope_dim)
        store(dst + d, Words<4>{}, true);
  }
}

template <KvLayoutId kId>
__global__ void __launch_bounds__(kLatentBlock, kInsertBlocksPerSm)
    norm_rope_insert_kernel(const __grid_constant__ NormRopeInsertArgs args) {
  const NormRopeInsertParams& p = args.p;
  const int warp = threadIdx.x / kWarpSize;
  wait_for_previous_grid();
  if (blockIdx.x < args.kv_blocks) {
    const int64_t token = int64_t{blockIdx.x} * kLatentsPerBlock + warp;
    if (token < p.num_insert) insert_latent<kId>(args, token);
    return;
  }
  const int64_t unit = (blockIdx.x - args.kv_blocks) * kLatentsPerBlock + warp;
  if (p.norm_q) {
    const int64_t token = args.heads.num_heads(unit);
    if (token < p.num_tokens) norm_head(p, token, unit - token * p.num_heads);
  } else {
    rotate_heads(args, unit * (kHeadPasses * kWarpSize) + threadIdx.x % kWarpSize);
  }
}

void norm_rope_insert(const NormRopeInsertParams& p, gpuStream_t stream) {
  NormRopeInsertArgs args{p, Divider(p.page_size),
                          HeadChunks(p.num_tokens, p.num_heads, p.head_dim, p.first_dim(), p.table.dim()),
                          ceil_div<int64_t>(p.num_insert, kLatentsPerBlock)};
  const int64_t units = p.norm_q ? p.num_tokens * p.num_heads
                                 : ceil_div<int64_t>(args.heads.num_chunks, kHeadPasses * kWarpSize);
  const LaunchConfig config{.grid = args.kv_blocks + ceil_div<int64_t>(units, kLatentsPerBlock),
                            .block = kLatentBlock,
                            .stream = stream};
  if (config.grid == 0) return;
  with_kv_layout(p.layout, [&](auto id) { launch(norm_rope_insert_kernel<id>, config, args); });
}

}  // namespace mla_fp8::gpu
