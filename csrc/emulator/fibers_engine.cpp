// Fibers as an engine: a code object is asked for the kernel's name only; what runs is the same kernel,
// compiled by g++ into this library.
#include <dlfcn.h>

#include <cstdlib>

#include "cuda/device/launch.cuh"
#include "emulator/engine.h"
#include "emulator/fibers.h"

namespace emulator {
namespace {
std::string gpu_name;  // of the last module: a process has one GPU
}

struct Module {
  std::string_view code_object;
};

Module* load_module(std::string_view code_object, const std::string& gpu) {
  gpu_name = gpu;
  return new Module{code_object};
}

bool widens_fnuz_alone() { return gpu_name == "gfx942"; }

Kernel* find_kernel(Module& module, const std::string& name) {
  if (module.code_object.find(name + ".kd") == std::string_view::npos) return nullptr;
  Dl_info self;
  dladdr(reinterpret_cast<const void*>(&find_kernel), &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  return library ? static_cast<Kernel*>(dlsym(library, name.c_str())) : nullptr;
}

void launch(Kernel& kernel, const void* params, size_t params_size, const Grid& grid, unsigned seed) {
  run_on_fibers(&kernel, params, params_size, grid, seed);
}

}  // namespace emulator

// The launchers in the .cu files are here only to instantiate their kernels.
namespace mla_fp8::gpu {
void launch_kernel(const void*, const LaunchConfig&, const void*, size_t) { std::abort(); }
int num_processors() { std::abort(); }
}  // namespace mla_fp8::gpu
