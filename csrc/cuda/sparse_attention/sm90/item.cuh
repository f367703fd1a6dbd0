#pragma once
// An item of few_heads and many_heads, a query and some of its heads: how items are launched, found and
// surveyed, and how their heads end.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "cuda/device/cluster.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

inline constexpr int kConsumerWarps = 8;
inline constexpr int kConsumerThreads = kConsumerWarps * kWarpSize;
inline constexpr int kStageRows = 16;  // keys that one producer warp fetches at once: M of an mma
inline constexpr int kOctetHeads = 8;  // N of an mma

// The lists of tiles of queries (ops/shared_keys.h), if there are any.
struct SharedKeys {
  const int32_t* lists;
  int64_t words;  // of a list
  int capacity;
  QueryTiles queries;

  __device__ const int32_t* list(unsigned tile) const { return lists + tile * words; }
  __device__ int length(unsigned tile) const { return min(__ldg(list(tile)), capacity); }
  __device__ __forceinline__ bool has(int64_t query) const {
    return lists && length(queries.of(static_cast<unsigned>(query))) >= 0;
  }
};

// A list of the positions of valid keys (list_positions), behind all else where there is room for it.
template <class C>
inline constexpr int kPositionsBytes =
    !C::kWalks && C::kSmemBytes + kMapWords * kWarpSize * 2 <= kMaxSharedBytes ? kMapWords * kWarpSize * 2
                                                                               : 0;
template <class C>
__device__ __forceinline__ bool has_positions(unsigned length) {
  return kPositionsBytes<C> > 0 && part_size(length) == kWarpSize;
}
template <class C>
__device__ __forceinline__ uint32_t positions_of(uint32_t smem) {
  return smem + C::kSmemBytes;
}

struct KernelParams {
  SparseAttentionParams p;
  Divider splits;                 // CTAs of one cluster, which share a query's keys
  Divider head_blocks;            // CTAs of kHeads heads for one query
  bool follows;                   // plan.h
  int segments_log2, run_blocks;  // of a query at most; of a run at least (sm90/segments.cuh)
  int most_runs;                  // of a query, whatever keys are valid
  // Of many_heads over neighbours (sm90/many_heads/neighbours.cuh).
  int tile_queries;  // else 1
  int64_t first_tile;
  int num_tiles, tile_rows, share_ctas;  // whose keys so many CTAs share (shares.cuh), else 0
  Divider page_size[2];                  // of each scope
  SharedKeys shared;                     // whose queries one launch takes, and the next one leaves out

  __device__ int num_splits() const { return static_cast<int>(splits.divisor()); }
  __device__ int num_head_blocks() const { return static_cast<int>(head_blocks.divisor()); }
};

// The end of a block that finds nothing to do. One of them sees to what end_grid() does.
__device__ __forceinline__ void leave_grid(bool follows) {
  if (blockIdx.x == 0) end_grid(follows);
}

template <class C>
inline constexpr bool kHasSegments = requires { requires C::kSegments; };  // sm90/segments.cuh

template <class C>  // the CTAs of a query form no cluster, but follow each other (sm90/many_heads/parts.cuh)
inline constexpr bool kHasParts = requires { requires C::kParts; };
template <class C>  // and leave the result of each run
inline constexpr bool kHasRuns = kHasParts<C> && kHasSegments<C>;

