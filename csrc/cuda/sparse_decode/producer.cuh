#pragma once
// The gather: each producer warp fetches every kProducers-th slot of 16 rows, one bulk copy per row.
#include "cuda/async.cuh"
#include "cuda/barrier.cuh"
#include "cuda/mma.cuh"
#include "cuda/sparse_decode/config.cuh"

namespace mla_fp8::gpu {

// What one CTA works on: blocks [first_block, first_block + num_blocks) of the selected tokens of one row.
struct Work {
  int64_t token;  // the query
  int split, first_head;
  int length0, length;  // tokens of the first scope, of both
  int first_block, num_blocks;
};

// How many of the scope's indices count for this query.
__device__ inline int scope_length(const KvScope& scope, int64_t token) {
  const int topk = static_cast<int>(scope.topk);
  return scope.topk_length ? max(0, min(scope.topk_length[token], topk)) : topk;
}

template <class C>
__device__ Work find_work(const TeamParams& params) {
  const SparseAttentionParams& p = params.p;
  Work w;
  const unsigned splits = params.num_splits, cluster = blockIdx.x / splits;
  w.split = blockIdx.x % splits;
  w.token =
      cluster / params.num_head_blocks;  // the head blocks of a row run together: it is read from L2 again
  w.first_head = cluster % params.num_head_blocks * C::kHeads;
  w.length0 = scope_length(p.scopes[0], w.token);
  w.length = w.length0 + (p.num_scopes > 1 ? scope_length(p.scopes[1], w.token) : 0);
  const unsigned blocks = ceil_div(w.length, C::kBlockTokens);
  const int each = blocks / splits, longer = blocks % splits;  // the first `longer` splits take one more
  w.first_block = w.split * each + min(w.split, longer);
  w.num_blocks = each + (w.split < longer);
  return w;
}

// Masked tokens read this row: whatever lies in a cache reaches an output only through a selected slot.
__device__ const uint4 kZeroRow[1152 / 16] = {};

template <class C>
struct Ring {
  uint32_t smem;
  __device__ uint32_t slot(int s) const { return smem + C::kRing + s * C::kSlotBytes; }
  __device__ uint32_t full(int s) const { return smem + C::kBarriers + s * 16; }
  __device__ uint32_t empty(int s) const { return full(s) + 8; }
  __device__ void init(int s) const {
    mbarrier_init(full(s), C::R::kScalesApart ? 1 + kSlotTokens : 1);
    mbarrier_init(empty(s), C::kEmptyArrivals);
  }
};

template <class C>
class Producer {
 public:
  using R = typename C::R;

  __device__ Producer(const TeamParams& params, const Work& w, uint8_t* smem, int warp, int lane)
      : p_(params.p), w_(w), ring_{shared_address(smem)}, valid_(smem + C::kValid), warp_(warp), lane_(lane) {
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
      fetch(i, current);
    }
  }

 private:
  struct Index {
    int slot;  // -1 = none
    int scope;
  };

  // The index that this lane (mod 16) fetches for the i-th slot of the ring's sequence.
  __device__ Index index(int i) const {
    const int position = w_.first_block * C::kBlockTokens + i * kSlotTokens + lane_ % kSlotTokens;
    if (i >= w_.num_blocks * C::kBlockSlots || position >= w_.length) return {-1, 0};
    const int scope = position >= w_.length0;
    const KvScope& s = p_.scopes[scope];
    return {__ldg(s.indices + w_.token * s.indices_stride_token + (scope ? position - w_.length0 : position)),
            scope};
  }

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
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive_expect(ring_.full(slot), kSlotTokens * R::kBytes);
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

  const SparseAttentionParams& p_;
  const Work& w_;
  const Ring<C> ring_;
  uint8_t* const valid_;
  const int warp_, lane_;
  Index next_, after_next_;
};

}  // namespace mla_fp8::gpu
