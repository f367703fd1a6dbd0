#pragma once
// The warps of a team: Q, the loop over blocks, both products and the softmax between them. Both products
// take their K / V operand straight from the raw rows in shared memory (fragments:
// docs/kernels/hopper.md).
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

// ---- Q of one CTA, in the order in which the tensor cores read it as the B operand of K Q^T -------------

// The heads of one of kWarps warps. Loaded before the first barrier, stored after it.
template <class C, int kWarps = kConsumerWarps>
struct Query {
  using R = typename C::R;
  static constexpr int kHeads = C::kHeads / kWarps, kWords = R::kDims / 64;
  uint32_t word[kHeads][kWords];

  __device__ void load(const SparseAttentionParams& p, int64_t query, int first_head, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      const uint32_t* row =
          reinterpret_cast<const uint32_t*>(p.q + query * p.q_stride_token + head * p.q_stride_head);
#pragma unroll
      for (int j = 0; j < kWords; ++j)
        word[i][j] = head < p.num_q_heads ? __ldg(row + lane + kWarpSize * j) : 0u;
    }
  }

  // What load will read, into L2.
  __device__ static void prefetch(const SparseAttentionParams& p, int64_t query, int first_head, int warp,
                                  int lane) {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = first_head + warp * kHeads + i;
      if (head < p.num_q_heads && lane < ceil_div(R::kDims * 2, 128))
        prefetch_l2(p.q + query * p.q_stride_token + head * p.q_stride_head + lane * 64);
    }
  }

  // Scaled (q_factor); the factors go to q_scale.
  __device__ void store(uint8_t* q, float* q_scale, int warp, int lane) const {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      const int head = warp * kHeads + i;
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < kWords; ++j) largest = larger_magnitudes(largest, word[i][j]);
      const float factor = q_factor(__reduce_max_sync(kFullWarp, larger_of_two(largest)));
      if (lane == 0) q_scale[head] = factor;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int at = lane + kWarpSize * j, step = at / 8, in_step = at % 8;
        const bool fp8 = step < R::kFp8Dims / 16;
        // K's fragments hold e4m3 dims 4t .. 4t + 3 in the places of k = 2t, 2t + 1, 2t + 8, 2t + 9.
        const int t = fp8 ? in_step / 2 : in_step % 4, half = fp8 ? in_step % 2 : in_step / 4;
        *reinterpret_cast<uint32_t*>(q + offset(step, head, t, half)) = q_pair(word[i][j], factor, fp8);
      }
    }
    if constexpr (C::kWgmma) fence_proxy_async();
  }

 private:
  // mma: one 16-byte load gives a lane both registers of two octets, or of two steps of one. wgmma: core
  // matrices of 8 heads x 16 bytes.
  __device__ static int offset(int step, int head, int t, int half) {
    const int octet = head / kOctetHeads, row = head % kOctetHeads;
    if constexpr (C::kWgmma) return (step * 2 + half) * C::kHeads * 16 + octet * 128 + row * 16 + t * 4;
    const int fragment = step * C::kOctets + octet;
    return (fragment / 2 * kWarpSize + row * 4 + t) * 16 + fragment % 2 * 8 + half * 4;
  }
};

// ---- one warp -------------------------------------------------------------------------------------------

enum FewHeadsBarrier {
  kBarrierTeam = kBarrierOfKernel,  // + team
  kBarrierQuery = 8,                // + place of a walk
};

template <class C>
class Consumer {
 public:
  using R = typename C::R;
  static constexpr int kOctets = C::kOctets, kMembers = C::kMembers;
  static_assert(!C::kShared || kBarrierTeam + C::kTeams <= (C::kWalks ? kBarrierQuery : kBarrierSurvey),
                "a warp alone has no team to wait for");
  static_assert(kBarrierQuery + C::kQueries <= kNumBarriers);

  __device__ Consumer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : p_(params.p),
        smem_(smem),
        ring_{shared_address(smem)},
        team_(warp / kMembers),
        member_(warp % kMembers),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {
    const int matrix = lane / 8, row = lane % 8;
    keys_by_dims_ = ((matrix & 1) * 8 + row) * R::kPitch + (matrix >> 1) * 16;
    bf16_values_ = ((matrix >> 1) * 8 + row) * R::kPitch + (matrix & 1) * 16;
    weights_row_ = row * C::kPPitch + matrix * 16;
  }

