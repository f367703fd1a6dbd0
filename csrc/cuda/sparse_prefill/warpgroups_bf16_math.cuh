#pragma once
// The two warpgroups that multiply. Group 0 finds the weights of even blocks and the output's dims 0..255,
// group 1 those of odd blocks and dims 256..511; each also multiplies its half of the other's block.
#include <cmath>

#include "cuda/barrier.cuh"
#include "cuda/pairs.cuh"
#include "cuda/sparse_prefill/warpgroups_bf16_config.cuh"
#include "cuda/warp.cuh"
#include "cuda/wgmma.cuh"

namespace mla_fp8::gpu {

inline constexpr float kRowsLog2E = 1.4426950408889634f, kRowsLn2 = 0.6931471805599453f;
enum RowsBarrier { kBarrierGroup0 = 1, kBarrierGroup1, kBarrierTurn };

template <class C, int kGroup>
class RowsMath {
 public:
  __device__ RowsMath(const RowsParams& params, uint8_t* smem, int warp, int lane)
      : params_(params),
        smem_{shared_address(smem)},
        bytes_(smem),
        lane_(lane),
        row_(warp * 16 + lane / 4),
        column_(lane % 4 * 2),
        weights_row_(warp * 16 + lane % 16) {}

  __device__ void run() {
    int num_items = 0;
    for (RowsItems<C> items(params_); items.valid(); items.advance()) {
      const RowsItem& item = *items;
      if (item.num_blocks == 0) {
        store_nothing(item);
        continue;
      }
      parity_ = num_items++ & 1;
      base_[0] = base_[1] = largest_[0] = largest_[1] = -INFINITY;
      sum_[0] = sum_[1] = 0.0f;
      mbarrier_wait(smem_.q_full(), parity_);
      free_staging();
      for (int block = 0; block < item.num_blocks; block += 2) {
        two_blocks(block == 0, item.num_blocks - block);
        ++num_blocks_[0];
        num_blocks_[1] += block + 1 < item.num_blocks;
      }
      finish(item);
    }
    bulk_store_wait();  // shared memory outlives its readers
  }

 private:
  static constexpr float kMaxGrowth = 8.0f;  // weights are at most 2^8
  static constexpr bool kOwn = true, kOthers = false;

  // Blocks are multiplied in their order, since each may move the base. Issuing a product takes a group about
  // as long as the tensor cores take for it: what should overlap is done by the other group.
  __device__ void two_blocks(bool first, int blocks_left) {
    uint32_t weights[4][4];
    if (kGroup == 0) {
      multiply_keys(blocks_left > 1);
      if (blocks_left <= 2) arrive(smem_.q_empty());
      const bool moved = weigh(weights);
      publish(weights, blocks_left <= 2);
      if (moved && !first) rescale_output();
      multiply_values<kOwn>(weights, 0, !first, blocks_left == 1);
      if (blocks_left > 1) {
        adopt_base(true);
        multiply_values<kOthers>(weights, 1, true, blocks_left == 2);
      }
    } else if (blocks_left > 1) {
      multiply_keys(true);
      if (blocks_left <= 2) arrive(smem_.q_empty());
      adopt_base(!first);
      const bool moved = weigh(weights);
      publish(weights, blocks_left <= 3);
      multiply_values<kOthers>(weights, 0, !first, false);
      if (moved) rescale_output();
      multiply_values<kOwn>(weights, 1, true, blocks_left == 2);
    } else {
      arrive(smem_.q_empty());
      adopt_base(!first);
      multiply_values<kOthers>(weights, 0, !first, true);
    }
  }

