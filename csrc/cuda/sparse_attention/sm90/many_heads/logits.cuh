#pragma once
// S^T = K Q^T and softmax.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/parts.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/many_heads/query.cuh"
#include "cuda/sparse_attention/sm90/many_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"
#include "cuda/sparse_attention/sm90/walk_item.cuh"

namespace mla_fp8::gpu {

// What the logits warps of both schedules share: 16 keys of a block each, all heads.
template <class C>
class LogitWarp {
 public:
  using R = typename C::R;
  static constexpr int kOctets = C::kOctets;

 protected:
  __device__ LogitWarp(uint8_t* smem, int member, int lane)
      : bytes_(smem), ring_{shared_address(smem)}, member_(member), lane_(lane), g_(lane / 4), t_(lane % 4) {}

  __device__ float2* head_state() const {
    return reinterpret_cast<float2*>(bytes_ + MLA_SMEM(C, head_state));
  }
  // (logit scale, base - 7) of heads 8n + 2t and + 1.
  __device__ float4 head_pair(int n) const {
    return reinterpret_cast<const float4*>(head_state())[n * kOctetHeads / 2 + t_];
  }
  __device__ const uint8_t* row_of(int stage) const {  // of key g
    return bytes_ + MLA_SMEM(C, ring) + stage * C::kStageBytes + g_ * R::kPitch;
  }

  __device__ __forceinline__ void load_scales(int stage) {
    if constexpr (R::kMixed) {
      scales_.e = reinterpret_cast<const int*>(bytes_ + MLA_SMEM(C, stage_exponents))[stage];
      const uint8_t* const valid = bytes_ + MLA_SMEM(C, valid) + stage * kStageRows;
#pragma unroll
      for (int i = 0; i < 2; ++i) scales_.is_nan[i] = valid[g_ + 8 * i] & kNanKey;
    } else {
      scales_.template load<C::kNeighbours>(row_of(stage), t_);
    }
  }

