#pragma once
// Runs a kernel that g++ compiled for this machine: one block at a time, every GPU thread a fiber. Barriers
// and exchanges between lanes are where fibers switch. What a GPU would not forgive ends the process with a
// message: a barrier that only some threads reach, an exchange that only some lanes of a warp reach.
#include <cstddef>
#include <cstdint>

#include "emulator/engine.h"

namespace emulator {

// Calls the function at `kernel`, which takes one struct by value, once per thread. Threads go on in turns
// with seed 0, else in a random order that lets waves run ahead of each other.
void run_on_fibers(const void* kernel, const void* params, size_t params_size, const Grid& grid,
                   unsigned seed);

unsigned thread_index();
unsigned block_index();
unsigned block_dim();
void block_barrier();

// This block's copy of a variable, all bytes 0xff (NaN) when the block starts. `tag` stands for the variable.
void* shared(const void* tag, size_t size, size_t alignment);

// Whether the GPU whose place the fibers take, gfx942, has an instruction for e4m3fnuz and none for e4m3fn.
bool widens_fnuz_alone();

// All lanes of a group of `lanes` give kWords words each; returns those of the group, lane after lane.
inline constexpr int kWords = 8;
const uint32_t* exchange(const uint32_t (&words)[kWords], int lanes);

}  // namespace emulator
