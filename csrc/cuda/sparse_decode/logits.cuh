#pragma once
// S^T = K Q^T for the 16 tokens of a warp, all heads of the CTA. K comes from the raw rows by ldmatrix and
// one conversion; the scales of its tiles multiply float accumulators.
#include "cuda/sparse_decode/consumer.cuh"
#include "cuda/wgmma.cuh"

namespace mla_fp8::gpu {

// A fragments of 32 e4m3 dims: two k-steps of 16.
__device__ inline void convert_keys(const uint32_t (&bytes)[4], uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  e4m3_to_f16(bytes[0], a0[0], a0[2]);
  e4m3_to_f16(bytes[1], a0[1], a0[3]);
  e4m3_to_f16(bytes[2], a1[0], a1[2]);
  e4m3_to_f16(bytes[3], a1[1], a1[3]);
}
template <int kGroups>
__device__ void add_scaled(float (&s)[kGroups][4], const float (&acc)[kGroups][4], float s0, float s1) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] += acc[n][c] * (c < 2 ? s0 : s1);
}
template <int kGroups>
__device__ void add_scaled(float (&s)[kGroups][4], const float (&a)[kGroups][4], const float (&b)[kGroups][4],
                           float s0, float s1) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] += (a[n][c] + b[n][c]) * (c < 2 ? s0 : s1);
}

// One mma per 16 dims and head group. Shared-memory loads run one step ahead of the products. The two halves
// of 32 dims have accumulators of their own, and kInterleave tiles are worked on in turn: a product waits for
// none of the last three.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_mma(uint32_t rows, const TokenScales<R> (&scales)[2],
                                                        float (&s)[kGroups][4]) const {
  constexpr int kInterleave = kGroups == 1 ? 2 : 1, kBf16Steps = R::kBf16Dims / 16,
                kFp8Steps = R::kFp8Dims / 16;
  const uint32_t q_base = q_address() + lane_ * 8;
  uint2 q[2][kGroups];
  const auto load_step = [&](uint2(&dst)[kGroups], int step) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) dst[n] = load_shared_8(q_base + (step * kGroups + n) * 256);
  };
#pragma unroll
  for (int n = 0; n < kGroups; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;

  uint32_t bytes[2][4];
  load_step(q[0], kBf16Steps ? kFp8Steps : 0);
  if constexpr (kBf16Steps > 0) {
    float odd[kGroups][4] = {};  // the odd steps
    uint32_t k[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix_x4(k[i], rows + tokens_by_dims_ + R::kBf16Offset + i * 32);
#pragma unroll
    for (int i = 0; i < kBf16Steps; ++i) {
      if (i + 1 < kBf16Steps) load_step(q[(i + 1) % 2], kFp8Steps + i + 1);
      else if (kFp8Steps > 0) load_step(q[(i + 1) % 2], 0);
      if (i == kBf16Steps - 2 && kFp8Steps > 0) ldmatrix_x4(bytes[0], rows + tokens_by_dims_);
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        mma_bf16(i % 2 ? odd[n] : s[n], k[i % 4], q[i % 2][n].x, q[i % 2][n].y);
      if (i + 4 < kBf16Steps) ldmatrix_x4(k[i % 4], rows + tokens_by_dims_ + R::kBf16Offset + (i + 4) * 32);
    }
    add_scaled(s, odd, 1.0f, 1.0f);
  } else {
    ldmatrix_x4(bytes[0], rows + tokens_by_dims_);
  }
  static_assert(kBf16Steps % 2 == 0, "the e4m3 steps start at q[0]");

  constexpr int kUnitsPerTile = R::kTileDims / 32, kUnits = R::kFp8Dims / 32;
  constexpr int kUnitsPerRound = kInterleave * kUnitsPerTile;
  // Unit u: tiles of a round in turn; the last round may have fewer.
  const auto tiles_in_round = [](int round) {
    const int left = R::kNumTiles - round * kInterleave;
    return left < kInterleave ? left : kInterleave;
  };
  const auto tile_of = [&](int u) {
    return u / kUnitsPerRound * kInterleave + u % kUnitsPerRound % tiles_in_round(u / kUnitsPerRound);
  };
  const auto first_dim = [&](int u) {
    return tile_of(u) * R::kTileDims + u % kUnitsPerRound / tiles_in_round(u / kUnitsPerRound) * 32;
  };
  float acc[kInterleave][2][kGroups][4];
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int round = u / kUnitsPerRound, tile = tile_of(u) - round * kInterleave;
    if (u % kUnitsPerRound == 0) {
#pragma unroll
      for (int i = 0; i < kInterleave; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[i][n / kGroups][n % kGroups][c] = 0.0f;
    }
    if (u + 1 < kUnits) ldmatrix_x4(bytes[(u + 1) % 2], rows + tokens_by_dims_ + first_dim(u + 1));
    uint32_t k[2][4];
    convert_keys(bytes[u % 2], k[0], k[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0) load_step(q[1], first_dim(u) / 16 + 1);
      else if (u + 1 < kUnits) load_step(q[0], first_dim(u + 1) / 16);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) mma_f16(acc[tile][half][n], k[half], q[half][n].x, q[half][n].y);
    }
    if (u + 1 == kUnits || (u + 1) % kUnitsPerRound == 0) {
#pragma unroll
      for (int i = 0; i < tiles_in_round(round); ++i)
        add_scaled(s, acc[i][0], acc[i][1], scales[0][round * kInterleave + i],
                   scales[1][round * kInterleave + i]);
    }
  }
}

