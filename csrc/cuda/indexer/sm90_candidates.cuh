#pragma once
// What index_topk's scan on Hopper chooses from behind a chunk of columns.
#include "cuda/indexer/logit_bins.cuh"
#include "cuda/indexer/sm90_rows.cuh"

namespace mla_fp8::gpu::sm90_index {

// The candidates of a row. Of those in the chunk, each thread has bits: four for each visit, the last one's
// the lowest.
struct RowCandidates {
  CandidateList list;
  CandidateKeys chunk;
  bool are_taken = false;        // then, of the calling thread's
  uint64_t here = 0, above = 0;  // FourPlaces

  template <class Team, class Take>
  __device__ __forceinline__ friend void take_from(const Team& team, RowCandidates& own, const Take& take) {
    own.list.visit(team, take);
    own.chunk.visit(team, [&](const Four& orders) {
      const FourPlaces places = take(orders);
      own.here = own.here << 4 | places.here;
      own.above = own.above << 4 | places.above;
    });
    own.are_taken = true;
  }
  // Behind scalars().kept others to `to`, what take_from found above, and what is not below `least`.
  template <class Team>
  __device__ __forceinline__ void append_taken(const Team& team, uint64_t least, uint64_t* to) const {
    const int32_t step = 4 * team.threads();
    const int32_t last = (chunk.count - 1 - 4 * team.thread()) / step * step + 4 * team.thread();
    const auto order = [&](int bit) {  // the place's
      const int32_t i = last - bit / 4 * step + bit % 4;
      return order_of(chunk.keys[i], chunk.column + i);
    };
    uint64_t kept = above;
    for (uint64_t left = here; left != 0; left &= left - 1) {
      const int bit = __ffsll(static_cast<int64_t>(left)) - 1;
      if (order(bit) >= least) kept |= uint64_t{1} << bit;
    }
    const int32_t own = __popcll(kept), end = warp_inclusive_sum(own);
    int32_t place = 0;
    if (threadIdx.x % kWarpSize == kWarpSize - 1) place = atomicAdd(&team.scalars().kept, end);
    place = __shfl_sync(kFullWarp, place, kWarpSize - 1) + end - own;
#pragma unroll 1
    for (; kept != 0; kept &= kept - 1) to[place++] = order(__ffsll(static_cast<int64_t>(kept)) - 1);
    team.sync();
  }
  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    list.visit(team, visit_four);
    chunk.visit(team, visit_four);
  }
};

}  // namespace mla_fp8::gpu::sm90_index
