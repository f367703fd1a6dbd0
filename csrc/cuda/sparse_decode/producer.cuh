#pragma once
// The gather: each producer warp fetches every kProducers-th slot of 16 rows, one bulk copy per row.
#include "cuda/async.cuh"
#include "cuda/barrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/sparse_decode/config.cuh"

namespace mla_fp8::gpu {

// What one query attends to.
struct Keys {
  int64_t token;        // the query
  int length0, length;  // keys of the first scope, of both
  int window_first;     // position of the first key of a sliding window
  const int32_t* pages;

  Keys() = default;
  __device__ Keys(const SparseAttentionParams& p, int64_t token) : token(token) {
    const Selection first(p, 0, token);
    length0 = static_cast<int>(first.length());
    window_first = static_cast<int>(first.first_position());
    pages = first.pages();
    length = length0 + (p.num_scopes > 1 ? static_cast<int>(Selection(p, 1, token).length()) : 0);
  }
};

// What one CTA works on: blocks [first_block, first_block + num_blocks) of the selected tokens of one row.
struct Work {
  Keys keys;
  int64_t token;  // the query
  int split, first_head;
  int first_block, num_blocks;
};

template <class C>
__device__ Work find_work(const TeamParams& params) {
  const unsigned splits = params.num_splits, cluster = blockIdx.x / splits;
  const int split = blockIdx.x % splits;
  // The head blocks of a row run together: it is read from L2 again.
  const int64_t token = cluster / params.num_head_blocks;
  const Keys keys(params.p, token);
  const unsigned blocks = ceil_div(keys.length, C::kBlockTokens);
  const int each = blocks / splits, longer = blocks % splits;  // the first `longer` splits take one more
  return {
      .keys = keys,
      .token = token,
      .split = split,
      .first_head = static_cast<int>(cluster % params.num_head_blocks) * C::kHeads,
      .first_block = split * each + min(split, longer),
      .num_blocks = each + (split < longer),
  };
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
  struct Index {
    int slot;  // -1 = none
    int scope;
  };

  // The index that this lane (mod 16) fetches, of the 16 from `position` on of a query's keys.
  __device__ Index index(const Keys& keys, int position) const {
    position += lane_ % kSlotTokens;
    if (position >= keys.length) return {-1, 0};
    const int scope = position >= keys.length0;
    const KvScope& s = p_.scopes[scope];
    if (scope == 0 && p_.is_window) return {window_slot(keys.pages, keys.window_first + position), 0};
    return {
        __ldg(s.indices + keys.token * s.indices_stride_token + (scope ? position - keys.length0 : position)),
        scope};
  }

  // Into the i-th slot of the ring's sequence.
  __device__ void fetch(int i, Index index) const {
    constexpr KvLayout kL = R::kL;
    const KvScope& s = p_.scopes[index.scope];
    const bool valid = index.slot >= 0 && index.slot < s.num_slots;
    const uint8_t* row = reinterpret_cast<const uint8_t*>(kZeroRow);
    const uint8_t* scales = row;
    if (valid) {
      const unsigned page_size = s.page_size;
      const unsigned page = static_cast<unsigned>(index.slot) / page_size;
      const unsigned in_page = static_cast<unsigned>(index.slot) % page_size;
      const uint8_t* base = s.kv_cache + page * s.kv_cache_stride_page;
      row = base + kL.token_offset(in_page);
      if constexpr (R::kScalesApart) scales = base + kL.scale_offset(in_page, page_size);
    }
    const int slot = i % C::kSlots;
    mbarrier_wait(ring_.empty(slot), (i / C::kSlots & 1) ^ 1);
    if (lane_ < kSlotTokens) valid_[slot * kSlotTokens + lane_] = valid;
    mbarrier_arrive_expect_warp(ring_.full(slot), kSlotTokens * R::kBytes, lane_);
    __syncwarp();
    if (lane_ < kSlotTokens) {
      const uint32_t dst = ring_.slot(slot) + lane_ * R::kPitch;
      if constexpr (R::kScalesApart) {
        cp_async_8(dst + R::kScaleOffset, scales);
        mbarrier_arrive_cp_async(ring_.full(slot));
      }
      bulk_copy(dst, row, R::kBytes, ring_.full(slot));
    }
    __syncwarp();
  }

  __device__ int window_slot(const int32_t* pages, unsigned position) const {
    const KvScope& s = p_.scopes[0];
    const unsigned page_size = s.page_size, entry = position / page_size;
    if (entry >= p_.window.max_pages) return -1;
    const int page = __ldg(pages + entry);
    const int64_t slot = int64_t{page} * page_size + position % page_size;
    return page >= 0 && slot < s.num_slots ? static_cast<int>(slot) : -1;
  }

  const SparseAttentionParams& p_;
  const int lane_;

 private:
  const Ring<C> ring_;
  uint8_t* const valid_;
};

// The producers of a CTA that works on one row.
template <class C>
class Producer : Gather<C> {
 public:
  __device__ Producer(const TeamParams& params, const Work& w, uint8_t* smem, int warp, int lane)
      : Gather<C>(params, smem, lane), w_(w), warp_(warp) {
    // The first indices are on their way before anything else is set up.
    next_ = index(warp);
    after_next_ = index(warp + C::kProducers);
  }

  __device__ void run() {
    const int num_slots = w_.num_blocks * C::kBlockSlots;
    for (int i = warp_; i < num_slots; i += C::kProducers) {
      const Index current = next_;
      next_ = after_next_;
      after_next_ = index(i + 2 * C::kProducers);
      this->fetch(i, current);
    }
  }

 private:
  using typename Gather<C>::Index;

  __device__ Index index(int i) const {
    if (i >= w_.num_blocks * C::kBlockSlots) return {-1, 0};
    return Gather<C>::index(w_.keys, w_.first_block * C::kBlockTokens + i * kSlotTokens);
  }

  const Work& w_;
  const int warp_;
  Index next_, after_next_;
};

}  // namespace mla_fp8::gpu
