// The entry points of sparse attention on a GPU: a plan, and the kernel that it names.
#include "cuda/device/launch.cuh"
#include "cuda/sparse_attention/plan_memo.h"

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

// The queries that go alone, usually none, then tiles of the others, which need not wait for those.
void run_sharing(const SparseAttentionParams& p, Sharing sharing, gpuStream_t stream) {
  Plan &tiles = sharing.tiles, &alone = sharing.alone;
  const int32_t* lists = p.shared_keys;
  if (!lists) {
    auto* const own = reinterpret_cast<int32_t*>(p.workspace);
    launch_shared_keys(p, sharing.most_shared, own, stream);
    lists = own;
  }
  tiles.lists = alone.lists = lists;
  tiles.takes_lists = true;
  tiles.follows = true;
  run(p, alone, stream);
  run(p, tiles, stream);
}
bool has_room(const SparseAttentionParams& p) {  // for lists
  return p.shared_keys || p.workspace_floats >= lists_size(p);
}

void run_plans(Op op, const SparseAttentionParams& p, gpuStream_t stream) {
  const Gpu gpu = this_gpu();
  if (const auto sharing = planned_sharing(op, p, gpu); sharing && has_room(p))
    return run_sharing(p, *sharing, stream);
  Plan first = planned(op, p, gpu);  // each query alone
  if (first.queries == 0) return run(p, first, stream);
  run_plans(op, p.of_tokens(first.queries, p.num_tokens - first.queries), stream);
  first.follows = true;
  run(p.of_tokens(0, first.queries), first, stream);
}

struct NoLists {
  int32_t* lists;
  int64_t num_tiles, words;
};
__global__ void no_lists_kernel(const __grid_constant__ NoLists x) {
  wait_for_previous_grid();
  const int64_t tile = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (tile < x.num_tiles) x.lists[tile * x.words] = -1;
}

}  // namespace

void plan_shared_keys(const SparseAttentionParams& p, gpuStream_t stream) {
  auto* const lists = reinterpret_cast<int32_t*>(p.workspace);
  SparseAttentionParams with_lists = p;
  with_lists.shared_keys = lists;
  if (const auto sharing = plan_sharing(Op::kDecode, with_lists, this_gpu()))
    return launch_shared_keys(p, sharing->most_shared, lists, stream);
  constexpr int kBlock = 256;
  const SharedKeysShape shape(p);
  launch(no_lists_kernel,
         {.grid = ceil_div(shape.num_tiles, int64_t{kBlock}), .block = kBlock, .stream = stream},
         NoLists{lists, shape.num_tiles, shape.words});
}

int64_t sparse_decode_workspace(const SparseAttentionParams& p) {
  return planned_workspace(Op::kDecode, p, this_gpu());
}
int64_t sparse_prefill_workspace(const SparseAttentionParams& p) {
  return planned_workspace(Op::kPrefill, p, this_gpu());
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
  run(x.params, forced_plan(x.wanted, x.params, this_gpu()), stream);
}

}  // namespace mla_fp8::gpu
