#pragma once
// Shared by the kernels of compress_kv: a softmax in a fixed order of float32 operations, the same on every
// device; whose a token is, and where a window's rows lie; the way from 512 pooled dims to a cache row.
#include "cuda/device/divide.cuh"
#include "cuda/device/math.cuh"
#include "cuda/norm_rope.cuh"
#include "cuda/write_row.cuh"
#include "ops/compress_kv.h"

namespace mla_fp8::gpu {

struct CompressKvArgs {
  CompressKvParams p;
  Divider page_size, depth;
  Divider share;   // tokens of a request, if all have equally many
  int64_t tokens;  // tokens of a block of threads, or of a cluster

  CompressKvArgs(const CompressKvParams& params, int64_t tokens_of_block)
      : p(params),
        page_size(params.page_size),
        depth(params.depth > 0 ? params.depth : 1),
        share(ceil_div(params.num_tokens, params.num_requests)),
        tokens(tokens_of_block) {}
};

// ---- arithmetic -------------------------------------------------------------------------------------------

// 2^x for x <= 0; 0 below -126, and NaN stays NaN. The bits are those of cpu/simd.h, without its choice at
// the end, which would become a branch. Below -126.5 the power of two is 0; from there to -126 the product is
// subnormal and is flushed. The power is a factor: a sum of bits would lose the NaN of a GPU.
__device__ __forceinline__ float exp2_nonpositive(float x) {
  constexpr float kMagic = 0x1.8p23f;  // adding it leaves round(x) in the low mantissa bits
#if MLA_FP8_PTX
  float clamped;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(clamped) : "f"(x), "f"(-127.0f));
#else
  const float clamped = x < -126.0f ? -127.0f : x;
#endif
  const float shifted = __fadd_rn(clamped, kMagic), f = __fsub_rn(clamped, __fsub_rn(shifted, kMagic));
  float y = 1.540353039e-4f;
  y = fmaf(y, f, 1.333355814e-3f);
  y = fmaf(y, f, 9.618129107e-3f);
  y = fmaf(y, f, 5.550410866e-2f);
  y = fmaf(y, f, 2.402265070e-1f);
  y = fmaf(y, f, 6.931471806e-1f);
  y = fmaf(y, f, 1.0f);
  const float power = bits_float((float_bits(shifted) << 23) + 0x3f800000u);
#if MLA_FP8_PTX
  float out;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(out) : "f"(y), "f"(power));
  return out;
#else
  return __fmul_rn(y, power);
#endif
}

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// A part of a softmax: the largest score, the sum of weights, the sum of weighted values.
struct Pooled {
  float top, sum, value;
};

// exp(score - top). A top of -inf means that there is no weight at all.
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

// a / b by the compiler's steps for numbers that are not extreme, without its branch for others.
struct Reciprocal {
  float b, r;
  __device__ __forceinline__ explicit Reciprocal(float divisor) : b(divisor) {
#if MLA_FP8_PTX
    float approximate;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(approximate) : "f"(b));
    r = fmaf(approximate, fmaf(-b, approximate, 1.0f), approximate);
#endif
  }
  __device__ __forceinline__ float of(float a) const {
#if MLA_FP8_PTX
    const float q = __fmul_rn(a, r);
    return fmaf(fmaf(-b, q, a), r, q);
#else
    return __fdiv_rn(a, b);
#endif
  }
};
inline constexpr float kPlainSum = 0x1p20f, kLeastPlain = 0x1p-60f, kMostPlain = 0x1p100f;

// Four dims of all of a window's rows, or of some.
inline constexpr int kPoolDims = 4;
template <int kRows>
struct PoolRows {
  Words<kPoolDims> kv[kRows], score[kRows];

