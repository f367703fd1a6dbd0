#pragma once
// Which keys a query has. Engines pad rows with -1 and leave holes in them, and a row should cost what its
// valid keys cost. So kernels do not work on positions but on ranks: rank r is the r-th valid key.
//
//   Keys, KeySource  where a row's entries lie; the key at a position
//   survey_keys      some warps together: how many keys are valid, and where they end
//   count_keys       the same for each 32nd of the row: only where invalid keys lie between valid ones
//   ValidKeys        one warp: the keys of given ranks. Where the valid keys come first, which is usual, rank
//                    and position are the same. Elsewhere a ballot over 32 positions tells
//
// A kernel sees nothing but the valid keys, in their order: a row with holes has the bits of one without.
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/warp.cuh"
#include "ops/sparse_attention.h"

namespace mla_fp8::gpu {

// What one query attends to.
struct Keys {
  const int32_t *first, *second;  // of each scope, by position: slots, or the pages of a sliding window
  unsigned length0, length;       // positions of the first scope, of both
  unsigned window_first;          // position in its request of a sliding window's first key

  Keys() = default;
  __device__ Keys(const SparseAttentionParams& p, int64_t token) : second(nullptr) {
    const Selection selection(p, 0, token);
    first = selection.entries();
    length0 = length = static_cast<unsigned>(selection.length());
    window_first = static_cast<unsigned>(selection.first_position());
    if (p.num_scopes > 1) {
      const Selection extra(p, 1, token);
      second = extra.entries() - length0;
      length += static_cast<unsigned>(extra.length());
    }
  }
};

// For many loads at once: `entry` of all, then `is_slot`. `at` and `is_valid` know windows, too.
class KeySource {
 public:
  struct Key {
    int slot, scope;
  };
  __device__ KeySource(const SparseAttentionParams& p, const Keys& keys) : p_(p), keys_(keys) {}
  __device__ unsigned length() const { return keys_.length; }
  __device__ bool is_window() const { return p_.is_window; }
  // What is listed at a position of a row without a window; -1 past the end.
  __device__ int entry(unsigned position) const {
    const int32_t* const entries = position < keys_.length0 ? keys_.first : keys_.second;
    return position < keys_.length ? __ldg(entries + position) : -1;
  }
  __device__ bool is_slot(int entry, unsigned position) const {
    return static_cast<unsigned>(entry) < num_slots(position >= keys_.length0);
  }
  // The key of any row; not valid past the end.
  __device__ Key at(unsigned position) const {
    if (p_.is_window && position < keys_.length0) return {window_slot(position), 0};
    return {entry(position), position >= keys_.length0};
  }
  __device__ bool is_valid(Key key) const { return static_cast<unsigned>(key.slot) < num_slots(key.scope); }

 private:
  // No GPU holds 2^31 rows: one comparison tells sign and range.
  __device__ unsigned num_slots(bool second) const {
    return static_cast<unsigned>(
        min(second ? p_.scopes[1].num_slots : p_.scopes[0].num_slots, int64_t{1} << 31));
  }
  __device__ int window_slot(unsigned position) const {
    const unsigned page_size = p_.scopes[0].page_size, in_request = keys_.window_first + position;
    const unsigned entry = in_request / page_size;
    if (entry >= p_.window.max_pages) return -1;
    const int page = __ldg(keys_.first + entry);
    const int64_t slot = int64_t{page} * page_size + in_request % page_size;
    return page >= 0 && slot < p_.scopes[0].num_slots ? static_cast<int>(slot) : -1;
  }

