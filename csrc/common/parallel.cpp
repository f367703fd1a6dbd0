#include "common/parallel.h"

#include "common/torch.h"

namespace mla_fp8 {

void parallel_for_impl(int64_t n, int64_t grain, RangeFn fn, const void* context) {
  torch::stable::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { fn(context, begin, end); });
}

int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace mla_fp8
