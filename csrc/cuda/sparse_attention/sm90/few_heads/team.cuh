#pragma once
// One consumer warp: Q, the loop over blocks, online softmax. The two products are in logits.cuh and
// values.cuh; both take their K / V operand straight from the raw rows in shared memory (fragments:
// docs/sparse_decode.md).
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/query.cuh"
#include "cuda/sparse_attention/sm90/few_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"

namespace mla_fp8::gpu {

// Weights are 2^(x - base + 7) in f16. The base, and with it O, moves only when a maximum has grown by more
// than 2^8, so a weight is at most 2^15.
inline constexpr float kLazyLog2 = 8.0f;
inline constexpr float kWeightLog2 = 7.0f;
inline constexpr float kNoMax = -1e30f;
// kBarrierTeam + team, kBarrierRow + row: below 16.
enum NamedBarrier { kBarrierQ = 1, kBarrierTeam = 2, kBarrierRow = 8 };

// The stored scales of one token.
template <class R>
struct TokenScales {
  static constexpr bool kPacked = R::kL.scale_format == ScaleFormat::kUe8m0;
  float value[R::kNumScales > 0 && !kPacked ? R::kNumScales : 1];
  uint2 exponents;  // ue8m0, a byte each: registers are short

  static_assert(R::kNumScales == 0 ||
                    (kPacked ? R::kNumScales > 4 && R::kNumScales <= 8 : R::kNumScales == 4),
                "load reads 8 bytes of ue8m0 or 16 of f32");

  // ue8m0 255 is NaN, and becomes infinity below.
  __device__ bool nan() const {
    if constexpr (kPacked) {
      constexpr uint32_t kStored = ~0u >> 8 * (8 - R::kNumScales);  // bytes of exponents.y
      return (__vcmpeq4(exponents.x, ~0u) | (__vcmpeq4(exponents.y, ~0u) & kStored)) != 0;
    }
    return false;
  }

  __device__ void load(const uint8_t* row) {
    if constexpr (R::kNumScales == 0) {
      value[0] = 1.0f;
    } else if constexpr (R::kL.scale_format == ScaleFormat::kF32) {
      const float4 x = *reinterpret_cast<const float4*>(row + R::kScaleOffset);
      value[0] = x.x, value[1] = x.y, value[2] = x.z, value[3] = x.w;
    } else {
      exponents = *reinterpret_cast<const uint2*>(row + R::kScaleOffset);
    }
  }
  __device__ float operator[](int tile) const {
    if constexpr (kPacked)
      return __uint_as_float(((tile < 4 ? exponents.x : exponents.y) >> 8 * (tile % 4) & 255u) << 23);
    else return value[R::kNumScales ? tile : 0];
  }

  __device__ static bool is_nan(const uint8_t* row) {
    TokenScales scales;
    scales.load(row);
    return scales.nan();
  }

  // Those of tiles t, t + 4: lanes 4g .. 4g + 3 have all of a token's. 0 where there is none.
  static constexpr int kPerLane = (R::kNumScales + 3) / 4;
  __device__ float of_lane(const uint8_t* row, int i, int t) const {
    if (4 * i + t >= R::kNumScales) return 0.0f;
    if constexpr (kPacked)
      return __uint_as_float(__byte_perm(i ? exponents.y : exponents.x, 0, 0x4440 + t) << 23);
    else return read(row, 4 * i + t);
  }

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
  static constexpr int kGroups = C::kGroups, kMembers = C::kMembers;
  static_assert(!C::kShared || kBarrierTeam + C::kTeams <= kBarrierRow,
                "a warp alone has no team to wait for");
  static_assert(kBarrierRow + C::kRows <= 16);

  __device__ Consumer(const TeamParams& params, uint8_t* smem, int warp, int lane)
      : p_(params.p),
        smem_(smem),
        ring_{shared_address(smem)},
        team_(warp / kMembers),
        member_(warp % kMembers),
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
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[n][c] = kNoMax;
        largest_[n][c] = -INFINITY;
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
    const int first = block * kMembers, mine = first + member_;
    wait_full(mine);
    const uint32_t rows = ring_.slot(mine % C::kSlots);
    TokenScales<R> scales[2];  // of tokens g and g + 8
    const uint8_t* row = smem_ + C::kRing + mine % C::kSlots * C::kSlotBytes + g_ * R::kPitch;
    scales[0].load(row);
    scales[1].load(row + 8 * R::kPitch);
    Block b;
    if constexpr (C::kWgmma) logits_wgmma(rows, scales, b.s);
    else logits_mma(rows, scales, b.s);
    bring_scales_below_one(row, scales, smem_ + C::kValid + mine % C::kSlots * kSlotTokens, b);
    if (finds_largest()) note_largest(b);
    const bool over = weigh(b);
    if constexpr (C::kShared) accumulate_shared(first, block / C::kTeams % 2, b, over);
    else accumulate_alone(mine, b, over);
  }

