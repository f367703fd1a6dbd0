#pragma once
// Logits of a tile of keys on any GPU: matrix instructions on 16 keys x 16 heads, in fp16, which holds e4m3
// exactly, with sums in float. Keys and queries lie in shared memory as e4m3; e2m1 is expanded on the way in.
#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/indexer/rows.cuh"
#include "cuda/indexer/select.cuh"
#include "cuda/paged_attention_ragged/matrix_tile.cuh"

namespace mla_fp8::gpu {

inline constexpr int kIndexThreads = 256;
inline constexpr int kIndexTileKeys = 128;
inline constexpr int kIndexHeadRows = 128;          // heads of all rows of a unit, each row's padded to 16
inline constexpr int kIndexPitch = kIndexDim + 16;  // bytes; the shift spreads rows over the banks

struct IndexTileSmem {
  alignas(16) uint8_t keys[kIndexTileKeys * kIndexPitch];
  alignas(16) uint8_t queries[kIndexHeadRows * kIndexPitch];
};
struct IndexScalarSmem {
  float weights[kIndexHeadRows];
  float scales[kIndexTileKeys];
  uint8_t present[kIndexTileKeys];  // bit i: row i of the unit sees the key
};

// Lines of queries that a row has.
MLA_HD constexpr int padded_heads(int num_heads) { return (num_heads + 15) / 16 * 16; }
inline int index_group_rows(int num_heads) {
  const int rows = kIndexHeadRows / padded_heads(num_heads);
  return rows < kIndexGroupRows ? rows : kIndexGroupRows;
}

// Expands 32 e2m1 (16 bytes) to e4m3, by a table of the eight magnitudes.
__device__ __forceinline__ void expand_e2m1(const Words<4>& packed, int shift, uint8_t* to) {
  uint64_t table = 0;
#pragma unroll
  for (uint32_t code = 0; code < 8; ++code) table |= uint64_t{e2m1_to_e4m3(code, shift)} << (8 * code);
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const uint32_t codes = packed[w / 2] >> (w % 2 * 16);
    uint32_t four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t code = codes >> (4 * i) & 15u;
      four |= ((static_cast<uint32_t>(table >> (8 * (code & 7u))) & 0xffu) | (code & 8u) << 4) << (8 * i);
    }
    reinterpret_cast<uint32_t*>(to)[w] = four;
  }
}

// Loads sixteen bytes, of which only every fourth is known to be aligned.
__device__ __forceinline__ Words<4> load_words(const uint8_t* from, bool aligned) {
  if (aligned) return load_if<4>(from, true);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from);
  return {words[0], words[1], words[2], words[3]};
}

__device__ __forceinline__ void load_queries(const IndexQueries& queries, const IndexUnit& unit,
                                             IndexTileSmem& tile, IndexScalarSmem& scalars) {
  const int padded = padded_heads(queries.num_heads);
  for (int i = threadIdx.x; i < kIndexHeadRows * 8; i += kIndexThreads) {
    const int line = i / 8, piece = i % 8;  // a piece is sixteen e4m3 of a head
    const int row = line / padded, head = line % padded;
    const bool exists = row < unit.num_rows && head < queries.num_heads;
    uint8_t* to = tile.queries + line * kIndexPitch + 16 * piece;
    const uint8_t* from = queries.q + (unit.first_row + (exists ? row : 0)) * queries.q_stride_row;
    if (!queries.is_fp4) {
      store(to, load_if<4>(from + (exists ? head : 0) * kIndexDim + 16 * piece, exists));
    } else if (piece % 2 == 0) {
      const Words<4> packed = load_if<4>(from + (exists ? head : 0) * (kIndexDim / 2) + 8 * piece, exists);
      const uint8_t* s = static_cast<const uint8_t*>(queries.q_scale) +
                         (unit.first_row + (exists ? row : 0)) * queries.q_scale_stride_row +
                         4 * (exists ? head : 0);
      expand_e2m1(packed, E2m1Scales{s[0], s[1], s[2], s[3]}.shift(piece / 2), to);
    }
  }
  for (int line = threadIdx.x; line < kIndexHeadRows; line += kIndexThreads) {
    const int row = line / padded, head = line % padded;
    const bool exists = row < unit.num_rows && head < queries.num_heads;
    scalars.weights[line] = exists ? queries.weight(unit.first_row + row, head) : 0.0f;
  }
}

