// merge_partial_states and merge_attention_states on CUDA: one warp a head. HBM-bound: it reads a head of
// each state and writes one.

#include "ops/merge_partial_states.h"

#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/merge_states.cuh"

namespace mla_fp8::gpu {

struct MergePartialStatesArgs {
  MergePartialStatesParams p;
  Divider num_heads;
};

namespace {

constexpr int kHeadsPerBlock = 4;
constexpr int kBlock = kHeadsPerBlock * kWarpSize;

template <Dtype kDtype>
struct StatesOfHead {
  static constexpr int kAtOnce = 2;
  const MergePartialStatesParams& p;
  int64_t token, head;
  int count;
  float attn_sink, log_base;

  __device__ __forceinline__ float lse(int i) const { return p.counted_lse_of(i, token, head); }
  __device__ __forceinline__ const void* row(int i) const {
    const MergePartialStatesParams::Part& part = i > 0 ? p.others : p.first;
    return static_cast<const MergeStorage<kDtype>*>(part.out) + p.out_offset(part, i, token, head);
  }
};

}  // namespace

template <Dtype kDtype, bool kVector>
__global__ void __launch_bounds__(kBlock)
    merge_partial_states_kernel(const __grid_constant__ MergePartialStatesArgs args) {
  const MergePartialStatesParams& p = args.p;
  const int64_t row = int64_t{blockIdx.x} * kHeadsPerBlock + threadIdx.x / kWarpSize;
  const int64_t token = args.num_heads(row), head = row - token * p.num_heads;
  if (token >= p.num_tokens) return;
  wait_for_previous_grid();
  const StatesOfHead<kDtype> states{
      p,         token, head, static_cast<int>(p.num_states), p.attn_sink ? p.attn_sink[head] : -INFINITY,
      p.log_base};
  auto* out =
      static_cast<MergeStorage<kDtype>*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const float lse = merge_head<kDtype, kVector>(states, p.head_dim, out);
  if (threadIdx.x % kWarpSize == 0) p.lse[row] = lse;
}

namespace {

template <class... Strides>
bool is_aligned(int64_t itemsize, const void* data, Strides... strides) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && ((strides * itemsize % 16 == 0) && ...);
}

}  // namespace

void merge_partial_states(const MergePartialStatesParams& p, gpuStream_t stream) {
  const int64_t itemsize = p.dtype == Dtype::kF32 ? 4 : 2;
  const auto aligned = [&](const MergePartialStatesParams::Part& part, int64_t stride_state) {
    return is_aligned(itemsize, part.out, part.out_stride_token, part.out_stride_head, stride_state);
  };
  const bool vector = aligned(p.first, 0) && (p.num_states == 1 || aligned(p.others, p.out_stride_state)) &&
                      is_aligned(itemsize, p.out, p.out_stride_token, p.out_stride_head, p.head_dim);
  const LaunchConfig config{.grid = ceil_div<int64_t>(p.num_tokens * p.num_heads, kHeadsPerBlock),
                            .block = kBlock,
                            .stream = stream};
  with_dtype(p.dtype, [&](auto dtype) {
    launch(vector ? merge_partial_states_kernel<dtype, true> : merge_partial_states_kernel<dtype, false>,
           config, MergePartialStatesArgs{p, Divider(p.num_heads)});
  });
}

}  // namespace mla_fp8::gpu
