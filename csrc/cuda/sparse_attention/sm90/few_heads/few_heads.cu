// Sparse MLA attention on Hopper for CTAs of 8 or 16 heads (bf16 rows: also 32).
//
// Eight heads fill one eighth of a tensor-core tile, so arithmetic is not the limit: fetching rows is. A CTA
// works on one query, in a walk on several. G counts its octets of heads.
//
//   all warps    survey the keys of the query; the CTAs of a query share the valid ones
//   producers    4 or 8 warps copy rows, one bulk copy each, into a ring of 8 or 16 stages of 16 rows. Rows
//                stay as they lie in the cache. A split over FP8 rows of one layout fetches its first stages
//                before the survey has ended (EarlyStage)
//   expanders    make rows of one kind where two caches differ in layout (mixed_expand.cuh): four more warps;
//                in walks of 16 heads four of eight producers, of 8 heads all. A split's producers do not
//                survey then, but fetch their first rows meanwhile
//   consumers    8 warps in teams of 2 G, over bf16 rows of G. A team takes whole blocks, of 16 keys for each
//                warp, and has its own softmax bases: teams never wait for each other. A warp computes
//     S^T = K Q^T       for its 16 keys and all heads. Q is the B operand, in shared memory. K comes from the
//                       raw rows by ldmatrix and a conversion; scales of tiles multiply accumulators
//     P = 2^(S - base)  with one exchange a block in the team. A base moves, and O with it, only when a logit
//                       exceeds it by 8 (log2)
//     O^T += V^T P^T    for its part of the value dims and all heads, in 64 accumulators (bf16 rows: 128). V
//                       comes from the same rows by ldmatrix.trans; scales multiply the weights
//
// Split: a CTA has one query and a share of its keys. Teams merge in shared memory, then the CTAs of a query
// (a cluster) in distributed shared memory, in a fixed order. Bound, H200: the gather, 35 clocks per key and
// SM, and about 9 K clocks per query for first rows and merge; with 32 heads the tensor cores.
// Segments: as split, but in runs that are added up in one order whoever has them (sm90/segments.cuh).
// Walk: a CTA has places for 4 / G queries, each with a team (bf16 rows: two). A place goes through its
// queries alone: while one ends, the other places keep the tensor cores busy. Its warps survey a query ahead
// for the producers. Two teams exchange halves of O through the place of Q. Bound: the gather from L2 with 8
// heads, latency of the consumers with 16.
//
// Barriers and who waits for whom: smem.cuh.
#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/sm90/few_heads/walk.cuh"

namespace mla_fp8::gpu {
namespace {

// ---- the end of an item of a split ----------------------------------------------------------------------
//
// Results are merged first by the warps of a CTA in its shared memory, then by the CTAs of a cluster in
// distributed shared memory.

// Producer warps: the first one finds the CTA's (max, sum) while the consumers write their outputs.
template <class C>
__device__ void merge_stats(const KernelParams& params, const typename C::Item& w, uint8_t* smem, bool first,
                            int lane) {
  const float2* warp_stats = reinterpret_cast<const float2*>(smem + MLA_SMEM(C, warp_stats));
  const float* warp_largest = reinterpret_cast<const float*>(smem + MLA_SMEM(C, warp_largest));
  block_barrier<C::kThreads>();
  if (first && lane < C::kHeads) {
    float max = kNoPartial, largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kConsumerWarps; ++i) {
      max = fmaxf(max, warp_stats[i * C::kHeads + lane].x);
      largest = fmaxf(largest, warp_largest[i * C::kHeads + lane]);
    }
    const float sum = tree_sum<kConsumerWarps>([&](int i) {
      const float2 x = warp_stats[i * C::kHeads + lane];
      return x.y * fast_exp2(x.x - max);
    });
    float2 result = {max, sum};
    if (params.num_splits() == 1)
      result.y = finish_head<typename C::R>(params.p, w, lane, max, sum,
                                            largest);  // nobody needs the sum
    reinterpret_cast<float2*>(smem + MLA_SMEM(C, stats))[lane] = result;
    reinterpret_cast<float*>(smem + MLA_SMEM(C, largest))[lane] = largest;
  }
  block_barrier<C::kThreads>();
}

// Consumers write O^T as float [team][head][kHeadDimV] to shared memory, brought to the CTA's maximum.
template <class C>
__device__ void write_partials(const Consumer<C>& consumer, uint8_t* smem, int warp, int lane) {
  const int t = lane % 4, team = warp / C::kMembers, member = warp % C::kMembers;
  float2* warp_stats = reinterpret_cast<float2*>(smem + MLA_SMEM(C, warp_stats));
  consumer.write_stats(smem);
  block_barrier<C::kThreads>();
#pragma unroll
  for (int n = 0; n < C::kOctets; ++n) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int head = n * kOctetHeads + 2 * t + c;
      float max = kNoPartial;
#pragma unroll
      for (int i = 0; i < kConsumerWarps; ++i) max = fmaxf(max, warp_stats[i * C::kHeads + head].x);
      factor[c] = fast_exp2(consumer.max_[n][c] - max);
    }
    float* head0 = reinterpret_cast<float*>(smem + MLA_SMEM(C, ring)) +
                   (team * C::kHeads + n * kOctetHeads + 2 * t) * C::kOutPitch +
                   member * C::kChunks * kChunkDims;
    consumer.store_partial(n, head0, factor);
  }
  block_barrier<C::kThreads>();
}