  // S = Q K^T of this group's block; the second group starts when the first has issued its own, whose weights
  // are needed earlier. No proxy fence: what cp.async wrote is in shared memory once its barrier completes,
  // and a fence per piece costs 3 to 7 % (docs/sparse_prefill.md).
  __device__ void multiply_keys(bool in_turn) {
    if (kGroup == 1 && in_turn) named_barrier(kBarrierTurn, 2 * kGroupThreads);
    const uint64_t q = wgmma_tile_descriptor(smem_.q_tile(0));
    const uint64_t keys = wgmma_tile_descriptor(smem_.tile(kGroup, 0));
    pin_registers(s_);
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      mbarrier_wait(smem_.full(kGroup, piece), num_blocks_[kGroup] & 1);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < C::num_tiles(piece); ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int offset = (C::first_tile(piece) + i) * C::kTileBytes + k * 32;
          wgmma_bf16_ss(s_, wgmma_advance(q, offset), wgmma_advance(keys, offset), piece + i + k > 0);
        }
    }
    wgmma_commit();
    mask_ = load_shared_8(smem_.smem + C::kMask + kGroup * 8);
    if (kGroup == 0 && in_turn) named_barrier_arrive(kBarrierTurn, 2 * kGroupThreads);
    wgmma_wait<0>();
    pin_registers(s_);
  }

  // O += P V of this group's dims of a block. Frees them, or keeps them for the output after the last. The
  // weights come from registers for the own block, from shared memory for the other's.
  template <bool kIsOwn>
  __device__ void multiply_values(const uint32_t (&weights)[4][4], int buffer, bool accumulate, bool keep) {
    const uint64_t values = wgmma_tile_descriptor(smem_.tile(buffer, 4 * kGroup), C::kTileBytes);
    const uint64_t others = wgmma_tile_descriptor(smem_.weights(buffer));
    pin_registers(out_);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t b = wgmma_advance(values, k * 16 * 128);
      if constexpr (kIsOwn) wgmma_bf16_t(out_, weights[k], b, accumulate || k > 0);
      else wgmma_bf16_ss_t(out_, wgmma_advance(others, k * 32), b, accumulate || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(out_);
    if (!keep) arrive(smem_.empty(buffer, kGroup));
    // Rope keys, or the weights over them, were last read here.
    if constexpr (C::kHasRope && !kIsOwn) arrive(smem_.empty(buffer, C::kRopePart));
  }
  __device__ void arrive(uint32_t barrier) const { mbarrier_arrive_warp(barrier, lane_); }

  // Logits to weights 2^(logit - base). Whether the base has moved: the output waits for rescale_.
  __device__ bool weigh(uint32_t (&weights)[4][4]) {
    float (&s)[8][4] = s_;
    const float scale = params_.p.sm_scale * kRowsLog2E;
    const uint64_t mask = mask_.x | uint64_t{mask_.y} << 32;
    float offset[2], top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = base_[r] == -INFINITY ? 0.0f : base_[r];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = fmaf(s[n][c], scale, -offset[c / 2]);
    if (mask != ~uint64_t{0}) {
      const uint64_t mine = mask >> column_;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] = mine >> (8 * n + c % 2) & 1 ? s[n][c] : -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], s[n][c]);
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest_[r] = fmaxf(largest_[r], top[r] + offset[r]);
      moved |= top[r] > limit(r);
    }
    moved = __any_sync(kFullWarp, moved);
    if (moved) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float row_top = quad_max(top[r]);
        const float growth = row_top > limit(r) ? row_top : 0.0f;
        const float base = row_top > limit(r) ? offset[r] + growth : base_[r];
        move_base(r, base);
