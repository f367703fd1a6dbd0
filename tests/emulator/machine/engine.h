#pragma once
// What runs code objects behind the stand-in for the HIP runtime (amdhip64.cpp).
#include <cstddef>
#include <string>
#include <string_view>

namespace emulator {

struct Grid {
  unsigned blocks, threads;
};

// A code object that has been loaded for a GPU; lives as long as the process.
struct Module;
// A kernel of one, by its name; null if it has none.
struct Kernel;

Module* load_module(std::string_view code_object, const std::string& gpu);
Kernel* find_kernel(Module& module, const std::string& name);
// Runs it on `grid`. `params` is the one struct that kernels take. Waves go on in order with seed 0, else in
// a random one. Throws std::runtime_error if a kernel does what a GPU would not forgive.
void launch(Kernel& kernel, const void* params, size_t params_size, const Grid& grid, unsigned seed);

}  // namespace emulator