template <class C>
int blocks_of_heads(const SparseAttentionParams& p, const Plan& plan) {
  return plan.tile_queries > 1 || plan.takes_lists ? 1 : ceil_div(p.num_q_heads, C::kHeads);
}
template <class C>
KernelParams kernel_params(const SparseAttentionParams& p, const Plan& plan) {
  const bool shares = shares_tiles(plan);
  const int head_blocks = blocks_of_heads<C>(p, plan);
  const int64_t tiles = ceil_div(p.num_tokens, int64_t{plan.tile_queries});
  const SharedKeysShape shared(p);
  return {
      .p = p,
      .splits = Divider(plan.splits),
      .head_blocks = Divider(head_blocks),
      .follows = plan.follows,
      .segments_log2 = std::countr_zero(static_cast<unsigned>(plan.segments)),
      .run_blocks = plan.run_blocks,
      .most_runs = plan.most_runs,
      .tile_queries = plan.tile_queries,
      .first_tile = 0,
      .num_tiles = shares ? static_cast<int>(tiles * head_blocks) : 0,
      .tile_rows = std::min(plan.tile_queries * p.num_q_heads, C::kHeads),
      .share_ctas = shares ? plan.ctas : 0,
      .page_size = {Divider(p.scopes[0].page_size), Divider(p.scopes[p.num_scopes - 1].page_size)},
      .shared = {plan.lists, shared.words, static_cast<int>(shared.capacity), shared.queries},
  };
}
template <class C>
KernelParams launch_items(void (*kernel)(KernelParams), const SparseAttentionParams& p, const Plan& plan,
                          gpuStream_t stream) {
  const bool walks = plan.variant.schedule == Schedule::kWalk, shares = shares_tiles(plan);
  KernelParams params = kernel_params<C>(p, plan);
  const int64_t head_blocks = blocks_of_heads<C>(p, plan);
  const int64_t tiles =
      plan.takes_lists ? params.shared.queries.count() : ceil_div(p.num_tokens, int64_t{plan.tile_queries});
  const auto launch_some = [&](int64_t items, int splits) {
    params.splits = Divider(splits);
    const int64_t walking = std::min<int64_t>(ceil_div(items, int64_t{C::kQueries}), plan.ctas);
    launch(kernel,
           {.grid = walks    ? walking
                    : shares ? plan.ctas
                             : items * splits,
            .block = C::kThreads,
            .stream = stream,
            .smem = C::kSmemBytes + kPositionsBytes<C>,
            .cluster = kHasParts<C> ? 1 : splits},
           params);
  };
  if (plan.last_tiles > 0) {
    params.first_tile = tiles - plan.last_tiles;
    launch_some(plan.last_tiles, plan.last_splits);
    params.first_tile = 0, params.follows = true;
  }
  launch_some((tiles - plan.last_tiles) * head_blocks, plan.splits);
  return params;
}

// ---- split: a cluster of CTAs takes an item -------------------------------------------------------------

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
};

// What one CTA works on: blocks [first_block, first_block + num_blocks) of the valid keys of one query. The
// blocks are known after the survey of its keys.
struct SplitItem : QueryHeads {
  using Source = KeySource;
  Keys keys;
  int split;
  int first_block, num_blocks;

  __device__ Source source(const KernelParams& params) const { return {params.p, keys}; }
  __device__ bool is_whole(const KernelParams& params) const { return params.num_splits() == 1; }
  __device__ int64_t query_of(const SparseAttentionParams&, int) const { return query; }
  __device__ int head_of(const SparseAttentionParams&, int i) const { return first_head + i; }

  template <class C>
  __device__ void take_share(int num_keys, const Divider& splits) {
    const int blocks = ceil_div(num_keys, C::kBlockKeys);
    const auto each = static_cast<int>(splits(blocks));
    const int longer = blocks - each * static_cast<int>(splits.divisor());  // splits that take one more
    first_block = split * each + min(split, longer);
    num_blocks = each + (split < longer);
  }
  // Of the ring's sequence: whether there is an i-th stage among the first num_blocks blocks, and the rank of
  // its first key.
  template <class C>
  __device__ bool has_stage(int) const {
    return true;
  }
  template <class C>
  __device__ int first_rank(int i) const {
    return first_block * C::kBlockKeys + i * kStageRows;
  }
};

// Of a query whose CTAs meet in a second grid.
struct PartItem : SplitItem {
  __device__ bool is_whole(const KernelParams&) const { return false; }
  __device__ static int num_parts(const KernelParams& params) { return params.num_splits(); }
};

// The head blocks of a query run together: its rows are read from L2 again.
template <class C>
__device__ QueryHeads heads_of_item(const KernelParams& params, unsigned i) {
  const unsigned query = params.head_blocks.word(i);
  return {query, static_cast<int>(i - query * params.num_head_blocks()) * C::kHeads};
}

