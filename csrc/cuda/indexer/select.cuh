#pragma once
// The best of lists of candidates: the k-th by a histogram of where they lie in a range of order_of, which
// narrows to one bin and is divided again; then what is not below it, in place or ascending by column. No two
// candidates of a row are equal, so what is chosen is one set, whatever order the lists are in.
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

// A place of a list that holds no candidate: below every order, where the bits above a column's 24 are ones.
inline constexpr uint64_t kFiller = 0;

template <int kBits>
struct SelectSmem {
  static constexpr int kBinBits = kBits, kBins = 1 << kBits;
  static constexpr int kBitmapColumns = kBins * 32;  // that emission takes at a time
  union {
    uint32_t bins[kBins];
    uint32_t bitmap[kBins];
  };
  uint64_t base;
  int32_t remaining, here, kept;
  alignas(16) int32_t sums[kWarpSize];  // read by 16 bytes: nothing else lies in them
};

// Threads that select together, and their memory; here those of a block.
template <int kN>
struct BlockTeam {
  static constexpr int kThreads = kN;
  using Smem = SelectSmem<11>;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  // The histogram of all candidates; the calling block may hold a part of them.
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const { return bins; }
};

// The sum of the threads up to and including this one.
template <class Team>
__device__ __forceinline__ int32_t team_inclusive_sum(int32_t x, int32_t (&sums)[kWarpSize]) {
  const int lane = threadIdx.x % kWarpSize, warp = Team::thread() / kWarpSize;
  x = warp_inclusive_sum(x);
  Team::sync();  // the last call's sums have been read
  if (lane == kWarpSize - 1) sums[warp] = x;
  Team::sync();
  int32_t before = 0;
#pragma unroll
  for (int w = 0; w < Team::kThreads / kWarpSize - 1; ++w)
    if (w < warp) before += sums[w];
  return x + before;
}

// Candidates in one piece of memory.
struct CandidateList {
  const uint64_t* orders;
  int32_t count;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Visit& visit_one) const {
    constexpr int kThreads = Team::kThreads, kAtOnce = 4;  // loads in flight
    for (int32_t first = Team::thread(); first < count; first += kAtOnce * kThreads) {
      uint64_t found[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        found[j] = first + j * kThreads < count ? orders[first + j * kThreads] : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j * kThreads < count) visit_one(found[j]);
    }
  }
};

// A number that at least k and at most k + spare of the candidates reach, of which there are more than k, all
// in [low, high]. The whole team calls it.
template <class Team, class Candidates>
__device__ __forceinline__ uint64_t kth_order(const Team& team, const Candidates& candidates, int32_t k,
                                              int32_t spare, uint64_t low, uint64_t high,
                                              typename Team::Smem& smem) {
  constexpr int kBins = Team::Smem::kBins, kBinBits = Team::Smem::kBinBits;
  constexpr int kBinsPerThread = kBins / Team::kThreads;
  static_assert(kBins % Team::kThreads == 0);
  uint64_t base = low;
  int32_t remaining = k;
  int shift = max(64 - __clzll(static_cast<int64_t>(high - low)) - kBinBits, 0);
#pragma unroll 1
  while (true) {
    Team::sync();
    for (int i = Team::thread(); i < kBins; i += Team::kThreads) smem.bins[i] = 0;
    Team::sync();
    candidates.template visit<Team>([&](uint64_t order) {
      if (order >= base && order <= high)
        atomicAdd(&smem.bins[static_cast<uint32_t>((order - base) >> shift)], 1u);
    });
    Team::sync();
    const uint32_t* bins = team.total(smem.bins);
    // Bins in descending order, kBinsPerThread neighbours to a thread.
    int32_t here[kBinsPerThread], own = 0;
    const int first = kBins - 1 - Team::thread() * kBinsPerThread;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      here[i] = static_cast<int32_t>(bins[first - i]);
      own += here[i];
    }
    int32_t above = team_inclusive_sum<Team>(own, smem.sums) - own;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      if (above < remaining && remaining <= above + here[i]) {
        smem.base = base + (static_cast<uint64_t>(first - i) << shift);
        smem.remaining = remaining - above;
        smem.here = here[i];
      }
      above += here[i];
    }
    Team::sync();
    base = smem.base;
    remaining = smem.remaining;
    if (smem.here - remaining <= spare) return base;  // one of each order: at shift 0 at the latest
    high = base + ((uint64_t{1} << shift) - 1);
    shift = max(shift - kBinBits, 0);
  }
}

// Moves the candidates that are not below `least` to the front of their list.
template <class Team>
__device__ __forceinline__ void keep_from(uint64_t least, uint64_t* list, int32_t count,
                                          typename Team::Smem& smem) {
  constexpr int kAtOnce = 4, kThreads = Team::kThreads;
  const int lane = threadIdx.x % kWarpSize;
  Team::sync();
  if (Team::thread() == 0) smem.kept = 0;
  for (int32_t first = 0; first < count; first += kAtOnce * kThreads) {
    uint64_t found[kAtOnce];
    bool keep[kAtOnce];
    int32_t own = 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int32_t i = first + j * kThreads + Team::thread();
      found[j] = i < count ? list[i] : 0;
      keep[j] = i < count && found[j] >= least;
      own += keep[j];
    }
    Team::sync();  // what is overwritten now has been read
    const int32_t end = warp_inclusive_sum(own);
    int32_t place = 0;
    if (lane == kWarpSize - 1 && end > 0) place = atomicAdd(&smem.kept, end);
    place = __shfl_sync(kFullWarp, place, kWarpSize - 1) + end - own;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (keep[j]) list[place++] = found[j];
  }
  Team::sync();
}

