#pragma once
// The logits warps: S^T = K Q^T and softmax.
#include "cuda/sparse_attention/sm90/many_heads/parts.cuh"
#include "cuda/sparse_attention/sm90/many_heads/query.cuh"

namespace mla_fp8::gpu {

// The scales of a stage's 16 keys, * 2^-e <= 1. A lane has pairs of f16, of keys g and g + 8, for tiles t, t
// + 4, ... (two layouts: many_heads.cu)
template <class R>
struct StageScales {
  static constexpr int kPerLane = R::kNumScales > 0 ? RowScales<R>::kPerLane : 1;
  uint32_t of_lane[kPerLane];
  int e = 0;       // 2^e is above them
  bool is_nan[2];  // keys g and g + 8

  // Loads those of a stage. In tiles of queries a scale that is NaN or infinite becomes 0, so that it says
  // nothing about other keys.
  template <class C>
  __device__ void load(const uint8_t* smem, int stage, int g, int t) {
    constexpr bool kNanIsZero = C::kNeighbours;
    const uint8_t* const row = smem + MLA_SMEM(C, ring) + stage * C::kStageBytes + g * R::kPitch;  // of key g
    is_nan[0] = is_nan[1] = false;
    if constexpr (R::kNumScales > 0) {
      float scale[2][kPerLane];
      uint32_t largest[2] = {};  // bits of a key's largest magnitude
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          scale[i][j] =
              4 * j + t < R::kNumScales ? RowScales<R>::read(row + 8 * i * R::kPitch, 4 * j + t) : 0.0f;
          largest[i] = max(largest[i], magnitude(scale[i][j]));
        }
      uint32_t above = __reduce_max_sync(kFullWarp, max(largest[0], largest[1]));
      if (above >= __float_as_uint(INFINITY)) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kNanIsZero) {  // four lanes have a key's scales
            uint32_t of_key = max(largest[i], __shfl_xor_sync(kFullWarp, largest[i], 1));
            of_key = max(of_key, __shfl_xor_sync(kFullWarp, of_key, 2));
            is_nan[i] = of_key >= __float_as_uint(INFINITY);
            if (is_nan[i]) largest[i] = 0;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j)
              if (is_nan[i]) scale[i][j] = 0.0f;
          } else {
            is_nan[i] = RowScales<R>::is_nan(row + 8 * i * R::kPitch);
          }
        }
        if constexpr (kNanIsZero) above = __reduce_max_sync(kFullWarp, max(largest[0], largest[1]));
      }
      e = min(max(exponent_above(above), -100), 100);
      const float unit = power_of_two(-e);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) of_lane[j] = pack_f16(scale[0][j] * unit, scale[1][j] * unit);
    }
  }
  __device__ static uint32_t magnitude(float scale) {
    constexpr bool kHasSign = R::kL.scale_format == ScaleFormat::kF32;
    return __float_as_uint(scale) & (kHasSign ? 0x7fffffffu : ~0u);
  }
  // The scales of keys g and g + 8 for a tile.
  __device__ uint32_t of_tile(int tile, int lane) const {
    return __shfl_sync(kFullWarp, of_lane[tile / 4], (lane & ~3) + tile % 4);
  }
  // Stores them in the table of a block; `key`: this lane's g there.
  __device__ void store(uint8_t* table, int key, int t) const {
    if constexpr (R::kNumScales > 0)
#pragma unroll
      for (int j = 0; j < kPerLane; ++j)
        if (4 * j + t < R::kNumScales) {
          uint16_t* at = reinterpret_cast<uint16_t*>(table + (4 * j + t) * kScalePitch) + key;
          at[0] = static_cast<uint16_t>(of_lane[j]);
          at[8] = static_cast<uint16_t>(of_lane[j] >> 16);
        }
  }
};