  const SparseAttentionParams& p_;
  const Keys& keys_;
};

struct KeySurvey {
  int num_keys;
  int end;  // the position after the last valid key
  __device__ bool has_gaps() const { return num_keys != end; }
};

// Each of kWarps warps surveys its share, kAtOnce positions of a lane at once: these loads are all that takes
// time, and `meanwhile` may issue others behind them. `surveys`: shared memory, KeySurvey [kWarps].
inline constexpr int kSurveyBytes = 8;
template <int kWarps, int kAtOnce, class Source, class Meanwhile>
__device__ __forceinline__ void survey_keys(const Source& source, int warp, int lane, uint32_t surveys,
                                            Meanwhile&& meanwhile) {
  constexpr unsigned kStep = kWarps * kWarpSize;
  const unsigned mine = warp * kWarpSize + lane;
  unsigned num_keys = 0, end = 0;
  const auto add = [&](bool is_valid, unsigned position) {
    num_keys += is_valid;
    end = is_valid ? position + 1 : end;
  };
  unsigned at = 0;
  if (source.is_window()) [[unlikely]] {
    meanwhile();
#pragma unroll 1
    for (; at < source.length(); at += kStep) add(source.is_valid(source.at(at + mine)), at + mine);
  } else {
#pragma unroll 1
    do {
      int entry[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) entry[i] = source.entry(at + i * kStep + mine);
      if (at == 0) meanwhile();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        add(source.is_slot(entry[i], at + i * kStep + mine), at + i * kStep + mine);
      at += kAtOnce * kStep;
    } while (at < source.length());
  }
  num_keys = __reduce_add_sync(kFullWarp, num_keys);
  end = __reduce_max_sync(kFullWarp, end);
  if (lane == 0) store_shared_8(surveys + warp * kSurveyBytes, num_keys | uint64_t{end} << 32);
}
// What all of them found.
template <int kWarps>
__device__ __forceinline__ KeySurvey read_surveys(uint32_t surveys, int lane) {
  const uint2 x = lane < kWarps ? load_shared_8(surveys + lane * kSurveyBytes) : uint2{0, 0};
  return {static_cast<int>(__reduce_add_sync(kFullWarp, x.x)),
          static_cast<int>(__reduce_max_sync(kFullWarp, x.y))};
}

// A row with gaps is counted in 32 parts of so many positions.
__device__ inline unsigned part_size(unsigned length) {
  return ceil_div(length, unsigned{kWarpSize * kWarpSize}) * kWarpSize;
}
// `counts`: shared memory, int [32].
inline constexpr int kCountsBytes = kWarpSize * 4;
template <int kWarps, class Source>
__device__ __forceinline__ void count_keys(const Source& source, int warp, int lane, uint32_t counts) {
  const unsigned size = part_size(source.length());
#pragma unroll 1
  for (int part = warp; part < kWarpSize; part += kWarps) {
    int count = 0;
#pragma unroll 1
    for (unsigned at = 0; at < size; at += kWarpSize)
      count += __popc(__ballot_sync(kFullWarp, source.is_valid(source.at(part * size + at + lane))));
    if (lane == 0) store_shared_4(counts + part * 4, count);
  }
}

// The n-th set bit of a mask that has more than n.
__device__ inline int nth_set_bit(uint32_t mask, int n) {
  int at = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2)
    if (const int below = __popc(mask & ((1u << width) - 1)); n >= below)
      n -= below, at += width, mask >>= width;
  return at;
}

class ValidKeys {
 public:
  ValidKeys() = default;
  // `counts` matter where there are gaps.
  __device__ ValidKeys(KeySurvey survey, uint32_t counts, int lane)
      : before_(0), num_keys_(survey.num_keys), has_gaps_(survey.has_gaps()) {
    if (!has_gaps_) return;
    const int count = load_shared_4(counts + lane * 4);
    before_ = warp_inclusive_sum(count) - count;
  }
  __device__ int num_keys() const { return num_keys_; }

  // The key of this lane's rank, which is below num_keys(); none of a negative rank.
  template <class Source>
  __device__ __forceinline__ typename Source::Key find(const Source& source, int rank) const {
    if (has_gaps_) [[unlikely]]
      return search(source, rank);
    return source.at(rank);  // -1 as a position is past every end
  }

 private:
  template <class Source>
  __device__ __forceinline__ typename Source::Key search(const Source& source, int rank) const {
    using Key = typename Source::Key;
    const int lane = threadIdx.x % kWarpSize;
    const unsigned size = part_size(source.length());
    Key found{-1};
    bool searches = rank >= 0;
    while (const uint32_t who = __ballot_sync(kFullWarp, searches)) {
      // Of the parts that begin at or before a wanted rank the last has it: those that follow begin after it.
      const int wanted = __shfl_sync(kFullWarp, rank, __ffs(who) - 1);
      const int part = __popc(__ballot_sync(kFullWarp, before_ <= wanted)) - 1;
      int before = __shfl_sync(kFullWarp, before_, part);
      const unsigned end = (part + 1) * size;
      for (unsigned at = part * size; at < end && __any_sync(kFullWarp, searches); at += kWarpSize) {
        const Key key = source.at(at + lane);
        const uint32_t valid = __ballot_sync(kFullWarp, source.is_valid(key));
        const int n = rank - before, count = __popc(valid);
        const bool is_here = searches && n >= 0 && n < count;
        const Key there = broadcast(key, nth_set_bit(valid, is_here ? n : 0));
        if (is_here) found = there, searches = false;
        before += count;
      }
    }
    return found;
  }

  int before_;  // valid keys before the part of this lane
  int num_keys_;
  bool has_gaps_;
};

}  // namespace mla_fp8::gpu
