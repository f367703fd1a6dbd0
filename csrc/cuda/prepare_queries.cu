// prepare_queries on CUDA, one launch. A warp takes heads of one token, of the indexer or of attention, in
// steps that are in flight together; its lanes rotate the same pairs of every head, so a token's cos and sin
// are read once by each warp.
//
//   indexer    eight lanes a head (index_row.cuh), four heads a step
//   attention  a lane has chunks i and i + n / 2 of the n chunks of a head, and so both elements of each pair
//              whichever way RoPE pairs them
//
// Traffic of a token: 256 + 128 bytes and two weights of each head of the indexer, 2 x 128 of each head of
// attention; HBM-bound. No shared memory; shuffles find the scales.

#include "ops/prepare_queries.h"

#include "cuda/index_rope.cuh"

namespace mla_fp8::gpu {

struct PrepareQueriesArgs {
  PrepareQueriesParams p;
  int index_parts;  // warps of a token that take heads of the indexer
  int items;        // of attention: pairs of chunks of a token
  Divider parts;    // warps of a token
  Divider half_chunks;
};

inline constexpr int kQueriesWarps = 4;
inline constexpr int kQueriesBlock = kQueriesWarps * kWarpSize;
inline constexpr int kHeadsOfStep = kWarpSize / kIndexLanes;

// Heads of the indexer of warp `part` of a token.
template <IndexLayoutId kId, int kAtOnce>
__device__ __forceinline__ void prepare_index_heads(const PrepareQueriesParams& p, int64_t token, int part) {
  static_assert(kAtOnce <= kIndexLanes);
  const int lane = threadIdx.x % kIndexLanes;
  const int first = part * kHeadsOfStep * kAtOnce + static_cast<int>(threadIdx.x % kWarpSize) / kIndexLanes;
  const uint16_t* source = p.index_q + token * p.index_q_stride_token;
  IndexRow rows[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int head = first + i * kHeadsOfStep;
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c)
      rows[i].x[c] =
          load_if<4>(source + head * p.index_q_stride_head + IndexRow::element(c), head < p.num_index_heads);
  }
  const Position position = load_position(p.index_table, token);
  // Each lane looks after the weight of one head.
  const int own = first + lane * kHeadsOfStep;
  const bool has_weight = lane < kAtOnce && own < p.num_index_heads;
  float weight = 0.0f;
  if (has_weight) {
    const int64_t at = token * p.index_weights_stride_token + own;
    weight = p.weights_are_float ? static_cast<const float*>(p.index_weights)[at]
                                 : bf16_to_float(static_cast<const uint16_t*>(p.index_weights)[at]);
  }
  const IndexRotation rotation(p.index_table, position, p.index_is_neox, p.index_first_dim);

  uint32_t own_scale = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int head = first + i * kHeadsOfStep;
    IndexRow& row = rows[i];
    rotation.rotate(row);
    if (!position.valid) row = IndexRow{};
    if (p.hadamard) hadamard(row);
    const IndexCodes<kId> codes = encode_index<kId>(p.scaling, row);
    if (lane == i) own_scale = codes.scale;
    if (head >= p.num_index_heads) continue;
    constexpr int kBytes = index_layout(kId).value_bytes;
    uint8_t* out = p.out_index_q + (token * p.num_index_heads + head) * kBytes;
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c)
      store(out + IndexRow::element(c) * kBytes / kIndexDim, codes.chunk[c], true);
  }
  if (!has_weight) return;
  const int64_t at = token * p.num_index_heads + own;
  const float scale = kId == IndexLayoutId::kIndexFp8 ? bits_float(own_scale) : 1.0f;
  p.out_index_weights[at] = weight * p.weight_scale * scale * p.head_scale;
  if constexpr (kId == IndexLayoutId::kIndexFp4)
    reinterpret_cast<uint32_t*>(p.out_index_scale)[at] = own_scale;
}

