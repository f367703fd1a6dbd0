#pragma once
// Segments and runs: the roles of a CTA whose keys are dealt to runs (sm90/segments.cuh). In kSegments it
// adds its runs up, in kRuns it leaves the result of each to the second grid.
#include <type_traits>
#include <utility>

#include "cuda/sparse_attention/sm90/many_heads/split.cuh"
#include "cuda/sparse_attention/sm90/segments.cuh"

namespace mla_fp8::gpu {

template <class C>
class RunLogits : SplitLogits<C> {
 public:
  using Base = SplitLogits<C>;
  using Base::Base;

  __device__ void run() {
    this->begin_query();
    attend_to_runs();
    if constexpr (C::kRuns) leave_runs();
    else end_runs();
    named_barrier(kBarrierFinish, C::kWorkers);
  }

 private:
  using Base::fresh_, Base::kOctets, Base::lane_, Base::member_, Base::params_, Base::sum_, Base::w_,
      Base::x_;

  // A run's base is there with the weights of its last block; sums are added up at the end.
  __device__ __forceinline__ void attend_to_runs() {
    const int first = w_.first_run(0), head = member_ * kWarpSize + lane_;
    int block = 0;
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run) {
      const int end = w_.first_block_of(first + run + 1) - w_.first_block;
      if (block == end) {
        if (head < C::kHeads) {
          x_.run_bases(run)[head] = kNoMax, x_.run_sums(run)[head] = 0.0f;
          write_node_base(run, head, kNoMax);
        }
        continue;
      }
#pragma unroll 1
      for (; block < end; ++block)
        this->attend(block, [&] {
          if (block + 1 == end && head < C::kHeads)
            x_.run_bases(run)[head] = fresh_ ? kNoMax : x_.head_state()[head].y + kWeightLog2;
        });
      // All warps have read the bases since the last block began.
      write_sums();
      if (head < C::kHeads) {
        write_node_base(run, head, x_.run_bases(run)[head]);
        x_.head_state()[head].y = 0.0f;
      }
      fresh_ = true;
      named_barrier(kBarrierLogits, Base::kLogitThreads);
      if (head < C::kHeads) x_.run_sums(run)[head] = sum_of_warps(head);
    }
  }

  // The base of the largest subtree that ends with the run. The value warps read it in a later run.
  __device__ void write_node_base(int run, int head, float base) const {
    for (int level = 0, i = run; i % 2 == 1; ++level, i /= 2)
      base = fmaxf(base, x_.node_bases((i << level) - 1)[head]);
    x_.node_bases(run)[head] = base;
  }

  // Writes this warp's sums, which begin again.
  __device__ __forceinline__ void write_sums() {
    float sums[2 * kOctets];
#pragma unroll
    for (int i = 0; i < 2 * kOctets; ++i) sums[i] = sum_[i / 2][i % 2], sum_[i / 2][i % 2] = 0.0f;
    Base::write_sums(sums, x_.warp_max(member_));
  }
  __device__ float sum_of_warps(int head) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kLogitWarps; ++i) sum += x_.warp_max(i)[head];
    return sum;
  }

  // Leaves (base, sum) of each run. The CTA of the last one says that there are no more.
  __device__ __forceinline__ void leave_runs() const {
    const int head = member_ * kWarpSize + lane_;
    if (head >= C::kHeads) return;
    const auto stats = [&](int run) -> float2& { return QueryPart<C>::of_run(params_, run).stats(head); };
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run)
      stats(w_.first + run) = {x_.run_bases(run)[head], x_.run_sums(run)[head]};
    if (w_.has_last_run())
      for (int run = w_.with_keys; run < params_.most_runs; ++run) stats(run) = {kNoPartial, 0.0f};
  }

  // The same as end_query.
  __device__ __forceinline__ void end_runs() const {
    const int head = member_ * kWarpSize + lane_;
    if (head >= C::kHeads) return;
    float base = kNoMax;
#pragma unroll 1
    for (int run = 0; run < w_.runs; ++run) base = fmaxf(base, x_.run_bases(run)[head]);
    const float sum = tree_sum<C::kMostRuns>([&](int run) {
      return run < w_.runs ? x_.run_sums(run)[head] * fast_exp2(x_.run_bases(run)[head] - base) : 0.0f;
    });
    this->finish(head, base, sum, -INFINITY);
  }
};

template <class C>
class RunValues : public SplitValues<C> {
 public:
  using Base = SplitValues<C>;
  using Base::Base, Base::kOctets;

