#pragma once
// The teams of threads that choose in the merge on Hopper, and their memory. select.cuh says what a team has.
#include "cuda/device/cluster.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kMergeThreads = 512, kMergeGroups = kMergeThreads / kGroup;

struct MergeShared {
  static constexpr int kBins = 2048, kMostBlocks = 8, kMostFew = kBins / 2;
  static constexpr int kGroups = kMergeThreads / kWarpSize;  // of bins: a warp adds up each
  alignas(16) uint32_t bins[2][kBins];
  int32_t staged[kMaxIndexTopk];
  SelectScalars select;
  uint64_t copied;
  // For GroupTeam: one of each a warpgroup.
  SelectScalars group_select[kMergeGroups];
  uint64_t group_copied[kMergeGroups];
  int32_t total, own;  // candidates of all blocks; entries of this block
  // The cluster's blocks tell this one; `few`: how many candidates of this block are in the k-th's bin.
  Survey surveys[kMostBlocks];
  int32_t sums[kMostBlocks], few;
  int32_t above_before, few_before;  // what blocks before this one have above the k-th's bin, and in it
  uint32_t groups[2][kMostBlocks][kGroups];
};

// The threads of a cluster. Each block has a histogram of its own candidates. A barrier of a cluster takes
// most of a microsecond, so each exchange has one. For that, each block writes to memory of its own, and
// histograms alternate between two. All readers have passed a later exchange before either is written again.
template <bool kAlone>
struct ClusterTeam {
  static constexpr int kMostBlocks = MergeShared::kMostBlocks;
  static constexpr int kGroups = MergeShared::kGroups;
  static constexpr int kBinsPerThread = MergeShared::kBins / kMergeThreads;
  MergeShared& s;
  int size, rank;
  mutable int turn = 0;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return s.bins[turn]; }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
  __device__ __forceinline__ int32_t* staged() const { return s.staged; }
  // Finds the bin of the k-th among the candidates of all blocks. Blocks tell each other how many candidates
  // are in each group of bins, then fetch from each other the bins of the k-th's group.
  __device__ __forceinline__ KthBin kth_of_bins(int32_t k) const {
    static_assert(kBinsPerThread == 4 && kGroups * kWarpSize == kMergeThreads && kGroups <= kWarpSize);
    constexpr int kGroupBins = MergeShared::kBins / kGroups;  // the bins of a warp
    const int lane = threadIdx.x % kWarpSize;
    __syncthreads();
    const uint4 own = reinterpret_cast<const uint4*>(s.bins[turn])[threadIdx.x];
    const uint32_t sum = lanes_sum(own.x + own.y + own.z + own.w);
    if (lane < size)
      store_cluster_4(cluster_address(shared_address(&s.groups[turn][rank][threadIdx.x / kWarpSize]), lane),
                      sum);
    meet();
    if (threadIdx.x < kWarpSize) {
      // A lane has a group, then four bins of the k-th's group, both in descending order.
      uint32_t group_of[kMostBlocks];
      int32_t here = 0;
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r) {
        group_of[r] = r < size && lane < kGroups ? s.groups[turn][r][kGroups - 1 - lane] : 0;
        here += static_cast<int32_t>(group_of[r]);
      }
      const int32_t upto = warp_inclusive_sum(here);
      const uint32_t has_kth = __ballot_sync(kFullWarp, upto - here < k && k <= upto);
      const int group_lane = max(__ffs(static_cast<int>(has_kth)) - 1, 0);
      const int32_t above_group = __shfl_sync(kFullWarp, upto - here, group_lane);
      const int first = (kGroups - group_lane) * kGroupBins - 4 - 4 * lane;
      uint4 bins_of[kMostBlocks], all{};
#pragma unroll
      for (int r = 0; r < kMostBlocks; ++r) {
        bins_of[r] = {};
        if (r < size) bins_of[r] = load_cluster_16(cluster_address(shared_address(s.bins[turn] + first), r));
      }
#pragma unroll
      for (const uint4& one : bins_of) all = {all.x + one.x, all.y + one.y, all.z + one.z, all.w + one.w};
      // `above` ends at a bin of the lane's four: those skipped are above the k-th's.
      const auto total = static_cast<int32_t>(all.x + all.y + all.z + all.w);
      int32_t above = above_group + warp_inclusive_sum(total) - total, in_bin = static_cast<int32_t>(all.w);
      const uint32_t is_kth = __ballot_sync(kFullWarp, above < k && k <= above + total);
      const int kth_lane = __ffs(static_cast<int>(is_kth)) - 1;
      int skipped = 0;
#pragma unroll
      for (int i = 1; i < 4; ++i) {
        if (skipped < i - 1 || above + in_bin >= k) continue;
        above += in_bin;
        in_bin = static_cast<int32_t>(i == 1 ? all.z : i == 2 ? all.y : all.x);
        skipped = i;
      }
      if (lane == 0) s.select.kth = {0, k, 0};  // kept if all blocks have fewer than k
      __syncwarp();
      if (lane == kth_lane && has_kth != 0) s.select.kth = {first + 3 - skipped, k - above, in_bin};
      // How many candidates the blocks before this one have in bins above the k-th's, and in it.
      uint32_t own_above = 0, own_here = 0;
#pragma unroll
      for (int r = 0; r < kMostBlocks - 1; ++r) {
        if (r >= rank) break;
        const uint4 four = bins_of[r];
        if (lane < group_lane) own_above += group_of[r];
        if (lane < kth_lane) own_above += four.x + four.y + four.z + four.w;
        if (lane != kth_lane) continue;
        own_above += (skipped > 0 ? four.w : 0) + (skipped > 1 ? four.z : 0) + (skipped > 2 ? four.y : 0);
        own_here += skipped == 0 ? four.w : skipped == 1 ? four.z : skipped == 2 ? four.y : four.x;
      }
      own_above = lanes_sum(own_above);
      own_here = lanes_sum(own_here);
      if (lane == 0) {
        s.above_before = static_cast<int32_t>(own_above);
        s.few_before = static_cast<int32_t>(own_here);
        s.select.kept = 0;
      }
    }
    __syncthreads();
    turn ^= 1;
    return s.select.kth;
  }
  // Puts one of the few in the k-th's bin. They go to all blocks: kth_of_bins found out how many each has.
  __device__ __forceinline__ void put_few(uint64_t order) const {
    if constexpr (kAlone) return put_where_bins_were(*this, order);
    const int place = s.few_before + atomicAdd(&s.select.kept, 1);
    const uint32_t to = shared_address(reinterpret_cast<uint64_t*>(bins()) + place);
#pragma unroll 1
    for (int r = 0; r < size; ++r) store_cluster_8(cluster_address(to, r), order);
  }
  __device__ __forceinline__ const uint64_t* all_few() const {
    meet();
    return reinterpret_cast<const uint64_t*>(bins());
  }
  // How many chosen ones the blocks before this one have, after all_few: of the few, those from `least` on.
  __device__ __forceinline__ int32_t chosen_before(uint64_t least) const {
    const int i = threadIdx.x;
    if constexpr (kAlone) return 0;
    return s.above_before +
           __syncthreads_count(i < s.few_before && reinterpret_cast<const uint64_t*>(bins())[i] >= least);
  }
  // The few of all blocks, at most kMostFew, if only scalars().kept says how many a block has. They are
  // brought together in the bins of the last histogram.
  __device__ __forceinline__ const uint64_t* gathered(const uint64_t* orders) const {
    if (size == 1) return orders;
    if (threadIdx.x == 0) s.few = s.select.kept;
    cluster_sync();
    const int lane = threadIdx.x % kWarpSize;
    const auto own =
        static_cast<int>(load_cluster_4(cluster_address(shared_address(&s.few), lane < size ? lane : rank)));
    const int end = warp_inclusive_sum(own);  // where the few of the lane's block end
    const int all_end = __shfl_sync(kFullWarp, end, size - 1);
    auto* all = reinterpret_cast<uint64_t*>(s.bins[turn ^ 1]);
#pragma unroll 1
    for (int first = 0; first < all_end; first += kMergeThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      int block = 0, before = 0;
#pragma unroll
      for (int r = 0; r < kMostBlocks - 1; ++r) {
        const int place = __shfl_sync(kFullWarp, end, r);
        if (r < size - 1 && i >= place) block = r + 1, before = place;
      }
      if (i >= all_end) continue;
      const uint32_t from = cluster_address(shared_address(orders + i - before), block);
      const uint32_t low = load_cluster_4(from), high = load_cluster_4(from + 4);
      all[i] = uint64_t{high} << 32 | low;
    }
    __syncthreads();
    return all;
  }
  // Count, least and largest key over all blocks.
  __device__ __forceinline__ Survey together(Survey own) const {
    if (size == 1) return own;
    tell(s.surveys, own);
    cluster_sync();
    const unsigned lane = threadIdx.x % kWarpSize;
    const Survey one = lane < static_cast<unsigned>(size) ? s.surveys[lane] : Survey{0, UINT32_MAX, 0};
    return {static_cast<int32_t>(lanes_sum(one.count)), ~lanes_max(~one.low), lanes_max(one.high)};
  }
  // The sum over blocks before this one, and over all. Afterwards no block reads another's memory.
  struct Sums {
    int32_t before, all;
  };
  __device__ __forceinline__ Sums sums(int32_t own) const {
    if (size == 1) return {0, own};
    tell(s.sums, own);
    cluster_sync();
    const unsigned lane = threadIdx.x % kWarpSize;
    const int32_t one = lane < static_cast<unsigned>(size) ? s.sums[lane] : 0;
    return {lanes_sum(lane < static_cast<unsigned>(rank) ? one : 0), lanes_sum(one)};
  }

 private:
  // Waits until what blocks have told each other is there.
  __device__ __forceinline__ void meet() const {
    if (size == 1) __syncthreads();
    else cluster_sync();
  }
  // Writes `own` to this block's place in all blocks.
  template <class T>
  __device__ __forceinline__ void tell(T* places, const T& own) const {
    if (threadIdx.x >= static_cast<unsigned>(size)) return;
    const uint32_t to = cluster_address(shared_address(places + rank), threadIdx.x);
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &own, sizeof own);
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; ++i) store_cluster_4(to + 4 * i, words[i]);
  }
};

