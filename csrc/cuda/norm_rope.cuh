#pragma once
// RMSNorm of the 512 elements that a warp holds, and RoPE of eight of them. Roundings are in the order of
// layer_reference.py, so CPU, CUDA and ROCm give equal bits: no contraction, a correctly rounded 1 / sqrt.
#include "common/kv_layout.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/warp.cuh"
#include "ops/rope_table.h"
#if MLA_FP8_PTX
#include "cuda/device/copy.cuh"
#endif

namespace mla_fp8::gpu {

inline constexpr int kNormPasses = kHeadDimV / kPassDim;
static_assert(kNormPasses == 2 && kHeadDimV % kPassDim == 0);

struct Floats8 {
  float x[kChunk];
};

__device__ __forceinline__ Floats8 unpack8(const Words<4>& words) {
  Floats8 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Dtype::kBf16>(words[i]);
    out.x[2 * i] = pair.x;
    out.x[2 * i + 1] = pair.y;
  }
  return out;
}
__device__ __forceinline__ Words<4> pack8(const Floats8& v) {
  Words<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = pack<Dtype::kBf16>({v.x[2 * i], v.x[2 * i + 1]});
  return out;
}

// 1 / sqrt(mean of squares + eps). x[pass] of a lane are elements pass * 256 + lane * 8 and the next seven.
// The squares of sixteen neighbours are added in order: an odd lane goes on where the lane before it stopped.
// Then halves of the 32 sums are added, the first two halves being the two passes.
__device__ __forceinline__ float rms_factor(const Floats8 (&x)[kNormPasses], float eps) {
  const int lane = threadIdx.x % kWarpSize;
  float sum[kNormPasses];
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass) {
    float partial = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) partial = fmaf(x[pass].x[i], x[pass].x[i], partial);
    sum[pass] = __shfl_up_sync(kFullWarp, partial, 1);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[pass] = fmaf(x[pass].x[i], x[pass].x[i], sum[pass]);
  }
  float total = __fadd_rn(sum[0], sum[1]);  // means something in odd lanes
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 1; offset /= 2)
    total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, offset));
  total = __shfl_sync(kFullWarp, total, lane | 1);
  return __frsqrt_rn(__fadd_rn(__fmul_rn(total, 1.0f / kHeadDimV), eps));
}

// Eight weights from `element` on, as they lie in memory: eight floats or eight bf16. No instruction waits
// for them before they are used.
struct Weights8 {
  Words<4> words[2];

  Weights8() = default;
  __device__ __forceinline__ Weights8(const void* weight, bool is_float, int element) : words{} {
    const auto* from = static_cast<const uint8_t*>(weight) + element * (is_float ? 4 : 2);
    words[0] = *reinterpret_cast<const Words<4>*>(from);
    if (is_float) words[1] = *reinterpret_cast<const Words<4>*>(from + 16);
  }
  __device__ __forceinline__ Floats8 unpack(bool is_float) const {
    if (!is_float) return unpack8(words[0]);
    Floats8 out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out.x[i] = bits_float(words[i / 4][i % 4]);
    return out;
  }
};