  // Pools one of the four dims; without a first half, the second half of the rows alone.
  __device__ __forceinline__ Pooled pool(int dim, bool has_first_half) const {
    Pooled all{};
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float x = bits_float(score[j][dim]);
      all.top = j == 0 || (j == kRows / 2 && !has_first_half) ? x : larger(x, all.top);
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j)
      add_row(all, bits_float(kv[j][dim]), bits_float(score[j][dim]),
              j == 0 || (j == kRows / 2 && !has_first_half));
    return all;
  }
  // Pools two rows. The weight of the larger score is 1, or NaN where the softmax is, so one exp2 is left.
  __device__ __forceinline__ Pooled pool_pair(int dim) const {
    static_assert(kRows == 2);
    const float first = bits_float(score[0][dim]), second = bits_float(score[1][dim]);
    const bool is_later = second > first;
    const float top = is_later ? second : first, one = fmaf(top, 0.0f, 1.0f);
    const float lesser = exp2_nonpositive(__fmul_rn(-fabsf(__fsub_rn(first, second)), kLog2E));
    const float of_first = is_later ? lesser : one, of_second = is_later ? one : lesser;
    return {top, __fadd_rn(of_first, of_second),
            fmaf(of_second, bits_float(kv[1][dim]), __fmul_rn(of_first, bits_float(kv[0][dim])))};
  }
  // The four pooled dims. Sums are between 1 and kRows, or no numbers.
  __device__ __forceinline__ Words<kPoolDims> pool_dims(bool has_first_half) const {
    Pooled all[kPoolDims];
    float least = 1.0f, most = 1.0f;  // of the dividends
#pragma unroll
    for (int i = 0; i < kPoolDims; ++i) {
      if constexpr (kRows == 2) all[i] = pool_pair(i);
      else all[i] = pool(i, has_first_half);
      least = fminf(least, fabsf(all[i].value));
      most = fmaxf(most, fabsf(all[i].value));
    }
    Words<kPoolDims> out;
    if ((least >= kLeastPlain) & (most <= kMostPlain)) {
#pragma unroll
      for (int i = 0; i < kPoolDims; ++i) out[i] = float_bits(Reciprocal(all[i].sum).of(all[i].value));
    } else {
#pragma unroll
      for (int i = 0; i < kPoolDims; ++i) out[i] = float_bits(__fdiv_rn(all[i].value, all[i].sum));
    }
    return out;
  }
  __device__ __forceinline__ void add_bias(int j, const float* bias) {
    const auto words = *reinterpret_cast<const Words<kPoolDims>*>(bias);
#pragma unroll
    for (int i = 0; i < kPoolDims; ++i)
      score[j][i] = float_bits(__fadd_rn(bits_float(score[j][i]), bits_float(words[i])));
  }
};

// ---- tokens -----------------------------------------------------------------------------------------------

// The request of a token, with a negative state if there is none: where it would be if all requests had as
// many tokens, or by a search.
template <class Args>
__device__ __forceinline__ CompressRequest request_of(const Args& args, int64_t token,
                                                      bool has_state = true) {
  const auto& p = args.p;
  const auto holds = [&](const CompressRequest& r) { return token >= r.first && token < r.first + r.count; };
  const int64_t guess = args.share(token);
  CompressRequest r = compress_request(p, guess < p.num_requests ? guess : p.num_requests - 1, has_state);
  if (!holds(r)) {
    const int64_t found = find_request(p.query_start_loc, p.num_requests, token);
    r = compress_request(p, found < 0 ? 0 : found, has_state);
    if (!holds(r)) r.state = -1;
  }
  return r;
}

struct TokenRange {
  int64_t begin;
  int count;
};
// The tokens of block of threads, or cluster, number `index`.
__device__ __forceinline__ TokenRange token_range(const CompressKvArgs& args, int64_t index) {
  const int64_t begin = index * args.tokens, left = args.p.num_tokens - begin;
  return {begin, static_cast<int>(left < args.tokens ? left : args.tokens)};
}

__device__ __forceinline__ int64_t remainder(int64_t n, const Divider& d) { return n - d(n) * d.divisor(); }

// ---- rows -------------------------------------------------------------------------------------------------