  // This warp's (base, sum of weights) and largest logit (log2) of every head, to shared memory.
  __device__ void write_stats(uint8_t* smem) const {
    const int at = (team_ * kMembers + member_) * C::kHeads;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float sum0 = sum_over_g(sum_[n][0]), sum1 = sum_over_g(sum_[n][1]);
      const int pair = (at + n * kGroupHeads) / 2 + t_;
      if (g_ == 0)
        reinterpret_cast<float4*>(smem + C::kWarpStats)[pair] = {max_[n][0], sum0, max_[n][1], sum1};
      if (!finds_largest()) continue;
      const float largest0 = max_over_g(largest_[n][0]), largest1 = max_over_g(largest_[n][1]);
      if (g_ == 0) reinterpret_cast<float2*>(smem + C::kWarpLargest)[pair] = {largest0, largest1};
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

  // What merges and ends of rows read and scale.
  float out_[C::kChunks][4][kGroups][4];  // O^T: 64-dim chunk, 16-dim tile of it, group of 8 heads, fragment
  float max_[kGroups][2], sum_[kGroups][2];  // of heads 2t, 2t + 1: base (log2), sum of 2^(logit - base + 7)

  __device__ bool is_bf16(int chunk) const {  // does local chunk `chunk` hold bf16 values?
    if constexpr (R::kFp8Chunks == 0) return true;
    else if constexpr (R::kFp8Chunks == kNumChunks) return false;
    else return chunk == C::kChunks - 1 && member_ == kMembers - 1;
    static_assert(R::kFp8Chunks == 0 || R::kFp8Chunks >= kNumChunks - 1);
  }

 private:
  static constexpr int kLaneScales = TokenScales<R>::kPerLane;
  struct Block {                         // what a warp knows of its 16 tokens
    float s[kGroups][4], p[kGroups][4];  // products with Q; weights
    // 2^e is above all value scales of the 16 tokens: they are used as s * 2^-e <= 1, weights carry the 2^e.
    float e[2];                                          // of tokens g and g + 8; -inf: masked
    float unscale;                                       // 2^-e
    float scales[2][kLaneScales > 0 ? kLaneScales : 1];  // * 2^-e: TokenScales::of_lane

    // In units of log2, plus e.
    __device__ float logit(int n, int c, float logit_scale) const {
      return fmaf(s[n][c], logit_scale, e[c / 2]);
    }
  };
  struct PairWeights {  // of two slots, as B fragments
    uint32_t fp8[kGroups][4], bf16[kGroups][4];
  };
  // Value scales of a block, f16 [tile][pair of slots]: what lane t wants of a pair lies in 16 bytes. Token
  // g + 8i of the slot of `member`.
  __device__ static int scale_offset(int tile, int member, int g, int i) {
    return tile * C::kBlockTokens * 2 + member / 2 * 64 + g / 2 * 16 + member % 2 * 8 + i * 4 + g % 2 * 2;
  }

  __device__ void wait_full(int i) const { mbarrier_wait(ring_.full(i % C::kSlots), i / C::kSlots & 1); }
  // The fence: without it the arrival was seen to overtake the last ldmatrix of the slot.
  __device__ void release(int i) const {
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kSlots), lane_);
  }
  __device__ void release(int i, int j) const {  // both at the price of one
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kSlots), lane_);
    mbarrier_arrive_warp(ring_.empty(j % C::kSlots), lane_);
  }

  // logits.cuh: S^T of 16 tokens, `rows` the address of the first.
  __device__ void logits_mma(uint32_t rows, const TokenScales<R> (&scales)[2], float (&s)[kGroups][4]) const;
  __device__ void logits_wgmma(uint32_t rows, const TokenScales<R> (&scales)[2],
                               float (&s)[kGroups][4]) const;

  // ---- weights ----

  // What softmax needs besides the products: value scales as the weights will have them, which tokens count.
  __device__ void bring_scales_below_one(const uint8_t* row, const TokenScales<R> (&scales)[2],
                                         const uint8_t* valid, Block& b) const {
    uint32_t largest = 0;  // of the 16 tokens; the bits of nonnegative floats are in their order
    if constexpr (R::kNumScales > 0) {
      float x = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kLaneScales; ++j) {
          b.scales[i][j] = scales[i].of_lane(row + 8 * i * R::kPitch, j, t_);
          x = fmaxf(x, b.scales[i][j]);
        }
      largest = __reduce_max_sync(kFullWarp, __float_as_uint(x));
    }
    const int e = R::kNumScales > 0 ? min(max(exponent_above(largest), -100), 100) : 0;
    b.unscale = power_of_two(-e);
    b.e[0] = b.e[1] = e;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j) b.scales[i][j] *= b.unscale;
    const bool masked[2] = {!valid[g_], !valid[g_ + 8]};
    const bool infinite = largest >= __float_as_uint(INFINITY);
    if (__any_sync(kFullWarp, masked[0] || masked[1] || infinite)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (scales[i].nan()) b.e[i] = NAN;
        if (!masked[i]) continue;
        b.e[i] = -INFINITY;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) b.s[n][2 * i] = b.s[n][2 * i + 1] = 0.0f;  // it may be NaN
      }
    }
  }

  // Weights for the bases as they are. True: some of this lane's are too large for that.
  __device__ bool weigh(Block& b) const {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        // In this order a logit that equals its base has exactly the weight 2^7.
        const float x = b.logit(n, c, logit_scale_[n][c % 2]) - max_[n][c % 2] + kWeightLog2;
        largest = fmaxf(largest, x);
        b.p[n][c] = fast_exp2(x);
      }
    return largest > kWeightLog2 + kLazyLog2;
  }

  __device__ bool finds_largest() const { return C::kRows > 1 || p_.max_logits; }  // prefill always does
  // The largest logits of these 16 tokens + e.
  __device__ float largest_logit(const Block& b, int n, int c) const {
    return max_over_g(fmaxf(b.logit(n, c, logit_scale_[n][c]), b.logit(n, c + 2, logit_scale_[n][c])));
  }
  // No shuffle and no shared memory: a lane keeps those of its own tokens until the end of the row.
  __device__ void note_largest(const Block& b) {
    const float back = static_cast<int>(__float_as_uint(b.unscale) >> 23) - 127;  // -e
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = b.logit(n, c, logit_scale_[n][c]), y = b.logit(n, c + 2, logit_scale_[n][c]);
        largest_[n][c] = fmaxf(largest_[n][c], fmaxf(x, y) + back);
      }
  }

  // The base of heads 2t + c of the n-th group, given their largest logit. The sum follows at once, O is to
  // be multiplied by what this returns, weights are to be found again.
  __device__ float move_base(int n, int c, float largest) {
    if (!(largest > max_[n][c] + kLazyLog2)) return 1.0f;
    const float factor = fast_exp2(max_[n][c] - largest);
    max_[n][c] = largest;
    sum_[n][c] *= factor;
    return factor;
  }
  __device__ void add_to_sums(const Block& b) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[n][c] += (b.p[n][c] + b.p[n][c + 2]) * b.unscale;
  }

  // values.cuh: O^T += V^T P^T for a block; its slots are given as positions in the ring's sequence.
  __device__ void accumulate_alone(int slot, Block& b, bool over);
  __device__ void accumulate_shared(int first_slot, int parity, Block& b, bool over);
  __device__ void store_weights(int buffer, const Block& b) const;
  template <bool kLastIsBf16>
  __device__ void accumulate_block(int first_slot, int buffer);
  template <class Mma>
  __device__ void accumulate_bf16(int chunk, uint32_t values, Mma&& mma);

  __device__ uint32_t q_address() const { return ring_.smem + C::kQ + row() * C::kQBytes; }

  const SparseAttentionParams& p_;
  uint8_t* const smem_;
  const Ring<C> ring_;
  const int team_, member_, lane_, g_, t_;
  uint32_t tokens_by_dims_;  // ldmatrix of K (rows are tokens), and of V as pairs of bytes
  uint32_t bf16_values_, weights_row_;
  float logit_scale_[kGroups][2];
  float largest_[kGroups][2];  // of this lane's logits (log2)
};

}  // namespace mla_fp8::gpu
