#pragma once
// RoPE of the indexer's keys and queries, in the lanes of index_row.cuh, and of any two chunks of a head.
#include "cuda/index_row.cuh"
#include "cuda/norm_rope.cuh"

namespace mla_fp8::gpu {

// The rotation of two chunks. By halves, element i of one chunk and element i of the other are a pair. By
// neighbours, each chunk has four pairs.
struct ChunkPairRotation {
  Rotation of[2];

  __device__ __forceinline__ void load_halves(const RopeTable& t, int64_t position, int first_pair) {
    of[0] = load_rotation(t, position, first_pair);
    of[1] = load_rotation(t, position, first_pair + kChunk / 2);
  }
  __device__ __forceinline__ void rotate_halves(Words<4>& first, Words<4>& second) const {
    const Floats8 a = unpack8(first), b = unpack8(second);
    Floats8 x, y;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float c = of[i / 4].cos[i % 4], s = of[i / 4].sin[i % 4];
      x.x[i] = __fsub_rn(__fmul_rn(a.x[i], c), __fmul_rn(b.x[i], s));
      y.x[i] = __fadd_rn(__fmul_rn(a.x[i], s), __fmul_rn(b.x[i], c));
    }
    first = pack8(x);
    second = pack8(y);
  }
  __device__ __forceinline__ void rotate_neighbours(Words<4>& chunk, int which) const {
    chunk = pack8(rotate8(unpack8(chunk), of[which]));
  }
};

// The rotation of this lane's chunks: dims `first_dim` to `first_dim` + 2 * half of the row.
struct IndexRotation {
  ChunkPairRotation pairs;
  bool is_neox, is_rotated[kIndexChunks];

  __device__ __forceinline__ IndexRotation(const RopeTable& t, const Position& position, bool neox,
                                           int first_dim)
      : is_neox(neox) {
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c) {
      const int dim = IndexRow::element(c) - first_dim;
      is_rotated[c] = position.valid && dim >= 0 && dim < t.dim();
      if (is_rotated[c] && !neox) pairs.of[c] = load_rotation(t, position.at, dim / 2);
    }
    if (is_rotated[0] && neox) pairs.load_halves(t, position.at, IndexRow::element(0) - first_dim);
  }
  __device__ __forceinline__ void rotate(IndexRow& row) const {
    if (is_neox) {
      if (is_rotated[0]) pairs.rotate_halves(row.x[0], row.x[1]);
    } else {
#pragma unroll
      for (int c = 0; c < kIndexChunks; ++c)
        if (is_rotated[c]) pairs.rotate_neighbours(row.x[c], c);
    }
  }
};

}  // namespace mla_fp8::gpu
