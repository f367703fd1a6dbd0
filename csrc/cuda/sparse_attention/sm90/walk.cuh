#pragma once
// The gather of the prefill kernels: row after row, each producer warp fills slots of one team.
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"

namespace mla_fp8::gpu {

// One query token and kHeads of its heads. A CTA's C::kRows places take units in turns.
template <class C>
struct Unit {
  int64_t token;
  int first_head;

  // 32 bits: a division of 64 would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const TeamParams& params) {
    return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks;
  }
  __device__ static unsigned first(int row) { return blockIdx.x + gridDim.x * row; }
  __device__ static unsigned stride() { return gridDim.x * C::kRows; }

  __device__ Unit(const TeamParams& params, unsigned i)
      : token(i / params.num_head_blocks),
        first_head(static_cast<int>(i % params.num_head_blocks) * C::kHeads) {}
};

// The warps that work on a row survey the keys of the one after it, for themselves and its producers. A place
// for rows has two buffers for that.
template <class C>
class RowSurveys {
 public:
  static constexpr int kWarps = C::kSurveyWarps, kProducers = C::kProducers / C::kRows;  // of a place

  __device__ RowSurveys(uint8_t* smem, int place) : smem_(shared_address(smem)), place_(place) {}

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), kWarps * kWarpArrivals);
      mbarrier_init(empty(i), kProducers * kWarpArrivals);
    }
  }
  // By each of the warps that work on the place's i-th row.
  __device__ void write(int i, const SparseAttentionParams& p, const Keys& keys, int warp, int lane) const {
    mbarrier_wait(empty(i), (i / 2 & 1) ^ 1);
    survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, map(i), [] {});
    mbarrier_arrive_warp(full(i), lane);
  }
  __device__ KeySurvey read(int i, int lane) const {
    mbarrier_wait(full(i), i / 2 & 1);
    return {map(i), load_shared_4(map(i) + kMapLength), lane};
  }
  __device__ uint32_t map(int i) const { return smem_ + C::kMaps + (place_ * 2 + i % 2) * kMapBytes; }
  // By each of its producers, once it has found all keys.
  __device__ void release(int i, int lane) const { mbarrier_arrive_warp(empty(i), lane); }

 private:
  __device__ uint32_t full(int i) const { return smem_ + C::kSurveyBarriers + (place_ * 2 + i % 2) * 16; }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }

  const uint32_t smem_;
  const int place_;
};

template <class C>
class RowProducer : Gather<C> {
 public:
  static constexpr int kTeamProducers = C::kProducers / C::kTeams;
  static constexpr int kSlotsPerBlock = C::kBlockSlots / kTeamProducers;  // of this producer
  static_assert(C::kProducers % C::kTeams == 0 && C::kBlockSlots % kTeamProducers == 0);

  __device__ RowProducer(const TeamParams& params, uint8_t* smem, int warp, int lane)
      : Gather<C>(params, smem, lane),
        params_(params),
        warp_(warp),
        team_(warp / kTeamProducers),
        first_(warp % kTeamProducers),
        smem_(smem) {}

  __device__ void run() {
    const RowSurveys<C> surveys(smem_, row());
    int i = 0;  // slots so far
    for (unsigned unit = Unit<C>::first(row()), n = 0; unit < Unit<C>::count(params_);
         unit += Unit<C>::stride(), ++n) {
      const Keys keys(params_.p, Unit<C>(params_, unit).token);
      const ValidKeys<MapInShared> valid_keys(surveys.read(n, this->lane_), {surveys.map(n)});
      // A team has whole blocks. Entries, which the survey has brought close, are loaded a slot ahead.
      int rank = team_ % C::kRowTeams * C::kBlockTokens + first_ * kSlotTokens, rank_of_next = 0;
      typename Gather<C>::Key next{-1, 0};
      for (bool has_next = false;; rank = rank_after(rank)) {
        const typename Gather<C>::Key key = next;
        const int num_keys = has_next ? valid_keys.num_keys() - rank_of_next : 0;
        const bool fetches = has_next;
        has_next = rank / C::kBlockTokens * C::kBlockTokens < valid_keys.num_keys();
        if (has_next) next = this->find(valid_keys, keys, rank), rank_of_next = rank;
        if (fetches) {
          const int block = i / kSlotsPerBlock * C::kTeams + team_;
          this->fetch(block * C::kBlockSlots + first_ + i % kSlotsPerBlock * kTeamProducers, key, num_keys);
          ++i;
        }
        if (!has_next) break;
      }
      surveys.release(n, this->lane_);
    }
  }

 private:
  __device__ int row() const { return team_ / C::kRowTeams; }
  __device__ int rank_after(int rank) const {
    rank += kTeamProducers * kSlotTokens;
    const bool past_block = rank % C::kBlockTokens == first_ * kSlotTokens;
    return past_block ? rank + (C::kRowTeams - 1) * C::kBlockTokens : rank;
  }

  const TeamParams& params_;
  const int warp_, team_, first_;
  uint8_t* const smem_;
};

}  // namespace mla_fp8::gpu
