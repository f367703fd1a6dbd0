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
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

template <class C>
class MixedGather : protected Gather<C> {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;

  __device__ MixedGather(const KernelParams& params, uint8_t* smem, int lane)
      : Gather<C>(params, smem, lane), expander_(smem, lane) {}

 protected:
  using Key = KeySource::Key;
  using Gather<C>::find, Gather<C>::lane_, Gather<C>::p_, Gather<C>::params_, Gather<C>::ring_;

  // Of this lane's key where it lies. Of all 32: which come from the second cache, which count; and whether
  // some of a stage have one row.
  struct Rows {
    const uint8_t* row;
    uint32_t scales;  // from there
    uint32_t extras, counted;
    bool repeat;
  };
  // Lanes 0 to 15 and 16 to 31 have the keys of a stage each. Registers are short: a key is one word.
  __device__ static uint32_t word_of(Key key) { return key.slot | key.scope << 31; }
  __device__ __forceinline__ Rows look_up(uint32_t key, bool counts) const {
    constexpr KvLayout kFirst = First::kL, kSecond = Second::kL;
    const bool extra = key >> 31;
    const KvScope(&scopes)[2] = p_.scopes;
    const auto page_size = static_cast<unsigned>(extra ? +scopes[1].page_size : +scopes[0].page_size);
    const unsigned slot = key & 0x7fffffffu;
    const unsigned page = extra ? params_.page_size[1].word(slot) : params_.page_size[0].word(slot);
    const unsigned in_page = slot - page * page_size;
    const uint8_t* const base =
        (extra ? +scopes[1].kv_cache : +scopes[0].kv_cache) +
        page * (extra ? +scopes[1].kv_cache_stride_page : +scopes[0].kv_cache_stride_page);
    const int64_t row = extra ? kSecond.token_offset(in_page) : kFirst.token_offset(in_page);
    const int64_t scales =
        extra ? kSecond.scale_offset(in_page, page_size) : kFirst.scale_offset(in_page, page_size);
    // One slot in all places, or 2, 4 or 8 in turn, are seen by a look at one other lane.
    const uint32_t other = __shfl_xor_sync(kFullWarp, key, 8);
    return {base + row, static_cast<uint32_t>(scales - row), __ballot_sync(kFullWarp, extra),
            __ballot_sync(kFullWarp, counts), __any_sync(kFullWarp, counts && key == other) != 0};
  }