__device__ __forceinline__ const float* input_row(const CompressKvParams& p, const CompressRequest& r,
                                                  int64_t position) {
  return static_cast<const float*>(p.kv_score) + (r.first + position - r.start) * p.kv_score_stride_token;
}
__device__ __forceinline__ float* state_row(const CompressKvArgs& args, const CompressRequest& r,
                                            int64_t position) {
  return args.p.state + r.state * args.p.state_stride_slot +
         remainder(position, args.depth) * args.p.state_stride_row;
}

// Where kRows rows lie from position `first` on: in the call or in the state. If `first` is negative, rows
// before the sequence have addresses that must not be read.
template <int kRows>
struct RowAddresses {
  const float* row[kRows];

  __device__ __forceinline__ RowAddresses(const CompressKvArgs& args, const CompressRequest& r,
                                          int64_t first) {
    const CompressKvParams& p = args.p;
    const float* input = input_row(p, r, first);
    if (first >= r.start) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) row[j] = input + j * p.kv_score_stride_token;
      return;
    }
    const float* state = p.state + r.state * p.state_stride_slot;
    int64_t at = first < 0 ? first + p.depth : remainder(first, args.depth);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      row[j] = first + j >= r.start ? input + j * p.kv_score_stride_token : state + at * p.state_stride_row;
      at = at + 1 < p.depth ? at + 1 : 0;
    }
  }
};

// Prefetches a whole row of the input or of the state.
__device__ __forceinline__ void prefetch_row(const CompressKvParams& p, const float* row) {
  prefetch_bytes(row, p.width() * static_cast<int>(sizeof(float)));
}

// Whether the call leaves a token's row in the state: at once, or once the row that it replaces was read.
enum class Keep { kNot, kNow, kLate };
__device__ __forceinline__ Keep keep_of(const CompressKvArgs& args, const CompressRequest& r,
                                        int64_t position, int64_t oldest) {
  if (!r.is_kept(position, args.p.depth)) return Keep::kNot;
  return r.is_late(remainder(position - oldest, args.depth), oldest) ? Keep::kLate : Keep::kNow;
}
// The position whose row the token at position q copies to the state at once, or -1. The last rows of a
// request go there. Tokens 2^n apart copy one each, so that the rows of a long request are in different
// blocks of threads. One block would take as long for all of them as for its own tokens.
__device__ __forceinline__ int64_t kept_position(const CompressKvArgs& args, const CompressRequest& r,
                                                 int64_t q, int64_t oldest) {
  const int64_t depth = args.p.depth, behind = r.end() - 1 - q;
  int n = 0;
  if (args.tokens > 1 && r.count > depth) {
    n = __clzll(depth - 1) - 1 - __clzll(r.count);  // depth << n is at most the count
    n = n < 0 ? 0 : n;
  }
  const int64_t row = behind >> n, kept = r.end() - 1 - row;
  return behind == row << n && keep_of(args, r, kept, oldest) == Keep::kNow ? kept : -1;
}
// The token of this call that ends up in the state's row of position q; below `start` if there is none.
__device__ __forceinline__ int64_t late_position(const CompressKvArgs& args, const CompressRequest& r,
                                                 int64_t q) {
  return q + args.depth(r.end() - 1 - q) * args.depth.divisor();
}

struct RowCopy {
  const float* from;
  float* to;
};
// Copies vectors `thread`, `thread` + threads, ... of `count`, kInFlight loads at a time. copy(i) has a null
// `from` if vector i is not copied.
template <int kInFlight, class Copy>
__device__ __forceinline__ void copy_vectors(int count, int thread, int threads, const Copy& copy) {
  for (int first = thread; first < count; first += kInFlight * threads) {
    Words<4> words[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = first + k * threads;
      const float* from = i < count ? copy(i).from : nullptr;
      words[k] = load_if<4>(from, from != nullptr);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int i = first + k * threads;
      if (i >= count) continue;
      if (const RowCopy c = copy(i); c.from != nullptr) store(c.to, words[k]);
    }
  }
}

// ---- the end ----------------------------------------------------------------------------------------------

// A block of tokens that the call closes: the token that closes it, its position, and its cache row's slot.
struct Closing {
  int64_t token, position, slot;
};

