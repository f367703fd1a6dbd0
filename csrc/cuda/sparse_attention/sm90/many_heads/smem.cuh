#pragma once
// The variants of many_heads, their shared memory and barriers, and what the roles share.
#include <cstddef>

#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"

namespace mla_fp8::gpu {

// A walk has others (walk.cuh).
//
//   barrier            arrivals of a phase       waits             protects
//   stage full         its producer, the bytes   logits, values    ring[stage], valid[stage]: may be read
//   stage empty        8 value warps             producers         the same: may be filled
//   weights full       4 logits warps            values            weights, scales, rescale, moved [buffer];
//                                                                  run_bases, of the run's last block
//   weights empty      8 value warps             logits            the same: may be written
//   QK done            4 logits warps            values            nothing: products of QK go first
//   q                  a value warp, the bytes   values            q: may be read as it came
//   survey             thread 0, once all others early producers   maps[0]: may be read
//                      have met
//   kBarrierQ          values                    the same          the same: may be written in wgmma's order
//   kBarrierWorkersQ   logits, values            the same          q, q_scale: are written
//   kBarrierLogits     logits                    the same          head_state, warp_max, rescale
//   kBarrierFinish     logits, values            the same          factors; ring and q are free
//   kBarrierStore      values                    the same          the output over the ring

// The choices that the kernel is compiled for, besides the rows.
struct ManyHeadsTraits {
  int octets;     // octets of heads in a CTA: 4, 6 or 8
  int producers;  // warps, some of which may expand (mixed_row.cuh)
  Schedule schedule = Schedule::kSplit;
};
// The pitch of a block's value scales, f16 [tile][key]: four lanes store those of a key at once, into
// different banks.
inline constexpr int kScalePitch = 64 * 2 + 16;

// One variant. R: Row, or MixedRow for two caches. Item: the work of a CTA (sm90/item.cuh).
template <class R_, ManyHeadsTraits kTraits, class Item_ = SplitItem>
struct ManyHeads {
  using R = R_;
  using Item = Item_;
  static constexpr bool kNeighbours = Item::kNeighbours;  // heads are those of several queries
  static constexpr bool kWalks = kTraits.schedule == Schedule::kWalk;
  static constexpr bool kRuns = kTraits.schedule == Schedule::kRuns;  // a CTA leaves each of its runs
  static constexpr bool kParts = kRuns || kTraits.schedule == Schedule::kParts;        // parts.cuh
  static constexpr bool kSegments = kRuns || kTraits.schedule == Schedule::kSegments;  // sm90/segments.cuh
  static constexpr bool kFetchesEarly = kParts && !R::kMixed;  // two layouts: kProducersAreEarly
  static constexpr bool kFindsLargest = !kSegments;            // largest logits, if the caller wants them
  static constexpr int kOctets = kTraits.octets, kHeads = kOctets * kOctetHeads;
  static constexpr bool kFirstInRegisters = kOctets < 8;  // segments: 8 octets leave too few for it
  static constexpr int kMostRuns = kSegments ? kSegmentsOfQuery : 0;
  static_assert(R::kFp8Chunks >= kNumChunks - 1, "at most the last chunk of V is bf16");
  static constexpr int kExpanders = R::kExpanders, kProducers = kTraits.producers - kExpanders;
  static constexpr int kLogitWarps = 4, kFirstProducer = kConsumerWarps + kLogitWarps;
  static constexpr int kQueries = 1, kTeams = 1, kQueryTeams = 1;  // WalkProducer sees one query, one team
  static constexpr bool kScalesMultiplyWeights = false;  // two layouts: scales multiply fragments of V
  static constexpr int kWorkers = kConsumerThreads + kLogitWarps * kWarpSize;  // all but the producers
  static constexpr int kThreads = kWorkers + kTraits.producers * kWarpSize;
  static constexpr int kSurveyWarps = kConsumerWarps, kSurveyReaders = kThreads / kWarpSize;  // in a walk
  // setmaxnreg: roles share 64 K registers.
  static constexpr bool kManyProducers = kTraits.producers == 8, kWide = kOctets == 8 || kSegments;
  static constexpr int kValueRegisters = kWide            ? 176
                                         : kOctets == 6   ? 152
                                         : kManyProducers ? 112
                                         : kWalks         ? 144
                                                          : 136;
  static constexpr int kLogitRegisters = kWide            ? (R::kMixed ? 112 : 120)
                                         : kManyProducers ? 128
                                         : kWalks         ? 152
                                                          : 136;
  static constexpr int kProducerRegisters = R::kMixed ? 48 : kWalks && !kWide ? 72 : 40;
  static constexpr int kExpanderRegisters = 80;
  static constexpr int kChunks = 4;  // chunks of V per warpgroup

