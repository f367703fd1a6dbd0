// Launches few_heads and many_heads by the slice of instances that has the plan's.
#include <utility>

#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {
namespace {

template <Kernel kKernel, int... kSlices>
void launch(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream,
            std::integer_sequence<int, kSlices...>) {
  if (!(launch_slice<kKernel, kSlices>(p, plan, stream) || ...)) throw no_such_kernel(plan);
}

}  // namespace

#if MLA_FP8_WITH_SM90A
void launch_few_heads(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  launch<Kernel::kFewHeads>(p, plan, stream, std::make_integer_sequence<int, MLA_SLICES_OF_FEW_HEADS>());
}
void launch_many_heads(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  launch<Kernel::kManyHeads>(p, plan, stream, std::make_integer_sequence<int, MLA_SLICES_OF_MANY_HEADS>());
}
#else  // no plan names these kernels
void launch_few_heads(const SparseAttentionParams&, const Plan& plan, gpuStream_t) {
  throw no_such_kernel(plan);
}
void launch_many_heads(const SparseAttentionParams&, const Plan& plan, gpuStream_t) {
  throw no_such_kernel(plan);
}
void launch_bf16_tiles(const SparseAttentionParams&, const Plan& plan, gpuStream_t) {
  throw no_such_kernel(plan);
}
void launch_shared_keys(const SparseAttentionParams&, int, int32_t*, gpuStream_t) {
  throw no_such_kernel({});
}
#endif

}  // namespace mla_fp8::gpu
