#pragma once
// The portable attention kernel: every GPU from sm_80 on, every layout, decode and prefill. It is the plain
// flash-attention loop in at most 99 KB of shared memory, the most of a CTA on sm_86, sm_89 and sm_120.
//
// A CTA of 8 warps takes one query token, 16, 32 or 64 of its heads (M of an mma), and one of `splits` parts
// of its keys. KeysOf says which keys: portable.cu those of sparse attention,
// paged_attention_ragged_latent.cu the pages of a request. For each block of 32 keys:
//
//   gather   copies rows as stored into a stage, by cp.async, a block ahead; zeros past the end. One warp has
//            looked up where they lie, a block before that; warps take turns. Rows come through the L1 if the
//            survey has seen a slot twice
//   decode   makes bf16 latents [key][dim], once for all heads, as dequantize_kv does; bf16 rows stay
//   S        a warp has a quarter of the dims, with Q in registers, and 16 heads (with 64 heads: 32). With 16
//            heads in a CTA it has half of the keys
//   P        adds up the quarters; 8 lanes (with 64 heads: 4) do the online softmax of a head
//   O        a warp has 64 value dims of all heads, with 64 heads 128 dims of its group's
//
// 64 heads belong to two groups of 4 warps, which wait for each other only around decode. The first group
// fetches the next rows after S, the second before it: so one is at S while the other is at P.
//
//   barrier                 orders
//   1, before decode        rows have landed, places of the next are known; latents have been read
//   2, before S             latents are written; the stage of 64 heads is free for the next block
//   3, before P, a group's  logits are written
//   4, before O, a group's  weights and factors are written; tells whether a factor is not 1
//
// With splits, CTAs leave (output, maximum, sum) in a workspace, and a second kernel (merge.cu) adds them up
// in their order: the same bits every time.
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"
#include "cuda/sparse_attention/portable/rows.cuh"

namespace mla_fp8::gpu::portable {

// A head's weights are 2^(logit - base). The base is no running maximum: it moves, and sums and outputs with
// it, only when a logit exceeds it by more than this. After the first block that is rare.
constexpr float kMostAboveBase = 8.0f;

// Transposes words of four neighbouring lanes: w[j] of lane t becomes w[t] of lane j.
__device__ __forceinline__ void transpose_quads(uint32_t (&w)[4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32_t got = __shfl_xor_sync(kFullWarp, t & bit ? w[j] : w[j | bit], bit);
      w[j] = t & bit ? got : w[j], w[j | bit] = t & bit ? w[j | bit] : got;
    }
}

// A row of Q: a head of a query.
struct QueryHead {
  int64_t token;
  int head;
  bool exists;
};

// A fragments of kTiles times 16 rows and kSteps times 16 dims of Q. With 64 heads a lane loads 8 dims in a
// row, which belong to four lanes; `order_q` waits for the loads and deals them out. (One H200, 4096 queries,
// 64 heads of dsv4: 1934 -> 1904 us. Fewer heads or an odd number of steps were slower; rows of several
// queries leave too few registers.)
template <int kTiles, int kSteps>
using QFragments = uint32_t[kTiles][kSteps][4];
template <class KeysOf, int kTiles, int kSteps>
inline constexpr bool kQInPieces = kTiles == 2 && kSteps % 2 == 0 && !KeysOf::kSeveralQueries;

template <class KeysOf, int kTiles, int kSteps>
__device__ __forceinline__ void load_q(QFragments<kTiles, kSteps>& q, const typename KeysOf::Params& params,
                                       int64_t item, int first_row, int first_dim) {
  const SparseAttentionParams& p = params.p;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2 * kTiles; ++half) {
    const auto [token, head, exists] = KeysOf::query_head(params, item, first_row + half * 8 + g);
    const uint16_t* const src = p.q + token * p.q_stride_token + int64_t{head} * p.q_stride_head + first_dim;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t (&a)[4] = q[half / 2][k];
      if constexpr (!kQInPieces<KeysOf, kTiles, kSteps>) {
        a[half % 2] = exists ? *reinterpret_cast<const uint32_t*>(src + k * 16 + 2 * t) : 0;
        a[2 + half % 2] = exists ? *reinterpret_cast<const uint32_t*>(src + k * 16 + 2 * t + 8) : 0;
      } else if (k % 2 == 0) {
        const auto x = exists ? *reinterpret_cast<const Words<4>*>(src + k * 16 + t * 8) : Words<4>{};
        uint32_t (&b)[4] = q[half / 2][k + 1];
        a[half % 2] = x[0], a[2 + half % 2] = x[1], b[half % 2] = x[2], b[2 + half % 2] = x[3];
      }
    }
  }
}

