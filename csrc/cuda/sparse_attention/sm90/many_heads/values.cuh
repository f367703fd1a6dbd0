#pragma once
// The value warps: O^T += V^T P^T. Each has 16 dims of each of its warpgroup's four chunks, and all heads.
#include "cuda/sparse_attention/sm90/many_heads/parts.cuh"

namespace mla_fp8::gpu {

// Multiplies O as bases have moved by `changes` [head] (log2).
template <int kChunks, int kOctets>
__device__ __forceinline__ void rescale_values(float (&out)[kChunks][kOctets][4], const float* changes,
                                               int t) {
#pragma unroll
  for (int n = 0; n < kOctets; ++n) {
    float2 f = *reinterpret_cast<const float2*>(changes + n * kOctetHeads + 2 * t);
    f = {fast_exp2(f.x), fast_exp2(f.y)};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      out[chunk][n][0] *= f.x, out[chunk][n][2] *= f.x;
      out[chunk][n][1] *= f.y, out[chunk][n][3] *= f.y;
    }
  }
}

template <class C>
class BlockValues {
 public:
  using R = typename C::R;
  static constexpr int kOctets = C::kOctets;

 protected:
  __device__ BlockValues(uint8_t* smem, int warp, int lane)
      : ring_{shared_address(smem)},
        x_(smem),
        first_chunk_(warp / 4 * C::kChunks),
        warp_(warp % 4),
        lane_(lane),
        g_(lane / 4),
        t_(lane % 4) {}

  // The last chunk of the second warpgroup may be bf16; the branch is uniform over the warpgroup.
  __device__ bool last_is_bf16() const { return R::kFp8Chunks < kNumChunks && first_chunk_ > 0; }
  __device__ bool is_bf16(int chunk) const { return first_chunk_ + chunk >= R::kFp8Chunks; }

  __device__ void clear() {
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk)
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
        out_[chunk][n][0] = out_[chunk][n][1] = out_[chunk][n][2] = out_[chunk][n][3] = 0.0f;
  }

  // A lane's offsets in a stage, for ldmatrix. fp8: V as pairs of bytes, two chunks at a time (matrices: keys
  // 0-7, 8-15 x chunk, next chunk). bf16 (matrices: dims 0-7, 8-15 x keys 0-7, 8-15).
  struct Offsets {
    int fp8, bf16, factors;
  };
  __device__ Offsets offsets() const {
    const int matrix = lane_ / 8, row = lane_ % 8;
    return {((matrix & 1) * 8 + row) * R::kPitch + (first_chunk_ + (matrix >> 1)) * kChunkDims + warp_ * 16,
            ((matrix >> 1) * 8 + row) * R::kPitch + R::kBf16Offset + warp_ * 32 + (matrix & 1) * 16,
            factors_at()};
  }

  // Over two layouts: where a stage has the scales of this warp's 16 dims of its first chunk.
  __device__ int factors_at() const {
    if constexpr (!R::kMixed) return 0;
    else
      return R::value_factors_at(R::kTableOffset, t_) + (first_chunk_ * 2 + warp_ / 2) * R::kUnitBytes +
             warp_ % 2 * 8;
  }

  // Adds the products of a block: the stages of the ring's sequence from `first` on, by the weights and value
  // scales in a buffer.
  template <bool kLastIsBf16>
  __device__ __forceinline__ void add_block(int first, int buffer, const Offsets& values) {
    constexpr int kStep = C::kStepBytes / 16;  // in a descriptor's address
    const uint64_t fp8 = wgmma_descriptor(x_.smem + MLA_SMEM(C, weights_fp8) + buffer * C::kPBytes, 128, 256);
    const uint64_t in_bf16 =
        wgmma_descriptor(x_.smem + MLA_SMEM(C, weights_bf16) + buffer * C::kPBytes, 128, 256);
    const auto rows = [&](int i) { return ring_.stage((first + i) % C::kStages); };
    // A warp's 16 dims of a chunk have one scale.
    const uint8_t* const table =
        x_.scale_table(buffer) + 4 * t_ + (R::kTilesOfChunk == 2 ? warp_ / 2 : 0) * kScalePitch;
    // Units of 16 keys and two chunks. Bytes are fetched a unit ahead of their conversion; products of
    // the unit before are under way meanwhile.
    constexpr int kUnits = 2 * C::kBlockStages;
    uint32_t v[2][2][4], bytes[4];
    const auto fetch = [&](int unit) {
      ldmatrix_x4_trans(bytes, rows(unit / 2) + values.fp8 + unit % 2 * 2 * kChunkDims);
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
      if constexpr (R::kMixed)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (bf16 && j == 1) continue;
          const uint2 s = load_shared_8(rows(step) + values.factors + (pair * 2 + j) * 2 * R::kUnitBytes);
          a[j][0] = mul_f16x2(a[j][0], s.x), a[j][1] = mul_f16x2(a[j][1], s.x);
          a[j][2] = mul_f16x2(a[j][2], s.y), a[j][3] = mul_f16x2(a[j][3], s.y);
        }
      else if constexpr (R::kNumScales > 0)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (bf16 && j == 1) continue;
          const int tile = R::tile_of((first_chunk_ + pair * 2 + j) * kChunkDims);
          const uint8_t* at = table + tile * kScalePitch + step * kStageRows * 2;
          const uint32_t s0 = *reinterpret_cast<const uint32_t*>(at);
          const uint32_t s1 = *reinterpret_cast<const uint32_t*>(at + 16);
          a[j][0] = mul_f16x2(a[j][0], s0), a[j][1] = mul_f16x2(a[j][1], s0);
          a[j][2] = mul_f16x2(a[j][2], s1), a[j][3] = mul_f16x2(a[j][3], s1);
        }
      if (bf16) ldmatrix_x4_trans(a[1], rows(step) + values.bf16);
      if (pair == 1) {
        fence_proxy_async();  // without it the arrival was seen to overtake the last ldmatrix
        mbarrier_arrive_warp(ring_.empty((first + step) % C::kStages), lane_);
      }
      pin_registers(out_[2 * pair]);
      pin_registers(out_[2 * pair + 1]);
      wgmma_fence();
      wgmma_f16(out_[2 * pair], a[0], fp8 + step * kStep, 1);
      if (bf16) wgmma_bf16(out_[2 * pair + 1], a[1], in_bf16 + step * kStep, 1);
      else wgmma_f16(out_[2 * pair + 1], a[1], fp8 + step * kStep, 1);
      wgmma_commit();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) pin_registers(out_[chunk]);
  }

  // Attends to blocks of the ring's sequence.
  __device__ __forceinline__ void attend(int first_block, int num_blocks) {
    if (last_is_bf16()) attend_by<true>(first_block, num_blocks);
    else attend_by<false>(first_block, num_blocks);
  }
  template <bool kLastIsBf16>
  __device__ __forceinline__ void attend_by(int first_block, int num_blocks) {
    const Offsets values = offsets();
#pragma unroll 1
    for (int block = first_block; block < first_block + num_blocks; ++block) {
      const int buffer = block % 2, first = block * C::kBlockStages;
      wait_until_full<2>(x_.p_full(buffer), block);
#pragma unroll
      for (int i = first; i < first + C::kBlockStages; ++i)
        wait_until_full<C::kStages>(ring_.full(i % C::kStages), i);
      if (x_.moved(buffer)) rescale_values(out_, x_.rescale(buffer), t_);
      // The next block's QK goes first: its softmax needs no tensor cores while these products run.
      if (block + 1 < first_block + num_blocks) wait_until_full<2>(x_.qk_done(buffer ^ 1), block + 1);
      add_block<kLastIsBf16>(first, buffer, values);
      mbarrier_arrive_warp(x_.p_empty(buffer), lane_);
    }
  }

  const Ring<C> ring_;
  const BlockExchange<C> x_;
  const int first_chunk_, warp_, lane_, g_, t_;
  float out_[C::kChunks][kOctets][4];
};

