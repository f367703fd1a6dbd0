#pragma once
// The gather: each producer warp fetches every kProducers-th stage of 16 valid keys, one bulk copy per key.
#include <type_traits>

#include "cuda/sparse_attention/sm90/item.cuh"

namespace mla_fp8::gpu {

template <class C>
struct Ring {
  uint32_t smem;
  __device__ uint32_t stage(int s) const { return smem + MLA_SMEM(C, ring) + s * C::kStageBytes; }
  __device__ uint32_t full(int s) const { return smem + MLA_SMEM(C, stage_barriers) + s * 16; }
  __device__ uint32_t empty(int s) const { return full(s) + 8; }
  __device__ uint32_t raw(int s) const {  // two layouts: rows have arrived as they lie in the caches
    return smem + MLA_SMEM(C, raw_barriers) + s * 8;
  }
  __device__ uint32_t survey() const { return smem + MLA_SMEM(C, survey_barrier); }
  // One thread does it: lanes with an address each take turns, and racecheck sees all of them write.
  __device__ void init() const {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      constexpr int kFetched = kWarpArrivals + (C::R::kScalesApart ? kStageRows : 0);
      if constexpr (C::R::kMixed) mbarrier_init(raw(s), kWarpArrivals + kWarpSize);  // each lane's copies
      mbarrier_init(full(s), C::R::kMixed ? kWarpArrivals : kFetched);
      mbarrier_init(empty(s), C::kEmptyWarps * kWarpArrivals);
    }
    if constexpr (kProducersAreEarly<C>) mbarrier_init(survey(), 1);
  }
};

// Fetches one stage.
template <class C>
class Gather {
 public:
  using R = typename C::R;

  __device__ Gather(const KernelParams& params, uint8_t* smem, int lane)
      : params_(params),
        p_(params.p),
        lane_(lane),
        ring_{shared_address(smem)},
        valid_(smem + MLA_SMEM(C, valid)) {}

 protected:
  // This lane's rank among the 16 from `rank` on. Past the last key it is the last one again, whose bytes
  // fill the place: zero weight times NaN reaches no query that has not got that NaN anyway.
  __device__ __forceinline__ int rank_of_lane(const ValidKeys<MapInShared>& valid_keys, int rank) const {
    return min(rank + lane_ % kStageRows, valid_keys.num_keys() - 1);
  }
  template <class Source>
  __device__ __forceinline__ typename Source::Key find(const ValidKeys<MapInShared>& valid_keys,
                                                       const Source& source, int rank) const {
    return valid_keys.find(source, rank_of_lane(valid_keys, rank));
  }
  // Finds the key of a rank in a CTA with one query, whose positions may be listed (read_survey).
  template <class Source>
  __device__ __forceinline__ typename Source::Key find_of_query(const ValidKeys<MapInShared>& valid_keys,
                                                                const Source& source, int rank) const {
    if (valid_keys.has_gaps() && has_positions<C>(source.length()))
      return source.at(load_shared_2(positions_of<C>(ring_.smem) + rank * 2));
    return valid_keys.find(source, rank);
  }

