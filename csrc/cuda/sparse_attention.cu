// The entry points of sparse attention on a GPU: a plan, and the kernel that it names.
#include "cuda/device/launch.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {
namespace {

Gpu this_gpu() { return {compute_major(), num_processors()}; }

void run(const SparseAttentionParams& p, const Plan& wanted, gpuStream_t stream) {
  const Plan plan = within_workspace(wanted, p);
  switch (plan.variant.kernel) {
    case Kernel::kPortable: return launch_portable(p, plan, stream);
    case Kernel::kFewHeads: return launch_few_heads(p, plan, stream);
    case Kernel::kManyHeads: return launch_many_heads(p, plan, stream);
    case Kernel::kBf16Tiles: return launch_bf16_tiles(p, plan, stream);
  }
}

}  // namespace

int64_t sparse_decode_workspace(const SparseAttentionParams& p) {
  return workspace_size(Op::kDecode, p, this_gpu());
}
int64_t sparse_prefill_workspace(const SparseAttentionParams& p) {
  return workspace_size(Op::kPrefill, p, this_gpu());
}
int64_t sparse_attention_by_workspace(const WantedSparseAttention& x) {
  return workspace_size(forced_plan(x.wanted, x.params, this_gpu()), x.params);
}

void sparse_decode(const SparseAttentionParams& p, gpuStream_t stream) {
  run(p, plan(Op::kDecode, p, this_gpu()), stream);
}

void sparse_prefill(const SparseAttentionParams& p, gpuStream_t stream) {
  run(p, plan(Op::kPrefill, p, this_gpu()), stream);
}

void sparse_attention_by(const WantedSparseAttention& x, gpuStream_t stream) {
  run(x.params, forced_plan(x.wanted, x.params, this_gpu()), stream);
}

}  // namespace mla_fp8::gpu
