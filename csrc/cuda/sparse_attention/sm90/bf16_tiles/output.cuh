#pragma once
// Stores the output of the two warpgroups that multiply.
#include "cuda/sparse_attention/sm90/bf16_tiles/smem.cuh"

namespace mla_fp8::gpu {

// The output of one warp of group kGroup: 16 rows of 256 dims.
template <class C, int kGroup>
struct TileOutput {
  const TileParams& params;
  const TileSmem<C> smem;
  const int warp, lane;

  __device__ uint16_t* out_row(const RowTile& item, QueryHead place) const {
    const SparseAttentionParams& p = params.p;
    return p.out + (item.query + place.query) * p.out_stride_token +
           (item.first_head + place.head) * p.out_stride_head + kGroup * (kHeadDimV / 2);
  }
  // Stores in pieces, through shared memory for whole lines. While one piece is read, the next is computed.
  __device__ void store(const RowTile& item, const float (&o)[32][4], const float (&factor)[2]) const {
    constexpr int kChunks = C::kPieceDims / 8, kRows = kWarpSize / kChunks;  // 16 bytes each; rows of a load
    constexpr int kStores = C::kPieceDims / 32, kLoads = 8 / kRows, kPieces = kHeadDimV / C::kPieceDims;
    const int row = lane / kChunks, column = lane % kChunks;
    const uint32_t staging = smem.smem + MLA_SMEM(C, staging) + (4 * kGroup + warp) * C::kStagingBytes;
    const auto chunk = [&](int piece, int row, int i) {
      return staging + piece % C::kStagingPieces * C::kPieceBytes + row * C::kPieceDims * 2 +
             ((i ^ row * kChunks / 8) * 16);
    };
    uint16_t* out[2][kLoads];  // null: no such row
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const QueryHead place = query_head<C>(params, warp * 16 + half * 8 + i * kRows + row);
        out[half][i] = item.has(place, params.p.num_q_heads) ? out_row(item, place) + column * 8 : nullptr;
      }
    uint4 x[kLoads];
#pragma unroll
    for (int piece = 0; piece <= kPieces; ++piece) {  // two of the same dims, of rows 0 .. 7 and 8 .. 15
      const int dims = piece / 2, half = piece % 2;
      if (piece < kPieces) {
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float (&d)[4] = o[dims * kChunks + i * 4 + j];
            words[j] = pack_bf16(d[2 * half] * factor[half], d[2 * half + 1] * factor[half]);
          }
          stmatrix_x4(chunk(piece, lane % 8, i * 4 + lane / 8), words);
        }
        __syncwarp();
      }
      if (piece > 0)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)  // stores the piece before
          if (uint16_t* to = out[1 - half][i])
            *reinterpret_cast<uint4*>(to + (piece - 1) / 2 * C::kPieceDims) = x[i];
      if (piece < kPieces) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) x[i] = load_shared_16(chunk(piece, i * kRows + row, column));
        if (C::kStagingPieces == 1) __syncwarp();
      }
    }
  }
  __device__ void store_nothing(const RowTile& item) const {
    const SparseAttentionParams& p = params.p;
    const int thread = warp * kWarpSize + lane;
    for (int i = thread; i < C::kHeads * 32; i += kGroupThreads) {
      const QueryHead place = query_head<C>(params, i / 32);
      if (item.has(place, p.num_q_heads))
        *reinterpret_cast<uint4*>(out_row(item, place) + i % 32 * 8) = uint4{0, 0, 0, 0};
    }
    const QueryHead place = query_head<C>(params, thread);
    if (kGroup == 0 && thread < C::kHeads && item.has(place, p.num_q_heads)) {
      const int64_t at = (item.query + place.query) * p.num_q_heads + item.first_head + place.head;
      p.lse[at] = -INFINITY;
      if (p.max_logits) p.max_logits[at] = -INFINITY;
    }
  }
};

}  // namespace mla_fp8::gpu