template <class KeysOf, int kTiles, int kSteps>
__device__ __forceinline__ void order_q(QFragments<kTiles, kSteps>& q) {
  if constexpr (kQInPieces<KeysOf, kTiles, kSteps>)
#pragma unroll
    for (int half = 0; half < 2 * kTiles; ++half)
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t (&a)[4] = q[half / 2][k], (&b)[4] = q[half / 2][k + 1];
        uint32_t words[4] = {a[half % 2], a[2 + half % 2], b[half % 2], b[2 + half % 2]};
        transpose_quads(words);
        a[half % 2] = words[0], a[2 + half % 2] = words[1], b[half % 2] = words[2],
                 b[2 + half % 2] = words[3];
      }
}

// Runs between S and P of a block that holds one of the last keys alone, and finds which rows see it. The
// others give it a weight of 0, so NaN and infinity in its latent become 0; rows that see it have them in
// their logits. A call takes no registers of the kernel.
template <class KeysOf, class Smem>
__device__ __noinline__ void prepare_last(const typename KeysOf::Params& params, Smem& smem, int first_row,
                                          int last, uint16_t* latent) {
  for (int row = threadIdx.x; row < Smem::kRows; row += blockDim.x)
    smem.sees[row] = KeysOf::sees(params, smem.keys, first_row, first_row + row, last);
  for (int i = threadIdx.x; i < Smem::kDims; i += blockDim.x)
    if ((latent[i] & 0x7f80) == 0x7f80) latent[i] = 0;
}

