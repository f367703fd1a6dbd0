#pragma once
// The candidates from which index_topk's scan on Hopper chooses after a chunk that is not a unit's first.
#include "cuda/indexer/logit_bins.cuh"
#include "cuda/indexer/sm90_rows.cuh"

namespace mla_fp8::gpu::sm90_index {

// A row's candidates: its list, and the keys of the chunk that are not below the k-th so far. These are few,
// and each thread has a bit for each of its own: four bits for sixteen bytes.
class RowCandidates {
 public:
  template <class Team>
  __device__ __forceinline__ RowCandidates(const Team& team, const CandidateList& list,
                                           const CandidateKeys& chunk)
      : list_(list), chunk_(chunk), first_(4 * team.thread()), step_(4 * team.threads()) {
    int bit = 0;
#pragma unroll 1
    for (int32_t i = first_; i < chunk.count; i += step_, bit += 4) {
      const uint4 keys = *reinterpret_cast<const uint4*>(chunk.keys + i);
      high_ = max(max(max(keys.x, keys.y), max(keys.z, keys.w)), high_);
      uint32_t four = keys.x >= chunk.least;
      if (keys.y >= chunk.least) four |= 2;
      if (keys.z >= chunk.least) four |= 4;
      if (keys.w >= chunk.least) four |= 8;
      left_ |= uint64_t{four} << bit;
    }
  }

  // The survey of the chunk's candidates. `low` may be less than the least of them.
  template <class Team>
  __device__ __forceinline__ Survey survey(const Team& team) const {
    if (chunk_.least == 1) return gpu::survey(team, chunk_);  // there is no k-th yet
    return survey_of(team, {__popcll(left_), chunk_.least, left_ != 0 ? high_ : 0});
  }

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    list_.visit(team, visit_four);
    visit_chunk([&](const Four& orders, const Four&) { visit_four(orders); });
  }
  template <class Team, class Take>
  __device__ __forceinline__ friend void take_from(const Team& team, RowCandidates& own, const Take& take) {
    own.list_.visit(team, take);
    own.are_taken_ = true;
    own.visit_chunk([&](const Four& orders, const Four& bits) {
      const FourPlaces places = take(orders);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (places.here >> j & 1) own.here_ |= bits[j];
        if (places.above >> j & 1) own.above_ |= bits[j];
      }
    });
  }

  // Appends to `to`, at index scalars().kept, the chunk's candidates that are not below `least`.
  template <class Team>
  __device__ __forceinline__ void append(const Team& team, uint64_t least, uint64_t* to) const {
    uint64_t kept = are_taken_ ? above_ : 0;
#pragma unroll 1
    for (uint64_t left = are_taken_ ? here_ : left_; left != 0; left &= left - 1)
      if (order(__ffsll(static_cast<int64_t>(left)) - 1) >= least) kept |= left & (0 - left);
    append_bits(team, kept, to, [&](int bit) { return order(bit); });
  }

 private:
  __device__ __forceinline__ uint64_t order(int bit) const {
    const int32_t i = first_ + bit / 4 * step_ + bit % 4;
    return order_of(chunk_.keys[i], chunk_.column + i);
  }
  // Calls visit_four(orders, their bits).
  template <class Visit>
  __device__ __forceinline__ void visit_chunk(const Visit& visit_four) const {
#pragma unroll 1
    for (uint64_t left = left_; left != 0;) {
      Four orders, bits;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bits[j] = left & (0 - left);
        orders[j] = left != 0 ? order(__ffsll(static_cast<int64_t>(left)) - 1) : kNoCandidate;
        left &= left - 1;
      }
      visit_four(orders, bits);
    }
  }

  const CandidateList list_;
  const CandidateKeys chunk_;
  const int32_t first_, step_;
  uint32_t high_ = 0;
  uint64_t left_ = 0;
  bool are_taken_ = false;         // whether take_from has set the next two
  uint64_t here_ = 0, above_ = 0;  // the bits of keys in the k-th's bin, and above it
};

}  // namespace mla_fp8::gpu::sm90_index
