#pragma once
// O^T += V^T P^T in the warpgroup kernel.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/many_heads/split_smem.cuh"

namespace mla_fp8::gpu {

// One of the eight value warps: 16 dims of each of its warpgroup's four chunks, all heads.
template <class C>
class ValueWarp {
 public:
  using R = typename C::R;
  static constexpr int kGroups = C::kGroups;

  __device__ ValueWarp(uint8_t* smem, int warp, int lane)
      : ring_{shared_address(smem)},
        x_(smem),
        first_chunk_(warp / 4 * C::kChunks),
        warp_(warp % 4),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  __device__ void run(int num_blocks) {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
        out_[chunk][n][0] = out_[chunk][n][1] = out_[chunk][n][2] = out_[chunk][n][3] = 0.0f;
    // The last chunk of the second warpgroup may be bf16; the branch is uniform over the warpgroup.
    if (R::kFp8Chunks < kNumChunks && first_chunk_ > 0) run_blocks<true>(num_blocks);
    else run_blocks<false>(num_blocks);
  }

  // O * factor as bf16, through shared memory: whole rows leave by bulk copies.
  __device__ void store(const SparseAttentionParams& p, const Work& w, int thread) const {
    const float2* stats = reinterpret_cast<const float2*>(x_.bytes + C::kStats);
    uint8_t* const base = x_.bytes + C::kRing;
    each_pair([&](int head, int dim, bool adjacent, float a, float b) {
      const float factor = stats[head].y;
      const uint32_t pair = pack_bf16(a * factor, b * factor);
      uint16_t* out = reinterpret_cast<uint16_t*>(base + head * C::kStorePitch) + dim;
      if (adjacent) *reinterpret_cast<uint32_t*>(out) = pair;
      else out[0] = static_cast<uint16_t>(pair), out[8] = static_cast<uint16_t>(pair >> 16);
    });
    fence_proxy_async();
    named_barrier(kBarrierStore, kConsumerThreads);
    if (thread < C::kHeads && w.first_head + thread < p.num_q_heads) {
      uint16_t* out = p.out + w.token * p.out_stride_token + (w.first_head + thread) * p.out_stride_head;
      bulk_store(out, x_.smem + C::kRing + thread * C::kStorePitch, kHeadDimV * 2);
      bulk_store_wait();
    }
  }

  // O as float [head][kHeadDimV] for merge_group_splits.
  __device__ void write_partial() const {
    float* base = reinterpret_cast<float*>(x_.bytes + C::kRing);
    each_pair([&](int head, int dim, bool adjacent, float a, float b) {
      float* out = base + head * C::kOutPitch + dim;
      if (adjacent) *reinterpret_cast<float2*>(out) = {a, b};
      else out[0] = a, out[8] = b;
    });
  }

 private:
  __device__ bool is_bf16(int chunk) const { return first_chunk_ + chunk >= R::kFp8Chunks; }

  template <class Fn>
  __device__ void each_pair(Fn&& fn) const {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const bool bf16 = is_bf16(chunk);  // fragment rows g, g + 8 are those dims; else dims 2g, 2g + 1
      const int dim = (first_chunk_ + chunk) * kChunkDims + warp_ * 16 + (bf16 ? g_ : 2 * g_);
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          fn(n * kGroupHeads + 2 * t_ + c, dim, !bf16, out_[chunk][n][c], out_[chunk][n][c + 2]);
    }
  }

