#pragma once
// The variants of few_heads, their shared memory and their barriers.
//
//   barrier            arrivals of a phase                 waits      protects
//   stage full         its producer, the bytes of 16 rows  consumers  ring[stage], valid[stage]: may be read
//                      (+ 16 cp.async for scales apart)
//   stage empty        the kMembers warps of a team        producers  the same: may be filled
//   survey             thread 0, once all others have met  early producers  maps[0]: may be read (split)
//   survey full        the warps of a place for queries    all of it  maps[place][buffer]: may be read
//   survey empty       the producers of that place         its warps  the same: may be filled
//   kBarrierQ          consumers                           the same   q: is written (split)
//   kBarrierTeam + i   the warps of team i                 the same   weights, scales, block_max of a block
//   kBarrierQuery + i  the warps of place i                the same   q, warp_stats (walk)
#include <cstddef>
#include <type_traits>

#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/segments.cuh"

namespace mla_fp8::gpu {

// The choices that the kernel is compiled for, besides the rows.
struct FewHeadsTraits {
  int octets;     // octets of heads in a CTA
  int producers;  // warps
  Schedule schedule = Schedule::kSplit;
};

// One variant. The consumer warps of a CTA form teams of kMembers warps. A CTA has one query, a walk kQueries
// at once. R: Row, or MixedRow for two caches.
template <class R_, FewHeadsTraits kTraits>
struct FewHeads {
  using R = R_;
  static constexpr bool kWalks = kTraits.schedule == Schedule::kWalk;
  static constexpr bool kSegments = kTraits.schedule == Schedule::kSegments;  // sm90/segments.cuh
  static constexpr bool kParts = false, kNeighbours = false;
  static constexpr bool kScalesMultiplyWeights = true;  // scales of V multiply weights, not its fragments
  static constexpr int kOctets = kTraits.octets, kHeads = kOctets * kOctetHeads;
  // 64 accumulators a warp: with 128 the compiler sank every load to just before its use. Over bf16 rows they
  // are 128, as the ring holds too few rows for blocks of twice as many warps.
  static constexpr int kMembers = R::kFp8Dims > 0 ? 2 * kOctets : kOctets;
  static constexpr int kProducers = kTraits.producers, kExpanders = R::kExpanders;
  static constexpr int kThreads = kConsumerThreads + (kProducers + kExpanders) * kWarpSize;
  static constexpr int kQueries = kWalks ? 4 / kOctets : 1;
  // EarlyStage; segments would spill registers with it.
  static constexpr bool kFetchesEarly = !R::kMixed && R::kFp8Dims > 0 && !kWalks && !kSegments;
  static constexpr int kTeams = kConsumerWarps / kMembers;
  using Item = std::conditional_t<kSegments, SegmentItem<kTeams>, SplitItem>;
  static constexpr int kQueryTeams = kTeams / kQueries;
  static constexpr int kBlockStages = kMembers, kBlockKeys = kStageRows * kBlockStages;  // one team's block
  static constexpr int kEmptyWarps = kMembers;  // every warp of a team reads every stage of its block
  static constexpr int kChunks = kNumChunks / kMembers;  // chunks of V that one warp accumulates
  static constexpr bool kWgmma = kMembers == 4;          // a team is a warpgroup: QK by wgmma
  // setmaxnreg: roles share the registers that the CTA is launched with.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kExpanders > 0    ? (kWalks ? 48 : 40)
                                            : R::kMixed       ? 80
                                            : kProducers == 4 ? 40
                                            : kFetchesEarly   ? 40
                                            : kWalks          ? 48
                                                              : 32;
  static constexpr int kExpanderRegisters = 80;
  static constexpr int kConsumerRegisters =
      (kLaunchRegisters * kThreads - kProducerRegisters * kProducers * kWarpSize -
       kExpanderRegisters * kExpanders * kWarpSize) /
      kConsumerThreads / 8 * 8;

  static constexpr int kStageBytes = kStageRows * R::kPitch + R::kTableBytes;
  // A multiple of 8: then a stage always has the same producer and the same team. With 20 stages a team could
  // wait for a phase whose parity equals that of one it had not seen end.
  static constexpr int kStages = 16 * kStageBytes <= 176 * 1024 ? 16 : 8;
  static_assert(kStages % kConsumerWarps == 0 && kStages % kProducers == 0);

  // Weights travel between the warps of a team as [head][key], double buffered; a lone warp keeps its own.
  static constexpr bool kShared = kMembers > 1;
  static constexpr int kPPitch = kBlockKeys * 2 + 16;
  static constexpr int kPBytes = kHeads * kPPitch;
  static constexpr int kPBuffers = kShared ? 2 * kTeams : 0;
  static constexpr int kScaleBytes = R::kMixed ? 0 : R::kNumScales * kBlockKeys * 2;

  static constexpr int kQBytes = R::kDims / 16 * kOctets * 256;   // Q of one query
  static constexpr int kSurveyWarps = kConsumerWarps / kQueries;  // warps of a walk's place
  static constexpr int kSurveyReaders = (kProducers + kExpanders) / kQueries;
  static constexpr bool kFindsLargest = !kSegments;  // if the caller wants the largest logits

  struct Smem {
    alignas(128) uint8_t ring[kStages][kStageBytes];  // rows as they lie in the cache
    alignas(128) uint8_t q[kQueries][kQBytes];
    uint8_t weights_fp8[R::kFp8Chunks > 0 ? kPBuffers : 0][kPBytes];  // f16, for e4m3 chunks
    uint8_t weights_bf16[R::kFp8Chunks < kNumChunks ? kPBuffers : 0][kPBytes];
    uint8_t scales[kPBuffers][kScaleBytes];
    float block_max[kPBuffers][kMembers][kHeads];
    float q_scale[kQueries][kHeads];
    alignas(16) float2 warp_stats[kConsumerWarps][kHeads];  // (max, sum) of each warp
    float warp_largest[kConsumerWarps][kHeads];             // largest logits of each warp
    float2 stats[kHeads];                                   // (max, sum) of the CTA
    float largest[kHeads];
    uint8_t valid[kStages][kStageRows];
    alignas(8) uint8_t maps[kWalks ? kQueries * 2 : 1][kMapBytes];  // valid keys; a walk surveys ahead
    uint64_t stage_barriers[kStages][2];                            // full, empty
    uint64_t survey_barriers[kWalks ? kQueries * 2 : 0][2];         // full, empty
    uint64_t survey_barrier[R::kMixed && !kWalks ? 1 : 0];
    uint64_t raw_barriers[R::kMixed ? kStages : 0];
    int stage_exponents[R::kMixed ? kStages : 0];    // exponents of the scales in the tables
    uint32_t stage_extras[R::kMixed ? kStages : 0];  // bits of the rows that come from the second cache
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= kMaxSharedBytes && offsetof(Smem, weights_fp8) % 16 == 0);

  // Partial outputs lie over the ring once it is empty: float [team][head][kHeadDimV].
  static constexpr int kOutPitch = kHeadDimV + 4;
  static_assert(kWalks || kTeams * kHeads * kOutPitch * 4 <= sizeof(Smem::ring));
};

}  // namespace mla_fp8::gpu
