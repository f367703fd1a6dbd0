#pragma once
// The item of a CTA that takes one, a query and some of its heads: how it is found, and its keys surveyed.
#include <cstddef>

#include "cuda/sparse_attention/sm90/params.cuh"

namespace mla_fp8::gpu {

// A query and some of its heads.
struct QueryHeads {
  int64_t query;
  int first_head;

  __device__ int num_heads(const SparseAttentionParams& p, int most) const {
    return min(p.num_q_heads - first_head, most);
  }
  __device__ bool has_head(const SparseAttentionParams& p, int i) const {
    return first_head + i < p.num_q_heads;
  }
  __device__ const uint16_t* q_of_head(const SparseAttentionParams& p, int i) const {
    return p.q + query * p.q_stride_token + first_head * p.q_stride_head + i * p.q_stride_head;
  }
  __device__ bool is_q_dense(const SparseAttentionParams& p, int dims) const {
    return p.q_stride_head == dims;
  }
  __device__ int64_t query_of(const SparseAttentionParams&, int) const { return query; }
  __device__ int head_of(const SparseAttentionParams&, int i) const { return first_head + i; }

  // The heads of the i-th item. The head blocks of a query run together, so that all but the first read its
  // rows from L2.
  template <class C>
  __device__ static QueryHeads of_item(const KernelParams& params, unsigned i) {
    const unsigned query = params.head_blocks.word(i);
    return {query, static_cast<int>(i - query * params.num_head_blocks()) * C::kHeads};
  }
};

// The work of one CTA: blocks [first_block, first_block + num_blocks) of the valid keys of one query, or of
// several (sm90/many_heads/neighbours.cuh). The blocks are known after the survey.
template <class Heads_>
struct ItemOf : Heads_ {
  using Heads = Heads_;
  using Source = KeySource;
  // Items of several queries hide these: what they have in shared memory, and whether a list stands for a
  // survey.
  static constexpr bool kNeighbours = false, kIsListed = false;
  struct InShared {};
  Keys keys;
  int split;
  int first_block, num_blocks;

  // Finds the item of a CTA.
  template <class C>
  __device__ static typename C::Item find(const KernelParams& params, uint8_t*, int, int) {
    unsigned i = cluster_index();
    int split = cluster_rank();
    if constexpr (C::kParts) {
      i = params.splits.word(blockIdx.x);
      split = static_cast<int>(blockIdx.x - i * params.num_splits());
    }
    const Heads heads = Heads::template of_item<C>(params, i);
    const ItemOf item{heads, Keys(params.p, heads.query), split};
    if constexpr (C::kSegments) return {item, params};
    else if constexpr (C::kParts) return {item};
    else return item;
  }
  template <class C>
  __device__ void begin(const KernelParams&, int) {}
  // True if this launch has nothing to do for it.
  __device__ bool is_left_out(const KernelParams& params) const { return params.shared.has(this->query); }
  __device__ Source source(const KernelParams& params) const { return {params.p, keys}; }
  // many_heads: true if this CTA has all keys; else it leaves a part of the result for a second grid.
  __device__ static constexpr bool is_whole() { return true; }

  template <class C>
  __device__ void take_share(int num_keys, const Divider& splits) {
    const int blocks = ceil_div(num_keys, C::kBlockKeys);
    const auto each = static_cast<int>(splits(blocks));
    const int longer = blocks - each * static_cast<int>(splits.divisor());  // splits that take one more
    first_block = split * each + min(split, longer);
    num_blocks = each + (split < longer);
  }
  // The ring's sequence, over the first num_blocks blocks: has_stage tells whether the i-th stage exists,
  // first_rank the rank of its first key.
  template <class C>
  __device__ bool has_stage(int) const {
    return true;
  }
  template <class C>
  __device__ int first_rank(int i) const {
    return first_block * C::kBlockKeys + i * kStageRows;
  }
};

using SplitItem = ItemOf<QueryHeads>;

// An item of a query whose CTAs meet in a second grid.
struct PartItem : SplitItem {
  static constexpr int kMostParts = kMostQueryParts;
  __device__ static constexpr bool is_whole() { return false; }
  __device__ static int num_parts(const KernelParams& params) { return params.num_splits(); }
};

// Lists the positions of a query's valid keys in the order of ranks, 2 bytes each, for keys with gaps in
// parts of 32. All warps do it once: to look up a rank in the map takes a thousand clocks.
template <int kWarps>
__device__ __forceinline__ void list_positions(const KeySurvey& survey, uint32_t list, int warp, int lane) {
  const int before = warp_inclusive_sum(survey.in_lane) - survey.in_lane;
#pragma unroll 1
  for (int pair = warp; pair < kMapWords / 2; pair += kWarps) {
    int rank = __shfl_sync(kFullWarp, before, pair);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = __shfl_sync(kFullWarp, survey.map.words[i], pair);
      if (word >> lane & 1)
        store_shared_2(list + (rank + __popc(word & ((1u << lane) - 1))) * 2,
                       (2 * pair + i) * kWarpSize + lane);
      rank += __popc(word);
    }
  }
}