  // Stages that are there, or as long as there is nothing else to do: until the i-th of the ring's sequence
  // is free; to the end, if there is none.
  __device__ __forceinline__ void expand_until_free(int i, bool there_is) {
    if constexpr (kExpands)
      while (num_pending_ > 0 && (!there_is || is_raw_full() || !is_free(i))) expand_next();
  }
  // Into that stage what the lanes from `from` on have looked up.
  __device__ __forceinline__ void fetch(int i, const Rows& rows, int from) {
    const int stage = i % C::kStages, parity = i / C::kStages & 1;
    mbarrier_wait(ring_.empty(stage), parity ^ 1);
    const uint32_t extras = rows.extras >> from & kStagePlaces;
    if (lane_ == 0) store_shared_4(stage_extras_at(ring_, stage), extras);
    const int place = lane_ - from;
    if (lane_ / kStageRows * kStageRows == from) {
      store_shared_1(ring_.smem + MLA_SMEM(C, valid) + stage * kStageRows + place,
                     rows.counted >> lane_ & 1 ? kValidKey : 0);
      copy_scales(ring_.stage(stage) + R::kTableOffset + place * R::kRawScaleBytes, rows.row + rows.scales,
                  extras >> place & 1);
    }
    if (rows.repeat) [[unlikely]]
      copy_rows<true>(stage, rows.row, extras, from);
    else copy_rows<false>(stage, rows.row, extras, from);
    mbarrier_arrive_cp_async(ring_.raw(stage));
    mbarrier_arrive_warp(ring_.raw(stage), lane_);
    if constexpr (kExpands) {
      pending_ |= static_cast<uint32_t>(stage | parity << 4) << 8 * num_pending_;
      ++num_pending_;
    }
  }
  // Of one key alone a lane.
  __device__ void fetch(int i, Key key, int num_keys) {
    const Rows rows = look_up(word_of(key), lane_ % kStageRows < num_keys);
    expand_until_free(i, true);
    fetch(i, rows, 0);
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

  __device__ bool is_free(int i) const {
    return is_over(ring_.empty(i % C::kStages), (i / C::kStages & 1) ^ 1);
  }
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
  // Four lanes copy a row, 64 bytes at a time: the copy engine takes 60 clocks a row. Rows that several keys
  // name come through the L1: thousands of copies of one would queue at its few lines of the L2.
  template <bool kThroughL1>
  __device__ __forceinline__ void copy_rows(int stage, const uint8_t* row, uint32_t extras, int from) const {
    constexpr int kLanes = 4, kUnit = kLanes * 16, kRowsAtOnce = kWarpSize / kLanes;
    static_assert(First::kBytes % kUnit == 0 && Second::kBytes % kUnit == 0);
#pragma unroll
    for (int first = 0; first < kStageRows; first += kRowsAtOnce) {
      const int place = first + lane_ / kLanes, in_unit = lane_ % kLanes * 16;
      const bool extra = extras >> place & 1;
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

// The producers of a CTA that works on one row: a lane looks up a key of two stages.
template <class C>
class MixedProducer : MixedGather<C> {
 public:
  using Item = typename C::Item;

  __device__ MixedProducer(const KernelParams& params, const Item& w, const KeySurvey& survey, uint8_t* smem,
                           int warp, int lane)
      : MixedGather<C>(params, smem, lane),
        w_(w),
        valid_keys_(survey, {shared_address(smem) + MLA_SMEM(C, maps)}),
        warp_(warp) {}

  // A usual row has a loop of its own, as SplitProducer's, where there is no code of expansion in it.
  __device__ void run() {
    const typename Item::Source source = w_.source(this->params_);
    if constexpr (C::kExpanders > 0)
      if (!valid_keys_.has_gaps() && !source.has_pages()) [[likely]]
        return run([&](int rank) { return source.listed(rank); });
    run([&](int rank) { return this->find_of_query(valid_keys_, source, rank); });
  }

 private:
  // All SMs begin at once, and the memory serves requests in their order: were the whole ring asked for,
  // first rows would come when all of it does. So producers whose first stages are several blocks take turns
  // with them, and none asks for its second stage before the first is there.
  static constexpr bool kTakesTurns = C::kBlockStages < C::kProducers;
  static constexpr int kBarrierTurn = 8, kTurnThreads = 2 * kWarpSize;  // + producer: its turn has come
  static_assert(kBarrierTurn + C::kProducers <= 16 && C::kProducers <= C::kStages);
  static_assert(C::kProducers % C::kBlockStages == 0, "its next stage is in another block, before this one");

  template <class FindKey>
  __device__ __forceinline__ void run(FindKey&& find) {
    const int num_stages = w_.num_blocks * C::kBlockStages, last = valid_keys_.num_keys() - 1;
    const auto rank_of_lane = [&](int i) {
      const int stage = this->lane_ < kStageRows ? i + C::kProducers : i;  // the first lanes: lower ranks
      return w_.template first_rank<C>(0) + max(rank_in_query<C>(stage * kStageRows, w_.num_blocks), 0) +
             this->lane_ % kStageRows;  // of a stage past the last one: any
    };
    // Its stages in pairs, whose entries, which the survey has brought close, are loaded two stages ahead.
    uint32_t key = 0;
    typename MixedGather<C>::Rows rows{};
#pragma unroll 1
    for (int i = warp_ - C::kProducers, half = -1;; i += C::kProducers, half = half == 0) {
      this->expand_until_free(i, i < num_stages);
      if (i >= num_stages) break;
      if (half == 0) rows = this->look_up(key, rank_of_lane(i) <= last);
      if (half >= 0) {
        const bool is_first = i < C::kProducers;
        if (kTakesTurns && is_first && warp_ > 0) named_barrier(kBarrierTurn + warp_, kTurnThreads);
        if (!is_first && i < 2 * C::kProducers) mbarrier_wait(this->ring_.raw(warp_), 0);
        this->fetch(i, rows, half == 0 ? kStageRows : 0);
        if (kTakesTurns && is_first && i + 1 < min(C::kProducers, num_stages))
          named_barrier_arrive(kBarrierTurn + warp_ + 1, kTurnThreads);
      }
      const int ahead = i + (half < 0 ? 1 : 2) * C::kProducers;
      if (half <= 0 && ahead < num_stages) key = this->word_of(find(min(rank_of_lane(ahead), last)));
    }
  }

  const Item& w_;
  const ValidKeys<MapInShared> valid_keys_;
  const int warp_;
};

// All warps of a CTA with one query that do not compute.
template <class C>
__device__ __forceinline__ void run_producers(const KernelParams& params, const typename C::Item& w,
                                              const KeySurvey& survey, uint8_t* smem, int warp, int lane) {
  if constexpr (C::kExpanders > 0) {
    if (warp >= C::kProducers) {
      give_up_registers<C::kExpanderRegisters>();
      return StageExpander<C>(smem, lane).run(warp - C::kProducers, w.num_blocks * C::kBlockStages);
    }
  }
  give_up_registers<C::kProducerRegisters>();
  using Producer = std::conditional_t<C::R::kMixed, MixedProducer<C>, SplitProducer<C>>;
  Producer(params, w, survey, smem, warp, lane).run();
}

}  // namespace mla_fp8::gpu