  // Addresses of a key's row and scales, and a word that is the row's own.
  struct Place {
    const uint8_t *row, *scales;
    unsigned which;
  };
  template <class Key>
  __device__ __forceinline__ Place place_of(Key key) const {
    constexpr KvLayout kL = R::kL;
    const KvScope& s = p_.scopes[key.scope];
    const unsigned page_size = s.page_size;
    unsigned page, in_page, in_cache;
    if constexpr (requires { key.page; }) {
      page = key.page, in_page = key.in_page, in_cache = page * page_size + in_page;
    } else {
      in_cache = key.slot;
      if constexpr (C::kNeighbours) page = static_cast<unsigned>(params_.page_size[key.scope](in_cache));
      else if constexpr (C::kFetchesEarly) page = params_.page_size[key.scope].word(in_cache);
      else page = in_cache / page_size;
      in_page = in_cache - page * page_size;
    }
    const uint8_t* const base = s.kv_cache + page * s.kv_cache_stride_page;
    return {base + kL.token_offset(in_page), base + kL.scale_offset(in_page, page_size),
            in_cache ^ key.scope << 31};
  }
  // True if keys of a stage that count name the same row. A look at the lane 8 further finds one slot in all
  // places, or 2, 4 or 8 slots in turn.
  __device__ __forceinline__ bool has_repeats(const Place& place, bool counts) const {
    const unsigned other = __shfl_xor_sync(kFullWarp, place.which, 8);
    return __any_sync(kFullWarp, counts && place.which == other);
  }
  // Fills the i-th stage of the ring's sequence. The first num_keys of its keys count.
  template <class Key>
  __device__ void fetch(int i, Key key, int num_keys) const {
    const Place place = place_of(key);
    const int num_here = min(num_keys, kStageRows);
    const bool counts = lane_ < num_here;
    unsigned same = 0, repeated = 0;
    if (has_repeats(place, counts)) [[unlikely]] {
      if (counts) same = __match_any_sync((1u << num_here) - 1, place.which);
      repeated = __ballot_sync(kFullWarp, __popc(same) > 1);
    }

    int stage = i % C::kStages;
    if constexpr (!C::kFetchesEarly) stage = __shfl_sync(kFullWarp, stage, 0);  // known to be uniform
    wait_until_free<C::kStages>(ring_.empty(stage), i);
    if (lane_ < kStageRows) mark(stage, counts ? key.marks() : 0);
    if (repeated) [[unlikely]]
      copy_repeated(stage, place.row, repeated, same);
    mbarrier_arrive_expect_warp(ring_.full(stage), (kStageRows - __popc(repeated)) * R::kBytes, lane_);
    __syncwarp();
    if (lane_ < kStageRows) {
      copy_scales(stage, place.scales);
      if constexpr (R::kScalesApart) mbarrier_arrive_cp_async(ring_.full(stage));
      if (!(repeated >> lane_ & 1)) copy_row(stage, place.row);
    }
    __syncwarp();
  }
  // The first 16 lanes call these, each for its place in a stage.
  __device__ __forceinline__ void mark(int stage, uint8_t marks) const {
    valid_[stage * kStageRows + lane_] = marks;
  }
  __device__ __forceinline__ void copy_scales(int stage, const uint8_t* scales) const {
    if constexpr (R::kScalesApart) {
      constexpr int kScaleBytes = R::kL.scale_bytes();
      static_assert(kScaleBytes == 8 || kScaleBytes == 16);
      const uint32_t dst = ring_.stage(stage) + lane_ * R::kPitch + R::kScaleOffset;
      if constexpr (kScaleBytes == 8) cp_async_8(dst, scales);
      else cp_async_16(dst, scales, true);
    }
  }
  __device__ __forceinline__ void copy_row(int stage, const uint8_t* row) const {
    const uint32_t dst = ring_.stage(stage) + lane_ * R::kPitch;
    // Rows are to leave L2 before the results that segments keep in local memory.
    if constexpr (C::kSegments) bulk_copy_once(dst, row, R::kBytes, ring_.full(stage));
    else bulk_copy(dst, row, R::kBytes, ring_.full(stage));
  }

  const KernelParams& params_;
  const SparseAttentionParams& p_;
  const int lane_;
  const Ring<C> ring_;
  uint8_t* const valid_;

 private:
  // Reads a cache row that several keys name once, through the L1: thousands of copies of one row would queue
  // at its few lines of the L2. `repeated`: the lanes of such rows; `same`: those with this lane's row.
  __device__ __forceinline__ void copy_repeated(int stage, const uint8_t* row, unsigned repeated,
                                                unsigned same) const {
    while (repeated) {
      const int first = __ffs(repeated) - 1;
      const unsigned places = __shfl_sync(kFullWarp, same, first);
      const auto* from = reinterpret_cast<const uint8_t*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), first));
#pragma unroll 1
      for (int at = lane_ * 16; at < R::kBytes; at += kWarpSize * 16) {
        const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from + at));
#pragma unroll
        for (int place = 0; place < kStageRows; ++place)
          if (places >> place & 1) store_shared_16(ring_.stage(stage) + place * R::kPitch + at, bytes);
      }
      repeated &= ~places;
    }
  }
};