  // Products to logits in units of log2, plus e (StageScales), less base - 7; masked: -inf. Returns the
  // largest of this lane.
  __device__ float to_log2(int stage, float (&s)[kOctets][4]) {
    const float scale_back = power_of_two(scales_.e), shift = static_cast<float>(scales_.e);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 state = head_pair(n);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[n][c] =
            fmaf(s[n][c], (c % 2 ? state.z : state.x) * scale_back, shift - (c % 2 ? state.w : state.y));
    }
    const uint8_t* valid = bytes_ + MLA_SMEM(C, valid) + stage * kStageRows;
    const bool masked[2] = {!valid[g_], !valid[g_ + 8]};
    if constexpr (C::kNeighbours) {
      mask_by_query(stage, valid, s);
    } else if (__any_sync(kFullWarp, masked[0] || masked[1] || scales_.is_nan[0] || scales_.is_nan[1])) {
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          s[n][c] = masked[c / 2] ? -INFINITY : scales_.is_nan[c / 2] ? NAN : s[n][c];
    }
    float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) largest[c] = fmaxf(largest[c], s[n][c]);
    return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  }

  // Weights as the B operand of V^T P^T, and the value scales of these keys.
  __device__ void store_weights(const float (&s)[kOctets][4], uint32_t fp8, uint32_t bf16, uint8_t* table) {
    const float unscale = power_of_two(-scales_.e);
    const uint32_t offset = member_ * C::kStepBytes + lane_ % 16 * 16;  // [half][row]
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = fast_exp2(s[n][c]);
      sum_[n][0] += (p[0] + p[2]) * unscale;
      sum_[n][1] += (p[1] + p[3]) * unscale;
      stmatrix_x2_trans(fp8 + offset + n * 256, pack_f16(p[0], p[1]), pack_f16(p[2], p[3]));
      if constexpr (R::kFp8Chunks < kNumChunks)
        stmatrix_x2_trans(bf16 + offset + n * 256, pack_bf16(p[0] * unscale, p[1] * unscale),
                          pack_bf16(p[2] * unscale, p[3] * unscale));
    }
    scales_.store(table, member_ * kStageRows + g_, t_);
  }

  // The same of neighbours: of a key's row in S the heads of some queries may count, and of others not. What
  // is no number in a key of another query must not meet its weight of zero.
  __device__ __forceinline__ void mask_by_query(int stage, const uint8_t* valid, float (&s)[kOctets][4]) {
    const TileMarks& tile = *reinterpret_cast<const TileMarks*>(bytes_ + MLA_SMEM(C, tile));
    const uint32_t queries[2] = {valid[g_], valid[g_ + 8]}, all = tile.all_queries;
    if (!__any_sync(kFullWarp,
                    queries[0] != all || queries[1] != all || scales_.is_nan[0] || scales_.is_nan[1]))
      return;
    // What is no number in a key makes all its logits such, with any Q: one of them tells.
    const auto is_finite = [](float x) { return fabsf(x) < INFINITY; };
    const bool suspects[2] = {queries[0] != all && (scales_.is_nan[0] || !is_finite(s[0][0])),
                              queries[1] != all && (scales_.is_nan[1] || !is_finite(s[0][2]))};
    const bool is_rare =
        __any_sync(kFullWarp, suspects[0] || suspects[1] || scales_.is_nan[0] || scales_.is_nan[1]);
    if (is_rare) [[unlikely]] {
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (scales_.is_nan[c / 2]) s[n][c] = NAN;
      clear_values<R>(bytes_ + MLA_SMEM(C, ring) + stage * C::kStageBytes, suspects, lane_);
    }
    const int octets_log2 = C::kTiles == Tiles::kLists ? 0 : tile.octets_log2;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const bool attends[2] = {(queries[0] >> (n >> octets_log2) & 1) != 0,
                               (queries[1] >> (n >> octets_log2) & 1) != 0};
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (!attends[c / 2]) s[n][c] = -INFINITY;
    }
  }

  // Calls put(head, value) for each head by one lane, with what all of the warp come to: x has what a lane
  // knows of heads 2t, 2t + 1 of each octet.
  template <class Op, class Put>
  __device__ __forceinline__ void over_g(float (&x)[2 * kOctets], Op&& op, Put&& put) const {
    constexpr int kCount = 2 * kOctets;
    reduce_over_g(x, lane_, op);
    if (!counts_of_g<kCount>(lane_)) return;
    const int first = first_left_of_g<kCount>(lane_);
#pragma unroll
    for (int i = 0; i < kLeftOfG<kCount>; ++i) {
      const int which = first + i;
      put(which / 2 * kOctetHeads + 2 * t_ + which % 2, x[i]);
    }
  }
  __device__ __forceinline__ void write_sums(float (&sums)[2 * kOctets], float* to) const {
    over_g(sums, [](float a, float b) { return a + b; }, [to](int head, float x) { to[head] = x; });
  }
  __device__ __forceinline__ void write_max(const float (&s)[kOctets][4], float* to) const {
    float largest[2 * kOctets];
#pragma unroll
    for (int i = 0; i < 2 * kOctets; ++i) largest[i] = fmaxf(s[i / 2][i % 2], s[i / 2][i % 2 + 2]);
    over_g(largest, [](float a, float b) { return fmaxf(a, b); }, [to](int head, float x) { to[head] = x; });
  }

  uint8_t* const bytes_;
  const Ring<C> ring_;
  const int member_, lane_, g_, t_;  // which 16 keys of a block
  StageScales<R> scales_;            // of this warp's keys of the block
  float sum_[kOctets][2];
};

// One of the four logits warps where there is one warpgroup of them: 16 keys of each block.
template <class C>
class BlockLogits : protected LogitWarp<C> {
 public:
  using Base = LogitWarp<C>;
  using Base::kOctets;
  using typename Base::R;
  static constexpr int kLogitThreads = C::kLogitWarps * kWarpSize;

 protected:
  using Base::g_, Base::lane_, Base::member_, Base::ring_, Base::scales_, Base::sum_, Base::t_;

  __device__ BlockLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(smem, warp, lane), params_(params), p_(params.p), x_(smem) {}

  __device__ bool finds_largest() const { return C::kFindsLargest && p_.max_logits; }

