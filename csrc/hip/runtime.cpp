// The part of the HIP runtime that we need, found when a kernel is first launched. Nothing here links to
// ROCm, so one library loads next to any libamdhip64, and on machines without one.
//
// clang's host code of the .cu files calls the five functions below that begin with hip or __hip, before
// main: they register each file's fat binary and kernels. A launch looks its kernel up. The only mutable
// state is what is loaded where.
#include "hip/runtime.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mla_fp8::gpu {
namespace {

struct Image {
  const void* fat_binary;
  std::unordered_map<int, void*> modules;  // by device
};

struct Kernel {
  Image* image;
  std::string name;
  std::unordered_map<int, void*> functions;  // by device
};

struct Registry {
  std::mutex mutex;
  std::vector<Image*> images;
  std::unordered_map<const void*, Kernel> kernels;  // by the address that host code calls
};
Registry& registry() {
  static Registry r;
  return r;
}

struct Hip {
  int (*GetDevice)(int*);
  int (*ModuleLoadData)(void**, const void*);
  int (*ModuleGetFunction)(void**, void*, const char*);
  int (*ModuleLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            void*, void**, void**);
  const char* (*GetErrorString)(int);
};

constexpr std::string_view kLibrary = "libamdhip64.so";

// Opens the library that is in the process already (torch's, whatever its name), else the system's.
void* open_library() {
  std::string loaded;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const std::string_view path = info->dlpi_name;
        const bool ours = path.substr(path.rfind('/') + 1).starts_with(kLibrary);
        if (ours) *static_cast<std::string*>(found) = path;
        return static_cast<int>(ours);
      },
      &loaded);
  if (!loaded.empty()) return dlopen(loaded.c_str(), RTLD_NOW);
  for (const char* suffix : {".7", ".6", ""})
    if (void* library = dlopen((std::string(kLibrary) + suffix).c_str(), RTLD_NOW)) return library;
  return nullptr;
}

const Hip& hip() {
  static const Hip functions = [] {
    void* library = open_library();
    if (!library) throw std::runtime_error("mla_fp8: no HIP runtime (libamdhip64.so) was found");
    Hip h{};
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("mla_fp8: the HIP runtime has no ") + name);
    };
    find(h.GetDevice, "hipGetDevice");
    find(h.ModuleLoadData, "hipModuleLoadData");
    find(h.ModuleGetFunction, "hipModuleGetFunction");
    find(h.ModuleLaunchKernel, "hipModuleLaunchKernel");
    find(h.GetErrorString, "hipGetErrorString");
    return h;
  }();
  return functions;
}

void check(int error, const std::string& what) {
  if (error) throw std::runtime_error("mla_fp8: " + what + ": " + hip().GetErrorString(error));
}

int current_device() {
  int device = 0;
  check(hip().GetDevice(&device), "hipGetDevice");
  return device;
}

void* load_module(Image& image, int device) {
  void*& module = image.modules[device];
  if (!module)
    check(hip().ModuleLoadData(&module, image.fat_binary),
          "no code object for this GPU in the package, which has " MLA_FP8_HIP_ARCHS " (hipModuleLoadData)");
  return module;
}

void* load_function(Kernel& kernel, int device) {
  void*& function = kernel.functions[device];
  if (!function) {
    void* module = load_module(*kernel.image, device);
    check(hip().ModuleGetFunction(&function, module, kernel.name.c_str()), kernel.name);
  }
  return function;
}

}  // namespace

int num_processors() { return 256; }  // MI350X; an MI300X has 304. Asking would need ROCm's enumerators

void launch_kernel(const void* kernel, const LaunchConfig& c, const void* params, size_t params_size) {
  if (c.grid * c.block > UINT32_MAX)
    throw std::runtime_error("mla_fp8: a grid must have less than 2^32 threads, got " +
                             std::to_string(c.grid * c.block));
  const int device = current_device();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  void* function = load_function(r.kernels.at(kernel), device);
  // HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END: parameters are one block of memory.
  const auto marker = [](uintptr_t value) { return reinterpret_cast<void*>(value); };
  void* extra[] = {marker(1), const_cast<void*>(params), marker(2), &params_size, marker(3)};
  check(hip().ModuleLaunchKernel(function, static_cast<unsigned>(c.grid), 1, 1,
                                 static_cast<unsigned>(c.block), 1, 1, 0, c.stream, nullptr, extra),
        r.kernels.at(kernel).name);
}

void load_all_kernels() {
  const int device = current_device();
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (auto& [address, kernel] : r.kernels) load_function(kernel, device);
}

}  // namespace mla_fp8::gpu

// ---- what clang's host code calls ------------------------------------------------------------------------

extern "C" {

struct FatBinaryWrapper {
  uint32_t magic, version;
  const void* fat_binary;
  void* unused;
};

void** __hipRegisterFatBinary(const FatBinaryWrapper* wrapper) {
  auto* image = new mla_fp8::gpu::Image{wrapper->fat_binary, {}};
  mla_fp8::gpu::registry().images.push_back(image);
  return reinterpret_cast<void**>(image);
}

void __hipUnregisterFatBinary(void**) {}  // called when the process ends

int __hipRegisterFunction(void** image, const void* host_function, char*, const char* device_name, unsigned,
                          void*, void*, void*, void*, int*) {
  mla_fp8::gpu::registry().kernels[host_function] = {
      reinterpret_cast<mla_fp8::gpu::Image*>(image), device_name, {}};
  return 0;
}

// Functions of the <<<>>> syntax, which nothing uses: the stubs that refer to them are never called.
int __hipPopCallConfiguration(void*, void*, size_t*, void**) { return 1; }
int __hipPushCallConfiguration() { return 1; }
int hipLaunchKernel() { return 1; }
}