// The row whose answer is written.
struct IndexAnswer {
  const IndexTopkParams& p;
  int64_t row;
  const IndexRow& where;
};
// Of what is chosen, all in columns [begin, end): it goes to places from `place` on.
struct AnswerPart {
  int32_t place, count;
  int64_t begin, end;
};

// Writes the candidates that are not below `least`, ascending by column.
template <class Team, class Candidates, class Slot>
__device__ __forceinline__ void emit_from(const IndexAnswer& answer, const Candidates& candidates,
                                          uint64_t least, const AnswerPart& part, const Slot& slot,
                                          typename Team::Smem& smem) {
  const IndexTopkParams& p = answer.p;
  constexpr int kThreads = Team::kThreads, kWords = Team::Smem::kBins, kWordsPerThread = kWords / kThreads;
  constexpr int kBitmapColumns = Team::Smem::kBitmapColumns;
  int32_t* positions = p.positions + answer.row * p.positions_stride_row + part.place;
  int32_t written = 0;
  for (int64_t first = part.begin; first < part.end && written < part.count; first += kBitmapColumns) {
    Team::sync();
    for (int i = Team::thread(); i < kWords; i += kThreads) smem.bitmap[i] = 0;
    Team::sync();
    candidates.template visit<Team>([&](uint64_t order) {
      const int64_t bit = column_of(order) - first;
      if (order >= least && bit >= 0 && bit < kBitmapColumns)
        atomicOr(&smem.bitmap[bit / 32], 1u << (bit % 32));
    });
    Team::sync();
    const int word = Team::thread() * kWordsPerThread;
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) own += __popc(smem.bitmap[word + i]);
    const int32_t last = team_inclusive_sum<Team>(own, smem.sums);
    int32_t to = written + last - own;
    for (int i = 0; i < kWordsPerThread; ++i)
      for (uint32_t bits = smem.bitmap[word + i]; bits; bits &= bits - 1) {
        const int bit = 31 - __clz(bits & (0u - bits));
        positions[to++] = static_cast<int32_t>(first - answer.where.begin) + (word + i) * 32 + bit;
      }
    if (Team::thread() == kThreads - 1) smem.kept = last;
    Team::sync();
    written += smem.kept;
  }
  if (p.slots == nullptr) return;
  int32_t* slots = p.slots + answer.row * p.slots_stride_row + part.place;
  for (int i = Team::thread(); i < part.count; i += kThreads)
    slots[i] = slot(answer.where, positions[i] + answer.where.begin);
}

// The end of a row of which `count` are chosen.
template <class Team>
__device__ __forceinline__ void emit_end(const IndexTopkParams& p, int64_t row, int32_t count) {
  for (int i = count + Team::thread(); i < p.topk; i += Team::kThreads) {
    p.positions[row * p.positions_stride_row + i] = -1;
    if (p.slots) p.slots[row * p.slots_stride_row + i] = -1;
  }
  if (Team::thread() == 0) p.lens[row] = count;
}

// The answer of a row that sees at most topk entries: all that is_there(column).
template <class Team, class IsThere, class Slot>
__device__ __forceinline__ void emit_all(const IndexAnswer& answer, const IsThere& is_there, const Slot& slot,
                                         typename Team::Smem& smem) {
  const IndexTopkParams& p = answer.p;
  const IndexRow& where = answer.where;
  int32_t written = 0;
  for (int32_t first = where.begin; first < where.end; first += Team::kThreads) {
    const int32_t column = first + Team::thread();
    const bool there = column < where.end && is_there(column);
    const int32_t last = team_inclusive_sum<Team>(there, smem.sums);
    if (there) {
      const int32_t to = written + last - 1;
      p.positions[answer.row * p.positions_stride_row + to] = column - where.begin;
      if (p.slots) p.slots[answer.row * p.slots_stride_row + to] = slot(where, column);
    }
    if (Team::thread() == Team::kThreads - 1) smem.kept = last;
    Team::sync();
    written += smem.kept;
  }
  emit_end<Team>(p, answer.row, written);
  Team::sync();
}

// The row's answer from all of its candidates, `total` of them and any number of fillers, all in [low, high].
template <class Team, class Candidates, class Slot>
__device__ __forceinline__ void select_and_emit(const IndexAnswer& answer, const Candidates& candidates,
                                                int32_t total, uint64_t low, uint64_t high, const Slot& slot,
                                                typename Team::Smem& smem) {
  const int32_t topk = answer.p.topk, count = min(total, topk);
  const uint64_t least = total > topk ? kth_order(Team{}, candidates, topk, 0, low, high, smem) : kFiller + 1;
  emit_from<Team>(answer, candidates, least, {0, count, answer.where.begin, answer.where.end}, slot, smem);
  emit_end<Team>(answer.p, answer.row, count);
}

}  // namespace mla_fp8::gpu
