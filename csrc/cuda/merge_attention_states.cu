// merge_attention_states on CUDA: one warp per head. Reads two heads, writes one; HBM-bound.

#include "ops/merge_attention_states.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/convert.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

struct MergeAttentionStatesArgs {
  MergeAttentionStatesParams p;
  Divider num_heads;
};

namespace {

constexpr int kHeadsPerBlock = 4;
constexpr int kBlock = kHeadsPerBlock * kWarpSize;
constexpr int kPasses = 2;  // in flight at once

// What each side counts for. A side that attended to nothing (lse -inf) is not even read, the other one is
// copied.
struct Weights {
  bool reads_a, reads_b;
  float a, b, lse;
};

__device__ __forceinline__ Weights weights(float lse_a, float lse_b) {
  const bool reads_a = lse_a != -INFINITY, reads_b = lse_b != -INFINITY;
  if (!reads_a || !reads_b) return {reads_a, reads_b, 1.0f, 1.0f, reads_a ? lse_a : lse_b};
  const float largest = fmaxf(lse_a, lse_b);  // taken out first, so nothing overflows
  const float a = expf(lse_a - largest), b = expf(lse_b - largest), sum = a + b;
  return {true, true, a / sum, b / sum, largest + logf(sum)};
}

// One word: a float or a pair of 16-bit floats. The words of a side that is not read are 0.
template <Dtype kDtype>
__device__ __forceinline__ uint32_t merge_word(uint32_t a, uint32_t b, const Weights& w) {
  if (!w.reads_a || !w.reads_b) return a | b;
  if constexpr (kDtype == Dtype::kF32) {
    return float_bits(bits_float(a) * w.a + bits_float(b) * w.b);
  } else {
    const float2 x = unpack<kDtype>(a), y = unpack<kDtype>(b);
    return pack<kDtype>({x.x * w.a + y.x * w.b, x.y * w.a + y.y * w.b});
  }
}

}  // namespace

// kVector: every head is 16-byte aligned and a multiple of 16 bytes.
template <Dtype kDtype, bool kVector>
__global__ void __launch_bounds__(kBlock)
    merge_attention_states_kernel(const __grid_constant__ MergeAttentionStatesArgs args) {
  using T = std::conditional_t<kDtype == Dtype::kF32, uint32_t, uint16_t>;
  constexpr int kVecDim = 16 / sizeof(T), kPassDim = kVecDim * kWarpSize;
  const MergeAttentionStatesParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kHeadsPerBlock + threadIdx.x / kWarpSize;
  const int64_t token = args.num_heads(row), head = row - token * p.num_heads;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();

  const T* a = static_cast<const T*>(p.out_a) + token * p.out_a_stride_token + head * p.out_a_stride_head;
  const T* b = static_cast<const T*>(p.out_b) + token * p.out_b_stride_token + head * p.out_b_stride_head;
  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const Weights w = weights(p.lse_a[row], p.lse_b[row]);
  if (lane == 0) p.lse[row] = w.lse;

  if constexpr (kVector) {
    for (int64_t first = lane * kVecDim; first < p.head_dim; first += kPasses * kPassDim) {
      Words<4> x[kPasses], y[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int64_t element = first + pass * kPassDim;
        x[pass] = load_if<4>(a + element, w.reads_a && element < p.head_dim);
        y[pass] = load_if<4>(b + element, w.reads_b && element < p.head_dim);
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int64_t element = first + pass * kPassDim;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[pass][i] = merge_word<kDtype>(x[pass][i], y[pass][i], w);
        if (element < p.head_dim) store(out + element, x[pass]);
      }
    }
  } else {
    for (int64_t d = lane; d < p.head_dim; d += kWarpSize)
      out[d] = static_cast<T>(merge_word<kDtype>(w.reads_a ? a[d] : 0, w.reads_b ? b[d] : 0, w));
  }
}

namespace {

bool is_aligned(const void* data, int64_t stride_token, int64_t stride_head, int64_t itemsize) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_token * itemsize % 16 == 0 &&
         stride_head * itemsize % 16 == 0;
}

}  // namespace

void merge_attention_states(const MergeAttentionStatesParams& p, gpuStream_t stream) {
  const int64_t itemsize = p.dtype == Dtype::kF32 ? 4 : 2;
  const bool vector = is_aligned(p.out_a, p.out_a_stride_token, p.out_a_stride_head, itemsize) &&
                      is_aligned(p.out_b, p.out_b_stride_token, p.out_b_stride_head, itemsize) &&
                      is_aligned(p.out, p.out_stride_token, p.out_stride_head, itemsize) &&
                      p.head_dim * itemsize % 16 == 0;
  const LaunchConfig config{.grid = ceil_div<int64_t>(p.num_tokens * p.num_heads, kHeadsPerBlock),
                            .block = kBlock,
                            .stream = stream};
  with_dtype(p.dtype, [&](auto dtype) {
    launch(vector ? merge_attention_states_kernel<dtype, true> : merge_attention_states_kernel<dtype, false>,
           config, MergeAttentionStatesArgs{p, Divider(p.num_heads)});
  });
}

}  // namespace mla_fp8::gpu