  __device__ void init() {
    const float* q_scale =
        reinterpret_cast<const float*>(smem_ + MLA_SMEM(C, q_scale)) + query_place() * C::kHeads;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        max_[n][c] = kNoMax;
        largest_[n][c] = -INFINITY;
        sum_[n][c] = 0.0f;
        logit_scale_[n][c] = logit_scale<R>(p_, q_scale[n * kOctetHeads + 2 * t_ + c]);
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
    // Before others' rows are read there is a barrier of the team, whose members have waited for them.
    if constexpr (kForRacecheck && R::kMixed)
      for (int member = 0; member < kMembers; ++member) wait_full(first + member);
    const uint32_t rows = ring_.stage(mine % C::kStages);
    RowScales<R> scales[2];  // of keys g and g + 8
    Block b;
    if constexpr (R::kMixed) {
      attend_to_keys(mine % C::kStages, b);
    } else {
      const uint8_t* row = smem_ + MLA_SMEM(C, ring) + mine % C::kStages * C::kStageBytes + g_ * R::kPitch;
      scales[0].load(row);
      scales[1].load(row + 8 * R::kPitch);
      if constexpr (C::kWgmma) logits_wgmma(rows, scales, b.s);
      else logits_mma(rows, scales, b.s);
      bring_scales_below_one(row, scales, smem_ + MLA_SMEM(C, valid) + mine % C::kStages * kStageRows, b);
    }
    if (finds_largest()) note_largest(b);
    const bool over = weigh(b);
    if constexpr (C::kShared) accumulate_shared(first, block / C::kTeams % 2, b, over);
    else accumulate_alone(mine, b, over);
  }

