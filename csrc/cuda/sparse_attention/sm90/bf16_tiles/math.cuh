#pragma once
// The two warpgroups that multiply. Group 0 has the weights of even blocks and the output's dims 0 to 255,
// group 1 those of odd blocks and dims 256 to 511. Each also multiplies its half of the other's block.
#include "cuda/sparse_attention/sm90/bf16_tiles/output.cuh"

namespace mla_fp8::gpu {

template <class C, int kGroup>
class TileMath {
 public:
  __device__ TileMath(const TileParams& params, uint8_t* smem, int warp, int lane)
      : params_(params),
        smem_{shared_address(smem)},
        bytes_(smem),
        output_{params, smem_, warp, lane},
        lane_(lane),
        row_(warp * 16 + lane / 4),
        column_(lane % 4 * 2),
        weights_row_(warp * 16 + lane % 16) {}

  __device__ void run() {
    for (;; parity_ ^= 1) {
      mbarrier_wait(smem_.q_full(), parity_);
      const RowTile item = smem_.item();
      if (item.num_queries == 0) break;
      if (item.length == 0) {
        arrive(smem_.q_empty());
        output_.store_nothing(item);
        continue;
      }
      base_[0] = base_[1] = largest_[0] = largest_[1] = -INFINITY;
      sum_[0] = sum_[1] = 0.0f;
      if (params_.p.attn_sink)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int head = item.first_head + query_head<C>(params_, row_ + 8 * r).head;
          if (head < params_.p.num_q_heads) sink_[r] = __ldg(params_.p.attn_sink + head);
        }
      if constexpr (C::kNeighbours)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          last_key_[r] = (C::kEntries ? item.first_length : item.length) - item.num_queries +
                         query_head<C>(params_, row_ + 8 * r).query;
      if constexpr (C::kEntries) {
        first_entry_ = item.first_length;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int query = min(query_head<C>(params_, row_ + 8 * r).query, item.num_queries - 1);
          last_entry_[r] = first_entry_ + RowTiles<C>::num_slots(params_.p.scopes[1], item.query + query) - 1;
        }
      }
      const int num_blocks = C::num_blocks(item.length);
      for (int block = 0; block < num_blocks; block += 2) {
        two_blocks(block, num_blocks - block);
        ++num_blocks_[0];
        num_blocks_[1] += block + 1 < num_blocks;
      }
      finish(item, num_blocks);
    }
  }

 private:
  static constexpr float kMaxGrowth = 8.0f;  // weights are at most 2^8
  static constexpr bool kOwn = true, kOthers = false;
  static constexpr int kColumns = C::keys(kGroup) / 8;  // logits of a row, in eights; weights go in sixteens
  static constexpr int steps(int buffer) { return ceil_div(C::keys(buffer), 16); }
  using Weights = uint32_t[steps(kGroup)][4];

  // Multiplies two blocks in their order, since each may move the base. Issuing a product takes a group about
  // as long as the tensor cores need, so the other group does what should overlap. But the first is soon done
  // while the second computes weights: the second adds the first block's values then, 16 keys at a time.
  __device__ void two_blocks(int block, int blocks_left) {
    const bool first = block == 0;
    Weights weights;
    if (kGroup == 0) {
      multiply_keys(blocks_left > 1);
      if (blocks_left <= 2) arrive(smem_.q_empty());
      const bool moved = weigh(weights, block, [](int) {});
      publish(weights, blocks_left <= 2);
      if (moved && !first) rescale_output();
      multiply_values<kOwn>(weights, !first);
      if (blocks_left > 1) {
        adopt_base(true);
        multiply_values<kOthers>(weights, true);
      }
    } else if (blocks_left > 1) {
      multiply_keys(true);
      if (blocks_left <= 2) arrive(smem_.q_empty());
      adopt_base(!first);
      start_values();
      const bool moved = weigh(weights, block + 1, [&](int k) { add_values<kOthers>(weights, k, !first); });
      publish(weights, blocks_left <= 3);
#pragma unroll
      for (int k = kPauses; k < steps(0); ++k) add_values<kOthers>(weights, k, !first);
      free_values<kOthers>();
      if (moved) rescale_output();
      multiply_values<kOwn>(weights, true);
    } else {
      arrive(smem_.q_empty());
      adopt_base(!first);
      multiply_values<kOthers>(weights, !first);
    }
  }

  // Computes S = Q K^T of this group's block. The second group starts when the first has issued its own,
  // whose weights are needed earlier. No proxy fence: what cp.async wrote is in shared memory once its
  // barrier completes, and a fence per piece costs 3 to 7 % (docs/notebook/kernels/bf16_tiles.md).
  __device__ void multiply_keys(bool in_turn) {
    if (kGroup == 1 && in_turn) named_barrier(kBarrierTurn, 2 * kGroupThreads);
    const uint64_t q = wgmma_panel_descriptor(smem_.q_panel(0));
    const uint64_t keys = wgmma_panel_descriptor(smem_.panel(kGroup, 0), 0, C::kEightKeysBytes);
    pin_registers(s_);
#pragma unroll
    for (int piece = 0; piece < C::kPieces; ++piece) {
      wait_until_full<1>(smem_.full(kGroup, piece), num_blocks_[kGroup]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < C::num_panels(piece); ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int panel = C::first_panel(piece) + i;
          wgmma_bf16_ss(s_, wgmma_advance(q, panel * C::kPanelBytes + k * 32),
                        wgmma_advance(keys, panel * C::key_panel_bytes(kGroup) + k * 32), piece + i + k > 0);
        }
    }
    wgmma_commit();
    mask_ = smem_.mask(kGroup);
    if (kGroup == 0 && in_turn) named_barrier_arrive(kBarrierTurn, 2 * kGroupThreads);
    wgmma_wait<0>();
    pin_registers(s_);
  }

  // Adds P V of a block to this group's dims, which are free then, those of the first 32 keys a little
  // earlier. Weights come from registers for the own block, from shared memory for the other's.
  template <bool kIsOwn>
  __device__ void multiply_values(const Weights& weights, bool accumulate) {
    start_values();
#pragma unroll
    for (int k = 0; k < steps(block_of<kIsOwn>()); ++k) add_values<kIsOwn>(weights, k, accumulate);
    free_values<kIsOwn>();
  }
  template <bool kIsOwn>
  static constexpr int block_of() {
    return kIsOwn ? kGroup : 1 - kGroup;
  }
  __device__ void start_values() {
    pin_registers(out_);
    wgmma_fence();
  }
  // Adds the values of the k-th 16 keys.
  template <bool kIsOwn>
  __device__ void add_values(const Weights& weights, int k, bool accumulate) {
    constexpr int buffer = block_of<kIsOwn>(), kPanelStride = C::key_panel_bytes(buffer);
    const uint32_t panel = smem_.panel(buffer, 4 * kGroup);
    // A tail's eight keys come twice, the second time with weights of zero.
    const uint64_t b = k == 4 ? wgmma_panel_descriptor(panel + 64 * 128, kPanelStride, 0)
                              : wgmma_advance(wgmma_panel_descriptor(panel, kPanelStride, C::kEightKeysBytes),
                                              k * 2 * C::kEightKeysBytes);
    if constexpr (kIsOwn) {
      wgmma_bf16_t(out_, weights[k], b, accumulate || k > 0);
    } else {
      const uint64_t a =
          k == 4
              ? wgmma_descriptor(smem_.tail_weights(), 128, 256)
              : wgmma_advance(wgmma_panel_descriptor(smem_.weights(buffer), 0, C::kEightKeysBytes), k * 32);
      wgmma_bf16_ss_t(out_, a, b, accumulate || k > 0);
    }
    if (k == 1 || k == steps(buffer) - 1) wgmma_commit();
  }
  template <bool kIsOwn>
  __device__ void free_values() {
    constexpr int buffer = block_of<kIsOwn>();
    wgmma_wait<1>();
    if constexpr (C::kPair) arrive_in_pair(0, smem_.empty(buffer, kGroup));
    else arrive(smem_.half_empty(buffer, kGroup));
    wgmma_wait<0>();
    pin_registers(out_);
    if constexpr (C::kPair) arrive_in_pair(1, smem_.empty(buffer, kGroup));
    else arrive(smem_.empty(buffer, kGroup));
    // Rope keys, or the weights over them, were last read here.
    if constexpr (C::kHasRope && !kIsOwn) arrive(smem_.empty(buffer, C::kRopePart));
  }
  // Each CTA of a pair fills one half of the keys, in both CTAs, and waits for both.
  __device__ void arrive_in_pair(int rank, uint32_t barrier) const {
    mbarrier_arrive_cluster_warp(cluster_address(barrier, rank), lane_);
  }
  __device__ void arrive(uint32_t barrier) const { mbarrier_arrive_warp(barrier, lane_); }

  // Turns logits into weights 2^(logit - base). True: the base has moved, and the output waits for rescale_.
  // Calls `pause` kPauses times, for something else.
  static constexpr int kPauses = 3;
  template <class Pause>
  __device__ bool weigh(Weights& weights, int block, Pause&& pause) {
    float (&s)[kColumns][4] = s_;
    const float scale = params_.p.sm_scale * kLog2E;
    const float offset[2] = {base_[0] == -INFINITY ? 0.0f : base_[0],
                             base_[1] == -INFINITY ? 0.0f : base_[1]};
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[n][c] = fmaf(s[n][c], scale, -offset[c / 2]);
    if constexpr (C::kNeighbours) {
      suspects_ = 0;
      KeyMask mine[2] = {mask_, mask_};
      if (rows_differ() && !has_only_entries(block))
        mine[0] = window_mask(block, 0), mine[1] = window_mask(block, 1);
      if (!mine[0].all() || !mine[1].all()) {
        mine[0] = mine[0] >> column_, mine[1] = mine[1] >> column_;
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const KeyMask& m = mine[c / 2];
            const bool counts = n < 8 ? m.keys >> (8 * n + c % 2) & 1 : m.tail >> c % 2 & 1;
            if (!counts && !(fabsf(s[n][c]) < INFINITY)) suspects_ |= 1u << (2 * n + c % 2);
            s[n][c] = counts ? s[n][c] : -INFINITY;
          }
      }
    } else if (!mask_.all()) {
      const uint64_t mine = mask_.keys >> column_;
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] = mine >> (8 * n + c % 2) & 1 ? s[n][c] : -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
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
        const float row_top = max_over_t(top[r]);
        const float growth = row_top > limit(r) ? row_top : 0.0f;
        const float base = row_top > limit(r) ? offset[r] + growth : base_[r];
        move_base(r, base);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) s[n][2 * r] -= growth, s[n][2 * r + 1] -= growth;
      }
    }
    pause(0);
