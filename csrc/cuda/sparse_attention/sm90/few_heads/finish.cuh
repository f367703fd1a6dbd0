#pragma once
// The end of a query. The order of additions is fixed: results are bitwise repeatable.
#include "cuda/device/cluster.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"
#include "cuda/sparse_attention/softmax.cuh"

namespace mla_fp8::gpu {

// ---- split ----------------------------------------------------------------------------------------------
//
// Partial results to one: the warps of a CTA through its shared memory, then the CTAs of a cluster through
// distributed shared memory.

// The producer warps: the first finds (max, sum) of the CTA while the consumers write their outputs.
template <class C>
__device__ void merge_stats(const TeamParams& params, const Work& w, uint8_t* smem, bool first, int lane) {
  const float2* warp_stats = reinterpret_cast<const float2*>(smem + C::kWarpStats);
  const float* warp_largest = reinterpret_cast<const float*>(smem + C::kWarpLargest);
  block_barrier<C::kThreads>();
  if (first && lane < C::kHeads) {
    float max = kNoPartial, sum = 0.0f, largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) {
      max = fmaxf(max, warp_stats[i * C::kHeads + lane].x);
      largest = fmaxf(largest, warp_largest[i * C::kHeads + lane]);
    }
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) {
      const float2 x = warp_stats[i * C::kHeads + lane];
      sum += x.y * fast_exp2(x.x - max);
    }
    float2 result = {max, sum};
    if (params.num_splits == 1)
      result.y = finish_head<typename C::R>(params.p, w, lane, max, sum,
                                            largest);  // nobody needs the sum
    reinterpret_cast<float2*>(smem + C::kStats)[lane] = result;
    reinterpret_cast<float*>(smem + C::kLargest)[lane] = largest;
  }
  block_barrier<C::kThreads>();
}

// Consumers: O^T fragments to shared memory as float [team][head][kHeadDimV], brought to the CTA's maximum.
template <class C>
__device__ void write_partials(const Consumer<C>& consumer, uint8_t* smem, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, team = warp / C::kMembers, member = warp % C::kMembers;
  float2* warp_stats = reinterpret_cast<float2*>(smem + C::kWarpStats);
  consumer.write_stats(smem);
  block_barrier<C::kThreads>();
#pragma unroll
  for (int n = 0; n < C::kGroups; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = n * kGroupHeads + 2 * t + c;
      float max = kNoPartial;
#pragma unroll
      for (int i = 0; i < kConsumerWarps; ++i) max = fmaxf(max, warp_stats[i * C::kHeads + head].x);
      factor[c] = fast_exp2(consumer.max_[n][c] - max);
    }
    float* head0 = reinterpret_cast<float*>(smem + C::kRing) +
                   (team * C::kHeads + n * kGroupHeads + 2 * t) * C::kOutPitch +
                   member * C::kChunks * kChunkDims;
    float* head1 = head0 + C::kOutPitch;
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&o)[4] = consumer.out_[chunk][i][n];
        const int dim = chunk * kChunkDims + i * 16;
        if (consumer.is_bf16(chunk)) {  // fragment rows g, g + 8 are those dims
          head0[dim + g] = o[0] * factor[0], head0[dim + g + 8] = o[2] * factor[0];
          head1[dim + g] = o[1] * factor[1], head1[dim + g + 8] = o[3] * factor[1];
        } else {  // they are dims 2g, 2g + 1
          *reinterpret_cast<float2*>(head0 + dim + 2 * g) = {o[0] * factor[0], o[2] * factor[0]};
          *reinterpret_cast<float2*>(head1 + dim + 2 * g) = {o[1] * factor[1], o[3] * factor[1]};
        }
      }
  }
  block_barrier<C::kThreads>();
}

// Consumers: sums the teams. One split: that is the output. Several: the sum replaces the first team's part.
template <class C>
__device__ void merge_teams(const TeamParams& params, const Work& w, uint8_t* smem, int thread) {
  const float2* stats = reinterpret_cast<const float2*>(smem + C::kStats);
  const auto place = [&](int team, int quad) {
    return reinterpret_cast<float4*>(smem + C::kRing) +
           ((team * C::kHeads + quad / kOutQuads) * C::kOutPitch / 4 + quad % kOutQuads);
  };
  constexpr int kAtOnce = 4;  // loads in flight
#pragma unroll
  for (int first = 0; first < C::kHeads * kOutQuads / kConsumerThreads; first += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      x[i] = *place(0, quad);
#pragma unroll
      for (int team = 1; team < C::kTeams; ++team) add(x[i], *place(team, quad));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      if (params.num_splits > 1) *place(0, quad) = x[i];
      else store_out(params.p, w, quad, x[i], stats[quad / kOutQuads].y);
    }
  }
}