template <class C>
class SplitValues : protected BlockValues<C> {
 public:
  using Base = BlockValues<C>;
  using Base::kOctets;

  __device__ SplitValues(uint8_t* smem, int warp, int lane) : Base(smem, warp, lane) {}

  __device__ void run(const KernelParams&, const typename C::Item& w) {
    this->clear();
    this->attend(0, w.num_blocks);
    named_barrier(kBarrierFinish, C::kWorkers);
  }

  // Stores O * factor as bf16 through shared memory: a warp writes 512 bytes of a head at once. (Bulk copies
  // of whole heads took twice as long.)
  __device__ void store(const SparseAttentionParams& p, const typename C::Item& w, int thread) const {
    const float* factors = reinterpret_cast<const float*>(x_.bytes + MLA_SMEM(C, factors));
    uint8_t* const base = x_.bytes + MLA_SMEM(C, ring);
#pragma unroll
    for (int chunk = 0; chunk < C::kChunks; ++chunk) {
      const bool bf16 = this->is_bf16(chunk);  // fragment rows g, g + 8 are those dims; else dims 2g, 2g + 1
      const int dim = (first_chunk_ + chunk) * kChunkDims + warp_ * 16 + (bf16 ? g_ : 2 * g_);
#pragma unroll
      for (int n = 0; n < kOctets; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int head = n * kOctetHeads + 2 * t_ + c;
          const float factor = factors[head];
          const uint32_t pair = pack_bf16(output_value<C::kSegments>(out_[chunk][n][c], factor),
                                          output_value<C::kSegments>(out_[chunk][n][c + 2], factor));
          uint16_t* out = reinterpret_cast<uint16_t*>(base + head * C::kStorePitch) + dim;
          if (!bf16) *reinterpret_cast<uint32_t*>(out) = pair;
          else out[0] = static_cast<uint16_t>(pair), out[8] = static_cast<uint16_t>(pair >> 16);
        }
    }
    named_barrier(kBarrierStore, kConsumerThreads);
    constexpr int kUnits = kHeadDimV * 2 / 16,
                  kRounds = C::kHeads * kUnits / kConsumerThreads;  // units of 16 bytes
    const int first = thread / kUnits, unit = thread % kUnits;
#pragma unroll 8
    for (int i = 0; i < kRounds; ++i) {
      const int head = first + i * (kConsumerThreads / kUnits);
      if (w.has_head(p, head))
        reinterpret_cast<uint4*>(place_of_head(p, w, head))[unit] =
            *reinterpret_cast<const uint4*>(base + head * C::kStorePitch + unit * 16);
    }
  }

  // Leaves a part for merge_parts_kernel, straight from the registers.
  __device__ __forceinline__ void leave(const QueryPart<C>& part) const {
    const int value_warp = first_chunk_ / C::kChunks * 4 + warp_;
#pragma unroll
    for (int n = 0; n < kOctets; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float values[QueryPart<C>::kValues];
#pragma unroll
        for (int chunk = 0; chunk < C::kChunks; ++chunk)
          values[2 * chunk] = out_[chunk][n][c], values[2 * chunk + 1] = out_[chunk][n][c + 2];
        part.write(value_warp, 2 * n + c, lane_, values);
      }
  }

 protected:
  using Base::first_chunk_, Base::g_, Base::lane_, Base::out_, Base::t_, Base::warp_, Base::x_;
};

}  // namespace mla_fp8::gpu
