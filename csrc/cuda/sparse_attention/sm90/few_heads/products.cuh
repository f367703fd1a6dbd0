#pragma once
// The products of a team: logits and values. Both take K and V straight from the rows in shared memory
// (fragments: docs/kernels/hopper.md).
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"

namespace mla_fp8::gpu {

// ---- S^T = K Q^T ----------------------------------------------------------------------------------------
//
// A warp multiplies its 16 keys with all heads of the CTA. K comes from the raw rows by ldmatrix and one
// conversion; the scales of its tiles multiply float accumulators.

template <int kOctets>
__device__ void add_scaled(float (&s)[kOctets][4], const float (&acc)[kOctets][4], float s0, float s1) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] += acc[n][c] * (c < 2 ? s0 : s1);
}
template <int kOctets>
__device__ void add_scaled(float (&s)[kOctets][4], const float (&a)[kOctets][4], const float (&b)[kOctets][4],
                           float s0, float s1) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) s[n][c] += (a[n][c] + b[n][c]) * (c < 2 ? s0 : s1);
}

template <int kOctets>
__device__ __forceinline__ void clear(float (&s)[kOctets][4]) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
}
template <int kOctets>
__device__ __forceinline__ void set(float (&s)[kOctets][4], const float (&a)[kOctets][4]) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n)
    s[n][0] = a[n][0], s[n][1] = a[n][1], s[n][2] = a[n][2], s[n][3] = a[n][3];
}
// Multiplies 32 dims, whose halves have accumulators of their own.
template <int kOctets>
__device__ __forceinline__ void mma_unit(float (&acc)[2][kOctets][4], bool bf16, const uint32_t (&k)[2][4],
                                         const uint4 (&q)[kOctets]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const uint4& x = q[(half * kOctets + n) / 2];
      const bool second = (half * kOctets + n) % 2;
      if (bf16) mma_bf16(acc[half][n], k[half], second ? x.z : x.x, second ? x.w : x.y);
      else mma_f16(acc[half][n], k[half], second ? x.z : x.x, second ? x.w : x.y);
    }
}

// Computes logits by one mma for 16 dims and an octet of heads. A unit of 32 dims is loaded kAhead units
// ahead. Halves of a unit have accumulators of their own, and so have kSets tiles, or units over two layouts:
// a product waits for none of the last three. Over two layouts the scales of 16 dims multiply the fragments
// of K, so these accumulators run over all dims of a kind.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_mma(uint32_t rows, const RowScales<R> (&scales)[2],
                                                        float (&s)[kOctets][4]) const {
  constexpr int kAhead = 2, kPlaces = kAhead + 1, kSets = R::kMixed || kOctets == 1 ? 2 : 1;
  constexpr int kBf16Units = R::kBf16Dims / 32, kFp8Units = R::kFp8Dims / 32, kUnits = kBf16Units + kFp8Units;
  constexpr int kTileDims = R::kMixed ? 32 : R::kTileDims;
  constexpr int kUnitsPerTile = kTileDims / 32, kUnitsPerRound = kSets * kUnitsPerTile;
  // Order of the units: bf16 ones, then those of a round's tiles in turn; the last round may have fewer.
  const auto tiles_in_round = [](int round) {
    const int left = R::kFp8Dims / kTileDims - round * kSets;
    return left < kSets ? left : kSets;
  };
  const auto tile_of = [&](int u) {
    return u / kUnitsPerRound * kSets + u % kUnitsPerRound % tiles_in_round(u / kUnitsPerRound);
  };
  const auto first_dim = [&](int i) {
    if (i < kBf16Units) return R::kFp8Dims + i * 32;
    const int u = i - kBf16Units;
    return tile_of(u) * kTileDims + u % kUnitsPerRound / tiles_in_round(u / kUnitsPerRound) * 32;
  };

  const uint32_t q_base = q_address() + lane_ * 16;
  uint4 q[kPlaces][kOctets];
  [[maybe_unused]] typename KeyFactors<R>::Words factors[kPlaces];
  uint32_t raw[kPlaces][2][4];  // bf16 units use both halves
  const auto fetch = [&](int i) {
    if (i >= kUnits) return;
    const int place = i % kPlaces;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
      q[place][n] = load_shared_16(q_base + (first_dim(i) / 32 * kOctets + n) * 512);
    const uint32_t row = rows + keys_by_dims_;
    if (i < kBf16Units) {
      ldmatrix_x4(raw[place][0], row + R::kBf16Offset + i * 64);
      ldmatrix_x4(raw[place][1], row + R::kBf16Offset + i * 64 + 32);
    } else {
      ldmatrix_x4(raw[place][0], row + first_dim(i));
      if constexpr (R::kMixed) factors[place] = KeyFactors<R>::load(rows, first_dim(i) / 32, g_);
    }
  };

  float acc[kSets][2][kOctets][4];
  const auto add_sets = [&](int num, auto&& scale) {
#pragma unroll
    for (int j = 0; j < num; ++j) add_scaled(s, acc[j][0], acc[j][1], scale(0, j), scale(1, j));
  };
  clear(s);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const bool bf16 = i < kBf16Units;
    const int u = i - kBf16Units, round = u / kUnitsPerRound;
    const int set = !bf16 ? tile_of(u) - round * kSets : R::kMixed ? i % kSets : 0;
    if (i == 0 || u == 0 || (!bf16 && !R::kMixed && u % kUnitsPerRound == 0)) {
#pragma unroll
      for (int j = 0; j < kSets; ++j) clear(acc[j][0]), clear(acc[j][1]);
    }
    fetch(i + kAhead);
    auto& unit = raw[i % kPlaces];
    uint32_t k[2][4];
    if (!bf16) {
      convert_keys(unit[0], k[0], k[1]);
      if constexpr (R::kMixed) KeyFactors<R>(factors[i % kPlaces], g_).apply(k[0], k[1]);
    }
    mma_unit(acc[set], bf16, bf16 ? unit : k, q[i % kPlaces]);
    if (i + 1 == kBf16Units) add_sets(R::kMixed ? kSets : 1, [](int, int) { return 1.0f; });
    if (!bf16 && (i + 1 == kUnits || (!R::kMixed && (u + 1) % kUnitsPerRound == 0)))
      add_sets(tiles_in_round(round), [&](int key, int j) { return scales[key][round * kSets + j]; });
  }
}

