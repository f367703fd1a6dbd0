#pragma once
// What a team does with rows of two caches, which were made rows of one kind (mixed_row.cuh): both products
// as in products.cuh, with scales of 16 dims. Those of K multiply its fragments: accumulators need no
// attention then until all dims are in. Those of V multiply the weights.
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

// Units of 32 dims, the bf16 ones first; what a unit reads is fetched kAhead units before. Units and their
// halves have accumulators in turn: a product waits for none of the last three.
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
  const auto clear = [&] {
#pragma unroll
    for (int i = 0; i < 16 * kOctets; ++i)
      acc[i / 8 / kOctets][i / 4 / kOctets % 2][i / 4 % kOctets][i % 4] = 0.0f;
  };
#pragma unroll
  for (int n = 0; n < kOctets; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
  clear();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool bf16 = i < kBf16Units;
    fetch(i + kAhead);
    const auto& unit_q = q[i % kPlaces];
    auto& unit_raw = raw[i % kPlaces];
    uint32_t k[2][4];
    if (!bf16) {
      convert_keys(unit_raw[0], k[0], k[1]);
      KeyFactors<R>(factors[i % kPlaces], g_).apply(k[0], k[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const uint4& x = unit_q[(half * kOctets + n) / 2];
        const bool second = (half * kOctets + n) % 2;
        if (bf16) mma_bf16(acc[i % 2][half][n], unit_raw[half], second ? x.z : x.x, second ? x.w : x.y);
        else mma_f16(acc[i % 2][half][n], k[half], second ? x.z : x.x, second ? x.w : x.y);
      }
    if (i + 1 == kBf16Units) {
      add_scaled(s, acc[0][0], acc[0][1], 1.0f, 1.0f);
      add_scaled(s, acc[1][0], acc[1][1], 1.0f, 1.0f);
      clear();
    }
  }
  const float unit = power_of_two(e);
  add_scaled(s, acc[0][0], acc[0][1], unit, unit);
  add_scaled(s, acc[1][0], acc[1][1], unit, unit);
}

// The four warps of a team at once, in parts of 64 dims, bf16 ones first: as logits_wgmma, but for one sum of
// all parts of a kind.
template <class C>
__device__ __forceinline__ void Consumer<C>::mixed_logits_wgmma(uint32_t rows, int e,
                                                                float (&s)[kOctets][4]) const {
  constexpr int kPartDims = 64, kUnits = kPartDims / 32, kSteps = kPartDims / 16;
  constexpr int kBf16Parts = R::kBf16Dims / kPartDims, kParts = R::kDims / kPartDims;
  const uint64_t q = wgmma_descriptor(q_address(), C::kHeads * 16, 128);
  constexpr int kStepQ = C::kHeads * 2;  // of the descriptor's address
  const uint32_t row = rows + keys_by_dims_;
  uint32_t k[2][kSteps][4], bytes[kUnits][4];
  typename KeyFactors<R>::Words factors[kUnits];
  float acc[2][kOctets][4];  // e4m3, bf16
  const auto fetch = [&](int part) {
    if (part < kBf16Parts) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ldmatrix_x4(k[part % 2][i], row + R::kBf16Offset + (part * kPartDims + i * 16) * 2);
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
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const bool first = i == 0 && (part == 0 || part == kBf16Parts);
      if (bf16) wgmma_bf16(a, k[part % 2][i], q + (step + i) * kStepQ, !first);
      else wgmma_f16(a, k[part % 2][i], q + (step + i) * kStepQ, !first);
    }
    wgmma_commit();
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

// As accumulate_block; the scales lie behind each stage's rows.
template <class C>
template <bool kLastIsBf16>
__device__ __forceinline__ void Consumer<C>::accumulate_mixed_block(int first_stage, int buffer) {
  constexpr int kFp8Chunks = C::kChunks - kLastIsBf16, kUnits = kFp8Chunks * 2;
  const int first_chunk = member_ * C::kChunks;
  const uint32_t rows = ring_.stage(first_stage % C::kStages);
  const uint32_t values = rows + keys_by_dims_ + first_chunk * kChunkDims;
  const uint32_t factors_at =
      value_factors_at(rows + R::kTableOffset, t_) + first_chunk * (kChunkDims / 32) * R::kUnitBytes;
  uint32_t bytes[2][4];
  uint4 factors[2];
  const auto fetch = [&](int m, int unit) {  // 32 dims
    ldmatrix_x4_trans(bytes[unit % 2], values + m * C::kStageBytes + unit * 32);
    factors[unit % 2] = load_shared_16(factors_at + m * C::kStageBytes + unit * R::kUnitBytes);
  };
  PairWeights weights[2];
  const auto load_weights = [&](int pair) {
    const uint32_t at = ring_.smem + buffer * C::kPBytes + weights_row_ + pair * 64;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const uint32_t offset = at + n * kOctetHeads * C::kPPitch;
      ldmatrix_x4(weights[pair % 2].fp8[n], offset + MLA_SMEM(C, weights_fp8));
      if constexpr (kLastIsBf16) ldmatrix_x4(weights[pair % 2].bf16[n], offset + MLA_SMEM(C, weights_bf16));
    }
  };
  load_weights(0);
  if (kUnits > 0) fetch(0, 0);
  static_assert(kUnits % 2 == 0, "bytes of the next stage's first unit");
#pragma unroll
  for (int m = 0; m < kMembers; ++m) {  // stages
    const int half = m % 2;
    const PairWeights& w = weights[m / 2 % 2];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint4 x = factors[u % 2];
      if (u + 1 < kUnits) fetch(m, u + 1);
      else if (m + 1 < kMembers) fetch(m + 1, 0);
      uint32_t v[2][4];
      convert_values(bytes[u % 2], v[0], v[1]);
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const uint32_t w0 = w.fp8[n][2 * half], w1 = w.fp8[n][2 * half + 1];
        mma_f16(out_[u / 2][u % 2 * 2][n], v[0], mul_f16x2(w0, x.x), mul_f16x2(w1, x.y));
        mma_f16(out_[u / 2][u % 2 * 2 + 1][n], v[1], mul_f16x2(w0, x.z), mul_f16x2(w1, x.w));
      }
    }
#pragma unroll
    for (int chunk = kFp8Chunks; chunk < C::kChunks; ++chunk)
      accumulate_bf16(chunk, rows + m * C::kStageBytes + (first_chunk + chunk - R::kFp8Chunks) * 128,
                      [&](float (&o)[kOctets][4], const uint32_t (&v)[4]) {
#pragma unroll
                        for (int n = 0; n < kOctets; ++n)
                          mma_bf16(o[n], v, w.bf16[n][2 * half], w.bf16[n][2 * half + 1]);
                      });
    if (half == 1) {
      if (m + 1 < kMembers) load_weights(m / 2 + 1);
      release(first_stage + m - 1, first_stage + m);
    }
  }
}

}  // namespace mla_fp8::gpu
