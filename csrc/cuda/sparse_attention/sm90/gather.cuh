#pragma once
// The gather: each producer warp fetches every kProducers-th slot of 16 valid keys, one bulk copy per key.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"

namespace mla_fp8::gpu {

// What one CTA works on: blocks [first_block, first_block + num_blocks) of the valid keys of one row. The
// blocks are known after the survey of its keys.
struct Work {
  Keys keys;
  int64_t token;  // the query
  int split, first_head;
  int first_block, num_blocks;

  template <class C>
  __device__ void take_share(int num_keys, int num_splits) {  // a power of two
    const int blocks = ceil_div(num_keys, C::kBlockTokens);
    const int each = blocks >> (__ffs(num_splits) - 1);
    const int longer = blocks & (num_splits - 1);  // the first `longer` splits take one more
    first_block = split * each + min(split, longer);
    num_blocks = each + (split < longer);
  }
};

template <class C>
__device__ Work find_work(const TeamParams& params) {
  const unsigned splits = params.num_splits, cluster = blockIdx.x >> (__ffs(splits) - 1);
  // The head blocks of a row run together: it is read from L2 again.
  const int64_t token = cluster / params.num_head_blocks;
  return {
      .keys = Keys(params.p, token),
      .token = token,
      .split = static_cast<int>(blockIdx.x & (splits - 1)),
      .first_head = static_cast<int>(cluster % params.num_head_blocks) * C::kHeads,
  };
}

// All warps of a CTA that works on one row: its valid keys, of which the CTA takes its share. `load_query` is
// called once the entries are on their way: behind Q they would come late, and the first rows with them.
template <class C, class LoadQuery>
__device__ __forceinline__ KeySurvey survey_row(const TeamParams& params, Work& w, uint8_t* smem, int warp,
                                                int lane, LoadQuery&& load_query) {
  constexpr int kWarps = C::kThreads / kWarpSize;
  survey_keys<kWarps, 6>(KeySource(params.p, w.keys), warp, lane, shared_address(smem) + C::kMap, load_query);
  block_barrier<C::kThreads>();
  const KeySurvey survey(shared_address(smem) + C::kMap, w.keys.length, lane);
  w.take_share<C>(survey.num_keys, params.num_splits);
  return survey;
}

template <class C>
struct Ring {
  uint32_t smem;
  __device__ uint32_t slot(int s) const { return smem + C::kRing + s * C::kSlotBytes; }
  __device__ uint32_t full(int s) const { return smem + C::kBarriers + s * 16; }
  __device__ uint32_t empty(int s) const { return full(s) + 8; }
  // By one thread: lanes with an address each take turns, and to racecheck all others write somewhere, too.
  __device__ void init() const {
#pragma unroll
    for (int s = 0; s < C::kSlots; ++s) {
      mbarrier_init(full(s), kWarpArrivals + (C::R::kScalesApart ? kSlotTokens : 0));
      mbarrier_init(empty(s), C::kEmptyWarps * kWarpArrivals);
    }
  }
};

// Fetching one slot.
template <class C>
class Gather {
 public:
  using R = typename C::R;

  __device__ Gather(const TeamParams& params, uint8_t* smem, int lane)
      : p_(params.p), lane_(lane), ring_{shared_address(smem)}, valid_(smem + C::kValid) {}

 protected:
  using Key = KeySource::Key;

  // The key of this lane's rank (mod 16) from `rank` on. Past the last key it is the last one again, whose
  // bytes fill the place: zero weight times NaN would reach no query that has not got that NaN anyway.
  __device__ __forceinline__ Key find(const ValidKeys<MapInShared>& valid_keys, const Keys& keys,
                                      int rank) const {
    return valid_keys.find(KeySource(p_, keys), min(rank + lane_ % kSlotTokens, valid_keys.num_keys() - 1));
  }

