// forget_rows on CUDA. A block looks for one entry in all slots of one state: 4 bytes a slot, from the L2.

#include "ops/forget_rows.h"

#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

struct ForgetRowsArgs {
  ForgetRowsParams p;
  Divider states;  // states in which each entry is looked for
};

namespace {

constexpr int kForgetBlock = 256;

}  // namespace

__global__ void __launch_bounds__(kForgetBlock)
    forget_rows_kernel(const __grid_constant__ ForgetRowsArgs args) {
  const ForgetRowsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t i = args.states(blockIdx.x), entry = p.entry(i);
  const int64_t state = p.row_to_request ? p.state(i) : int64_t{blockIdx.x} - i * args.states.divisor();
  if (entry < 0 || state < 0) return;
  int32_t* const held = p.hot_entries + state * p.hot_entries_stride;
#pragma unroll 4
  for (int64_t slot = threadIdx.x; slot < p.num_hot; slot += kForgetBlock)
    if (held[slot] == entry) held[slot] = -1;
}

void forget_rows(const ForgetRowsParams& p, gpuStream_t stream) {
  const int64_t states = p.row_to_request ? 1 : p.num_states;
  launch(forget_rows_kernel, {.grid = p.num_entries * states, .block = kForgetBlock, .stream = stream},
         ForgetRowsArgs{p, Divider(states)});
}

}  // namespace mla_fp8::gpu