  // Once Q is there.
  __device__ void begin_query() {
    const int head = member_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      const float q_scale = reinterpret_cast<const float*>(x_.bytes + MLA_SMEM(C, q_scale))[head];
      x_.head_state()[head] = {logit_scale<R>(p_, q_scale), 0.0f};
    }
    if (finds_largest())
      for (int i = lane_; i < C::kHeads; i += kWarpSize) x_.warp_largest(member_)[i] = -INFINITY;
    named_barrier(kBarrierLogits, kLogitThreads);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) sum_[n][0] = sum_[n][1] = 0.0f;
    fresh_ = true;
  }

  // `block`: of the ring's sequence. `have_bases`: called when these are known, before the weights go on.
  template <class HaveBases>
  __device__ __forceinline__ void attend(int block, HaveBases&& have_bases) {
    const int stage = (block * C::kBlockStages + member_) % C::kStages, buffer = block % 2;
    wait_until_full<C::kStages>(ring_.full(stage), block * C::kBlockStages + member_);
    float s[kOctets][4];
    this->load_scales(stage);
    multiply_keys<C, 4>(ring_.stage(stage), scales_, ring_.smem + MLA_SMEM(C, q), lane_, s);
    if (lane_ == 0) mbarrier_arrive(x_.qk_done(buffer));  // guards no memory
    const float peak = this->to_log2(stage, s);
    if (finds_largest()) note_largest(s);
    wait_until_free<2>(x_.p_empty(buffer), block);
    const float limit = fresh_ ? -INFINITY : kWeightLog2 + kLazyLog2;
    const bool moved = named_barrier_any(kBarrierLogits, kLogitThreads, peak > limit);
    if (moved) move_bases(s, buffer, limit);
    if (member_ == 0 && lane_ == 0) x_.moved(buffer) = moved && !fresh_;
    fresh_ = fresh_ && !moved;
    have_bases();
    this->store_weights(s, x_.smem + MLA_SMEM(C, weights_fp8) + buffer * C::kPBytes,
                        x_.smem + MLA_SMEM(C, weights_bf16) + buffer * C::kPBytes, x_.scale_table(buffer));
    fence_proxy_async();
    mbarrier_arrive_warp(x_.p_full(buffer), lane_);
  }

  // Calls fn(head, base, sum, largest logit) for each head of the CTA, by one of its lanes.
  template <class Fn>
  __device__ __forceinline__ void end_query(Fn&& fn) {
    float sums[2 * kOctets];
#pragma unroll
    for (int i = 0; i < 2 * kOctets; ++i) sums[i] = sum_[i / 2][i % 2];
    this->write_sums(sums, x_.warp_max(member_));
    named_barrier(kBarrierLogits, kLogitThreads);
    const int head = member_ * kWarpSize + lane_;
    if (head >= C::kHeads) return;
    float sum = 0.0f, largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < C::kLogitWarps; ++i) {
      sum += x_.warp_max(i)[head];
      if (finds_largest()) largest = fmaxf(largest, x_.warp_largest(i)[head]);
    }
    fn(head, sum == 0.0f ? kNoMax : x_.head_state()[head].y + kWeightLog2, sum, largest);
  }

  const KernelParams& params_;
  const SparseAttentionParams& p_;
  const BlockExchange<C> x_;
  bool fresh_;  // no key yet: bases are 0, sums and O too

 private:
  // In shared memory: registers are short.
  __device__ void note_largest(const float (&s)[kOctets][4]) const {
    float largest[2 * kOctets];
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 state = this->head_pair(n);
      largest[2 * n] = fmaxf(s[n][0], s[n][2]) - scales_.e + state.y;
      largest[2 * n + 1] = fmaxf(s[n][1], s[n][3]) - scales_.e + state.w;
    }
    float* const all = x_.warp_largest(member_);
    this->over_g(
        largest, [](float a, float b) { return fmaxf(a, b); },
        [all](int head, float x) { all[head] = fmaxf(all[head], x); });
  }

  // Some maximum has outgrown its base: new bases, common to the four warps, and what O must be multiplied
  // by.
  __device__ void move_bases(float (&s)[kOctets][4], int buffer, float limit) {
    this->write_max(s, x_.warp_max(member_));
    named_barrier(kBarrierLogits, kLogitThreads);
    const int head = member_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      float largest = x_.warp_max(0)[head];
#pragma unroll
      for (int i = 1; i < C::kLogitWarps; ++i) largest = fmaxf(largest, x_.warp_max(i)[head]);
      const float old_base = x_.head_state()[head].y;
      const float base = largest > limit ? base_for<C>(largest + old_base - kWeightLog2) : old_base;
      x_.head_state()[head].y = base;
      x_.rescale(buffer)[head] = old_base - base;
    }
    named_barrier(kBarrierLogits, kLogitThreads);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float2 change = *reinterpret_cast<const float2*>(x_.rescale(buffer) + n * kOctetHeads + 2 * t_);
      if (limit > -INFINITY) sum_[n][0] *= fast_exp2(change.x), sum_[n][1] *= fast_exp2(change.y);
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += c % 2 ? change.y : change.x;
    }
  }
};