// Computes logits for the four warps of a team at once: the tensor cores read Q once for 64 keys, mma for 16.
// It goes in parts of 64 dims, or of a smaller tile. Bytes are loaded a part ahead of their conversion, which
// goes on while the products of the part before run. A tile's sum is added once the next tile has begun; over
// two layouts all parts of a kind have one sum.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_wgmma(uint32_t rows, const RowScales<R> (&scales)[2],
                                                          float (&s)[kOctets][4]) const {
  constexpr int kPartDims = !R::kMixed && R::kTileDims < 64 ? R::kTileDims : 64, kUnits = kPartDims / 32;
  constexpr int kBf16Parts = R::kBf16Dims / kPartDims, kParts = R::kDims / kPartDims;
  constexpr int kPartsPerTile = (R::kMixed ? R::kFp8Dims : R::kTileDims) / kPartDims, kSteps = kPartDims / 16;
  const uint64_t q = wgmma_descriptor(q_address(), C::kHeads * 16, 128);
  const uint32_t row = rows + keys_by_dims_;
  uint32_t k[2][kSteps][4], bytes[kUnits][4];
  [[maybe_unused]] typename KeyFactors<R>::Words factors[kUnits];
  float acc[2][kOctets][4];  // tiles in turn; bf16 dims come first and count as one
  const auto fetch = [&](int part) {
    if (part < kBf16Parts) {
      fetch_bf16(k[part % 2], row, part);
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int dim = (part - kBf16Parts) * kPartDims + i * 32;
        ldmatrix_x4(bytes[i], row + dim);
        if constexpr (R::kMixed) factors[i] = KeyFactors<R>::load(rows, dim / 32, g_);
      }
    }
  };
  const auto tile_of = [&](int part) { return part < kBf16Parts ? -1 : (part - kBf16Parts) / kPartsPerTile; };
  const auto finish_tile = [&](int tile) {
    float (&a)[kOctets][4] = acc[(tile + 1) % 2];
    pin_registers(a);
    if (tile >= 0) add_scaled(s, a, scales[0][tile], scales[1][tile]);
    else if constexpr (R::kMixed) set(s, a);
    else add_scaled(s, a, 1.0f, 1.0f);
  };
  clear(s);
  fetch(0);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const bool bf16 = part < kBf16Parts;
    const int tile = tile_of(part),
              step = bf16 ? R::kFp8Dims / 16 + part * kSteps : (part - kBf16Parts) * kSteps;
    if (!bf16)
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        convert_keys(bytes[i], k[part % 2][2 * i], k[part % 2][2 * i + 1]);
        if constexpr (R::kMixed)
          KeyFactors<R>(factors[i], g_).apply(k[part % 2][2 * i], k[part % 2][2 * i + 1]);
      }
    if (part + 1 < kParts && !(part + 1 < kBf16Parts)) fetch(part + 1);
    float (&a)[kOctets][4] = acc[(tile + 1) % 2];
    const bool new_tile = part == 0 || tile_of(part - 1) != tile;
    pin_registers(a);
    wgmma_part(a, bf16, k[part % 2], q + step * kStepQ, new_tile);
    if (part > 0) {
      wgmma_wait<1>();  // its fragments are free again
      if (new_tile) finish_tile(tile_of(part - 1));
    }
    if (part + 1 < kBf16Parts) fetch(part + 1);
  }
  wgmma_wait<0>();
  finish_tile(tile_of(kParts - 1));
}

