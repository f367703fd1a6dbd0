#pragma once
// A consumer warp: its loop over blocks, and the softmax between the products (products.cuh).
#include "cuda/sparse_attention/sm90/few_heads/query.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

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

  // Attends to a block of the ring's sequence. The team has the blocks team, team + kTeams, ...
  __device__ __forceinline__ void attend(int block) {
    const int first = block * kMembers, mine = first + member_;
    wait_full(mine);
    // Others' rows are read behind a barrier of the team, whose members waited; racecheck does not see that.
    if constexpr (kForRacecheck && R::kMixed)
      for (int member = 0; member < kMembers; ++member) wait_full(first + member);
    RowScales<R> scales[2];  // keys g and g + 8
    if constexpr (R::kMixed) {
      const int* exponents = reinterpret_cast<const int*>(smem_ + MLA_SMEM(C, stage_exponents));
      scales[0].e = scales[1].e = exponents[mine % C::kStages];
    }
    const uint32_t rows = ring_.stage(mine % C::kStages);
    Block b;
    const uint8_t* row = smem_ + MLA_SMEM(C, ring) + mine % C::kStages * C::kStageBytes + g_ * R::kPitch;
    if constexpr (!R::kMixed) scales[0].load(row), scales[1].load(row + 8 * R::kPitch);
    if constexpr (C::kWgmma) logits_wgmma(rows, scales, b.s);
    else logits_mma(rows, scales, b.s);
    const uint8_t* valid = smem_ + MLA_SMEM(C, valid) + mine % C::kStages * kStageRows;
    if constexpr (R::kMixed) take_exponent(scales[0].e, valid, b);
    else bring_scales_below_one(row, scales, valid, b);
    if (finds_largest()) note_largest(b);
    const bool over = weigh(b);
    if constexpr (C::kShared) accumulate_shared(first, block / C::kTeams % 2, b, over);
    else accumulate_alone(mine, b, over);
  }

  // Adds up the team's sums in one of its lanes; all others get zero. `last_block`: as attend's.
  __device__ void add_up_sums(int last_block) {
    // The last block's maxima are no longer needed. No warp writes there before a barrier of the next block.
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

  // Writes this warp's (base, sum of weights) and largest logit (log2) of every head to shared memory.
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

  // Stores O of the n-th octet, times a factor for head 2t and for 2t + 1, as float [head][kOutPitch].
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

  // Multiplies O of the n-th octet's heads 2t, 2t + 1.
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
  // The place of the team's query among those that the CTA has at once.
  __device__ int query_place() const { return C::kQueries > 1 ? team_ / C::kQueryTeams : 0; }

  // Merges and ends of queries read and scale these.
  float out_[C::kChunks][4][kOctets][4];     // O^T: 64-dim chunk, 16-dim tile of it, octet of heads, fragment
  float max_[kOctets][2], sum_[kOctets][2];  // heads 2t, 2t + 1: base (log2), sum of 2^(logit - base + 7)

  __device__ bool is_bf16(int chunk) const {  // does local chunk `chunk` hold bf16 values?
    if constexpr (R::kFp8Chunks == 0) return true;
    else if constexpr (R::kFp8Chunks == kNumChunks) return false;
    else return chunk == C::kChunks - 1 && member_ == kMembers - 1;
    static_assert(R::kFp8Chunks == 0 || R::kFp8Chunks >= kNumChunks - 1);
  }

 protected:
  static constexpr int kLaneScales = RowScales<R>::kPerLane;
  struct Block {                         // a warp's 16 keys
    float s[kOctets][4], p[kOctets][4];  // products with Q; weights
    // 2^e is above all value scales of the 16 keys: they are used as s * 2^-e <= 1, weights carry the 2^e.
    float e[2];                                          // keys g and g + 8; -inf: masked
    float unscale;                                       // 2^-e
    float scales[2][kLaneScales > 0 ? kLaneScales : 1];  // * 2^-e: RowScales::of_lane

    // The logit (log2) plus e.
    __device__ float logit(int n, int c, float logit_scale) const {
      return fmaf(s[n][c], logit_scale, e[c / 2]);
    }
  };
  struct PairWeights {  // weights of two stages, as B fragments
    uint32_t fp8[kOctets][4], bf16[kOctets][4];
  };
  // The place of a value scale in a block's table, f16 [tile][pair of stages], for key g + 8i of the stage of
  // `member`. A lane's scales of a pair lie in 16 bytes.
  __device__ static int scale_offset(int tile, int member, int g, int i) {
    return tile * C::kBlockKeys * 2 + member / 2 * 64 + g / 2 * 16 + member % 2 * 8 + i * 4 + g % 2 * 2;
  }

  __device__ void wait_full(int i) const { wait_until_full<C::kStages>(ring_.full(i % C::kStages), i); }
  // Without the fence the arrival was seen to overtake the last ldmatrix of the stage.
  __device__ void release(int i) const {
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kStages), lane_);
  }
  __device__ void release(int i, int j) const {  // two at the price of one
    fence_proxy_async();
    mbarrier_arrive_warp(ring_.empty(i % C::kStages), lane_);
    mbarrier_arrive_warp(ring_.empty(j % C::kStages), lane_);
  }

  // These compute S^T of 16 keys; `rows` is the address of the first.
  __device__ void logits_mma(uint32_t rows, const RowScales<R> (&scales)[2], float (&s)[kOctets][4]) const;
  __device__ void logits_wgmma(uint32_t rows, const RowScales<R> (&scales)[2], float (&s)[kOctets][4]) const;
  static constexpr int kStepQ = C::kHeads * 2;  // 16 dims, in a wgmma descriptor of Q
  // Loads a part of 16 * kSteps bf16 dims.
  template <int kSteps>
  __device__ __forceinline__ void fetch_bf16(uint32_t (&k)[kSteps][4], uint32_t row, int part) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) ldmatrix_x4(k[i], row + R::kBf16Offset + (part * kSteps + i) * 16 * 2);
  }
  template <int kSteps>
  __device__ __forceinline__ void wgmma_part(float (&a)[kOctets][4], bool bf16,
                                             const uint32_t (&k)[kSteps][4], uint64_t q, bool first) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (bf16) wgmma_bf16(a, k[i], q + i * kStepQ, !first || i > 0);
      else wgmma_f16(a, k[i], q + i * kStepQ, !first || i > 0);
    }
    wgmma_commit();
  }

  // ---- weights ----

  // Brings value scales to at most 1, as the weights will have them, and finds which keys count.
  __device__ void bring_scales_below_one(const uint8_t* row, const RowScales<R> (&scales)[2],
                                         const uint8_t* valid, Block& b) const {
    uint32_t largest = 0;  // bits of the largest magnitude of a scale: they compare as floats do
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
        if (masked[i]) mask_key(i, b);
      }
    }
  }

  // The same over two layouts, where scales are below one already, in units of 2^e.
  __device__ void take_exponent(int e, const uint8_t* valid, Block& b) const {
    b.unscale = power_of_two(-e);
    b.e[0] = b.e[1] = static_cast<float>(e);
    const uint32_t state[2] = {valid[g_], valid[g_ + 8]};
    if (__any_sync(kFullWarp, state[0] != kValidKey || state[1] != kValidKey)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (state[i] & kNanKey) b.e[i] = NAN;
        if (!state[i]) mask_key(i, b);
      }
    }
  }
  __device__ void mask_key(int i, Block& b) const {
    b.e[i] = -INFINITY;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) b.s[n][2 * i] = b.s[n][2 * i + 1] = 0.0f;  // it may be NaN
  }

  // Computes weights for the present bases. True: one of this lane's is too large for them.
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

  // Walks always do.
  __device__ bool finds_largest() const { return C::kFindsLargest && (C::kQueries > 1 || p_.max_logits); }
  // The largest logit of these 16 keys, plus e.
  __device__ float largest_logit(const Block& b, int n, int c) const {
    return max_over_g(fmaxf(b.logit(n, c, logit_scale_[n][c]), b.logit(n, c + 2, logit_scale_[n][c])));
  }
  // A lane keeps the largest logits of its own keys until the end of the query, without shuffles.
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

  // Moves the base of head 2t + c of the n-th octet, if its largest logit asks for it. The sum follows at
  // once. The caller multiplies O by the result, and computes weights again.
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

  // These add V^T P^T of a block to O^T. Stages are positions in the ring's sequence.
  __device__ void accumulate_alone(int stage, Block& b, bool over);
  __device__ void accumulate_shared(int first_stage, int parity, Block& b, bool over);
  __device__ void store_weights(int buffer, const Block& b) const;
  // Loads the weights of a pair of stages.
  template <bool kLastIsBf16>
  __device__ __forceinline__ void load_weights(PairWeights& to, int buffer, int pair) const {
    const uint32_t at = ring_.smem + buffer * C::kPBytes + weights_row_ + pair * 64;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const uint32_t offset = at + n * kOctetHeads * C::kPPitch;
      if constexpr (R::kFp8Chunks > 0) ldmatrix_x4(to.fp8[n], offset + MLA_SMEM(C, weights_fp8));
      if constexpr (kLastIsBf16) ldmatrix_x4(to.bf16[n], offset + MLA_SMEM(C, weights_bf16));
    }
  }
  // Adds the bf16 chunks of a stage, from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void accumulate_bf16_chunks(uint32_t stage, const PairWeights& w, int half) {