  // The team's sums, in one of its lanes: in all others they are zero. `last_block`: as attend's.
  __device__ void add_up_sums(int last_block) {
    // The block's maxima are done with. Nobody writes there again before a barrier of the next block.
    const int buffer = team_ * 2 + last_block / C::kTeams % 2;
    float2* const sums =
        reinterpret_cast<float2*>(smem_ + MLA_SMEM(C, block_max)) + buffer * kMembers * C::kHeads / 2 + t_;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float2 mine = {sum_over_g(sum_[n][0]), sum_over_g(sum_[n][1])};
      if (g_ == 0) sums[(member_ * C::kHeads + n * kOctetHeads) / 2] = mine;
    }
    named_barrier(kBarrierTeam + team_, kWarpSize * kMembers);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int m = 0; m < kMembers; ++m) {
        const float2 x = sums[(m * C::kHeads + n * kOctetHeads) / 2];
        sum = {sum.x + x.x, sum.y + x.y};
      }
      const bool is_one = member_ == 0 && g_ == 0;
      sum_[n][0] = is_one ? sum.x : 0.0f, sum_[n][1] = is_one ? sum.y : 0.0f;
    }
  }

  // This warp's (base, sum of weights) and largest logit (log2) of every head, to shared memory.
  __device__ void write_stats(uint8_t* smem) const {
    const int at = (team_ * kMembers + member_) * C::kHeads;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float sum0 = sum_over_g(sum_[n][0]), sum1 = sum_over_g(sum_[n][1]);
      const int pair = (at + n * kOctetHeads) / 2 + t_;
      if (g_ == 0)
        reinterpret_cast<float4*>(smem + MLA_SMEM(C, warp_stats))[pair] = {max_[n][0], sum0, max_[n][1],
                                                                           sum1};
      if (!finds_largest()) continue;
      const float largest0 = max_over_g(largest_[n][0]), largest1 = max_over_g(largest_[n][1]);
      if (g_ == 0) reinterpret_cast<float2*>(smem + MLA_SMEM(C, warp_largest))[pair] = {largest0, largest1};
    }
  }

  // O of the n-th octet, times a factor for each of the heads 2t and 2t + 1, to float [head][kOutPitch].
  __device__ __forceinline__ void store_partial(int n, float* head0, const float (&factor)[2]) const {
    float* const head1 = head0 + C::kOutPitch;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&o)[4] = out_[chunk][i][n];
        const int dim = chunk * kChunkDims + i * 16;
        if (is_bf16(chunk)) {  // fragment rows g, g + 8 are those dims
          head0[dim + g_] = o[0] * factor[0], head0[dim + g_ + 8] = o[2] * factor[0];
          head1[dim + g_] = o[1] * factor[1], head1[dim + g_ + 8] = o[3] * factor[1];
        } else {  // they are dims 2g, 2g + 1
          *reinterpret_cast<float2*>(head0 + dim + 2 * g_) = {o[0] * factor[0], o[2] * factor[0]};
          *reinterpret_cast<float2*>(head1 + dim + 2 * g_) = {o[1] * factor[1], o[3] * factor[1]};
        }
      }
  }

  // O of the n-th octet's heads 2t, 2t + 1.
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
  // Of the queries that the CTA has at once.
  __device__ int query_place() const { return C::kQueries > 1 ? team_ / C::kQueryTeams : 0; }

  // What merges and ends of queries read and scale.
  float out_[C::kChunks][4][kOctets][4];     // O^T: 64-dim chunk, 16-dim tile of it, octet of heads, fragment
  float max_[kOctets][2], sum_[kOctets][2];  // of heads 2t, 2t + 1: base (log2), sum of 2^(logit - base + 7)

  __device__ bool is_bf16(int chunk) const {  // does local chunk `chunk` hold bf16 values?
    if constexpr (R::kFp8Chunks == 0) return true;
    else if constexpr (R::kFp8Chunks == kNumChunks) return false;
    else return chunk == C::kChunks - 1 && member_ == kMembers - 1;
    static_assert(R::kFp8Chunks == 0 || R::kFp8Chunks >= kNumChunks - 1);
  }

 protected:
  static constexpr int kLaneScales = RowScales<R>::kPerLane;
  struct Block {                         // what a warp knows of its 16 keys
    float s[kOctets][4], p[kOctets][4];  // products with Q; weights
    // 2^e is above all value scales of the 16 keys: they are used as s * 2^-e <= 1, weights carry the 2^e.
    float e[2];                                          // of keys g and g + 8; -inf: masked
    float unscale;                                       // 2^-e
    float scales[2][kLaneScales > 0 ? kLaneScales : 1];  // * 2^-e: RowScales::of_lane

    // In units of log2, plus e.
    __device__ float logit(int n, int c, float logit_scale) const {
      return fmaf(s[n][c], logit_scale, e[c / 2]);
    }
  };
  struct PairWeights {  // of two stages, as B fragments
    uint32_t fp8[kOctets][4], bf16[kOctets][4];
  };
  // Value scales of a block, f16 [tile][pair of stages]: what lane t wants of a pair lies in 16 bytes. Key
  // g + 8i of the stage of `member`.
  __device__ static int scale_offset(int tile, int member, int g, int i) {
    return tile * C::kBlockKeys * 2 + member / 2 * 64 + g / 2 * 16 + member % 2 * 8 + i * 4 + g % 2 * 2;
  }

  __device__ void wait_full(int i) const { wait_until_full<C::kStages>(ring_.full(i % C::kStages), i); }
  // The fence: without it the arrival was seen to overtake the last ldmatrix of the stage.
  __device__ void release(int i) const {
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kStages), lane_);
  }
  __device__ void release(int i, int j) const {  // both at the price of one
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kStages), lane_);
    mbarrier_arrive_warp(ring_.empty(j % C::kStages), lane_);
  }

  // S^T of 16 keys, `rows` the address of the first.
  __device__ void logits_mma(uint32_t rows, const RowScales<R> (&scales)[2], float (&s)[kOctets][4]) const;
  __device__ void logits_wgmma(uint32_t rows, const RowScales<R> (&scales)[2], float (&s)[kOctets][4]) const;
  // The same of rows of two caches (mixed.cuh), with what softmax needs besides.
  __device__ void attend_to_keys(int stage, Block& b) const;
  __device__ void mixed_logits_mma(uint32_t rows, int e, float (&s)[kOctets][4]) const;
  __device__ void mixed_logits_wgmma(uint32_t rows, int e, float (&s)[kOctets][4]) const;

  // ---- weights ----

  // What softmax needs besides the products: value scales as the weights will have them, which keys count.
  __device__ void bring_scales_below_one(const uint8_t* row, const RowScales<R> (&scales)[2],
                                         const uint8_t* valid, Block& b) const {
    uint32_t largest = 0;  // magnitude, of the 16 keys; the bits of these are in their order
    if constexpr (R::kNumScales > 0) {
      float x = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kLaneScales; ++j) {
          b.scales[i][j] = scales[i].of_lane(row + 8 * i * R::kPitch, j, t_);
          x = fmaxf(x, fabsf(b.scales[i][j]));
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
        for (int n = 0; n < kOctets; ++n) b.s[n][2 * i] = b.s[n][2 * i + 1] = 0.0f;  // it may be NaN
      }
    }
  }

  // Weights for the bases as they are. True: some of this lane's are too large for that.
  __device__ bool weigh(Block& b) const {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        // In this order a logit that equals its base has exactly the weight 2^7.
        const float x = b.logit(n, c, logit_scale_[n][c % 2]) - max_[n][c % 2] + kWeightLog2;
        largest = fmaxf(largest, x);
        b.p[n][c] = fast_exp2(x);
      }
    return largest > kWeightLog2 + kLazyLog2;
  }

  // Prefill always does.
  __device__ bool finds_largest() const { return C::kFindsLargest && (C::kQueries > 1 || p_.max_logits); }
  // The largest logits of these 16 keys + e.
  __device__ float largest_logit(const Block& b, int n, int c) const {
    return max_over_g(fmaxf(b.logit(n, c, logit_scale_[n][c]), b.logit(n, c + 2, logit_scale_[n][c])));
  }
  // No shuffle and no shared memory: a lane keeps those of its own keys until the end of the query.
  __device__ void note_largest(const Block& b) {
    const float back = static_cast<int>(__float_as_uint(b.unscale) >> 23) - 127;  // -e
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = b.logit(n, c, logit_scale_[n][c]), y = b.logit(n, c + 2, logit_scale_[n][c]);
        largest_[n][c] = fmaxf(largest_[n][c], fmaxf(x, y) + back);
      }
  }

  // The base of heads 2t + c of the n-th octet, given their largest logit. The sum follows at once, O is to
  // be multiplied by what this returns, weights are to be found again.
  __device__ float move_base(int n, int c, float largest) {
    if (!(largest > max_[n][c] + kLazyLog2)) return 1.0f;
    const float base = base_for<C>(largest), factor = fast_exp2(max_[n][c] - base);
    max_[n][c] = base;
    sum_[n][c] *= factor;
    return factor;
  }
  __device__ void add_to_sums(const Block& b) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum_[n][c] += (b.p[n][c] + b.p[n][c + 2]) * b.unscale;
  }

  // O^T += V^T P^T for a block; its stages are given as positions in the ring's sequence.
  __device__ void accumulate_alone(int stage, Block& b, bool over);
  __device__ void accumulate_shared(int first_stage, int parity, Block& b, bool over);
  __device__ void store_weights(int buffer, const Block& b) const;
  template <bool kLastIsBf16>
  __device__ void accumulate_block(int first_stage, int buffer);
  template <bool kLastIsBf16>
  __device__ void accumulate_mixed_block(int first_stage, int buffer);
  template <class Mma>
  __device__ void accumulate_bf16(int chunk, uint32_t values, Mma&& mma);

  __device__ uint32_t q_address() const { return ring_.smem + MLA_SMEM(C, q) + query_place() * C::kQBytes; }

  const SparseAttentionParams& p_;
  uint8_t* const smem_;
  const Ring<C> ring_;
  const int team_, member_, lane_, g_, t_;
  uint32_t keys_by_dims_;  // ldmatrix of K (rows are keys), and of V as pairs of bytes
  uint32_t bf16_values_, weights_row_;
  float logit_scale_[kOctets][2];
  float largest_[kOctets][2];  // of this lane's logits (log2)
};

