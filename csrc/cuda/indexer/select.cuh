#pragma once
// The best of lists of candidates: the k-th by digits of order_of, from the highest, with a histogram in
// shared memory; then what is not below it, in place or ascending by column. No two candidates of a row are
// equal, so what is chosen is one set, whatever order the lists are in.
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

inline constexpr int kDigitBits = 11;
inline constexpr int kBins = 1 << kDigitBits;
inline constexpr int kBitmapWords = 8192;  // columns that emission takes at a time / 32

struct SelectSmem {
  union {
    uint32_t bins[kBins];
    uint32_t bitmap[kBitmapWords];
  };
  uint64_t prefix;
  int32_t remaining, kept;
};

// Candidates in one piece of memory.
struct CandidateList {
  const uint64_t* orders;
  int32_t count;

  template <int kThreads, class Visit>
  __device__ __forceinline__ void visit(const Visit& visit_one) const {
    for (int32_t first = 0; first < count; first += kThreads) {
      const int32_t i = first + static_cast<int32_t>(threadIdx.x);
      visit_one(i < count ? orders[i] : 0, i < count);
    }
  }
};

// One more in its bin for each lane that has one; lanes that agree add up first.
__device__ __forceinline__ void count_digit(uint32_t* bins, uint32_t digit, bool valid) {
  const uint32_t lanes = __ballot_sync(kFullWarp, valid);
  if (kWaveSize == kWarpSize && lanes == 0) return;  // halves of a wave stay together
  const int leader = lanes ? 31 - __clz(lanes & (0u - lanes)) : 0;
  const uint32_t agreed = __shfl_sync(kFullWarp, digit, leader);
  const bool agrees = __ballot_sync(kFullWarp, valid && digit == agreed) == lanes;
  const int lane = threadIdx.x % kWarpSize;
  if (agrees && lane == leader) atomicAdd(reinterpret_cast<int32_t*>(bins) + agreed, __popc(lanes));
  if (!agrees && valid) atomicAdd(reinterpret_cast<int32_t*>(bins) + digit, 1);
}

// The least order that is among the `k` largest of the candidates, of which there are more than k. All
// threads of the block call it.
template <int kThreads, class Candidates>
__device__ __forceinline__ uint64_t kth_order(const Candidates& candidates, int32_t k, SelectSmem& smem) {
  constexpr int kWarps = kThreads / kWarpSize;
  constexpr int kBinsPerThread = kBins / kThreads;
  static_assert(kBins % kThreads == 0);
  // Of 64 bits: the key, then 24 of the column; the upper eight of its complement are ones.
  constexpr int kShifts[] = {53, 42, 32, 13, 2, 0};
  constexpr int kWidths[] = {11, 11, 10, 11, 11, 2};
  uint64_t prefix = 0;
  int32_t remaining = k;
#pragma unroll 1
  for (int step = 0; step < 6; ++step) {
    const int shift = kShifts[step];
    const uint32_t mask = (1u << kWidths[step]) - 1;
    const int above = step == 0 ? 64 : shift + kWidths[step];  // bits from here on are known
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) smem.bins[i] = 0;
    __syncthreads();
    candidates.template visit<kThreads>([&](uint64_t order, bool valid) {
      const bool matches = valid && (above == 64 || order >> above == prefix >> above);
      count_digit(smem.bins, static_cast<uint32_t>(order >> shift) & mask, matches);
    });
    __syncthreads();
    // Bins in descending order, kBinsPerThread neighbours to a thread.
    int32_t own = 0;
    const int first = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) own += static_cast<int32_t>(smem.bins[first - i]);
    int32_t sum = block_inclusive_sum<kWarps>(own) - own;  // in larger bins
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) {
      const int32_t here = static_cast<int32_t>(smem.bins[first - i]);
      if (sum < remaining && remaining <= sum + here) {
        smem.prefix = prefix | static_cast<uint64_t>(first - i) << shift;
        smem.remaining = remaining - sum;
        smem.kept = here;
      }
      sum += here;
    }
    __syncthreads();
    prefix = smem.prefix;
    remaining = smem.remaining;
    if (step == 2) prefix |= uint64_t{0xff} << 24;
    if (remaining == smem.kept) break;  // all of this bin: nothing below it matters
  }
  __syncthreads();
  return prefix;
}

