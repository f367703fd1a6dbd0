#pragma once
// Segments (sm90/segments.cuh) by the teams of few_heads.
#include <cstdint>

#include "cuda/device/cluster.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/few_heads/team.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/segments.cuh"

namespace mla_fp8::gpu {

template <class C>
class SegmentProducer : Gather<C> {
 public:
  using Item = typename C::Item;

  __device__ SegmentProducer(const KernelParams& params, const Item& w, const KeySurvey& survey,
                             uint8_t* smem, int warp, int lane)
      : Gather<C>(params, smem, lane),
        w_(w),
        valid_keys_(survey, {shared_address(smem) + MLA_SMEM(C, maps)}),
        warp_(warp) {}

  // As SplitProducer. A stage is that of a team; all teams have as many blocks, or one less.
  __device__ void run() {
    const int num_stages = w_.num_blocks * C::kBlockStages;
    KeySource::Key now{-1, 0};
    int rank = -1;
    for (int i = warp_ - C::kProducers; i < num_stages; i += C::kProducers) {
      const int ahead = i + C::kProducers, rank_ahead = ahead < num_stages ? rank_of(ahead) : -1;
      KeySource::Key next{-1, 0};
      if (rank_ahead >= 0) next = this->find(valid_keys_, w_.source(this->params_), rank_ahead);
      if (rank >= 0) this->fetch(i, now, valid_keys_.num_keys() - rank);
      now = next, rank = rank_ahead;
    }
  }

 private:
  // The rank of the first key of the i-th stage of the ring's sequence; -1: its team has no block any more.
  __device__ int rank_of(int i) const {
    const int place = i / C::kBlockStages, team = place % C::kTeams;
    const int run = w_.first_run(team);
    const int block = w_.first_block_of(run) + place / C::kTeams;
    if (block >= w_.first_block_of(run + w_.runs)) return -1;
    return block * C::kBlockKeys + i % C::kBlockStages * kStageRows;
  }

  const Item& w_;
  const ValidKeys<MapInShared> valid_keys_;
  const int warp_;
};

// A place for what waits for its neighbour: O of a lane, its bases and sums.
template <class C>
struct SavedRuns {
  static constexpr int kStats = C::kOctets * 4;
  float4 out[C::kChunks * 4 * C::kOctets], stats[kStats / 4];
};

template <class C>
class SegmentConsumer : public Consumer<C> {
 public:
  using Base = Consumer<C>;
  using Base::kOctets, Base::max_, Base::sum_, Base::out_;

  __device__ SegmentConsumer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : Base(params, smem, warp, lane) {}

  // All runs of the team: what they come to is in out_, max_ and sum_ then, sums those of all its warps.
  __device__ __forceinline__ void run(const typename C::Item& w) {
    SavedRuns<C> saved[kSavedLevels];
    RunTree<C::kChain> tree;
    const int first = w.first_run(this->team_);
    this->init();
    if (w.runs > 1) clear_total();
    int place = this->team_, block = w.first_block_of(first);
#pragma unroll 1
    for (int run = 0; run < w.runs; ++run) {
      const int end = w.first_block_of(first + run + 1);
      if (block == end) continue;
#pragma unroll 1
      for (; block < end; ++block, place += C::kTeams) this->attend(place);
      add_up_sums((place / C::kTeams - 1) % 2);
      if (w.runs == 1) return;
      fold();
      tree.end(
          w, this->team_, run,
          [&](int level) {
            load(saved[level]);
            fold();
          },
          [&](int level) {
            store(saved[level]);
            clear_total();
          });
    }
    if (w.runs > 1) take_total();
  }

  // Of the team, by its first warp.
  __device__ void write_team_stats() const {
    if (this->member_ != 0 || this->g_ != 0) return;
    float4* const stats = reinterpret_cast<float4*>(this->smem_ + MLA_SMEM(C, warp_stats)) +
                          this->team_ * C::kHeads / 2 + this->t_;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
      stats[n * kOctetHeads / 2] = {max_[n][0], sum_[n][0], max_[n][1], sum_[n][1]};
  }

