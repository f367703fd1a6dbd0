#pragma once
// A CTA that walks through queries: its items, the survey of their keys ahead, and the warps that do not
// compute, which are producers and, over two layouts, warps that expand rows.
#include <type_traits>

#include "cuda/sparse_attention/sm90/mixed_gather.cuh"

namespace mla_fp8::gpu {

// One query and kHeads of its heads. A CTA's C::kQueries places take items in turns.
template <class C>
struct WalkItem : QueryHeads {
  // 32 bits: a 64-bit division would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const KernelParams& params) {
    return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks();
  }
  __device__ static unsigned first(const KernelParams& params, int place) {
    return skip(params, blockIdx.x + gridDim.x * place);
  }
  __device__ static unsigned next(const KernelParams& params, unsigned i) {
    return skip(params, i + gridDim.x * C::kQueries);
  }

  // Returns whether this CTA has any item. All threads call it, and it is a barrier.
  __device__ static bool has_any(const KernelParams& params) {
    bool has = !params.shared.lists;
    if (!has)
      for (unsigned i = blockIdx.x + gridDim.x * threadIdx.x; i < count(params); i += gridDim.x * C::kThreads)
        has |= !params.shared.has(params.head_blocks.word(i));
    return named_barrier_any(0, C::kThreads, has);
  }

  __device__ WalkItem(const KernelParams& params, unsigned i)
      : QueryHeads(QueryHeads::of_item<C>(params, i)) {}

 private:
  // Returns the first item from i on whose query goes alone.
  __device__ static unsigned skip(const KernelParams& params, unsigned i) {
    if (params.shared.lists) [[unlikely]]
      while (i < count(params) && params.shared.has(params.head_blocks.word(i))) i += gridDim.x * C::kQueries;
    return i;
  }
};

// The warps that work on a query survey the keys of a later one, for themselves and its producers. A place
// for queries has two buffers for that.
template <class C>
class WalkSurveys {
 public:
  static constexpr int kWarps = C::kSurveyWarps, kReaders = C::kSurveyReaders;  // per place

  __device__ WalkSurveys(uint8_t* smem, int place) : smem_(shared_address(smem)), place_(place) {}

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), kWarps * kWarpArrivals);
      mbarrier_init(empty(i), kReaders * kWarpArrivals);
    }
  }
  // Each warp that works on the place's queries calls it, to survey the i-th one.
  __device__ void write(int i, const SparseAttentionParams& p, const Keys& keys, int warp, int lane) const {
    wait_until_free<2>(empty(i), i);
    survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, map(i), [] {});
    mbarrier_arrive_warp(full(i), lane);
  }
  __device__ KeySurvey read(int i, int lane) const {
    wait_until_full<2>(full(i), i);
    return {map(i), load_shared_4(map(i) + kMapLength), lane};
  }
  __device__ bool is_there(int i) const { return __all_sync(kFullWarp, mbarrier_test(full(i), i / 2 & 1)); }
  __device__ uint32_t map(int i) const {
    return smem_ + MLA_SMEM(C, maps) + (place_ * 2 + i % 2) * kMapBytes;
  }
  // Each reader calls it; a producer once it has found all keys.
  __device__ void release(int i, int lane) const { mbarrier_arrive_warp(empty(i), lane); }

 private:
  __device__ uint32_t full(int i) const {
    return smem_ + MLA_SMEM(C, survey_barriers) + (place_ * 2 + i % 2) * 16;
  }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }

  const uint32_t smem_;
  const int place_;
};

template <class C>
using GatherOf = std::conditional_t<C::R::kMixed, MixedGather<C>, Gather<C>>;

// A producer of a walk: it fills stages of one team, item after item.
template <class C>
class WalkProducer : GatherOf<C> {
 public:
  static constexpr int kTeamProducers = C::kProducers / C::kTeams;
  static constexpr int kStagesPerBlock = C::kBlockStages / kTeamProducers;  // stages of this producer
  static_assert(C::kProducers % C::kTeams == 0 && C::kBlockStages % kTeamProducers == 0);

  __device__ WalkProducer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : GatherOf<C>(params, smem, lane),
        warp_(warp),
        team_(warp / kTeamProducers),
        first_(warp % kTeamProducers),
        smem_(smem) {}

  __device__ void run() {
    const WalkSurveys<C> surveys(smem_, query_place());
    int i = 0;  // stages so far
    for (unsigned item = WalkItem<C>::first(this->params_, query_place()), n = 0;
         C::R::kMixed || item < WalkItem<C>::count(this->params_);
         item = WalkItem<C>::next(this->params_, item), ++n) {
      if constexpr (C::R::kMixed) {
        const bool is_item = item < WalkItem<C>::count(this->params_);
        this->finish_until([&] { return is_item && surveys.is_there(n); });
        if (!is_item) break;
      }
      const Keys keys(this->params_.p, WalkItem<C>(this->params_, item).query);
      const ValidKeys<MapInShared> valid_keys(surveys.read(n, this->lane_), {surveys.map(n)});
      // A team has whole blocks. Entries are loaded a stage ahead; the survey has brought them close.
      int place = team_ % C::kQueryTeams * C::kBlockKeys + first_ * kStageRows, rank_of_next = 0;
      KeySource::Key next{-1, 0};
      for (bool has_next = false;; place = place_after(place)) {
        const KeySource::Key key = next;
        const int num_keys = has_next ? valid_keys.num_keys() - rank_of_next : 0;
        const bool fetches = has_next;
        has_next = place / C::kBlockKeys * C::kBlockKeys < valid_keys.num_keys();
        if (has_next) {
          rank_of_next = rank_in_query<C>(place, ceil_div(valid_keys.num_keys(), C::kBlockKeys));
          next = this->find(valid_keys, KeySource(this->p_, keys), rank_of_next);
        }
        if (fetches) {
          const int block = i / kStagesPerBlock * C::kTeams + team_;
          this->fetch(block * C::kBlockStages + first_ + i % kStagesPerBlock * kTeamProducers, key, num_keys);
          ++i;
        }
        if (!has_next) break;
      }
      surveys.release(n, this->lane_);
    }
  }

