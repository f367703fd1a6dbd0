#pragma once
// Segments (batch_invariant): a query's result is a fixed tree over runs of its keys, whoever works on them.
//
// The blocks of the valid keys are dealt to runs, as evenly as can be. The number of blocks decides how many
// runs there are (take_share), at most `segments * kTeams` (plan.h). A team adds up a run from zero, with
// bases of its own. Bases are whole numbers: a result moves to another base by a power of two, exactly. So
// only the order of additions counts. It is that of a binary tree over the runs, whose sides may be swapped;
// the left side has the odd run. The tree has a power of two of places, at least one for each team. A CTA
// takes neighbouring places, and so does each team: subtrees. A place without a run changes nothing wherever
// it is added, so more places give the same tree. Nor does it count how many heads a many_heads CTA has:
// heads do not change each other.
//
// Moving is exact unless a number becomes too small for a float: 2^126 times less than what it is added to.
// Zeros and all below 2^-100 leave as 0 (output_value in sm90/softmax.cuh).
#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/softmax.cuh"

namespace mla_fp8::gpu {

inline constexpr int kMaxRuns = 8;  // most runs of a team

// The number of runs with keys in the places before this one.
__device__ constexpr int runs_before(int place, int with_keys, int places_log2) {
  return (place * with_keys + (1 << places_log2) - 1) >> places_log2;
}

// The work of one CTA: the runs of its teams. One team has the blocks from first_block on. Several have
// blocks in turn in the ring's sequence, of at most num_blocks blocks.
template <int kTeams>
struct SegmentItem : SplitItem {
  int segments_log2, run_blocks;  // most runs; fewest blocks of a run, or 0 (plan.h)
  int runs;                       // places of a team
  unsigned all_log2;              // places of the query
  int with_keys;                  // runs of the query
  int each, longer;               // blocks of a run; the first `longer` ones have one more

  SegmentItem() = default;
  __device__ SegmentItem(const SplitItem& item, const KernelParams& params)
      : SplitItem(item), segments_log2(params.segments_log2), run_blocks(params.run_blocks) {}

  template <class C>
  __device__ void take_share(int num_keys, const Divider& splits) {
    constexpr int kTeamsLog2 = std::countr_zero(unsigned{kTeams});
    deal(ceil_div(num_keys, C::kBlockKeys), segments_log2 + kTeamsLog2);
    const int teams_log2 = 31 - __clz(splits.divisor()) + kTeamsLog2;
    all_log2 = max(32 - __clz(with_keys - 1), teams_log2);
    runs = 1 << (all_log2 - teams_log2);
    if constexpr (kTeams == 1) {
      first_block = first_block_of(first_run(0));
      num_blocks = first_block_of(first_run(1)) - first_block;
    } else {
      num_blocks = kTeams * (each + (longer > 0)) * ceil_div(with_keys, 1 << teams_log2);
    }
  }
  __device__ int first_run(int team) const { return (split * kTeams + team) * runs; }
  __device__ int first_block_of(int run) const {
    const int before = runs_before(run, with_keys, all_log2);
    return before * each + min(before, longer);
  }

  __device__ void deal(int blocks, int most_log2) {
    const int longest = longest_run(blocks, run_blocks, most_log2);
    with_keys = max(quotient(blocks + longest - 1, longest), 1);
    each = quotient(blocks, with_keys);
    longer = blocks - each * with_keys;
  }
  // Divides whole numbers below 2^16.
  __device__ static int quotient(int a, int b) {
    return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
  }

  // The same as in SplitItem.
  template <class C>
  __device__ bool has_stage(int i) const {
    const int place = i / C::kBlockStages, run = first_run(place % kTeams);
    return kTeams == 1 || first_block_of(run) + place / kTeams < first_block_of(run + runs);
  }
  template <class C>
  __device__ int first_rank(int i) const {
    const int place = i / C::kBlockStages, block = first_block_of(first_run(place % kTeams)) + place / kTeams;
    return block * C::kBlockKeys + i % C::kBlockStages * kStageRows;
  }
};

// An item of a query whose runs meet in a second grid. A CTA has neighbouring runs, as many as another or one
// less. Runs are numbered here without places that have none.
struct RunItem : SegmentItem<1> {
  using SegmentItem::SegmentItem;
  int first;

  static constexpr int kMostParts = kMaxRuns;
  __device__ static constexpr bool is_whole() { return false; }
  __device__ static int num_parts(const KernelParams& params) { return params.most_runs; }

  template <class C>
  __device__ void take_share(int num_keys, const Divider& splits) {
    deal(ceil_div(num_keys, C::kBlockKeys), segments_log2);
    first = static_cast<int>(splits(split * with_keys));
    runs = static_cast<int>(splits((split + 1) * with_keys)) - first;
    first_block = first_block_of(first);
    num_blocks = first_block_of(first + runs) - first_block;
  }
  __device__ bool has_last_run() const { return runs > 0 && first + runs == with_keys; }
  __device__ int first_run(int) const { return first; }
  __device__ int first_block_of(int run) const { return run * each + min(run, longer); }

