#pragma once
// The warpgroup kernel's variants, where everything lies in shared memory, and what its warpgroups share.
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"

namespace mla_fp8::gpu {

// A CTA takes kGroups groups of 8 heads: 32 or 64. Only prefill wants the largest logits.
template <KvLayoutId kId_, int kGroups_, bool kFindsLargest_>
struct GroupConfig {
  static constexpr KvLayoutId kId = kId_;
  using R = Row<kId>;
  static_assert(R::kFp8Chunks >= kNumChunks - 1, "at most the last chunk of V is bf16");
  static constexpr bool kFindsLargest = kFindsLargest_;
  static constexpr int kGroups = kGroups_, kHeads = kGroups * kGroupHeads;
  static constexpr int kLogitWarps = 4, kProducers = 4, kRows = 1;
  static constexpr int kWorkers = kConsumerThreads + kLogitWarps * kWarpSize;  // all but the producers
  static constexpr int kThreads = kWorkers + kProducers * kWarpSize;
  // setmaxnreg: 64 K registers shared by role.
  static constexpr int kValueRegisters = kGroups == 8 ? 176 : 136;
  static constexpr int kLogitRegisters = kGroups == 8 ? 120 : 136;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kChunks = 4;  // of V per warpgroup

  static constexpr int kBlockSlots = 4, kBlockTokens = kBlockSlots * kSlotTokens;
  static constexpr int kEmptyWarps =
      kConsumerWarps;  // the logits of a block are done before its values start
  static constexpr int kSlotBytes = kSlotTokens * R::kPitch;
  static constexpr int kSlots = kGroups == 8 ? 12 : 16;
  static_assert(kSlots % kProducers == 0 && kSlots % kBlockSlots == 0);

  static constexpr int kStepBytes = kHeads * kSlotTokens * 2;  // B operand of one k-step
  static constexpr int kPBytes = kBlockSlots * kStepBytes;
  static constexpr int kRing = 0;
  static constexpr int kQ = kRing + kSlots * kSlotBytes;
  static constexpr int kPFp8 = kQ + R::kDims / 16 * kStepBytes;  // [2][k-step]
  static constexpr int kPBf16 = kPFp8 + 2 * kPBytes;
  static constexpr int kScales =
      kPBf16 + (R::kFp8Chunks < kNumChunks ? 2 * kPBytes : 0);  // f16 [2][tile][token]
  static constexpr int kScaleBytes = R::kNumScales * kScalePitch;
  static constexpr int kRescale = kScales + 2 * kScaleBytes;  // change of base [2][head], valid if kMoved [2]
  static constexpr int kMoved = kRescale + 2 * kHeads * 4;
  static constexpr int kHeadState = kMoved + 16;            // (logit scale, base - 7) [head]
  static constexpr int kWarpMax = kHeadState + kHeads * 8;  // [warp][head]; sums at the end
  static constexpr int kQScale = kWarpMax + kLogitWarps * kHeads * 4;
  static constexpr int kStats = kQScale + kHeads * 4;
  static constexpr int kLargest = kStats + kHeads * 8;        // logit [head]
  static constexpr int kLaneLargest = kLargest + kHeads * 4;  // of two heads [logits warp][group][lane]
  static constexpr int kValid =
      kFindsLargest ? kLaneLargest + kLogitWarps * kGroups * kWarpSize * 8 : kLargest;
  static constexpr int kMap = kValid + kSlots * kSlotTokens;  // of the row's valid keys
  static constexpr int kBarriers = kMap + kMapBytes;
  static constexpr int kPBarriers = kBarriers + kSlots * 16;  // [2] x (full, empty, QK done)
  static constexpr int kSmemBytes = kPBarriers + 48;
  static_assert(kSmemBytes <= kMaxSmemBytes && kQ % 16 == 0 && kBarriers % 8 == 0);

  static constexpr int kOutPitch = kHeadDimV + 4, kStorePitch = kHeadDimV * 2 + 16;
  static_assert(kHeads * kOutPitch * 4 <= kPFp8, "partial outputs lie over the ring and Q");
};

enum GroupBarrier { kBarrierWorkersQ = 1, kBarrierLogits, kBarrierFinish, kBarrierStore };

// What the logits and the value warps share.
template <class C>
struct Exchange {
  uint8_t* bytes;
  uint32_t smem;
  __device__ explicit Exchange(uint8_t* p) : bytes(p), smem(shared_address(p)) {}
  __device__ uint32_t p_full(int buffer) const { return smem + C::kPBarriers + buffer * 24; }
  __device__ uint32_t p_empty(int buffer) const { return p_full(buffer) + 8; }
  __device__ uint32_t qk_done(int buffer) const { return p_full(buffer) + 16; }
  __device__ float* rescale(int buffer) const {
    return reinterpret_cast<float*>(bytes + C::kRescale) + buffer * C::kHeads;
  }
  __device__ int& moved(int buffer) const { return reinterpret_cast<int*>(bytes + C::kMoved)[buffer]; }
  __device__ float2* head_state() const { return reinterpret_cast<float2*>(bytes + C::kHeadState); }
  __device__ float* warp_max(int warp) const {
    return reinterpret_cast<float*>(bytes + C::kWarpMax) + warp * C::kHeads;
  }
  __device__ float2* lane_largest(int warp, int group) const {
    return reinterpret_cast<float2*>(bytes + C::kLaneLargest) + (warp * C::kGroups + group) * kWarpSize;
  }
  __device__ uint8_t* scale_table(int buffer) const { return bytes + C::kScales + buffer * C::kScaleBytes; }
  __device__ void init() const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(p_full(buffer), C::kLogitWarps * kWarpArrivals);
      mbarrier_init(p_empty(buffer), kConsumerWarps * kWarpArrivals);
      mbarrier_init(qk_done(buffer), C::kLogitWarps);
    }
  }
};

}  // namespace mla_fp8::gpu