template <class C>
class SplitLogits : BlockLogits<C> {
 public:
  using Base = BlockLogits<C>;
  using Item = typename C::Item;

  __device__ SplitLogits(const KernelParams& params, const Item& w, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane), w_(w) {}

  __device__ void run() {
    this->begin_query();
    // (base, sum) and largest logit of each head; for a query of one split the output's factor, not the sum.
    const auto finish = [&](int head, float base, float sum, float largest) {
      float2 stats = {base, sum};
      if (w_.is_whole(params_)) stats.y = finish_head<typename C::R>(p_, w_, head, base, sum, largest);
      if constexpr (C::kParts) QueryPart<C>(p_, blockIdx.x).stats(head) = stats;
      else reinterpret_cast<float2*>(x_.bytes + MLA_SMEM(C, stats))[head] = stats;
      if (this->finds_largest()) reinterpret_cast<float*>(x_.bytes + MLA_SMEM(C, largest))[head] = largest;
    };
    if constexpr (C::kSegments) {
      attend_to_runs();
      if constexpr (C::kRuns) leave_runs();
      else end_runs(finish);
    } else {
#pragma unroll 1
      for (int block = 0; block < w_.num_blocks; ++block) this->attend(block, [] {});
      this->end_query(finish);
    }
    named_barrier(kBarrierFinish, C::kWorkers);
  }

 private:
  using Base::fresh_, Base::g_, Base::kOctets, Base::lane_, Base::member_, Base::p_, Base::params_,
      Base::sum_, Base::t_, Base::x_;

  // Segments (sm90/segments.cuh). A run's base is there with the weights of its last block; sums are added up
  // at the end.
  __device__ __forceinline__ void attend_to_runs() {
    const int first = w_.first_run(0), head = member_ * kWarpSize + lane_;
    int block = 0;
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run) {
      const int end = w_.first_block_of(first + run + 1) - w_.first_block;
      if (block == end) {
        if (head < C::kHeads) {
          x_.run_bases(run)[head] = kNoMax, x_.run_sums(run)[head] = 0.0f;
          write_node_base(run, head, kNoMax);
        }
        continue;
      }
#pragma unroll 1
      for (; block < end; ++block)
        this->attend(block, [&] {
          if (block + 1 == end && head < C::kHeads)
            x_.run_bases(run)[head] = fresh_ ? kNoMax : x_.head_state()[head].y + kWeightLog2;
        });
      // All have read the bases since the last block began.
      write_sums();
      if (head < C::kHeads) {
        write_node_base(run, head, x_.run_bases(run)[head]);
        x_.head_state()[head].y = 0.0f;
      }
      fresh_ = true;
      named_barrier(kBarrierLogits, Base::kLogitThreads);
      if (head < C::kHeads) x_.run_sums(run)[head] = sum_of_warps(head);
    }
  }

  // The value warps read it in a later run.
  __device__ void write_node_base(int run, int head, float base) const {
    for (int level = 0, i = run; i % 2 == 1; ++level, i /= 2)
      base = fmaxf(base, x_.node_bases((i << level) - 1)[head]);
    x_.node_bases(run)[head] = base;
  }

  // This warp's, which begin again.
  __device__ __forceinline__ void write_sums() {
    float sums[2 * kOctets];
#pragma unroll
    for (int i = 0; i < 2 * kOctets; ++i) sums[i] = sum_[i / 2][i % 2], sum_[i / 2][i % 2] = 0.0f;
    Base::write_sums(sums, x_.warp_max(member_));
  }
  __device__ float sum_of_warps(int head) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kLogitWarps; ++i) sum += x_.warp_max(i)[head];
    return sum;
  }

  // The last one's CTA says that there are no more.
  __device__ __forceinline__ void leave_runs() const {
    const int head = member_ * kWarpSize + lane_;
    if (head >= C::kHeads) return;
    const auto stats = [&](int run) -> float2& { return QueryPart<C>::of_run(params_, run).stats(head); };
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run)
      stats(w_.first + run) = {x_.run_bases(run)[head], x_.run_sums(run)[head]};
    if (w_.has_last_run())
      for (int run = w_.with_keys; run < params_.most_runs; ++run) stats(run) = {kNoPartial, 0.0f};
  }

  // As end_query.
  template <class Fn>
  __device__ __forceinline__ void end_runs(Fn&& fn) const {
    const int head = member_ * kWarpSize + lane_;
    if (head >= C::kHeads) return;
    float base = kNoMax;
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run) base = fmaxf(base, x_.run_bases(run)[head]);
    const float sum = tree_sum<C::kMostRuns>([&](int run) {
      return run < w_.runs ? x_.run_sums(run)[head] * fast_exp2(x_.run_bases(run)[head] - base) : 0.0f;
    });
    fn(head, base, sum, -INFINITY);
  }

  const Item& w_;
};

