#include "cuda/sparse_attention/launch.h"

namespace mla_fp8::gpu {
namespace {

template <Kernel kKernel, int... kSlices>
void launch_slices(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream,
                   std::integer_sequence<int, kSlices...>) {
  if (!(launch_slice<kKernel, kSlices>(p, plan, stream) || ...)) throw no_such_kernel(plan);
}

}  // namespace

void launch_plan(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  using std::make_integer_sequence;
  switch (plan.variant.kernel) {
    case Kernel::kPortable: return launch_portable(p, plan, stream);
#if MLA_FP8_WITH_SM90A
    case Kernel::kFewHeads:
      return launch_slices<Kernel::kFewHeads>(p, plan, stream,
                                              make_integer_sequence<int, MLA_SLICES_OF_FEW_HEADS>());
    case Kernel::kManyHeads:
      return launch_slices<Kernel::kManyHeads>(p, plan, stream,
                                               make_integer_sequence<int, MLA_SLICES_OF_MANY_HEADS>());
    case Kernel::kBf16Tiles: return launch_bf16_tiles(p, plan, stream);
#endif
    default: throw no_such_kernel(plan);
  }
}

}  // namespace mla_fp8::gpu