// Consumers add up the teams. With one split the sum is the output, else it replaces the first team's part.
template <class C>
__device__ void merge_teams(const KernelParams& params, const typename C::Item& w, uint8_t* smem,
                            int thread) {
  const float2* stats = reinterpret_cast<const float2*>(smem + MLA_SMEM(C, stats));
  const auto place = [&](int team, int quad) {
    return reinterpret_cast<float4*>(smem + MLA_SMEM(C, ring)) +
           ((team * C::kHeads + quad / kOutQuads) * C::kOutPitch / 4 + quad % kOutQuads);
  };
  constexpr int kAtOnce = 4;  // loads in flight
#pragma unroll 1
  for (int first = 0; first < C::kHeads * kOutQuads / kConsumerThreads; first += kAtOnce) {
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      x[i] = tree_sum<C::kTeams>([&](int team) { return *place(team, quad); });
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int quad = thread + (first + i) * kConsumerThreads;
      if (params.num_splits() > 1) *place(0, quad) = x[i];
      else if (w.first_head + quad / kOutQuads < params.p.num_q_heads)
        place_of_head(params.p, w, quad / kOutQuads)[quad % kOutQuads] =
            to_bf16<C::kSegments>(x[i], stats[quad / kOutQuads].y);
    }
  }
}

// Then the CTAs that share a query merge. Each CTA's partial output lies over its ring, float
// [head][kOutPitch], beside the (max, sum) of each head.

// One warp merges num_quads <= 4 * 32 quads of one head; `quad` is this lane's first. Latency of remote loads
// bounds it, so 16 are in flight: 4 CTAs x 4 pieces of 32 quads. With up to two pieces the last two columns
// have the same pieces of four further CTAs. One table serves both, as its code is cold.
template <class C>
__device__ void merge_quads(const KernelParams& params, const typename C::Item& w, uint32_t smem, int quad,
                            int num_quads, int lane) {
  constexpr int kRows = 4, kColumns = 4, kHalf = kColumns / 2;
  const bool is_wide = num_quads > kHalf * kWarpSize;
  const int splits = params.num_splits(), head = quad / kOutQuads;
  if (!w.has_head(params.p, head)) return;  // loads are used, so they have ended before this CTA leaves
  // Each CTA begins with itself, so that not all read from one. In segments these are the sides of a tree.
  const auto other = [&](int i) {
    if constexpr (C::kSegments) return w.split ^ min(i, splits - 1);
    const int split = w.split + min(i, splits - 1);
    return split < splits ? split : split - splits;
  };
  const auto split_of = [&](int i, int half) { return is_wide ? i : i + half * kRows; };
  float2 stats = {kNoPartial, 0.0f};  // lane r holds split r's
  float largest = -INFINITY;
  if (lane < splits) {
    stats = load_cluster_float2(cluster_address(smem + MLA_SMEM(C, stats) + head * 8, lane));
    if constexpr (C::kFindsLargest)
      if (params.p.max_logits)
        largest = load_cluster_float(cluster_address(smem + MLA_SMEM(C, largest) + head * 4, lane));
  }
  const uint32_t mine = smem + MLA_SMEM(C, ring) + (head * C::kOutPitch + quad % kOutQuads * 4) * 4;
  float4 sum[kColumns] = {};
  float max = stats.x, total = 0.0f, factor = 0.0f;
#pragma unroll 1
  for (int r = 0; r < splits; r += is_wide ? kRows : 2 * kRows) {
    float4 x[kRows][kColumns];
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int split = split_of(r + k, half), first = is_wide ? half * kHalf : 0;
        const uint32_t theirs = cluster_address(mine, other(split));
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
          const int piece = (first + i) * kWarpSize;
          x[k][half * kHalf + i] =
              split < splits && piece < num_quads
                  ? load_cluster_float4(theirs + piece * static_cast<int>(sizeof(float4)))
                  : float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
      }
    if (r == 0) {  // while the loads are on their way
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, offset));
      factor = fast_exp2(stats.x - max);
      total = stats.y * factor;
