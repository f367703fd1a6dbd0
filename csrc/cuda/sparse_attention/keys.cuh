#pragma once
// The keys of a query: where they lie, and which are valid. Engines pad indices with -1 and leave holes in
// them, and a query should cost what its valid keys cost. So kernels count ranks: rank r is the r-th valid
// key.
//
//   Keys, KeySource  where a query's entries lie; the key at a position
//   survey_keys      several warps together write a map of a query's valid keys
//   KeySurvey        one warp reads there how many they are, and whether invalid keys lie between them
//   ValidKeys        one warp finds the keys of given ranks: by the map, or without gaps by position
//
// A kernel sees only the valid keys, in their order: a query with holes has the bits of one without.
#include <type_traits>

#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

// The entries of one query.
struct Keys {
  const int32_t *first, *second;  // slots of each scope, by position; or the request's pages
  unsigned length0, length;       // positions in the first scope, in both
  unsigned window_first;          // position in its request of a sliding window's first key

  Keys() = default;
  // Listed keys are the usual case. They come first, without a jump: a jump over cold code costs time.
  __device__ Keys(const SparseAttentionParams& p, int64_t token) : second(nullptr) {
    if (!p.is_window) [[likely]] {
      add(Selection::of_list(p.scopes[0], token));
      if (p.num_scopes > 1) add(Selection::of_list(p.scopes[1], token), false);
      return;
    }
    const WindowQuery query = find_query(p.window, token);
    add(Selection(p, 0, token, query));
    if (p.num_scopes > 1) add(Selection(p, 1, token, query), p.has_entry_pages);
  }

 private:
  __device__ __forceinline__ void add(const Selection& selection) {
    first = selection.entries();
    length0 = length = static_cast<unsigned>(selection.length());
    window_first = static_cast<unsigned>(selection.first_position());
  }
  __device__ __forceinline__ void add(const Selection& extra, bool has_pages) {
    second = has_pages ? extra.entries() : extra.entries() - length0;
    length += static_cast<unsigned>(extra.length());
  }
};

// Finds the key at a position. For many loads at once: `entry` of all, then `is_slot`. `at` and `is_valid`
// know pages, too. Forced inlining, and + on fields, keep the object in registers: clang would select between
// addresses of fields.
class KeySource {
 public:
  struct Key {
    int slot, scope;
    __device__ static constexpr bool marks() { return true; }  // the key's mark in the ring: it counts
  };
  __device__ __forceinline__ KeySource(const SparseAttentionParams& p, const Keys& keys)
      : p_(p), keys_(keys), num_slots_{limit(p.scopes[0]), limit(p.scopes[1])} {}
  __device__ __forceinline__ unsigned length() const { return keys_.length; }
  __device__ __forceinline__ bool is_window() const { return p_.is_window; }
  // The entry at a position of a query without a window; -1 past the end.
  __device__ __forceinline__ int entry(unsigned position) const {
    const int32_t* const entries = position < keys_.length0 ? +keys_.first : +keys_.second;
    return position < keys_.length ? __ldg(entries + position) : -1;
  }
  __device__ __forceinline__ bool is_slot(int entry, unsigned position) const {
    return static_cast<unsigned>(entry) < (position < keys_.length0 ? +num_slots_[0] : +num_slots_[1]);
  }
  __device__ __forceinline__ bool has_pages() const { return p_.is_window || p_.has_entry_pages; }
  // The key at a position, where all keys are listed.
  __device__ __forceinline__ Key listed(unsigned position) const {
    return {entry(position), position >= keys_.length0};
  }
  // The key at a position of any query; invalid past the end.
  __device__ __forceinline__ Key at(unsigned position) const {
    const bool extra = position >= keys_.length0;
    const bool has_pages = extra ? +p_.has_entry_pages : +p_.is_window;
    return {has_pages ? page_slot(position, extra) : entry(position), extra};
  }
  __device__ __forceinline__ bool is_valid(Key key) const {
    return static_cast<unsigned>(key.slot) < (key.scope == 0 ? +num_slots_[0] : +num_slots_[1]);
  }

 private:
  // No GPU holds 2^31 rows, so one unsigned comparison checks sign and range.
  __device__ __forceinline__ static unsigned limit(const KvScope& scope) {
    return static_cast<unsigned>(min(scope.num_slots, int64_t{1} << 31));
  }
  // One copy for both scopes: finding a key by pages is cold code.
  __device__ __forceinline__ int page_slot(unsigned position, bool extra) const {
    if (position >= keys_.length) return -1;
    const unsigned in_request = position + (extra ? 0 - keys_.length0 : keys_.window_first);
    const auto page_size = static_cast<unsigned>(extra ? +p_.scopes[1].page_size : +p_.scopes[0].page_size);
    const unsigned place = in_request / page_size;
    if (place >= (extra ? +p_.entry_pages.max_pages : +p_.window.max_pages)) return -1;
    const int64_t page = __ldg((extra ? +keys_.second : +keys_.first) + place);
    const int64_t slot = page * page_size + in_request % page_size;
    return page >= 0 && slot < (extra ? +num_slots_[1] : +num_slots_[0]) ? static_cast<int>(slot) : -1;
  }

