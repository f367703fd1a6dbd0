#pragma once
// Chooses among order keys of neighbouring columns in shared memory. Each thread of a team has a run of keys,
// and a bit for each that is chosen. A sum over threads then says where the thread's chosen columns go.
#include "cuda/indexer/emit.cuh"
#include "cuda/indexer/logit_bins.cuh"

namespace mla_fp8::gpu {

class ThreadKeys {
 public:
  // Most keys of a team: a thread has 64 bits.
  MLA_HD static constexpr int32_t most(int threads) { return 64 * threads; }

  template <class Team>
  __device__ __forceinline__ ThreadKeys(const Team& team, const CandidateKeys& all) {
    const int each = (all.count / 4 + team.threads() - 1) >> (31 - __clz(team.threads()));
    const int32_t first = team.thread() * each;
    keys_ = all.keys + 4 * first;
    column_ = all.column + 4 * first;
    pieces_ = min(max(all.count / 4 - first, 0), each);
    // Eight lanes load sixteen bytes each at a time. If runs are multiples of 2, 4 or 8 pieces, that many of
    // the eight lanes would meet in the same banks; so they begin at different pieces.
    const int twos = min(__ffs(each | 8) - 1, 3);
    first_piece_ = pieces_ == each ? (threadIdx.x % 8 >> (3 - twos)) & ((1 << twos) - 1) : 0;
  }

  template <class Team>
  __device__ __forceinline__ Survey survey(const Team& team) const {
    Survey own{0, UINT32_MAX, 0};
    each([&](int, const Keys& keys) {
      uint32_t least = min(min(keys[0], keys[1]), min(keys[2], keys[3]));
      own.high = max(max(max(keys[0], keys[1]), max(keys[2], keys[3])), own.high);
      own.count += 4;
      if (least == 0) {  // some key is no candidate
        least = UINT32_MAX;
#pragma unroll
        for (const uint32_t key : keys) {
          own.count -= key == 0;
          least = min(least, key - 1);  // no candidate: the largest number
        }
        least += least != UINT32_MAX;
      }
      own.low = min(own.low, least);
    });
    return survey_of(team, own);
  }

  // Bit i: whether the i-th key of the thread is among the best k of all; `found` is their survey. `least`
  // becomes an order such that exactly those are not below it.
  template <class Team>
  __device__ __forceinline__ uint64_t chosen(const Team& team, int32_t k, const Survey& found,
                                             uint64_t& least) const {
    least = kLeastOrder;
    uint64_t bits = 0;
    if (found.count > k) {
      if (choose_by_bins<false>(team, k, found, least, bits)) return bits;
      least = kth_order(team, *this, k, uint64_t{found.low} << 32, uint64_t{found.high} << 32 | UINT32_MAX);
    }
    each([&](int piece, const Keys& keys) {
      uint32_t four = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        four |= static_cast<uint32_t>(order_of(keys[j], column_ + 4 * piece + j) >= least) << j;
      bits |= uint64_t{four} << 4 * piece;
    });
    return bits;
  }

  // Chooses by one histogram of logits, if there are more than k candidates. Returns false if it cannot: too
  // many are in the k-th's bin, or none of the range. kBeyond: keys may lie beyond `range`; none is pinned.
  template <bool kBeyond, class Team>
  __device__ __forceinline__ bool choose_by_bins(const Team& team, int32_t k, const Survey& range,
                                                 uint64_t& least, uint64_t& bits) const {
    const LogitBins bins(num_bins(team), range);
    if (!bins.divide) return false;
    clear_bins(team);
    const uint32_t own_bins = shared_address(team.bins());
    each([&](int, const Keys& keys) {
#pragma unroll
      for (const uint32_t key : keys)  // fmaxf of a NaN and a number is the number
        add_shared_1(own_bins + 4 * LogitBins::bin(kBeyond ? bins.near_whole_or_end(key)
                                                           : fmaxf(bins.near_whole(key), LogitBins::kWhole)));
    });
    const KthBin kth = kth_of_bins(team, k);
    if (kth.bin < LogitBins::kLow || kth.here > team.threads()) return false;
    bits = taken<kBeyond>(team, bins, kth, least);
    return true;
  }

