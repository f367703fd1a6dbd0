#pragma once
// The items of a CTA that walks through queries, and the survey of their keys ahead.
#include <cstddef>

#include "cuda/sparse_attention/sm90/item.cuh"

namespace mla_fp8::gpu {

// One query and kHeads of its heads. A CTA's C::kQueries places take items in turns.
template <class C>
struct WalkItem : QueryHeads {
  // 32 bits: a 64-bit division would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const KernelParams& params) {
    return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks();
  }
  __device__ static unsigned first(const KernelParams& params, int place) {
    return skip(params, blockIdx.x + gridDim.x * place);
  }
  __device__ static unsigned next(const KernelParams& params, unsigned i) {
    return skip(params, i + gridDim.x * C::kQueries);
  }

  // Returns whether this CTA has any item. All threads call it, and it is a barrier.
  __device__ static bool has_any(const KernelParams& params) {
    bool has = !params.shared.lists;
    if (!has)
      for (unsigned i = blockIdx.x + gridDim.x * threadIdx.x; i < count(params); i += gridDim.x * C::kThreads)
        has |= !params.shared.has(params.head_blocks.word(i));
    return named_barrier_any(0, C::kThreads, has);
  }

  __device__ WalkItem(const KernelParams& params, unsigned i)
      : QueryHeads(QueryHeads::of_item<C>(params, i)) {}

 private:
  // Returns the first item from i on whose query goes alone.
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
  static constexpr int kWarps = C::kSurveyWarps, kReaders = C::kSurveyReaders;  // per place

  __device__ WalkSurveys(uint8_t* smem, int place) : smem_(shared_address(smem)), place_(place) {}

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), kWarps * kWarpArrivals);
      mbarrier_init(empty(i), kReaders * kWarpArrivals);
    }
  }
  // Each warp that works on the place's queries calls it, to survey the i-th one.
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
  // Each reader calls it; a producer once it has found all keys.
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
