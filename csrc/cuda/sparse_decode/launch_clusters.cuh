#pragma once
// Launching a variant of a Hopper kernel: one cluster of CTAs per row and head block.
#include "cuda/launch.cuh"
#include "cuda/sparse_decode/config.cuh"

namespace mla_fp8::gpu {

template <class C>
void launch_clusters(void (*kernel)(TeamParams), const SparseAttentionParams& p, int num_splits,
                     gpuStream_t stream) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
        "smem opt-in");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cluster opt-in");
  const TeamParams params{p, num_splits, ceil_div(p.num_q_heads, C::kHeads)};
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(num_splits), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.num_tokens * params.num_head_blocks * num_splits));
  config.blockDim = dim3(C::kThreads);
  config.dynamicSmemBytes = C::kSmemBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, kernel, params), "sparse_decode launch");
}

}  // namespace mla_fp8::gpu
