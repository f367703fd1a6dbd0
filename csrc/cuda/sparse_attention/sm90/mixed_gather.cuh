#pragma once
// The gather from two caches of different layouts. A producer fetches rows as they lie there, each into its
// place of the ring. Rows of one kind they become by other warps (mixed_expand.cuh). Where there are none, by
// the producer: once they are there, or while it would wait for the next free stage. So the whole ring is in
// flight.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

template <class C>
class MixedGather : protected Gather<C> {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;

  // Of this lane's key where it lies. Of all 32: which come from the second cache, which count; and whether
  // some of a stage have one row.
  struct Rows {
    const uint8_t* row;
    uint32_t scales;  // from there
    uint32_t extras, counted;
    bool repeat;
  };

  __device__ MixedGather(const KernelParams& params, uint8_t* smem, int lane)
      : Gather<C>(params, smem, lane), expander_(smem, lane) {}

 protected:
  using Key = KeySource::Key;
  using Gather<C>::find, Gather<C>::lane_, Gather<C>::p_, Gather<C>::params_, Gather<C>::ring_;

  // Lanes 0 to 15 and 16 to 31 have the keys of a stage each. Registers are short: a key is one word.
  __device__ static uint32_t word_of(Key key) { return key.slot | key.scope << 31; }
  __device__ __forceinline__ Rows look_up(uint32_t key, bool counts) const {
    // One slot in all places, or 2, 4 or 8 in turn, are seen by a look at one other lane.
    const uint32_t other = __shfl_xor_sync(kFullWarp, key, 8);
    const bool extra = key >> 31;
    Rows rows{nullptr, 0, __ballot_sync(kFullWarp, extra), __ballot_sync(kFullWarp, counts),
              __any_sync(kFullWarp, counts && key == other) != 0};
    if (extra) {  // mostly in all lanes
      const unsigned slot = key & 0x7fffffffu;
      locate<Second>(rows, 1, slot, params_.page_size[1].word(slot));
    } else {
      locate<First>(rows, 0, key, params_.page_size[0].word(key));
    }
    return rows;
  }
  template <class Cache>
  __device__ __forceinline__ void locate(Rows& rows, int scope, unsigned slot, unsigned page) const {
    constexpr KvLayout kL = Cache::kL;
    const KvScope& s = p_.scopes[scope];
    const auto page_size = static_cast<unsigned>(s.page_size);
    const unsigned in_page = slot - page * page_size;
    const int64_t row = kL.token_offset(in_page);
    rows.row = s.kv_cache + page * s.kv_cache_stride_page + row;
    rows.scales = static_cast<uint32_t>(kL.scale_offset(in_page, page_size) - row);
  }

  // A stage of the ring in one of its uses.
  struct Turn {
    int stage, parity;
    __device__ static Turn of(int i) { return {i % C::kStages, i / C::kStages & 1}; }
    __device__ void pass(int stages) {
      stage += stages;
      if (stage >= C::kStages) stage -= C::kStages, parity ^= 1;
    }
  };
  // Stages that are there, or as long as there is nothing else to do: until the place of a turn is free; to
  // the end, if there is none.
  __device__ __forceinline__ void expand_until_free(Turn turn, bool there_is) {
    if constexpr (kExpands)
      while (num_pending_ > 0 && (!there_is || is_raw_full() || !is_free(turn))) expand_next();
  }
  // To that place what the lanes from `from` on have looked up.
  __device__ __forceinline__ void fetch(Turn turn, const Rows& rows, int from) {
    mbarrier_wait(ring_.empty(turn.stage), turn.parity ^ 1);
    if (rows.repeat) [[unlikely]]
      copy_stage<true>(turn.stage, rows, from);
    else copy_stage<false>(turn.stage, rows, from);
    announce(turn);
  }
  template <bool kThroughL1>
  __device__ __forceinline__ void copy_stage(int stage, const Rows& rows, int from) const {
    const uint32_t extras = rows.extras >> from & kStagePlaces;
    if (lane_ == 0) store_shared_4(stage_extras_at(ring_, stage), extras);
    const int place = lane_ - from;
    if (lane_ / kStageRows * kStageRows == from) {
      store_shared_1(ring_.smem + MLA_SMEM(C, valid) + stage * kStageRows + place,
                     rows.counted >> lane_ & 1 ? kValidKey : 0);
      copy_scales(ring_.stage(stage) + R::kTableOffset + place * R::kRawScaleBytes, rows.row + rows.scales,
                  extras >> place & 1);
    }
    if (!kThroughL1 && extras == kStagePlaces) [[likely]]
      copy_rows<false, true>(stage, rows.row, extras, from);
    else copy_rows<kThroughL1, false>(stage, rows.row, extras, from);
  }
  // That the copies into that stage are on their way.
  __device__ __forceinline__ void announce(Turn turn) {
    mbarrier_arrive_cp_async(ring_.raw(turn.stage));
    mbarrier_arrive_warp(ring_.raw(turn.stage), lane_);
    if constexpr (kExpands) {
      pending_ |= static_cast<uint32_t>(turn.stage | turn.parity << 4) << 8 * num_pending_;
      ++num_pending_;
    }
  }
  // Of one key alone a lane.
  __device__ void fetch(int i, Key key, int num_keys) {
    const Rows rows = look_up(word_of(key), lane_ % kStageRows < num_keys);
    const Turn turn = Turn::of(i);
    expand_until_free(turn, true);
    fetch(turn, rows, 0);
  }

