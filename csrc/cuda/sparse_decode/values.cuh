#pragma once
// O^T += V^T P^T. V comes from the raw rows by ldmatrix.trans, as pairs of bytes for e4m3; its scales
// multiply the weights.
#include "cuda/sparse_decode/consumer.cuh"

namespace mla_fp8::gpu {

// A fragments of 32 e4m3 value dims, read as pairs of bytes: rows g and g + 8 of a tile are dims 2g, 2g + 1.
__device__ inline void convert_values(const uint32_t (&bytes)[4], uint32_t (&a0)[4], uint32_t (&a1)[4]) {
  const auto pair_tokens = [](uint32_t x) { return __byte_perm(x, 0, 0x3120); };
  e4m3_to_f16(pair_tokens(bytes[0]), a0[0], a0[1]);
  e4m3_to_f16(pair_tokens(bytes[1]), a0[2], a0[3]);
  e4m3_to_f16(pair_tokens(bytes[2]), a1[0], a1[1]);
  e4m3_to_f16(pair_tokens(bytes[3]), a1[2], a1[3]);
}

// kGroups = 1: a warp keeps its 16 tokens. The weights, multiplied by the scales in float, turn from C into B
// fragments inside the warp.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_alone(int slot, const TokenScales<R> (&scales)[2],
                                                              const Weights& w) {
  if (__any_sync(kFullWarp, w.base_moved)) {
    const float f0 = exp2_approx(max_[0][0] - w.base[0][0]), f1 = exp2_approx(max_[0][1] - w.base[0][1]);
    max_[0][0] = w.base[0][0], max_[0][1] = w.base[0][1];
    sum_[0][0] *= f0, sum_[0][1] *= f1;
    rescale(0, f0, f1);
  }
  sum_[0][0] += w.sum[0][0];
  sum_[0][1] += w.sum[0][1];

  const uint32_t rows = ring_.slot(slot % C::kSlots);
  uint32_t b0 = 0, b1 = 0, bytes[2][4];
  if constexpr (R::kFp8Chunks > 0) ldmatrix_x4_trans(bytes[0], rows + tokens_by_dims_);
#pragma unroll
  for (int chunk = 0; chunk < kNumChunks; ++chunk) {
    if (chunk >= R::kFp8Chunks) {
      if (chunk == R::kFp8Chunks) {
        b0 = movmatrix_trans(pack_bf16(w.p[0][0] * w.unscale, w.p[0][1] * w.unscale));
        b1 = movmatrix_trans(pack_bf16(w.p[0][2] * w.unscale, w.p[0][3] * w.unscale));
      }
      accumulate_bf16(chunk, rows + (chunk - R::kFp8Chunks) * 128,
                      [&](float (&o)[kGroups][4], const uint32_t (&v)[4]) { mma_bf16(o[0], v, b0, b1); });
      continue;
    }
    if (R::new_tile(chunk)) {
      const float f0 = scales[0][R::tile_of_chunk(chunk)] * w.unscale;
      const float f1 = scales[1][R::tile_of_chunk(chunk)] * w.unscale;
      b0 = movmatrix_trans(pack_f16(w.p[0][0] * f0, w.p[0][1] * f0));
      b1 = movmatrix_trans(pack_f16(w.p[0][2] * f1, w.p[0][3] * f1));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int next = chunk * 2 + half + 1;
      if (next < R::kFp8Chunks * 2) ldmatrix_x4_trans(bytes[next % 2], rows + tokens_by_dims_ + next * 32);
      uint32_t v[2][4];
      convert_values(bytes[half], v[0], v[1]);
      mma_f16(out_[chunk][half * 2][0], v[0], b0, b1);
      mma_f16(out_[chunk][half * 2 + 1][0], v[1], b0, b1);
    }
  }
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

// kGroups > 1: each warp has the weights of its 16 tokens and wants those of the whole block, for its own
// value dims. They meet in shared memory, at one barrier per block, which also tells whether some maximum
// moved.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_shared(int first_slot, int parity,
                                                               const TokenScales<R> (&scales)[2],
                                                               const Weights& w) {
  const int buffer = team_ * 2 + parity;
  const uint32_t p_fp8 = ring_.smem + C::kPFp8 + buffer * C::kPBytes;
  const uint32_t p_bf16 = ring_.smem + C::kPBf16 + buffer * C::kPBytes;
  uint8_t* const scale_table = smem_ + C::kScales + buffer * C::kScaleBytes;  // f16 [tile][token]
  float* const bases = reinterpret_cast<float*>(smem_ + C::kBlockMax) + buffer * kGroups * C::kHeads;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    const int row = n * kGroupHeads + lane_ % 8, column = member_ * kSlotTokens + (lane_ / 8 & 1) * 8;
    const uint32_t offset = row * C::kPPitch + column * 2;
    if constexpr (R::kFp8Chunks > 0)
      stmatrix_x2_trans(p_fp8 + offset, pack_f16(w.p[n][0], w.p[n][1]), pack_f16(w.p[n][2], w.p[n][3]));
    if constexpr (R::kFp8Chunks < kNumChunks)
      stmatrix_x2_trans(p_bf16 + offset, pack_bf16(w.p[n][0] * w.unscale, w.p[n][1] * w.unscale),
                        pack_bf16(w.p[n][2] * w.unscale, w.p[n][3] * w.unscale));
    if (g_ == 0)
      *reinterpret_cast<float2*>(bases + member_ * C::kHeads + n * kGroupHeads + 2 * t_) = {w.base[n][0],
                                                                                            w.base[n][1]};
  }
