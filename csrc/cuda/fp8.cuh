#pragma once
// Eight elements at a time between bf16 (four words) and e4m3 (two words): the instructions of sm_89 and newer,
// elsewhere and for e4m3fnuz the code of common/fp8.h. Both give the same bytes.
#include "common/dtype.h"
#include "common/fp8.h"
#include "cuda/vec.cuh"

namespace mla_fp8::gpu {

#if __CUDA_ARCH__ >= 890
template <Format kFormat>
inline constexpr bool kHasE4m3Instructions = kFormat == Format::kE4m3fn;
#else
template <Format kFormat>
inline constexpr bool kHasE4m3Instructions = false;
#endif

__device__ __forceinline__ float low_bf16(uint32_t pair) { return bits_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return bits_float(pair & 0xffff0000u); }

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// value = e4m3 * scale in float, rounded once.
template <Format kFormat>
__device__ __forceinline__ Words<4> decode8(const Words<2>& codes, float scale) {
  Words<4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = codes[i / 2] >> (i % 2 * 16);
    float low, high;
    if constexpr (kHasE4m3Instructions<kFormat>) {
      asm("{\n.reg .b32 h;\n.reg .b16 l, u;\ncvt.rn.f16x2.e4m3x2 h, %2;\nmov.b32 {l, u}, h;\n"
          "cvt.f32.f16 %0, l;\ncvt.f32.f16 %1, u;\n}"
          : "=f"(low), "=f"(high)
          : "h"(static_cast<uint16_t>(pair)));
    } else {
      low = e4m3_to_float<kFormat>(static_cast<uint8_t>(pair));
      high = e4m3_to_float<kFormat>(static_cast<uint8_t>(pair >> 8));
    }
    out[i] = pack_bf16(low * scale, high * scale);
  }
  return out;
}
template <Format kFormat>
__device__ __forceinline__ Words<4> decode8(const Words<4>& bf16, float) {
  return bf16;
}

// min and max that keep a NaN.
__device__ __forceinline__ float clamp(float x, float limit) {
  float y;
  asm("{\n.reg .f32 t;\nmin.NaN.f32 t, %1, %2;\nmax.NaN.f32 %0, t, %3;\n}"
      : "=f"(y)
      : "f"(x), "f"(limit), "f"(-limit));
  return y;
}

// Eight floats, as bf16 inputs under `map` give them, to codes. `map` keeps the sign of a NaN's input.
template <Format kFormat, class Map>
__device__ __forceinline__ Words<2> encode8(const Words<4>& x, float fp8_max, const Map& map) {
  Words<2> codes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t a = x[2 * i], b = x[2 * i + 1];
    const float values[4] = {map(low_bf16(a)), map(high_bf16(a)), map(low_bf16(b)), map(high_bf16(b))};
    if constexpr (kHasE4m3Instructions<kFormat>) {
      uint16_t pairs[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(pairs[j])
            : "f"(clamp(values[2 * j + 1], fp8_max)), "f"(clamp(values[2 * j], fp8_max)));
      // The instruction drops a NaN's sign: take all signs from the inputs.
      const uint32_t signs = __byte_perm(a, b, 0x7531) & 0x80808080u;
      codes[i] = pairs[0] | uint32_t{pairs[1]} << 16 | signs;
    } else {
      codes[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[i] |= uint32_t{float_to_e4m3<kFormat>(values[j], fp8_max)} << (8 * j);
    }
  }
  return codes;
}

// The largest finite magnitude of eight bf16, as the bits of a bf16.
__device__ __forceinline__ uint32_t finite_amax8(const Words<4>& x) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)  // x * 0 + x turns an infinity into NaN, which max drops
    asm("{\n.reg .b32 t, zero;\nmov.b32 zero, 0;\nfma.rn.bf16x2 t, %1, zero, %1;\nabs.bf16x2 t, t;\n"
        "max.bf16x2 %0, %0, t;\n}"
        : "+r"(amax)
        : "r"(x[i]));
  return max(amax & 0xffffu, amax >> 16);
}

// Eight elements of kDtype as bf16; zeros without an access unless `wanted`.
template <Dtype kDtype>
__device__ __forceinline__ Words<4> load_bf16x8(const void* p, bool wanted) {
  const Words<4> first = load_if<4>(p, wanted);
  if constexpr (kDtype == Dtype::kBf16) return first;
  Words<4> out;
  if constexpr (kDtype == Dtype::kF32) {
    const Words<4> second = load_if<4>(static_cast<const float*>(p) + 4, wanted);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Words<4>& w = i < 2 ? first : second;
      out[i] = pack_bf16(bits_float(w[i % 2 * 2]), bits_float(w[i % 2 * 2 + 1]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      asm("{\n.reg .b16 l, u;\nmov.b32 {l, u}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, u;\n}"
          : "=f"(low), "=f"(high)
          : "r"(first[i]));
      out[i] = pack_bf16(low, high);
    }
  }
  return out;
}

}  // namespace mla_fp8::gpu
