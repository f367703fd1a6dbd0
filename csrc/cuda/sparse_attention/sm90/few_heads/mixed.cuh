#pragma once
// Logits over rows of two caches, which were made rows of one kind (mixed_row.cuh). They are computed as in
// products.cuh, but scales of 16 dims multiply the fragments of K. So accumulators run over all dims of a
// kind.
#include "cuda/device/convert.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/few_heads/products.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

template <class C>
__device__ __forceinline__ void Consumer<C>::attend_to_keys(int stage, Block& b) const {
  const int e = reinterpret_cast<const int*>(smem_ + MLA_SMEM(C, stage_exponents))[stage];
  if constexpr (C::kWgmma) mixed_logits_wgmma(ring_.stage(stage), e, b.s);
  else mixed_logits_mma(ring_.stage(stage), e, b.s);
  b.unscale = power_of_two(-e);
  b.e[0] = b.e[1] = static_cast<float>(e);
  const uint8_t* const valid = smem_ + MLA_SMEM(C, valid) + stage * kStageRows;
  const uint32_t state[2] = {valid[g_], valid[g_ + 8]};
  if (__any_sync(kFullWarp, state[0] != kValidKey || state[1] != kValidKey)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (state[i] & kNanKey) b.e[i] = NAN;
      if (state[i]) continue;
      b.e[i] = -INFINITY;
#pragma unroll
      for (int n = 0; n < kOctets; ++n) b.s[n][2 * i] = b.s[n][2 * i + 1] = 0.0f;  // it may be NaN
    }
  }
}

// Units of 32 dims, the bf16 ones first, are loaded kAhead units ahead. Units and their halves have
// accumulators in turn: a product waits for none of the last three.
template <class C>
__device__ __forceinline__ void Consumer<C>::mixed_logits_mma(uint32_t rows, int e,
                                                              float (&s)[kOctets][4]) const {
  constexpr int kAhead = 2, kPlaces = kAhead + 1;
  constexpr int kBf16Units = R::kBf16Dims / 32, kUnits = R::kDims / 32;
  const uint32_t q_base = q_address() + lane_ * 16, row = rows + keys_by_dims_;
  uint4 q[kPlaces][kOctets];
  typename KeyFactors<R>::Words factors[kPlaces];
  uint32_t raw[kPlaces][2][4];  // the second of bf16 units only
  const auto fetch = [&](int i) {
    if (i >= kUnits) return;
    const int place = i % kPlaces, unit = i < kBf16Units ? R::kFp8Dims / 32 + i : i - kBf16Units;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) q[place][n] = load_shared_16(q_base + (unit * kOctets + n) * 512);
    if (i < kBf16Units) {
      ldmatrix_x4(raw[place][0], row + R::kBf16Offset + i * 64);
      ldmatrix_x4(raw[place][1], row + R::kBf16Offset + i * 64 + 32);
    } else {
      ldmatrix_x4(raw[place][0], row + unit * 32);
      factors[place] = KeyFactors<R>::load(rows, unit, g_);
    }
  };
  float acc[2][2][kOctets][4];
  const auto clear_all = [&] { clear(acc[0][0]), clear(acc[0][1]), clear(acc[1][0]), clear(acc[1][1]); };
  clear(s), clear_all();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool bf16 = i < kBf16Units;
    fetch(i + kAhead);
    auto& bytes = raw[i % kPlaces];
    uint32_t k[2][4];
    if (!bf16) {
      convert_keys(bytes[0], k[0], k[1]);
      KeyFactors<R>(factors[i % kPlaces], g_).apply(k[0], k[1]);
    }
    mma_unit(acc[i % 2], bf16, bf16 ? bytes : k, q[i % kPlaces]);
    if (i + 1 == kBf16Units) {
      add_scaled(s, acc[0][0], acc[0][1], 1.0f, 1.0f);
      add_scaled(s, acc[1][0], acc[1][1], 1.0f, 1.0f);
      clear_all();
    }
  }
  const float unit = power_of_two(e);
  add_scaled(s, acc[0][0], acc[0][1], unit, unit);
  add_scaled(s, acc[1][0], acc[1][1], unit, unit);
}

// Works as logits_wgmma, in parts of 64 dims, bf16 ones first. All parts of a kind have one sum.
template <class C>
__device__ __forceinline__ void Consumer<C>::mixed_logits_wgmma(uint32_t rows, int e,
                                                                float (&s)[kOctets][4]) const {
  constexpr int kPartDims = 64, kUnits = kPartDims / 32, kSteps = kPartDims / 16;
  constexpr int kBf16Parts = R::kBf16Dims / kPartDims, kParts = R::kDims / kPartDims;
  const uint64_t q = wgmma_descriptor(q_address(), C::kHeads * 16, 128);
  const uint32_t row = rows + keys_by_dims_;
  uint32_t k[2][kSteps][4], bytes[kUnits][4];
  typename KeyFactors<R>::Words factors[kUnits];
  float acc[2][kOctets][4];  // e4m3, bf16
  const auto fetch = [&](int part) {
    if (part < kBf16Parts) {
      fetch_bf16(k[part % 2], row, part);
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int unit = (part - kBf16Parts) * kUnits + i;
        ldmatrix_x4(bytes[i], row + unit * 32);
        factors[i] = KeyFactors<R>::load(rows, unit, g_);
      }
    }
  };
  static_assert(kBf16Parts <= 1, "fetching ahead overwrites nothing");
#pragma unroll
  for (int part = 0; part < kBf16Parts + 1; ++part) fetch(part);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const bool bf16 = part < kBf16Parts;
    const int step = bf16 ? R::kFp8Dims / 16 + part * kSteps : (part - kBf16Parts) * kSteps;
    if (!bf16) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        convert_keys(bytes[i], k[part % 2][2 * i], k[part % 2][2 * i + 1]);
        KeyFactors<R>(factors[i], g_).apply(k[part % 2][2 * i], k[part % 2][2 * i + 1]);
      }
      if (part + 1 < kParts) fetch(part + 1);
    }
    float (&a)[kOctets][4] = acc[bf16];
    pin_registers(a);
    wgmma_part(a, bf16, k[part % 2], q + step * kStepQ, part == 0 || part == kBf16Parts);
    if (part > 0) wgmma_wait<1>();  // the fragments of the part before are free again
  }
  wgmma_wait<0>();
  pin_registers(acc[0]);
  if constexpr (kBf16Parts > 0) pin_registers(acc[1]);
  const float unit = power_of_two(e);
#pragma unroll
  for (int n = 0; n < kOctets; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] = acc[0][n][c] * unit + (kBf16Parts > 0 ? acc[1][n][c] : 0.0f);
}

}  // namespace mla_fp8::gpu
