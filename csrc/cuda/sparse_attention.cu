// The entry points of sparse attention on a GPU: a plan, and the kernel that it names.
#include <utility>

#include "cuda/device/launch.cuh"
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

namespace {

Gpu this_gpu() { return {compute_major(), num_processors()}; }

void run(const SparseAttentionParams& p, const Plan& wanted, gpuStream_t stream) {
  launch_plan(p, within_workspace(wanted, p), stream);
}

// The queries that go alone, usually none, then tiles of the others, which need not wait for those.
void run_sharing(SparseAttentionParams p, Sharing sharing, gpuStream_t stream) {
  if (!p.shared_keys) {
    auto* const lists = reinterpret_cast<int32_t*>(p.workspace);
    launch_shared_keys(p, sharing.most_shared, lists, stream);
    p.shared_keys = lists;
  }
  sharing.tiles.takes_lists = sharing.tiles.follows = true;
  run(p, sharing.alone, stream);
  run(p, sharing.tiles, stream);
}
bool has_room(const SparseAttentionParams& p) {  // for lists
  return p.shared_keys || p.workspace_floats >= lists_size(p);
}

void run_plans(Op op, const SparseAttentionParams& p, gpuStream_t stream) {
  const Gpu gpu = this_gpu();
  if (p.query_groups > 1 && has_room(p))
    if (const auto sharing = plan_sharing(op, p, gpu)) return run_sharing(p, *sharing, stream);
  Plan first = plan(op, p, gpu);  // each query alone
  if (first.queries > 0) {
    run_plans(op, p.of_tokens(first.queries, p.num_tokens - first.queries), stream);
    first.follows = true;
  }
  run(p.of_tokens(0, first.queries > 0 ? first.queries : p.num_tokens), first, stream);
}

}  // namespace

int64_t sparse_decode_workspace(const SparseAttentionParams& p) {
  return workspace_of_call(Op::kDecode, p, this_gpu());
}
int64_t sparse_prefill_workspace(const SparseAttentionParams& p) {
  return workspace_of_call(Op::kPrefill, p, this_gpu());
}
int64_t sparse_attention_by_workspace(const WantedSparseAttention& x) {
  if (forced_sharing(x.wanted, x.params, this_gpu())) return lists_size(x.params);
  return workspace_size(forced_plan(x.wanted, x.params, this_gpu()), x.params);
}

void sparse_decode(const SparseAttentionParams& p, gpuStream_t stream) { run_plans(Op::kDecode, p, stream); }

void sparse_prefill(const SparseAttentionParams& p, gpuStream_t stream) {
  run_plans(Op::kPrefill, p, stream);
}

void sparse_attention_by(const WantedSparseAttention& x, gpuStream_t stream) {
  if (const auto sharing = forced_sharing(x.wanted, x.params, this_gpu()))
    return run_sharing(x.params, *sharing, stream);
  run(x.params.of_tokens(0, x.params.num_tokens), forced_plan(x.wanted, x.params, this_gpu()), stream);
}

}  // namespace mla_fp8::gpu
