#pragma once
// O^T += V^T P^T in the row-group kernel.
#include "cuda/device/convert.cuh"
#include "cuda/device/copy.cuh"
#include "cuda/device/math.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/sparse_attention/row.cuh"
#include "cuda/sparse_attention/sm90/gather.cuh"
#include "cuda/sparse_attention/sm90/many_heads/products.cuh"
#include "cuda/sparse_attention/sm90/many_heads/walk_smem.cuh"
#include "cuda/sparse_attention/sm90/walk.cuh"

namespace mla_fp8::gpu {

// One of the eight value warps: 16 dims of each of its warpgroup's four chunks, all heads.
template <class C>
class RowValues {
 public:
  using R = typename C::R;
  static constexpr int kGroups = C::kGroups;

  __device__ RowValues(const TeamParams& params, uint8_t* smem, int warp, int lane)
      : params_(params),
        ring_{shared_address(smem)},
        x_(smem),
        first_chunk_(warp / 4 * C::kChunks),
        warp_(warp % 4),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  __device__ void run() {
    // The last chunk of the second warpgroup may be bf16; the branch is uniform over the warpgroup.
    if (R::kFp8Chunks < kNumChunks && first_chunk_ > 0) run_rows<true>();
    else run_rows<false>();
  }

 private:
  template <bool kLastIsBf16>
  __device__ __forceinline__ void run_rows() {
    int entry = 0, block = 0;
#pragma unroll 1
    for (unsigned i = Unit<C>::first(0); i < Unit<C>::count(params_); i += Unit<C>::stride()) {
#pragma unroll
      for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          out_[chunk][n][0] = out_[chunk][n][1] = out_[chunk][n][2] = out_[chunk][n][3] = 0.0f;
#pragma unroll 1
      for (;; ++entry) {
        const int buffer = entry % 2;
        mbarrier_wait(x_.full(buffer), entry / 2 & 1);
        const Entry kind = x_.kind(buffer);
        if (kind == Entry::kEnd) break;
        if (kind == Entry::kRescaled) rescale_values(out_, x_.factors(buffer), t_);
        add_block<kLastIsBf16>(buffer, block++);
        release(buffer);
      }
      store(entry++ % 2, i);
    }
  }

  __device__ void release(int buffer) const { mbarrier_arrive_warp(x_.empty(buffer), lane_); }