// Consumers: each CTA of the cluster finishes an equal share of the row's outputs from all CTAs' sums.
template <class C>
__device__ void merge_splits(const TeamParams& params, const Work& w, uint8_t* smem, int thread) {
  const uint32_t base = shared_address(smem);
  const int splits = params.num_splits, lane = thread % kWarpSize;
  const int share = C::kHeads * kOutQuads / splits,
            first = w.split * share;                        // a multiple of 64: a warp stays
  for (int i = thread; i < share; i += kConsumerThreads) {  // inside one head
    const int quad = first + i, head = quad / kOutQuads;
    float2 stats = {kNoPartial, 0.0f};  // lane r holds split r's
    float largest = -INFINITY;
    if (lane < splits) {
      stats = load_cluster_float2(cluster_address(base + C::kStats + head * 8, lane));
      if (params.p.max_logits)
        largest = load_cluster_float(cluster_address(base + C::kLargest + head * 4, lane));
    }
    const uint32_t mine = base + C::kRing + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float max = stats.x, total = 0.0f, factor = 0.0f;
    constexpr int kAtOnce = 8;
    for (int r = 0; r < splits; r += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        x[k] = r + k < splits ? load_cluster_float4(cluster_address(mine, r + k))
                              : float4{0.0f, 0.0f, 0.0f, 0.0f};
      if (r == 0) {  // while those are on their way
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
          max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
        factor = fast_exp2(stats.x - max);
        total = stats.y * factor;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          total += __shfl_xor_sync(kFullWarp, total, offset);
          largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add(sum, x[k], __shfl_sync(kFullWarp, factor, r + k));
    }
    float out_factor = 0.0f;
    if (lane == 0) out_factor = finish_head<typename C::R>(params.p, w, head, max, total, largest);
    store_out(params.p, w, quad, sum, __shfl_sync(kFullWarp, out_factor, 0));
  }
}

// ---- walk -----------------------------------------------------------------------------------------------
//
// The end of a row: its team finishes O; of two teams, which add up their parts, each half of the value dims.

template <class C>
class RowFinish {
 public:
  static constexpr int kGroups = C::kGroups, kMembers = C::kMembers, kRowWarps = C::kRowTeams * kMembers;

  __device__ RowFinish(const TeamParams& params, Consumer<C>& consumer, uint8_t* smem, int lane)
      : p_(params.p),
        o_(consumer),
        smem_(smem),
        second_(consumer.team() % C::kRowTeams),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  __device__ static void barrier(int row) { named_barrier(kBarrierRow + row, kRowWarps * kWarpSize); }

  // All warps of the row.
  __device__ void run(int64_t token, int first_head) {
    o_.write_stats(smem_);
    barrier(o_.row());  // Q has been read, too
    scale(token, first_head);
    // O goes through where Q was, in two parts. The second overwrites what its writer has just read.
    if constexpr (C::kRowTeams == 2) {
      const int warp = o_.team() * kMembers + o_.member(), partner = warp ^ kMembers;
      exchange(0, warp, partner);
      exchange(1, partner, warp);
    }
    store(token, first_head);
  }

 private:
  static constexpr int kHalf = C::kChunks / C::kRowTeams;  // chunks that a warp finishes
  static constexpr int kPartTiles = kHalf * 4 / 2;         // tiles of 16 dims in one part
  static constexpr int kPartBytes = kPartTiles * kGroups * 16 * kWarpSize;
  static_assert(C::kRowTeams == 1 || kRowWarps * kPartBytes <= C::kQBytes);

  // Both teams' sums are known: weights become fractions. Writes lse and max_logits.
  __device__ void scale(int64_t token, int first_head) {
    const int first_warp = o_.row() * kRowWarps;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int pair = n * kGroupHeads / 2 + t_;
      const auto stats = [&](int w) {
        return reinterpret_cast<const float4*>(smem_ +
                                               C::kWarpStats)[(first_warp + w) * C::kHeads / 2 + pair];
      };
      float base[2] = {kNoMax, kNoMax}, sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < kRowWarps; w += kMembers) {  // a team has one base
        base[0] = fmaxf(base[0], stats(w).x);
        base[1] = fmaxf(base[1], stats(w).z);
      }
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) {
        const float4 x = stats(w);
        sum[0] += x.y * fast_exp2(x.x - base[0]);
        sum[1] += x.w * fast_exp2(x.z - base[1]);
      }
      const int head = first_head + n * kGroupHeads + 2 * t_;
      float factor[2];
#pragma unroll
      for (int c = 0; c < 2; ++c)
        factor[c] =
            fast_exp2(o_.max_[n][c] - base[c]) * output_factor<typename C::R>(p_, head + c, base[c], sum[c]);
      if (g_ == 0 && second_ == 0 && n == o_.member()) {
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int w = 0; w < kRowWarps; ++w) {
          const float2 x = reinterpret_cast<const float2*>(
              smem_ + C::kWarpLargest)[(first_warp + w) * C::kHeads / 2 + pair];
          largest[0] = fmaxf(largest[0], x.x), largest[1] = fmaxf(largest[1], x.y);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) write_head(p_, token, head + c, base[c], sum[c], largest[c]);
      }
      o_.rescale(n, factor[0], factor[1]);
    }
  }

  // The first team finishes the first half of a warp's chunks. `mine`: to send from; then `theirs` is read.
  __device__ void exchange(int part, int mine, int theirs) {
    uint8_t* const area = smem_ + C::kQ + o_.row() * C::kQBytes;
    const auto place = [&](int warp, int i) {
      return reinterpret_cast<float4*>(area + warp % kRowWarps * kPartBytes) + i * kWarpSize + lane_;
    };
#pragma unroll
    for (int i = 0; i < kPartTiles; ++i)
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const float (&a)[4] = tile(0, part * kPartTiles + i, n), (&b)[4] = tile(1, part * kPartTiles + i, n);
        *place(mine, i * kGroups + n) =
            second_ ? float4{a[0], a[1], a[2], a[3]} : float4{b[0], b[1], b[2], b[3]};
      }
    barrier(o_.row());