#pragma unroll
      for (int offset = 1; offset < kWarpSize; offset *= 2) {
        total += __shfl_xor_sync(kFullWarp, total, offset);
        if constexpr (C::kFindsLargest) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float f = __shfl_sync(kFullWarp, factor, other(split_of(r + k, half)));
#pragma unroll
        for (int i = half * kHalf; i < (half + 1) * kHalf; ++i) x[k][i] = scaled(x[k][i], f);
      }
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float4 first = tree_sum<kRows>([&](int k) { return x[k][i]; });
      float4 second = tree_sum<kRows>([&](int k) { return x[k][kHalf + i]; });
      if (!is_wide) add(first, second), second = {};
      add(sum[i], first), add(sum[kHalf + i], second);
    }
  }
  float out_factor = 0.0f;
  if (lane == 0) out_factor = finish_head<typename C::R>(params.p, w, head, max, total, largest);
  out_factor = __shfl_sync(kFullWarp, out_factor, 0);
  uint2* const out = place_of_head(params.p, w, head) + quad % kOutQuads;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (i * kWarpSize < num_quads) out[i * kWarpSize] = to_bf16<C::kSegments>(sum[i], out_factor);
}

// Each CTA of the cluster finishes an equal share of the heads, each of its eight warps an equal share of
// that: a few heads, or a part of one. Shares are of pieces, a quad for each lane.
template <class C>
__device__ void merge_splits(const KernelParams& params, const typename C::Item& w, uint8_t* smem, int warp,
                             int lane) {
  constexpr int kOfHead = kOutQuads / kWarpSize, kAll = C::kHeads * kOfHead;
  const auto begin = [&](int split) { return static_cast<int>(params.splits(split * kAll)); };
  const int of_cta = begin(w.split), end_of_cta = begin(w.split + 1);
  const int share = ceil_div(end_of_cta - of_cta, kConsumerWarps);
  const int first = of_cta + warp * share, end = min(first + share, end_of_cta);
#pragma unroll 1
  for (int piece = first, num; piece < end; piece += num) {
    const int most = share >= kOfHead ? kOfHead : 2;
    num = min(end - piece, most - piece % most);
    merge_quads<C>(params, w, shared_address(smem), piece * kWarpSize + lane, num * kWarpSize, lane);
  }
}

// ---- the kernels ----------------------------------------------------------------------------------------