  template <class C>
  __device__ bool has_stage(int) const {
    return true;
  }
  template <class C>
  __device__ int first_rank(int i) const {
    return SplitItem::first_rank<C>(i);
  }
};
// Adds up the floats f(0) to f(kRuns - 1) as their tree does.
template <int kRuns, class Fn>
__device__ __forceinline__ float sum_of_runs(Fn&& f) {
  constexpr int kPlacesLog2 = std::countr_zero(unsigned{kMaxRuns});
  return tree_sum<kMaxRuns>([&](int place) {
    const int run = runs_before(place, kRuns, kPlacesLog2);
    return runs_before(place + 1, kRuns, kPlacesLog2) > run ? f(run) : 0.0f;
  });
}

// Adds up the runs of a team, for a lane: O of kTiles tiles of 16 dims and kOctets octets of heads, bases and
// sums of two heads of each octet. Without kHasSums the logits warps have the sums, and the bases of results
// that wait. A result that waits for its neighbour in the tree lies in `waiting`, in local memory. With
// kFirstInRegisters a single run's stays in registers.
template <int kTiles, int kOctets, bool kHasSums, bool kFirstInRegisters>
class RunTotals {
 public:
  using Out = float[kTiles][kOctets][4];
  using OfHeads = float[kOctets][2];
  struct Result {
    float4 out[kTiles][kOctets];
    float2 base[kHasSums ? kOctets : 0], sum[kHasSums ? kOctets : 0];
  };
  static constexpr int kWaiting = std::countr_zero(unsigned{kMaxRuns}) - kFirstInRegisters;

  // `waiting` is the caller's: a class with an array that is read by an index has no registers.
  __device__ explicit RunTotals(Result (&waiting)[kWaiting]) : waiting_(waiting) {}

  // Ends a run that has keys: merges it with all that has waited for it, or saves it, and the next run begins
  // from zero. waiting_base(i, n): without sums, the base of the n-th octet of what waits since run i.
  template <class Item, class Base = std::nullptr_t>
  __device__ __forceinline__ void end_run(const Item& w, int team, int run, Out& out, OfHeads& base,
                                          OfHeads* sum, Base&& waiting_base = {}) {
    const int first = w.first_run(team), end = w.first_block_of(first + run + 1);
#pragma unroll 1
    for (int level = 0, i = run; w.runs >> level > 1; ++level, i /= 2) {
      if (i % 2 == 1) {
        const int since = (i << level) - 1;
        if (levels_ >> level & 1)
          merge(level, out, base, sum, [&](const Result& x, int n) {
            if constexpr (kHasSums) return x.base[n];
            else return waiting_base(since, n);
          });
        levels_ &= ~(1u << level);
      } else if (w.first_block_of(first + ((i + 2) << level)) != end) {
        save(level, out, base, sum);
        levels_ |= 1u << level;
        return;
      }
    }
  }

 private:
  template <class Base>
  __device__ __forceinline__ void merge(int level, Out& out, OfHeads& base, OfHeads* sum, Base&& base_of) {
    if constexpr (kFirstInRegisters) {
      if (level > 0) first_ = waiting_[level - 1];
      add(first_, out, base, sum, base_of);
    } else {
      add(waiting_[level], out, base, sum, base_of);
    }
  }
  template <class Base>
  __device__ __forceinline__ static void add(const Result& x, Out& out, OfHeads& base, OfHeads* sum,
                                             Base&& base_of) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      const float2 waited = base_of(x, n), to = {fmaxf(base[n][0], waited.x), fmaxf(base[n][1], waited.y)};
      const float2 f = {fast_exp2(waited.x - to.x), fast_exp2(waited.y - to.y)};
      const float2 g = {fast_exp2(base[n][0] - to.x), fast_exp2(base[n][1] - to.y)};
      base[n][0] = to.x, base[n][1] = to.y;
      if constexpr (kHasSums) {
        float (&s)[2] = (*sum)[n];
        s[0] = fmaf(x.sum[n].x, f.x, s[0] * g.x), s[1] = fmaf(x.sum[n].y, f.y, s[1] * g.y);
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float4 y = x.out[i][n];
        float (&o)[4] = out[i][n];
        o[0] = fmaf(y.x, f.x, o[0] * g.x), o[1] = fmaf(y.y, f.y, o[1] * g.y);
        o[2] = fmaf(y.z, f.x, o[2] * g.x), o[3] = fmaf(y.w, f.y, o[3] * g.y);
      }
    }
  }
  __device__ __forceinline__ void save(int level, Out& out, OfHeads& base, OfHeads* sum) {
    if constexpr (kFirstInRegisters) {
      if (level == 0) take(first_, out, base, sum);
      else take(waiting_[level - 1], out, base, sum);
    } else {
      take(waiting_[level], out, base, sum);
    }
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      base[n][0] = base[n][1] = kNoMax;
      if constexpr (kHasSums) (*sum)[n][0] = (*sum)[n][1] = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) out[i][n][0] = out[i][n][1] = out[i][n][2] = out[i][n][3] = 0.0f;
    }
  }
  __device__ __forceinline__ static void take(Result& to, const Out& out, const OfHeads& base,
                                              const OfHeads* sum) {
#pragma unroll
    for (int n = 0; n < kOctets; ++n) {
      if constexpr (kHasSums) {
        to.base[n] = {base[n][0], base[n][1]};
        to.sum[n] = {(*sum)[n][0], (*sum)[n][1]};
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        to.out[i][n] = {out[i][n][0], out[i][n][1], out[i][n][2], out[i][n][3]};
    }
  }

  unsigned levels_ = 0;  // bit i: a result of 2^i runs waits
  Result first_, (&waiting_)[kWaiting];
};

}  // namespace mla_fp8::gpu
