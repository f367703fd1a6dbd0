// Sparse attention for every GPU from sm_80 on, every layout, decode and prefill: the plain flash-attention
// loop, in at most 99 KB of shared memory, the most of a CTA on sm_86, sm_89 and sm_120.
//
// A CTA of 8 warps takes one query token, 16 or 32 of its heads (M of an mma), and one of `splits` parts of
// its valid keys; one of 16 warps takes 64 heads. For each block of 32 keys:
//
//   gather   rows into a stage by cp.async, a block ahead, as the bytes that are stored; past the end: zeros.
//            The entries of `indices` are asked for a block before that
//   decode   to bf16 latents [key][dim], once for all heads, as dequantize_kv does; bf16 rows stay in place
//   S        a warp has a quarter of the dims, Q's in registers, and 16 heads or half of the keys
//   P        the quarters are added up; online softmax by 8 lanes a head
//   O        a warp has 64 value dims of all heads
//
//   barrier            orders
//   1, before decode   the rows have landed; latents and weights of the block before have been read
//   2, before S        latents; the stage of FP8 rows is free for the next block
//   3, before P        logits
//   4, before O        weights and factors
//
// With splits, CTAs leave (output, maximum, sum) in a workspace, and a second kernel adds them up in their
// order: the same bits every time.
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/sparse_attention/portable/partials.cuh"
#include "cuda/sparse_attention/portable/rows.cuh"

namespace mla_fp8::gpu {
namespace {

using namespace portable;

template <KvLayoutId kId, KvLayoutId kExtra, int kHeads>
__global__ void __launch_bounds__(Team<kHeads>::kThreads, Team<kHeads>::kCtasPerSm)
    portable_kernel(const __grid_constant__ PortableParams params) {
  using R = Row<kId>;
  using T = Team<kHeads>;
  using Smem = Shared<kId, kExtra, kHeads>;
  constexpr int kWarps = T::kWarps, kHeadTiles = T::kHeadTiles, kWarpDims = T::kWarpDims;
  constexpr int kPartOctets = kBlockKeys / 8 / T::kKeyParts, kSteps = R::kDims / kQuarters / 16;
  constexpr bool kAhead = Smem::kStages > 1;  // the next rows are asked for before these are decoded
  static_assert(R::kDims % (kQuarters * 16) == 0);
  const SparseAttentionParams& p = params.p;
  extern __shared__ __align__(16) uint8_t smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int matrix = lane / 8, row = lane % 8;
  const int head_blocks = ceil_div(p.num_q_heads, kHeads);
  const int split = blockIdx.x % params.splits;
  const int64_t token = blockIdx.x / params.splits / head_blocks;
  const int first_head = blockIdx.x / params.splits % head_blocks * kHeads;

  wait_for_previous_grid();
  const Keys keys(p, token);
  survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, shared_address(smem.map), [] {});

  // S: this warp's 16 heads and quarter of the dims.
  const int head_tile = warp / kQuarters % kHeadTiles, first_dim = warp % kQuarters * kSteps * 16;
  const int first_octet = warp / kQuarters / kHeadTiles * kPartOctets;
  uint32_t q[kSteps][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = first_head + head_tile * 16 + half * 8 + g;
    const uint16_t* src =
        p.q + token * p.q_stride_token + int64_t{head} * p.q_stride_head + first_dim + 2 * t;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      q[k][half] = head < p.num_q_heads ? *reinterpret_cast<const uint32_t*>(src + k * 16) : 0;
      q[k][2 + half] = head < p.num_q_heads ? *reinterpret_cast<const uint32_t*>(src + k * 16 + 8) : 0;
    }
  }
  __syncthreads();
  const uint32_t map = shared_address(smem.map);
  const ValidKeys<MapInShared> valid_keys(KeySurvey(map, keys.length, lane), {map});
  const int all_blocks = ceil_div(valid_keys.num_keys(), kBlockKeys);
  const int first_block = static_cast<int>(int64_t{all_blocks} * split / params.splits);
  const int num_blocks = static_cast<int>(int64_t{all_blocks} * (split + 1) / params.splits) - first_block;
  const int first_key = first_block * kBlockKeys;
  const int num_keys = min(valid_keys.num_keys() - first_key, num_blocks * kBlockKeys);

  Gather<kId, kExtra, T::kRowsPerWarp> gather(p, keys, valid_keys, first_key, first_key + num_keys);
  if (num_blocks > 0) gather.start(smem, 0);
  cp_async_commit();