  static constexpr int kBlockStages = 4, kBlockKeys = kBlockStages * kStageRows;
  static constexpr int kEmptyWarps = kConsumerWarps;  // a block's logits are done before its values start
  static constexpr int kStageBytes = kStageRows * R::kPitch + R::kTableBytes;
  static constexpr int kStages = kOctets < 6 ? 16 : 12;
  static_assert(kStages % kProducers == 0 && kStages % kBlockStages == 0);

  static constexpr int kStepBytes = kHeads * kStageRows * 2;  // B operand of one k-step
  // Q in wgmma's order: a k-step has two halves of 8 dims, a half has one octet of heads after the other.
  // Padding puts stores of steps into different banks. A walk has Q octet by octet, and converts each where
  // it came; with 576 dims there is no room for padding.
  static constexpr int kQPad = R::kDims == kHeadDimV ? 16 : 0;
  static constexpr int kQStepBytes = kWalks ? 2 * kOctetHeads * 16 + kQPad : kStepBytes + kHeads;
  static constexpr int kQHalfBytes = kWalks ? kOctetHeads * 16 : kHeads * 16;
  static constexpr int kQOctetBytes = kWalks ? R::kDims / 16 * kQStepBytes : kOctetHeads * 16;
  static constexpr int kQBytes = kWalks ? kOctets * kQOctetBytes : R::kDims / 16 * kQStepBytes;
  static constexpr int kPBytes = kBlockStages * kStepBytes;
  static constexpr int kScaleBytes = R::kMixed ? 0 : R::kNumScales * kScalePitch;

  struct Smem {
    alignas(128) uint8_t ring[kStages][kStageBytes];  // rows as they lie in the cache
    alignas(16) uint8_t q[kQBytes];
    uint8_t weights_fp8[2][kPBytes];  // f16 [k-step], for e4m3 chunks
    uint8_t weights_bf16[R::kFp8Chunks < kNumChunks ? 2 : 0][kPBytes];
    uint8_t scales[2][kScaleBytes];  // f16 [tile][key]
    float rescale[2][kHeads];        // change of base, valid if moved
    int moved[2];
    alignas(16) float2 head_state[kHeads];  // (logit scale, base - 7)
    float warp_max[kLogitWarps][kHeads];    // also sums, at the end and of a run
    float q_scale[kHeads];
    float warp_largest[kFindsLargest ? kLogitWarps : 0][kHeads];  // largest logits so far
    float factors[kWalks ? 2 : 1][kHeads];                        // factors of a query's output
    uint8_t valid[kStages][kStageRows];
    alignas(8) uint8_t maps[kWalks ? 2 : 1][kMapBytes];  // maps of a query's valid keys
    uint64_t stage_barriers[kStages][2];                 // full, empty
    uint64_t weights_barriers[2][3];                     // full, empty, QK done
    uint64_t q_barrier;
    uint64_t end_barriers[kWalks ? 2 : 0][2], survey_barriers[kWalks ? 2 : 0][2];  // full, empty
    uint64_t survey_barrier[R::kMixed && !kWalks ? 1 : 0];
    uint64_t raw_barriers[R::kMixed ? kStages : 0];
    int stage_exponents[R::kMixed ? kStages : 0];    // exponents of the scales in the tables
    uint32_t stage_extras[R::kMixed ? kStages : 0];  // bits of the rows that come from the second cache
    alignas(8) typename Item::InShared tile[kNeighbours ? 1 : 0];
    alignas(8) float run_bases[kMostRuns][kHeads];
    alignas(8) float node_bases[kMostRuns][kHeads];  // bases of the largest subtree that ends with the run
    float run_sums[kMostRuns][kHeads];
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= kMaxSharedBytes);

