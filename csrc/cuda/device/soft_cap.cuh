#pragma once
#include "cuda/device/math.cuh"
#include "ops/paged_attention_ragged.h"

namespace mla_fp8::gpu {

// The capped logit in base 2, cap * tanh(y) * log2(e), where y is the logit to base e divided by cap.
__device__ __forceinline__ float soft_cap(float y, float cap) {
  const float square = y * y, series = y * (1.0f - square * (1.0f / 3 - square * (2.0f / 15)));
  const float quotient = 1.0f - fast_divide(2.0f, fast_exp2(2.0f * kLog2E * y) + 1.0f);  // 2 / (inf + 1) is 0
  return cap * (fabsf(y) < kSmallTanh ? series : quotient) * kLog2E;
}

}  // namespace mla_fp8::gpu