#pragma unroll
    for (int chunk = kFirst; chunk < C::kChunks; ++chunk)
      accumulate_bf16(chunk, stage + (member_ * C::kChunks + chunk - R::kFp8Chunks) * 128,
                      [&](float (&o)[kOctets][4], const uint32_t (&v)[4]) {
#pragma unroll
                        for (int n = 0; n < kOctets; ++n)
                          mma_bf16(o[n], v, w.bf16[n][2 * half], w.bf16[n][2 * half + 1]);
                      });
  }
  template <bool kLastIsBf16>
  __device__ void accumulate_block(int first_stage, int buffer);
  template <class Mma>
  __device__ void accumulate_bf16(int chunk, uint32_t values, Mma&& mma);

  __device__ uint32_t q_address() const { return ring_.smem + MLA_SMEM(C, q) + query_place() * C::kQBytes; }

  const SparseAttentionParams& p_;
  uint8_t* const smem_;
  const Ring<C> ring_;
  const int team_, member_, lane_, g_, t_;
  uint32_t keys_by_dims_;  // offset for ldmatrix of K (rows are keys), and of V as pairs of bytes
  uint32_t bf16_values_, weights_row_;
  float logit_scale_[kOctets][2];
  float largest_[kOctets][2];  // largest of this lane's logits (log2)
};

}  // namespace mla_fp8::gpu