template <class C>
__device__ typename C::Item find_item(const KernelParams& params) {
  unsigned i = cluster_index();
  int split = cluster_rank();
  if constexpr (kHasParts<C>) {
    i = params.splits.word(blockIdx.x);
    split = static_cast<int>(blockIdx.x - i * params.num_splits());
  }
  const QueryHeads heads = heads_of_item<C>(params, i);
  const SplitItem item{heads, Keys(params.p, heads.query), split};
  if constexpr (kHasSegments<C>) return {item, params};
  else if constexpr (kHasParts<C>) return {item};
  else return item;
}

// Of a row with gaps, of parts of 32: the position of each valid key, 2 bytes, in the order of ranks. By all
// warps from the row's map, once: to look a rank up in the map takes a thousand clocks.
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

// Where other warps expand what producers fetch, or at least the first stages, these do not survey a query:
// they begin before (sm90/mixed_gather.cuh), and wait for survey_barrier. All others meet at a barrier.
template <class C>
inline constexpr bool kProducersAreEarly = (C::kExpanders > 0 || C::kHelpedStages > 0) && !C::kWalks;
template <class C>
inline constexpr int kSurveyWarps = C::kThreads / kWarpSize - (kProducersAreEarly<C> ? C::kProducers : 0);
// Where producers fetch their first stages before the survey has ended (EarlyStage), they do not wait for
// kBarrierSurvey, as all others do, but later for kBarrierSurveyed. All arrive at both.
template <class C>
inline constexpr bool kFetchesEarly = requires { requires C::kFetchesEarly; };
inline constexpr int kBarrierQ = 1, kBarrierSurvey = 7, kBarrierSurveyed = 8, kBarrierBegin = 9;
template <class C>  // that pass kBarrierBegin: warp 0, which has made the barriers, and producers
inline constexpr int kBeginThreads = (C::kProducers + 1) * kWarpSize;
// `lane` for one role: where there are many roles, it would be spilled if all had it in common.
template <class C>
__device__ __forceinline__ int lane_of_role(int lane) {
  if constexpr (kProducersAreEarly<C>) {
    lane = threadIdx.x % kWarpSize;
    asm volatile("" : "+r"(lane));
  }
  return lane;
}

// What a warp reads once the query is surveyed, the `warp`-th of kSurveyWarps or none of them: the valid
// keys, of which the CTA takes its share. `discard`: what early producers do in a row with gaps, before
// anyone looks at what they have fetched.
template <class C, class Discard = std::nullptr_t>
__device__ __forceinline__ KeySurvey read_survey(const KernelParams& params, typename C::Item& w,
                                                 uint32_t smem, int warp, int lane, Discard&& discard = {}) {
  const unsigned length = w.source(params).length();
  const KeySurvey survey(smem + MLA_SMEM(C, maps), length, lane);
  if (survey.has_gaps && (kFetchesEarly<C> || has_positions<C>(length))) [[unlikely]] {
    if (has_positions<C>(length) && (!kProducersAreEarly<C> || warp < kSurveyWarps<C>))
      list_positions<kSurveyWarps<C>>(survey, positions_of<C>(smem), warp, lane);
    if constexpr (requires { discard(); }) discard();
    block_barrier<C::kThreads>();
  }
  w.template take_share<C>(survey.num_keys, params.splits);
  return survey;
}

// A CTA that works on one query: its valid keys. Of a warp: its part of the survey. `meanwhile` may load a
// small Q, once the entries are on their way: behind it they would come late, and the first rows with them. A
// large Q comes by the copy engine, past the loads.
template <class C, class Meanwhile>
__device__ __forceinline__ void survey_part(const KernelParams& params, const typename C::Item& w,
                                            uint8_t* smem, int warp, int lane, Meanwhile&& meanwhile) {
  if (kProducersAreEarly<C> && warp >= kSurveyWarps<C> - C::kExpanders) warp -= C::kProducers;
  survey_keys<kSurveyWarps<C>, kProducersAreEarly<C> ? 3 : 6>(
      w.source(params), warp, lane, shared_address(smem) + MLA_SMEM(C, maps), meanwhile);
}
// What all parts come to.
template <class C>
__device__ __forceinline__ KeySurvey end_survey(const KernelParams& params, typename C::Item& w,
                                                uint8_t* smem, int warp, int lane) {
  const uint32_t shared = shared_address(smem);
  if constexpr (kProducersAreEarly<C>) {
    if (warp >= kSurveyWarps<C> - C::kExpanders) warp -= C::kProducers;
    named_barrier(kBarrierSurvey, kSurveyWarps<C> * kWarpSize);
    if (warp == 0 && lane == 0) mbarrier_arrive(shared + MLA_SMEM(C, survey_barrier));
  } else if constexpr (kFetchesEarly<C>) {
    named_barrier_arrive(kBarrierSurveyed, C::kThreads);
    named_barrier(kBarrierSurvey, C::kThreads);
  } else {
    block_barrier<C::kThreads>();
  }
  return read_survey<C>(params, w, shared, warp, lane);
}
template <class C, class Meanwhile>
__device__ __forceinline__ KeySurvey survey_query(const KernelParams& params, typename C::Item& w,
                                                  uint8_t* smem, int warp, int lane, Meanwhile&& meanwhile) {
  survey_part<C>(params, w, smem, warp, lane, meanwhile);
  return end_survey<C>(params, w, smem, warp, lane);
}

