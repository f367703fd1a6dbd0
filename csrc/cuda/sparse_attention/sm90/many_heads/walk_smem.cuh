#pragma once
// The row-group kernel: where everything lies in shared memory, and what its warpgroups share.
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"

namespace mla_fp8::gpu {

template <KvLayoutId kId_>
struct RowGroupConfig {
  static constexpr KvLayoutId kId = kId_;
  using R = Row<kId>;
  static_assert(R::kFp8Chunks >= kNumChunks - 1, "at most the last chunk of V is bf16");
  static constexpr int kGroups = 4, kHeads = kGroups * kGroupHeads;
  static constexpr int kLogitGroups = 2;
  static constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
  static constexpr int kLogitWarps = kLogitGroups * kGroupWarps, kLogitThreads = kLogitWarps * kWarpSize;
  static constexpr int kProducers = 4;
  static constexpr int kThreads = kConsumerThreads + kLogitThreads + kProducers * kWarpSize;
  // setmaxnreg: what the CTA is launched with, shared by role.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kValueRegisters = 112, kLogitRegisters = 104, kProducerRegisters = 48;
  static_assert(2 * kValueRegisters + kLogitGroups * kLogitRegisters + kProducerRegisters <=
                kLaunchRegisters * (3 + kLogitGroups));
  static constexpr int kChunks = 4;  // of V per warpgroup

  static constexpr int kTeams = 1, kRows = 1, kRowTeams = 1;  // to RowProducer: one row, one team
  static constexpr int kBlockSlots = 4, kBlockTokens = kBlockSlots * kSlotTokens;
  static constexpr int kEmptyWarps = kConsumerWarps;  // the logits of a block come before its values
  static constexpr int kSlotBytes = kSlotTokens * R::kPitch;
  static constexpr int kSlots = 16;
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
  static constexpr int kHeadState = kScales + 2 * kScaleBytes;  // (logit scale, base - 7) [head]
  static constexpr int kFactors = kHeadState + kHeads * 8;      // [2][head]
  static constexpr int kKinds = kFactors + 2 * kHeads * 4;      // [2]
  static constexpr int kEpoch = kKinds + 8;
  static constexpr int kWarpBase = kEpoch + 8;                           // [logit warp][head]
  static constexpr int kWarpMax = kWarpBase + kLogitWarps * kHeads * 4;  // of a block; sums at the end
  static constexpr int kWarpLargest = kWarpMax + kLogitWarps * kHeads * 4;
  static constexpr int kQScale = kWarpLargest + kLogitWarps * kHeads * 4;
  static constexpr int kValid = kQScale + kHeads * 4;
  static constexpr int kMaps = kValid + kSlots * kSlotTokens;  // of a row's valid keys [buffer]
  static constexpr int kSurveyWarps = kLogitWarps;
  static constexpr int kBarriers = kMaps + 2 * kMapBytes;
  static constexpr int kEntryBarriers = kBarriers + kSlots * 16;  // [2] x (full, empty, decided)
  static constexpr int kSurveyBarriers = kEntryBarriers + 48;     // [2] x (full, empty)
  static constexpr int kSmemBytes = kSurveyBarriers + 32;
  static_assert(kSmemBytes <= kMaxSmemBytes && kQ % 128 == 0 && kHeadState % 16 == 0 && kBarriers % 8 == 0);
};

enum RowGroupBarrier { kBarrierAllLogits = 1, kBarrierLogitGroup };  // + group

// What passes from the logits to the value warps, in order: the weights of a block, of one whose bases have
// moved, or the end of a row.
enum class Entry : int { kBlock, kRescaled, kEnd };

// Entry i goes through buffer i % 2: the logits warpgroups take turns, each has a buffer of its own.
template <class C>
struct RowExchange {
  uint8_t* bytes;
  uint32_t smem;
  __device__ explicit RowExchange(uint8_t* p) : bytes(p), smem(shared_address(p)) {}

  __device__ uint32_t full(int buffer) const { return smem + C::kEntryBarriers + buffer * 24; }
  __device__ uint32_t empty(int buffer) const { return full(buffer) + 8; }
  __device__ uint32_t decided(int group) const { return full(group) + 16; }  // the bases of an entry
  __device__ Entry& kind(int buffer) const { return reinterpret_cast<Entry*>(bytes + C::kKinds)[buffer]; }
  // Rescaled: old - new base (log2). End: what O is multiplied by.
  __device__ float* factors(int buffer) const {
    return reinterpret_cast<float*>(bytes + C::kFactors) + buffer * C::kHeads;
  }
  __device__ uint32_t weights_fp8(int buffer) const { return smem + C::kPFp8 + buffer * C::kPBytes; }
  __device__ uint32_t weights_bf16(int buffer) const { return smem + C::kPBf16 + buffer * C::kPBytes; }
  __device__ uint8_t* scale_table(int buffer) const { return bytes + C::kScales + buffer * C::kScaleBytes; }

  // Among the logits warps.
  __device__ float2* head_state() const { return reinterpret_cast<float2*>(bytes + C::kHeadState); }
  __device__ int& epoch() const { return *reinterpret_cast<int*>(bytes + C::kEpoch); }  // moves of the bases
  __device__ float* warp_base(int warp) const {
    return reinterpret_cast<float*>(bytes + C::kWarpBase) + warp * C::kHeads;
  }
  __device__ float* warp_max(int warp) const {
    return reinterpret_cast<float*>(bytes + C::kWarpMax) + warp * C::kHeads;
  }
  __device__ float* warp_largest(int warp) const {
    return reinterpret_cast<float*>(bytes + C::kWarpLargest) + warp * C::kHeads;
  }

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), C::kGroupWarps * kWarpArrivals);
      mbarrier_init(empty(i), kConsumerWarps * kWarpArrivals);
      mbarrier_init(decided(i), C::kGroupWarps * kWarpArrivals);
    }
  }
};

}  // namespace mla_fp8::gpu
