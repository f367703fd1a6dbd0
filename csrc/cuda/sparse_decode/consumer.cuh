#pragma once
// One consumer warp: Q, the loop over blocks, online softmax. The two products are in logits.cuh and
// values.cuh; both take their K / V operand straight from the raw rows in shared memory (fragments:
// docs/sparse_decode.md).
#include "cuda/async.cuh"
#include "cuda/barrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/pairs.cuh"
#include "cuda/sparse_decode/config.cuh"
#include "cuda/sparse_decode/producer.cuh"
#include "cuda/sparse_decode/query.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {

inline constexpr float kLog2E = 1.4426950408889634f;
// Weights are 2^(x - base + 7) in f16. The base, and with it O, moves only when a maximum has grown by more
// than 2^8, so a weight is at most 2^15.
inline constexpr float kLazyLog2 = 8.0f;
inline constexpr float kWeightLog2 = 7.0f;
inline constexpr float kNoMax = -1e30f;
enum NamedBarrier { kBarrierQ = 1, kBarrierTeam };  // kBarrierTeam + team

// Maximum over the tokens of a fragment: over g.
__device__ inline float max_over_tokens(float x) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}
__device__ inline float sum_over_tokens(float x) {
#pragma unroll
  for (int offset = 4; offset < kWarpSize; offset *= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

// The stored scales of one token.
template <class R>
struct TokenScales {
  float value[R::kNumScales > 0 ? R::kNumScales : 1];
  bool nan = false;  // ue8m0 255 is NaN, and becomes infinity below

  __device__ void load(const uint8_t* row) {
    if constexpr (R::kNumScales == 0) {
      value[0] = 1.0f;
    } else if constexpr (R::kL.scale_format == ScaleFormat::kF32) {
      const float4 x = *reinterpret_cast<const float4*>(row + R::kScaleOffset);
      value[0] = x.x, value[1] = x.y, value[2] = x.z, value[3] = x.w;
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(row + R::kScaleOffset);
#pragma unroll
      for (int i = 0; i < R::kNumScales; ++i)
        value[i] = __uint_as_float(((i < 4 ? x.x : x.y) >> 8 * (i % 4) & 255u) << 23);
      nan = (__vcmpeq4(x.x, ~0u) | (__vcmpeq4(x.y, ~0u) & 0xffffffu)) != 0;
    }
  }
  __device__ float operator[](int tile) const { return value[R::kNumScales ? tile : 0]; }

  // One of them alone.
  __device__ static float read(const uint8_t* row, int tile) {
    if constexpr (R::kL.scale_format == ScaleFormat::kF32)
      return reinterpret_cast<const float*>(row + R::kScaleOffset)[tile];
    else return __uint_as_float(uint32_t{row[R::kScaleOffset + tile]} << 23);
  }
};

template <class C>
class Consumer {
 public:
  using R = typename C::R;
  static constexpr int kGroups = C::kGroups;

  __device__ Consumer(const TeamParams& params, uint8_t* smem, int warp, int lane)
      : p_(params.p),
        smem_(smem),
        ring_{shared_address(smem)},
        team_(warp / kGroups),
        member_(warp % kGroups),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {
    const int matrix = lane / 8, row = lane % 8;
    tokens_by_dims_ = ((matrix & 1) * 8 + row) * R::kPitch + (matrix >> 1) * 16;
    bf16_values_ = ((matrix >> 1) * 8 + row) * R::kPitch + (matrix & 1) * 16;
    weights_row_ = row * C::kPPitch + matrix * 16;
  }

  __device__ void init() {
    const float* q_scale = reinterpret_cast<const float*>(smem_ + C::kQScale) + row() * C::kHeads;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      if (p_.max_logits && g_ == 0) largest(n) = {-INFINITY, -INFINITY};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[n][c] = kNoMax;
        sum_[n][c] = 0.0f;
        const float layer_scale = R::kUniformFp8 ? *p_.scale : 1.0f;
        logit_scale_[n][c] =
            p_.sm_scale * kLog2E * layer_scale * reciprocal(q_scale[n * kGroupHeads + 2 * t_ + c]);
#pragma unroll
        for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
          for (int i = 0; i < 4; ++i) out_[chunk][i][n][c] = out_[chunk][i][n][c + 2] = 0.0f;
      }
    }
  }

  // The block at this place in the ring's sequence, one of the team's: team, team + kTeams, ...
  __device__ __forceinline__ void attend(int block) {
    const int first = block * kGroups, mine = first + member_;
    wait_full(mine);
    const uint32_t rows = ring_.slot(mine % C::kSlots);
    TokenScales<R> scales[2];  // of tokens g and g + 8
    const uint8_t* row = smem_ + C::kRing + mine % C::kSlots * C::kSlotBytes + g_ * R::kPitch;
    scales[0].load(row);
    scales[1].load(row + 8 * R::kPitch);
    float s[kGroups][4];
    if constexpr (C::kWgmma) logits_wgmma(rows, scales, s);
    else logits_mma(rows, scales, s);

    Weights weights;
    softmax(s, scales, smem_ + C::kValid + mine % C::kSlots * kSlotTokens, weights);
    if constexpr (C::kShared) accumulate_shared(first, block / C::kTeams % 2, scales, weights);
    else accumulate_alone(mine, scales, weights);
  }

  // This warp's (base, sum of weights) of every head, to shared memory.
  __device__ void write_stats(uint8_t* smem) const {
    const int at = (team_ * kGroups + member_) * C::kHeads;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float sum0 = sum_over_tokens(sum_[n][0]), sum1 = sum_over_tokens(sum_[n][1]);
      const int head = at + n * kGroupHeads + 2 * t_;
      if (g_ == 0)
        reinterpret_cast<float4*>(smem + C::kWarpStats)[head / 2] = {max_[n][0], sum0, max_[n][1], sum1};
    }
  }

  // O of the n-th group's heads 2t, 2t + 1.
  __device__ void rescale(int n, float f0, float f1) {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) out_[chunk][i][n][c] *= c % 2 ? f1 : f0;
  }

  __device__ int team() const { return team_; }
  __device__ int member() const { return member_; }
  __device__ int row() const { return C::kRows > 1 ? team_ / C::kRowTeams : 0; }  // of the CTA's rows

  // merge.cuh reads these.
  float out_[C::kChunks][4][kGroups][4];  // O^T: 64-dim chunk, 16-dim tile of it, group of 8 heads, fragment
  float max_[kGroups][2], sum_[kGroups][2];  // of heads 2t, 2t + 1: base (log2), sum of 2^(logit - base + 7)

  __device__ bool is_bf16(int chunk) const {  // does local chunk `chunk` hold bf16 values?
    if constexpr (R::kFp8Chunks == 0) return true;
    else if constexpr (R::kFp8Chunks == kNumChunks) return false;
    else return chunk == C::kChunks - 1 && member_ == kGroups - 1;
    static_assert(R::kFp8Chunks == 0 || R::kFp8Chunks >= kNumChunks - 1);
  }

 private:
  struct Weights {
    float p[kGroups][4];
    float sum[kGroups][2];
    float base[kGroups][2];
    float unscale;    // 2^-e: value scales are used as s * 2^-e <= 1, weights carry the 2^e
    bool base_moved;  // in this lane
  };

  __device__ void wait_full(int i) const { mbarrier_wait(ring_.full(i % C::kSlots), i / C::kSlots & 1); }
  // The fence: without it the arrival was seen to overtake the last ldmatrix of the slot.
  __device__ void release(int i) const {
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kSlots), lane_);
  }

  // logits.cuh: S^T of 16 tokens, `rows` the address of the first.
  __device__ void logits_mma(uint32_t rows, const TokenScales<R> (&scales)[2], float (&s)[kGroups][4]) const;
  __device__ void logits_wgmma(uint32_t rows, const TokenScales<R> (&scales)[2],
                               float (&s)[kGroups][4]) const;

  // ---- weights ----

  __device__ void softmax(float (&s)[kGroups][4], const TokenScales<R> (&scales)[2], const uint8_t* valid,
                          Weights& w) {
    int e = 0;  // the largest value scale of the 16 tokens is below 2^e
    if constexpr (R::kNumScales > 0) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < R::kNumScales; ++i) largest = fmaxf(largest, fmaxf(scales[0][i], scales[1][i]));
      e = exponent_above(__reduce_max_sync(kFullWarp, __float_as_uint(largest)));
      e = min(max(e, -100), 100);
    }
    w.unscale = power_of_two(-e);
    const bool valid0 = valid[g_], valid1 = valid[g_ + 8];
    const float nan0 = scales[0].nan ? NAN : 0.0f, nan1 = scales[1].nan ? NAN : 0.0f;
    w.base_moved = false;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float new_largest[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {  // logit + e, in units of log2
        s[n][c] = valid0 ? fmaf(s[n][c], logit_scale_[n][c], e + nan0) : -INFINITY;
        s[n][c + 2] = valid1 ? fmaf(s[n][c + 2], logit_scale_[n][c], e + nan1) : -INFINITY;
        const float largest = max_over_tokens(fmaxf(s[n][c], s[n][c + 2]));
        new_largest[c] = largest - e;
        const bool moves = largest > max_[n][c] + kLazyLog2;
        w.base[n][c] = moves ? largest : max_[n][c];
        w.base_moved |= moves;
        w.p[n][c] = exp2_approx(s[n][c] - w.base[n][c] + kWeightLog2);
        w.p[n][c + 2] = exp2_approx(s[n][c + 2] - w.base[n][c] + kWeightLog2);
        w.sum[n][c] = (w.p[n][c] + w.p[n][c + 2]) * w.unscale;
      }
      if (p_.max_logits && g_ == 0) {
        float2& all = largest(n);
        all = {fmaxf(all.x, new_largest[0]), fmaxf(all.y, new_largest[1])};
      }
    }
  }

  // values.cuh: O^T += V^T P^T for a block; its slots are given as positions in the ring's sequence.
  __device__ void accumulate_alone(int slot, const TokenScales<R> (&scales)[2], const Weights& w);
  __device__ void accumulate_shared(int first_slot, int parity, const TokenScales<R> (&scales)[2],
                                    const Weights& w);
  __device__ void accumulate_slot(int first_slot, int m, const uint8_t* scale_table,
                                  const uint32_t (&fp8_weights)[kGroups][4],
                                  const uint32_t (&bf16_weights)[kGroups][4], int half);
  template <class Mma>
  __device__ void accumulate_bf16(int chunk, uint32_t values, Mma&& mma);

  // This warp's largest logits (log2) of heads 2t, 2t + 1 of the n-th group: in shared memory, few need them.
  __device__ float2& largest(int n) const {
    const int head = (team_ * kGroups + member_) * C::kHeads + n * kGroupHeads + 2 * t_;
    return reinterpret_cast<float2*>(smem_ + C::kWarpLargest)[head / 2];
  }

  __device__ uint32_t q_address() const { return ring_.smem + C::kQ + row() * C::kQBytes; }

  const SparseAttentionParams& p_;
  uint8_t* const smem_;
  const Ring<C> ring_;
  const int team_, member_, lane_, g_, t_;
  uint32_t tokens_by_dims_;  // ldmatrix of K (rows are tokens), and of V as pairs of bytes
  uint32_t bf16_values_, weights_row_;
  float logit_scale_[kGroups][2];
};

}  // namespace mla_fp8::gpu