// ---- walk: a CTA goes through items ---------------------------------------------------------------------

// The queries that go alone, in shared memory: of a grid whose CTAs take tiles the others walk through them.
// CTAs past the last tile are among these.
struct AloneQueries {
  unsigned count, walker, walkers;  // this CTA is one of how many
  uint16_t queries[kMostTilesBesideWalk * kMaxTileQueries];
  uint32_t of_warps[kWarpSize];

  // By all threads, one for each tile. A barrier comes before it is read.
  template <int kThreads>
  __device__ void find(const SharedKeys& shared, int warp, int lane) {
    static_assert(kThreads >= kMostTilesBesideWalk);
    const unsigned tile = warp * kWarpSize + lane;
    const unsigned size = tile < shared.queries.count() ? shared.queries.size(tile) : 0;
    const bool is_taken = size > 0 && shared.length(tile) >= 0;
    const unsigned alone = is_taken ? 0 : size, up_to_here = warp_inclusive_sum(alone);
    const unsigned taken = __popc(__ballot_sync(kFullWarp, is_taken));
    const unsigned taken_before = __popc(__ballot_sync(kFullWarp, is_taken && tile < blockIdx.x));
    if (lane == kWarpSize - 1) of_warps[warp] = up_to_here | taken << 12 | taken_before << 22;
    block_barrier<kThreads>();
    const uint32_t of_warp = lane < kThreads / kWarpSize ? of_warps[lane] : 0;
    const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0);
    const uint32_t all = __reduce_add_sync(kFullWarp, of_warp);
    if (warp == 0 && lane == 0)
      count = all & 0xfff, walker = blockIdx.x - (all >> 22), walkers = gridDim.x - (all >> 12 & 0x3ff);
    uint16_t* const to = queries + (before & 0xfff) + up_to_here - alone;
    const unsigned first = shared.queries.first(tile);
    for (unsigned i = 0; i < alone; ++i) to[i] = static_cast<uint16_t>(first + i);
  }
};
template <class C>
inline constexpr bool kWalksBesideTiles = requires { C::kAlonePlace; };
template <class C>
__device__ __forceinline__ AloneQueries& alone_queries() {
  extern __shared__ __align__(128) uint8_t smem[];
  return *reinterpret_cast<AloneQueries*>(smem + C::kAlonePlace);
}

// One query and kHeads of its heads. A CTA's C::kQueries places take items in turns.
template <class C>
struct WalkItem : QueryHeads {
  // 32 bits: a division of 64 would be a function call, across which no register stays uniform.
  __device__ static unsigned count(const KernelParams& params) {
    if constexpr (kWalksBesideTiles<C>) return alone_queries<C>().count;
    else return static_cast<unsigned>(params.p.num_tokens) * params.num_head_blocks();
  }
  __device__ static unsigned first(const KernelParams& params, int row) {
    if constexpr (kWalksBesideTiles<C>) return alone_queries<C>().walker + alone_queries<C>().walkers * row;
    else return skip(params, blockIdx.x + gridDim.x * row);
  }
  __device__ static unsigned next(const KernelParams& params, unsigned i) {
    if constexpr (kWalksBesideTiles<C>) return i + alone_queries<C>().walkers * C::kQueries;
    else return skip(params, i + gridDim.x * C::kQueries);
  }