template <class KeysOf, RowKind kKind, int kDims, int kHeads>
__global__ void __launch_bounds__(Team<kHeads>::kThreads, Team<kHeads>::kCtasPerSm)
    portable_kernel(const __grid_constant__ typename KeysOf::Params params) {
  using T = Team<kHeads>;
  using Smem = Shared<KeysOf, kKind, kDims, kHeads>;
  constexpr int kWarps = T::kWarps, kWarpDims = T::kWarpDims;
  constexpr int kSoftmaxLanes = T::kSoftmaxLanes, kLaneKeys = T::kLaneKeys, kWarpTiles = T::kWarpTiles;
  constexpr int kPartOctets = kBlockKeys / 8 / T::kKeyParts, kRounds = kPartOctets / 2;
  constexpr int kSteps = kDims / kQuarters / 16;
  constexpr int kGroups = T::kGroups, kGroupTiles = T::kGroupTiles, kGroupThreads = T::kThreads / kGroups;
  constexpr bool kAhead = Smem::kStages > 1;  // the next rows are asked for before these are decoded
  static_assert(kDims % (kQuarters * 16) == 0 && kPartOctets % 2 == 0);
  const SparseAttentionParams& p = params.p;
  extern __shared__ __align__(16) uint8_t smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int matrix = lane / 8, row = lane % 8;
  const int rows = KeysOf::rows(params), row_blocks = ceil_div(rows, kHeads);
  const int split = blockIdx.x % params.splits;
  const int64_t item = blockIdx.x / params.splits / row_blocks;
  const int first_row = blockIdx.x / params.splits % row_blocks * kHeads;

  const int group = warp / T::kGroupWarps, in_group = warp % T::kGroupWarps;
  const int group_head = group * T::kGroupHeads;

  wait_for_previous_grid();
  const typename KeysOf::Keys keys = KeysOf::template keys<kHeads>(params, item, split, first_row);
  const bool repeats =
      survey_keys<kWarps, 8>(KeysOf::source(params, keys), warp, lane, shared_address(smem.map), [] {});

  // S: this warp's heads, its quarter of the dims, its keys.
  const int head_tile = warp / kQuarters % T::kTileParts * kWarpTiles;
  const int first_dim = warp % kQuarters * kSteps * 16;
  const int first_octet = warp / kQuarters / T::kTileParts * kPartOctets;
  uint32_t q[kWarpTiles][kSteps][4];
  load_q<KeysOf>(q, params, item, first_row + head_tile * 16, first_dim);
  if (threadIdx.x == 0) smem.keys = keys;
  if (threadIdx.x < p.num_scopes) smem.pages[threadIdx.x] = Pages(p.scopes[threadIdx.x]);
  const bool has_repeats = named_barrier_any(0, T::kThreads, repeats);
  const uint32_t map = shared_address(smem.map);
  const ValidKeys<MapInShared> valid_keys(KeySurvey(map, KeysOf::source(params, keys).length(), lane), {map});
  const int all_blocks = ceil_div(valid_keys.num_keys(), kBlockKeys);
  const int part = KeysOf::kOfSplit ? 0 : split, parts = KeysOf::kOfSplit ? 1 : params.splits;
  const int first_block = static_cast<int>(int64_t{all_blocks} * part / parts);
  const int full_blocks = static_cast<int>(int64_t{all_blocks} * (part + 1) / parts) - first_block;
  const int num_blocks = full_blocks + KeysOf::num_last(keys);
  const int first_key = first_block * kBlockKeys;
  const int num_keys = min(valid_keys.num_keys() - first_key, full_blocks * kBlockKeys);
  const int num_past_l1 = has_repeats ? -1 : num_blocks;  // -1: rows come through the L1
  if (warp == 0) smem.valid_keys[lane] = valid_keys;
  if (threadIdx.x == 0) smem.num_blocks = num_blocks;
  __syncthreads();

  Gather<KeysOf, kKind, kDims, kHeads> gather(params, smem, first_key, first_key + num_keys);
  if (warp < 2) gather.look_up(warp), gather.finish(warp);
  order_q<KeysOf>(q);
  __syncthreads();
  const auto fetch = [&](int block) {
    if (block < num_past_l1) gather.start(block);
    else if (num_past_l1 < 0) gather.start_through_l1(block);
    cp_async_commit();
  };
  fetch(0);

  const float layer_scale = p.scale ? *p.scale : 1.0f;
  const float logit_scale = p.sm_scale * layer_scale * kLog2E;
  const int own_head = threadIdx.x / kSoftmaxLanes, own_key = threadIdx.x % kSoftmaxLanes * kLaneKeys;
  // Every other head has its second four keys first: loads fall into different banks.
  const int own_swap = kLaneKeys == 8 ? own_head % 2 * 4 : 0;
  float max_logit = -INFINITY, base = -INFINITY, sum = 0.0f;  // of own_head; the sum is this lane's part
  float out[kGroupTiles][kWarpDims / 8][4] = {};

#pragma unroll 1
  for (int block = 0; block < num_blocks; ++block) {
    const int stage = block % Smem::kStages;
    const bool looks_up = warp == block % kWarps && block + 2 < num_blocks;
    cp_async_wait_all();
    __syncthreads();
    if (looks_up) gather.look_up(block + 2);
    if constexpr (kAhead) fetch(block + 1);
    if constexpr (Smem::kDecodes) {
      decode_block(smem, params.rows, block);
      __syncthreads();
    }
    if (!kAhead && group == kGroups - 1) fetch(block + 1);
    const auto* latents = smem.latents(stage);

    const uint32_t latents_from =
        shared_address(&latents[first_octet * 8 + matrix / 2 * 8 + row][first_dim + matrix % 2 * 8]);
    uint32_t b[1 + T::kLoadsAhead][4];  // fragments of this step, and of the next
    const auto load_step = [&](int step) {
      const int at = step / kSteps * 16 * Smem::kPitch + step % kSteps * 16;
      if (step < kRounds * kSteps) ldmatrix_x4(b[step % (1 + T::kLoadsAhead)], latents_from + at * 2);
    };
    if constexpr (T::kLoadsAhead > 0) load_step(0);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int octet = first_octet + 2 * round;
      float s[kWarpTiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int step = round * kSteps + k;
        load_step(step + T::kLoadsAhead);
        const uint32_t (&now)[4] = b[step % (1 + T::kLoadsAhead)];
#pragma unroll
        for (int tile = 0; tile < kWarpTiles; ++tile) {
          mma_bf16(s[tile][0], q[tile][k], now[0], now[1]);
          mma_bf16(s[tile][1], q[tile][k], now[2], now[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int half = 0; half < 2 * kWarpTiles; ++half) {
          const int at = Smem::logit_index(head_tile * 16 + half * 8 + g, (octet + i) * 8 + 2 * t);
          const float (&x)[4] = s[half / 2][i];
          *reinterpret_cast<float2*>(&smem.logits[warp % kQuarters][at]) = {x[half % 2 * 2],
                                                                            x[half % 2 * 2 + 1]};
        }
    }
    if (!kAhead && group < kGroups - 1) fetch(block + 1);
    if constexpr (KeysOf::kSeveralQueries)
      if (block >= full_blocks) {
        __syncthreads();
        prepare_last<KeysOf>(params, smem, first_row, block - full_blocks, smem.latents(stage)[0]);
        __syncthreads();
      }
    named_barrier(1 + group, kGroupThreads);

    bool moves = false;
    if (own_head < kHeads) {
      float s[kLaneKeys];
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter)
#pragma unroll
        for (int four = 0; four < kLaneKeys; four += 4) {
          const int key = own_key + (four ^ own_swap);
          const float4 x =
              *reinterpret_cast<const float4*>(&smem.logits[quarter][Smem::logit_index(own_head, key)]);
          if (quarter == 0) s[four] = x.x, s[four + 1] = x.y, s[four + 2] = x.z, s[four + 3] = x.w;
          else s[four] += x.x, s[four + 1] += x.y, s[four + 2] += x.z, s[four + 3] += x.w;
        }
      int left = num_keys - block * kBlockKeys - own_key;
      if constexpr (KeysOf::kSeveralQueries)
        if (block >= full_blocks) left = smem.sees[own_head] - own_key;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) s[i] *= logit_scale;
      KeysOf::cap(params, s);
      if (left < kLaneKeys)  // the last block
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i)
          if ((i ^ own_swap) >= left) s[i] = -INFINITY;
      float most = s[0];
#pragma unroll
      for (int i = 1; i < kLaneKeys; ++i) most = fmaxf(most, s[i]);
#pragma unroll
      for (int offset = 1; offset < kSoftmaxLanes; offset *= 2)
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
      max_logit = fmaxf(max_logit, most);
      const float before = base;
      if (max_logit > base + kMostAboveBase) base = max_logit, moves = true;
      const float reference = base == -INFINITY ? 0.0f : base;  // nothing yet: weights are 0, not NaN
      const float factor = fast_exp2(before - reference);
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) s[i] = fast_exp2(s[i] - reference);
      sum *= factor;
#pragma unroll
      for (int i = 0; i < kLaneKeys; i += 4) {
        sum += (s[i] + s[i + 1]) + (s[i + 2] + s[i + 3]);
        *reinterpret_cast<Words<2>*>(&smem.weights[own_head][own_key + (i ^ own_swap)]) = {
            pack_bf16(s[i], s[i + 1]), pack_bf16(s[i + 2], s[i + 3])};
      }
      if (own_key == 0) smem.factor[own_head] = factor;
    }
    if (named_barrier_any(1 + group, kGroupThreads, moves)) {
#pragma unroll
      for (int tile = 0; tile < kGroupTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float factor = smem.factor[group_head + tile * 16 + half * 8 + g];
#pragma unroll
          for (int n = 0; n < kWarpDims / 8; ++n)
            out[tile][n][2 * half] *= factor, out[tile][n][2 * half + 1] *= factor;
        }
    }
    if (looks_up) gather.finish(block + 2);