// A producer's first stage, fetched before the survey has ended: as if all keys were valid, which is usual.
// The producer arrives at the stage's `full` once it knows, and ends the phase.
template <class C>
class EarlyStage : Gather<C> {
 public:
  using Item = typename C::Item;
  using R = typename C::R;
  using Source = typename Item::Source;

  __device__ EarlyStage(const KernelParams& params, uint8_t* smem, int producer, int lane)
      : Gather<C>(params, smem, lane), stage_(producer) {}

  // Fetches the stage, and returns whether it has. It does not if one of 32 entries all over the query's,
  // with the last one, is invalid. A short context fails so, and most queries with holes.
  __device__ __forceinline__ bool fetch(Item w) const {
    const Source source = w.source(this->params_);
    const unsigned length = source.length();
    named_barrier(kBarrierBegin, kBeginThreads<C>);
    const unsigned looked_at = length - 1 - this->lane_ * (length / kWarpSize);
    if (source.has_pages() || !are_valid(source, source.listed(looked_at))) return false;
    w.template take_share<C>(length, this->params_.splits);
    if (stage_ >= w.num_blocks * C::kBlockStages) return false;
    const auto key = source.listed(w.template first_rank<C>(stage_) + this->lane_ % kStageRows);
    const typename Gather<C>::Place place = this->place_of(key);
    if (this->has_repeats(place, this->lane_ < kStageRows) || !are_valid(source, key)) [[unlikely]]
      return false;
    if (this->lane_ < kStageRows) {
      this->mark(stage_, key.marks());
      this->copy_scales(stage_, place.scales);
      this->copy_row(stage_, place.row);
    }
    return true;
  }
  // The copies are right: ends the phase of `full` when they have arrived.
  __device__ __forceinline__ void announce() const {
    if constexpr (R::kScalesApart)
      if (this->lane_ < kStageRows) mbarrier_arrive_cp_async(full());
    mbarrier_arrive_expect_warp(full(), kStageRows * R::kBytes, this->lane_);
  }
  // The copies are wrong: waits for them, so that other rows may take their places. Two phases of `full`
  // pass. Consumers wait for the parity of the first, and may not look meanwhile.
  __device__ __forceinline__ void discard() const {
    announce();
    mbarrier_wait(full(), 0);
    if constexpr (R::kScalesApart)
      if (this->lane_ < kStageRows) mbarrier_arrive(full());
    mbarrier_arrive_warp(full(), this->lane_);
  }

 private:
  __device__ uint32_t full() const { return this->ring_.full(stage_); }
  __device__ static bool are_valid(const Source& source, typename Source::Key key) {
    return __all_sync(kFullWarp, source.is_valid(key));
  }

  const int stage_;
};

// A producer of a CTA with one query over one layout (two layouts: sm90/mixed_gather.cuh).
template <class C>
class SplitProducer : Gather<C> {
 public:
  using Item = typename C::Item;
  using Key = typename Item::Source::Key;

  __device__ SplitProducer(const KernelParams& params, const Item& w, const KeySurvey& survey, uint8_t* smem,
                           int warp, int lane)
      : Gather<C>(params, smem, lane),
        w_(w),
        valid_keys_(survey, {shared_address(smem) + MLA_SMEM(C, maps)}),
        warp_(warp) {}

  // Fetches its stages; `has_first`: the first came early, so the query has no gaps. A usual query has a loop
  // of its own, as jumps over cold code cost time.
  __device__ void run(bool has_first = false) {
    const typename Item::Source source = w_.source(this->params_);
    if constexpr (C::kFetchesEarly) {
      if (!source.has_pages() && (!valid_keys_.has_gaps() || has_positions<C>(source.length()))) [[likely]]
        return run_listed(source, has_first);
      return run_by([&](int rank) { return valid_keys_.find(source, rank); });
    }
    if constexpr (requires { source.listed(0u); })
      if (!valid_keys_.has_gaps() && !source.has_pages()) [[likely]]
        return run_by([&](int rank) { return source.listed(rank); });
    run_by([&](int rank) { return this->find_of_query(valid_keys_, source, rank); });
  }