  // Writes the columns of chosen keys, ascending.
  __device__ __forceinline__ void write(uint64_t chosen, int32_t* to) const {
#pragma unroll 1
    for (int32_t half = 0; half < 64; half += 32)
      for (auto left = static_cast<uint32_t>(chosen >> half); left != 0; left &= left - 1)
        *to++ = column_ + half + __ffs(static_cast<int>(left)) - 1;
  }

  // Appends the orders of chosen keys, at index scalars().kept.
  template <class Team>
  __device__ __forceinline__ void append(const Team& team, uint64_t chosen, uint64_t* to) const {
    append_bits(team, chosen, to, [&](int bit) { return order(bit); });
  }

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team&, const Visit& visit_four) const {
    each([&](int piece, const Keys& keys) {
      Four orders;
#pragma unroll
      for (int j = 0; j < 4; ++j) orders[j] = order_of(keys[j], column_ + 4 * piece + j);
      visit_four(orders);
    });
  }

 private:
  using Keys = uint32_t[4];

  template <class Visit>
  __device__ __forceinline__ void each(const Visit& visit_four) const {
    int piece = first_piece_;
#pragma unroll 1
    for (int i = 0; i < pieces_; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(keys_)[piece];
      visit_four(piece, Keys{four.x, four.y, four.z, four.w});
      if (++piece == pieces_) piece = 0;
    }
  }
  __device__ __forceinline__ uint64_t order(int i) const { return order_of(keys_[i], column_ + i); }

  // The keys in bins above the k-th's, and those of its bin that are not below the k-th.
  template <bool kBeyond, class Team>
  __device__ __forceinline__ uint64_t taken(const Team& team, const LogitBins& bins, const KthBin& kth,
                                            uint64_t& least) const {
    const float at = LogitBins::near_whole_of(kth.bin);
    uint64_t here = 0, above = 0;
    each([&](int piece, const Keys& keys) {
      uint32_t four = 0;
      bool any = false;
      float of[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of[j] = kBeyond ? bins.near_whole_or_end(keys[j]) : bins.near_whole(keys[j]);
        any |= of[j] == at;
        if (of[j] > at) four |= 1u << j;
      }
      above |= uint64_t{four} << 4 * piece;
      if (!any) return;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (of[j] == at) here |= uint64_t{1} << (4 * piece + j);
    });
    for (uint64_t left = here; left != 0; left &= left - 1)
      team.put_few(order(__ffsll(static_cast<int64_t>(left)) - 1));
    least = kth_of_few(team, kth);
    for (uint64_t left = here; left != 0; left &= left - 1)
      if (order(__ffsll(static_cast<int64_t>(left)) - 1) >= least) above |= left & (0 - left);
    return above;
  }

  const uint32_t* keys_;  // the thread's run, in pieces of four
  int32_t column_, pieces_, first_piece_;
};

// Writes what is chosen of a row. place_of(count) is the number of chosen columns in the team's blocks before
// this one, which has `count`.
template <class Team, class Slot, class PlaceOf>
__device__ __forceinline__ void write_chosen(const Team& team, const IndexAnswer& answer,
                                             const ThreadKeys& keys, uint64_t chosen, const Slot& slot,
                                             const PlaceOf& place_of) {
  const int32_t own = __popcll(chosen), last = team_inclusive_sum(team, own);
  if (team.thread() == team.threads() - 1) team.scalars().kept = last;
  keys.write(chosen, team.staged() + last - own);
  team.sync();
  const int32_t count = team.scalars().kept;
  write_columns(team, answer, place_of(count), count, slot);
}

}  // namespace mla_fp8::gpu