// Pairs of chunks of attention's heads of warp `part` of a token.
template <int kAtOnce>
__device__ __forceinline__ void rotate_heads(const PrepareQueriesArgs& args, int64_t token, int part) {
  const PrepareQueriesParams& p = args.p;
  const int half_chunks = static_cast<int>(args.half_chunks.divisor());
  const uint16_t* source = p.q_pe + token * p.q_pe_stride_token;
  uint16_t* out = p.out_q_pe + token * p.out_q_pe_stride_token;
  Words<4> x[kAtOnce][2];
  int head[kAtOnce], chunk[kAtOnce];
  bool exists[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int item = (part * kAtOnce + i) * kWarpSize + static_cast<int>(threadIdx.x % kWarpSize);
    exists[i] = item < args.items;
    head[i] = static_cast<int>(args.half_chunks.word(item));
    chunk[i] = item - head[i] * half_chunks;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      x[i][k] = load_if<4>(source + head[i] * p.q_pe_stride_head + (chunk[i] + k * half_chunks) * kChunk,
                           exists[i]);
  }
  const Position position = load_position(p.table, token);
  ChunkPairRotation rotation;
  int held = -1;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (!exists[i]) break;
    if (position.valid) {
      if (chunk[i] != held) {
        held = chunk[i];
        if (p.is_neox) {
          rotation.load_halves(p.table, position.at, held * kChunk);
        } else {
#pragma unroll
          for (int k = 0; k < 2; ++k)
            rotation.of[k] = load_rotation(p.table, position.at, (held + k * half_chunks) * kChunk / 2);
        }
      }
      if (p.is_neox) {
        rotation.rotate_halves(x[i][0], x[i][1]);
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) rotation.rotate_neighbours(x[i][k], k);
      }
    } else {
      x[i][0] = x[i][1] = Words<4>{};
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)
      store(out + head[i] * p.out_q_pe_stride_head + (chunk[i] + k * half_chunks) * kChunk, x[i][k], true);
  }
}

template <IndexLayoutId kId, int kAtOnce>
__global__ void __launch_bounds__(kQueriesBlock)
    prepare_queries_kernel(const __grid_constant__ PrepareQueriesArgs args) {
  const int64_t unit = int64_t{blockIdx.x} * kQueriesWarps + threadIdx.x / kWarpSize;
  const int64_t token = args.parts(unit);
  const int part = static_cast<int>(unit - token * args.parts.divisor());
  if (token >= args.p.num_tokens) return;
  wait_for_previous_grid();
  if (part < args.index_parts) prepare_index_heads<kId, kAtOnce>(args.p, token, part);
  else rotate_heads<kAtOnce>(args, token, part - args.index_parts);
}

template <IndexLayoutId kId, int kAtOnce>
void launch_queries(const PrepareQueriesParams& p, gpuStream_t stream) {
  const int half_chunks = p.num_heads > 0 ? p.table.dim() / (2 * kChunk) : 1;
  const int items = static_cast<int>(p.num_heads) * half_chunks;
  const int index_parts = ceil_div(static_cast<int>(p.num_index_heads), kHeadsOfStep * kAtOnce);
  const int parts = index_parts + ceil_div(items, kWarpSize * kAtOnce);
  launch(prepare_queries_kernel<kId, kAtOnce>,
         {.grid = ceil_div<int64_t>(p.num_tokens * parts, kQueriesWarps),
          .block = kQueriesBlock,
          .stream = stream},
         PrepareQueriesArgs{p, index_parts, items, Divider(parts), Divider(half_chunks)});
}

// Few tokens' heads go each to a lane of their own: what they take is one head's latency.
void prepare_queries(const PrepareQueriesParams& p, gpuStream_t stream) {
  constexpr IndexLayoutId kFp8 = IndexLayoutId::kIndexFp8, kFp4 = IndexLayoutId::kIndexFp4;
  constexpr int kMany = 2;
  const int64_t heads_at_once = int64_t{num_processors()} * (kMaxThreadsPerSm / kIndexLanes);
  const bool many = p.num_tokens * (p.num_index_heads + p.num_heads / 2) > heads_at_once;
  if (p.layout == kFp8)
    return many ? launch_queries<kFp8, kMany>(p, stream) : launch_queries<kFp8, 1>(p, stream);
  if (many) launch_queries<kFp4, kMany>(p, stream);
  else launch_queries<kFp4, 1>(p, stream);
}

}  // namespace mla_fp8::gpu
