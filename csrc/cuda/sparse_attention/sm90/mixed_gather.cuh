#pragma once
// The gather from two caches of different layouts. A producer fetches rows as they lie there, each into its
// place of the ring. Rows of one kind they become by other warps (mixed_expand.cuh). Where there are none, by
// the producer: once they are there, or while it would wait for the next free stage. So the whole ring is in
// flight.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/mixed_expand.cuh"
#include "cuda/sparse_attention/sm90/mixed_row.cuh"

namespace mla_fp8::gpu {

template <class C>
class MixedGather : protected Gather<C> {
 public:
  using R = typename C::R;
  using First = typename R::First;
  using Second = typename R::Second;

  __device__ MixedGather(const KernelParams& params, uint8_t* smem, int lane)
      : Gather<C>(params, smem, lane), expander_(smem, lane) {}

 protected:
  using Key = KeySource::Key;
  using Gather<C>::find, Gather<C>::lane_, Gather<C>::p_, Gather<C>::ring_, Gather<C>::valid_;

  __device__ void fetch(int i, Key key, int num_keys) {
    const bool extra = key.scope != 0;
    const KvScope& s = p_.scopes[key.scope];
    const unsigned page_size = s.page_size, in_cache = key.slot;
    const unsigned page = in_cache / page_size, in_page = in_cache % page_size;
    const uint8_t* const base = s.kv_cache + page * s.kv_cache_stride_page;
    constexpr KvLayout kFirst = First::kL, kSecond = Second::kL;
    const uint8_t* const row = base + (extra ? kSecond.token_offset(in_page) : kFirst.token_offset(in_page));
    const uint8_t* const scales =
        base + (extra ? kSecond.scale_offset(in_page, page_size) : kFirst.scale_offset(in_page, page_size));
    const int num_here = min(num_keys, kStageRows);
    const bool counts = lane_ < num_here;
    const unsigned which = key.slot ^ key.scope << 31, other = __shfl_xor_sync(kFullWarp, which, 8);
    unsigned same = 0, repeated = 0;
    if (__any_sync(kFullWarp, counts && which == other)) [[unlikely]] {
      if (counts) same = __match_any_sync((1u << num_here) - 1, which);
      repeated = __ballot_sync(kFullWarp, __popc(same) > 1);
    }
    const unsigned extras = __ballot_sync(kFullWarp, extra) & kStagePlaces;

    const int stage = i % C::kStages;
    if constexpr (kExpands)
      while (num_pending_ > 0 && (is_raw_full() || !is_free(i))) expand_next();
    wait_until_free<C::kStages>(ring_.empty(stage), i);
    if (lane_ < kStageRows) valid_[stage * kStageRows + lane_] = counts ? kValidKey : 0;
    if (lane_ == 0) store_shared_4(stage_extras_at(ring_, stage), extras);
    if (repeated) [[unlikely]]
      copy_repeated(stage, row, repeated, same, extras);
    const unsigned copied = kStagePlaces & ~repeated;
    const int bytes = __popc(copied & ~extras) * First::kBytes + __popc(copied & extras) * Second::kBytes;
    mbarrier_arrive_expect_warp(ring_.raw(stage), bytes, lane_);
    __syncwarp();
    if (lane_ < kStageRows) {
      const uint32_t to = ring_.stage(stage) + R::kTableOffset + lane_ * R::kRawScaleBytes;
      const uint32_t dst = ring_.stage(stage) + lane_ * R::kPitch;
      if (extra) {
        cp_async_16(to, scales, true);
        cp_async_16(to + 16, scales + 16, true);
      } else if constexpr (kFirst.scale_bytes() == 8) {
        cp_async_8(to, scales);
      } else {
        static_assert(kFirst.scale_bytes() == 16);
        cp_async_16(to, scales, true);
      }
      mbarrier_arrive_cp_async(ring_.raw(stage));
      if (copied >> lane_ & 1) {
        if (extra) bulk_copy(dst + R::kCodesOffset, row, Second::kBytes, ring_.raw(stage));
        else bulk_copy(dst, row, First::kBytes, ring_.raw(stage));
      }
    }
    __syncwarp();
    if constexpr (kExpands) {
      pending_ |= static_cast<uint32_t>(i % (2 * C::kStages)) << 8 * num_pending_;
      ++num_pending_;
    }
  }

  // Consumers may need them before what is waited for can come.
  template <class Ready>
  __device__ void finish_until(Ready&& ready) {
    while (num_pending_ > 0 && !ready()) expand_next();
  }
  __device__ void drain() {
    if constexpr (kExpands)
      while (num_pending_ > 0) expand_next();
  }

 private:
  static constexpr bool kExpands = C::kExpanders == 0;
  static_assert(!kExpands || (C::kStages <= 16 && C::kStages / C::kProducers <= 4),
                "a byte of pending_ each");

  __device__ bool is_free(int i) const {
    return __all_sync(kFullWarp, mbarrier_test(ring_.empty(i % C::kStages), (i / C::kStages & 1) ^ 1));
  }
  __device__ bool is_raw_full() const {  // the next one's
    const int i = pending_ & 255;
    return __all_sync(kFullWarp, mbarrier_test(ring_.raw(i % C::kStages), i / C::kStages & 1));
  }
  __device__ void expand_next() {
    const int i = pending_ & 255;
    wait_until_full<C::kStages>(ring_.raw(i % C::kStages), i);
    expander_.expand(i % C::kStages);
    pending_ >>= 8;
    --num_pending_;
  }

  // As Gather's, of rows of either kind.
  __device__ __forceinline__ void copy_repeated(int stage, const uint8_t* row, unsigned repeated,
                                                unsigned same, unsigned extras) const {
    while (repeated) {
      const int first = __ffs(repeated) - 1;
      const unsigned places = __shfl_sync(kFullWarp, same, first);
      const auto* from = reinterpret_cast<const uint8_t*>(
          __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(row), first));
      const bool extra = extras >> first & 1;
      const int bytes = extra ? Second::kBytes : First::kBytes;
      const uint32_t to = ring_.stage(stage) + (extra ? R::kCodesOffset : 0);
#pragma unroll 1
      for (int at = lane_ * 16; at < bytes; at += kWarpSize * 16) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(from + at));
#pragma unroll 1
        for (int place = 0; place < kStageRows; ++place)
          if (places >> place & 1) store_shared_16(to + place * R::kPitch + at, x);
      }
      repeated &= ~places;
    }
  }

  const StageExpander<C> expander_;
  uint32_t pending_ = 0;  // places in the ring's sequence, a byte each, the next one lowest
  int num_pending_ = 0;
};

// All warps of a CTA with one query that do not compute.
template <class C>
__device__ __forceinline__ void run_producers(const KernelParams& params, const typename C::Item& w,
                                              const KeySurvey& survey, uint8_t* smem, int warp, int lane) {
  if constexpr (C::kExpanders > 0) {
    if (warp >= C::kProducers) {
      give_up_registers<C::kExpanderRegisters>();
      return StageExpander<C>(smem, lane).run(warp - C::kProducers, w.num_blocks * C::kBlockStages);
    }
  }
  give_up_registers<C::kProducerRegisters>();
  SplitProducer<C>(params, w, survey, smem, warp, lane).run();
}

}  // namespace mla_fp8::gpu