  __device__ void run(const KernelParams& params, const typename C::Item& w) {
    if constexpr (C::kRuns) {
      leave_runs(params, w);
    } else {
      this->clear();
      attend_to_runs(w);
    }
    named_barrier(kBarrierFinish, C::kWorkers);
  }

 private:
  using Base::out_, Base::x_;

  // Leaves the result of each run.
  __device__ __forceinline__ void leave_runs(const KernelParams& params, const typename C::Item& w) {
    int block = 0;
#pragma unroll 1
    for (int run = w.first; run < w.first + w.runs; ++run) {
      const int end = w.first_block_of(run + 1) - w.first_block;
      this->clear();
      this->attend(block, end - block);
      block = end;
      this->leave(QueryPart<C>::of_run(params, run));
    }
  }

  __device__ __forceinline__ void attend_to_runs(const typename C::Item& w) {
    using Totals = RunTotals<C::kChunks, kOctets, false, C::kFirstInRegisters>;
    typename Totals::Result waiting[Totals::kWaiting];
    Totals totals(waiting);
    const int first = w.first_run(0);
    int block = 0;
#pragma unroll 1
    for (int run = 0; run < w.runs; ++run) {
      const int end = w.first_block_of(first + run + 1) - w.first_block;
      if (block == end) continue;
      this->attend(block, end - block);
      block = end;
      int lane;  // found anew: else addresses by it would be found once, and spilled
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      const auto pair = [&](const float* bases, int n) {
        return reinterpret_cast<const float2*>(bases)[n * kOctetHeads / 2 + lane % 4];
      };
      float base[kOctets][2];
#pragma unroll
      for (int n = 0; n < kOctets; ++n) {
        const float2 x = pair(x_.run_bases(run), n);
        base[n][0] = x.x, base[n][1] = x.y;
      }
      totals.end_run(w, 0, run, out_, base, nullptr,
                     [&](int since, int n) { return pair(x_.node_bases(since), n); });
    }
  }
};

template <class C>
  requires(C::kSegments)
struct Roles<C> {
  using Logits = RunLogits<C>;
  using Values = RunValues<C>;
};

// ---- the second grid ------------------------------------------------------------------------------------

// The values of runs stay floats: their sum has to be the same bits wherever they are added up.
template <class C>
  requires(C::kRuns)
struct PartValues<C> {
  static constexpr int kCount = 8, kFloatsOfHead = kFloatsOfRun;
  float values[kCount];

  __device__ static void write(uint8_t* part, int lanes, int at, const float (&x)[kCount]) {
    auto* const to = reinterpret_cast<float4*>(part);
    to[at] = {x[0], x[1], x[2], x[3]}, to[lanes + at] = {x[4], x[5], x[6], x[7]};
  }
  struct Place {
    const uint8_t *first, *second;
    __device__ Place(const uint8_t* part, int lanes, int at)
        : first(part + at * 16), second(part + (lanes + at) * 16) {
      keep_found(first), keep_found(second);
    }
    __device__ PartValues read(int offset, bool is_there) const {
      float4 a{}, b{};
      if (is_there) {
        a = __ldcg(reinterpret_cast<const float4*>(first + offset));
        b = __ldcg(reinterpret_cast<const float4*>(second + offset));
      }
      return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }
  };
  // Adds up the parts x of a head, whose (base, sum) lane 4 i + t has, as their tree does.
  template <int kMost>
  __device__ __forceinline__ static void add_up(float2 stats, float max, int t, const PartValues (&x)[kMost],
                                                float& total, float (&sum)[kCount]) {
    const float weight = fast_exp2(stats.x - max);
    float weights[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) weights[i] = __shfl_sync(kFullWarp, weight, 4 * i + t);
    const int runs = __popc(__ballot_sync(kFullWarp, t == 0 && stats.x != kNoPartial));
    float sums[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) sums[i] = __shfl_sync(kFullWarp, stats.y * weight, 4 * i + t);
    const auto add_runs = [&](auto num) {
      total = sum_of_runs<num()>([&](int i) { return sums[i]; });
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        sum[j] = sum_of_runs<num()>([&](int i) { return x[i].values[j] * weights[i]; });
    };
    [&]<int... i>(std::integer_sequence<int, i...>) {
      ((runs == i + 1 ? add_runs(constant<i + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, kMaxRuns>{});
  }
};

}  // namespace mla_fp8::gpu
