#pragma once
// S^T = K Q^T and softmax in the warpgroup kernel.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/many_heads/split_smem.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"
#include "cuda/sparse_attention/softmax.cuh"

namespace mla_fp8::gpu {

// One of the four logits warps: 16 tokens of each block, all heads.
template <class C>
class LogitWarp {
 public:
  using R = typename C::R;
  static constexpr int kGroups = C::kGroups, kLogitThreads = C::kLogitWarps * kWarpSize;

  __device__ LogitWarp(const TeamParams& params, const Work& w, uint8_t* smem, int warp, int lane)
      : params_(params),
        p_(params.p),
        w_(w),
        ring_{shared_address(smem)},
        x_(smem),
        warp_(warp),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  __device__ void run() {
    const int head = warp_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      const float layer_scale = R::kUniformFp8 ? *p_.scale : 1.0f;
      const float q_scale = reinterpret_cast<const float*>(x_.bytes + C::kQScale)[head];
      x_.head_state()[head] = {p_.sm_scale * kLog2E * layer_scale / q_scale, 0.0f};
    }
    named_barrier(kBarrierLogits, kLogitThreads);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      sum_[n][0] = sum_[n][1] = 0.0f;
      if constexpr (C::kFindsLargest) x_.lane_largest(warp_, n)[lane_] = {-INFINITY, -INFINITY};
    }

    bool fresh = true;  // no token yet: bases are 0, sums and O too
#pragma unroll 1
    for (int block = 0; block < w_.num_blocks; ++block) {
      const int slot = (block * C::kBlockSlots + warp_) % C::kSlots, buffer = block % 2;
      mbarrier_wait(ring_.full(slot), (block * C::kBlockSlots + warp_) / C::kSlots & 1);
      float s[kGroups][4];
      logits(slot, buffer, s);
      if constexpr (C::kFindsLargest) note_largest(s);
      mbarrier_wait(x_.p_empty(buffer), (block / 2 & 1) ^ 1);
      const float limit = fresh ? -INFINITY : kWeightLog2 + kLazyLog2;
      const bool moved = named_barrier_any(kBarrierLogits, kLogitThreads, largest_ > limit);
      if (moved) move_bases(s, buffer, limit);
      if (warp_ == 0 && lane_ == 0) x_.moved(buffer) = moved && !fresh;
      fresh = fresh && !moved;
      store_weights(s, buffer);
      fence_proxy_async();
      mbarrier_arrive_warp(x_.p_full(buffer), lane_);
    }
    finish();
  }

 private:
  // (logit scale, base - 7) of heads 8n + 2t and + 1.
  __device__ float4 head_pair(int n) const {
    return reinterpret_cast<const float4*>(x_.head_state())[n * kGroupHeads / 2 + t_];
  }

  __device__ const uint8_t* row_of(int slot) const {  // of token g
    return x_.bytes + C::kRing + slot * C::kSlotBytes + g_ * R::kPitch;
  }

  // Logits in units of log2, plus e (SlotScales), less base - 7; masked: -inf.
  __device__ void logits(int slot, int buffer, float (&s)[kGroups][4]) {
    const uint8_t* valid = x_.bytes + C::kValid + slot * kSlotTokens;
    scales_.load(row_of(slot), t_);
    group_products<C, 4>(ring_.slot(slot), scales_, ring_.smem + C::kQ, lane_, s);
    if (lane_ == 0) mbarrier_arrive(x_.qk_done(buffer));  // guards no memory

    const float scale_back = power_of_two(scales_.e), shift = static_cast<float>(scales_.e);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float4 state = head_pair(n);
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[n][c] =
            fmaf(s[n][c], (c % 2 ? state.z : state.x) * scale_back, shift - (c % 2 ? state.w : state.y));
    }
    const bool masked[2] = {!valid[g_], !valid[g_ + 8]};
    if (__any_sync(kFullWarp, masked[0] || masked[1] || scales_.is_nan[0] || scales_.is_nan[1])) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          s[n][c] = masked[c / 2] ? -INFINITY : scales_.is_nan[c / 2] ? NAN : s[n][c];
    }
    float largest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) largest[c] = fmaxf(largest[c], s[n][c]);
    largest_ = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  }

  // Per lane, in shared memory: registers are short.
  __device__ void note_largest(const float (&s)[kGroups][4]) const {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float4 state = head_pair(n);
      float2& all = x_.lane_largest(warp_, n)[lane_];
      all = {fmaxf(all.x, fmaxf(s[n][0], s[n][2]) - scales_.e + state.y),
             fmaxf(all.y, fmaxf(s[n][1], s[n][3]) - scales_.e + state.w)};
    }
  }

  // Some maximum has outgrown its base: new bases, common to the four warps, and what O must be multiplied
  // by.
  __device__ void move_bases(float (&s)[kGroups][4], int buffer, float limit) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float max0 = max_over_g(fmaxf(s[n][0], s[n][2]));
      const float max1 = max_over_g(fmaxf(s[n][1], s[n][3]));
      if (g_ == 0) *reinterpret_cast<float2*>(x_.warp_max(warp_) + n * kGroupHeads + 2 * t_) = {max0, max1};
    }
    named_barrier(kBarrierLogits, kLogitThreads);
    const int head = warp_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      float largest = x_.warp_max(0)[head];
