#pragma once
// CUDA's vocabulary on CDNA GPUs, as far as our kernels use it. It is made of clang's builtins alone: no ROCm
// headers, no device libraries. The compiler includes it before everything else (-include).
//
// A logical warp has 32 lanes on CDNA too; two warps share a wave of 64 lanes.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define MLA_FP8_PTX 0
#define MLA_FP8_WAVE64 1

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(threads, ...) __attribute__((amdgpu_flat_work_group_size(1, threads)))
// Two waves on a SIMD, so 256 registers each: clang would take more for a block of four waves.
#if defined(__gfx90a__)
#define MLA_256_REGISTERS __attribute__((amdgpu_waves_per_eu(2)))
#else
#define MLA_256_REGISTERS
#endif
#define MLA_SHARED(Type, name) __shared__ Type name
#define MLA_HIP_DEVICE static __device__ __forceinline__

// Functions of hip/runtime.cpp to which clang's code for the host side of a kernel refers.
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern "C" int __hipPopCallConfiguration(dim3*, dim3*, size_t*, void**);
extern "C" int __hipPushCallConfiguration(dim3, dim3, size_t, void*);
extern "C" int hipLaunchKernel(const void*, dim3, dim3, void**, size_t, void*);

// ---- functions of the C library that device code calls ---------------------------------------------------

MLA_HIP_DEVICE void* memcpy(void* to, const void* from, size_t n) { return __builtin_memcpy(to, from, n); }
MLA_HIP_DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
MLA_HIP_DEVICE float fminf(float a, float b) { return __builtin_fminf(a, b); }
MLA_HIP_DEVICE float fabsf(float x) { return __builtin_fabsf(x); }
MLA_HIP_DEVICE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MLA_HIP_DEVICE float expf(float x) { return __builtin_expf(x); }
MLA_HIP_DEVICE float logf(float x) { return __builtin_logf(x); }
MLA_HIP_DEVICE float exp2f(float x) { return __builtin_exp2f(x); }
MLA_HIP_DEVICE float log2f(float x) { return __builtin_log2f(x); }
// Products, sums and differences that are rounded by themselves: clang would contract a product and a sum.
MLA_HIP_DEVICE float __fmul_rn(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
MLA_HIP_DEVICE float __fadd_rn(float a, float b) {
#pragma clang fp contract(off)
  return a + b;
}
MLA_HIP_DEVICE float __fsub_rn(float a, float b) {
#pragma clang fp contract(off)
  return a - b;
}
MLA_HIP_DEVICE float __fdiv_rn(float a, float b) { return a / b; }
// Computed in double, the result is the nearest float for every mantissa (tried: all 2^24).
MLA_HIP_DEVICE float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}
template <class T>
MLA_HIP_DEVICE T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
MLA_HIP_DEVICE T max(T a, T b) {
  return a < b ? b : a;
}
MLA_HIP_DEVICE int __popc(uint32_t x) { return __builtin_popcount(x); }
MLA_HIP_DEVICE int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
MLA_HIP_DEVICE int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
MLA_HIP_DEVICE int __clzll(uint64_t x) {
  const auto high = static_cast<uint32_t>(x >> 32);
  return high ? __clz(high) : 32 + __clz(static_cast<uint32_t>(x));
}
MLA_HIP_DEVICE uint64_t __umul64hi(uint64_t a, uint64_t b) {
  const uint64_t a0 = a & 0xffffffffu, a1 = a >> 32, b0 = b & 0xffffffffu, b1 = b >> 32;
  const uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), other = a0 * b1 + (middle & 0xffffffffu);
  return a1 * b1 + (middle >> 32) + (other >> 32);
}

// ---- threads ---------------------------------------------------------------------------------------------

struct MlaIndex {
  unsigned x;
};
MLA_HIP_DEVICE MlaIndex mla_thread_index() { return {__builtin_amdgcn_workitem_id_x()}; }
MLA_HIP_DEVICE MlaIndex mla_block_index() { return {__builtin_amdgcn_workgroup_id_x()}; }
MLA_HIP_DEVICE MlaIndex mla_block_dim() { return {__builtin_amdgcn_workgroup_size_x()}; }
#define threadIdx mla_thread_index()
#define blockIdx mla_block_index()
#define blockDim mla_block_dim()

// Orders shared memory alone: inside a block no kernel here passes data through global memory.
MLA_HIP_DEVICE void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// Orders writes of lanes of a wave before reads by other lanes of it.
MLA_HIP_DEVICE void __syncwarp() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

MLA_HIP_DEVICE int mla_lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }

