#pragma once
// O^T += V^T P^T. V comes from the raw rows by ldmatrix.trans, as pairs of bytes for e4m3; its scales
// multiply the weights.
#include "cuda/device/convert.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"

namespace mla_fp8::gpu {

// A fragments of 32 e4m3 value dims, read as pairs of bytes: rows g and g + 8 of a tile are dims 2g, 2g + 1.
__device__ inline void convert_values(const uint32_t (&bytes)[4], uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  const auto pair_tokens = [](uint32_t x) { return __byte_perm(x, 0, 0x3120); };
  e4m3_to_f16(pair_tokens(bytes[0]), a0[0], a0[1]);
  e4m3_to_f16(pair_tokens(bytes[1]), a0[2], a0[3]);
  e4m3_to_f16(pair_tokens(bytes[2]), a1[0], a1[1]);
  e4m3_to_f16(pair_tokens(bytes[3]), a1[2], a1[3]);
}

// kMembers = 1, bf16 rows: a warp keeps its 16 tokens. The weights turn from C into B fragments inside the
// warp.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_alone(int slot, Block& b, bool over) {
  static_assert(R::kFp8Chunks == 0 && kGroups == 1);
  if (__any_sync(kFullWarp, over)) {
    const float f0 = move_base(0, 0, largest_logit(b, 0, 0)), f1 = move_base(0, 1, largest_logit(b, 0, 1));
    rescale(0, f0, f1);
    weigh(b);
  }
  add_to_sums(b);
  const uint32_t rows = ring_.slot(slot % C::kSlots);
  const uint32_t b0 = movmatrix_trans(pack_bf16(b.p[0][0], b.p[0][1]));
  const uint32_t b1 = movmatrix_trans(pack_bf16(b.p[0][2], b.p[0][3]));
#pragma unroll
  for (int chunk = 0; chunk < kNumChunks; ++chunk)
    accumulate_bf16(chunk, rows + chunk * 128,
                    [&](float (&o)[kGroups][4], const uint32_t (&v)[4]) { mma_bf16(o[0], v, b0, b1); });
  release(slot);
}

template <class C>
template <class Mma>
__device__ __forceinline__ void Consumer<C>::accumulate_bf16(int chunk, uint32_t values, Mma&& mma) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, values + bf16_values_ + R::kBf16Offset + i * 32);
    mma(out_[chunk][i], v);
  }
}

template <class C>
__device__ __forceinline__ void Consumer<C>::store_weights(int buffer, const Block& b) const {
  const uint32_t offset =
      buffer * C::kPBytes + lane_ % 8 * C::kPPitch + (member_ * kSlotTokens + (lane_ / 8 & 1) * 8) * 2;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const uint32_t at = ring_.smem + offset + n * kGroupHeads * C::kPPitch;
    if constexpr (R::kFp8Chunks > 0)
      stmatrix_x2_trans(at + C::kPFp8, pack_f16(b.p[n][0], b.p[n][1]), pack_f16(b.p[n][2], b.p[n][3]));
    if constexpr (R::kFp8Chunks < kNumChunks)
      stmatrix_x2_trans(at + C::kPBf16, pack_bf16(b.p[n][0] * b.unscale, b.p[n][1] * b.unscale),
                        pack_bf16(b.p[n][2] * b.unscale, b.p[n][3] * b.unscale));
  }
}

// kMembers > 1: each warp has the weights of its 16 tokens and wants those of the whole block, for its own
// value dims. They meet in shared memory, at one barrier per block, which also tells whether some base must
// move: then they are found again.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_shared(int first_slot, int parity, Block& b,
                                                               bool over) {
  const int buffer = team_ * 2 + parity, barrier = kBarrierTeam + team_, threads = kWarpSize * kMembers;
  store_weights(buffer, b);
  uint8_t* const scale_table = smem_ + C::kScales + buffer * C::kScaleBytes;
#pragma unroll
  for (int j = 0; j < kLaneScales; ++j)
    if (4 * j + t_ < R::kNumScales)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint16_t*>(scale_table + scale_offset(4 * j + t_, member_, g_, i)) =
            static_cast<uint16_t>(pack_f16(b.scales[i][j], 0.0f));
  if (named_barrier_any(barrier, threads, over)) {
    float* const largest = reinterpret_cast<float*>(smem_ + C::kBlockMax) + buffer * kMembers * C::kHeads;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float x = largest_logit(b, n, 0), y = largest_logit(b, n, 1);
      if (g_ == 0)
        *reinterpret_cast<float2*>(largest + member_ * C::kHeads + n * kGroupHeads + 2 * t_) = {x, y};
    }
    named_barrier(barrier, threads);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float2 x = {-INFINITY, -INFINITY};
#pragma unroll
      for (int m = 0; m < kMembers; ++m) {
        const float2 y = *reinterpret_cast<const float2*>(largest + m * C::kHeads + n * kGroupHeads + 2 * t_);
        x = {fmaxf(x.x, y.x), fmaxf(x.y, y.y)};
      }
      const float f0 = move_base(n, 0, x.x), f1 = move_base(n, 1, x.y);
      rescale(n, f0, f1);
    }
    weigh(b);
    store_weights(buffer, b);
    named_barrier(barrier, threads);
  }
  add_to_sums(b);
  if (is_bf16(C::kChunks - 1)) accumulate_block<true>(first_slot, buffer);
  else accumulate_block<false>(first_slot, buffer);
}

