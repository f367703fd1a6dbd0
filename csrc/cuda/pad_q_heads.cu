// pad_q_heads on CUDA: one warp a head of the output copies or zeroes it. HBM-bound.

#include "ops/pad_q_heads.h"

#include <cmath>
#include <cstdint>

#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

struct PadQHeadsArgs {
  PadQHeadsParams p;
  Divider num_heads;
};

namespace {

constexpr int kHeadsPerBlock = 4;
constexpr int kBlock = kHeadsPerBlock * kWarpSize;
constexpr int kVecDim = 8;  // elements in 16 bytes
constexpr int kPasses = 3;  // in flight at once: up to 768 elements

__device__ __forceinline__ void write_sinks(const PadQHeadsParams& p) {
  for (int64_t h = threadIdx.x; h < p.num_heads; h += kBlock)
    p.out_attn_sink[h] = p.attn_sink && h < p.num_q_heads ? p.attn_sink[h] : -INFINITY;
}

}  // namespace

// kVector: each head of input and output is 16-byte aligned and a multiple of 16 bytes.
template <bool kVector>
__global__ void __launch_bounds__(kBlock) pad_q_heads_kernel(const __grid_constant__ PadQHeadsArgs args) {
  const PadQHeadsParams& p = args.p;
  wait_for_previous_grid();
  if (blockIdx.x == 0) write_sinks(p);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kHeadsPerBlock + threadIdx.x / kWarpSize;
  const int64_t token = args.num_heads(row), head = row - token * p.num_heads;
  if (token >= p.num_tokens) return;

  const bool real = head < p.num_q_heads;
  const uint16_t* src = p.q + (real ? token * p.q_stride_token + head * p.q_stride_head : 0);
  uint16_t* dst = p.out_q + row * p.head_dim;
  if constexpr (kVector) {
    for (int64_t first = lane * kVecDim; first < p.head_dim; first += kPasses * kWarpSize * kVecDim) {
      Words<4> w[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int64_t element = first + pass * kWarpSize * kVecDim;
        w[pass] = load_if<4>(src + element, real && element < p.head_dim);
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int64_t element = first + pass * kWarpSize * kVecDim;
        if (element < p.head_dim) store(dst + element, w[pass]);
      }
    }
  } else {
    for (int64_t d = lane; d < p.head_dim; d += kWarpSize) dst[d] = real ? src[d] : uint16_t{0};
  }
}

void pad_q_heads(const PadQHeadsParams& p, gpuStream_t stream) {
  const bool vector = reinterpret_cast<uintptr_t>(p.q) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(p.out_q) % 16 == 0 && p.q_stride_token % kVecDim == 0 &&
                      p.q_stride_head % kVecDim == 0 && p.head_dim % kVecDim == 0;
  PadQHeadsArgs args{p, Divider(p.num_heads)};
  if (p.head_dim == 0)
    args.p.num_tokens = 0;  // heads have no memory, and there may be any number: only sinks are written
  const int64_t num_rows = args.p.num_tokens * p.num_heads;
  const LaunchConfig config{.grid = num_rows > 0 ? ceil_div<int64_t>(num_rows, kHeadsPerBlock) : 1,
                            .block = kBlock,
                            .stream = stream};
  launch(vector ? pad_q_heads_kernel<true> : pad_q_heads_kernel<false>, config, args);
}

}  // namespace mla_fp8::gpu
