#pragma once
// What host and device code share before anything else.
#include <type_traits>

// Always inlined: the CPU kernels are compiled once per instruction set, and an out-of-line copy of a shared
// helper built for AVX-512 could be the one the linker keeps for every CPU.
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
