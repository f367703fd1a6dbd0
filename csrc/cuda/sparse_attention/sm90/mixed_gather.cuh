#pragma once
// The gather from two caches of different layouts. A producer copies rows as they lie in the caches, each to
// its place in the ring. Other warps make rows of one kind of them (mixed_expand.cuh). Without such warps a
// producer does it, when a stage has arrived or while it waits for a free one: so the whole ring is in
// flight.
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"

namespace mla_fp8::gpu {

template <class C>
class MixedGather : protected Gather<C> {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;

  // row, scales: where this lane's key lies. extras, counted: bits of the 32 lanes whose keys come from the
  // second cache, and count. repeat: keys of a stage name one row.
  struct Rows {
    const uint8_t* row;
    uint32_t scales;  // bytes from `row`
    uint32_t extras, counted;
    bool repeat;
  };

  __device__ MixedGather(const KernelParams& params, uint8_t* smem, int lane)
      : Gather<C>(params, smem, lane), expander_(smem, lane) {}

 protected:
  using Key = KeySource::Key;
  using Gather<C>::find, Gather<C>::lane_, Gather<C>::p_, Gather<C>::params_, Gather<C>::ring_;

  // Lanes 0 to 15 have the keys of one stage, 16 to 31 of another. A key is one word: registers are short.
  __device__ static uint32_t word_of(Key key) { return key.slot | key.scope << 31; }
  __device__ __forceinline__ Rows look_up(uint32_t key, bool counts) const {
    // A look at the lane 8 further finds one slot in all places, or 2, 4 or 8 slots in turn.
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
  // Expands pending stages while one has arrived or the place of `turn` is not free. Without a turn (not
  // `there_is`) expands all.
  __device__ __forceinline__ void expand_until_free(Turn turn, bool there_is) {
    if constexpr (kExpands)
      while (num_pending_ > 0 && (!there_is || is_raw_full() || !is_free(turn))) expand_next();
  }
  // Fills the place of a turn with the rows that 16 lanes, from `from` on, have looked up.
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
  // The copies into a turn's stage are on their way.
  __device__ __forceinline__ void announce(Turn turn) {
    mbarrier_arrive_cp_async(ring_.raw(turn.stage));
    mbarrier_arrive_warp(ring_.raw(turn.stage), lane_);
    if constexpr (kExpands) {
      pending_ |= static_cast<uint32_t>(turn.stage | turn.parity << 4) << 8 * num_pending_;
      ++num_pending_;
    }
  }
  // Looks up a key in each lane, and fetches one stage.
  __device__ void fetch(int i, Key key, int num_keys) {
    const Rows rows = look_up(word_of(key), lane_ % kStageRows < num_keys);
    const Turn turn = Turn::of(i);
    expand_until_free(turn, true);
    fetch(turn, rows, 0);
  }

  // Expands pending stages until ready(). Called before each wait but that for a free stage, as consumers may
  // need these stages first; and at the end.
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
  // The next pending stage and its parity.
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
  // Eight lanes copy a row, 128 bytes at a time: the copy engine takes 60 clocks a row. Where producers
  // expand, four do, with fewer instructions. Rows that several keys name come through the L1: thousands of
  // copies of one would queue at its few lines of the L2.
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

// A producer of a CTA with one query: its lanes look up the keys of two stages at once.
template <class C>
class MixedProducer : MixedGather<C> {
 public:
  using Item = typename C::Item;

  __device__ MixedProducer(const KernelParams& params, uint8_t* smem, int warp, int lane)
      : MixedGather<C>(params, smem, lane), warp_(warp) {}

  // Fetches while others survey, as if all keys were valid, which is usual. A usual query has a loop of its
  // own, as in SplitProducer.
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

 private:
  // The rows of the first two stages, and whether those of the first are on their way.
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
  // Lanes 16 to 31 have the ring's i-th stage, lanes 0 to 15 this producer's next one, of lower ranks.
  __device__ int rank_of_lane(const Item& w, int i) const {
    const int stage = this->lane_ < kStageRows ? i + C::kProducers : i;
    return w.template first_rank<C>(0) + rank_in_query<C>(stage * kStageRows, w.num_blocks) +
           this->lane_ % kStageRows;
  }
  // Ranks fall by this from a pair of stages to the next.
  static constexpr int kRanksOfPair = 2 * C::kProducers * kStageRows;
  // Ranks in a stage past the last one may be negative.
  __device__ static bool counts(int rank, int last) { return rank >= 0 && rank <= last; }
  // A rank that ValidKeys can find. Ranks ascend over the lanes.
  __device__ static int known(int rank, int last) { return max(min(rank, last), 0); }

  // All SMs begin at once, and memory serves requests in their order: if all asked for whole rings, first
  // rows would come last. So producers take turns with first stages, if these are several blocks and more
  // follow. None asks for its second stage before the first is there.
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
    // Takes stages in pairs. Their entries, which the survey has brought close, are loaded two stages ahead.
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

template <class C>
  requires(C::R::kMixed)
struct Producers<C> {
  __device__ static void let_begin(int warp) {
    if (warp == 0) named_barrier_arrive(kBarrierMixedBegin, kBeginThreads<C>);
  }
  // Early producers survey nothing, and give up their registers at once: the consumers wait for them.
  __device__ __forceinline__ static bool run_early(const KernelParams& params, typename C::Item& w,
                                                   uint8_t* smem, int warp, int lane) {
    if (warp >= 0 && warp < C::kProducers) {
      give_up_registers<C::kProducerRegisters>();
      MixedProducer<C>(params, smem, warp, lane_of_role<C>(lane)).run_early(w);
      return true;
    }
    return false;
  }
  // Runs a warp that expands.
  __device__ __forceinline__ static void run(const KernelParams&, const typename C::Item& w, const KeySurvey&,
                                             uint8_t* smem, int warp, int lane) {
    if constexpr (C::kExpanders > 0) {
      give_up_registers<C::kExpanderRegisters>();
      StageExpander<C>(smem, lane).run(warp - C::kProducers, w.num_blocks * C::kBlockStages);
    }
  }
};

}  // namespace mla_fp8::gpu