 private:
  // Entries are loaded a stage ahead; the survey has brought them close.
  template <class FindKey>
  __device__ __forceinline__ void run_by(FindKey&& find) {
    const int num_stages = w_.num_blocks * C::kBlockStages;
    Key now{-1, 0};
#pragma unroll 1
    for (int i = warp_ - C::kProducers; i < num_stages; i += C::kProducers) {
      const int ahead = i + C::kProducers;
      Key next{-1, 0};
      if (ahead < num_stages && has_stage(ahead))
        next = find(this->rank_of_lane(valid_keys_, first_rank(ahead)));
      if (i >= 0 && has_stage(i)) this->fetch(i, now, valid_keys_.num_keys() - first_rank(i));
      now = next;
    }
  }
  // The loop for usual queries and for listed positions, without a jump before the first copies. (Kernels of
  // 32 heads and more, which wait for issue slots, took 1 to 4 % longer with it.)
  __device__ __forceinline__ void run_listed(const typename Item::Source& source, bool has_first) {
    // The shuffle makes it uniform: else an arrival of copies is a loop over lanes.
    const int first = __shfl_sync(kFullWarp, warp_ + (has_first ? C::kProducers : 0), 0);
    const int num_stages = w_.num_blocks * C::kBlockStages;
    const bool has_list = valid_keys_.has_gaps();
    const auto find = [&](int i) {
      int rank = this->rank_of_lane(valid_keys_, first_rank(i));
      if (has_list) rank = load_shared_2(positions_of<C>(this->ring_.smem) + rank * 2);
      return i < num_stages ? source.listed(rank) : Key{-1, 0};
    };
    Key now = find(first);
#pragma unroll 1
    for (int i = first; i < num_stages; i += C::kProducers) {
      const Key next = find(i + C::kProducers);
      this->fetch(i, now, valid_keys_.num_keys() - first_rank(i));
      now = next;
    }
  }
  __device__ bool has_stage(int i) const { return w_.template has_stage<C>(i); }
  __device__ int first_rank(int i) const { return w_.template first_rank<C>(i); }

  const Item& w_;
  const ValidKeys<MapInShared> valid_keys_;
  const int warp_;
};

// A producer after its part of the survey, which does not wait for the producer's copies.
template <class C>
__device__ __forceinline__ void run_early(const KernelParams& params, typename C::Item& w, uint8_t* smem,
                                          int producer, int lane) {
  const EarlyStage<C> first(params, smem, producer, lane);
  named_barrier_arrive(kBarrierSurvey, C::kThreads);
  int is_there = __shfl_sync(kFullWarp, first.fetch(w), 0);  // known to be uniform, too
  named_barrier(kBarrierSurveyed, C::kThreads);
  const int warp = C::kThreads / kWarpSize - C::kProducers + producer;
  const KeySurvey survey = read_survey<C>(params, w, shared_address(smem), warp, lane, [&] {
    if (is_there) first.discard();
    is_there = 0;
  });
  if (is_there) first.announce();
  SplitProducer<C>(params, w, survey, smem, producer, lane).run(is_there);
}

// The warps of a CTA with one item that do not compute. Over one layout all gather (two: mixed_gather.cuh).
template <class C>
struct Producers {
  // Called when warp 0 has made the barriers.
  __device__ static void let_begin(int warp) {
    if constexpr (C::kFetchesEarly)
      if (warp == 0) named_barrier_arrive(kBarrierBegin, kBeginThreads<C>);
  }
  // Runs a warp that takes no part in the survey, and returns whether this is one.
  __device__ static bool run_early(const KernelParams&, typename C::Item&, uint8_t*, int, int) {
    return false;
  }
  // Runs one behind the survey.
  __device__ __forceinline__ static void run(const KernelParams& params, const typename C::Item& w,
                                             const KeySurvey& survey, uint8_t* smem, int warp, int lane) {
    give_up_registers<C::kProducerRegisters>();
    SplitProducer<C>(params, w, survey, smem, warp, lane).run();
  }
};

// The rank of a key, by its place in the ring's sequence. Over two layouts the last blocks come first: rows
// of the second cache are short, so work begins sooner.
template <class C>
__device__ __forceinline__ int rank_in_query(int place, int num_blocks) {
  if constexpr (!C::R::kMixed) return place;
  return (num_blocks - 1 - place / C::kBlockKeys) * C::kBlockKeys + place % C::kBlockKeys;
}

}  // namespace mla_fp8::gpu
