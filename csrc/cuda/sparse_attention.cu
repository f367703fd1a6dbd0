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

void run_plans(Op op, const SparseAttentionParams& p, gpuStream_t stream) {
  Plan first = plan(op, p, this_gpu());
  if (first.queries == 0) return run(p, first, stream);
  run_plans(op, p.of_tokens(first.queries, p.num_tokens - first.queries), stream);
  first.follows = true;
  run(p.of_tokens(0, first.queries), first, stream);
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

void sparse_decode(const SparseAttentionParams& p, gpuStream_t stream) { run_plans(Op::kDecode, p, stream); }

void sparse_prefill(const SparseAttentionParams& p, gpuStream_t stream) {
  run_plans(Op::kPrefill, p, stream);
}

void sparse_attention_by(const WantedSparseAttention& x, gpuStream_t stream) {
  run(x.params, forced_plan(x.wanted, x.params, this_gpu()), stream);
}

}  // namespace mla_fp8::gpu