#pragma unroll
    for (int i = 0; i < kPartTiles; ++i)
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const float4 x = *place(theirs, i * kGroups + n);
        float (&a)[4] = tile(0, part * kPartTiles + i, n), (&b)[4] = tile(1, part * kPartTiles + i, n);
        a[0] = (second_ ? b[0] : a[0]) + x.x, a[1] = (second_ ? b[1] : a[1]) + x.y;
        a[2] = (second_ ? b[2] : a[2]) + x.z, a[3] = (second_ ? b[3] : a[3]) + x.w;
      }
  }
  __device__ float (&tile(int half, int i, int n))[4] { return o_.out_[half * kHalf + i / 4][i % 4][n]; }

  // The finished half, in the place of the first.
  __device__ void store(int64_t token, int first_head) {
    uint16_t* const row =
        p_.out + token * p_.out_stride_token + (o_.member() * C::kChunks + second_ * kHalf) * kChunkDims;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int head = first_head + n * kGroupHeads + 2 * t_;
      uint16_t* const out[2] = {row + head * p_.out_stride_head, row + (head + 1) * p_.out_stride_head};
      const bool real[2] = {head < p_.num_q_heads, head + 1 < p_.num_q_heads};
#pragma unroll
      for (int i = 0; i < kHalf * 4; ++i) {
        float (&o)[4] = tile(0, i, n);
        // Fragment rows g, g + 8 are dims 2g, 2g + 1, of bf16 values g, g + 8: neighbours swap.
        int dim = i * 16 + 2 * g_;
        if (C::R::kFp8Chunks == 0 ||
            ((C::kRowTeams == 1 || second_) && o_.is_bf16((C::kRowTeams - 1) * kHalf + i / 4))) {
          const bool odd = g_ % 2;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float got = __shfl_xor_sync(kFullWarp, odd ? o[c] : o[c + 2], 4);
            (odd ? o[c] : o[c + 2]) = got;
          }
          dim = i * 16 + (odd ? g_ + 7 : g_);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (real[c]) *reinterpret_cast<uint32_t*>(out[c] + dim) = pack_bf16(o[c], o[c + 2]);
      }
    }
  }

  const SparseAttentionParams& p_;
  Consumer<C>& o_;
  uint8_t* const smem_;
  const int second_, lane_, g_, t_;
};

}  // namespace mla_fp8::gpu