// Queries one after the other. What of a query is not its products with keys: Q, and the end.
template <class C>
class WideWalkLogits : BlockLogits<C> {
 public:
  using Base = BlockLogits<C>;

  __device__ WideWalkLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane), surveys_(smem, 0), ends_(smem) {}

  __device__ void run() {
    int block = 0, number = 0;  // of the query among the CTA's
    unsigned i = WalkItem<C>::first(params_, 0);
    copy_query(i);
#pragma unroll 1
    for (; i < WalkItem<C>::count(params_); ++number) {
      const WalkItem<C> item(params_, i);
      i = WalkItem<C>::next(params_, i);
      convert_query(item, number);
      this->begin_query();
      const int end = block + ceil_div(surveys_.read(number, lane_).num_keys, C::kBlockKeys);
      surveys_.release(number, lane_);
#pragma unroll 1
      for (; block < end; ++block) this->attend(block, [] {});
      copy_query(i);
      end_item(item, number);
    }
  }

 private:
  using Base::lane_, Base::member_, Base::p_, Base::params_, Base::x_;

  // By one warp, when all are done with the Q before: the next one, as it is, while this query ends.
  __device__ void copy_query(unsigned i) const {
    if (member_ == 0 && i < WalkItem<C>::count(params_))
      WgmmaQuery<C>::copy_octets(p_, WalkItem<C>(params_, i), x_.smem, lane_);
  }
  // In its place to wgmma's order, two octets at a time: registers are short.
  __device__ void convert_query(const WalkItem<C>& item, int number) const {
    int lane = lane_;  // else all addresses of Q would be found once, before the first query, and spilled
    asm volatile("" : "+r"(lane));
    constexpr int kPartHeads = 4, kParts = C::kHeads / kPartHeads;
#pragma unroll 1
    for (int part = member_; part < kParts; part += C::kLogitWarps) {
      WgmmaQuery<C, kPartHeads> q;
      q.load_copied(p_, item, x_.bytes, part, lane, number);
      named_barrier(kBarrierLogits, Base::kLogitThreads);
      q.store(x_.bytes, part, lane);
    }
    named_barrier(kBarrierLogits, Base::kLogitThreads);
  }

  __device__ void end_item(const WalkItem<C>& item, int number) {
    wait_until_free<2>(ends_.empty(number), number);
    this->end_query([&](int in_cta, float base, float sum, float largest) {
      const int head = item.first_head + in_cta;
      write_head(p_, item.query, head, base, sum, largest);
      ends_.factors(number)[in_cta] = output_factor<typename C::R>(p_, head, base, sum);
    });
    mbarrier_arrive_warp(ends_.full(number), lane_);
  }

  const WalkSurveys<C> surveys_;
  const QueryEnds<C> ends_;
};

// One of the logits warps: 16 keys of every kLogitGroups-th block.
template <class C>
class WalkLogits : LogitWarp<C> {
 public:
  using Base = LogitWarp<C>;
  using Base::kOctets;
  using typename Base::R;

  __device__ WalkLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(smem, warp % C::kGroupWarps, lane),
        params_(params),
        x_(smem),
        surveys_(smem, 0),
        warp_(warp),
        group_(warp / C::kGroupWarps) {}

  __device__ void run() {
    int entry = 0, block = 0;
    int ended = -1;  // an entry of this warp's to pass on: the end of the query before
    float factor = 0.0f;
    unsigned i = 0, ahead = WalkItem<C>::first(params_, 0);
#pragma unroll 1
    for (int number = -1; number < 0 || i < WalkItem<C>::count(params_);
         ++number, i = ahead, ahead = WalkItem<C>::next(params_, ahead)) {
      const WalkItem<C> item(params_, i);
      begin_item(item, number, ahead);
      if (number < 0) continue;
      const int num_blocks = ceil_div(surveys_.read(number, lane_).num_keys, C::kBlockKeys);
      if (ended >= 0) pass_end(ended, factor);
#pragma unroll 1
      for (const int end = entry + num_blocks; entry < end; ++entry, ++block)
        if (is_mine(entry)) attend(entry, block);
      ended = is_mine(entry) ? entry : -1;
      factor = end_item(item, entry, (entry - num_blocks) % 2);
      ++entry;
    }
    if (ended >= 0) pass_end(ended, factor);
  }

