#pragma once
// The best of a row's candidates: the k-th by a histogram of where they lie in a range of order_of, which
// narrows to one bin and is divided again; then what is not below it, in place or ascending by column. No two
// candidates of a row are equal, so what is chosen is one set, whatever order they are visited in.
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

// Where the k-th of some candidates lies: in a bin of a histogram, as the remaining-th of those that are
// here.
struct KthBin {
  int32_t bin, remaining, here;
};

// Threads that select together, a power of two of them. A team has
//
//   thread(), threads(), sync()    of its own
//   kBinsPerThread                 of a histogram, or words of a bitmap
//   bins(), scalars(), staged()    its memory: of a histogram, SelectScalars, room for topk columns
//   put_few(order), all_few()      what its threads put since kth_of_bins: no more bytes than a histogram
struct SelectScalars {
  uint64_t base;
  KthBin kth;
  int32_t kept;
  uint32_t nowhere;  // is added to in place of a bin: where nothing is counted there is no branch
  alignas(16) int32_t sums[kWarpSize];  // read by 16 bytes: nothing else lies in them
};

// The few of a team within a block: scalars().kept of them.
template <class Team>
__device__ __forceinline__ void put_where_bins_were(const Team& team, uint64_t order) {
  reinterpret_cast<uint64_t*>(team.bins())[atomicAdd(&team.scalars().kept, 1)] = order;
}
template <class Team>
__device__ __forceinline__ const uint64_t* few_where_bins_were(const Team& team) {
  team.sync();
  return reinterpret_cast<const uint64_t*>(team.bins());
}

// The threads of a block.
template <int kN>
struct BlockTeam {
  static constexpr int kBinsPerThread = 2048 / kN;
  struct Smem {
    uint32_t bins[2048];
    int32_t staged[kMaxIndexTopk];
    SelectScalars scalars;
  };
  Smem& smem;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kN; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return smem.bins; }
  __device__ __forceinline__ SelectScalars& scalars() const { return smem.scalars; }
  __device__ __forceinline__ int32_t* staged() const { return smem.staged; }
  __device__ __forceinline__ void put_few(uint64_t order) const { put_where_bins_were(*this, order); }
  __device__ __forceinline__ const uint64_t* all_few() const { return few_where_bins_were(*this); }
};

// The sum of the threads up to and including this one. Behind the last call the team has met again: its sums
// have been read.
template <class Team>
__device__ __forceinline__ int32_t team_inclusive_sum(const Team& team, int32_t x) {
  const int lane = threadIdx.x % kWarpSize, warp = team.thread() / kWarpSize;
  int32_t (&sums)[kWarpSize] = team.scalars().sums;
  x = warp_inclusive_sum(x);
  if (lane == kWarpSize - 1) sums[warp] = x;
  team.sync();
  return x + lanes_sum(lane < warp ? sums[lane] : 0);
}

// A visit gives four orders at once, and asks of none whether it is one: kNoCandidate, and any other that is
// below kLeastOrder, is a place without a candidate. What is done with each is short and has no branch, so
// that the four of a thread are on their way together.
inline constexpr uint64_t kNoCandidate = 0, kLeastOrder = uint64_t{1} << 32;
using Four = uint64_t[4];

// Sets the bit of the column of each candidate that is not below `least`, among those from `first` on.
template <class Team, class Candidates>
__device__ __forceinline__ void mark_each(const Team& team, const Candidates& candidates, uint64_t least,
                                          int64_t first, uint32_t* words, int num_words) {
  candidates.visit(team, [&](const Four& orders) {
#pragma unroll
    for (const uint64_t order : orders) {
      const int64_t bit = column_of(order) - first;
      if (order >= least && bit >= 0 && bit < int64_t{num_words} * 32)
        atomicOr(&words[bit / 32], 1u << (bit % 32));
    }
  });
}

// Candidates in one piece of memory.
struct CandidateList {
  const uint64_t* orders;
  int32_t count;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    const int threads = team.threads();
#pragma unroll 1
    for (int32_t first = team.thread(); first < count; first += 4 * threads) {
      Four found;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        found[j] = first + j * threads < count ? orders[first + j * threads] : kNoCandidate;
      visit_four(found);
    }
  }
};

// Those of neighbouring columns from `column` on, by their keys; a key below `least`, at least 1, is none.
// 16-byte aligned, `count` a multiple of 128.
struct CandidateKeys {
  const uint32_t* keys;
  int32_t column, count;
  uint32_t least;

  // Places from `first` on.
  __device__ __forceinline__ void load(int32_t first, Four& found) const {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + first);
    const uint32_t of[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) found[j] = order_of(of[j] >= least ? of[j] : 0, column + first + j);
  }

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    const int threads = team.threads();
#pragma unroll 1
    for (int32_t first = 4 * team.thread(); first < count; first += 4 * threads) {
      Four found;
      load(first, found);
      visit_four(found);
    }
  }
};