  // Into the i-th slot of the ring's sequence. Of its keys the first num_keys count.
  __device__ void fetch(int i, Key key, int num_keys) const {
    constexpr KvLayout kL = R::kL;
    const KvScope& s = p_.scopes[key.scope];
    const unsigned page_size = s.page_size, in_cache = key.slot;
    const unsigned page = in_cache / page_size, in_page = in_cache % page_size;
    const uint8_t* const base = s.kv_cache + page * s.kv_cache_stride_page;
    const uint8_t* const row = base + kL.token_offset(in_page);
    const uint8_t* const scales = base + kL.scale_offset(in_page, page_size);
    const int num_here = min(num_keys, kSlotTokens);
    const bool counts = lane_ < num_here;
    const unsigned same = counts ? __match_any_sync((1u << num_here) - 1, key.slot ^ key.scope << 31) : 0;
    const unsigned repeated = __ballot_sync(kFullWarp, __popc(same) > 1);

    const int slot = i % C::kSlots;
    mbarrier_wait(ring_.empty(slot), (i / C::kSlots & 1) ^ 1);
    if (lane_ < kSlotTokens) valid_[slot * kSlotTokens + lane_] = counts;
    if (repeated) [[unlikely]]
      copy_repeated(slot, row, repeated, same);
    mbarrier_arrive_expect_warp(ring_.full(slot), (kSlotTokens - __popc(repeated)) * R::kBytes, lane_);
    __syncwarp();
    if (lane_ < kSlotTokens) {
      const uint32_t dst = ring_.slot(slot) + lane_ * R::kPitch;
      if constexpr (R::kScalesApart) {
        cp_async_8(dst + R::kScaleOffset, scales);
        mbarrier_arrive_cp_async(ring_.full(slot));
      }
      if (!(repeated >> lane_ & 1)) bulk_copy(dst, row, R::kBytes, ring_.full(slot));
    }
    __syncwarp();
  }

  const SparseAttentionParams& p_;
  const int lane_;

 private:
  // A cache row that several keys name is read once, through the L1: thousands of copies of one row would
  // queue at its few lines of the L2. `repeated`: lanes whose rows these are; `same`: those with this lane's.
  __device__ __forceinline__ void copy_repeated(int slot, const uint8_t* row, unsigned repeated,
                                                unsigned same) const {
    while (repeated) {
      const int first = __ffs(repeated) - 1;
      const unsigned places = __shfl_sync(kFullWarp, same, first);
      const auto* from = reinterpret_cast<const uint8_t*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), first));
#pragma unroll 1
      for (int at = lane_ * 16; at < R::kBytes; at += kWarpSize * 16) {
        const uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from + at));
#pragma unroll
        for (int place = 0; place < kSlotTokens; ++place)
          if (places >> place & 1) store_shared_16(ring_.slot(slot) + place * R::kPitch + at, bytes);
      }
      repeated &= ~places;
    }
  }

  const Ring<C> ring_;
  uint8_t* const valid_;
};

// The producers of a CTA that works on one row.
template <class C>
class Producer : Gather<C> {
 public:
  __device__ Producer(const TeamParams& params, const Work& w, const KeySurvey& survey, uint8_t* smem,
                      int warp, int lane)
      : Gather<C>(params, smem, lane),
        w_(w),
        valid_keys_(survey, {shared_address(smem) + C::kMap}),
        warp_(warp) {}

  // Entries, which the survey has brought close, are loaded a slot ahead.
  __device__ void run() {
    const int num_slots = w_.num_blocks * C::kBlockSlots;
    Key now{-1, 0};
    for (int i = warp_ - C::kProducers; i < num_slots; i += C::kProducers) {
      const int ahead = i + C::kProducers;
      Key next{-1, 0};
      if (ahead < num_slots) next = this->find(valid_keys_, w_.keys, first_rank(ahead));
      if (i >= 0) this->fetch(i, now, valid_keys_.num_keys() - first_rank(i));
      now = next;
    }
  }

 private:
  using typename Gather<C>::Key;

  __device__ int first_rank(int i) const { return w_.first_block * C::kBlockTokens + i * kSlotTokens; }

  const Work& w_;
  const ValidKeys<MapInShared> valid_keys_;
  const int warp_;
};

}  // namespace mla_fp8::gpu