  // Before it waits for anything but a free stage, as consumers may need them before what is waited for can
  // come; and at the end.
  template <class Ready>
  __device__ void finish_until(Ready&& ready) {
    while (num_pending_ > 0 && !ready()) expand_next();
  }

 private:
  static constexpr bool kExpands = C::kExpanders == 0;
  static_assert(!kExpands || (C::kStages <= 16 && ceil_div(C::kStages, C::kProducers) <= 4),
                "a byte of pending_ each");

  __device__ bool is_free(Turn turn) const { return is_over(ring_.empty(turn.stage), turn.parity ^ 1); }
  __device__ bool is_over(uint32_t barrier, int parity) const {
    return __all_sync(kFullWarp, mbarrier_test(barrier, parity));
  }
  // The next one's place and parity.
  __device__ int pending_stage() const { return pending_ & 15; }
  __device__ int pending_parity() const { return pending_ >> 4 & 1; }
  __device__ bool is_raw_full() const { return is_over(ring_.raw(pending_stage()), pending_parity()); }
  __device__ void expand_next() {
    mbarrier_wait(ring_.raw(pending_stage()), pending_parity());
    expander_.expand(pending_stage());
    pending_ >>= 8;
    --num_pending_;
  }

  __device__ __forceinline__ static void copy_scales(uint32_t to, const uint8_t* scales, bool extra) {
    constexpr int kFirstBytes = First::kL.scale_bytes();
    static_assert(kFirstBytes == 8 || kFirstBytes == 16);
    if (kFirstBytes == 16 || extra) cp_async_16(to, scales, true);
    else cp_async_8(to, scales);
    if (extra) cp_async_16(to + 16, scales + 16, true);
  }
  // Eight lanes copy a row, a line at a time: the copy engine takes 60 clocks a row. Where the producer
  // expands, four do, which is fewer instructions. Rows that several keys name come through the L1: thousands
  // of copies of one would queue at its few lines of the L2.
  template <bool kThroughL1, bool kAllExtra>
  __device__ __forceinline__ void copy_rows(int stage, const uint8_t* row, uint32_t extras, int from) const {
    constexpr int kLanes = C::kExpanders > 0 && First::kBytes % 128 == 0 ? 8 : 4;
    constexpr int kUnit = kLanes * 16, kRowsAtOnce = kWarpSize / kLanes;
    static_assert(First::kBytes % kUnit == 0 && Second::kBytes % kUnit == 0);
#pragma unroll
    for (int first = 0; first < kStageRows; first += kRowsAtOnce) {
      const int place = first + lane_ / kLanes, in_unit = lane_ % kLanes * 16;
      const bool extra = kAllExtra || (extras >> place & 1);
      const uint8_t* const src = broadcast(row, from + place) + in_unit;
      const uint32_t dst = ring_.stage(stage) + place * R::kPitch + (extra ? R::kCodesOffset : 0) + in_unit;
#pragma unroll
      for (int at = 0; at < First::kBytes; at += kUnit)
        if (at < Second::kBytes || !extra) cp_async_16<kThroughL1>(dst + at, src + at, true);
    }
  }

  const StageExpander<C> expander_;
  uint32_t pending_ = 0;  // stages to expand, a byte each, the next one lowest
  int num_pending_ = 0;
};

// The producers of a CTA that works on one query: a lane looks up a key of two stages.
template <class C>
class MixedProducer : MixedGather<C> {
 public:
  using Item = typename C::Item;

  __device__ MixedProducer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : MixedGather<C>(params, smem, lane), warp_(warp) {}

  // While others survey it: fetches as if all keys were valid, which they mostly are. A usual query has a
  // loop of its own, as SplitProducer's.
  __device__ void run_early(Item& w) {
    Early early = fetch_early(w);
    mbarrier_wait(this->ring_.survey(), 0);
    const KeySurvey survey = read_survey<C>(this->params_, w, this->ring_.smem, kSurveyWarps<C>, this->lane_);
    const ValidKeys<MapInShared> valid_keys = keys_of(survey);
    const typename Item::Source source = w.source(this->params_);
    const bool all_valid =
        !valid_keys.has_gaps() && valid_keys.num_keys() == static_cast<int>(source.length());
    if (early.is_there && !all_valid) {
      cp_async_wait_all();  // other rows will come to their places
      __syncwarp();
      early.is_there = false;
    }
    if (!valid_keys.has_gaps() && !source.has_pages()) [[likely]]
      return run(w, valid_keys, early, [&](int rank) { return source.listed(rank); });
    run(w, valid_keys, early, [&](int rank) { return this->find_of_query(valid_keys, source, rank); });
  }
  // The barriers that it waits for are made: by the warp that makes them.
  __device__ static void let_begin() { named_barrier_arrive(kBarrierMixedBegin, kBeginThreads<C>); }