// Over two layouts producers do not survey a query: they fetch meanwhile (sm90/mixed_gather.cuh), then wait
// for survey_barrier. All other warps meet at a barrier.
template <class C>
inline constexpr bool kProducersAreEarly = C::R::kMixed && !C::kWalks;
template <class C>
inline constexpr int kSurveyWarps = C::kThreads / kWarpSize - (kProducersAreEarly<C> ? C::kProducers : 0);

// Ids of named barriers; 0 is for all threads. A kernel numbers its own from kBarrierOfKernel on. A walk
// surveys in another way, and may use all from there (few_heads/team.cuh, many_heads/smem.cuh).
enum NamedBarrier {
  kBarrierQ = 1,
  kBarrierOfKernel,  // up to 6
  kBarrierSurvey = 7,
  // Barriers of producers that fetch early: over one layout (EarlyStage), or over two (MixedProducer), never
  // both. With C::kFetchesEarly all warps arrive at kBarrierSurvey and kBarrierSurveyed; producers wait
  // later, at the second, all others at the first.
  kBarrierSurveyed = 8,
  kBarrierBegin = 9,
  kBarrierMixedBegin = 8,
  kBarrierTurn = 8,  // + number of the producer, from 1 on: its turn has come
  kNumBarriers = 16,
};
// Threads at kBarrierBegin or kBarrierMixedBegin: warp 0, which has made the barriers, and the producers.
template <class C>
inline constexpr int kBeginThreads = (C::kProducers + 1) * kWarpSize;
// The lane, found anew for a role: with many roles the compiler would spill one value for all.
template <class C>
__device__ __forceinline__ int lane_of_role(int lane) {
  if constexpr (kProducersAreEarly<C>) {
    lane = threadIdx.x % kWarpSize;
    asm volatile("" : "+r"(lane));
  }
  return lane;
}

// Reads the finished survey, and takes the CTA's share of the valid keys. `warp` is one of kSurveyWarps, or
// past them if it did not survey. `discard`: if keys have gaps, early producers drop what they have fetched,
// before anyone looks at it.
template <class C, class Discard = std::nullptr_t>
__device__ __forceinline__ KeySurvey read_survey(const KernelParams& params, typename C::Item& w,
                                                 uint32_t smem, int warp, int lane, Discard&& discard = {}) {
  const unsigned length = w.source(params).length();
  const KeySurvey survey(smem + MLA_SMEM(C, maps), length, lane);
  if (survey.has_gaps && (C::kFetchesEarly || has_positions<C>(length))) [[unlikely]] {
    if (has_positions<C>(length) && (!kProducersAreEarly<C> || warp < kSurveyWarps<C>))
      list_positions<kSurveyWarps<C>>(survey, positions_of<C>(smem), warp, lane);
    if constexpr (requires { discard(); }) discard();
    block_barrier<C::kThreads>();
  }
  w.template take_share<C>(survey.num_keys, params.splits);
  return survey;
}

// A warp's part of the survey of a CTA's query. `meanwhile` may load a small Q behind the entries: before
// them it would delay them, and the first rows. A large Q comes by the copy engine, past the loads.
template <class C, class Meanwhile>
__device__ __forceinline__ void survey_part(const KernelParams& params, const typename C::Item& w,
                                            uint8_t* smem, int warp, int lane, Meanwhile&& meanwhile) {
  if (kProducersAreEarly<C> && warp >= kSurveyWarps<C> - C::kExpanders) warp -= C::kProducers;
  survey_keys<kSurveyWarps<C>, kProducersAreEarly<C> ? 3 : 6>(
      w.source(params), warp, lane, shared_address(smem) + MLA_SMEM(C, maps), meanwhile);
}
// Waits for all parts of the survey, and reads it.
template <class C>
__device__ __forceinline__ KeySurvey end_survey(const KernelParams& params, typename C::Item& w,
                                                uint8_t* smem, int warp, int lane) {
  const uint32_t shared = shared_address(smem);
  if constexpr (kProducersAreEarly<C>) {
    if (warp >= kSurveyWarps<C> - C::kExpanders) warp -= C::kProducers;
    named_barrier(kBarrierSurvey, kSurveyWarps<C> * kWarpSize);
    if (warp == 0 && lane == 0) mbarrier_arrive(shared + MLA_SMEM(C, survey_barrier));
  } else if constexpr (C::kFetchesEarly) {
    named_barrier_arrive(kBarrierSurveyed, C::kThreads);
    named_barrier(kBarrierSurvey, C::kThreads);
  } else {
    block_barrier<C::kThreads>();
  }
  return read_survey<C>(params, w, shared, warp, lane);
}

}  // namespace mla_fp8::gpu