// Prefetches bytes to the L2 while the warp works, without a register. Address and size: multiples of 16.
__device__ __forceinline__ void prefetch_bytes([[maybe_unused]] const void* from,
                                               [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  bulk_prefetch_l2(from, bytes);
#endif
}

// A token's position, and whether the table has it.
struct Position {
  int64_t at;
  bool valid;
};
__device__ __forceinline__ Position load_position(const RopeTable& t, int64_t token) {
  if (t.half == 0) return {0, true};
  const int64_t at = load_index(t.positions, t.positions_are_int64, token);
  return {at, at >= 0 && at < t.max_pos};
}

// Cosines and sines of four pairs.
struct Rotation {
  float cos[kChunk / 2], sin[kChunk / 2];
};

// The rotation of pairs `pair` to `pair` + 3, at a position that the table has.
__device__ __forceinline__ Rotation load_rotation(const RopeTable& t, int64_t position, int pair) {
  const float* cos = t.cos + position * t.cos_stride_pos + pair * t.cos_stride_pair;
  const float* sin = t.sin + position * t.sin_stride_pos + pair * t.sin_stride_pair;
  Rotation r;
  if (t.vector) {
    const auto c = *reinterpret_cast<const Words<4>*>(cos), s = *reinterpret_cast<const Words<4>*>(sin);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      r.cos[i] = bits_float(c[i]);
      r.sin[i] = bits_float(s[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      r.cos[i] = cos[i * t.cos_stride_pair];
      r.sin[i] = sin[i * t.sin_stride_pair];
    }
  }
  return r;
}

// Rotates pairs: (a c - b s, a s + b c), two rounded products and a rounded sum. kBack: by the negated angle.
template <bool kBack = false>
__device__ __forceinline__ Floats8 rotate8(const Floats8& v, const Rotation& r) {
  Floats8 out;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const float a = v.x[2 * i], b = v.x[2 * i + 1], c = r.cos[i], s = kBack ? -r.sin[i] : r.sin[i];
    out.x[2 * i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
    out.x[2 * i + 1] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
  }
  return out;
}

// A token's heads, or a group of them, as one row of chunks of eight elements; each head counts from its
// first_dim on. A warp takes up to `steps` times 32 chunks. The ops check that a row's chunks fit an int.
struct HeadChunks {
  int num_chunks;  // chunks of the row
  int parts;       // warps of the row
  int steps;
  int per_head;                 // chunks of a head
  int step_heads, step_chunks;  // heads and chunks between a chunk and the 32nd behind it
  int first_dim;
  int rope_dim;  // dims at a head's end that are rotated
  Divider part, head;

  // Takes as many steps as leave all warps of a GPU something to do.
  HeadChunks(int64_t num_rows, int64_t heads, int64_t head_dim, int64_t first, int rope, int min_steps,
             int max_steps)
      : num_chunks(static_cast<int>(heads * ((head_dim - first) / kChunk))),
        parts(1),
        steps(min_steps),
        per_head(static_cast<int>((head_dim - first) / kChunk)),
        step_heads(per_head > 0 ? kWarpSize / per_head : 0),
        step_chunks(per_head > 0 ? kWarpSize % per_head : 0),
        first_dim(static_cast<int>(first)),
        rope_dim(rope),
        part(1),
        head(per_head > 0 ? per_head : 1) {
    constexpr int64_t kWarps = 8192;  // about what an H200 runs at once
    const int all = ceil_div(num_chunks, kWarpSize);
    while (steps < max_steps && num_rows * all > kWarps * steps) steps *= 2;
    parts = all > 0 ? ceil_div(all, steps) : 1;
    part = Divider(parts);
  }
};

// The chunk at which a lane of the row's warp `number` is.
struct HeadWalk {
  int index, end, head, chunk;

  __device__ __forceinline__ HeadWalk(const HeadChunks& c, int number) {
    const int first = number * c.steps * kWarpSize, left = c.num_chunks - first;
    index = first + static_cast<int>(threadIdx.x % kWarpSize);
    end = first + (left < c.steps * kWarpSize ? left : c.steps * kWarpSize);
    head = static_cast<int>(c.head(index));
    chunk = index - head * c.per_head;
  }
  __device__ __forceinline__ void step(const HeadChunks& c) {
    index += kWarpSize;
    head += c.step_heads;
    chunk += c.step_chunks;
    if (chunk >= c.per_head) {
      chunk -= c.per_head;
      ++head;
    }
  }
  __device__ __forceinline__ bool exists() const { return index < end; }
  __device__ __forceinline__ int element(const HeadChunks& c) const { return c.first_dim + chunk * kChunk; }
  // The pair, of the rotated ones, that the chunk begins with; negative: it is not rotated.
  __device__ __forceinline__ int pair(const HeadChunks& c) const {
    const int behind = (c.per_head - chunk) * kChunk;  // elements from here to the head's end
    return behind <= c.rope_dim ? (c.rope_dim - behind) / 2 : -1;
  }
};

// The rotation that a lane has loaded. It mostly rotates the same pairs of every head with it.
struct HeldRotation {
  Rotation rotation;
  int pair = -1;

  __device__ __forceinline__ void hold(const RopeTable& t, int64_t position, int wanted) {
    if (wanted < 0 || wanted == pair) return;
    pair = wanted;
    rotation = load_rotation(t, position, wanted);
  }
};

}  // namespace mla_fp8::gpu