// The same where they lie far away: sixteen of a thread are on their way together.
struct FarKeys {
  CandidateKeys all;

  // visit_four(i, keys): places i to i + 3.
  template <class Team, class Visit>
  __device__ __forceinline__ void visit_keys(const Team& team, const Visit& visit_four) const {
    constexpr int kAtOnce = 4;
    const int step = 4 * team.threads();
#pragma unroll 1
    for (int32_t first = 4 * team.thread(); first < all.count; first += kAtOnce * step) {
      uint4 found[kAtOnce]{};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j * step < all.count)
          found[j] = *reinterpret_cast<const uint4*>(all.keys + first + j * step);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t keys[] = {found[j].x, found[j].y, found[j].z, found[j].w};
        visit_four(first + j * step, keys);
      }
    }
  }
  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    visit_keys(team, [&](int32_t i, const uint32_t (&keys)[4]) {
      Four found;
#pragma unroll
      for (int j = 0; j < 4; ++j) found[j] = order_of(keys[j], all.column + i + j);
      visit_four(found);
    });
  }
};

// The number of candidates, and the least and the largest key of them. The whole team calls it.
struct Survey {
  int32_t count;
  uint32_t low, high;
};
// The same from what each thread found: through the memory of bins, behind a barrier that all have met who
// used it.
template <class Team>
__device__ __forceinline__ Survey survey_of(const Team& team, Survey own) {
  const int lane = threadIdx.x % kWarpSize, warps = team.threads() / kWarpSize;
  uint32_t* bins = team.bins() + lane;
  own = {lanes_sum(own.count), ~lanes_max(~own.low), lanes_max(own.high)};
  if (lane == team.thread() / kWarpSize) {
    bins[0] = own.count;
    bins[kWarpSize] = own.low;
    bins[2 * kWarpSize] = own.high;
  }
  team.sync();
  const bool is_one = lane < warps;
  own = {is_one ? static_cast<int32_t>(bins[0]) : 0, is_one ? bins[kWarpSize] : UINT32_MAX,
         is_one ? bins[2 * kWarpSize] : 0};
  return {lanes_sum(own.count), ~lanes_max(~own.low), lanes_max(own.high)};
}
template <class Team, class Candidates>
__device__ __forceinline__ Survey survey(const Team& team, const Candidates& candidates) {
  Survey own{0, UINT32_MAX, 0};
  candidates.visit(team, [&](const Four& orders) {
#pragma unroll
    for (const uint64_t order : orders) {
      const uint32_t key = static_cast<uint32_t>(order >> 32);
      own.count += key != 0;
      own.low = min(own.low, key - 1);  // of none the largest number
      own.high = max(own.high, key);
    }
  });
  own.low += own.low != UINT32_MAX;
  return survey_of(team, own);
}

// The bins of a histogram: kBinsPerThread for each thread, ascending. The whole team calls these.
template <class Team>
__device__ __forceinline__ int num_bins(const Team& team) {
  return Team::kBinsPerThread * team.threads();
}
template <class Team>
__device__ __forceinline__ void clear_bins(const Team& team) {
  team.sync();
  for (int i = team.thread(); i < num_bins(team); i += team.threads()) team.bins()[i] = 0;
  team.sync();
}
// Behind it, scalars().kept is 0.
template <class Team>
__device__ __forceinline__ KthBin kth_of_bins(const Team& team, int32_t k) {
  constexpr int kBinsPerThread = Team::kBinsPerThread;
  SelectScalars& s = team.scalars();
  team.sync();
  const uint32_t* bins = team.bins();
  // Bins in descending order, kBinsPerThread neighbours to a thread.
  int32_t here[kBinsPerThread], own = 0;
  const int first = num_bins(team) - 1 - team.thread() * kBinsPerThread;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    here[i] = static_cast<int32_t>(bins[first - i]);
    own += here[i];
  }
  if (team.thread() == 0) s.kth = {0, k, 0};  // if there are fewer than k
  int32_t above = team_inclusive_sum(team, own) - own;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    if (above < k && k <= above + here[i]) s.kth = {first - i, k - above, here[i]};
    above += here[i];
  }
  if (team.thread() == 0) s.kept = 0;
  team.sync();
  return s.kth;
}

