// A stand-in for libamdhip64.so on machines without an AMD GPU: reads the offload bundle as the real loader
// does, insists on the GPU's architecture and on the kernel being in that code object, then has the library's
// engine run it. FAKE_HIP_ARCH is the GPU (gfx942), FAKE_HIP_SEED the order of waves (0: in order).
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "emulator/machine/engine.h"

namespace {

enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
  kLaunchFailure = 719
};
thread_local int current_device = 0;
thread_local std::string failure;  // what the engine said about the last kLaunchFailure

// The engine's exceptions as an error code.
template <class F>
int guarded(F f) {
  try {
    return f();
  } catch (const std::exception& e) {
    failure = e.what();
    return kLaunchFailure;
  }
}

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}
std::string arch() { return environment("FAKE_HIP_ARCH", "gfx942"); }

}  // namespace

extern "C" {

// Every device is the same GPU, and has its own copies of the code objects.
int hipSetDevice(int device) {
  current_device = device;
  return kSuccess;
}

int hipGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}

const char* hipGetErrorString(int error) {
  switch (error) {
    case kSuccess: return "no error";
    case kInvalidValue: return "invalid argument";
    case kInvalidImage: return "device kernel image is invalid";
    case kNoBinaryForGpu: return "no kernel image is available for execution on the device";
    case kNotFound: return "named symbol not found";
    case kLaunchFailure: return failure.c_str();
    default: return "unknown error";
  }
}

// A module is the code object of the GPU.
int hipModuleLoadData(void** module, const void* image) {
  constexpr std::string_view kMagic = "__CLANG_OFFLOAD_BUNDLE__";
  const char* bundle = static_cast<const char*>(image);
  if (std::string_view(bundle, kMagic.size()) != kMagic) return kInvalidImage;
  const std::string wanted = "hipv4-amdgcn-amd-amdhsa--" + arch();
  const auto number = [&](size_t at) {
    uint64_t value;
    std::memcpy(&value, bundle + at, sizeof value);
    return value;
  };
  size_t at = kMagic.size() + 8;
  for (uint64_t entry = number(kMagic.size()); entry > 0; --entry) {
    const uint64_t offset = number(at), size = number(at + 8), name_size = number(at + 16);
    const std::string_view name(bundle + at + 24, name_size);
    at += 24 + name_size;
    if (name != wanted) continue;
    if (std::string_view(bundle + offset, 4) !=
        "\x7f"
        "ELF")
      return kInvalidImage;
    return guarded([&] {
      *module = emulator::load_module({bundle + offset, size}, arch());
      return kSuccess;
    });
  }
  return kNoBinaryForGpu;
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  return guarded([&] {
    *function = emulator::find_kernel(*static_cast<emulator::Module*>(module), name);
    return *function ? kSuccess : kNotFound;
  });
}

int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void*, void** arguments,
                          void** extra) {
  // HIP_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END: the parameters as one block of memory.
  const auto marker = [](uintptr_t value) { return reinterpret_cast<void*>(value); };
  if (arguments || !extra || extra[0] != marker(1) || extra[2] != marker(2) || extra[4] != marker(3))
    return kInvalidValue;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes != 0) return kInvalidValue;
  if (grid_x == 0 || block_x == 0 || block_x > 1024 || uint64_t{grid_x} * block_x > UINT32_MAX)
    return kInvalidValue;
  const auto seed = static_cast<unsigned>(std::stoul(environment("FAKE_HIP_SEED", "0")));
  return guarded([&] {
    emulator::launch(*static_cast<emulator::Kernel*>(function), extra[1],
                     *static_cast<const size_t*>(extra[3]), {grid_x, block_x}, seed);
    return kSuccess;
  });
}
}
