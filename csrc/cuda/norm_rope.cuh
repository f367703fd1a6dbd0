#pragma once
// RMSNorm over the 512 elements that a warp holds, and RoPE of eight of them. The order of every rounding is
// that of layer_reference.py, so that CPU, CUDA and ROCm give the same bits: no contraction, and a correctly
// rounded 1 / sqrt.
#include "common/kv_layout.h"
#include "cuda/cache_row.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/warp.cuh"
#include "ops/rope_table.h"

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

// 1 / sqrt(mean of the squares + eps). x[pass] of a lane are elements pass * 256 + lane * 8 and the next
// seven. The squares of sixteen neighbours are added in order, then halves of the 32 sums: an odd lane goes
// on where the lane before it stopped, and the two passes are the first two halves.
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
  float total = __fadd_rn(sum[0], sum[1]);  // of odd lanes
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 1; offset /= 2)
    total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, offset));
  total = __shfl_sync(kFullWarp, total, lane | 1);
  return __frsqrt_rn(__fadd_rn(__fmul_rn(total, 1.0f / kHeadDimV), eps));
}

// The weights of eight elements from `element` on.
__device__ __forceinline__ Floats8 load_weights(const void* weight, bool is_float, int element) {
  if (!is_float)
    return unpack8(*reinterpret_cast<const Words<4>*>(static_cast<const uint16_t*>(weight) + element));
  Floats8 out;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto words =
        *reinterpret_cast<const Words<4>*>(static_cast<const float*>(weight) + element + 4 * half);
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[4 * half + i] = bits_float(words[i]);
  }
  return out;
}

// The token's position, and whether the table knows it.
struct Position {
  int64_t at;
  bool valid;
};
__device__ __forceinline__ Position load_position(const RopeTable& t, int64_t token) {
  if (t.half == 0) return {0, true};
  const int64_t at = load_index(t.positions, t.positions_are_int64, token);
  return {at, at >= 0 && at < t.max_pos};
}

// Of four pairs.
struct Rotation {
  float cos[kChunk / 2], sin[kChunk / 2];
};

// The rotation of pairs `pair` to `pair` + 3 at a position that the table knows.
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

// (a c - b s, a s + b c) of each pair: two rounded products, then a rounded sum. kBack: by the negated angle.
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

// Heads as one row of chunks after another: eight elements of a head each, from its first_dim on.
struct HeadChunks {
  int64_t num_chunks;  // of all heads of all tokens
  Divider per_head, num_heads;
  int64_t first_dim;
  int rope_dim;  // of the head's end

  HeadChunks(int64_t num_tokens, int64_t heads, int64_t head_dim, int64_t first, int rope)
      : num_chunks(num_tokens * heads * ((head_dim - first) / kChunk)),
        per_head((head_dim - first) / kChunk > 0 ? (head_dim - first) / kChunk : 1),
        num_heads(heads > 0 ? heads : 1),
        first_dim(first),
        rope_dim(rope) {}
};

struct HeadChunk {
  int64_t token, head, element;
  int pair;  // of the rotated part; negative: not rotated
};

__device__ __forceinline__ HeadChunk find_chunk(const HeadChunks& c, int64_t index) {
  const int64_t row = c.per_head(index), chunk = index - row * c.per_head.divisor();
  const int64_t token = c.num_heads(row);
  const int64_t behind = (c.per_head.divisor() - chunk) * kChunk;  // elements from here to the head's end
  return {token, row - token * c.num_heads.divisor(), c.first_dim + chunk * kChunk,
          behind <= c.rope_dim ? static_cast<int>(c.rope_dim - behind) / 2 : -1};
}

}  // namespace mla_fp8::gpu