// Returns x and hides from the compiler where it comes from.
MLA_HIP_DEVICE int mla_opaque(int x) {
  asm volatile("" : "+v"(x));
  return x;
}
// x of lane `lane` of the wave; the lane is known when compiling.
MLA_HIP_DEVICE uint32_t mla_read_uniform_lane(uint32_t x, int lane) {
  return static_cast<uint32_t>(__builtin_amdgcn_readlane(static_cast<int>(x), lane));
}
// Applies fn to each word of x.
template <class T, class Fn>
MLA_HIP_DEVICE T mla_each_word(T x, const Fn& fn) {
  static_assert(sizeof(T) % 4 == 0);
  struct Parts {
    int part[sizeof(T) / 4];
  };
  Parts parts = __builtin_bit_cast(Parts, x);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) parts.part[i] = fn(parts.part[i]);
  return __builtin_bit_cast(T, parts);
}
// x of lane `lane` of the wave.
template <class T>
MLA_HIP_DEVICE T mla_read_lane(T x, int lane) {
  return mla_each_word(x, [&](int word) { return __builtin_amdgcn_ds_bpermute(lane * 4, word); });
}
// A permutation as an operand of the instruction that reads it (DPP): it takes none itself, and no LDS.
template <int kControl>
MLA_HIP_DEVICE int mla_permuted(int x) {
  return __builtin_amdgcn_mov_dpp(x, kControl, 15, 15, true);
}
template <class T>
MLA_HIP_DEVICE T __shfl_xor_sync(uint32_t, T x, int mask) {
  constexpr int kXor1 = 0xb1, kXor2 = 0x4e, kXor3 = 0x1b, kXor7 = 0x141, kXor8 = 0x128;
  return mla_each_word(x, [&](int word) {
    if (__builtin_constant_p(mask)) {
      if (mask == 1) return mla_permuted<kXor1>(word);
      if (mask == 2) return mla_permuted<kXor2>(word);
      if (mask == 4) return mla_permuted<kXor3>(mla_permuted<kXor7>(word));
      if (mask == 8) return mla_permuted<kXor8>(word);
    }
    return __builtin_amdgcn_ds_bpermute((mla_lane() ^ mask) * 4, word);
  });
}
template <class T>
MLA_HIP_DEVICE T __shfl_sync(uint32_t, T x, int lane) {
  return mla_read_lane(x, (mla_lane() & 32) | lane);
}
template <class T>
MLA_HIP_DEVICE T __shfl_up_sync(uint32_t, T x, int delta) {
  const int lane = mla_lane();
  return mla_read_lane(x, lane % 32 >= delta ? lane - delta : lane);
}
// Bit i: x of lane i of the wave.
MLA_HIP_DEVICE uint64_t mla_wave_ballot(bool x) { return __builtin_amdgcn_ballot_w64(x); }
MLA_HIP_DEVICE uint32_t __ballot_sync(uint32_t, bool x) {
  return static_cast<uint32_t>(__builtin_amdgcn_ballot_w64(x) >> (mla_lane() & 32));
}
MLA_HIP_DEVICE bool __any_sync(uint32_t mask, bool x) { return __ballot_sync(mask, x) != 0; }
MLA_HIP_DEVICE uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) x = max(x, __shfl_xor_sync(mask, x, offset));
  return x;
}
MLA_HIP_DEVICE int32_t __reduce_add_sync(uint32_t mask, int32_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) x += __shfl_xor_sync(mask, x, offset);
  return x;
}

MLA_HIP_DEVICE int32_t atomicAdd(int32_t* p, int32_t x) {
  return __scoped_atomic_fetch_add(p, x, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};

template <class T>
MLA_HIP_DEVICE T __ldg(const T* p) {
  return *p;
}

// A pointer to global memory. The compiler cannot tell for one that was in shared memory or in other lanes. A
// generic load would then count as one of shared memory, too, and each barrier would wait for it.
template <class T>
MLA_HIP_DEVICE auto mla_global_pointer(const T* p) {
  return (__attribute__((address_space(1))) const T*)p;
}

// Converts between a pointer to shared memory and its address there.
MLA_HIP_DEVICE uint32_t mla_shared_address(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p));  // the lower half of a generic pointer
}
template <class T>
MLA_HIP_DEVICE auto mla_shared_pointer(uint32_t address) {  // not generic, which would tell clang less
  return (__attribute__((address_space(3))) T*)(uintptr_t)address;
}

#include "common/dtype.h"
#include "hip/e4m3.h"

