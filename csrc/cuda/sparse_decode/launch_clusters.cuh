#pragma once
// Launching a variant of a Hopper kernel: one cluster of CTAs per row and head block.
#include "cuda/device/launch.cuh"
#include "cuda/sparse_decode/config.cuh"

namespace mla_fp8::gpu {

template <class C>
void launch_clusters(void (*kernel)(TeamParams), const SparseAttentionParams& p, int num_splits,
                     gpuStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
        "smem opt-in");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster opt-in");
  const TeamParams params{p, num_splits, ceil_div(p.num_q_heads, C::kHeads)};
  launch(kernel,
         {.grid = p.num_tokens * params.num_head_blocks * num_splits,
          .block = C::kThreads,
          .stream = stream,
          .smem = C::kSmemBytes,
          .cluster = num_splits},
         params);
}

}  // namespace mla_fp8::gpu