// ---- O^T += V^T P^T -------------------------------------------------------------------------------------
//
// V comes from the raw rows by ldmatrix.trans, as pairs of bytes for e4m3; its scales
// multiply the weights.

// Adds the values for a team of one warp (bf16 rows). Weights turn from C into B fragments inside the warp.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_alone(int stage, Block& b, bool over) {
  static_assert(R::kFp8Chunks == 0 && kOctets == 1);
  if (__any_sync(kFullWarp, over)) {
    const float f0 = move_base(0, 0, largest_logit(b, 0, 0)), f1 = move_base(0, 1, largest_logit(b, 0, 1));
    rescale(0, f0, f1);
    weigh(b);
  }
  add_to_sums(b);
  const uint32_t rows = ring_.stage(stage % C::kStages);
  const uint32_t b0 = movmatrix_trans(pack_bf16(b.p[0][0], b.p[0][1]));
  const uint32_t b1 = movmatrix_trans(pack_bf16(b.p[0][2], b.p[0][3]));
#pragma unroll
  for (int chunk = 0; chunk < kNumChunks; ++chunk)
    accumulate_bf16(chunk, rows + chunk * 128,
                    [&](float (&o)[kOctets][4], const uint32_t (&v)[4]) { mma_bf16(o[0], v, b0, b1); });
  release(stage);
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
      buffer * C::kPBytes + lane_ % 8 * C::kPPitch + (member_ * kStageRows + (lane_ / 8 & 1) * 8) * 2;
#pragma unroll
  for (int n = 0; n < kOctets; ++n) {
    const uint32_t at = ring_.smem + offset + n * kOctetHeads * C::kPPitch;
    if constexpr (R::kFp8Chunks > 0)
      stmatrix_x2_trans(at + MLA_SMEM(C, weights_fp8), pack_f16(b.p[n][0], b.p[n][1]),
                        pack_f16(b.p[n][2], b.p[n][3]));
    if constexpr (R::kFp8Chunks < kNumChunks)
      stmatrix_x2_trans(at + MLA_SMEM(C, weights_bf16),
                        pack_bf16(b.p[n][0] * b.unscale, b.p[n][1] * b.unscale),
                        pack_bf16(b.p[n][2] * b.unscale, b.p[n][3] * b.unscale));
  }
}