#pragma unroll
    for (int step = 0; step < kBlockKeys; step += 16) {
      uint32_t weights[kGroupTiles][4];
#pragma unroll
      for (int tile = 0; tile < kGroupTiles; ++tile)
        ldmatrix_x4(weights[tile],
                    shared_address(
                        &smem.weights[group_head + tile * 16 + matrix % 2 * 8 + row][step + matrix / 2 * 8]));
      const uint32_t from =
          shared_address(&latents[step + matrix % 2 * 8 + row][in_group * kWarpDims + matrix / 2 * 8]);
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; n += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, from + n * 16);
#pragma unroll
        for (int tile = 0; tile < kGroupTiles; ++tile) {
          mma_bf16(out[tile][n], weights[tile], v[0], v[1]);
          mma_bf16(out[tile][n + 1], weights[tile], v[2], v[3]);
        }
      }
    }
  }

  const Partials partials(params);
  if (own_head < kHeads) {
#pragma unroll
    for (int offset = 1; offset < kSoftmaxLanes; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    const int at = first_row + own_head;
    const int64_t query_head = item * rows + at;
    float factor = max_logit == -INFINITY ? 1.0f : fast_exp2(base - max_logit);
    if (own_key == 0 && at < rows) {
      sum *= factor;
      if (params.splits > 1) {
        *partials.stats(query_head, split) = {max_logit, sum};
      } else {
        factor *= layer_scale * output_factor(p, KeysOf::query_head(params, item, at).head, max_logit, sum);
        store_stats(p, query_head, max_logit, sum);
      }
      smem.out_factor[own_head] = factor;
    }
  }
  __syncthreads();
  if (params.splits > 1 && num_blocks == 0) return;
#pragma unroll
  for (int tile = 0; tile < kGroupTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = group_head + tile * 16 + half * 8 + g;
      const auto [token, head, wanted] = KeysOf::query_head(params, item, first_row + at);
      const int first_column = in_group * kWarpDims;
      const bool exists = wanted;
      const float factor = smem.out_factor[at];
      if (params.splits > 1) {
        if (!exists) continue;
        float* const dst = partials.out(item * rows + first_row + at, split) + first_column + 2 * t;
#pragma unroll
        for (int n = 0; n < kWarpDims / 8; ++n)
          *reinterpret_cast<float2*>(dst + n * 8) = {out[tile][n][2 * half] * factor,
                                                     out[tile][n][2 * half + 1] * factor};
        continue;
      }
      uint16_t* const dst = p.out + token * p.out_stride_token + head * p.out_stride_head + first_column;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = pack_bf16(out[tile][n + j][2 * half] * factor, out[tile][n + j][2 * half + 1] * factor);
        transpose_quads(words);
        if (exists)
          *reinterpret_cast<Words<4>*>(dst + (n + t) * 8) = {words[0], words[1], words[2], words[3]};
      }
    }
}

template <class KeysOf, RowKind kKind, int kDims, int kHeads>
void launch_heads(const typename KeysOf::Params& params, gpuStream_t stream) {
  constexpr int kSmemBytes = sizeof(Shared<KeysOf, kKind, kDims, kHeads>);
  static_assert(kSmemBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 have no more");
  const int rows = KeysOf::rows(params);
  const int64_t items = params.p.num_tokens * params.p.num_q_heads / rows;
  launch(portable_kernel<KeysOf, kKind, kDims, kHeads>,
         {.grid = items * ceil_div(rows, kHeads) * params.splits,
          .block = Team<kHeads>::kThreads,
          .stream = stream,
          .smem = kSmemBytes},
         params);
}

}  // namespace mla_fp8::gpu::portable