 private:
  using Base::g_, Base::lane_, Base::member_, Base::ring_, Base::scales_, Base::sum_, Base::t_;

  __device__ bool is_mine(int entry) const { return entry % C::kLogitGroups == group_; }
  __device__ float2& pair_of(float* per_head, int n) const {
    return reinterpret_cast<float2*>(per_head)[n * kOctetHeads / 2 + t_];
  }
  // Q to shared memory once all are done with the query before; number -1 is none. Then the keys of the next
  // query are surveyed.
  __device__ void begin_item(const WalkItem<C>& item, int number, unsigned next) {
    // Else all addresses of Q would be found once, before the first query, and spilled.
    int lane = lane_;
    asm volatile("" : "+r"(lane));
    if (number >= 0) {
      WgmmaQuery<C> q;
      q.load(params_.p, item.query, item.first_head, warp_, lane);
      named_barrier(kBarrierAllLogits, C::kLogitThreads);
      q.store(x_.bytes, warp_, lane);
    }
    if (next < WalkItem<C>::count(params_)) {
      const Keys keys(params_.p, WalkItem<C>(params_, next).query);
      surveys_.write(number + 1, params_.p, keys, warp_, lane_);
    }
    if (number < 0) return;
    named_barrier(kBarrierAllLogits, C::kLogitThreads);
    const int head = warp_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      const float q_scale = reinterpret_cast<const float*>(x_.bytes + MLA_SMEM(C, q_scale))[head];
      x_.head_state()[head] = {logit_scale<R>(params_.p, q_scale), 0.0f};
    }
    if (warp_ == 0 && lane_ == 0) x_.epoch() = 0;
    named_barrier(kBarrierAllLogits, C::kLogitThreads);
    epoch_ = 0;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      sum_[n][0] = sum_[n][1] = 0.0f;
      largest_[n][0] = largest_[n][1] = -INFINITY;
      if (g_ == 0) pair_of(x_.warp_base(warp_), n) = {0.0f, 0.0f};
    }
    __syncwarp();
  }

  __device__ void attend(int entry, int block) {
    const int place = block * C::kBlockStages + member_, stage = place % C::kStages, buffer = entry % 2;
    wait_until_full<C::kStages>(ring_.full(stage), place);
    float s[kOctets][4];
    this->load_scales(stage);
    multiply_keys<C, 3>(ring_.stage(stage), scales_, ring_.smem + MLA_SMEM(C, q), lane_, s);
    wait_until_free<2>(x_.empty(buffer), entry);
    wait_for_turn(entry);
    const int epoch = x_.epoch();
    if (epoch != epoch_) follow_bases(epoch);
    const float peak = this->to_log2(stage, s);
    const float limit = epoch == 0 ? -INFINITY : kWeightLog2 + kLazyLog2;
    const bool moved = named_barrier_any(kBarrierLogitGroup + group_, C::kGroupThreads, peak > limit);
    if (moved) move_bases(s, buffer, limit);
    if (member_ == 0 && lane_ == 0) x_.kind(buffer) = moved && epoch > 0 ? Step::kRescaled : Step::kBlock;
    pass_turn();
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        largest_[n][c] = fmaxf(largest_[n][c], fmaxf(s[n][c], s[n][c + 2]) - scales_.e);
    this->store_weights(s, x_.weights_fp8(buffer), x_.weights_bf16(buffer), x_.scale_table(buffer));
    fence_proxy_async();
    mbarrier_arrive_warp(x_.full(buffer), lane_);
  }

  // Bases are decided on in the order of the entries.
  __device__ void wait_for_turn(int entry) const {
    if (entry > 0) wait_until_full<2>(x_.decided((entry - 1) % 2), entry - 1);
  }
  __device__ void pass_turn() const { mbarrier_arrive_warp(x_.decided(group_), lane_); }

  // Another block has moved the bases since this warp's last one.
  __device__ void follow_bases(int epoch) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 state = this->head_pair(n);
      rebase(n, state.y, state.w);
    }
    epoch_ = epoch;
  }
  // Own sums of the n-th octet's heads 2t, 2t + 1 to new bases.
  __device__ void rebase(int n, float base0, float base1) {
    float2& mine = pair_of(x_.warp_base(warp_), n);
    // Where there is nothing yet the old base means nothing.
    if (sum_[n][0] != 0.0f) sum_[n][0] *= fast_exp2(mine.x - base0);
    if (sum_[n][1] != 0.0f) sum_[n][1] *= fast_exp2(mine.y - base1);
    largest_[n][0] += mine.x - base0;
    largest_[n][1] += mine.y - base1;
    __syncwarp();
    if (g_ == 0) mine = {base0, base1};
    __syncwarp();
  }

  // Some maximum has outgrown its base: new bases, and what O must be multiplied by.
  __device__ void move_bases(float (&s)[kOctets][4], int buffer, float limit) {
    this->write_max(s, x_.warp_max(warp_));
    named_barrier(kBarrierLogitGroup + group_, C::kGroupThreads);
    const int head = member_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < C::kGroupWarps; ++i)
        largest = fmaxf(largest, x_.warp_max(group_ * C::kGroupWarps + i)[head]);
      const float old_base = x_.head_state()[head].y;
      const float base = largest > limit ? largest + old_base - kWeightLog2 : old_base;
      x_.head_state()[head].y = base;
      x_.factors(buffer)[head] = old_base - base;
    }
    if (head == 0) ++x_.epoch();
    named_barrier(kBarrierLogitGroup + group_, C::kGroupThreads);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 state = this->head_pair(n);
      const float2 old = pair_of(x_.warp_base(warp_), n), change = {old.x - state.y, old.y - state.w};
      rebase(n, state.y, state.w);
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += c % 2 ? change.y : change.x;
    }
    epoch_ = x_.epoch();
  }

  // Writes lse and max_logits; returns the factor of a head's output. It is passed on once the next Q is
  // there: the value warps may still have two blocks to do. `first_group` had the query's first block:
  // sums are added in an order that does not depend on which that was.
  __device__ float end_item(const WalkItem<C>& item, int entry, int first_group) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float sum0 = sum_over_g(sum_[n][0]), sum1 = sum_over_g(sum_[n][1]);
      const float2 base = pair_of(x_.warp_base(warp_), n);
      const float max0 = max_over_g(largest_[n][0]) + base.x;
      const float max1 = max_over_g(largest_[n][1]) + base.y;
      if (g_ > 0) continue;
      pair_of(x_.warp_max(warp_), n) = {sum0, sum1};
      pair_of(x_.warp_largest(warp_), n) = {max0, max1};
    }
    named_barrier(kBarrierAllLogits, C::kLogitThreads);
    if (!is_mine(entry)) return 0.0f;
    const int in_cta = member_ * kWarpSize + lane_, head = item.first_head + in_cta;
    float factor = 0.0f;
    if (in_cta < C::kHeads) {
      const float base = x_.head_state()[in_cta].y;
      float sum = 0.0f, largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < C::kLogitWarps; ++i) {
        const int warp = (i + first_group * C::kGroupWarps) % C::kLogitWarps;
        const float part = x_.warp_max(warp)[in_cta];
        if (part != 0.0f) sum += part * fast_exp2(x_.warp_base(warp)[in_cta] - base);
        largest = fmaxf(largest, x_.warp_largest(warp)[in_cta]);
      }
      write_head(params_.p, item.query, head, base + kWeightLog2, sum, largest);
      factor = output_factor<typename C::R>(params_.p, head, base + kWeightLog2, sum);
    }
    pass_turn();
    return factor;
  }
  __device__ void pass_end(int entry, float factor) const {
    const int buffer = entry % 2, head = member_ * kWarpSize + lane_;
    wait_until_free<2>(x_.empty(buffer), entry);
    if (head < C::kHeads) x_.factors(buffer)[head] = factor;
    if (head == 0) x_.kind(buffer) = Step::kEnd;
    mbarrier_arrive_warp(x_.full(buffer), lane_);
  }

  const KernelParams& params_;
  const WalkExchange<C> x_;
  const WalkSurveys<C> surveys_;
  const int warp_, group_;
  int epoch_;                  // up to which this warp has followed the bases
  float largest_[kOctets][2];  // of this lane's logits (log2), less base - 7
};

}  // namespace mla_fp8::gpu
