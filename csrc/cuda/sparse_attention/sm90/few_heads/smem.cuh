#pragma once
// The warp-team kernel's variants, and where everything lies in shared memory.
#include "cuda/device/platform.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/schedule.cuh"

namespace mla_fp8::gpu {

// One variant. A CTA takes kGroups groups of 8 heads; its consumer warps form teams of kMembers warps. Decode
// has one row in a CTA, prefill kRows at once.
template <KvLayoutId kId_, int kGroups_, int kProducers_, int kRows_ = 1>
struct TeamConfig {
  static constexpr KvLayoutId kId = kId_;
  using R = Row<kId>;
  static constexpr int kGroups = kGroups_, kHeads = kGroups * kGroupHeads;
  // 64 accumulators a warp: with 128 the compiler sank every load to just before its use. The ring holds too
  // few bf16 rows for blocks that large.
  static constexpr int kMembers = R::kFp8Dims > 0 ? 2 * kGroups : kGroups;
  static constexpr int kProducers = kProducers_;
  static constexpr int kThreads = kConsumerThreads + kProducers * kWarpSize;
  static constexpr int kTeams = kConsumerWarps / kMembers;
  static constexpr int kRows = kRows_, kRowTeams = kTeams / kRows;
  static constexpr int kBlockSlots = kMembers, kBlockTokens = kSlotTokens * kBlockSlots;  // of one team
  static constexpr int kEmptyWarps = kMembers;           // every warp of a team reads every slot of its block
  static constexpr int kChunks = kNumChunks / kMembers;  // of V that one warp accumulates
  static constexpr bool kWgmma = kMembers == 4;          // a team is a warpgroup: QK by wgmma
  // setmaxnreg: what the CTA is launched with, shared by role.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kProducers == 4 ? 40 : kRows_ == 1 ? 32 : 48;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * kThreads - kProducerRegisters * kProducers * kWarpSize) / kConsumerThreads / 8 * 8;

  static constexpr int kSlotBytes = kSlotTokens * R::kPitch;
  // A multiple of 8, so that a slot is always filled by the same producer and emptied by the same team: with
  // 20 slots a team could wait for a phase whose parity equals that of one it had not seen end.
  static constexpr int kSlots = 16 * kSlotBytes <= 176 * 1024 ? 16 : 8;
  static_assert(kSlots % kConsumerWarps == 0 && kSlots % kProducers == 0);

  // Weights travel between the warps of a team as [head][token], double buffered; alone, a warp keeps its
  // own.
  static constexpr bool kShared = kMembers > 1;
  static constexpr int kPPitch = kBlockTokens * 2 + 16;
  static constexpr int kPBytes = kHeads * kPPitch;
  static constexpr int kPBuffers = kShared ? 2 * kTeams : 0;
  static constexpr int kScaleBytes = R::kNumScales ? R::kNumScales * kBlockTokens * 2 : 0;
  static constexpr int kMaxBytes = kMembers * kHeads * 4;

  static constexpr int kRing = 0;
  static constexpr int kQ = kRing + kSlots * kSlotBytes;
  static constexpr int kQBytes = R::kDims / 16 * kGroups * 256;  // of one row
  static constexpr int kPFp8 = kQ + kRows * kQBytes;             // f16 weights, for e4m3 chunks
  static constexpr int kPBf16 = kPFp8 + (R::kFp8Chunks > 0 ? kPBuffers * kPBytes : 0);
  static constexpr int kScales = kPBf16 + (R::kFp8Chunks < kNumChunks ? kPBuffers * kPBytes : 0);
  static constexpr int kBlockMax = kScales + kPBuffers * kScaleBytes;
  static constexpr int kQScale = kBlockMax + kPBuffers * kMaxBytes;
  static constexpr int kWarpStats = kQScale + kRows * kHeads * 4;                // (max, sum) [warp][head]
  static constexpr int kWarpLargest = kWarpStats + kConsumerWarps * kHeads * 8;  // largest logit
  static constexpr int kStats = kWarpLargest + kConsumerWarps * kHeads * 4;      // of the CTA
  static constexpr int kLargest = kStats + kHeads * 8;
  static constexpr int kValid = kLargest + kHeads * 4;
  // Of the row's valid keys; prefill surveys a row ahead: [row][buffer].
  static constexpr int kMap = align_up(kValid + kSlots * kSlotTokens, 8), kMaps = kMap;
  static constexpr int kSurveyWarps = kConsumerWarps / kRows;  // prefill
  static constexpr int kBarriers = kMaps + (kRows > 1 ? kRows * 2 : 1) * kMapBytes;
  static constexpr int kSurveyBarriers = kBarriers + kSlots * 16;  // prefill: [row][buffer] x (full, empty)
  static constexpr int kSmemBytes = kSurveyBarriers + (kRows > 1 ? kRows * 2 * 16 : 0);
  static_assert(kSmemBytes <= kMaxSmemBytes);
  static_assert(kQ % 128 == 0 && kPFp8 % 16 == 0 && kWarpStats % 16 == 0 && kBarriers % 8 == 0);

  // Once the ring is empty the partial outputs lie over it, float [team][head][kHeadDimV].
  static constexpr int kOutPitch = kHeadDimV + 4;
  static_assert(kRows > 1 || kTeams * kHeads * kOutPitch * 4 <= kQ);
};

}  // namespace mla_fp8::gpu