// ---- S^T = K Q^T ----------------------------------------------------------------------------------------
//
// For the 16 keys of a warp, all heads of the CTA. K comes from the raw rows by ldmatrix and
// one conversion; the scales of its tiles multiply float accumulators.

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

// One mma per 16 dims and octet of heads, in units of 32 dims; what a unit reads from shared memory is
// fetched kAhead units before. The two halves of a unit have accumulators of their own, and kInterleave
// tiles are worked on in turn: a product waits for none of the last three.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_mma(uint32_t rows, const RowScales<R> (&scales)[2],
                                                        float (&s)[kOctets][4]) const {
  constexpr int kAhead = 2, kInterleave = kOctets == 1 ? 2 : 1;
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
  uint4 q[kAhead + 1][kOctets];
  uint32_t raw[kAhead + 1][2][4];  // the second of bf16 units only
  const auto fetch = [&](int i) {
    if (i >= kUnits) return;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
      q[i % (kAhead + 1)][n] = load_shared_16(q_base + (first_dim(i) / 32 * kOctets + n) * 512);
    auto& dst = raw[i % (kAhead + 1)];
    const uint32_t row = rows + keys_by_dims_;
    if (i < kBf16Units) {
      ldmatrix_x4(dst[0], row + R::kBf16Offset + i * 64);
      ldmatrix_x4(dst[1], row + R::kBf16Offset + i * 64 + 32);
    } else {
      ldmatrix_x4(dst[0], row + first_dim(i));
    }
  };

  float acc[kInterleave][2][kOctets][4];
#pragma unroll
  for (int n = 0; n < kOctets; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
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
        for (int n = 0; n < 2 * kOctets; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) acc[j][n / kOctets][n % kOctets][c] = 0.0f;
    }
    fetch(i + kAhead);
    const auto& unit_q = q[i % (kAhead + 1)];
    auto& unit_raw = raw[i % (kAhead + 1)];
    uint32_t k[2][4];
    if (!bf16) convert_keys(unit_raw[0], k[0], k[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const uint4& x = unit_q[(half * kOctets + n) / 2];
        const bool second = (half * kOctets + n) % 2;
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

// The four warps of a team at once: Q is read once per 64 keys, not once per 16, and by the tensor cores
// themselves. In parts of 64 dims, or of a smaller tile: bytes are fetched a part ahead of their conversion,
// which goes on while the products of the part before are running; a tile's sum is taken up once the next has
// begun.
template <class C>
__device__ __forceinline__ void Consumer<C>::logits_wgmma(uint32_t rows, const RowScales<R> (&scales)[2],
                                                          float (&s)[kOctets][4]) const {
  constexpr int kPartDims = R::kTileDims < 64 ? R::kTileDims : 64, kUnits = kPartDims / 32;
  constexpr int kBf16Parts = R::kBf16Dims / kPartDims, kParts = R::kDims / kPartDims;
  constexpr int kPartsPerTile = R::kTileDims / kPartDims, kSteps = kPartDims / 16;
  const uint64_t q = wgmma_descriptor(q_address(), C::kHeads * 16, 128);
  constexpr int kStepQ = C::kHeads * 2;  // of the descriptor's address
  const uint32_t row = rows + keys_by_dims_;
  uint32_t k[2][kSteps][4], bytes[kUnits][4];
  float acc[2][kOctets][4];  // of tiles in turn; bf16 dims come first and count as one
  const auto fetch = [&](int part) {
    if (part < kBf16Parts) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ldmatrix_x4(k[part % 2][i], row + R::kBf16Offset + (part * kPartDims + i * 16) * 2);
    } else {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) ldmatrix_x4(bytes[i], row + (part - kBf16Parts) * kPartDims + i * 32);
    }
  };
  const auto tile_of = [&](int part) { return part < kBf16Parts ? -1 : (part - kBf16Parts) / kPartsPerTile; };
  const auto finish_tile = [&](int tile) {
    float (&a)[kOctets][4] = acc[(tile + 1) % 2];
    pin_registers(a);
    if (tile >= 0) add_scaled(s, a, scales[0][tile], scales[1][tile]);
    else add_scaled(s, a, 1.0f, 1.0f);
  };
#pragma unroll
  for (int n = 0; n < kOctets; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
  fetch(0);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const bool bf16 = part < kBf16Parts;
    const int tile = tile_of(part),
              step = bf16 ? R::kFp8Dims / 16 + part * kSteps : (part - kBf16Parts) * kSteps;
    if (!bf16)
#pragma unroll
      for (int i = 0; i < kUnits; ++i) convert_keys(bytes[i], k[part % 2][2 * i], k[part % 2][2 * i + 1]);
    if (part + 1 < kParts && !(part + 1 < kBf16Parts)) fetch(part + 1);
    float (&a)[kOctets][4] = acc[(tile + 1) % 2];
    const bool new_tile = part == 0 || tile_of(part - 1) != tile;
    pin_registers(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
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

// ---- O^T += V^T P^T -------------------------------------------------------------------------------------
//
// V comes from the raw rows by ldmatrix.trans, as pairs of bytes for e4m3; its scales
// multiply the weights.

// kMembers = 1, bf16 rows: a warp keeps its 16 keys. The weights turn from C into B fragments inside the
// warp.
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

// kMembers > 1: each warp has the weights of its 16 keys and wants those of the whole block, for its own
// value dims. They meet in shared memory, at one barrier per block, which also tells whether some base must
// move: then they are found again.
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
  if constexpr (R::kMixed) {
    if (is_bf16(C::kChunks - 1)) accumulate_mixed_block<true>(first_stage, buffer);
    else accumulate_mixed_block<false>(first_stage, buffer);
  } else {
    if (is_bf16(C::kChunks - 1)) accumulate_block<true>(first_stage, buffer);
    else accumulate_block<false>(first_stage, buffer);
  }
}

// A block, this warp's value dims; every member has waited for its own stage before the barrier, so all are
// there. Stages are read in pairs of 32 keys, one ldmatrix of weights; everything is fetched a step ahead,
// across stages.
template <class C>
template <bool kLastIsBf16>
__device__ __forceinline__ void Consumer<C>::accumulate_block(int first_stage, int buffer) {
  constexpr int kFp8Chunks = R::kFp8Chunks == 0 ? 0 : C::kChunks - kLastIsBf16, kUnits = kFp8Chunks * 2;
  const int first_chunk = member_ * C::kChunks;
  const uint32_t rows = ring_.stage(first_stage % C::kStages);
  const uint32_t values = rows + keys_by_dims_ + first_chunk * kChunkDims;
  const uint8_t* scale_table = smem_ + MLA_SMEM(C, scales) + buffer * C::kScaleBytes;
  uint32_t bytes[2][4];
  const auto load_bytes = [&](int m, int unit) {  // of 32 dims
    ldmatrix_x4_trans(bytes[unit % 2], values + m * C::kStageBytes + unit * 32);
  };
  // Of units: their first has the scale of a tile. kChunks is a multiple of a tile's chunks.
  constexpr int kScaled = R::kNumScales > 0 ? kUnits : 0;
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
  const auto load_weights = [&](int pair) {
    const uint32_t at = ring_.smem + buffer * C::kPBytes + weights_row_ + pair * 64;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const uint32_t offset = at + n * kOctetHeads * C::kPPitch;
      if constexpr (R::kFp8Chunks > 0)
        ldmatrix_x4(weights[pair % 2].fp8[n], offset + MLA_SMEM(C, weights_fp8));
      if constexpr (kLastIsBf16) ldmatrix_x4(weights[pair % 2].bf16[n], offset + MLA_SMEM(C, weights_bf16));
    }
  };
  load_weights(0);
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
        mma_f16(out_[chunk][u % 2 * 2][n], v[0], b0[n], b1[n]);
        mma_f16(out_[chunk][u % 2 * 2 + 1][n], v[1], b0[n], b1[n]);
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
      if (m + 1 < kMembers) {
        load_weights(m / 2 + 1);
        load_scales(m / 2 + 1);
      }
      release(first_stage + m - 1, first_stage + m);
    }
  }
}

}  // namespace mla_fp8::gpu
