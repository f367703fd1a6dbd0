#pragma once
// CUDA's vocabulary on fibers (fibers.h), with the matrix instruction's exact lane layout. Included before
// everything else (-include).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "emulator/fibers.h"
#include "hip/e4m3.h"

#define MLA_FP8_PTX 0
#define MLA_FP8_WAVE64 1

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define MLA_SHARED(Type, name)    \
  static const char name##_tag{}; \
  Type& name = *static_cast<Type*>(::emulator::shared(&name##_tag, sizeof(Type), alignof(Type)))

struct MlaIndex {
  unsigned x;
};
#define threadIdx (MlaIndex{::emulator::thread_index()})
#define blockIdx (MlaIndex{::emulator::block_index()})
#define blockDim (MlaIndex{::emulator::block_dim()})

inline void __syncthreads() { ::emulator::block_barrier(); }

inline int mla_lane() { return static_cast<int>(::emulator::thread_index() % 32); }

// x of lane `lane` of the logical warp.
template <class T>
T mla_read_lane(T x, int lane) {
  uint32_t words[::emulator::kWords] = {};
  static_assert(sizeof(T) <= sizeof words);
  std::memcpy(words, &x, sizeof x);
  const uint32_t* all = ::emulator::exchange(words, 32);
  std::memcpy(&x, all + lane * ::emulator::kWords, sizeof x);
  return x;
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int mask) {
  return mla_read_lane(x, mla_lane() ^ mask);
}
template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
  return mla_read_lane(x, lane & 31);
}
inline int mla_opaque(int x) { return x; }
inline uint32_t mla_read_uniform_lane(uint32_t x, int lane) { return mla_read_lane(x, lane); }
template <class T>
T __shfl_up_sync(uint32_t, T x, int delta) {
  return mla_read_lane(x, mla_lane() >= delta ? mla_lane() - delta : mla_lane());
}
inline uint32_t __ballot_sync(uint32_t, bool x) {
  const uint32_t words[::emulator::kWords] = {x};
  const uint32_t* all = ::emulator::exchange(words, 32);
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= all[lane * ::emulator::kWords] << lane;
  return ballot;
}
inline bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
  for (int offset = 1; offset < 32; offset *= 2) x = std::max(x, __shfl_xor_sync(mask, x, offset));
  return x;
}
inline void __syncwarp() { __ballot_sync(0xffffffffu, true); }
inline int32_t __reduce_add_sync(uint32_t mask, int32_t x) {
  for (int offset = 1; offset < 32; offset *= 2) x += __shfl_xor_sync(mask, x, offset);
  return x;
}

using std::max;
using std::min;
inline float __fmul_rn(float a, float b) { return a * b; }  // the build contracts nothing
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int32_t atomicAdd(int32_t* p, int32_t x) {
  *p += x;
  return *p - x;
}
inline uint32_t atomicOr(uint32_t* p, uint32_t x) {
  const uint32_t before = *p;
  *p |= x;
  return before;
}
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};

template <class T>
T __ldg(const T* p) {
  return *p;
}

// Shared memory by its address there: from a variable that takes no room.
inline char* mla_shared_origin() {
  static const char tag{};
  return static_cast<char*>(::emulator::shared(&tag, 0, 16));
}
inline uint32_t mla_shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - mla_shared_origin());
}
template <class T>
T* mla_shared_pointer(uint32_t address) {
  return reinterpret_cast<T*>(mla_shared_origin() + static_cast<int32_t>(address));
}

namespace mla_fp8::gpu {

inline constexpr int kWaveSize = 64;

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }

// v_mfma_f32_16x16x16_bf16 and _f16: acc[i] of lane l is element (4 * (l / 16) + i, l % 16); a lane gives k
// 4 * (l / 16) and the next three of row, or column, l % 16. Sums of exact products in float.
template <Dtype kDtype, class Words>
void mfma_16x16x16(float (&acc)[4], const Words& a, const Words& b) {
  static_assert(::emulator::kWords == 8);
  float own[8];  // four of A, four of B
  for (int k = 0; k < 4; ++k) {
    own[k] = to_float<kDtype>(static_cast<uint16_t>(a[k / 2] >> (k % 2 * 16)));
    own[4 + k] = to_float<kDtype>(static_cast<uint16_t>(b[k / 2] >> (k % 2 * 16)));
  }
  uint32_t words[8];
  std::memcpy(words, own, sizeof words);
  const auto* all = reinterpret_cast<const float (*)[8]>(::emulator::exchange(words, 64));
  const int lane = static_cast<int>(::emulator::thread_index() % 64);
  for (int i = 0; i < 4; ++i) {
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += all[4 * (lane / 16) + i + k / 4 * 16][k % 4] * all[lane % 16 + k / 4 * 16][4 + k % 4];
    acc[i] += sum;
  }
}

template <Format kFormat, bool kKeepsMinusZero = true>
Float4 e4m3x4_to_float(uint32_t codes) {
  if (kFormat == Format::kE4m3fn && ::emulator::widens_fnuz_alone())
    return undo_halving<kKeepsMinusZero>(
        codes, e4m3x4_to_float<Format::kE4m3fnuz, kKeepsMinusZero>(halve_e4m3fn(codes)));
  return {{widen_e4m3<kFormat>(codes, 0), widen_e4m3<kFormat>(codes, 1), widen_e4m3<kFormat>(codes, 2),
           widen_e4m3<kFormat>(codes, 3)}};
}
template <Format kFormat>
Float4 e4m3x4_times(uint32_t codes, float scale) {
  const bool halves = kFormat == Format::kE4m3fn && ::emulator::widens_fnuz_alone();
  Float4 values = halves ? e4m3x4_to_float<Format::kE4m3fnuz>(halve_e4m3fn(codes))
                         : e4m3x4_to_float<kFormat, false>(codes);
  for (float& x : values.x) x *= halves ? scale * 2.0f : scale;
  return values;
}
template <Dtype kDtype>
uint32_t pack_exact(float low, float high) {
  return from_float<kDtype>(low) | uint32_t{from_float<kDtype>(high)} << 16;
}

}  // namespace mla_fp8::gpu
