#pragma once
// The parameters of a launch of few_heads or many_heads, and the launch of its items.
#include <algorithm>
#include <bit>
#include <cstddef>

#include "cuda/device/sm90.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;
inline constexpr int kStageRows = 16;  // keys that one producer warp fetches at once: M of an mma
inline constexpr int kOctetHeads = 8;  // N of an mma

// The lists of a call's tiles of queries (ops/shared_keys.h), if there are any.
struct SharedKeys {
  const int32_t* lists;
  int64_t words;  // 4-byte words of a list
  int capacity;
  QueryTiles queries;

  __device__ const int32_t* list(unsigned tile) const { return lists + tile * words; }
  __device__ int length(unsigned tile) const { return min(__ldg(list(tile)), capacity); }
  __device__ __forceinline__ bool has(int64_t query) const {
    if (!lists) return false;
    const int tile = tile_of(static_cast<unsigned>(query));
    return tile >= 0 && length(tile) >= 0;
  }

 private:
  // tile_of() returns the tile that has a query, or -1. Its code is short: walks have it in many places.
  __device__ __forceinline__ int tile_of(unsigned query) const {
    unsigned group = query / queries.group, in_group = query % queries.group;
    if (queries.query_start_loc) {
      group = 0;
#pragma unroll 1
      for (unsigned end = queries.num_groups; end - group > 1;) {
        const unsigned middle = (group + end) / 2;
        (queries.start_of(middle) <= static_cast<int>(query) ? group : end) = middle;
      }
      const QueryTiles::Queries all = queries.group_at(group);
      in_group = query - all.first;
      if (in_group >= all.count) return -1;
    }
    return group * queries.of_group + in_group / queries.tile;
  }
};

// Bytes of the list of valid positions (list_positions), which lies behind all else if there is room for it.
template <class C>
inline constexpr int kPositionsBytes =
    !C::kWalks && C::kSmemBytes + kMapWords * kWarpSize * 2 <= kMaxSharedBytes ? kMapWords * kWarpSize * 2
                                                                               : 0;
template <class C>
__device__ __forceinline__ bool has_positions(unsigned length) {
  return kPositionsBytes<C> > 0 && part_size(length) == kWarpSize;
}
template <class C>
__device__ __forceinline__ uint32_t positions_of(uint32_t smem) {
  return smem + C::kSmemBytes;
}

struct KernelParams {
  SparseAttentionParams p;
  Divider splits;                 // CTAs that share a query's keys
  Divider head_blocks;            // CTAs of kHeads heads for one query
  bool follows;                   // plan.h
  int segments_log2, run_blocks;  // most runs of a query; fewest blocks of a run (sm90/segments.cuh)
  int most_runs;                  // most runs of a query, whichever keys are valid
  // For many_heads over neighbours (sm90/many_heads/neighbours.cuh):
  int tile_queries;      // 1: queries go alone
  int num_tiles;         // tiles whose keys all CTAs share (shares.cuh), or 0
  Divider page_size[2];  // one for each scope
  SharedKeys shared;     // one launch takes tiles with a list, another the other queries

  __device__ int num_splits() const { return static_cast<int>(splits.divisor()); }
  __device__ int num_head_blocks() const { return static_cast<int>(head_blocks.divisor()); }
};

// Runs a CTA of a kernel: one thread makes the barriers by init(smem), all threads call fn(smem, warp, lane).
// There is no code for other GPUs.
template <class Init, class Fn>
__device__ __forceinline__ void run_cta(Init&& init, Fn&& fn) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t smem[];
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  if (thread == 0) {
    init(smem);
    mbarrier_init_fence();
  }
  fn(smem, warp, lane);
#endif
}
// Ends a CTA that finds nothing to do. It is enough that one of these waits in end_grid().
__device__ __forceinline__ void leave_grid(bool follows) {
  if (blockIdx.x == 0) end_grid(follows);
}

template <class C>
KernelParams launch_items(void (*kernel)(KernelParams), const SparseAttentionParams& p, const Plan& plan,
                          gpuStream_t stream) {
  const SharedKeysShape shared(p);
  const int head_blocks = plan.tile_queries > 1 || plan.takes_lists ? 1 : ceil_div(p.num_q_heads, C::kHeads);
  const int64_t tiles =
      plan.takes_lists ? shared.queries.count() : ceil_div(p.num_tokens, int64_t{plan.tile_queries});
  const int64_t items = tiles * head_blocks;
  const KernelParams params{
      .p = p,
      .splits = Divider(plan.splits),
      .head_blocks = Divider(head_blocks),
      .follows = plan.follows,
      .segments_log2 = std::countr_zero(unsigned{kSegmentsOfQuery}),
      .run_blocks = run_blocks(p),
      .most_runs = plan.most_runs,
      .tile_queries = plan.tile_queries,
      .num_tiles = shares_tiles(plan) ? static_cast<int>(items) : 0,
      .page_size = {Divider(p.scopes[0].page_size), Divider(p.scopes[p.num_scopes - 1].page_size)},
      .shared = {p.shared_keys, shared.words, static_cast<int>(shared.capacity), shared.queries},
  };
  const bool walks = plan.variant.schedule == Schedule::kWalk;
  launch(kernel,
         {.grid = walks                ? std::min<int64_t>(ceil_div(items, int64_t{C::kQueries}), plan.ctas)
                  : shares_tiles(plan) ? plan.ctas
                                       : items * plan.splits,
          .block = C::kThreads,
          .stream = stream,
          .smem = C::kSmemBytes + kPositionsBytes<C>,
          .cluster = C::kParts ? 1 : plan.splits},
         params);
  return params;
}

}  // namespace mla_fp8::gpu
