#pragma once
// The PTX in what nvcc embeds in an object file.
#include <string>
#include <vector>

namespace emulator::ptx {

// The texts for sm_<arch>, of a fat binary whose images are plain or packed by `nvcc --compress-mode=speed`.
std::vector<std::string> texts_in_fat_binary(const char* fat_binary, unsigned arch);

}  // namespace emulator::ptx