 private:
  static constexpr int kTiles = C::kChunks * 4;

  // sum_ of this warp's keys and lane to those of the team's.
  // `parity`: of the last block, whose maxima are done with.
  __device__ void add_up_sums(int parity) {
    float2* const sums = reinterpret_cast<float2*>(this->smem_ + MLA_SMEM(C, block_max)) +
                         (this->team_ * 2 + parity) * C::kMembers * C::kHeads / 2 + this->t_;
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float2 mine = {sum_over_g(sum_[n][0]), sum_over_g(sum_[n][1])};
      if (this->g_ == 0) sums[(this->member_ * C::kHeads + n * kOctetHeads) / 2] = mine;
    }
    // Nobody writes there again before a barrier of the next block.
    named_barrier(kBarrierTeam + this->team_, kWarpSize * C::kMembers);
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      float2 sum = {0.0f, 0.0f};
#pragma unroll
      for (int m = 0; m < C::kMembers; ++m) {
        const float2 x = sums[(m * C::kHeads + n * kOctetHeads) / 2];
        sum = {sum.x + x.x, sum.y + x.y};
      }
      sum_[n][0] = sum.x, sum_[n][1] = sum.y;
    }
  }

  __device__ void clear_total() {
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        total_max_[n][c] = kNoMax, total_sum_[n][c] = 0.0f;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) total_[i][n][c] = total_[i][n][c + 2] = 0.0f;
      }
  }

  // The total and out_, merged; out_ begins again.
  __device__ __forceinline__ void fold() {
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float base = fmaxf(total_max_[n][c], max_[n][c]);
        const float f = fast_exp2(total_max_[n][c] - base), g = fast_exp2(max_[n][c] - base);
        total_max_[n][c] = base, max_[n][c] = kNoMax;
        total_sum_[n][c] = merged(total_sum_[n][c], f, sum_[n][c], g), sum_[n][c] = 0.0f;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int j = c; j < 4; j += 2) {
            float& o = out_[i / 4][i % 4][n][j];
            total_[i][n][j] = merged(total_[i][n][j], f, o, g), o = 0.0f;
          }
      }
  }
  __device__ __forceinline__ void take_total() {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) max_[n][c] = total_max_[n][c], sum_[n][c] = total_sum_[n][c];
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) out_[i / 4][i % 4][n][j] = total_[i][n][j];
    }
  }

  __device__ __forceinline__ void store(SavedRuns<C>& to) const {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      to.stats[n] = {total_max_[n][0], total_max_[n][1], total_sum_[n][0], total_sum_[n][1]};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float (&x)[4] = total_[i][n];
        to.out[i * kOctets + n] = {x[0], x[1], x[2], x[3]};
      }
    }
  }
  __device__ __forceinline__ void load(const SavedRuns<C>& from) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float4 s = from.stats[n];
      max_[n][0] = s.x, max_[n][1] = s.y, sum_[n][0] = s.z, sum_[n][1] = s.w;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float4 x = from.out[i * kOctets + n];
        float (&o)[4] = out_[i / 4][i % 4][n];
        o[0] = x.x, o[1] = x.y, o[2] = x.z, o[3] = x.w;
      }
    }
  }

  float total_[kTiles][kOctets][4];
  float total_max_[kOctets][2], total_sum_[kOctets][2];
};

// ---- teams of a CTA -------------------------------------------------------------------------------------

// Two teams, or two pairs of them. Of a head (base, sum) of team i: team(i).
template <class C>
struct TeamStats {
  static_assert(C::kTeams == 2 || C::kTeams == 4);
  float2* stats;
  int head;