  static constexpr int kStorePitch = kHeadDimV * 2 + 16;
  static_assert(kHeads * R::kDims * 2 <= sizeof(Smem::q), "Q lies there first as it came");
  static_assert(kHeads * kStorePitch <= offsetof(Smem, q), "the output lies over the ring");
};

enum SplitBarrier { kBarrierWorkersQ = kBarrierOfKernel, kBarrierLogits, kBarrierFinish, kBarrierStore };
static_assert(int{kBarrierStore} < int{kBarrierSurvey});

// The logits warpgroup passes weights, scales and changes of bases to the value warps.
template <class C>
struct BlockExchange {
  uint8_t* bytes;
  uint32_t smem;
  __device__ explicit BlockExchange(uint8_t* p) : bytes(p), smem(shared_address(p)) {}
  __device__ uint32_t p_full(int buffer) const { return smem + MLA_SMEM(C, weights_barriers) + buffer * 24; }
  __device__ uint32_t p_empty(int buffer) const { return p_full(buffer) + 8; }
  __device__ uint32_t qk_done(int buffer) const { return p_full(buffer) + 16; }
  template <class T>
  __device__ T* at(int place) const {
    return reinterpret_cast<T*>(bytes + place);
  }
  __device__ float* rescale(int buffer) const { return at<float>(MLA_SMEM(C, rescale)) + buffer * C::kHeads; }
  __device__ int& moved(int buffer) const { return at<int>(MLA_SMEM(C, moved))[buffer]; }
  __device__ float2* head_state() const { return at<float2>(MLA_SMEM(C, head_state)); }
  __device__ float* warp_max(int warp) const { return at<float>(MLA_SMEM(C, warp_max)) + warp * C::kHeads; }
  __device__ float* warp_largest(int warp) const {
    return at<float>(MLA_SMEM(C, warp_largest)) + warp * C::kHeads;
  }
  __device__ float* run_bases(int run) const { return at<float>(MLA_SMEM(C, run_bases)) + run * C::kHeads; }
  __device__ float* node_bases(int run) const { return at<float>(MLA_SMEM(C, node_bases)) + run * C::kHeads; }
  __device__ float* run_sums(int run) const { return at<float>(MLA_SMEM(C, run_sums)) + run * C::kHeads; }
  __device__ uint8_t* scale_table(int buffer) const {
    return bytes + MLA_SMEM(C, scales) + buffer * C::kScaleBytes;
  }
  __device__ void init() const {
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(p_full(buffer), C::kLogitWarps * kWarpArrivals);
      mbarrier_init(p_empty(buffer), kConsumerWarps * kWarpArrivals);
      mbarrier_init(qk_done(buffer), C::kLogitWarps);
    }
  }
};
// Makes the barriers of all schedules, and those that one has besides.
template <class C, class... Others>
__device__ __forceinline__ void init_barriers(uint8_t* smem, const Others&... others) {
  Ring<C>{shared_address(smem)}.init();
  BlockExchange<C>(smem).init();
  (others.init(), ...);
  mbarrier_init(shared_address(smem) + MLA_SMEM(C, q_barrier), 1);
}

}  // namespace mla_fp8::gpu
