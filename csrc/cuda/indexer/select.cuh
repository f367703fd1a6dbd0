#pragma once
// Finds the best of a row's candidates. A histogram over a range of orders says which bin has the k-th; that
// bin is the range of the next histogram, until one order is left. Every candidate that is not below it is
// chosen. No two candidates of a row are equal, so the chosen set does not depend on the order of visits.
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

// Where the k-th of some candidates lies: in a bin of a histogram, as the remaining-th of the `here` in it.
struct KthBin {
  int32_t bin, remaining, here;
};

// The threads that select together, a power of two. A team has
//
//   thread(), threads(), sync()    the caller's number, the number of threads, a barrier
//   kBinsPerThread                 bins of a histogram, or words of a bitmap, for each thread
//   bins(), scalars(), staged()    memory: for a histogram, for SelectScalars, for topk columns
//   put_few(order), all_few()      adds an order; all orders that were added since kth_of_bins
struct SelectScalars {
  uint64_t base;
  KthBin kth;
  int32_t kept;
  uint32_t nowhere;                     // added to in place of a bin: what does not count needs no branch
  alignas(16) int32_t sums[kWarpSize];  // read by 16 bytes at a time, so nothing else lies there
};

// put_few and all_few of a team within one block: scalars().kept orders lie where the bins were.
template <class Team>
__device__ __forceinline__ void put_where_bins_were(const Team& team, uint64_t order) {
  reinterpret_cast<uint64_t*>(team.bins())[atomicAdd(&team.scalars().kept, 1)] = order;
}
template <class Team>
__device__ __forceinline__ const uint64_t* few_where_bins_were(const Team& team) {
  team.sync();
  return reinterpret_cast<const uint64_t*>(team.bins());
}

// The threads of a block as a team.
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

// The sum of x over threads up to and including the caller. The team must meet before the next call, as the
// sums in shared memory are written again.
template <class Team>
__device__ __forceinline__ int32_t team_inclusive_sum(const Team& team, int32_t x) {
  const int lane = threadIdx.x % kWarpSize, warp = team.thread() / kWarpSize;
  int32_t (&sums)[kWarpSize] = team.scalars().sums;
  x = warp_inclusive_sum(x);
  if (lane == kWarpSize - 1) sums[warp] = x;
  team.sync();
  return x + lanes_sum(lane < warp ? sums[lane] : 0);
}

// Candidates have visit(team, fn): each thread gets its own, four orders at a time. An order below
// kLeastOrder, such as kNoCandidate, is no candidate; a visit does not ask. fn has no branch, so that all
// four are in flight together.
inline constexpr uint64_t kNoCandidate = 0, kLeastOrder = uint64_t{1} << 32;
using Four = uint64_t[4];

// Sets bit column - first for each candidate that is not below `least` and has a bit in `words`.
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

// Candidates as a list of orders in memory.
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

// Candidates as order keys of neighbouring columns from `column` on. A key below `least` (at least 1) is
// none. `keys` is 16-byte aligned, `count` a multiple of 128.
struct CandidateKeys {
  const uint32_t* keys;
  int32_t column, count;
  uint32_t least;

  // The orders of keys `first` to first + 3.
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

// CandidateKeys in global memory: each thread has sixteen keys in flight.
struct FarKeys {
  CandidateKeys all;

  // Calls visit_four(i, keys) with keys i to i + 3.
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

// The number of candidates, and their least and largest key.
struct Survey {
  int32_t count;
  uint32_t low, high;
};
// The team's survey from what each thread found. It writes where bins are, which no thread may still use.
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
      own.low = min(own.low, key - 1);  // no candidate: the largest number
      own.high = max(own.high, key);
    }
  });
  own.low += own.low != UINT32_MAX;
  return survey_of(team, own);
}

// The number of bins of a team's histogram.
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
// The bin of the k-th largest candidate. Afterwards scalars().kept is 0.
template <class Team>
__device__ __forceinline__ KthBin kth_of_bins(const Team& team, int32_t k) {
  constexpr int kBinsPerThread = Team::kBinsPerThread;
  SelectScalars& s = team.scalars();
  team.sync();
  const uint32_t* bins = team.bins();
  // Each thread has kBinsPerThread neighbouring bins, in descending order.
  int32_t here[kBinsPerThread], own = 0;
  const int first = num_bins(team) - 1 - team.thread() * kBinsPerThread;
#pragma unroll
  for (int i = 0; i < kBinsPerThread; ++i) {
    here[i] = static_cast<int32_t>(bins[first - i]);
    own += here[i];
  }
  if (team.thread() == 0) s.kth = {0, k, 0};  // kept if there are fewer than k
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

// The bin of the k-th of the candidates for which counts(order), with the histogram of bin_of(order).
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

// An order in [low, high] such that at least k candidates, and at most k + `others`, are not below it; `low`
// if there are fewer than k. A bin with too many candidates is divided again. The whole team calls it.
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
    if (kth.here - kth.remaining <= others || shift == 0) return low;  // a bin of one order cannot be divided
    k = kth.remaining;
    high = low + min(high - low, (uint64_t{1} << shift) - 1);  // the last bin may end behind `high`
    shift = max(shift - bin_bits, 0);
  }
}
// The k-th of more than k candidates, all in [low, high].
template <class Team, class Candidates>
__device__ __forceinline__ uint64_t kth_order(const Team& team, const Candidates& candidates, int32_t k,
                                              uint64_t low, uint64_t high) {
  return kth_bound(team, candidates, k, 0, low, high);
}

// How many entries lanes before the caller's have, and all lanes, if each has none to four.
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

// Appends to `list`, at index scalars().kept, those of each lane's four that have a bit in `keep`. All lanes
// of a warp call it.
template <class Team, class T>
__device__ __forceinline__ void append(const Team& team, const T (&found)[4], uint32_t keep, T* list) {
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

// Appends order_at(bit) to `to`, at index scalars().kept, for each bit of the calling thread.
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

// Moves the candidates that are not below `least` to the front of their list: scalars().kept of them.
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
