#pragma once
// The logits warps: S^T = K Q^T and softmax.
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/parts.cuh"
#include "cuda/sparse_attention/sm90/many_heads/query.cuh"
#include "cuda/sparse_attention/sm90/many_heads/smem.cuh"
#include "cuda/sparse_attention/sm90/walk_item.cuh"

namespace mla_fp8::gpu {

// One of the four logits warps: 16 keys of each block, all heads.
template <class C>
class BlockLogits {
 public:
  using R = typename C::R;
  static constexpr int kOctets = C::kOctets, kLogitThreads = C::kLogitWarps * kWarpSize;

 protected:
  __device__ BlockLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : params_(params),
        p_(params.p),
        x_(smem),
        ring_{shared_address(smem)},
        member_(warp),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  // (logit scale, base - 7) of heads 8n + 2t and + 1.
  __device__ float4 head_pair(int n) const {
    return reinterpret_cast<const float4*>(x_.head_state())[n * kOctetHeads / 2 + t_];
  }
  __device__ const uint8_t* row_of(int stage) const {  // row of key g
    return x_.bytes + MLA_SMEM(C, ring) + stage * C::kStageBytes + g_ * R::kPitch;
  }

  __device__ __forceinline__ void load_scales(int stage) {
    if constexpr (R::kMixed) {
      scales_.e = reinterpret_cast<const int*>(x_.bytes + MLA_SMEM(C, stage_exponents))[stage];
      const uint8_t* const valid = x_.bytes + MLA_SMEM(C, valid) + stage * kStageRows;
#pragma unroll
      for (int i = 0; i < 2; ++i) scales_.is_nan[i] = valid[g_ + 8 * i] & kNanKey;
    } else {
      scales_.template load<C::kNeighbours>(row_of(stage), t_);
    }
  }

  // Turns products into logits (log2) plus e (StageScales), less base - 7; masked ones become -inf. Returns
  // this lane's largest.
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
    const uint8_t* valid = x_.bytes + MLA_SMEM(C, valid) + stage * kStageRows;
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

  // Stores weights as the B operand of V^T P^T, and the value scales of these keys.
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

