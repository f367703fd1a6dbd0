#pragma once
// Those who choose in the merge on Hopper: the threads of a cluster, and what they share.
#include "cuda/device/cluster.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/indexer/select.cuh"

namespace mla_fp8::gpu::sm90_index {

inline constexpr int kMergeThreads = 512;

struct MergeShared {
  static constexpr int kBins = 2048, kMostBlocks = 8, kMostFew = kBins / 2;
  alignas(16) uint32_t bins[2][kBins];
  int32_t staged[kMaxIndexTopk];
  SelectScalars select;
  uint64_t copied;
  int32_t total, own;  // candidates of the cluster, places of the block
  // What the blocks of the cluster have told this one, and how many candidates of the k-th's bin it has.
  Survey surveys[kMostBlocks];
  int32_t sums[kMostBlocks], few;
};

// The threads of a cluster; each block has a histogram of its own candidates. A barrier of a cluster takes
// most of a microsecond, so each exchange has one: what a block tells has a place of its own, and histograms
// have two in turns. Whoever writes to a place again has passed the barrier of another exchange, behind all
// who read there.
struct ClusterTeam {
  static constexpr int kMostBlocks = MergeShared::kMostBlocks;
  static constexpr int kBinsPerThread = MergeShared::kBins / kMergeThreads;
  static_assert(kBinsPerThread == 4);
  MergeShared& s;
  int size, rank;
  mutable int turn = 0;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return s.bins[turn]; }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
  __device__ __forceinline__ int32_t* staged() const { return s.staged; }
  // The four bins that kth_of_bins asks the calling thread for, of all blocks: nobody else asks for them.
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const {
    if (size == 1) return bins;
    cluster_sync();
    const int first = MergeShared::kBins - 4 - 4 * threadIdx.x;
    constexpr int kAtOnce = 4;  // loads in flight
    uint4 sum{};
#pragma unroll 1
    for (int block = 0; block < size; block += kAtOnce) {
      uint4 parts[kAtOnce]{};
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        if (block + r < size)
          parts[r] = load_cluster_16(cluster_address(shared_address(bins + first), block + r));
#pragma unroll
      for (const uint4& part : parts) {
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
    }
    turn ^= 1;
    *reinterpret_cast<uint4*>(s.bins[turn] + first) = sum;
    return s.bins[turn];
  }
  // At most kMostFew, brought together where the last histogram was.
  __device__ __forceinline__ const uint64_t* gathered(const uint64_t* orders) const {
    if (size == 1) return orders;
    if (threadIdx.x == 0) s.few = s.select.kept;
    cluster_sync();
    const int lane = threadIdx.x % kWarpSize;
    const auto own =
        static_cast<int>(load_cluster_4(cluster_address(shared_address(&s.few), lane < size ? lane : rank)));
    const int end = warp_inclusive_sum(own);  // of the blocks up to the lane's
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
  // What the blocks found of their own.
  __device__ __forceinline__ Survey together(Survey own) const {
    if (size == 1) return own;
    tell(s.surveys, own);
    cluster_sync();
    const unsigned lane = threadIdx.x % kWarpSize;
    const Survey one = lane < static_cast<unsigned>(size) ? s.surveys[lane] : Survey{0, UINT32_MAX, 0};
    return {static_cast<int32_t>(lanes_sum(one.count)), ~lanes_max(~one.low), lanes_max(one.high)};
  }
  // The sums of the blocks before this one, and of all. Behind it, nobody reads another's memory.
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
  // To the block's place in all blocks.
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

// A block of a cluster that chooses by itself, where columns are staged later.
struct AloneTeam {
  static constexpr int kBinsPerThread = ClusterTeam::kBinsPerThread;
  MergeShared& s;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kMergeThreads; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ uint32_t* bins() const { return reinterpret_cast<uint32_t*>(s.staged); }
  __device__ __forceinline__ SelectScalars& scalars() const { return s.select; }
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const { return bins; }
};

}  // namespace mla_fp8::gpu::sm90_index
