#pragma once
// Sparse MLA prefill for Hopper, few heads: the warp-team kernel of sparse_decode with 4 / G rows in a CTA at
// once (G = groups of 8 heads), a team of 2 G warps on each (bf16 rows: two teams of G). Every place for a
// row goes through its rows without a word to the others: while one row ends and the next begins, the others
// keep the tensor cores busy, and the producers already gather what comes next.
//
//   8 or 4 producer warps   2 or 4 for a team (bf16 rows: 1), row after row
//   8 consumer warps        as in decode; where a row has two teams, its blocks alternate between them.
//                           Before a row they survey the keys of the one after it: producers need not wait
//   end of a row            the output is written straight from the fragments; two teams exchange halves of O
//                           through the place of Q first
//
// Bound: the gather from L2 for 8 heads, latency in the consumers for 16.
// See docs/sparse_prefill.md.
#include "cuda/device/launch.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_prefill/row_finish.cuh"
#include "cuda/sparse_prefill/sparse_prefill.cuh"

namespace mla_fp8::gpu {

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    sparse_prefill_kernel(const __grid_constant__ TeamParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    Ring<C>{shared_address(smem)}.init();
    for (int row = 0; row < C::kRows; ++row) RowSurveys<C>(smem, row).init();
    mbarrier_init_fence();
  }
  wait_for_previous_grid();

  block_barrier<C::kThreads>();
  if (warp >= kConsumerWarps) {
    give_up_registers<C::kProducerRegisters>();
    RowProducer<C>(params, smem, warp - kConsumerWarps, lane).run();
  } else {
    constexpr int kRowWarps = C::kRowTeams * C::kMembers;
    take_registers<C::kConsumerRegisters>();
    Consumer<C> consumer(params, smem, warp, lane);
    RowFinish<C> finish(params, consumer, smem, lane);
    const int row = consumer.row(), warp_in_row = warp % kRowWarps;
    int block = consumer.team();  // in the ring's sequence
    const RowSurveys<C> surveys(smem, row);
    // Row n of the place; before it the keys of row n + 1 are surveyed.
    unsigned i = Unit<C>::first(row) - Unit<C>::stride();
    for (int n = -1; n < 0 || i < Unit<C>::count(params); ++n, i += Unit<C>::stride()) {
      const Unit<C> unit(params, i), next(params, i + Unit<C>::stride());
      const bool has_next = i + Unit<C>::stride() < Unit<C>::count(params);
      int lane = thread % kWarpSize;
      asm volatile("" : "+r"(lane));  // else all addresses of Q would be found once, and spilled
      Query<C, kRowWarps> q;
      if (n >= 0) q.load(params.p, unit.token, unit.first_head, warp_in_row, lane);
      if (has_next) surveys.write(n + 1, params.p, Keys(params.p, next.token), warp_in_row, lane);
      if (n < 0) continue;
      finish.barrier(row);  // the place of Q is free again
      q.store(smem + C::kQ + row * C::kQBytes, reinterpret_cast<float*>(smem + C::kQScale) + row * C::kHeads,
              warp_in_row, lane);
      finish.barrier(row);
      consumer.init();
      if (has_next) q.prefetch(params.p, next.token, next.first_head, warp_in_row, lane);
      const int num_keys = surveys.read(n, lane).num_keys;
      for (int first = consumer.team() % C::kRowTeams * C::kBlockTokens; first < num_keys;
           first += C::kRowTeams * C::kBlockTokens, block += C::kTeams)
        consumer.attend(block);
      finish.run(unit.token, unit.first_head);
    }
  }
#endif
}

template <KvLayoutId kId, int kGroups, int kProducers>
void launch_row_teams(const SparseAttentionParams& p, int num_sms, gpuStream_t stream) {
  using C = TeamConfig<kId, kGroups, kProducers, 4 / kGroups>;
  const auto kernel = sparse_prefill_kernel<C>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kSmemBytes),
        "smem opt-in");
  const int head_blocks = ceil_div(p.num_q_heads, C::kHeads);
  const int64_t ctas = ceil_div(p.num_tokens * head_blocks, int64_t{C::kRows});
  launch(kernel,
         {.grid = std::min<int64_t>(ctas, num_sms),
          .block = C::kThreads,
          .stream = stream,
          .smem = C::kSmemBytes},
         TeamParams{p, 1, head_blocks});
}

// The variants of one layout.
template <KvLayoutId kId>
void launch_row_teams(const SparseAttentionParams& p, int num_sms, gpuStream_t stream) {
  constexpr bool kBf16 = kv_layout(kId).nope_format == Format::kBf16;
  if (p.num_q_heads <= 8) return launch_row_teams<kId, 1, 8>(p, num_sms, stream);
  launch_row_teams<kId, 2, kBf16 ? 4 : 8>(p, num_sms, stream);
}

}  // namespace mla_fp8::gpu
