// The CUDA runtime, as far as this project's library calls it, on a GPU that this computer plays: the
// library's own host code registers its PTX and launches. Linked into the library in place of cudart.
// FAKE_CUDA_ARCH: which GPU (90); FAKE_CUDA_SEED: the order of warps and copies (0: in order, at once);
// FAKE_CUDA_PROCESSORS: SMs (those of an A100 or an H200); FAKE_CUDA_DESCENDING: the last cluster of a grid
// begins first; FAKE_CUDA_MOST_CLUSTERS: a launch of more is killed behind so many.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "emulator/machine/allocations.h"
#include "emulator/ptx/async.h"
#include "emulator/ptx/fat_binary.h"

namespace {

using namespace emulator;

unsigned environment(const char* name, unsigned otherwise) {
  const char* value = std::getenv(name);
  return value ? static_cast<unsigned>(std::stoul(value)) : otherwise;
}

// GPUs that it plays, by the number in the name of their PTX's target.
struct Gpu {
  unsigned arch;
  int processors, max_shared;
};
constexpr Gpu kGpus[] = {{80, 108, 166912}, {90, 132, 232448}};  // A100, H200
const Gpu& gpu() {
  const unsigned arch = environment("FAKE_CUDA_ARCH", 90);
  for (const Gpu& g : kGpus)
    if (g.arch == arch) return g;
  throw std::runtime_error("FAKE_CUDA_ARCH must be 80 or 90, got " + std::to_string(arch));
}

// A module for each source file; functions by the address of their host side.
struct Registry {
  struct Function {
    ptx::Module* module;
    std::string name;
  };
  std::deque<ptx::Module> modules;  // live as long as the process
  std::map<const void*, Function> functions;
  std::map<const void*, int> shared_bytes;  // that a function may have
  std::mutex mutex;
};
Registry& registry() {  // constructors of other files come first
  static Registry r;
  return r;
}
thread_local std::string failure;

template <class F>
cudaError_t guarded(F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    failure = e.what();
    return cudaErrorLaunchFailure;
  }
}

CUresult encode_tensor_map(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool is_known = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 && rank == 3 &&
                        box[0] == ptx::TensorMap::kRowBytes && box[2] == 1 && steps[0] == 1 &&
                        steps[1] == 1 && steps[2] == 1 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                        swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  const auto address = reinterpret_cast<uint64_t>(base);
  if (!is_known || address % 16 || strides[0] % 16 || strides[1] % 16) return CUDA_ERROR_INVALID_VALUE;
  const ptx::TensorMap map{
      ptx::TensorMap::kMagic, address, sizes[0], sizes[1], sizes[2], strides[0], strides[1], box[1]};
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// ---- what nvcc's host code calls ------------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const char* data;
    void* file;
  };
  ptx::Module& module = registry().modules.emplace_back();
  for (std::string& text : ptx::texts_in_fat_binary(static_cast<const Wrapper*>(wrapper)->data, gpu().arch))
    ptx::load(module, std::move(text));
  return reinterpret_cast<void**>(&module);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  registry().functions[host] = {reinterpret_cast<ptx::Module*>(module), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}  // host code touches none
char __cudaInitModule(void**) { return 0; }
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) {
  std::abort();
}  // <<< >>>, which nobody writes
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { std::abort(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { std::abort(); }
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { std::abort(); }

// ---- what the library calls -----------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = static_cast<int>(environment("FAKE_CUDA_PROCESSORS", static_cast<unsigned>(gpu().processors)));
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = static_cast<int>(gpu().arch / 10); return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = static_cast<int>(gpu().arch % 10); return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu().max_shared; return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(registry().mutex);
  if (!registry().functions.contains(function)) return cudaErrorInvalidDeviceFunction;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > gpu().max_shared) return cudaErrorInvalidValue;
    registry().shared_bytes[function] = value;
  }
  return cudaSuccess;
}
// Memory of the host, all of which kernels reach here.
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  *attributes = {};
  attributes->type = cudaMemoryTypeHost;
  attributes->hostPointer = attributes->devicePointer = const_cast<void*>(p);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorLaunchFailure: return failure.c_str();
    default: return "unknown error";
  }
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool found = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = found ? reinterpret_cast<void*>(&encode_tensor_map) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1) return cudaErrorInvalidValue;
  if (grid.x == 0 || block.x == 0 || block.x > 1024) return cudaErrorInvalidValue;
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
  if (cluster == 0 || cluster > 16 || grid.x % cluster) return cudaErrorInvalidValue;
  return guarded([&] {
    const ptx::Kernel* kernel;
    {
      const std::lock_guard lock(registry().mutex);
      const auto found = registry().functions.find(function);
      if (found == registry().functions.end()) return cudaErrorInvalidDeviceFunction;
      const auto most = registry().shared_bytes.find(function);
      const int allowed = most == registry().shared_bytes.end() ? 48 * 1024 : most->second;
      if (config->dynamicSmemBytes > static_cast<size_t>(allowed)) return cudaErrorInvalidValue;
      kernel = &ptx::compile(*found->second.module, found->second.name);
    }
    // Kernels take one struct: the text says how large it is.
    const auto* params = static_cast<const char*>(arguments[0]);
    std::vector<Allocations::Range> ranges = Allocations::live();
    const auto begin = reinterpret_cast<uintptr_t>(params);
    ranges.push_back({begin, begin + kernel->params_bytes});
    for (const auto& range : kernel->globals) ranges.push_back(range);
    const Allocations::Snapshot memory(std::move(ranges));
    ptx::run_grid({.kernel = kernel,
                   .params = params,
                   .grid = grid.x,
                   .block = block.x,
                   .cluster = cluster,
                   .dynamic_shared = static_cast<unsigned>(config->dynamicSmemBytes),
                   .seed = environment("FAKE_CUDA_SEED", 0),
                   .is_descending = environment("FAKE_CUDA_DESCENDING", 0) != 0,
                   .most_clusters = environment("FAKE_CUDA_MOST_CLUSTERS", UINT_MAX),
                   .memory = &memory});
    return cudaSuccess;
  });
}

// For tests that change the PTX in memory: the text of a source file, null behind the last one.
__attribute__((visibility("default"))) char* fake_cuda_ptx(size_t number, size_t* bytes) {
  for (ptx::Module& module : registry().modules)
    for (std::string& text : module.texts)
      if (number-- == 0) return *bytes = text.size(), text.data();
  return nullptr;
}
// Then kernels are compiled anew.
__attribute__((visibility("default"))) void fake_cuda_forget_kernels() {
  const std::lock_guard lock(registry().mutex);
  for (auto& [host, function] : registry().functions) function.module->compiled.clear();
}

}  // extern "C"

namespace {
// From when the library is loaded.
const bool watches = (emulator::Allocations::watch(), true);
}  // namespace
