// Sparse attention for every GPU from sm_80 on, every layout, decode and prefill: the plain flash-attention
// loop.
//
// One CTA takes one query token and 16 of its heads (M of an mma). For each block of 32 valid keys:
//   gather   32 rows into shared memory by cp.async, while the block before is worked on; past the end: zeros
//   decode   to bf16 latents [token][dim], as dequantize_kv does
//   S        4 warps x 8 tokens, all dims
//   P        online softmax; maxima and weights meet in shared memory
//   O        4 warps x 128 value dims
//
// Simple and correct before fast: rows are fetched once per 16 heads and one CTA walks all tokens of a row,
// so small batches leave most of the GPU idle.
#include <algorithm>

#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/keys.cuh"
#include "cuda/sparse_attention/plan.h"
#include "cuda/sparse_attention/row.cuh"

namespace mla_fp8::gpu {
namespace {

constexpr int kHeads = 16;
constexpr int kTokens = 32;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpDims = kHeadDimV / kWarps;

// kId: of rows of the first cache, kExtra: of the second.
template <KvLayoutId kId, KvLayoutId kExtra>
struct Shared {
  static constexpr int kDims = Row<kId>::kDims;
  static constexpr int kPitch = kDims + 8;  // elements: 16 bytes past a multiple of 128 bytes
  static_assert(kDims == Row<kExtra>::kDims);
  alignas(16) uint8_t raw[kTokens][std::max(Row<kId>::kPitch, Row<kExtra>::kPitch)];
  alignas(16) uint16_t latent[kTokens][kPitch];
  alignas(16) uint16_t q[kHeads][kPitch];
  alignas(16) uint16_t weights[kHeads][kTokens + 8];
  float warp_max[kWarps][kHeads], warp_sum[kWarps][kHeads];
  bool valid[2][kTokens];             // of this block and the next
  bool is_extra[kTokens];             // the row in `raw`
  alignas(8) uint8_t map[kMapBytes];  // of the row's valid keys
};

// Runs fn(Row<layout>{}) for the cache that a row is of.
template <KvLayoutId kId, KvLayoutId kExtra, class Fn>
__device__ __forceinline__ void with_row(bool is_extra, Fn&& fn) {
  if (kId == kExtra || !is_extra) fn(Row<kId>{});
  else fn(Row<kExtra>{});
}

// Starts the copies of one block of valid keys from rank `first` on; every warp fetches 8 rows, each by the
// whole warp. Past the last key: zeros.
template <KvLayoutId kId, KvLayoutId kExtra>
__device__ void gather(const SparseAttentionParams& p, const Keys& keys,
                       const ValidKeys<MapInShared>& valid_keys, int first, Shared<kId, kExtra>& smem,
                       bool (&valid)[kTokens]) {
  constexpr int kRowsPerWarp = kTokens / kWarps;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int mine = warp * kRowsPerWarp + lane % kRowsPerWarp;
  const bool is_key = first + mine < valid_keys.num_keys();
  const auto key = valid_keys.find(KeySource(p, keys), is_key ? first + mine : -1);
  const uint8_t* own_row = reinterpret_cast<const uint8_t*>(p.q);  // a valid address; nothing is read
  const uint8_t* own_scales = own_row;
  const bool own_extra = is_key && key.scope == 1;
  if (is_key) {
    const KvScope& s = p.scopes[key.scope];
    const uint8_t* page = s.kv_cache + key.slot / s.page_size * s.kv_cache_stride_page;
    const int64_t in_page = key.slot % s.page_size;
    with_row<kId, kExtra>(own_extra, [&](auto r) {
      constexpr KvLayout kL = decltype(r)::kL;
      own_row = page + kL.token_offset(in_page);
      own_scales = page + kL.scale_offset(in_page, s.page_size);
    });
  }
  if (lane < kRowsPerWarp) valid[mine] = is_key, smem.is_extra[mine] = own_extra;
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const auto *row = broadcast(own_row, i), *scales = broadcast(own_scales, i);
    const bool real = broadcast(static_cast<int>(is_key), i);
    const uint32_t dst = shared_address(smem.raw[warp * kRowsPerWarp + i]);
    with_row<kId, kExtra>(broadcast(static_cast<int>(own_extra), i), [&](auto r) {
      using R = decltype(r);
      for (int byte = lane * 16; byte < R::kBytes; byte += kWarpSize * 16)
        cp_async_16(dst + byte, real ? row + byte : row, real);
      if (R::kScalesApart && lane < R::kL.scale_bytes() / 8)
        cp_async_8(dst + R::kScaleOffset + lane * 8, real ? scales + lane * 8 : scales, real);
    });
  }
  cp_async_commit();
}

// Elements dim to dim + 7 of a raw row as bf16. The scale of a uniform FP8 layout multiplies logits and
// output instead: exact here.
template <class R>
__device__ __forceinline__ Words<4> decode_unit(const uint8_t* row, int dim) {
  constexpr KvLayout kL = R::kL;
  if constexpr (kL.nope_format != Format::kBf16) {
    if (dim < R::kFp8Dims) {
      constexpr int kBytes = format_bits(kL.nope_format);  // of 8 elements
      float scale = 1.0f;
      if constexpr (R::kNumScales > 0)
        scale = load_scale<kL.scale_format>(row + R::kScaleOffset, dim / R::kTileDims);
      return decode8<kL.nope_format>(*reinterpret_cast<const Words<kBytes / 4>*>(row + dim / 8 * kBytes),
                                     scale);
    }
  }
  return *reinterpret_cast<const Words<4>*>(row + R::kBf16Offset + (dim - R::kFp8Dims) * 2);
}

// Raw rows to bf16 latents.
template <KvLayoutId kId, KvLayoutId kExtra>
__device__ void decode_block(Shared<kId, kExtra>& smem) {
  constexpr int kUnits = Shared<kId, kExtra>::kDims / 8;
  for (int i = threadIdx.x; i < kTokens * kUnits; i += kThreads) {
    const int token = i / kUnits, dim = i % kUnits * 8;
    with_row<kId, kExtra>(smem.is_extra[token], [&](auto r) {
      *reinterpret_cast<Words<4>*>(&smem.latent[token][dim]) = decode_unit<decltype(r)>(smem.raw[token], dim);
    });
  }
}

template <KvLayoutId kId, KvLayoutId kExtra>
__global__ void __launch_bounds__(kThreads) portable_kernel(const __grid_constant__ SparseAttentionParams p) {
  using R = Row<kId>;
  using Smem = Shared<kId, kExtra>;
  extern __shared__ __align__(16) uint8_t smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int head_blocks = ceil_div(p.num_q_heads, kHeads);
  const int64_t token = blockIdx.x / head_blocks;
  const int first_head = blockIdx.x % head_blocks * kHeads;

  wait_for_previous_grid();
  const Keys keys(p, token);
  survey_keys<kWarps, 8>(KeySource(p, keys), warp, lane, shared_address(smem.map), [] {});
  __syncthreads();
  const uint32_t map = shared_address(smem.map);
  const ValidKeys<MapInShared> valid_keys(KeySurvey(map, keys.length, lane), {map});
  const int num_blocks = ceil_div(valid_keys.num_keys(), kTokens);

  if (num_blocks > 0) gather(p, keys, valid_keys, 0, smem, smem.valid[0]);
  for (int i = threadIdx.x; i < kHeads * (R::kDims / 8); i += kThreads) {
    const int head = i / (R::kDims / 8), dim = i % (R::kDims / 8) * 8;
    Words<4> x{};
    if (first_head + head < p.num_q_heads)
      x = *reinterpret_cast<const Words<4>*>(p.q + token * p.q_stride_token +
                                             (first_head + head) * p.q_stride_head + dim);
    *reinterpret_cast<Words<4>*>(&smem.q[head][dim]) = x;
  }

  const float layer_scale = R::kUniformFp8 ? *p.scale : 1.0f;
  const float logit_scale = p.sm_scale * layer_scale * kLog2E;
  // Of heads g and g + 8; sums are this lane's part.
  float max_logit[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  float out[kWarpDims / 8][4] = {};
  const int matrix = lane / 8, row = lane % 8;

  for (int block = 0; block < num_blocks; ++block) {
    cp_async_wait_all();
    __syncthreads();  // rows are here; the block before is done
    decode_block(smem);
    __syncthreads();
    if (block + 1 < num_blocks)
      gather(p, keys, valid_keys, (block + 1) * kTokens, smem, smem.valid[(block + 1) % 2]);

    float s[4] = {};  // heads g, g + 8; tokens 8 * warp + 2t, + 1
#pragma unroll 4
    for (int dim = 0; dim < R::kDims; dim += 32) {
      uint32_t q[4], k[4];
      ldmatrix_x4(k, shared_address(&smem.latent[warp * 8 + row][dim + matrix * 8]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ldmatrix_x4(q, shared_address(&smem.q[matrix % 2 * 8 + row][dim + half * 16 + matrix / 2 * 8]));
        mma_bf16(s, q, k[2 * half], k[2 * half + 1]);
      }
    }
    const bool* valid = smem.valid[block % 2] + warp * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = valid[i % 2] ? s[i] * logit_scale : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x = max_over_t(fmaxf(s[2 * i], s[2 * i + 1]));
      if (t == 0) smem.warp_max[warp][g + 8 * i] = x;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float new_max = max_logit[i];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) new_max = fmaxf(new_max, smem.warp_max[w][g + 8 * i]);
      const float reference = new_max == -INFINITY ? 0.0f : new_max;  // nothing yet: weights are 0, not NaN
      const float rescale = exp2f(max_logit[i] - reference);
      max_logit[i] = new_max;
      const float w0 = exp2f(s[2 * i] - reference), w1 = exp2f(s[2 * i + 1] - reference);
      sum[i] = sum[i] * rescale + w0 + w1;
      *reinterpret_cast<uint32_t*>(&smem.weights[g + 8 * i][warp * 8 + 2 * t]) = pack_bf16(w0, w1);
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) out[n][2 * i] *= rescale, out[n][2 * i + 1] *= rescale;
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kTokens; step += 16) {
      uint32_t weights[4];
      ldmatrix_x4(weights, shared_address(&smem.weights[matrix % 2 * 8 + row][step + matrix / 2 * 8]));
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; n += 2) {
        uint32_t v[4];
        ldmatrix_x4_trans(
            v, shared_address(
                   &smem.latent[step + matrix % 2 * 8 + row][warp * kWarpDims + n * 8 + matrix / 2 * 8]));
        mma_bf16(out[n], weights, v[0], v[1]);
        mma_bf16(out[n + 1], weights, v[2], v[3]);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x = sum_over_t(sum[i]);
    if (t == 0) smem.warp_sum[warp][g + 8 * i] = x;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + g + 8 * i;
    if (head >= p.num_q_heads) continue;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += smem.warp_sum[w][g + 8 * i];
    const bool empty = total == 0.0f;
    const float sink = p.attn_sink && !empty ? exp2f(p.attn_sink[head] * kLog2E - max_logit[i]) : 0.0f;
    const float factor = empty ? 0.0f : layer_scale / (total + sink);
    uint16_t* dst = p.out + token * p.out_stride_token + head * p.out_stride_head + warp * kWarpDims + 2 * t;
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n)
      *reinterpret_cast<uint32_t*>(dst + n * 8) =
          pack_bf16(out[n][2 * i] * factor, out[n][2 * i + 1] * factor);
    if (warp == 0 && t == 0) {
      const int64_t at = token * p.num_q_heads + head;
      p.lse[at] = empty ? -INFINITY : (max_logit[i] + log2f(total)) * kLn2;
      if (p.max_logits) p.max_logits[at] = max_logit[i] * kLn2;
    }
  }
}

}  // namespace

void launch_portable(const SparseAttentionParams& p, const Plan&, gpuStream_t stream) {
  with_kv_layouts(p.layouts(), [&](auto id, auto extra) {
    constexpr int kSmemBytes = sizeof(Shared<id(), extra()>);
    static_assert(kSmemBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 have no more");
    launch(portable_kernel<id(), extra()>,
           {.grid = p.num_tokens * ceil_div(p.num_q_heads, kHeads),
            .block = kThreads,
            .stream = stream,
            .smem = kSmemBytes},
           p);
  });
}

}  // namespace mla_fp8::gpu
