// merge_topk on CUDA. A block takes a row.

#include "ops/merge_topk.h"

#include "cuda/device/launch.cuh"
#include "cuda/merge_topk.cuh"

namespace mla_fp8::gpu {

struct MergeTopkArgs {
  MergeTopkParams p;
  Divider per_list;
};

__global__ void __launch_bounds__(kMergeTopkThreads)
    merge_topk_kernel(const __grid_constant__ MergeTopkArgs args) {
  MLA_SHARED(MergeTopkSmem, smem);
  wait_for_previous_grid();
  const int64_t row = blockIdx.x;
  const int32_t count = merge_row(args.p, args.per_list, row, smem);
  if (threadIdx.x == 0) args.p.out_lens[row] = count;
}

void merge_topk(const MergeTopkParams& p, gpuStream_t stream) {
  launch(merge_topk_kernel, {.grid = p.num_rows, .block = kMergeTopkThreads, .stream = stream},
         MergeTopkArgs{p, Divider(p.per_list > 0 ? p.per_list : 1)});
}

}  // namespace mla_fp8::gpu
