#pragma once
// Finds the k-th of candidates by one histogram, of logits in bins of equal widths.
#include "cuda/indexer/select.cuh"

namespace mla_fp8::gpu {

// For four candidates: bit j of `here` if candidate j is in the k-th's bin, of `above` if in a higher one.
struct FourPlaces {
  uint32_t here, above;
};
// Passes all candidates to take(orders), which says where they lie; an overload serves those that need that.
template <class Team, class Candidates, class Take>
__device__ __forceinline__ void take_from(const Team& team, const Candidates& candidates, const Take& take) {
  candidates.visit(team, take);
}

// Bins of equal widths in logits. Candidates spread over them, as they would not over bins of keys: half of
// all floats lie between -1 and 1.
struct LogitBins {
  // Near kWhole the last bits of a float are a whole number, so one fused multiply-add makes a bin. It is
  // rounded twice, by half a bin each: two bins are left for that. Bin 0 is for keys that are no candidates.
  static constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23
  static constexpr int kLow = 2;                // the bin where the range begins
  float scale, to_whole, last;
  bool divide;  // false if the range is empty or infinite, or has keys without a logit

  __device__ __forceinline__ LogitBins(int bins, const Survey& found) {
    const float low = logit_of(found.low);
    scale = static_cast<float>(bins - 4) / (logit_of(found.high) - low);
    const float offset = kLow - low * scale;
    divide = scale > 0.0f && float_bits(scale) < kInfBits && fabsf(offset) < 1e6f;
    to_whole = kWhole + offset;
    last = near_whole_of(bins - 1);
  }
  // The key's bin as a float near kWhole. It ascends with the key, as each rounding does.
  __device__ __forceinline__ float near_whole(uint32_t key) const {
    return fmaf(logit_of(key), scale, to_whole);
  }
  // near_whole for any key: one below the range, or of no candidate (NaN), has bin 0; one above it the last.
  __device__ __forceinline__ float near_whole_or_end(uint32_t key) const {
    return fminf(fmaxf(near_whole(key), kWhole), last);
  }
  __device__ __forceinline__ static uint32_t bin(float near_whole) {
    return float_bits(near_whole) - float_bits(kWhole);
  }
  __device__ __forceinline__ static float near_whole_of(int32_t bin) {
    return bits_float(float_bits(kWhole) + static_cast<uint32_t>(bin));
  }
};

// The k-th of all, among the kth.here orders that the team has put. Each is compared with all others.
template <class Team>
__device__ __forceinline__ uint64_t kth_of_few(const Team& team, const KthBin& kth) {
  SelectScalars& s = team.scalars();
  const uint64_t* all = team.all_few();
  // Eight lanes compare one candidate, each with an eighth of all.
  constexpr int kLanes = 8, kOfWarp = kWarpSize / kLanes;
  for (int first = team.thread() / kWarpSize * kOfWarp; first < kth.here; first += team.threads() / kLanes) {
    const int i = first + threadIdx.x % kWarpSize / kLanes;
    const uint64_t own = i < kth.here ? all[i] : kNoCandidate;
    int32_t above = 0;
    for (int j = threadIdx.x % kLanes; j < kth.here; j += kLanes) above += all[j] > own;
    above = lanes_sum<kLanes>(above);
    if (i < kth.here && above + 1 == kth.remaining) s.base = own;
  }
  team.sync();
  return s.base;
}

// The k-th of candidates with survey `found`: a histogram of logits, then the few of one bin are compared.
template <class Team, class Candidates>
__device__ __forceinline__ uint64_t kth_surveyed(const Team& team, Candidates&& candidates, int32_t k,
                                                 const Survey& found) {
  if (const LogitBins bins(num_bins(team), found); bins.divide) {
    const auto bin_of = [&](uint64_t order) {
      return LogitBins::bin(bins.near_whole(static_cast<uint32_t>(order >> 32)));
    };
    const auto counts = [](uint64_t order) { return order >= kLeastOrder; };
    const KthBin kth = find_kth_bin(team, candidates, k, counts, bin_of);
    if (kth.here <= team.threads()) {
      take_from(team, candidates, [&](const Four& orders) {
        const auto kth_bin = static_cast<uint32_t>(kth.bin);
        FourPlaces places{};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t bin = bin_of(orders[j]);
          places.here |= static_cast<uint32_t>(counts(orders[j]) && bin == kth_bin) << j;
          places.above |= static_cast<uint32_t>(counts(orders[j]) && bin > kth_bin) << j;
        }
        if (places.here != 0) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            if (places.here >> j & 1) team.put_few(orders[j]);
        }
        return places;
      });
      return kth_of_few(team, kth);
    }
  }
  return kth_order(team, candidates, k, uint64_t{found.low} << 32, uint64_t{found.high} << 32 | UINT32_MAX);
}

}  // namespace mla_fp8::gpu