#pragma unroll
    for (int k = 0; k < steps(kGroup); ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * k + i / 2, c = i % 2 * 2;
        if (n < kColumns) {
          const float x = fast_exp2(s[n][c]), y = fast_exp2(s[n][c + 1]);
          sum_[c / 2] += x;
          sum_[c / 2] += y;
          weights[k][i] = pack_bf16(x, y);
        } else {
          weights[k][i] = 0;
        }
      }
      if (k == 1) pause(1);
    }
    pause(2);
    return moved;
  }
  // True if rows of a tile may attend to different keys: not if they belong to one query.
  __device__ bool rows_differ() const { return !C::kEntries || params_.tile_queries > 1; }
  // True if both rows attend to every key of a block.
  __device__ bool has_only_entries(int block) const {
    if constexpr (!C::kEntries) return false;
    const int first = C::first_key(block), last = first + C::keys(kGroup) - 1;
    return mask_.all() && first >= first_entry_ && last <= min(last_entry_[0], last_entry_[1]);
  }
  // The keys of a block that are in the window of row row_ + 8 r, or among its entries.
  __device__ KeyMask window_mask(int block, int r) const {
    const int last = last_key_[r] - C::first_key(block);
    KeyMask mask = mask_.between(last - static_cast<int>(params_.p.window.window_size) + 1, last);
    if constexpr (C::kEntries)
      mask.keys |=
          mask_.between(first_entry_ - C::first_key(block), last_entry_[r] - C::first_key(block)).keys;
    if (kColumns == 8) mask.tail = 0xff;
    return mask;
  }
  __device__ float limit(int r) const { return base_[r] == -INFINITY ? -INFINITY : kMaxGrowth; }
  __device__ void move_base(int r, float base) {
    rescale_[r] = base == base_[r] ? 1.0f : fast_exp2(base_[r] - base);
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
    return reinterpret_cast<float2*>(bytes_ + MLA_SMEM(C, handover)) + (parity_ * 2 + group) * C::kHeads;
  }
  __device__ float* largest() const {
    return reinterpret_cast<float*>(bytes_ + MLA_SMEM(C, largest)) + parity_ * C::kHeads;
  }
  // Gives weights and bases of this group's block to the other group; with an item's last block also sums.
  __device__ void publish(const Weights& weights, bool last) const {
    bool suspects = false;  // one in any warp; all are done with the keys then
    if (C::kNeighbours && rows_differ())
      suspects = named_barrier_any(kBarrierGroup0 + kGroup, kGroupThreads, suspects_ != 0);
    else if (C::kHasRope) named_barrier(kBarrierGroup0 + kGroup, kGroupThreads);
    if (suspects) [[unlikely]]
      for (int turn = 0; turn < kGroupWarps; ++turn) {  // warps may suspect the same key
        if (row_ / 16 == turn)
          clear_keys<C::keys(kGroup), C::kValuePanels>(
              bytes_ + MLA_SMEM(C, blocks) + kGroup * C::kFirstBlockBytes, suspects_, lane_);
        fence_proxy_async();  // before a product of any warp reads them
        named_barrier(kBarrierGroup0 + kGroup, kGroupThreads);
      }
    const uint32_t row =
        smem_.weights(kGroup) + weights_row_ / 8 * C::kEightKeysBytes + weights_row_ % 8 * 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      stmatrix_x4(row + (((2 * k + lane_ / 16) ^ (weights_row_ % 8)) * 16), weights[k]);
    if constexpr (kColumns > 8)
      stmatrix_x4(smem_.tail_weights() + weights_row_ / 8 * 256 + lane_ / 16 * 128 + weights_row_ % 8 * 16,
                  weights[4]);
    float sum[2] = {0.0f, 0.0f};
    if (last) {
      sum[0] = sum_over_t(sum_[0]), sum[1] = sum_over_t(sum_[1]);
      if (kGroup == 1) {
        const float top0 = max_over_t(largest_[0]), top1 = max_over_t(largest_[1]);
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
    wait_until_full<1>(smem_.weights_full(kOther), num_blocks_[kOther]);
    const float base0 = handover(kOther)[row_].y, base1 = handover(kOther)[row_ + 8].y;
    if (__any_sync(kFullWarp, base0 != base_[0] || base1 != base_[1])) {
      move_base(0, base0);
      move_base(1, base1);
      if (has_output) rescale_output();
    }
  }

  // Normalises and stores this group's dims. The first group also stores lse and the largest logits.
  __device__ void finish(const RowTile& item, int num_blocks) {
    const SparseAttentionParams& p = params_.p;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 8 * r;
      const QueryHead place = query_head<C>(params_, row);
      const int head = item.first_head + place.head;
      const bool two_groups = num_blocks > 1;
      float total = in_base(handover(0)[row], base_[r]);
      if (two_groups) total += in_base(handover(1)[row], base_[r]);
      const bool empty = total == 0.0f;
      const float sink = p.attn_sink ? fast_exp2(fmaf(sink_[r], kLog2E, -base_[r])) : 0.0f;
      factor[r] = empty ? 0.0f : __fdividef(1.0f, total + sink);
      if constexpr (kGroup == 0) {
        const float top = max_over_t(largest_[r]);
        if (lane_ % 4 == 0 && item.has(place, p.num_q_heads)) {
          const int64_t at = (item.query + place.query) * p.num_q_heads + head;
          p.lse[at] = empty ? -INFINITY : (base_[r] + __log2f(total)) * kLn2;
          if (p.max_logits) p.max_logits[at] = (two_groups ? fmaxf(top, largest()[row]) : top) * kLn2;
        }
      }
    }
    output_.store(item, out_, factor);
  }
  // Brings a sum of weights to another base.
  __device__ static float in_base(float2 sum_base, float base) {
    return sum_base.y == base ? sum_base.x : sum_base.x * fast_exp2(sum_base.y - base);
  }

  const TileParams& params_;
  const TileSmem<C> smem_;
  uint8_t* const bytes_;
  const TileOutput<C, kGroup> output_;
  const int lane_, row_, column_, weights_row_;
  int num_blocks_[2] = {0, 0};  // blocks so far, in each buffer
  int parity_ = 0;              // parity of the item
  float s_[kColumns][4];        // logits of this group's block
  KeyMask mask_;                // its keys that are there
  float out_[32][4];            // this group's 256 dims
  // Two rows, row_ and row_ + 8. Sums and largest logits are this lane's part.
  float base_[2], rescale_[2], sum_[2], largest_[2];
  float sink_[2];
  int last_key_[2];  // the last keys in these rows' windows
  int first_entry_, last_entry_[2];
  uint32_t suspects_;  // logits outside the window that are no number, by column
};

}  // namespace mla_fp8::gpu
