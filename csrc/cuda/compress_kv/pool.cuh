#pragma once
// What the kernels of compress_kv share: a softmax in a fixed order of float32 operations, the same on every
// device; where a row of a window lies; and the way from 512 pooled dims to a cache row.
#include "cuda/device/divide.cuh"
#include "cuda/device/math.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"
#include "ops/compress_kv.h"

namespace mla_fp8::gpu {

struct CompressKvArgs {
  CompressKvParams p;
  Divider page_size, depth;
  int64_t tokens;  // of a warp (ratios below 128) or of a block
};

// ---- arithmetic -------------------------------------------------------------------------------------------

// 2^x for x <= 0; 0 below -126, NaN stays NaN. As cpu/simd.h has it.
__device__ __forceinline__ float exp2_nonpositive(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it leaves round(x) in the low mantissa bits
  const float clamped = -127.0f > x ? -127.0f : x;
  const float shifted = __fadd_rn(clamped, kMagic), f = __fsub_rn(clamped, __fsub_rn(shifted, kMagic));
  float y = 1.540353039e-4f;
  y = fmaf(y, f, 1.333355814e-3f);
  y = fmaf(y, f, 9.618129107e-3f);
  y = fmaf(y, f, 5.550410866e-2f);
  y = fmaf(y, f, 2.402265070e-1f);
  y = fmaf(y, f, 6.931471806e-1f);
  y = fmaf(y, f, 1.0f);
  return x < -126.0f ? 0.0f : bits_float(float_bits(y) + (float_bits(shifted) << 23));
}

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// A softmax in parts: the largest score, the sum of the weights, the sum of weighted values.
struct Pooled {
  float top, sum, value;
};

// exp(score - top); a top of -inf stands for no weight at all.
__device__ __forceinline__ float weight_of(float score, float top) {
  return exp2_nonpositive(__fmul_rn(__fsub_rn(score, top == -INFINITY ? 0.0f : top), kLog2E));
}
__device__ __forceinline__ void add_row(Pooled& all, float kv, float score, bool first) {
  const float weight = weight_of(score, all.top);
  all.sum = first ? weight : __fadd_rn(all.sum, weight);
  all.value = first ? __fmul_rn(weight, kv) : fmaf(weight, kv, all.value);
}
__device__ __forceinline__ Pooled join(const Pooled& a, const Pooled& b) {
  const float top = larger(b.top, a.top), of_a = weight_of(a.top, top), of_b = weight_of(b.top, top);
  return {top, fmaf(b.sum, of_b, __fmul_rn(a.sum, of_a)), fmaf(b.value, of_b, __fmul_rn(a.value, of_a))};
}

// ---- rows -------------------------------------------------------------------------------------------------

struct Floats2 {
  float x[2];
};

__device__ __forceinline__ Floats2 load2(const float* p, bool wanted) {
  const Words<2> words = load_if<2>(p, wanted);
  return {{bits_float(words[0]), bits_float(words[1])}};
}

// Ratio 1: dims d and d + 1 of the token.
__device__ __forceinline__ Floats2 load_row(const CompressKvParams& p, int64_t token, int d) {
  const int64_t at = token * p.kv_score_stride_token + d;
  if (!p.is_bf16) return load2(static_cast<const float*>(p.kv_score) + at, true);
  const float2 pair =
      unpack<Dtype::kBf16>(*reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p.kv_score) + at));
  return {{pair.x, pair.y}};
}

__device__ __forceinline__ const float* input_row(const CompressKvParams& p, const CompressRequest& r,
                                                  int64_t position) {
  return static_cast<const float*>(p.kv_score) + (r.first + position - r.start) * p.kv_score_stride_token;
}
__device__ __forceinline__ float* state_row(const CompressKvArgs& args, const CompressRequest& r,
                                            int64_t position) {
  const int64_t row = position - args.depth(position) * args.depth.divisor();
  return args.p.state + r.state * args.p.state_stride_slot + row * args.p.state_stride_row;
}
// Of a position that is not negative: from the call, or from the state.
__device__ __forceinline__ const float* window_row(const CompressKvArgs& args, const CompressRequest& r,
                                                   int64_t position) {
  return position >= r.start ? input_row(args.p, r, position) : state_row(args, r, position);
}