 private:
  __device__ int query_place() const { return team_ / C::kQueryTeams; }
  __device__ int place_after(int place) const {
    place += kTeamProducers * kStageRows;
    const bool past_block = place % C::kBlockKeys == first_ * kStageRows;
    return past_block ? place + (C::kQueryTeams - 1) * C::kBlockKeys : place;
  }

  const int warp_, team_, first_;
  uint8_t* const smem_;
};

// A producer of a walk with expanding warps. It has two stages of every block of a team, and looks up their
// keys at once. Keys of the next block are found before these are fetched.
template <class C>
class MixedWalkProducer : MixedGather<C> {
 public:
  __device__ MixedWalkProducer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : MixedGather<C>(params, smem, lane),
        team_(warp / kTeamProducers),
        first_(warp % kTeamProducers),
        in_block_((lane / kStageRows * kTeamProducers + first_) * kStageRows + lane % kStageRows),
        surveys_(smem, team_) {}

  __device__ void run() {
    int i = team_ * C::kBlockStages + first_;  // the next stage in the ring's sequence
    unsigned n = 0;
    for (unsigned item = WalkItem<C>::first(this->params_, team_); item < WalkItem<C>::count(this->params_);
         item = WalkItem<C>::next(this->params_, item), ++n) {
      const Keys keys(this->p_, WalkItem<C>(this->params_, item).query);
      const KeySource source(this->p_, keys);
      const ValidKeys<MapInShared> valid_keys(surveys_.read(n, this->lane_), {surveys_.map(n)});
      const int last = valid_keys.num_keys() - 1;
      const auto find = [&](int rank) { return this->word_of(valid_keys.find(source, min(rank, last))); };
      // The last block comes first, as in rank_in_query.
      int rank = last / C::kBlockKeys * C::kBlockKeys + in_block_;
      uint32_t key = last < 0 ? 0 : find(rank);
#pragma unroll 1
      for (; last >= 0 && rank >= 0; i += C::kTeams * C::kBlockStages) {
        const typename MixedGather<C>::Rows rows = this->look_up(key, rank <= last);
        rank -= C::kBlockKeys;
        if (rank >= 0) key = find(rank);
        this->fetch(MixedGather<C>::Turn::of(i), rows, 0);
        this->fetch(MixedGather<C>::Turn::of(i + kTeamProducers), rows, kStageRows);
      }
      surveys_.release(n, this->lane_);
    }
  }

 private:
  static constexpr int kTeamProducers = C::kProducers / C::kTeams;
  static_assert(C::kQueryTeams == 1 && C::kBlockStages == 2 * kTeamProducers);

  const int team_, first_, in_block_;
  const WalkSurveys<C> surveys_;
};

// A warp of a walk that only expands: the stages of a team, item after item.
template <class C>
class WalkExpander {
 public:
  __device__ WalkExpander(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : params_(params),
        team_(warp / kTeamWarps),
        warp_(warp % kTeamWarps),
        surveys_(smem, team_),
        expander_(smem, lane),
        lane_(lane) {}

  __device__ void run() const {
    int first = 0, number = 0;  // stages and items of the team so far
#pragma unroll 1
    for (unsigned i = WalkItem<C>::first(params_, team_); i < WalkItem<C>::count(params_);
         i = WalkItem<C>::next(params_, i), ++number) {
      const int num_keys = surveys_.read(number, lane_).num_keys;
      surveys_.release(number, lane_);
      const int end = first + ceil_div(num_keys, C::kBlockKeys) * C::kBlockStages;
      for (int stage = first + warp_; stage < end; stage += kTeamWarps) expander_.take(in_ring(stage));
      first = end;
    }
  }

 private:
  static constexpr int kTeamWarps = C::kExpanders / C::kTeams;
  static_assert(C::kExpanders % C::kTeams == 0 && C::kQueryTeams == 1);
  static_assert(C::kBlockStages % kTeamWarps == 0, "the next item's first stage is that of the first warp");
  // Teams' blocks alternate.
  __device__ int in_ring(int stage) const {
    constexpr int kBlock = C::kBlockStages;
    return (stage / kBlock * C::kTeams + team_) * kBlock + stage % kBlock;
  }

  const KernelParams& params_;
  const int team_, warp_;
  const WalkSurveys<C> surveys_;
  const StageExpander<C> expander_;
  const int lane_;
};

// Runs a warp of a walk that does not compute.
template <class C>
__device__ __forceinline__ void run_walk_producers(const KernelParams& params, uint8_t* smem, int warp,
                                                   int lane) {
  if constexpr (C::kExpanders > 0) {
    if (warp >= C::kProducers) {
      give_up_registers<C::kExpanderRegisters>();
      return WalkExpander<C>(params, smem, warp - C::kProducers, lane).run();
    }
  }
  give_up_registers<C::kProducerRegisters>();
  constexpr bool kTwoStages = C::kBlockStages * C::kTeams == 2 * C::kProducers;  // of every block, a producer
  if constexpr (C::kExpanders > 0 && kTwoStages) MixedWalkProducer<C>(params, smem, warp, lane).run();
  else WalkProducer<C>(params, smem, warp, lane).run();
}

}  // namespace mla_fp8::gpu