  __device__ TeamStats(uint8_t* smem, int head)
      : stats(reinterpret_cast<float2*>(smem + MLA_SMEM(C, warp_stats))), head(head) {}
  __device__ float2 team(int i) const { return stats[i * C::kHeads + head]; }
  __device__ static float2 merge(float2 a, float2 b) {
    const float base = fmaxf(a.x, b.x);
    return {base, merged(a.y, fast_exp2(a.x - base), b.y, fast_exp2(b.x - base))};
  }
  __device__ float2 pair(int i) const { return merge(team(2 * i), team(2 * i + 1)); }
  // What O of the first and of the second pair is multiplied by.
  __device__ float2& pair_factors() const { return stats[kConsumerWarps / 2 * C::kHeads + head]; }
};

// One of the warps that gathered, a lane for each head.
template <class C>
__device__ void merge_team_stats(const KernelParams& params, const typename C::Item& w, uint8_t* smem,
                                 bool first, int lane) {
  block_barrier<C::kThreads>();
  if (first && lane < C::kHeads) {
    const TeamStats<C> teams(smem, lane);
    float2 all = teams.pair(0);
    if constexpr (C::kTeams == 4) {
      const float2 a = all, b = teams.pair(1);
      all = TeamStats<C>::merge(a, b);
      teams.pair_factors() = {fast_exp2(a.x - all.x), fast_exp2(b.x - all.x)};
    }
    if (params.num_splits() == 1) all.y = finish_head<typename C::R>(params.p, w, lane, all.x, all.y);
    reinterpret_cast<float2*>(smem + MLA_SMEM(C, stats))[lane] = all;
  }
  block_barrier<C::kThreads>();
}

// The others: O as float [team][head][kHeadDimV] over the ring, brought to the base of a pair of teams.
template <class C>
__device__ void write_team_partials(const SegmentConsumer<C>& consumer, uint8_t* smem, int warp, int lane) {
  const int t = lane % 4, team = warp / C::kMembers, member = warp % C::kMembers;
  consumer.write_team_stats();
  block_barrier<C::kThreads>();
#pragma unroll
  for (int n = 0; n < C::kOctets; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float other = TeamStats<C>(smem, n * kOctetHeads + 2 * t + c).team(team ^ 1).x;
      factor[c] = fast_exp2(consumer.max_[n][c] - fmaxf(consumer.max_[n][c], other));
    }
    float* head0 = reinterpret_cast<float*>(smem + MLA_SMEM(C, ring)) +
                   (team * C::kHeads + n * kOctetHeads + 2 * t) * C::kOutPitch +
                   member * C::kChunks * kChunkDims;
    consumer.store_partial(n, head0, factor);
  }
  block_barrier<C::kThreads>();
}

template <class C>
__device__ void merge_team_outputs(const KernelParams& params, const typename C::Item& w, uint8_t* smem,
                                   int thread) {
  const float2* stats = reinterpret_cast<const float2*>(smem + MLA_SMEM(C, stats));
  const auto place = [&](int team, int quad) {
    return reinterpret_cast<float4*>(smem + MLA_SMEM(C, ring)) +
           ((team * C::kHeads + quad / kOutQuads) * C::kOutPitch / 4 + quad % kOutQuads);
  };
  const auto pair = [&](int i, int quad) {
    return merged(*place(2 * i, quad), 1.0f, *place(2 * i + 1, quad), 1.0f);
  };
#pragma unroll 4
  for (int quad = thread; quad < C::kHeads * kOutQuads; quad += kConsumerThreads) {
    const int head = quad / kOutQuads;
    float4 x = pair(0, quad);
    if constexpr (C::kTeams == 4) {
      const float2 f = TeamStats<C>(smem, head).pair_factors();
      x = merged(x, f.x, pair(1, quad), f.y);
    }
    if (params.num_splits() > 1) *place(0, quad) = x;
    else if (w.has_head(params.p, head))
      place_of_head(params.p, w, head)[quad % kOutQuads] = to_unsigned_bf16(x, stats[head].y);
  }
}

}  // namespace mla_fp8::gpu
