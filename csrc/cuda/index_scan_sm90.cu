// The kernels of index_topk's scan on Hopper (indexer/sm90_scan.cuh), compiled as four slices.
#include "cuda/indexer/sm90_scan.cuh"

#include "cuda/device/launch.cuh"
#include "cuda/indexer/sm90_shapes.cuh"

#if MLA_FP8_WITH_SM90A

namespace mla_fp8::gpu {
namespace {
using namespace sm90_index;
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) index_scan_sm90_kernel(const __grid_constant__ ScanArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  Scan<S::kHeads, S::kRows, S::kShares, S::kFp4, S::kKeeping>(args).run();
#endif
}

namespace sm90_index {

template <class S>
void launch_scan(const LaunchConfig& config, const ScanArgs& args) {
  launch(index_scan_sm90_kernel<S>, config, args);
}

#define MLA_SCAN(...) template void launch_scan<Shape<__VA_ARGS__>>(const LaunchConfig&, const ScanArgs&);
#if !defined(MLA_SLICE) || MLA_SLICE == 0  // FP8 keys, at most 32 heads
MLA_SCAN(16, 4, 1)
MLA_SCAN(32, 2, 1)
MLA_SCAN(32, 2, 1, false, Keeping::kNever)
MLA_SCAN(32, 4, 1)
#endif
#if !defined(MLA_SLICE) || MLA_SLICE == 1  // more heads
MLA_SCAN(64, 1, 1)
MLA_SCAN(64, 1, 1, false, Keeping::kCounted)
MLA_SCAN(64, 2, 1)
MLA_SCAN(64, 2, 1, false, Keeping::kNever)
MLA_SCAN(64, 2, 2)
#endif
#if !defined(MLA_SLICE) || MLA_SLICE == 2  // FP4 keys
MLA_SCAN(16, 4, 1, true)
MLA_SCAN(32, 2, 1, true)
MLA_SCAN(32, 4, 1, true)
#endif
#if !defined(MLA_SLICE) || MLA_SLICE == 3
MLA_SCAN(64, 1, 1, true)
MLA_SCAN(64, 2, 1, true)
MLA_SCAN(64, 2, 2, true)
#endif

}  // namespace sm90_index
}  // namespace mla_fp8::gpu

#endif