  // Whether this CTA has any item: by all threads, and a barrier of them.
  __device__ static bool has_any(const KernelParams& params) {
    bool has = !params.shared.lists;
    if (!has)
      for (unsigned i = blockIdx.x + gridDim.x * threadIdx.x; i < count(params); i += gridDim.x * C::kThreads)
        has |= !params.shared.has(params.head_blocks.word(i));
    return named_barrier_any(0, C::kThreads, has);
  }

  __device__ WalkItem(const KernelParams& params, unsigned i) : QueryHeads(of(params, i)) {}

 private:
  __device__ static QueryHeads of(const KernelParams& params, unsigned i) {
    if constexpr (kWalksBesideTiles<C>) return {i < count(params) ? alone_queries<C>().queries[i] : 0, 0};
    else return heads_of_item<C>(params, i);
  }
  // From i on the first whose query goes alone.
  __device__ static unsigned skip(const KernelParams& params, unsigned i) {
    if (params.shared.lists) [[unlikely]]
      while (i < count(params) && params.shared.has(params.head_blocks.word(i))) i += gridDim.x * C::kQueries;
    return i;
  }
};

// The warps that work on a query survey the keys of a later one, for themselves and its producers. A place
// for queries has two buffers for that.
template <class C>
class WalkSurveys {
 public:
  static constexpr int kWarps = C::kSurveyWarps, kReaders = C::kSurveyReaders;  // of a place

  __device__ WalkSurveys(uint8_t* smem, int place) : smem_(shared_address(smem)), place_(place) {}

  __device__ void init() const {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(full(i), kWarps * kWarpArrivals);
      mbarrier_init(empty(i), kReaders * kWarpArrivals);
    }
  }
  // By each of the warps that work on the place's i-th query.
  __device__ void write(int i, const SparseAttentionParams& p, const Keys& keys, int warp, int lane) const {
    wait_until_free<2>(empty(i), i);
    survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, map(i), [] {});
    mbarrier_arrive_warp(full(i), lane);
  }
  __device__ KeySurvey read(int i, int lane) const {
    wait_until_full<2>(full(i), i);
    return {map(i), load_shared_4(map(i) + kMapLength), lane};
  }
  __device__ bool is_there(int i) const { return __all_sync(kFullWarp, mbarrier_test(full(i), i / 2 & 1)); }
  __device__ uint32_t map(int i) const {
    return smem_ + MLA_SMEM(C, maps) + (place_ * 2 + i % 2) * kMapBytes;
  }
  // By each of its readers: of producers once they have found all keys.
  __device__ void release(int i, int lane) const { mbarrier_arrive_warp(empty(i), lane); }

 private:
  __device__ uint32_t full(int i) const {
    return smem_ + MLA_SMEM(C, survey_barriers) + (place_ * 2 + i % 2) * 16;
  }
  __device__ uint32_t empty(int i) const { return full(i) + 8; }

  const uint32_t smem_;
  const int place_;
};

// ---- the scale of a head's Q ----------------------------------------------------------------------------

// Q is f16 for e4m3 dims and bf16 for the others, each head times a power of two that brings |q| below 2^14.
// `largest`: the bits of the head's largest |q|, a bf16.
__device__ inline float q_factor(uint32_t largest) {
  return power_of_two(14 - max(exponent_above(largest << 16), -100));
}
// Of two bf16 x and what was there, the bits of the largest |x|, still two.
__device__ inline uint32_t larger_magnitudes(uint32_t largest, uint32_t x) {
  return __vmaxu2(largest, x & 0x7fff7fffu);
}
__device__ inline uint32_t larger_of_two(uint32_t x) { return max(x & 0xffff, x >> 16); }
// Of a pair of Q, for e4m3 dims or for others.
__device__ inline uint32_t q_pair(uint32_t pair, float factor, bool fp8) {
  const float2 x = unpack<Dtype::kBf16>(pair);
  return fp8 ? pack_f16(x.x * factor, x.y * factor) : pack_bf16(x.x * factor, x.y * factor);
}
// What turns products with such a Q into logits (log2).
template <class R>
__device__ float logit_scale(const SparseAttentionParams& p, float q_factor) {
  return p.sm_scale * kLog2E * (R::kUniformFp8 ? *p.scale : 1.0f) * reciprocal(q_factor);
}

