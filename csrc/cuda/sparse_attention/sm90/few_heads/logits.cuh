#pragma once
// S^T = K Q^T for the 16 tokens of a warp, all heads of the CTA. K comes from the raw rows by ldmatrix and
// one conversion; the scales of its tiles multiply float accumulators.
#include "cuda/device/convert.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"

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

// One mma per 16 dims and head group, in units of 32 dims; what a unit reads from shared memory is fetched
// kAhead units before. The two halves of a unit have accumulators of their own, and kInterleave tiles are
// worked on in turn: a product waits for none of the last three.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_mma(uint32_t rows, const TokenScales<R> (&scales)[2],
                                                        float (&s)[kGroups][4]) const {
  constexpr int kAhead = 2, kInterleave = kGroups == 1 ? 2 : 1;
  constexpr int kBf16Units = R::kBf16Dims / 32, kFp8Units = R::kFp8Dims / 32, kUnits = kBf16Units + kFp8Units;
  constexpr int kUnitsPerTile = R::kTileDims / 32, kUnitsPerRound = kInterleave * kUnitsPerTile;
  // Order of the units: bf16 ones, then those of a round's tiles in turn; the last round may have fewer.
  const auto tiles_in_round = [](int round) {
    const int left = R::kNumTiles - round * kInterleave;
    return left < kInterleave ? left : kInterleave;
  };
  const auto tile_of = [&](int u) {
    return u / kUnitsPerRound * kInterleave + u % kUnitsPerRound % tiles_in_round(u / kUnitsPerRound);
  };
  const auto first_dim = [&](int i) {
    if (i < kBf16Units) return R::kFp8Dims + i * 32;
    const int u = i - kBf16Units;
    return tile_of(u) * R::kTileDims + u % kUnitsPerRound / tiles_in_round(u / kUnitsPerRound) * 32;
  };

  const uint32_t q_base = q_address() + lane_ * 16;
  uint4 q[kAhead + 1][kGroups];
  uint32_t raw[kAhead + 1][2][4];  // the second of bf16 units only
  const auto fetch = [&](int i) {
    if (i >= kUnits) return;
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
      q[i % (kAhead + 1)][n] = load_shared_16(q_base + (first_dim(i) / 32 * kGroups + n) * 512);
    auto& dst = raw[i % (kAhead + 1)];
    const uint32_t row = rows + tokens_by_dims_;
    if (i < kBf16Units) {
      ldmatrix_x4(dst[0], row + R::kBf16Offset + i * 64);
      ldmatrix_x4(dst[1], row + R::kBf16Offset + i * 64 + 32);
    } else {
      ldmatrix_x4(dst[0], row + first_dim(i));
    }
  };

  float acc[kInterleave][2][kGroups][4];
#pragma unroll
  for (int n = 0; n < kGroups; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool bf16 = i < kBf16Units;
    const int u = i - kBf16Units, round = u / kUnitsPerRound,
              tile = bf16 ? 0 : tile_of(u) - round * kInterleave;
    if (i == 0 || (!bf16 && u % kUnitsPerRound == 0)) {
#pragma unroll
      for (int j = 0; j < kInterleave; ++j)
#pragma unroll
        for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[j][n / kGroups][n % kGroups][c] = 0.0f;
    }
    fetch(i + kAhead);
    const auto& unit_q = q[i % (kAhead + 1)];
    auto& unit_raw = raw[i % (kAhead + 1)];
    uint32_t k[2][4];
    if (!bf16) convert_keys(unit_raw[0], k[0], k[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const uint4& x = unit_q[(half * kGroups + n) / 2];
        const bool second = (half * kGroups + n) % 2;
        if (bf16) mma_bf16(acc[0][half][n], unit_raw[half], second ? x.z : x.x, second ? x.w : x.y);
        else mma_f16(acc[tile][half][n], k[half], second ? x.z : x.x, second ? x.w : x.y);
      }
    if (i + 1 == kBf16Units) add_scaled(s, acc[0][0], acc[0][1], 1.0f, 1.0f);
    if (!bf16 && (i + 1 == kUnits || (u + 1) % kUnitsPerRound == 0)) {
#pragma unroll
      for (int j = 0; j < tiles_in_round(round); ++j)
        add_scaled(s, acc[j][0], acc[j][1], scales[0][round * kInterleave + j],
                   scales[1][round * kInterleave + j]);
    }
  }
}

// The four warps of a team at once: Q is read once per 64 tokens, not once per 16, and by the tensor cores
// themselves. In parts of 64 dims: bytes are fetched a part ahead of their conversion, which goes on while
// the products of the part before are running; a tile's sum is taken up once the next has begun.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_wgmma(uint32_t rows, const TokenScales<R> (&scales)[2],
                                                          float (&s)[kGroups][4]) const {
  constexpr int kBf16Parts = R::kBf16Dims / 64, kParts = R::kDims / 64;
  constexpr int kPartsPerTile = R::kTileDims / 64;
  const uint64_t q = wgmma_descriptor(q_address(), C::kHeads * 16, 128);
  constexpr int kStepQ = C::kHeads * 2;  // of the descriptor's address
  const uint32_t row = rows + tokens_by_dims_;
  uint32_t k[2][4][4], bytes[2][4];
  float acc[2][kGroups][4];  // of tiles in turn; bf16 dims come first and count as one
  const auto fetch = [&](int part) {
    if (part < kBf16Parts) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ldmatrix_x4(k[part % 2][i], row + R::kBf16Offset + part * 128 + i * 32);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(bytes[i], row + (part - kBf16Parts) * 64 + i * 32);
    }
  };
  const auto tile_of = [&](int part) { return part < kBf16Parts ? -1 : (part - kBf16Parts) / kPartsPerTile; };
  const auto finish_tile = [&](int tile) {
    float (&a)[kGroups][4] = acc[(tile + 1) % 2];
    pin_registers(a);
    if (tile >= 0) add_scaled(s, a, scales[0][tile], scales[1][tile]);
    else add_scaled(s, a, 1.0f, 1.0f);
  };
#pragma unroll
  for (int n = 0; n < kGroups; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
  fetch(0);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const bool bf16 = part < kBf16Parts;
    const int tile = tile_of(part), step = bf16 ? R::kFp8Dims / 16 + part * 4 : (part - kBf16Parts) * 4;
    if (!bf16)
#pragma unroll
      for (int i = 0; i < 2; ++i) convert_keys(bytes[i], k[part % 2][2 * i], k[part % 2][2 * i + 1]);
    if (part + 1 < kParts && !(part + 1 < kBf16Parts)) fetch(part + 1);
    float (&a)[kGroups][4] = acc[(tile + 1) % 2];
    const bool new_tile = part == 0 || tile_of(part - 1) != tile;
    pin_registers(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (bf16) wgmma_bf16(a, k[part % 2][i], q + (step + i) * kStepQ, !new_tile || i > 0);
      else wgmma_f16(a, k[part % 2][i], q + (step + i) * kStepQ, !new_tile || i > 0);
    }
    wgmma_commit();
    if (part > 0) {
      wgmma_wait<1>();  // its fragments are free again
      if (new_tile) finish_tile(tile_of(part - 1));
    }
    if (part + 1 < kBf16Parts) fetch(part + 1);
  }
  wgmma_wait<0>();
  finish_tile(tile_of(kParts - 1));
}

}  // namespace mla_fp8::gpu