  const SparseAttentionParams& p_;
  const Keys& keys_;
  const unsigned num_slots_[2];
};

// A map has a word for each of a query's 64 parts, which have the same multiple of 32 positions. Queries of
// up to 2048 positions have parts of 32, whose words have a bit for each valid key. Words of larger parts
// have their number, and a flag if an invalid key comes before a valid one. The query's length follows.
inline constexpr int kMapWords = 2 * kWarpSize, kMapLength = kMapWords * 4, kMapBytes = kMapLength + 8;
inline constexpr uint32_t kHasGaps = 1u << 31;
__device__ inline unsigned part_size(unsigned length) {
  return max(ceil_div(length, unsigned{kMapWords * kWarpSize}), 1u) * kWarpSize;
}

// Writes the map. Each of kWarps warps surveys every kWarps-th part, kAtOnce of them at once. These loads
// take all the time; `meanwhile` may issue others behind them. True: a lane saw a slot twice in a row.
template <int kWarps, int kAtOnce, class Source, class Meanwhile>
__device__ __forceinline__ bool survey_keys(const Source& source, int warp, int lane, uint32_t map,
                                            Meanwhile&& meanwhile) {
  const unsigned length = source.length(), size = part_size(length);
  unsigned part = warp;
  bool repeated = false;
  const auto position = [&](int i) { return (part + i * kWarps) * kWarpSize + lane; };
  int entry[kAtOnce];
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) entry[i] = source.entry(position(i));
  };
  const bool is_usual = size == kWarpSize && !source.is_window();
  if (is_usual) [[likely]]
    load();
  meanwhile();
  if (is_usual) [[likely]] {
#pragma unroll 1
    while (true) {
      uint32_t word = 0;  // lane i has that of the i-th part
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool is_slot = source.is_slot(entry[i], position(i));
        const uint32_t valid = __ballot_sync(kFullWarp, is_slot);
        if (lane == i) word = valid;
        if (i > 0) repeated |= is_slot && entry[i] == entry[i - 1];
      }
      const unsigned mine = part + lane * kWarps;
      if (lane < kAtOnce && mine < kMapWords) store_shared_4(map + mine * 4, word);
      if constexpr (kAtOnce * kWarps >= kMapWords) break;
      part += kAtOnce * kWarps;
      if (part * kWarpSize >= length) break;
      load();
    }
  } else {
    uint32_t word = 0;
    unsigned in_part = 0;
    const auto step = [&](unsigned& part, unsigned& in_part) {
      in_part += kWarpSize;
      const bool ends = in_part == size;
      if (ends) in_part = 0, part += kWarps;
      return ends;
    };
#pragma unroll 1
    while (part * size < length) {
      constexpr int kFew = 4;  // finding a key by pages takes much code
      typename Source::Key key[kFew];
      unsigned ahead = part, in_ahead = in_part;
#pragma unroll
      for (int i = 0; i < kFew; ++i) {
        key[i] = source.at(ahead * size + in_ahead + lane);
        step(ahead, in_ahead);
      }
#pragma unroll
      for (int i = 0; i < kFew; ++i) {
        const uint32_t valid = __ballot_sync(kFullWarp, source.is_valid(key[i]));
        const bool follows = word == in_part && (valid & (valid + 1)) == 0;
        if (size == kWarpSize) word = valid;
        else if (valid != 0) word = (word + __popc(valid)) | (follows ? 0 : kHasGaps);
        const unsigned mine = part;
        if (!step(part, in_part)) continue;
        if (lane == 0 && mine < kMapWords) store_shared_4(map + mine * 4, word);
        word = 0;
      }
    }
  }
  if (warp == 0 && lane == 0) store_shared_4(map + kMapLength, length);
  return __any_sync(kFullWarp, repeated);
}

// Returns the place of the n-th set bit. The mask has more than n.
__device__ inline int nth_set_bit(uint32_t mask, int n) {
  int at = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2)
    if (const int below = __popc(mask & ((1u << width) - 1)); n >= below)
      n -= below, at += width, mask >>= width;
  return at;
}