// Adds the values for a larger team. A warp has the weights of its 16 keys, and needs those of the block for
// its value dims. They pass through shared memory, at one barrier a block. It also tells whether a base must
// move: then weights are computed again.
template <class C>
__device__ __forceinline__ void Consumer<C>::accumulate_shared(int first_stage, int parity, Block& b,
                                                               bool over) {
  const int buffer = team_ * 2 + parity, barrier = kBarrierTeam + team_, threads = kWarpSize * kMembers;
  store_weights(buffer, b);
  uint8_t* const scale_table = smem_ + MLA_SMEM(C, scales) + buffer * C::kScaleBytes;
#pragma unroll
  for (int j = 0; j < kLaneScales; ++j)
    if (4 * j + t_ < R::kNumScales)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint16_t*>(scale_table + scale_offset(4 * j + t_, member_, g_, i)) =
            static_cast<uint16_t>(pack_f16(b.scales[i][j], 0.0f));
  if (named_barrier_any(barrier, threads, over)) {
    float* const largest =
        reinterpret_cast<float*>(smem_ + MLA_SMEM(C, block_max)) + buffer * kMembers * C::kHeads;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float x = largest_logit(b, n, 0), y = largest_logit(b, n, 1);
      if (g_ == 0)
        *reinterpret_cast<float2*>(largest + member_ * C::kHeads + n * kOctetHeads + 2 * t_) = {x, y};
    }
    named_barrier(barrier, threads);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      float2 x = {-INFINITY, -INFINITY};
#pragma unroll
      for (int m = 0; m < kMembers; ++m) {
        const float2 y = *reinterpret_cast<const float2*>(largest + m * C::kHeads + n * kOctetHeads + 2 * t_);
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
  if (is_bf16(C::kChunks - 1)) accumulate_block<true>(first_stage, buffer);
  else accumulate_block<false>(first_stage, buffer);
}

// Adds a block to this warp's value dims. Its stages are there: each member waited for its own before the
// barrier. They are read in pairs, of 32 keys for one ldmatrix of weights. All loads are a step ahead, across
// stages.
template <class C>
template <bool kLastIsBf16>
__device__ __forceinline__ void Consumer<C>::accumulate_block(int first_stage, int buffer) {
  constexpr int kFp8Chunks = R::kFp8Chunks == 0 ? 0 : C::kChunks - kLastIsBf16, kUnits = kFp8Chunks * 2;
  static_assert(kUnits % 2 == 0, "bytes of the next stage's first unit");
  const int first_chunk = member_ * C::kChunks;
  const uint32_t rows = ring_.stage(first_stage % C::kStages);
  const uint32_t values = rows + keys_by_dims_ + first_chunk * kChunkDims;
  const uint8_t* scale_table = smem_ + MLA_SMEM(C, scales) + buffer * C::kScaleBytes;
  uint32_t bytes[2][4];
  // Over two layouts scales lie behind each stage's rows.
  [[maybe_unused]] uint4 factors[2];
  [[maybe_unused]] uint32_t factors_at;
  if constexpr (R::kMixed)
    factors_at =
        R::value_factors_at(rows + R::kTableOffset, t_) + first_chunk * (kChunkDims / 32) * R::kUnitBytes;
  const auto load_bytes = [&](int m, int unit) {  // a unit has 32 dims
    ldmatrix_x4_trans(bytes[unit % 2], values + m * C::kStageBytes + unit * 32);
    if constexpr (R::kMixed)
      factors[unit % 2] = load_shared_16(factors_at + m * C::kStageBytes + unit * R::kUnitBytes);
  };
  // Scales are kept by unit: a tile's first unit has them. kChunks is a multiple of a tile's chunks.
  constexpr int kScaled = R::kNumScales > 0 && !R::kMixed ? kUnits : 0;
  const auto starts_tile = [](int unit) { return kScaled > 0 && R::new_tile(unit * 32); };
  uint4 pair_scales[kScaled > 0 ? kScaled : 1];
  const auto load_scales = [&](int pair) {
#pragma unroll
    for (int unit = 0; unit < kScaled; ++unit)
      if (starts_tile(unit))
        pair_scales[unit] = *reinterpret_cast<const uint4*>(
            scale_table +
            scale_offset(R::tile_of(first_chunk * kChunkDims + unit * 32), pair * 2, 2 * t_, 0));
  };

  PairWeights weights[2];
  load_weights<kLastIsBf16>(weights[0], buffer, 0);
  load_scales(0);
  if (kUnits > 0) load_bytes(0, 0);
#pragma unroll
  for (int m = 0; m < kMembers; ++m) {  // stages
    const int half = m % 2;
    const PairWeights& w = weights[m / 2 % 2];
    uint32_t b0[kOctets], b1[kOctets];
#pragma unroll
    for (int n = 0; n < kOctets; ++n) b0[n] = w.fp8[n][2 * half], b1[n] = w.fp8[n][2 * half + 1];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int chunk = u / 2;
      if (starts_tile(u)) {
        const uint4& x = pair_scales[u];
#pragma unroll
        for (int n = 0; n < kOctets; ++n) {
          b0[n] = mul_f16x2(w.fp8[n][2 * half], half ? x.z : x.x);
          b1[n] = mul_f16x2(w.fp8[n][2 * half + 1], half ? x.w : x.y);
        }
      }
      if (u + 1 < kUnits) load_bytes(m, u + 1);
      else if (m + 1 < kMembers) load_bytes(m + 1, 0);
      uint32_t v[2][4];
      convert_values(bytes[u % 2], v[0], v[1]);
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        auto &even = out_[chunk][u % 2 * 2][n], &odd = out_[chunk][u % 2 * 2 + 1][n];
        if constexpr (R::kMixed) {
          const uint4& x = factors[u % 2];
          mma_f16(even, v[0], mul_f16x2(b0[n], x.x), mul_f16x2(b1[n], x.y));
          mma_f16(odd, v[1], mul_f16x2(b0[n], x.z), mul_f16x2(b1[n], x.w));
        } else {
          mma_f16(even, v[0], b0[n], b1[n]);
          mma_f16(odd, v[1], b0[n], b1[n]);
        }
      }
    }
    accumulate_bf16_chunks<kFp8Chunks>(rows + m * C::kStageBytes, w, half);
    if (half == 1) {
      if (m + 1 < kMembers) {
        load_weights<kLastIsBf16>(weights[(m / 2 + 1) % 2], buffer, m / 2 + 1);
        load_scales(m / 2 + 1);
      }
      release(first_stage + m - 1, first_stage + m);
    }
  }
}

}  // namespace mla_fp8::gpu