// Moves the candidates that are not below `least` to the front of their list.
template <int kThreads>
__device__ __forceinline__ void keep_from(uint64_t least, const uint64_t* from, int32_t count, uint64_t* to,
                                          SelectSmem& smem) {
  __syncthreads();
  if (threadIdx.x == 0) smem.kept = 0;
  for (int32_t first = 0; first < count; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const uint64_t order = i < count ? from[i] : 0;
    const bool keep = i < count && order >= least;
    __syncthreads();  // what is overwritten now has been read
    const uint32_t lanes = __ballot_sync(kFullWarp, keep);
    const int lane = threadIdx.x % kWarpSize;
    int32_t place = 0;
    if (lane == 0 && lanes) place = atomicAdd(&smem.kept, __popc(lanes));
    place = __shfl_sync(kFullWarp, place, 0);
    if (keep) to[place + __popc(lanes & ((1u << lane) - 1))] = order;
  }
  __syncthreads();
}

// Writes the candidates that are not below `least`, `count` of them, ascending by column.
template <int kThreads, class Candidates, class Slot>
__device__ __forceinline__ void emit_from(const IndexTopkParams& p, int64_t row, const IndexRow& where,
                                          const Candidates& candidates, uint64_t least, int32_t count,
                                          const Slot& slot, SelectSmem& smem) {
  constexpr int kWarps = kThreads / kWarpSize;
  constexpr int kWordsPerThread = kBitmapWords / kThreads;
  static_assert(kBitmapWords % kThreads == 0);
  int32_t* positions = p.positions + row * p.positions_stride_row;
  int32_t* slots = p.slots ? p.slots + row * p.slots_stride_row : nullptr;
  int32_t written = 0;
  for (int64_t first = where.begin; first < where.end && written < count; first += kBitmapWords * 32) {
    __syncthreads();
    for (int i = threadIdx.x; i < kBitmapWords; i += kThreads) smem.bitmap[i] = 0;
    __syncthreads();
    candidates.template visit<kThreads>([&](uint64_t order, bool valid) {
      const int64_t bit = column_of(order) - first;
      if (valid && order >= least && bit >= 0 && bit < kBitmapWords * 32)
        atomicOr(&smem.bitmap[bit / 32], 1u << (bit % 32));
    });
    __syncthreads();
    const int word = static_cast<int>(threadIdx.x) * kWordsPerThread;
    int32_t own = 0;
#pragma unroll 4
    for (int i = 0; i < kWordsPerThread; ++i) own += __popc(smem.bitmap[word + i]);
    const int32_t end = block_inclusive_sum<kWarps>(own);
    int32_t place = written + end - own;
    for (int i = 0; i < kWordsPerThread; ++i)
      for (uint32_t bits = smem.bitmap[word + i]; bits; bits &= bits - 1) {
        const int bit = 31 - __clz(bits & (0u - bits));
        const int32_t column = static_cast<int32_t>(first) + (word + i) * 32 + bit;
        positions[place] = column - where.begin;
        if (slots) slots[place] = slot(where, column);
        ++place;
      }
    __syncthreads();
    if (threadIdx.x == kThreads - 1) smem.kept = end;
    __syncthreads();
    written += smem.kept;
  }
  for (int i = count + static_cast<int>(threadIdx.x); i < p.topk; i += kThreads) {
    positions[i] = -1;
    if (slots) slots[i] = -1;
  }
  if (threadIdx.x == 0) p.lens[row] = count;
  __syncthreads();
}

// The row's answer from all of its candidates, `total` of them.
template <int kThreads, class Candidates, class Slot>
__device__ __forceinline__ void select_and_emit(const IndexTopkParams& p, int64_t row, const IndexRow& where,
                                                const Candidates& candidates, int32_t total, const Slot& slot,
                                                SelectSmem& smem) {
  const uint64_t least = total > p.topk ? kth_order<kThreads>(candidates, p.topk, smem) : 0;
  emit_from<kThreads>(p, row, where, candidates, least, min(total, p.topk), slot, smem);
}

}  // namespace mla_fp8::gpu