  template <bool kLastIsBf16>
  __device__ __forceinline__ void add_block(int buffer, int block) {
    const int matrix = lane_ / 8, row = lane_ % 8;
    // Two chunks at a time: matrices are (tokens 0-7, 8-15) x (chunk, next chunk).
    const uint32_t values =
        ((matrix & 1) * 8 + row) * R::kPitch + (first_chunk_ + (matrix >> 1)) * kChunkDims + warp_ * 16;
    // bf16: matrices are (dims 0-7, 8-15) x (tokens 0-7, 8-15).
    const uint32_t values_bf16 =
        ((matrix >> 1) * 8 + row) * R::kPitch + R::kBf16Offset + warp_ * 32 + (matrix & 1) * 16;
    const uint64_t weights_fp8 = wgmma_descriptor(x_.weights_fp8(buffer), 128, 256);
    const uint64_t weights_bf16 = wgmma_descriptor(x_.weights_bf16(buffer), 128, 256);
    const uint8_t* table = x_.scale_table(buffer) + 4 * t_;
    // A block's slots lie next to each other in the ring.
    const int first = block * C::kBlockSlots, place = first % C::kSlots;
    // Units of 16 tokens and two chunks; bytes are fetched a unit ahead of their conversion.
    constexpr int kUnits = 2 * C::kBlockSlots;
    uint32_t v[2][2][4], bytes[4];
    const auto rows = [&](int unit) { return ring_.slot(place + unit / 2); };
    const auto fetch = [&](int unit) {
      if (unit % 2 == 0) mbarrier_wait(ring_.full(place + unit / 2), first / C::kSlots & 1);
      ldmatrix_x4_trans(bytes, rows(unit) + values + unit % 2 * 2 * kChunkDims);
    };
    fetch(0);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const int step = unit / 2, pair = unit % 2;
      const bool bf16 = kLastIsBf16 && pair == 1;
      if (unit >= 2) wgmma_wait<1>();  // these fragments are free again
      convert_values(bytes, v[pair][0], v[pair][1]);
      if (unit + 1 < kUnits) fetch(unit + 1);
      if constexpr (R::kNumScales > 0)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (bf16 && j == 1) continue;
          const int tile = R::tile_of_chunk(first_chunk_ + pair * 2 + j);
          const uint8_t* at = table + tile * kScalePitch + step * kSlotTokens * 2;
          const uint32_t s0 = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t s1 = *reinterpret_cast<const uint32_t*>(at + 16);
          v[pair][j][0] = mul_f16x2(v[pair][j][0], s0), v[pair][j][1] = mul_f16x2(v[pair][j][1], s0);
          v[pair][j][2] = mul_f16x2(v[pair][j][2], s1), v[pair][j][3] = mul_f16x2(v[pair][j][3], s1);
        }
      if (bf16) ldmatrix_x4_trans(v[pair][1], rows(unit) + values_bf16);
      if (pair == 1) {
        fence_proxy_async();  // see Consumer::release
        mbarrier_arrive_warp(ring_.empty(place + step), lane_);
      }
      pin_registers(out_[2 * pair]);
      pin_registers(out_[2 * pair + 1]);
      wgmma_fence();
      wgmma_f16(out_[2 * pair], v[pair][0], wgmma_advance(weights_fp8, step * C::kStepBytes), 1);
      if (bf16)
        wgmma_bf16(out_[2 * pair + 1], v[pair][1], wgmma_advance(weights_bf16, step * C::kStepBytes), 1);
      else wgmma_f16(out_[2 * pair + 1], v[pair][1], wgmma_advance(weights_fp8, step * C::kStepBytes), 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) pin_registers(out_[chunk]);
  }

  // O as bf16, straight from the fragments.
  __device__ void store(int buffer, unsigned i) {
    const Unit<C> unit(params_, i);
    const SparseAttentionParams& p = params_.p;
    const float* factors = x_.factors(buffer);
    uint16_t* const row = p.out + unit.token * p.out_stride_token + unit.first_head * p.out_stride_head +
                          first_chunk_ * kChunkDims + warp_ * 16;
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int head = n * kGroupHeads + 2 * t_ + c;
        const float factor = factors[head];
        const bool real = unit.first_head + head < p.num_q_heads;
        uint16_t* const out = row + head * p.out_stride_head;
#pragma unroll
        for (int chunk = 0; chunk < C::kChunks; ++chunk) {
          uint32_t low = __float_as_uint(out_[chunk][n][c] * factor);
          uint32_t high = __float_as_uint(out_[chunk][n][c + 2] * factor);
          // Fragment rows g, g + 8 are dims 2g, 2g + 1; of bf16 values dims g, g + 8: neighbours swap.
          int dim = 2 * g_;
          if (first_chunk_ + chunk >= R::kFp8Chunks) {
            const bool odd = g_ % 2;
            const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? low : high, 4);
            (odd ? low : high) = got;
            dim = odd ? g_ + 7 : g_;
          }
          if (real)
            *reinterpret_cast<uint32_t*>(out + chunk * kChunkDims + dim) =
                pack_bf16(__uint_as_float(low), __uint_as_float(high));
        }
      }
    release(buffer);
  }

  const TeamParams& params_;
  const Ring<C> ring_;
  const RowExchange<C> x_;
  const int first_chunk_, warp_, lane_, g_, t_;
  float out_[C::kChunks][kGroups][4];
};

}  // namespace mla_fp8::gpu