// Attends to all runs of a team. Their sum is in out_, max_ and sum_ then.
template <class C>
__device__ __forceinline__ void attend_to_runs(Consumer<C>& consumer, const typename C::Item& w) {
  constexpr int kTiles = C::kChunks * 4;
  using Totals = RunTotals<kTiles, C::kOctets, true, true>;
  typename Totals::Result waiting[Totals::kWaiting];
  Totals totals(waiting);
  const int team = consumer.team(), first = w.first_run(team);
  int place = team, block = w.first_block_of(first);
#pragma unroll 1
  for (int run = 0; run < w.runs; ++run) {
    const int end = w.first_block_of(first + run + 1);
    if (block == end) continue;
#pragma unroll 1
    for (; block < end; ++block, place += C::kTeams) consumer.attend(place);
    consumer.add_up_sums(place - C::kTeams);
    totals.end_run(w, team, run, reinterpret_cast<float (&)[kTiles][C::kOctets][4]>(consumer.out_),
                   consumer.max_, &consumer.sum_);
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    few_heads_split_kernel(const __grid_constant__ KernelParams params) {
  const auto init = [](uint8_t* smem) { Ring<C>{shared_address(smem)}.init(); };
  run_cta(init, [&](uint8_t* smem, int warp, int lane) {
    Producers<C>::let_begin(warp);
    begin_grid(params.follows);
    typename C::Item w = C::Item::template find<C>(params, smem, warp, lane);
    if (w.is_left_out(params)) return leave_grid(params.follows);
    const auto merge = [&] {  // the warps that do not compute
      merge_stats<C>(params, w, smem, warp == kConsumerWarps, lane);
      __syncwarp();
      if (params.num_splits() > 1) {
        cluster_sync_shared();  // sums are written
        cluster_leave();        // sums are read: shared memory may go
      }
    };
    if (Producers<C>::run_early(params, w, smem, warp - kConsumerWarps, lane)) {
      merge();
      return end_grid(params.follows);
    }
    Query<C> q;
    survey_part<C>(params, w, smem, warp, lane, [&] {
      if (warp < kConsumerWarps) q.load(params.p, w.query, w.first_head, warp, lane);
    });
    if constexpr (C::kFetchesEarly) {
      if (warp >= kConsumerWarps) {
        give_up_registers<C::kProducerRegisters>();
        run_early<C>(params, w, smem, warp - kConsumerWarps, lane);
        merge();
        return end_grid(params.follows);
      }
    }
    const KeySurvey survey = end_survey<C>(params, w, smem, warp, lane);

    if (!C::kFetchesEarly && warp >= kConsumerWarps) {
      Producers<C>::run(params, w, survey, smem, warp - kConsumerWarps, lane);
      merge();
    } else {
      take_registers<C::kConsumerRegisters>();
      Consumer<C> consumer(params, smem, warp, lane);
      q.store(smem + MLA_SMEM(C, q), reinterpret_cast<float*>(smem + MLA_SMEM(C, q_scale)), warp, lane);
      named_barrier(kBarrierQ, kConsumerThreads);
      consumer.init();
      if constexpr (C::kSegments) attend_to_runs(consumer, w);
      else
        for (int block = consumer.team(); block < w.num_blocks; block += C::kTeams) consumer.attend(block);
      write_partials<C>(consumer, smem, warp, lane);
      merge_teams<C>(params, w, smem, threadIdx.x);
      if (params.num_splits() > 1) {
        __syncwarp();
        cluster_sync_shared();
        merge_splits<C>(params, w, smem, warp, lane);
        __syncwarp();
        cluster_leave();
      }
    }
    end_grid(params.follows);
  });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    few_heads_walk_kernel(const __grid_constant__ KernelParams params) {
  run_cta(init_walk<C>, [&](uint8_t* smem, int warp, int lane) {
    wait_for_previous_grid();
    if (WalkItem<C>::has_any(params)) walk<C>(params, smem, warp, lane);
  });
}

}  // namespace

template <>
bool launch_slice<Kernel::kFewHeads, MLA_SLICE>(const SparseAttentionParams& p, const Plan& plan,
                                                gpuStream_t stream) {
  const auto run = [&](auto variant, auto layout, auto extra) {
    constexpr Variant kVariant = kVariants[variant()];
    constexpr bool kWalks = kVariant.schedule == Schedule::kWalk;
    constexpr int kOctets = kVariant.heads / kOctetHeads;
    // Walks of 16 heads: half of the producers expand; of 8 heads: all (docs/kernels/hopper.md).
    constexpr int kExpanders = kVariant.producers < 8 || (kWalks && kOctets == 1) ? 0 : 4;
    using R = CachedRow<layout(), extra(), kExpanders, (kExpanders > 0 || kWalks)>;
    constexpr int kProducers = kVariant.producers - (kWalks ? R::kExpanders : 0);
    constexpr FewHeadsTraits kTraits{
        .octets = kOctets, .producers = kProducers, .schedule = kVariant.schedule};
    using C = FewHeads<R, kTraits>;
    if constexpr (kWalks) launch_items<C>(few_heads_walk_kernel<C>, p, plan, stream);
    else launch_items<C>(few_heads_split_kernel<C>, p, plan, stream);
  };
  return with_variant_of_slice<Kernel::kFewHeads, MLA_SLICE, MLA_SLICES>(p, plan, run);
}

}  // namespace mla_fp8::gpu
