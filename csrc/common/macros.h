#pragma once
// Macros and small helpers for host and device code.
#include <type_traits>

// MLA_HD functions are always inlined. CPU kernels are compiled once per instruction set: the linker could
// keep an AVX-512 copy of a shared helper for every CPU.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define MLA_HD __host__ __device__ __forceinline__
#else
#define MLA_HD inline __attribute__((always_inline))
#endif

namespace mla_fp8 {

template <class T>
MLA_HD constexpr T ceil_div(T x, T y) {
  return (x + y - 1) / y;
}

template <class T>
MLA_HD constexpr T align_up(T x, T alignment) {
  return ceil_div(x, alignment) * alignment;
}

template <auto kValue>
using constant = std::integral_constant<decltype(kValue), kValue>;

}  // namespace mla_fp8
