#pragma once
// Sparse FP8 MLA prefill for Hopper, 32 heads: a CTA goes through rows (query tokens) one after
// another, and each warpgroup has one part in all of them. What lies between two rows overlaps: producers
// gather and the logits warps work on the next row while the value warps finish this one.
//
//   producers   4 warps: index -> row address -> one bulk copy per row, into a ring of 16 slots of 16
//   logits      2 warpgroups take blocks of 64 tokens in turns: S^T = K Q^T by wgmma, K from
//               the raw rows through registers, Q from shared memory; softmax; weights to shared memory
//   values      2 warpgroups: O^T[256 dims x heads] += V^T P^T by wgmma, V through registers
//
// K and V are converted once per token whatever the heads: that, not the tensor cores, is what a warpgroup's
// time goes into, so their products are asynchronous and many warps share the conversions. Bases of the
// softmax are common to the CTA and decided on in the order of the blocks: a row's result is the same
// whichever warpgroup is faster. See docs/sparse_prefill.md.
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_prefill/group_logits.cuh"
#include "cuda/sparse_prefill/group_values.cuh"
#include "cuda/sparse_prefill/sparse_prefill.cuh"

namespace mla_fp8::gpu {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sparse_prefill_groups_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    RowExchange<C>(smem).init();
    RowSurveys<C>(smem, 0).init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();
  __syncthreads();
  if (warp >= kConsumerWarps + C::kLogitWarps) {
    give_up_registers<C::kProducerRegisters>();
    RowProducer<C>(params, smem, warp - kConsumerWarps - C::kLogitWarps, lane).run();
  } else if (warp >= kConsumerWarps) {
    take_registers<C::kLogitRegisters>();
    RowLogits<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    take_registers<C::kValueRegisters>();
    RowValues<C>(params, smem, warp, lane).run();
  }
#endif
}

template <KvLayoutId kId>
void launch_row_groups(const SparseAttentionParams& p, int num_sms, gpuStream_t stream) {
  using C = RowGroupConfig<kId>;
  const auto kernel = sparse_prefill_groups_kernel<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
        "smem opt-in");
  const int head_blocks = ceil_div(p.num_q_heads, C::kHeads);
  launch(kernel,
         {.grid = std::min<int64_t>(p.num_tokens * head_blocks, num_sms),
          .block = C::kThreads,
          .stream = stream,
          .smem = C::kSmemBytes},
         TeamParams{p, 1, head_blocks});
}

}  // namespace mla_fp8::gpu
