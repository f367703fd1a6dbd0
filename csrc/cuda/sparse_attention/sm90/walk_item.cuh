#pragma once
// The items of a CTA that goes through queries, and how their keys are surveyed ahead.
#include <cstddef>

#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/sm90/item.cuh"
#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// The queries that go alone, in shared memory: of a grid whose CTAs take tiles the others walk through them.
// CTAs past the last tile are among these.
struct AloneQueries {
  unsigned count, walker, walkers;  // this CTA is one of how many
  uint16_t queries[kMostTilesBesideWalk * kMaxTileQueries];
  uint32_t of_warps[kWarpSize];

  // By all threads, one for each tile. A barrier comes before it is read.
  template <int kThreads>
  __device__ void find(const SharedKeys& shared, int warp, int lane) {
    static_assert(kThreads >= kMostTilesBesideWalk);
    const unsigned tile = warp * kWarpSize + lane;
    const unsigned size = tile < shared.queries.count() ? shared.queries.size(tile) : 0;
    const bool is_taken = size > 0 && shared.length(tile) >= 0;
    const unsigned alone = is_taken ? 0 : size, up_to_here = warp_inclusive_sum(alone);
    const unsigned taken = __popc(__ballot_sync(kFullWarp, is_taken));
    const unsigned taken_before = __popc(__ballot_sync(kFullWarp, is_taken && tile < blockIdx.x));
    if (lane == kWarpSize - 1) of_warps[warp] = up_to_here | taken << 12 | taken_before << 22;
    block_barrier<kThreads>();
    const uint32_t of_warp = lane < kThreads / kWarpSize ? of_warps[lane] : 0;
    const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
    const uint32_t all = __reduce_add_sync(kFullWarp, of_warp);
    if (warp == 0 && lane == 0)
      count = all & 0xfff, walker = blockIdx.x - (all >> 22), walkers = gridDim.x - (all >> 12 & 0x3ff);
    uint16_t* const to = queries + (before & 0xfff) + up_to_here - alone;
    const unsigned first = shared.queries.first(tile);
    for (unsigned i = 0; i < alone; ++i) to[i] = static_cast<uint16_t>(first + i);
  }
};
template <class C>
inline constexpr bool kWalksBesideTiles = requires { C::kAlonePlace; };
template <class C>
__device__ __forceinline__ AloneQueries& alone_queries() {
  extern __shared__ __align__(128) uint8_t smem[];
  return *reinterpret_cast<AloneQueries*>(smem + C::kAlonePlace);
}

// One query and kHeads of its heads. A CTA's C::kQueries places take items in turns.
template <class C>
struct WalkItem : QueryHeads {
  // 32 bits: a division of 64 would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const KernelParams& params) {
    if constexpr (kWalksBesideTiles<C>) return alone_queries<C>().count;
    else return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks();
  }
  __device__ static unsigned first(const KernelParams& params, int place) {
    if constexpr (kWalksBesideTiles<C>) return alone_queries<C>().walker + alone_queries<C>().walkers * place;
    else return skip(params, blockIdx.x + gridDim.x * place);
  }
  __device__ static unsigned next(const KernelParams& params, unsigned i) {
    if constexpr (kWalksBesideTiles<C>) return i + alone_queries<C>().walkers * C::kQueries;
    else return skip(params, i + gridDim.x * C::kQueries);
  }

  // Whether this CTA has any item: by all threads, and a barrier of them.
  __device__ static bool has_any(const KernelParams& params) {
    bool has = !params.shared.lists;
    if (!has)
      for (unsigned i = blockIdx.x + gridDim.x * threadIdx.x; i < count(params); i += gridDim.x * C::kThreads)
        has |= !params.shared.has(params.head_blocks.word(i));
    return named_barrier_any(0, C::kThreads, has);
  }

  __device__ WalkItem(const KernelParams& params, unsigned i) : QueryHeads(of(params, i)) {}

 private:
  __device__ static QueryHeads of(const KernelParams& params, unsigned i) {
    if constexpr (kWalksBesideTiles<C>) return {i < count(params) ? alone_queries<C>().queries[i] : 0, 0};
    else return heads_of_item<C>(params, i);
  }
  // From i on the first whose query goes alone.
  __device__ static unsigned skip(const KernelParams& params, unsigned i) {
    if (params.shared.lists) [[unlikely]]
      while (i < count(params) && params.shared.has(params.head_blocks.word(i))) i += gridDim.x * C::kQueries;
    return i;
  }
};

// The warps that work on a query survey the keys of a later one, for themselves and its producers. A place
// for queries has two buffers for that.
template <class C>
class WalkSurveys {
 public:
  static constexpr int kWarps = C::kSurveyWarps, kReaders = C::kSurveyReaders;  // of a place

  __device__ WalkSurveys(uint8_t* smem, int place) : smem_(shared_address(smem)), place_(place) {}

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), kWarps * kWarpArrivals);
      mbarrier_init(empty(i), kReaders * kWarpArrivals);
    }
  }
  // By each of the warps that work on the place's i-th query.
  __device__ void write(int i, const SparseAttentionParams& p, const Keys& keys, int warp, int lane) const {
    wait_until_free<2>(empty(i), i);
    survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, map(i), [] {});
    mbarrier_arrive_warp(full(i), lane);
  }
  __device__ KeySurvey read(int i, int lane) const {
    wait_until_full<2>(full(i), i);
    return {map(i), load_shared_4(map(i) + kMapLength), lane};
  }
  __device__ bool is_there(int i) const { return __all_sync(kFullWarp, mbarrier_test(full(i), i / 2 & 1)); }
  __device__ uint32_t map(int i) const {
    return smem_ + MLA_SMEM(C, maps) + (place_ * 2 + i % 2) * kMapBytes;
  }
  // By each of its readers: of producers once they have found all keys.
  __device__ void release(int i, int lane) const { mbarrier_arrive_warp(empty(i), lane); }

 private:
  __device__ uint32_t full(int i) const {
    return smem_ + MLA_SMEM(C, survey_barriers) + (place_ * 2 + i % 2) * 16;
  }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }

  const uint32_t smem_;
  const int place_;
};

}  // namespace mla_fp8::gpu