// Of candidates that counts(order) counts, in bins by bin_of(order).
template <class Team, class Candidates, class Counts, class BinOf>
__device__ __forceinline__ KthBin find_kth_bin(const Team& team, const Candidates& candidates, int32_t k,
                                               const Counts& counts, const BinOf& bin_of) {
  clear_bins(team);
  const uint32_t own_bins = shared_address(team.bins()), nowhere = shared_address(&team.scalars().nowhere);
  candidates.visit(team, [&](const Four& orders) {
#pragma unroll
    for (const uint64_t order : orders) add_shared_1(counts(order) ? own_bins + 4 * bin_of(order) : nowhere);
  });
  return kth_of_bins(team, k);
}

// Of candidates in [low, high] an order that k of them, and at most `others` more, are not below: where more
// share the bin of the k-th, it is divided again. Of fewer than k it is `low`. The whole team calls it.
template <class Team, class Candidates>
__device__ __forceinline__ uint64_t kth_bound(const Team& team, const Candidates& candidates, int32_t k,
                                              int32_t others, uint64_t low, uint64_t high) {
  const int bin_bits = 31 - __clz(Team::kBinsPerThread * team.threads());
  int shift = max(64 - __clzll(static_cast<int64_t>(high - low)) - bin_bits, 0);
#pragma unroll 1
  while (true) {
    const KthBin kth = find_kth_bin(
        team, candidates, k, [&](uint64_t order) { return order >= low && order <= high; },
        [&](uint64_t order) { return static_cast<uint32_t>((order - low) >> shift); });
    low += static_cast<uint64_t>(kth.bin) << shift;
    if (kth.here - kth.remaining <= others || shift == 0) return low;  // of one order no more can be told
    k = kth.remaining;
    high = low + min(high - low, (uint64_t{1} << shift) - 1);  // a bin may end behind the last order
    shift = max(shift - bin_bits, 0);
  }
}
// The k-th of more than k candidates, all in [low, high].
template <class Team, class Candidates>
__device__ __forceinline__ uint64_t kth_order(const Team& team, const Candidates& candidates, int32_t k,
                                              uint64_t low, uint64_t high) {
  return kth_bound(team, candidates, k, 0, low, high);
}

// Of lanes each of which has none to four: how many those before it have, and all.
struct LanePlaces {
  int32_t before, all;

  __device__ __forceinline__ explicit LanePlaces(int own) {
    const uint32_t lanes_before = (1u << threadIdx.x % kWarpSize) - 1;
    const uint32_t ones = __ballot_sync(kFullWarp, own & 1), twos = __ballot_sync(kFullWarp, own & 2),
                   fours = __ballot_sync(kFullWarp, own & 4);
    before = __popc(ones & lanes_before) + 2 * __popc(twos & lanes_before) + 4 * __popc(fours & lanes_before);
    all = __popc(ones) + 2 * __popc(twos) + 4 * __popc(fours);
  }
};

// To `list`, from place scalars().kept on, those of four candidates of each lane that are kept: bit j of
// `keep`.
template <class Team>
__device__ __forceinline__ void append(const Team& team, const Four& found, uint32_t keep, uint64_t* list) {
  const int own = __popc(keep);
  const LanePlaces places(own);
  if (places.all == 0) return;
  int32_t place = 0;
  if (threadIdx.x % kWarpSize == 0) place = atomicAdd(&team.scalars().kept, places.all);
  place = __shfl_sync(kFullWarp, place, 0) + places.before;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (keep >> j & 1) list[place++] = found[j];
}

// Behind scalars().kept others, for each bit of the calling thread order_at(bit).
template <class Team, class OrderAt>
__device__ __forceinline__ void append_bits(const Team& team, uint64_t bits, uint64_t* to,
                                            const OrderAt& order_at) {
  const int32_t own = __popcll(bits), end = warp_inclusive_sum(own);
  int32_t place = 0;
  if (threadIdx.x % kWarpSize == kWarpSize - 1) place = atomicAdd(&team.scalars().kept, end);
  place = __shfl_sync(kFullWarp, place, kWarpSize - 1) + end - own;
#pragma unroll 1
  for (; bits != 0; bits &= bits - 1) to[place++] = order_at(__ffsll(static_cast<int64_t>(bits)) - 1);
  team.sync();
}

// Moves the candidates that are not below `least` to the front of their list; scalars().kept are there.
template <class Team>
__device__ __forceinline__ void keep_from(const Team& team, uint64_t least, uint64_t* list, int32_t count) {
  const int threads = team.threads();
  team.sync();
  if (team.thread() == 0) team.scalars().kept = 0;
  for (int32_t first = 0; first < count; first += 4 * threads) {
    Four found;
    uint32_t keep = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t i = first + j * threads + team.thread();
      found[j] = i < count ? list[i] : kNoCandidate;
      keep |= static_cast<uint32_t>(i < count && found[j] >= least) << j;
    }
    team.sync();  // what is overwritten now has been read
    append(team, found, keep, list);
  }
  team.sync();
}

}  // namespace mla_fp8::gpu