struct MapInShared {
  uint32_t map;
  __device__ uint32_t operator[](unsigned part) const { return load_shared_4(map + part * 4); }
};
// A warp's copy of a map: lane i has the words of parts 2 i and 2 i + 1.
struct MapInLanes {
  uint32_t words[2];
  __device__ uint32_t operator[](unsigned part) const {
    return __shfl_sync(kFullWarp, part % 2 == 0 ? words[0] : words[1], part / 2);
  }
  // Returns the position of this lane's rank in parts of 32, or -1 for a negative rank. `before` valid keys
  // lie before this lane's parts. The time does not depend on the number of holes.
  __device__ __forceinline__ int find(int before, int rank) const {
    int owner = 0, first = 0;  // the last lane whose parts begin at or before this rank, and where they begin
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2)
      if (const int begin = __shfl_sync(kFullWarp, before, owner + step); begin <= rank)
        owner += step, first = begin;
    const uint32_t low = __shfl_sync(kFullWarp, words[0], owner);
    const uint32_t high = __shfl_sync(kFullWarp, words[1], owner);
    const int in_low = __popc(low);
    const bool is_high = rank - first >= in_low;
    const int n = rank - first - (is_high ? in_low : 0);
    return rank < 0 ? -1 : (2 * owner + is_high) * kWarpSize + nth_set_bit(is_high ? high : low, n);
  }
};

// The numbers that a warp reads from a map.
struct KeySurvey {
  int num_keys;
  bool has_gaps;
  int in_lane;  // valid keys in this lane's parts
  MapInLanes map;

  KeySurvey() = default;
  // The survey of a list without invalid keys.
  __device__ static KeySurvey of_valid(int num_keys) {
    KeySurvey survey{};
    survey.num_keys = num_keys;
    return survey;
  }
  __device__ KeySurvey(uint32_t shared, unsigned length, int lane) {
    const unsigned size = part_size(length), first = 2 * lane * size;
    const uint2 both = load_shared_8(shared + lane * 8);
    map.words[0] = first < length ? both.x : 0;  // the words are written up to there
    map.words[1] = first + size < length ? both.y : 0;
    unsigned end;  // this lane's valid keys end here; further on where a part has gaps
    if (size == kWarpSize) {
      in_lane = __popc(map.words[0]) + __popc(map.words[1]);
      const unsigned in_second = kWarpSize - __clz(map.words[1]), in_first = kWarpSize - __clz(map.words[0]);
      end = in_second > 0 ? first + kWarpSize + in_second : in_first > 0 ? first + in_first : 0;
    } else {
      in_lane = (map.words[0] & ~kHasGaps) + (map.words[1] & ~kHasGaps);
      end = part_end(map.words[1], first + size, size);
      if (end == 0) end = part_end(map.words[0], first, size);
    }
    num_keys = __reduce_add_sync(kFullWarp, in_lane);
    has_gaps = static_cast<unsigned>(num_keys) != __reduce_max_sync(kFullWarp, end);
  }

 private:
  __device__ static unsigned part_end(uint32_t word, unsigned first, unsigned size) {
    return word == 0 ? 0 : first + (word & kHasGaps ? size : word);
  }
};

template <class Map>  // MapInShared if the map stays in shared memory, else MapInLanes
class ValidKeys {
 public:
  ValidKeys() = default;
  __device__ ValidKeys(const KeySurvey& survey, const Map& map)
      : num_keys_(survey.num_keys), has_gaps_(survey.has_gaps), before_(0), map_(map) {
    if (has_gaps_) before_ = warp_inclusive_sum(survey.in_lane) - survey.in_lane;
  }
  __device__ int num_keys() const { return num_keys_; }
  __device__ bool has_gaps() const { return has_gaps_; }

  // Returns the key of this lane's rank, which is below num_keys(), or an invalid key for a negative rank.
  // Among the lanes that want a key, the first must want the lowest rank.
  template <class Source>
  __device__ __forceinline__ typename Source::Key find(const Source& source, int rank) const {
    if (has_gaps_) [[unlikely]]
      rank = search(source, rank);
    return source.at(rank);  // -1 as a position is past every end
  }

  // Returns the position of a rank in a query with gaps.
  template <class Source>
  __device__ __forceinline__ int search(const Source& source, int rank) const {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned size = part_size(source.length());
    if constexpr (std::is_same_v<Map, MapInLanes>)
      if (size == kWarpSize) [[likely]]
        return map_.find(before_, rank);
    int position = -1;
    bool searches = rank >= 0;
    const uint32_t who = __ballot_sync(kFullWarp, searches);
    const int lowest = __shfl_sync(kFullWarp, rank, __ffs(who) - 1);
    // The last pair of parts that begins at or before the lowest rank holds it.
    const int pair = __popc(__ballot_sync(kFullWarp, before_ <= lowest)) - 1;
    int before = __shfl_sync(kFullWarp, before_, pair);
#pragma unroll 1
    for (unsigned at = 2 * pair * size; __any_sync(kFullWarp, searches); at += kWarpSize) {
      const uint32_t valid = size == kWarpSize
                                 ? map_[at / kWarpSize]
                                 : __ballot_sync(kFullWarp, source.is_valid(source.at(at + lane)));
      const int n = rank - before, count = __popc(valid);
      if (searches && n < count) position = at + nth_set_bit(valid, n), searches = false;
      before += count;
    }
    return position;
  }

 private:
  int num_keys_;
  bool has_gaps_;
  int before_;  // valid keys before the two parts of this lane
  Map map_;
};

}  // namespace mla_fp8::gpu