#pragma unroll
        for (int n = 0; n < 8; ++n) s[n][2 * r] -= growth, s[n][2 * r + 1] -= growth;
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        s[n][c] = exp2_approx(s[n][c]);
        sum_[c / 2] += s[n][c];
      }
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &s[2 * k + i / 2][i % 2 * 2];
        weights[k][i] = pack_bf16(pair[0], pair[1]);
      }
    return moved;
  }
  __device__ float limit(int r) const { return base_[r] == -INFINITY ? -INFINITY : kMaxGrowth; }
  __device__ void move_base(int r, float base) {
    rescale_[r] = base == base_[r] ? 1.0f : exp2_approx(base_[r] - base);
    sum_[r] *= rescale_[r];
    base_[r] = base;
  }
  __device__ void rescale_output() {
#pragma unroll
    for (int n = 0; n < 32; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) out_[n][c] *= rescale_[c / 2];
  }

  __device__ float2* handover(int group) const {
    return reinterpret_cast<float2*>(bytes_ + C::kHandover) + (parity_ * 2 + group) * C::kHeads;
  }
  __device__ float* largest() const {
    return reinterpret_cast<float*>(bytes_ + C::kLargest) + parity_ * C::kHeads;
  }
  // Weights and bases of this group's block to the other group; with its last block of an item also the sums.
  __device__ void publish(const uint32_t (&weights)[4][4], bool last) const {
    if constexpr (C::kHasRope)
      named_barrier(kBarrierGroup0 + kGroup, kGroupThreads);  // all are done with rope keys
    const uint32_t row = smem_.weights(kGroup) + weights_row_ * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      stmatrix_x4(row + (((2 * k + lane_ / 16) ^ (weights_row_ % 8)) * 16), weights[k]);
    float sum[2] = {0.0f, 0.0f};
    if (last) {
      sum[0] = quad_sum(sum_[0]), sum[1] = quad_sum(sum_[1]);
      if (kGroup == 1) {
        const float top0 = quad_max(largest_[0]), top1 = quad_max(largest_[1]);
        if (lane_ % 4 == 0) largest()[row_] = top0, largest()[row_ + 8] = top1;
      }
    }
    if (lane_ % 4 == 0) {
      handover(kGroup)[row_] = {sum[0], base_[0]};
      handover(kGroup)[row_ + 8] = {sum[1], base_[1]};
    }
    fence_proxy_async();
    arrive(smem_.weights_full(kGroup));
  }
  // Waits for the other group's weights and brings sums and output to their base.
  __device__ void adopt_base(bool has_output) {
    constexpr int kOther = 1 - kGroup;
    mbarrier_wait(smem_.weights_full(kOther), num_blocks_[kOther] & 1);
    const float base0 = handover(kOther)[row_].y, base1 = handover(kOther)[row_ + 8].y;
    if (__any_sync(kFullWarp, base0 != base_[0] || base1 != base_[1])) {
      move_base(0, base0);
      move_base(1, base1);
      if (has_output) rescale_output();
    }
  }

  __device__ static float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
  }
  __device__ static float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
  }

  // Normalises and stores this group's dims; the first group also the statistics.
  __device__ void finish(const RowsItem& item) {
    const SparseAttentionParams& p = params_.p;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r, head = item.first_head + row;
      const bool real = head < p.num_q_heads, two_groups = item.num_blocks > 1;
      float total = in_base(handover(0)[row], base_[r]);
      if (two_groups) total += in_base(handover(1)[row], base_[r]);
      const bool empty = total == 0.0f;
      const float sink =
          p.attn_sink && real && !empty ? exp2f(p.attn_sink[head] * kRowsLog2E - base_[r]) : 0.0f;
      factor[r] = empty ? 0.0f : 1.0f / (total + sink);
      if constexpr (kGroup == 0) {
        const float top = quad_max(largest_[r]);
        if (real && lane_ % 4 == 0) {
          const int64_t at = item.token * p.num_q_heads + head;
          p.lse[at] = empty ? -INFINITY : (base_[r] + log2f(total)) * kRowsLn2;
          if (p.max_logits) p.max_logits[at] = (two_groups ? fmaxf(top, largest()[row]) : top) * kRowsLn2;
        }
      }
    }
    store_output(item, factor);
  }
  // A sum of weights relative to another base.
  __device__ static float in_base(float2 sum_base, float base) {
    return sum_base.y == base ? sum_base.x : sum_base.x * exp2_approx(sum_base.y - base);
  }

  __device__ uint16_t* out_row(const RowsItem& item, int head) const {
    const SparseAttentionParams& p = params_.p;
    return p.out + item.token * p.out_stride_token + head * p.out_stride_head + kGroup * (kHeadDimV / 2);
  }
  // From the tiles that held this group's values of the item's last block.
  __device__ void store_output(const RowsItem& item, const float (&factor)[2]) {
    staging_ = (item.num_blocks - 1) % 2;
    const int warp = row_ / 16, row = lane_ % 16;  // row: that this lane gives the address of
    const uint32_t staging =
        row < 15 ? smem_.tile(staging_, 4 * kGroup + warp) + row * C::kOutPitch
                 : smem_.smem + C::kLastRow + (4 * kGroup + warp) * C::kLastRowBytes + C::kLastRowOffset;
    named_barrier(kBarrierGroup0 + kGroup, kGroupThreads);  // all are done with values
#pragma unroll
    for (int n = 0; n < 32; n += 2) {
      const float (*o)[4] = &out_[n];
      const uint32_t words[4] = {pack_bf16(o[0][0] * factor[0], o[0][1] * factor[0]),
                                 pack_bf16(o[0][2] * factor[1], o[0][3] * factor[1]),
                                 pack_bf16(o[1][0] * factor[0], o[1][1] * factor[0]),
                                 pack_bf16(o[1][2] * factor[1], o[1][3] * factor[1])};
      stmatrix_x4(staging + lane_ / 16 * 16 + n * 16, words);
    }
    fence_proxy_async();
    __syncwarp();
    const int head = item.first_head + warp * 16 + row;
    if (lane_ < 16 && head < params_.p.num_q_heads) bulk_store(out_row(item, head), staging, C::kOutBytes);
  }
  // The last item's output has been read from where the next one's values go.
  __device__ void free_staging() {
    if (staging_ < 0) return;
    bulk_store_wait();
    arrive(smem_.empty(staging_, kGroup));
    staging_ = -1;
  }

  __device__ void store_nothing(const RowsItem& item) const {
    const SparseAttentionParams& p = params_.p;
    const int thread = row_ / 16 * kWarpSize + lane_;
    for (int i = thread; i < C::kHeads * 32; i += kGroupThreads)
      if (item.first_head + i / 32 < p.num_q_heads)
        *reinterpret_cast<uint4*>(out_row(item, item.first_head + i / 32) + i % 32 * 8) = uint4{0, 0, 0, 0};
    if (kGroup == 0 && thread < C::kHeads && item.first_head + thread < p.num_q_heads) {
      const int64_t at = item.token * p.num_q_heads + item.first_head + thread;
      p.lse[at] = -INFINITY;
      if (p.max_logits) p.max_logits[at] = -INFINITY;
    }
  }

  const RowsParams& params_;
  const RowsSmem<C> smem_;
  uint8_t* const bytes_;
  const int lane_, row_, column_, weights_row_;
  int num_blocks_[2] = {0, 0};  // so far, of each buffer
  int parity_;                  // of the item
  int staging_ = -1;            // the buffer that output is leaving from
  float s_[8][4];               // logits of this group's block
  uint2 mask_;                  // which of its tokens count
  float out_[32][4];            // of this group's 256 dims
  // Of rows row_ and row_ + 8; sums and largest logits are this lane's part.
  float base_[2], rescale_[2], sum_[2], largest_[2];
};

}  // namespace mla_fp8::gpu