#pragma unroll
  for (int tile = 0; tile < R::kNumScales; ++tile)
    if (tile % 4 == t_)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = member_ * kSlotTokens + g_ + 8 * i;
        *reinterpret_cast<uint16_t*>(scale_table + (tile * C::kBlockTokens + token) * 2) =
            static_cast<uint16_t>(pack_f16(scales[i][tile] * w.unscale, 0.0f));
      }
  const bool moved = named_barrier_any(kBarrierTeam + team_, kWarpSize * kGroups, w.base_moved);

  float factor[kGroups][kGroups];  // moved: of the weights of warp m for head 8n + g
  if (moved) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const auto base_of = [&](int m, int head) { return bases[m * C::kHeads + n * kGroupHeads + head]; };
      float f[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float base = max_[n][c];
#pragma unroll
        for (int m = 0; m < kGroups; ++m) base = fmaxf(base, base_of(m, 2 * t_ + c));
        f[c] = exp2_approx(max_[n][c] - base);
        sum_[n][c] = sum_[n][c] * f[c] + w.sum[n][c] * exp2_approx(w.base[n][c] - base);
        max_[n][c] = base;
      }
      rescale(n, f[0], f[1]);
      float largest = kNoMax;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) largest = fmaxf(largest, base_of(m, g_));
#pragma unroll
      for (int m = 0; m < kGroups; ++m) factor[n][m] = exp2_approx(base_of(m, g_) - largest);
    }
  } else {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) sum_[n][0] += w.sum[n][0], sum_[n][1] += w.sum[n][1];
  }

#pragma unroll
  for (int pair = 0; pair < kGroups / 2; ++pair) {  // of slots: 32 tokens, one ldmatrix of weights
    uint32_t fp8_weights[kGroups][4], bf16_weights[kGroups][4];
    const bool has_bf16 = is_bf16(C::kChunks - 1);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const uint32_t offset = n * kGroupHeads * C::kPPitch + weights_row_ + pair * 64;
      if constexpr (R::kFp8Chunks > 0) ldmatrix_x4(fp8_weights[n], p_fp8 + offset);
      if (has_bf16) ldmatrix_x4(bf16_weights[n], p_bf16 + offset);
      if (moved) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float f = factor[n][pair * 2 + i / 2];
          if constexpr (R::kFp8Chunks > 0) fp8_weights[n][i] = mul_f16x2(fp8_weights[n][i], pack_f16(f, f));
          if (has_bf16) bf16_weights[n][i] = mul_bf16x2(bf16_weights[n][i], pack_bf16(f, f));
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      accumulate_slot(first_slot, pair * 2 + half, scale_table, fp8_weights, bf16_weights, half);
  }
}

// The 16 tokens of warp `m`, this warp's value dims.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_slot(int first_slot, int m,
                                                             const uint8_t* scale_table,
                                                             const uint32_t (&fp8_weights)[kGroups][4],
                                                             const uint32_t (&bf16_weights)[kGroups][4],
                                                             int half) {
  const int slot = first_slot + m;
  if (m != member_) wait_full(slot);
  const uint32_t rows = ring_.slot(slot % C::kSlots);
  const int first_chunk = member_ * C::kChunks;
  uint32_t b0[kGroups], b1[kGroups], bytes[2][4];
  if constexpr (R::kFp8Chunks > 0)
    ldmatrix_x4_trans(bytes[0], rows + tokens_by_dims_ + first_chunk * kChunkDims);
#pragma unroll
  for (int chunk = 0; chunk < C::kChunks; ++chunk) {
    if (is_bf16(chunk)) {
      accumulate_bf16(chunk, rows + (first_chunk + chunk - R::kFp8Chunks) * 128,
                      [&](float (&o)[kGroups][4], const uint32_t (&v)[4]) {
#pragma unroll
                        for (int n = 0; n < kGroups; ++n)
                          mma_bf16(o[n], v, bf16_weights[n][2 * half], bf16_weights[n][2 * half + 1]);
                      });
      continue;
    }
    if constexpr (R::kNumScales > 0) {
      if (R::new_tile(chunk)) {  // kChunks is a multiple of the chunks of a tile
        const int tile = R::tile_of_chunk(first_chunk + chunk);
        const uint8_t* table = scale_table + (tile * C::kBlockTokens + m * kSlotTokens + 2 * t_) * 2;
        const uint32_t s0 = *reinterpret_cast<const uint32_t*>(table);
        const uint32_t s1 = *reinterpret_cast<const uint32_t*>(table + 16);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          b0[n] = mul_f16x2(fp8_weights[n][2 * half], s0);
          b1[n] = mul_f16x2(fp8_weights[n][2 * half + 1], s1);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        b0[n] = fp8_weights[n][2 * half], b1[n] = fp8_weights[n][2 * half + 1];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int next = chunk * 2 + i + 1;
      if (next < C::kChunks * 2)
        ldmatrix_x4_trans(bytes[next % 2], rows + tokens_by_dims_ + first_chunk * kChunkDims + next * 32);
      uint32_t v[2][4];
      convert_values(bytes[i], v[0], v[1]);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        mma_f16(out_[chunk][2 * i][n], v[0], b0[n], b1[n]);
        mma_f16(out_[chunk][2 * i + 1][n], v[1], b0[n], b1[n]);
      }
    }
  }
  release(slot);
}

}  // namespace mla_fp8::gpu