// Loads keys of columns first .. first + kIndexTileKeys - 1. Columns outside the unit are not read.
__device__ __forceinline__ void load_keys(const IndexKeys& keys, const Divider& page_size,
                                          const IndexUnit& unit, int64_t first, IndexTileSmem& tile,
                                          IndexScalarSmem& scalars) {
  const bool is_fp4 = keys.layout == IndexLayoutId::kIndexFp4;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(keys.values) | keys.values_stride_page | keys.values_stride_row) % 16 == 0;
  for (int i = threadIdx.x; i < kIndexTileKeys * 8; i += kIndexThreads) {
    const int key = i / 8, piece = i % 8;
    const int64_t column = first + key;
    const bool wanted = column >= unit.begin && column < unit.end;
    const auto [page, row, members] = wanted ? key_place(keys, page_size, unit, column) : KeyPlace{-1, 0, 0};
    uint8_t* to = tile.keys + key * kIndexPitch + 16 * piece;
    if (page < 0) {
      store(to, Words<4>{});
    } else if (!is_fp4) {
      store(to, load_words(keys.value(page, row) + 16 * piece, aligned));
    } else if (piece % 2 == 0) {
      const uint8_t* s = keys.scale(page, row);
      expand_e2m1(load_words(keys.value(page, row) + 8 * piece, aligned),
                  E2m1Scales{s[0], s[1], s[2], s[3]}.shift(piece / 2), to);
    }
    if (piece == 0) {
      float scale = 0.0f;
      if (page >= 0) {
        const uint8_t* s = keys.scale(page, row);
        scale = is_fp4 ? E2m1Scales{s[0], s[1], s[2], s[3]}.scale() : *reinterpret_cast<const float*>(s);
      }
      scalars.scales[key] = scale;
      scalars.present[key] = page >= 0 ? static_cast<uint8_t>(members) : 0;
    }
  }
}

// Logits of the sixteen keys of a block of the tile, by the calling wave, row by row: sink(row, valid, key,
// logit, present), all lanes together.
template <class Sink>
__device__ __forceinline__ void block_logits(const IndexTileSmem& tile, const IndexScalarSmem& scalars,
                                             int block, int num_rows, int padded, const Sink& sink) {
  constexpr int kSteps = kIndexDim / kTile;
  Operand a[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int r = 0; r < kOperandRows; ++r)
      a[step].row[r] = load_k4<CacheDtype::kE4m3fn, Dtype::kF16>(
          tile.keys + (block * kTile + operand_row(r)) * kIndexPitch + step * kTile + operand_k());
  for (int row = 0; row < num_rows; ++row) {
    float sums[4] = {};  // of columns 8 i + 2 t and the next one, two keys
    for (int head = 0; head < padded; head += kTile) {
      const int line = row * padded + head;
      float acc[kTileAccumulators] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Operand b;
#pragma unroll
        for (int r = 0; r < kOperandRows; ++r)
          b.row[r] = load_k4<CacheDtype::kE4m3fn, Dtype::kF16>(
              tile.queries + (line + operand_row(r)) * kIndexPitch + step * kTile + operand_k());
        multiply_tiles<Dtype::kF16>(acc, a[step], b);
      }
#pragma unroll
      for (int i = 0; i < kTileAccumulators; ++i) {
        const float relu = __fmul_rn(__fadd_rn(acc[i], fabsf(acc[i])), 0.5f);  // a NaN stays one
        const float weight = scalars.weights[line + accumulator_column(i)];
        sums[i % 4] = fmaf(relu, weight, sums[i % 4]);
      }
    }
    // sums[0], [1] are columns 2t, 2t + 1 of key g; [2], [3] those of key g + 8. Lanes 0 and 1 of a quad get
    // one key each. The scale multiplies the sum of all heads: parts times infinity might cancel to NaN.
    float totals[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = __fadd_rn(sums[2 * half], sums[2 * half + 1]);
      total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 1));
      total = __fadd_rn(total, __shfl_xor_sync(kFullWarp, total, 2));
      totals[half] = __fmul_rn(total, scalars.scales[block * kTile + accumulator_row(2 * half)]);
    }
    const int t = wave_lane() % 4;
    const int key = block * kTile + wave_lane() / 4 + 8 * (t & 1);
    sink(row, t < 2, key, __fadd_rn(totals[t & 1], 0.0f), scalars.present[key] >> row & 1);
  }
}

// Logits of all keys of the tile, by all threads: sink as that of block_logits.
template <class Sink>
__device__ __forceinline__ void tile_logits(const IndexTileSmem& tile, const IndexScalarSmem& scalars,
                                            int num_rows, int padded, const Sink& sink) {
  for (int block = threadIdx.x / kWarpSize; block < kIndexTileKeys / kTile;
       block += kIndexThreads / kWarpSize)
    block_logits(tile, scalars, block, num_rows, padded, sink);
}

}  // namespace mla_fp8::gpu