#pragma unroll
      for (int i = 1; i < C::kLogitWarps; ++i) largest = fmaxf(largest, x_.warp_max(i)[head]);
      const float old_base = x_.head_state()[head].y;
      const float base = largest > limit ? largest + old_base - kWeightLog2 : old_base;
      x_.head_state()[head].y = base;
      x_.rescale(buffer)[head] = old_base - base;
    }
    named_barrier(kBarrierLogits, kLogitThreads);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float2 change = *reinterpret_cast<const float2*>(x_.rescale(buffer) + n * kGroupHeads + 2 * t_);
      if (limit > -INFINITY) sum_[n][0] *= fast_exp2(change.x), sum_[n][1] *= fast_exp2(change.y);
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] += c % 2 ? change.y : change.x;
    }
  }

  // Weights as the B operand of V^T P^T, and the value scales of these tokens.
  __device__ void store_weights(const float (&s)[kGroups][4], int buffer) {
    const float unscale = power_of_two(-scales_.e);
    const uint32_t offset = buffer * C::kPBytes + warp_ * C::kStepBytes + lane_ % 16 * 16;  // [half][row]
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = fast_exp2(s[n][c]);
      sum_[n][0] += (p[0] + p[2]) * unscale;
      sum_[n][1] += (p[1] + p[3]) * unscale;
      stmatrix_x2_trans(x_.smem + C::kPFp8 + offset + n * 256, pack_f16(p[0], p[1]), pack_f16(p[2], p[3]));
      if constexpr (R::kFp8Chunks < kNumChunks)
        stmatrix_x2_trans(x_.smem + C::kPBf16 + offset + n * 256, pack_bf16(p[0] * unscale, p[1] * unscale),
                          pack_bf16(p[2] * unscale, p[3] * unscale));
    }
    scales_.store(x_.scale_table(buffer), warp_ * kSlotTokens + g_, t_);
  }

  // (base, sum) and largest logit of each head; for a row of one split the output's factor, not the sum.
  __device__ void finish() {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float sum0 = sum_over_g(sum_[n][0]), sum1 = sum_over_g(sum_[n][1]);
      if (g_ == 0) *reinterpret_cast<float2*>(x_.warp_max(warp_) + n * kGroupHeads + 2 * t_) = {sum0, sum1};
      if constexpr (C::kFindsLargest) {  // to lanes 0 to 3, whose heads are 8n + 2 lane and + 1
        float2& largest = x_.lane_largest(warp_, n)[lane_];
        largest = {max_over_g(largest.x), max_over_g(largest.y)};
      }
    }
    named_barrier(kBarrierLogits, kLogitThreads);
    const int head = warp_ * kWarpSize + lane_;
    if (head < C::kHeads) {
      float2 stats = {0.0f, 0.0f};
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < C::kLogitWarps; ++i) {
        stats.y += x_.warp_max(i)[head];
        if constexpr (C::kFindsLargest) {
          const float2 pair = x_.lane_largest(i, head / kGroupHeads)[head % kGroupHeads / 2];
          largest = fmaxf(largest, head % 2 ? pair.y : pair.x);
        }
      }
      stats.x = stats.y == 0.0f ? kNoMax : x_.head_state()[head].y + kWeightLog2;
      if (params_.num_splits == 1)
        stats.y = finish_head<typename C::R>(p_, w_, head, stats.x, stats.y, largest);
      reinterpret_cast<float2*>(x_.bytes + C::kStats)[head] = stats;
      if constexpr (C::kFindsLargest) reinterpret_cast<float*>(x_.bytes + C::kLargest)[head] = largest;
    }
    named_barrier(kBarrierFinish, C::kWorkers);
  }

  const TeamParams& params_;
  const SparseAttentionParams& p_;
  const Work& w_;
  const Ring<C> ring_;
  const Exchange<C> x_;
  const int warp_, lane_, g_, t_;
  SlotScales<R> scales_;  // of this warp's tokens of the block
  float sum_[kGroups][2];
  float largest_;  // of this lane's logits of the block
};

}  // namespace mla_fp8::gpu