// Computes S^T = K Q^T for the 16 keys of the stage at `rows` and all heads of the CTA. K is code * scale *
// 2^-e, in f16.
template <class C>
__device__ __forceinline__ void multiply_keys(uint32_t rows, const StageScales<typename C::R>& scales,
                                              uint32_t q_smem, int lane, float (&s)[C::kOctets][4]) {
  using R = typename C::R;
  // Units of 32 dims, the bf16 ones first, are two k-steps each. Bytes and scales are fetched two units ahead
  // of their conversion. Products of up to kDepth - 1 units run meanwhile.
  constexpr int kDepth = 4, kBf16Units = R::kBf16Dims / 32, kUnits = R::kDims / 32;
  static_assert(kBf16Units <= 2 && (R::kMixed || R::kTileDims >= 32), "fetching ahead overwrites nothing");
  const uint64_t q = wgmma_descriptor(q_smem, C::kQHalfBytes, C::kQOctetBytes);
  constexpr int kStep = C::kQStepBytes / 16;  // in a descriptor's address
  const int matrix = lane / 8;
  const uint32_t keys = rows + ((matrix & 1) * 8 + lane % 8) * R::kPitch + (matrix >> 1) * 16;
  uint32_t k[kDepth][2][4], bytes[2][4], pair[2] = {};
  uint32_t scale[2] = {};                    // tiles of 32 dims take turns
  typename KeyFactors<R>::Words factors[2];  // a mixed row's units take turns
  const auto new_tile = [](int first_dim) { return R::kNumScales > 0 && R::new_tile(first_dim); };
  const auto place = [](int unit) { return R::kTileDims == 32 ? unit % 2 : 0; };
  const auto fetch = [&](int unit) {
    const int first_dim = (unit - kBf16Units) * 32;
    if (first_dim < 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(k[unit][i], keys + R::kBf16Offset + unit * 64 + i * 32);
      return;
    }
    ldmatrix_x4(bytes[unit % 2], keys + first_dim);
    if constexpr (R::kMixed) factors[unit % 2] = KeyFactors<R>::load(rows, first_dim / 32, lane / 4);
    else if (new_tile(first_dim)) scale[place(unit)] = scales.of_tile(R::tile_of(first_dim), lane);
  };
  const auto convert = [&](int unit) {
    const int first_dim = (unit - kBf16Units) * 32;
    uint32_t (&a)[2][4] = k[unit % kDepth];
    if (first_dim < 0) {
      const float to_unit = power_of_two(-scales.e);
      const uint32_t unit_pair = pack_bf16(to_unit, to_unit);
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = mul_bf16x2(a[i / 4][i % 4], unit_pair);
      return;
    }
    convert_keys(bytes[unit % 2], a[0], a[1]);
    if constexpr (R::kMixed) return KeyFactors<R>(factors[unit % 2], lane / 4).apply(a[0], a[1]);
    if (new_tile(first_dim)) {
      pair[0] = __byte_perm(scale[place(unit)], 0, 0x1010);
      pair[1] = __byte_perm(scale[place(unit)], 0, 0x3232);
    }
    if constexpr (R::kNumScales > 0)
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = mul_f16x2(a[i / 4][i % 4], pair[i % 2]);
  };
#pragma unroll
  for (int unit = 0; unit < kBf16Units + 2; ++unit) fetch(unit);
#pragma unroll
  for (int unit = 0; unit < kUnits; ++unit) {
    if (unit >= kDepth) wgmma_wait<kDepth - 1>();  // its fragments are free again
    convert(unit);
    if (unit >= kBf16Units && unit + 2 < kUnits) fetch(unit + 2);
    pin_registers(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int step = 2 * unit + i;
      if (unit < kBf16Units)
        wgmma_bf16(s, k[unit % kDepth][i], q + (R::kFp8Dims / 16 + step) * kStep, step > 0);
      else wgmma_f16(s, k[unit % kDepth][i], q + (step - 2 * kBf16Units) * kStep, step > 0);
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin_registers(s);
}

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
      C::Item::template mask<C>(x_.bytes, stage, scales_, lane_, s);
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
    scales_.template load<C>(x_.bytes, stage, g_, t_);
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
class SplitLogits : protected BlockLogits<C> {
 public:
  using Base = BlockLogits<C>;
  using Item = typename C::Item;

  __device__ SplitLogits(const KernelParams& params, const Item& w, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane), w_(w) {}

  __device__ void run() {
    this->begin_query();
#pragma unroll 1
    for (int block = 0; block < w_.num_blocks; ++block) this->attend(block, [] {});
    this->end_query(
        [&](int head, float base, float sum, float largest) { finish(head, base, sum, largest); });
    named_barrier(kBarrierFinish, C::kWorkers);
  }

 protected:
  // Stores the factor of a head's output, or what a second grid needs of the head.
  __device__ __forceinline__ void finish(int head, float base, float sum, float largest) const {
    if (w_.is_whole()) {
      reinterpret_cast<float*>(this->x_.bytes + MLA_SMEM(C, factors))[head] =
          finish_head<typename C::R>(this->p_, w_, head, base, sum, largest);
      return;
    }
    const QueryPart<C> part(this->params_, blockIdx.x);
    part.stats(head) = {base, sum};
    if (this->finds_largest()) part.largest(head) = largest;
  }

  const Item& w_;
};

}  // namespace mla_fp8::gpu
