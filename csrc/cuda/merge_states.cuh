#pragma once
// A warp adds up a head's partial results, weighted by their lse. `States` has
//
//   count, attn_sink, log_base    of results; -inf without a sink; ln of the base of lse
//   lse(i)                        as counted_lse has it
//   row(i)                        the head's values in result i
//   kAtOnce                       results whose rows are loaded together
#include <cmath>

#include "cuda/device/convert.cuh"
#include "cuda/device/global.cuh"
#include "ops/merge_partial_states.h"

namespace mla_fp8::gpu {

// The weights of results: exp(lse - largest) / divisor, so that nothing overflows. `sum` is that of the
// numerators; the divisor adds the sink's.
struct MergeWeights {
  float largest, sum, divisor;

  template <class States>
  __device__ __forceinline__ explicit MergeWeights(const States& states) : largest(-INFINITY), sum(0) {
#pragma unroll 2
    for (int i = 0; i < states.count; ++i) largest = fmaxf(largest, states.lse(i));
#pragma unroll 1
    for (int i = 0; i < states.count; ++i) sum += relative(states, i);
    divisor = sum + (is_empty() ? 0 : expf(states.attn_sink - largest * states.log_base));
  }
  __device__ __forceinline__ bool is_empty() const { return largest == -INFINITY; }
  template <class States>
  __device__ __forceinline__ float relative(const States& states, int i) const {
    return is_empty() ? 0 : expf((states.lse(i) - largest) * states.log_base);
  }
  template <class States>
  __device__ __forceinline__ float operator()(const States& states, int i) const {
    return is_empty() || i >= states.count ? 0 : relative(states, i) / divisor;
  }
  __device__ __forceinline__ float lse(float log_base) const {
    return is_empty() ? largest : largest + logf(sum) / log_base;
  }
};

template <Dtype kDtype>
using MergeStorage = std::conditional_t<kDtype == Dtype::kF32, uint32_t, uint16_t>;

// Adds a word (a float, or two 16-bit floats) times weight to its elements' sums; makes such a word of sums.
template <Dtype kDtype>
__device__ __forceinline__ void add_word(uint32_t word, float weight, float* sums) {
  if constexpr (kDtype == Dtype::kF32) {
    sums[0] += bits_float(word) * weight;
  } else {
    const float2 x = unpack<kDtype>(word);
    sums[0] += x.x * weight;
    sums[1] += x.y * weight;
  }
}
template <Dtype kDtype>
__device__ __forceinline__ uint32_t word_of(const float* sums) {
  if constexpr (kDtype == Dtype::kF32) return float_bits(sums[0]);
  else return pack<kDtype>({sums[0], sums[1]});
}

// Writes the weighted sum of the results and returns the lse of all. All lanes call it. kVector: rows and out
// are 16-byte aligned and multiples of 16 bytes. A result with weight 0 is not read.
template <Dtype kDtype, bool kVector, class States>
__device__ __forceinline__ float merge_head(const States& states, int64_t head_dim,
                                            MergeStorage<kDtype>* out) {
  using T = MergeStorage<kDtype>;
  constexpr int kStatesAtOnce = kVector ? States::kAtOnce : 1, kPasses = kVector ? 2 : 1;  // in flight
  constexpr int kWords = kVector ? 4 : 1, kWordDim = kDtype == Dtype::kF32 ? 1 : 2;
  constexpr int kDim = kVector ? kWords * kWordDim : 1, kPassDim = kDim * kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const MergeWeights weights(states);
  for (int64_t first = lane * kDim; first < head_dim; first += kPasses * kPassDim) {
    float sums[kPasses][kWords * kWordDim];
    const auto set_sums = [&](float to) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (float& sum : sums[pass]) sum = to;
    };
    set_sums(-0.0f);  // -0 + x is x, bit for bit
    bool any = false;
    for (int i = 0; i < states.count; i += kStatesAtOnce) {
      float weight[kStatesAtOnce];
      Words<kWords> x[kStatesAtOnce][kPasses];
#pragma unroll
      for (int j = 0; j < kStatesAtOnce; ++j) {
        weight[j] = weights(states, i + j);
        any |= weight[j] != 0;
        const T* row = static_cast<const T*>(states.row(i + j < states.count ? i + j : i));
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int64_t element = first + pass * kPassDim;
          const bool wanted = weight[j] != 0 && element < head_dim;
          if constexpr (kVector) x[j][pass] = load_if<4>(row + element, wanted);
          else x[j][pass][0] = wanted ? row[element] : 0;
        }
      }
#pragma unroll
      for (int j = 0; j < kStatesAtOnce; ++j) {
        if (weight[j] == 0) continue;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
          for (int word = 0; word < kWords; ++word)
            add_word<kDtype>(x[j][pass][word], weight[j], sums[pass] + word * kWordDim);
      }
    }
    if (!any) set_sums(0);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int64_t element = first + pass * kPassDim;
      Words<kWords> merged;
#pragma unroll
      for (int word = 0; word < kWords; ++word) merged[word] = word_of<kDtype>(sums[pass] + word * kWordDim);
      if (element >= head_dim) continue;
      if constexpr (kVector) store(out + element, merged);
      else out[element] = static_cast<T>(merged[0]);
    }
  }
  return weights.lse(states.log_base);
}

}  // namespace mla_fp8::gpu