// Calls fn(constant<id>{}) for a layout with 512 dims. Kernels are compiled once, as this is inside them.
template <int kId = 0, class Fn>
__device__ __forceinline__ void with_latent_layout(KvLayoutId id, const Fn& fn) {
  if constexpr (kId < kNumKvLayouts) {
    constexpr auto kThis = static_cast<KvLayoutId>(kId);
    if constexpr (kv_layout(kThis).head_dim_qk() == kHeadDimV) {
      if (id == kThis) return fn(constant<kThis>{});
    }
    with_latent_layout<kId + 1>(id, fn);
  }
}

// A warp turns pooled dims into the latent and the cache row. It loads ahead what that needs: weights at
// once, and the rotation as soon as the row is known.
struct RowFinish {
  Weights8 weight[kNormPasses];
  float layer_scale = 1.0f;
  Rotation rotation{};
  CacheRow to{};
  bool is_stored = false, is_rotated = false;

  static __device__ __forceinline__ int first_element() { return threadIdx.x % kWarpSize * kChunk; }
  __device__ __forceinline__ void load_weights(const CompressKvParams& p) {
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass)
      weight[pass] = {p.norm_weight, p.weight_is_float, pass * kPassDim + first_element()};
    if (p.scale != nullptr) layer_scale = *p.scale;
  }
  __device__ __forceinline__ void find(const CompressKvArgs& args, const Closing& closing) {
    const CompressKvParams& p = args.p;
    const int64_t position = closing.position + 1 - p.ratio;
    to = find_row(p, args.page_size, closing.slot);
    is_stored = to.valid && (p.table.half == 0 || position < p.table.max_pos);
    const int pair = (kRotatedPass * kPassDim + first_element() - kHeadDimV + p.table.dim()) / 2;
    is_rotated = is_stored && pair >= 0;
    if (is_rotated) rotation = load_rotation(p.table, position, pair);
  }
  // get(pass) returns a lane's eight dims of a pass.
  template <class Get>
  __device__ __forceinline__ void finish(const CompressKvParams& p, const Closing& closing,
                                         const Get& get) const {
    Floats8 x[kNormPasses];
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) {
      x[pass] = get(pass);
      if (p.round_pooled) x[pass] = unpack8(pack8(x[pass]));
    }
    const float factor = rms_factor(x, p.eps);
    Words<4> row[kNormPasses];
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass) {
      const Floats8 w = weight[pass].unpack(p.weight_is_float);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[pass].x[i] = __fmul_rn(__fmul_rn(x[pass].x[i], factor), w.x[i]);
      row[pass] = pack8(x[pass]);
      if (p.out_latent != nullptr)
        store(p.out_latent + closing.token * p.out_latent_stride_token + pass * kPassDim + first_element(),
              row[pass]);
    }
    if (is_rotated) {
      const Floats8 before = p.round_pooled ? unpack8(row[kRotatedPass]) : x[kRotatedPass];
      row[kRotatedPass] = pack8(rotate8(before, rotation));
    }
    if (!is_stored) return;
    with_latent_layout(p.layout, [&](auto id) {
      static_assert(LatentChunks<id()>::kPasses == kNormPasses);
      write_row<id()>(to, p.page_size, layer_scale, format_max(kv_layout(id()).nope_format), row);
    });
  }

 private:
  static constexpr int kRotatedPass = kNormPasses - 1;
};

// A lane's pooled dims in shared memory.
struct PooledRow {
  const float* dims;
  __device__ __forceinline__ Floats8 operator()(int pass) const {
    Floats8 out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out.x[i] = dims[pass * kPassDim + RowFinish::first_element() + i];
    return out;
  }
};

__device__ __forceinline__ void finish_row(const CompressKvArgs& args, const Closing& closing,
                                           const float* dims) {
  RowFinish row;
  row.load_weights(args.p);
  row.find(args, closing);
  row.finish(args.p, closing, PooledRow{dims});
}

}  // namespace mla_fp8::gpu