// The threads of a warpgroup, for a row of their own. Columns are put in order where the keys were.
struct GroupTeam {
  static constexpr int kBinsPerThread = 4;
  static_assert(kBinsPerThread * kMergeThreads <= MergeShared::kBins);
  MergeShared& s;
  int group;
  int32_t* staged_;

  __device__ __forceinline__ static int thread() { return threadIdx.x % kGroup; }
  __device__ __forceinline__ static constexpr int threads() { return kGroup; }
  __device__ __forceinline__ static void sync() { group_sync(); }
  __device__ __forceinline__ uint32_t* bins() const { return s.bins[0] + group * kBinsPerThread * kGroup; }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.group_select[group]; }
  __device__ __forceinline__ int32_t* staged() const { return staged_; }
  __device__ __forceinline__ void put_few(uint64_t order) const { put_where_bins_were(*this, order); }
  __device__ __forceinline__ const uint64_t* all_few() const { return few_where_bins_were(*this); }
};

// One block of a cluster, which chooses by itself. Its bins lie where columns are staged later.
struct AloneTeam {
  static constexpr int kBinsPerThread = ClusterTeam<true>::kBinsPerThread;
  MergeShared& s;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return reinterpret_cast<uint32_t*>(s.staged); }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
};

using gpu::kth_of_bins;
__device__ __forceinline__ KthBin kth_of_bins(const ClusterTeam<false>& team, int32_t k) {
  return team.kth_of_bins(k);
}

}  // namespace mla_fp8::gpu::sm90_index