namespace mla_fp8::gpu {

inline constexpr int kWaveSize = 64;

MLA_HIP_DEVICE float fast_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
MLA_HIP_DEVICE float fast_log2(float x) { return __builtin_amdgcn_logf(x); }
MLA_HIP_DEVICE float fast_divide(float x, float y) { return x / y; }

// ---- matrices --------------------------------------------------------------------------------------------

// acc += A B. acc[i] of lane l is element (4 * (l / 16) + i, l % 16). A lane has four k of one row of A and
// of one column of B.
template <Dtype kDtype, class Floats, class Words>
__device__ __forceinline__ void mfma_16x16x16(Floats& acc, const Words& a, const Words& b) {
  typedef short Bf16s __attribute__((ext_vector_type(4)));
  typedef _Float16 Halves __attribute__((ext_vector_type(4)));
  if constexpr (kDtype == Dtype::kF16)
    acc = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves, a), __builtin_bit_cast(Halves, b),
                                                acc, 0, 0, 0);
  else
    acc = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Bf16s, a),
                                                    __builtin_bit_cast(Bf16s, b), acc, 0, 0, 0);
}

// ---- FP8 -------------------------------------------------------------------------------------------------
// v_cvt_pk_f32_fp8 reads e4m3fnuz on gfx942 and e4m3fn on gfx950; gfx90a has no such instruction.

#if defined(__gfx942__)
#define MLA_HIP_FP8_INSTRUCTIONS 1
inline constexpr Format kNativeE4m3 = Format::kE4m3fnuz;
#elif defined(__gfx950__)
#define MLA_HIP_FP8_INSTRUCTIONS 1
inline constexpr Format kNativeE4m3 = Format::kE4m3fn;
#else
#define MLA_HIP_FP8_INSTRUCTIONS 0
inline constexpr Format kNativeE4m3 = Format::kBf16;  // no format
#endif
template <Format kFormat>
inline constexpr bool kHasE4m3Instructions = kFormat == kNativeE4m3;
// Whether codes are read as e4m3fnuz codes of half their value (halve_e4m3fn).
template <Format kFormat>
inline constexpr bool kAreHalved = kFormat == Format::kE4m3fn && kNativeE4m3 == Format::kE4m3fnuz;

// Four codes as floats, exactly; without kKeepsMinusZero, -0 may become 0.
template <Format kFormat, bool kKeepsMinusZero = true>
MLA_HIP_DEVICE Float4 e4m3x4_to_float(uint32_t codes) {
#if MLA_HIP_FP8_INSTRUCTIONS
  if constexpr (kHasE4m3Instructions<kFormat> || kAreHalved<kFormat>) {
    const auto word = static_cast<int>(kAreHalved<kFormat> ? halve_e4m3fn(codes) : codes);
    const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(word, false);
    const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(word, true);
    const Float4 values{{low[0], low[1], high[0], high[1]}};
    if constexpr (kAreHalved<kFormat>) return undo_halving<kKeepsMinusZero>(codes, values);
    else return values;
  }
#endif
  return {{widen_e4m3<kFormat>(codes, 0), widen_e4m3<kFormat>(codes, 1), widen_e4m3<kFormat>(codes, 2),
           widen_e4m3<kFormat>(codes, 3)}};
}

// Four codes times a scale below 2^127; -0 may become 0. Codes that are halved must not be NaN; the scale
// makes up for the half.
template <Format kFormat>
MLA_HIP_DEVICE Float4 e4m3x4_times(uint32_t codes, float scale) {
  typedef float Floats __attribute__((ext_vector_type(4)));
  Float4 values;
  if constexpr (kAreHalved<kFormat>) {
    values = e4m3x4_to_float<kNativeE4m3>(drop_minus_zeros(codes));
    scale *= 2.0f;
  } else {
    values = e4m3x4_to_float<kFormat, false>(codes);
  }
  return __builtin_bit_cast(Float4, __builtin_bit_cast(Floats, values) * scale);
}

// The lower halves, or the upper halves, of two words.
MLA_HIP_DEVICE uint32_t lower_halves(uint32_t a, uint32_t b) {
  return __builtin_amdgcn_perm(b, a, 0x05040100u);
}
MLA_HIP_DEVICE uint32_t upper_halves(uint32_t a, uint32_t b) {
  return __builtin_amdgcn_perm(b, a, 0x07060302u);
}

// Rounds two floats to bf16; neither may be NaN.
MLA_HIP_DEVICE uint32_t round_to_bf16(float low, float high) {
#if defined(__gfx950__)
  typedef __bf16 Bf16s __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, Bf16s{static_cast<__bf16>(low), static_cast<__bf16>(high)});
#else
  const auto rounded = [](float x) { return float_bits(x) + 0x7fffu + (float_bits(x) >> 16 & 1u); };
  return upper_halves(rounded(low), rounded(high));
#endif
}

// Packs two floats that are bf16 or fp16 values already.
template <Dtype kDtype>
MLA_HIP_DEVICE uint32_t pack_exact(float low, float high) {
  if constexpr (kDtype == Dtype::kBf16) return upper_halves(float_bits(low), float_bits(high));
  else return __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(low, high));
}

}  // namespace mla_fp8::gpu