// The four warps of a team at once: Q is read once per 64 tokens, not once per 16. K fragments of 64 dims are
// prepared while the products of the 64 before are running.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_wgmma(uint32_t rows, const TokenScales<R> (&scales)[2],
                                                          float (&s)[kGroups][4]) const {
  constexpr int kBf16Parts = R::kBf16Dims / 64, kParts = R::kDims / 64;
  constexpr int kPartsPerTile = R::kTileDims / 64;
  const uint64_t q = wgmma_descriptor(q_address(), 512, 128);
  constexpr int kStepQ = 1024 / 16;  // of the descriptor's address
  uint32_t k[2][4][4];
  const auto load_part = [&](uint32_t (&a)[4][4], int part) {
    if (part < kBf16Parts) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ldmatrix_x4(a[i], rows + tokens_by_dims_ + R::kBf16Offset + part * 128 + i * 32);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t bytes[4];
        ldmatrix_x4(bytes, rows + tokens_by_dims_ + (part - kBf16Parts) * 64 + i * 32);
        convert_keys(bytes, a[2 * i], a[2 * i + 1]);
      }
    }
  };
  float acc[kGroups][4];
  if constexpr (kBf16Parts == 0)
#pragma unroll
    for (int n = 0; n < kGroups; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
  load_part(k[0], 0);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const bool bf16 = part < kBf16Parts;
    const int fp8_part = part - kBf16Parts;
    const int step = bf16 ? R::kFp8Dims / 16 + part * 4 : fp8_part * 4;
    pin_registers(bf16 ? s : acc);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (bf16) wgmma_bf16(s, k[part % 2][i], q + (step + i) * kStepQ, part > 0 || i > 0);
      else wgmma_f16(acc, k[part % 2][i], q + (step + i) * kStepQ, fp8_part % kPartsPerTile > 0 || i > 0);
    }
    wgmma_commit();
    if (part > 0) wgmma_wait<1>();  // the other fragments are free again
    if (part + 1 < kParts) load_part(k[(part + 1) % 2], part + 1);
    if (!bf16 && (fp8_part + 1) % kPartsPerTile == 0) {
      wgmma_wait<0>();
      pin_registers(s);
      pin_registers(acc);
      const int tile = fp8_part / kPartsPerTile;
      add_scaled(s, acc, scales[0][tile], scales[1][tile]);
    }
  }
  wgmma_wait<0>();
  pin_registers(s);
}

}  // namespace mla_fp8::gpu