  // Masks in tiles: a key counts for the heads of some queries, and not for others. NaN or infinity in a key
  // must not meet the zero weight of a query that does not attend to it.
  __device__ __forceinline__ void mask_by_query(int stage, const uint8_t* valid, float (&s)[kOctets][4]) {
    const TileMarks& tile = *reinterpret_cast<const TileMarks*>(x_.bytes + MLA_SMEM(C, tile));
    const uint32_t queries[2] = {valid[g_], valid[g_ + 8]}, all = tile.all_queries;
    if (!__any_sync(kFullWarp,
                    queries[0] != all || queries[1] != all || scales_.is_nan[0] || scales_.is_nan[1]))
      return;
    // NaN or infinity in a key shows in all its logits, with any Q: one of them tells.
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
      clear_values<R>(x_.bytes + MLA_SMEM(C, ring) + stage * C::kStageBytes, suspects, lane_);
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

  // Reduces over the warp's keys, and calls put(head, value) in one lane for each head. x: this lane's values
  // of heads 2t, 2t + 1 of each octet.
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

  __device__ bool finds_largest() const { return C::kFindsLargest && p_.max_logits; }

  // Begins a query, once Q is there.
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

  // Attends to a block of the ring's sequence. Calls `have_bases` before the weights go on.
  template <class HaveBases>
  __device__ __forceinline__ void attend(int block, HaveBases&& have_bases) {
    const int stage = (block * C::kBlockStages + member_) % C::kStages, buffer = block % 2;
    wait_until_full<C::kStages>(ring_.full(stage), block * C::kBlockStages + member_);
    float s[kOctets][4];
    load_scales(stage);
    multiply_keys<C>(ring_.stage(stage), scales_, ring_.smem + MLA_SMEM(C, q), lane_, s);
    if (lane_ == 0) mbarrier_arrive(x_.qk_done(buffer));  // guards no memory
    const float peak = to_log2(stage, s);
    if (finds_largest()) note_largest(s);
    wait_until_free<2>(x_.p_empty(buffer), block);
    const float limit = fresh_ ? -INFINITY : kWeightLog2 + kLazyLog2;
    const bool moved = named_barrier_any(kBarrierLogits, kLogitThreads, peak > limit);
    if (moved) move_bases(s, buffer, limit);
    if (member_ == 0 && lane_ == 0) x_.moved(buffer) = moved && !fresh_;
    fresh_ = fresh_ && !moved;
    have_bases();
    store_weights(s, x_.smem + MLA_SMEM(C, weights_fp8) + buffer * C::kPBytes,
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
    write_sums(sums, x_.warp_max(member_));
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
  const Ring<C> ring_;
  const int member_, lane_, g_, t_;  // member_: which 16 keys of a block
  StageScales<R> scales_;            // scales of this warp's keys
  float sum_[kOctets][2];
  bool fresh_;  // no key yet: bases are 0, sums and O too

 private:
  // Keeps the largest logits in shared memory: registers are short.
  __device__ void note_largest(const float (&s)[kOctets][4]) const {
    float largest[2 * kOctets];
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 state = head_pair(n);
      largest[2 * n] = fmaxf(s[n][0], s[n][2]) - scales_.e + state.y;
      largest[2 * n + 1] = fmaxf(s[n][1], s[n][3]) - scales_.e + state.w;
    }
    float* const all = x_.warp_largest(member_);
    over_g(
        largest, [](float a, float b) { return fmaxf(a, b); },
        [all](int head, float x) { all[head] = fmaxf(all[head], x); });
  }

  // Moves bases when a logit has outgrown its own. New bases are common to the four warps; `rescale` gets
  // what O is to be multiplied by (log2).
  __device__ void move_bases(float (&s)[kOctets][4], int buffer, float limit) {
    write_max(s, x_.warp_max(member_));
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
    // Stores the factor of each head's output, or what a second grid needs of the head.
    const auto finish = [&](int head, float base, float sum, float largest) {
      if (w_.is_whole()) {
        reinterpret_cast<float*>(x_.bytes + MLA_SMEM(C, factors))[head] =
            finish_head<typename C::R>(p_, w_, head, base, sum, largest);
        return;
      }
      const QueryPart<C> part(params_, blockIdx.x);
      part.stats(head) = {base, sum};
      if (this->finds_largest()) part.largest(head) = largest;
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
      // All warps have read the bases since the last block began.
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

  // The base of the largest subtree that ends with the run. The value warps read it in a later run.
  __device__ void write_node_base(int run, int head, float base) const {
    for (int level = 0, i = run; i % 2 == 1; ++level, i /= 2)
      base = fmaxf(base, x_.node_bases((i << level) - 1)[head]);
    x_.node_bases(run)[head] = base;
  }

  // Writes this warp's sums, which begin again.
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

  // Leaves (base, sum) of each run. The CTA of the last one says that there are no more.
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

  // The same as end_query.
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

// The logits of a walk: queries one after the other, with their Q and their ends.
template <class C>
class WalkLogits : BlockLogits<C> {
 public:
  using Base = BlockLogits<C>;

  __device__ WalkLogits(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane), surveys_(smem, 0), ends_(smem) {}

  __device__ void run() {
    int block = 0, number = 0;  // `number` counts the CTA's queries
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

  // One warp copies the next Q, as it is, when all are done with this one, while this query ends.
  __device__ void copy_query(unsigned i) const {
    if (member_ == 0 && i < WalkItem<C>::count(params_))
      WgmmaQuery<C>::copy_octets(p_, WalkItem<C>(params_, i), x_.smem, lane_);
  }
  // Converts Q to wgmma's order in its place, two octets at a time: registers are short.
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

}  // namespace mla_fp8::gpu