  template <bool kLastIsBf16>
  __device__ __forceinline__ void run_blocks(int num_blocks) {
    const int matrix = lane_ / 8, row = lane_ % 8;
    // Two chunks at a time: matrices are (tokens 0-7, 8-15) x (chunk, next chunk).
    const uint32_t values =
        ((matrix & 1) * 8 + row) * R::kPitch + (first_chunk_ + (matrix >> 1)) * kChunkDims + warp_ * 16;
    // bf16: matrices are (dims 0-7, 8-15) x (tokens 0-7, 8-15).
    const uint32_t values_bf16 =
        ((matrix >> 1) * 8 + row) * R::kPitch + R::kBf16Offset + warp_ * 32 + (matrix & 1) * 16;
    uint32_t v[2][2][4], bytes[4];
#pragma unroll 1
    for (int block = 0; block < num_blocks; ++block) {
      const int buffer = block % 2, first = block * C::kBlockSlots;
      mbarrier_wait(x_.p_full(buffer), block / 2 & 1);
#pragma unroll
      for (int i = first; i < first + C::kBlockSlots; ++i)
        mbarrier_wait(ring_.full(i % C::kSlots), i / C::kSlots & 1);
      if (x_.moved(buffer)) rescale_values(out_, x_.rescale(buffer), t_);
      // The next block's QK goes first: its softmax needs no tensor cores while these products run.
      if (block + 1 < num_blocks) mbarrier_wait(x_.qk_done(buffer ^ 1), (block + 1) / 2 & 1);
      const uint64_t p_fp8 = wgmma_descriptor(x_.smem + C::kPFp8 + buffer * C::kPBytes, 128, 256);
      const uint64_t p_bf16 = wgmma_descriptor(x_.smem + C::kPBf16 + buffer * C::kPBytes, 128, 256);
      const uint8_t* table = x_.scale_table(buffer) + 4 * t_;
      // Units of 16 tokens and two chunks. Bytes are fetched a unit ahead of their conversion; products of
      // the unit before are under way meanwhile.
      constexpr int kUnits = 2 * C::kBlockSlots, kStep = C::kStepBytes / 16;
      const auto rows = [&](int unit) { return ring_.slot((first + unit / 2) % C::kSlots); };
      const auto fetch = [&](int unit) {
        ldmatrix_x4_trans(bytes, rows(unit) + values + unit % 2 * 2 * kChunkDims);
      };
      fetch(0);
#pragma unroll
      for (int unit = 0; unit < kUnits; ++unit) {
        const int step = unit / 2, pair = unit % 2;
        const bool bf16 = kLastIsBf16 && pair == 1;
        uint32_t (&a)[2][4] = v[pair];
        if (unit >= 2) wgmma_wait<1>();  // these fragments are free again
        convert_values(bytes, a[0], a[1]);
        if (unit + 1 < kUnits) fetch(unit + 1);
        if constexpr (R::kNumScales > 0)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (bf16 && j == 1) continue;
            const int tile = R::tile_of_chunk(first_chunk_ + pair * 2 + j);
            const uint8_t* at = table + tile * kScalePitch + step * kSlotTokens * 2;
            const uint32_t s0 = *reinterpret_cast<const uint32_t*>(at);
            const uint32_t s1 = *reinterpret_cast<const uint32_t*>(at + 16);
            a[j][0] = mul_f16x2(a[j][0], s0), a[j][1] = mul_f16x2(a[j][1], s0);
            a[j][2] = mul_f16x2(a[j][2], s1), a[j][3] = mul_f16x2(a[j][3], s1);
          }
        if (bf16) ldmatrix_x4_trans(a[1], rows(unit) + values_bf16);
        if (pair == 1) {
          fence_proxy_async();  // see Consumer::release
          mbarrier_arrive_warp(ring_.empty((first + step) % C::kSlots), lane_);
        }
        pin_registers(out_[2 * pair]);
        pin_registers(out_[2 * pair + 1]);
        wgmma_fence();
        wgmma_f16(out_[2 * pair], a[0], p_fp8 + step * kStep, 1);
        if (bf16) wgmma_bf16(out_[2 * pair + 1], a[1], p_bf16 + step * kStep, 1);
        else wgmma_f16(out_[2 * pair + 1], a[1], p_fp8 + step * kStep, 1);
        wgmma_commit();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int chunk = 0; chunk < C::kChunks; ++chunk) pin_registers(out_[chunk]);
      mbarrier_arrive_warp(x_.p_empty(buffer), lane_);
    }
  }

  const Ring<C> ring_;
  const Exchange<C> x_;
  const int first_chunk_, warp_, lane_, g_, t_;
  float out_[C::kChunks][kGroups][4];
};

}  // namespace mla_fp8::gpu