// The token of this call that ends up in the state's row of position q; below `start` if there is none.
__device__ __forceinline__ int64_t late_position(const CompressKvArgs& args, const CompressRequest& r,
                                                 int64_t q) {
  return q + args.depth(r.end() - 1 - q) * args.depth.divisor();
}

// By `count` threads, of which this is number `thread`.
__device__ __forceinline__ void copy_to_state(const CompressKvArgs& args, const CompressRequest& r,
                                              int64_t position, int thread, int count) {
  const CompressKvParams& p = args.p;
  const float* from = input_row(p, r, position);
  float* to = state_row(args, r, position);
  constexpr int kInFlight = 4;
  for (int i = thread; i < p.width() / 4; i += kInFlight * count) {
    Words<4> words[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      words[k] = load_if<4>(from + 4 * (i + k * count), i + k * count < p.width() / 4);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * count < p.width() / 4) store(to + 4 * (i + k * count), words[k]);
  }
}

// The request of a token by all lanes of a warp, 32 candidates at a time; with a negative state if there is
// none.
__device__ __forceinline__ CompressRequest request_of(const CompressKvParams& p, int64_t token) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t target = token + p.query_start_loc[0];
  int64_t low = 0, high = p.num_requests;
  while (high - low > 1) {
    const int64_t step = ceil_div<int64_t>(high - low, kWarpSize), at = low + lane * step;
    const bool started = lane > 0 && at < high && p.query_start_loc[at] <= target;
    low += __popc(__ballot_sync(kFullWarp, started)) * step;
    high = low + step < high ? low + step : high;
  }
  CompressRequest r = compress_request(p, low);
  if (token < r.first || token >= r.first + r.count) r.state = -1;
  return r;
}

// ---- the end ----------------------------------------------------------------------------------------------

// From pooled dims, which a warp holds as rms_factor wants them, to the latent and the cache row of `token`,
// which closes a block at position `close`.
template <KvLayoutId kId>
__device__ __forceinline__ void finish_row(const CompressKvArgs& args, Floats8 (&x)[kNormPasses],
                                           int64_t token, int64_t close) {
  using C = LatentChunks<kId>;
  static_assert(C::kPasses == kNormPasses);
  const CompressKvParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  if (p.round_pooled) {
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) x[pass] = unpack8(pack8(x[pass]));
  }
  const float factor = rms_factor(x, p.eps);
  Words<4> row[kNormPasses];
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass) {
    const int element = C::element(pass, lane);
    const Floats8 weight = load_weights(p.norm_weight, p.weight_is_float, element);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[pass].x[i] = __fmul_rn(__fmul_rn(x[pass].x[i], factor), weight.x[i]);
    row[pass] = pack8(x[pass]);
    if (p.out_latent != nullptr) store(p.out_latent + token * p.out_latent_stride_token + element, row[pass]);
  }
  const CacheRow to = find_row(p, args.page_size, slot);
  const int64_t position = close + 1 - p.ratio;
  if (!to.valid || (p.table.half > 0 && position >= p.table.max_pos)) return;
  constexpr int kLast = kNormPasses - 1;  // what is rotated lies in it
  const int pair = (C::element(kLast, lane) - kHeadDimV + p.table.dim()) / 2;
  if (pair >= 0) {
    const Rotation rotation = load_rotation(p.table, position, pair);
    row[kLast] = pack8(rotate8(p.round_pooled ? unpack8(row[kLast]) : x[kLast], rotation));
  }
  const float layer_scale = C::kL.scale_format == ScaleFormat::kPerLayer ? *p.scale : 1.0f;
  write_row<kId>(to, p.page_size, layer_scale, format_max(C::kL.nope_format), row);
}

}  // namespace mla_fp8::gpu