  const float layer_scale = R::kUniformFp8 ? *p.scale : 1.0f;
  const float logit_scale = p.sm_scale * layer_scale * kLog2E;
  const int own_head = threadIdx.x / kSoftmaxLanes, own_key = threadIdx.x % kSoftmaxLanes * kLaneKeys;
  float max_logit = -INFINITY, sum = 0.0f;  // of own_head; the sum is this lane's part
  float out[kHeadTiles][kWarpDims / 8][4] = {};

#pragma unroll 1
  for (int block = 0; block < num_blocks; ++block) {
    const int stage = block % Smem::kStages;
    const auto fetch_next = [&] {
      if (block + 1 < num_blocks) gather.start(smem, (block + 1) % Smem::kStages);
      cp_async_commit();
    };
    cp_async_wait_all();
    __syncthreads();
    if constexpr (kAhead) fetch_next();
    if constexpr (Smem::kDecodes) {
      decode_block(smem, stage);
      __syncthreads();
    }
    if constexpr (!kAhead) fetch_next();
    const auto* latents = smem.latents(stage);

    {
      float s[kPartOctets][4] = {};
      const uint32_t from =
          shared_address(&latents[first_octet * 8 + matrix / 2 * 8 + row][first_dim + matrix % 2 * 8]);
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int octet = 0; octet < kPartOctets; octet += 2) {
          uint32_t b[4];
          ldmatrix_x4(b, from + (octet * 8 * Smem::kPitch + k * 16) * 2);
          mma_bf16(s[octet], q[k], b[0], b[1]);
          mma_bf16(s[octet + 1], q[k], b[2], b[3]);
        }
#pragma unroll
      for (int octet = 0; octet < kPartOctets; ++octet)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = Smem::logit_index(head_tile * 16 + half * 8 + g, (first_octet + octet) * 8 + 2 * t);
          *reinterpret_cast<float2*>(&smem.logits[warp % kQuarters][at]) = {s[octet][2 * half],
                                                                            s[octet][2 * half + 1]};
        }
    }
    __syncthreads();

    if (own_head < kHeads) {
      float s[kLaneKeys] = {};
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        const float4 x =
            *reinterpret_cast<const float4*>(&smem.logits[quarter][Smem::logit_index(own_head, own_key)]);
        s[0] += x.x, s[1] += x.y, s[2] += x.z, s[3] += x.w;
      }
      float new_max = max_logit;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        s[i] = block * kBlockKeys + own_key + i < num_keys ? s[i] * logit_scale : -INFINITY;
        new_max = fmaxf(new_max, s[i]);
      }
#pragma unroll
      for (int offset = 1; offset < kSoftmaxLanes; offset *= 2)
        new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, offset));
      const float reference = new_max == -INFINITY ? 0.0f : new_max;  // nothing yet: weights are 0, not NaN
      const float factor = exp2f(max_logit - reference);
      max_logit = new_max;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) s[i] = exp2f(s[i] - reference);
      sum = sum * factor + ((s[0] + s[1]) + (s[2] + s[3]));
      *reinterpret_cast<Words<2>*>(&smem.weights[own_head][own_key]) = {pack_bf16(s[0], s[1]),
                                                                        pack_bf16(s[2], s[3])};
      if (own_key == 0) smem.factor[own_head] = factor;
    }
    __syncthreads();

#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = smem.factor[tile * 16 + half * 8 + g];
        if (__any_sync(kFullWarp, factor != 1.0f)) {
#pragma unroll
          for (int n = 0; n < kWarpDims / 8; ++n)
            out[tile][n][2 * half] *= factor, out[tile][n][2 * half + 1] *= factor;
        }
      }
#pragma unroll
    for (int step = 0; step < kBlockKeys; step += 16) {
      uint32_t weights[kHeadTiles][4];
#pragma unroll
      for (int tile = 0; tile < kHeadTiles; ++tile)
        ldmatrix_x4(weights[tile],
                    shared_address(&smem.weights[tile * 16 + matrix % 2 * 8 + row][step + matrix / 2 * 8]));
      const uint32_t from =
          shared_address(&latents[step + matrix % 2 * 8 + row][warp * kWarpDims + matrix / 2 * 8]);
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; n += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(v, from + n * 16);
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          mma_bf16(out[tile][n], weights[tile], v[0], v[1]);
          mma_bf16(out[tile][n + 1], weights[tile], v[2], v[3]);
        }
      }
    }
  }

  if (own_head < kHeads) {
#pragma unroll
    for (int offset = 1; offset < kSoftmaxLanes; offset *= 2) sum += __shfl_xor_sync(kFullWarp, sum, offset);
    if (own_key == 0) smem.max[own_head] = max_logit, smem.sum[own_head] = sum;
  }
  __syncthreads();
  const Partials partials(params);
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = tile * 16 + half * 8 + g, head = first_head + at;
      if (head >= p.num_q_heads) continue;
      const float max = smem.max[at], total = smem.sum[at];
      const int64_t query_head = token * p.num_q_heads + head;
      if (params.splits > 1) {
        if (warp == 0 && t == 0) *partials.stats(query_head, split) = {max, total};
        if (num_blocks == 0) continue;
        float* dst = partials.out(query_head, split) + warp * kWarpDims + 2 * t;
#pragma unroll
        for (int n = 0; n < kWarpDims / 8; ++n)
          *reinterpret_cast<float2*>(dst + n * 8) = {out[tile][n][2 * half], out[tile][n][2 * half + 1]};
        continue;
      }
      const float factor = layer_scale * output_factor(p, head, max, total);
      uint16_t* dst =
          p.out + token * p.out_stride_token + head * p.out_stride_head + warp * kWarpDims + 2 * t;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n)
        *reinterpret_cast<uint32_t*>(dst + n * 8) =
            pack_bf16(out[tile][n][2 * half] * factor, out[tile][n][2 * half + 1] * factor);
      if (warp == 0 && t == 0) store_stats(p, query_head, max, total);
    }
}

template <KvLayoutId kId, KvLayoutId kExtra, int kHeads>
void launch_heads(const PortableParams& params, gpuStream_t stream) {
  constexpr int kSmemBytes = sizeof(Shared<kId, kExtra, kHeads>);
  static_assert(kSmemBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 have no more");
  const SparseAttentionParams& p = params.p;
  launch(portable_kernel<kId, kExtra, kHeads>,
         {.grid = p.num_tokens * ceil_div(p.num_q_heads, kHeads) * params.splits,
          .block = Team<kHeads>::kThreads,
          .stream = stream,
          .smem = kSmemBytes},
         params);
}

}  // namespace

void launch_portable(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  const PortableParams params{p, plan.splits};
  with_variant<Kernel::kPortable>(p, plan, [&](auto variant, auto id, auto extra) {
    launch_heads<id(), extra(), kVariants[variant()].heads>(params, stream);
  });
  if (plan.splits > 1) launch_merge(params, stream);
}

}  // namespace mla_fp8::gpu
