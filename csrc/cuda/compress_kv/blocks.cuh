#pragma once
// Shared by both forms of ratio 128. A cluster looks through up to 128 tokens for blocks to pool or fold.
// Each of its blocks of threads does that for a slice of the dims, and the first one finishes the row.
// Without clusters a block of threads takes the slices in turn.
#include "cuda/compress_kv/pool.cuh"
#include "cuda/device/launch.cuh"
#if MLA_FP8_PTX
#include "cuda/device/cluster.cuh"
#include "cuda/device/shared.cuh"
#endif

namespace mla_fp8::gpu {

inline constexpr int kBlockRatio = 128;
inline constexpr int kClusterBlocks = 2;
template <int kCluster>
inline constexpr int kSlices = kCluster > 1 ? kCluster : 4;
template <int kCluster>
inline constexpr int kSliceDims = kHeadDimV / kSlices<kCluster>;
template <int kCluster>
inline constexpr int kSliceVectors = 2 * kSliceDims<kCluster> / 4;  // vectors of a row's kv and score

inline constexpr int kMaxTokens = 128;  // tokens of a cluster
// An H200 runs 66 clusters of two at once, with a block of threads an SM. Of clusters of four it runs 60, two
// an SM, so the blocks of 8 K tokens would take a second turn. With 66 clusters some would have two blocks of
// tokens, and others none.
inline constexpr int64_t kClusters = 64;
inline constexpr int kMaskWords = kMaxTokens / kWarpSize;
inline constexpr int64_t kFewTokens = 264, kFewFolds = 528;  // a block of threads each, without clusters
inline int64_t tokens_of_cluster(int64_t num_tokens, int cluster, int64_t few) {
  if (cluster == 1 && num_tokens <= few) return 1;
  const int64_t tokens = ceil_div(num_tokens, kClusters);
  return tokens < kMaxTokens ? tokens : kMaxTokens;
}

// The tokens of a block of threads.
struct alignas(16) TokensShared {
  CompressRequest request[kMaxTokens];
  Closing closing[kMaxTokens];  // of tokens in `work`
  uint32_t work[kMaskWords];    // bits of tokens that have a block to pool or to fold
};
// The pooled dims. They are complete in the first block of threads of the cluster.
struct alignas(16) PooledShared {
  float dims[kHeadDimV];
};

template <int kCluster>
struct Cluster {
  static_assert(kCluster == 1 || kCluster == kClusterBlocks);

  static __device__ __forceinline__ int rank() {
    return kCluster > 1 ? static_cast<int>(blockIdx.x % kCluster) : 0;
  }
  static __device__ __forceinline__ int64_t index() { return blockIdx.x / kCluster; }
  static __device__ __forceinline__ void sync() {
    if constexpr (kCluster > 1) {
#if __CUDA_ARCH__ >= 900
      cluster_sync();
#endif
    } else {
      __syncthreads();
    }
  }
  // Stores a dim in the first block's memory, where it is visible after `sync`.
  static __device__ __forceinline__ void put(PooledShared& pooled, int dim, float value) {
    if constexpr (kCluster > 1) {
#if __CUDA_ARCH__ >= 900
      store_cluster_float(cluster_address(shared_address(&pooled.dims[dim]), 0), value);
#endif
    } else {
      pooled.dims[dim] = value;
    }
  }
};

// Sets the bits of the warp's tokens for which `is_set`.
__device__ __forceinline__ void put_bits(uint32_t (&words)[kMaskWords], bool is_set) {
  const uint32_t bits = __ballot_sync(kFullWarp, is_set);
  if (threadIdx.x % kWarpSize == 0) words[threadIdx.x / kWarpSize] = bits;
}

// Lists in which each warp has 32 places, and uses as many as its word has bits. count_bits: their number;
// place_of: the place of the k-th.
__device__ __forceinline__ int count_bits(const uint32_t (&words)[kMaskWords]) {
  int count = 0;
#pragma unroll
  for (int w = 0; w < kMaskWords; ++w) count += __popc(words[w]);
  return count;
}
__device__ __forceinline__ int place_of(const uint32_t (&words)[kMaskWords], int k) {
  int w = 0;
#pragma unroll
  for (int i = 0; i + 1 < kMaskWords; ++i)
    if (w == i && k >= __popc(words[i])) k -= __popc(words[i]), w = i + 1;
  return w * kWarpSize + k;
}

// Calls work(token) for each bit, in order.
template <class Work>
__device__ __forceinline__ void for_bits(const uint32_t (&words)[kMaskWords], const Work& work) {
#pragma unroll 1
  for (int w = 0; w < kMaskWords; ++w)
#pragma unroll 1
    for (uint32_t bits = words[w]; bits != 0; bits &= bits - 1)
      work(w * kWarpSize + __popc((bits & (~bits + 1)) - 1));
}

// The end of the call's positions in the block of tokens with position q.
__device__ __forceinline__ int64_t block_end(const CompressRequest& r, int64_t q) {
  const int64_t end = q - q % kBlockRatio + kBlockRatio;
  return end < r.end() ? end : r.end();
}

}  // namespace mla_fp8::gpu
