// _warmup loads everything that a first call would load. Only the HIP library loads its kernels itself;
// CUDA's runtime and the CPU library have nothing to load.
#include "registration.h"
#if MLA_FP8_WITH_HIP
#include "hip/runtime.h"
#endif

namespace mla_fp8 {

void _warmup([[maybe_unused]] const Tensor& device_of) {
#if MLA_FP8_WITH_HIP && MLA_FP8_EMULATED
  gpu::load_all_kernels();
#elif MLA_FP8_WITH_HIP
  const torch::stable::accelerator::DeviceGuard guard(device_of.get_device_index());
  gpu::load_all_kernels();
#endif
}

}  // namespace mla_fp8