// ---- the lazy softmax, and the end of a head ------------------------------------------------------------

// Weights are 2^(x - base + 7) in f16. The base, and with it O, moves only when a maximum has grown by more
// than 2^8, so a weight is at most 2^15.
inline constexpr float kLazyLog2 = 8.0f;
inline constexpr float kWeightLog2 = 7.0f;
inline constexpr float kNoMax = -1e30f;
// (max, sum) of nothing. Far below kNoMax, so that its weight is 0 next to anything.
inline constexpr float kNoPartial = -3e38f;
// The base of a head whose largest logit is this.
template <class C>
__device__ float base_for(float largest) {
  return kHasSegments<C> ? rintf(largest) : largest;
}

// The factor of a head's output, from the base and the sum of its weights.
template <class R>
__device__ float output_factor(const SparseAttentionParams& p, int head, float base, float sum) {
  if (head >= p.num_q_heads || sum == 0.0f) return 0.0f;
  const float sink = p.attn_sink ? fast_exp2(p.attn_sink[head] * kLog2E - base + kWeightLog2) : 0.0f;
  return __fdividef(R::kUniformFp8 ? *p.scale : 1.0f, sum + sink);
}
__device__ inline void write_head(const SparseAttentionParams& p, int64_t query, int head, float base,
                                  float sum, float largest) {
  if (head >= p.num_q_heads) return;
  const int64_t at = query * p.num_q_heads + head;
  p.lse[at] = sum == 0.0f ? -INFINITY : (log2f(sum) + base - kWeightLog2) * kLn2;
  if (p.max_logits) p.max_logits[at] = largest * kLn2;
}
// Both, of a head of an item (its query, its first head). `largest` is its largest logit; only prefill
// needs it.
template <class R, class Item>
__device__ float finish_head(const SparseAttentionParams& p, const Item& item, int head_in_item, float base,
                             float sum, float largest = -INFINITY) {
  if (!item.has_head(p, head_in_item)) return 0.0f;
  const int head = item.head_of(p, head_in_item);
  write_head(p, item.query_of(p, head_in_item), head, base, sum, largest);
  return output_factor<R>(p, head, base, sum);
}

// A head's output in units of four dims.
inline constexpr int kOutQuads = kHeadDimV / 4;

template <class Item>
__device__ uint2* place_of_head(const SparseAttentionParams& p, const Item& item, int head_in_item) {
  const int64_t query = item.query_of(p, head_in_item);
  const int head = item.head_of(p, head_in_item);
  return reinterpret_cast<uint2*>(p.out + query * p.out_stride_token + head * p.out_stride_head);
}
template <class C>
__device__ float output_value(float x, float factor) {
  return kHasSegments<C> && fabsf(x) < 0x1p-100f ? 0.0f : x * factor;
}
template <class C>
__device__ uint2 to_bf16(float4 x, float factor) {
  const auto value = [&](float y) { return output_value<C>(y, factor); };
  return {pack_bf16(value(x.x), value(x.y)), pack_bf16(value(x.z), value(x.w))};
}

__device__ inline void add(float4& a, const float4& b, float factor = 1.0f) {
  a.x = fmaf(b.x, factor, a.x), a.y = fmaf(b.y, factor, a.y);
  a.z = fmaf(b.z, factor, a.z), a.w = fmaf(b.w, factor, a.w);
}
__device__ inline void add(float& a, float b) { a += b; }
__device__ inline float4 scaled(const float4& x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
// f(first) and the kCount - 1 after it, added up as a binary tree does.
template <int kCount, class Fn>
__device__ __forceinline__ auto tree_sum(Fn&& f, int first = 0) {
  if constexpr (kCount == 1) {
    return f(first);
  } else {
    auto sum = tree_sum<kCount / 2>(f, first);
    add(sum, tree_sum<kCount / 2>(f, first + kCount / 2));
    return sum;
  }
}

}  // namespace mla_fp8::gpu