// A block, this warp's value dims; every member has waited for its own slot before the barrier, so all are
// there. Slots are read in pairs of 32 tokens, one ldmatrix of weights; everything is fetched a step ahead,
// across slots.
template <class C>
template <bool kLastIsBf16>
__device__ __forceinline__ void Consumer<C>::accumulate_block(int first_slot, int buffer) {
  constexpr int kFp8Chunks = R::kFp8Chunks == 0 ? 0 : C::kChunks - kLastIsBf16, kUnits = kFp8Chunks * 2;
  const int first_chunk = member_ * C::kChunks;
  const uint32_t rows = ring_.slot(first_slot % C::kSlots);
  const uint32_t values = rows + tokens_by_dims_ + first_chunk * kChunkDims;
  const uint8_t* scale_table = smem_ + C::kScales + buffer * C::kScaleBytes;
  uint32_t bytes[2][4];
  const auto load_bytes = [&](int m, int unit) {  // of 32 dims
    ldmatrix_x4_trans(bytes[unit % 2], values + m * C::kSlotBytes + unit * 32);
  };
  constexpr int kScaled =
      R::kNumScales > 0 ? kFp8Chunks : 0;  // chunks with a scale of their own or the last's
  uint4 pair_scales[kScaled > 0 ? kScaled : 1];
  const auto load_scales = [&](int pair) {
#pragma unroll
    for (int chunk = 0; chunk < kScaled; ++chunk)
      if (R::new_tile(chunk))
        pair_scales[chunk] = *reinterpret_cast<const uint4*>(
            scale_table + scale_offset(R::tile_of_chunk(first_chunk + chunk), pair * 2, 2 * t_, 0));
  };

  PairWeights weights[2];
  const auto load_weights = [&](int pair) {
    const uint32_t at = ring_.smem + buffer * C::kPBytes + weights_row_ + pair * 64;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const uint32_t offset = at + n * kGroupHeads * C::kPPitch;
      if constexpr (R::kFp8Chunks > 0) ldmatrix_x4(weights[pair % 2].fp8[n], offset + C::kPFp8);
      if constexpr (kLastIsBf16) ldmatrix_x4(weights[pair % 2].bf16[n], offset + C::kPBf16);
    }
  };
  load_weights(0);
  load_scales(0);
  if (kUnits > 0) load_bytes(0, 0);
#pragma unroll
  for (int m = 0; m < kMembers; ++m) {  // slots
    const int half = m % 2;
    const PairWeights& w = weights[m / 2 % 2];
    uint32_t b0[kGroups], b1[kGroups];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) b0[n] = w.fp8[n][2 * half], b1[n] = w.fp8[n][2 * half + 1];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int chunk = u / 2;
      if (kScaled > 0 && u % 2 == 0 && R::new_tile(chunk)) {  // kChunks is a multiple of a tile's chunks
        const uint4& x = pair_scales[chunk];
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          b0[n] = mul_f16x2(w.fp8[n][2 * half], half ? x.z : x.x);
          b1[n] = mul_f16x2(w.fp8[n][2 * half + 1], half ? x.w : x.y);
        }
      }
      if (u + 1 < kUnits) load_bytes(m, u + 1);
      else if (m + 1 < kMembers) load_bytes(m + 1, 0);
      uint32_t v[2][4];
      convert_values(bytes[u % 2], v[0], v[1]);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        mma_f16(out_[chunk][u % 2 * 2][n], v[0], b0[n], b1[n]);
        mma_f16(out_[chunk][u % 2 * 2 + 1][n], v[1], b0[n], b1[n]);
      }
    }
#pragma unroll
    for (int chunk = kFp8Chunks; chunk < C::kChunks; ++chunk)
      accumulate_bf16(chunk, rows + m * C::kSlotBytes + (first_chunk + chunk - R::kFp8Chunks) * 128,
                      [&](float (&o)[kGroups][4], const uint32_t (&v)[4]) {
#pragma unroll
                        for (int n = 0; n < kGroups; ++n)
                          mma_bf16(o[n], v, w.bf16[n][2 * half], w.bf16[n][2 * half + 1]);
                      });
    if (half == 1) {
      if (m + 1 < kMembers) {
        load_weights(m / 2 + 1);
        load_scales(m / 2 + 1);
      }
      release(first_slot + m - 1, first_slot + m);
    }
  }
}

}  // namespace mla_fp8::gpu