 private:
  // Rows of the first two stages; whether the first one's are on their way.
  struct Early {
    typename MixedGather<C>::Rows rows{};
    bool is_there = false;
  };
  static constexpr int kTurnThreads = 2 * kWarpSize;
  static_assert(kBarrierTurn + C::kProducers <= kNumBarriers && C::kProducers <= C::kStages);
  static_assert(C::kProducers % C::kBlockStages == 0, "its next stage is in another block, before this one");

  __device__ ValidKeys<MapInShared> keys_of(const KeySurvey& survey) const {
    return {survey, {this->ring_.smem + MLA_SMEM(C, maps)}};
  }
  // In the ring's i-th stage. The first lanes have the stage after the next, whose ranks are lower.
  __device__ int rank_of_lane(const Item& w, int i) const {
    const int stage = this->lane_ < kStageRows ? i + C::kProducers : i;
    return w.template first_rank<C>(0) + rank_in_query<C>(stage * kStageRows, w.num_blocks) +
           this->lane_ % kStageRows;
  }
  // How much lower ranks are two stages on.
  static constexpr int kRanksOfPair = 2 * C::kProducers * kStageRows;
  // In a stage past the last one they may be negative.
  __device__ static bool counts(int rank, int last) { return rank >= 0 && rank <= last; }
  // To find a key by, in lanes of ascending ranks.
  __device__ static int known(int rank, int last) { return max(min(rank, last), 0); }

  // All SMs begin at once, and the memory serves requests in their order: were the whole ring asked for,
  // first rows would come when all of it does. So producers whose first stages are several blocks take turns
  // with them, if they have more, and none asks for its second stage before the first is there.
  __device__ __forceinline__ Early fetch_early(Item w) const {
    const typename Item::Source source = w.source(this->params_);
    const auto num_keys = static_cast<int>(source.length());
    const bool is_listed = !source.has_pages() && num_keys > 0;
    KeySource::Key key{-1, 0};
    int rank = 0;
    if (is_listed) {
      w.template take_share<C>(num_keys, this->params_.splits);
      rank = rank_of_lane(w, warp_);
      key = source.listed(known(rank, num_keys - 1));
    }
    named_barrier(kBarrierMixedBegin, kBeginThreads<C>);
    if (!is_listed) return {};
    const int num_stages = w.num_blocks * C::kBlockStages;
    Early early{this->look_up(this->word_of(key), counts(rank, num_keys - 1))};
    const uint32_t valid = __ballot_sync(kFullWarp, source.is_valid(key)) >> kStageRows;
    early.is_there = warp_ < num_stages && valid == kStagePlaces && !early.rows.repeat;
    const bool takes_turns = C::kBlockStages < C::kProducers && num_stages > C::kProducers;
    if (takes_turns && warp_ > 0) named_barrier(kBarrierTurn + warp_, kTurnThreads);
    if (early.is_there) this->template copy_stage<false>(warp_, early.rows, kStageRows);
    if (takes_turns && warp_ + 1 < C::kProducers)
      named_barrier_arrive(kBarrierTurn + warp_ + 1, kTurnThreads);
    return early;
  }

  template <class FindKey>
  __device__ __forceinline__ void run(const Item& w, const ValidKeys<MapInShared>& valid_keys, Early early,
                                      FindKey&& find) {
    const int num_stages = w.num_blocks * C::kBlockStages, last = valid_keys.num_keys() - 1;
    // Its stages in pairs, whose entries, which the survey has brought close, are loaded two stages ahead.
    uint32_t key = 0;
    int i = warp_, rank = rank_of_lane(w, i);
    bool is_second = early.is_there;
    typename MixedGather<C>::Turn turn{warp_, 0};
    if (early.is_there) {
      this->announce(turn);
      i += C::kProducers, turn.pass(C::kProducers), rank -= kRanksOfPair;
      key = this->word_of(w.source(this->params_).listed(known(rank, last)));
    } else if (i < num_stages) {
      key = this->word_of(find(known(rank, last)));
    }
#pragma unroll 1
    for (;; i += C::kProducers, turn.pass(C::kProducers), is_second = !is_second) {
      this->expand_until_free(turn, i < num_stages);
      if (i >= num_stages) break;
      if (!is_second) early.rows = this->look_up(key, counts(rank, last));
      if (i >= C::kProducers && i < 2 * C::kProducers) mbarrier_wait(this->ring_.raw(warp_), 0);
      this->fetch(turn, early.rows, is_second ? 0 : kStageRows);
      if (is_second) continue;
      rank -= kRanksOfPair;
      if (i + 2 * C::kProducers < num_stages) key = this->word_of(find(known(rank, last)));
    }
  }

  const int warp_;
};

}  // namespace mla_fp8::gpu
