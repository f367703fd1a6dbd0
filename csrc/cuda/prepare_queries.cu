// prepare_queries on CUDA, one launch. A warp takes heads of one token, of the indexer or of attention.
//
//   indexer    eight lanes a head (index_row.cuh)
//   attention  a lane has chunks i and i + n / 2 of a head's n chunks: both elements of each pair, whichever
//              way RoPE pairs them
//
// HBM-bound: an indexer's head is 256 bytes read, 128 written and two weights; a head of attention 128 read
// and written. There is no shared memory: shuffles find the scales. Two to four heads a lane, in flight
// together, take 1 to 12 % longer (4096 tokens, H100): with so many warps latency is hidden anyway.

#include "ops/prepare_queries.h"

#include "cuda/index_rope.cuh"

namespace mla_fp8::gpu {

struct PrepareQueriesArgs {
  PrepareQueriesParams p;
  int index_parts;  // warps of a token that take heads of the indexer
  int items;        // pairs of chunks of attention's heads of a token
  Divider parts;    // warps of a token
  Divider half_chunks;
};

inline constexpr int kQueriesWarps = 4;
inline constexpr int kQueriesBlock = kQueriesWarps * kWarpSize;
inline constexpr int kHeadsOfWarp = kWarpSize / kIndexLanes;

// Prepares the indexer's heads of warp `part` of a token.
template <IndexLayoutId kId>
__device__ __forceinline__ void prepare_index_heads(const PrepareQueriesParams& p, int64_t token, int part) {
  const int head = (part * kWarpSize + static_cast<int>(threadIdx.x % kWarpSize)) / kIndexLanes;
  const bool exists = head < p.num_index_heads;  // lanes without a head go on: they shuffle
  const uint16_t* source = p.index_q + token * p.index_q_stride_token + head * p.index_q_stride_head;
  IndexRow row;
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c) row.x[c] = load_if<4>(source + IndexRow::element(c), exists);
  const Position position = load_position(p.index_table, token);
  const bool has_weight = exists && threadIdx.x % kIndexLanes == 0;
  float weight = 0.0f;
  if (has_weight) {
    const int64_t at = token * p.index_weights_stride_token + head;
    weight = p.weights_are_float ? static_cast<const float*>(p.index_weights)[at]
                                 : bf16_to_float(static_cast<const uint16_t*>(p.index_weights)[at]);
  }
  const IndexRotation rotation(p.index_table, position, p.index_is_neox, p.index_first_dim);
  rotation.rotate(row);
  if (!position.valid) row = IndexRow{};
  if (p.hadamard) hadamard(row);
  const IndexCodes<kId> codes = encode_index<kId>(p.scaling, row);
  if (!exists) return;
  constexpr int kBytes = index_layout(kId).value_bytes;
  const int64_t at = token * p.num_index_heads + head;
#pragma unroll
  for (int c = 0; c < kIndexChunks; ++c)
    store(p.out_index_q + at * kBytes + IndexRow::element(c) * kBytes / kIndexDim, codes.chunk[c], true);
  if (!has_weight) return;
  const float scale = kId == IndexLayoutId::kIndexFp8 ? bits_float(codes.scale) : 1.0f;
  p.out_index_weights[at] = weight * p.weight_scale * scale * p.head_scale;
  if constexpr (kId == IndexLayoutId::kIndexFp4)
    reinterpret_cast<uint32_t*>(p.out_index_scale)[at] = codes.scale;
}

// Rotates the pairs of chunks of attention's heads that warp `part` of a token has.
__device__ __forceinline__ void rotate_heads(const PrepareQueriesArgs& args, int64_t token, int part) {
  const PrepareQueriesParams& p = args.p;
  const int item = part * kWarpSize + static_cast<int>(threadIdx.x % kWarpSize);
  if (item >= args.items) return;
  const int half_chunks = static_cast<int>(args.half_chunks.divisor());
  const int head = static_cast<int>(args.half_chunks.word(item)), chunk = item - head * half_chunks;
  const uint16_t* source = p.q_pe + token * p.q_pe_stride_token + head * p.q_pe_stride_head;
  uint16_t* out = p.out_q_pe + token * p.out_q_pe_stride_token + head * p.out_q_pe_stride_head;
  const int dims[2] = {chunk * kChunk, (chunk + half_chunks) * kChunk};
  Words<4> x[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) x[k] = load_if<4>(source + dims[k], true);
  const Position position = load_position(p.table, token);
  if (position.valid) {
    ChunkPairRotation rotation;
    if (p.is_neox) {
      rotation.load_halves(p.table, position.at, dims[0]);
      rotation.rotate_halves(x[0], x[1]);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        rotation.of[k] = load_rotation(p.table, position.at, dims[k] / 2);
        rotation.rotate_neighbours(x[k], k);
      }
    }
  } else {
    x[0] = x[1] = Words<4>{};
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) store(out + dims[k], x[k], true);
}

template <IndexLayoutId kId>
__global__ void __launch_bounds__(kQueriesBlock)
    prepare_queries_kernel(const __grid_constant__ PrepareQueriesArgs args) {
  const int64_t unit = int64_t{blockIdx.x} * kQueriesWarps + threadIdx.x / kWarpSize;
  const int64_t token = args.parts(unit);
  const int part = static_cast<int>(unit - token * args.parts.divisor());
  if (token >= args.p.num_tokens) return;
  wait_for_previous_grid();
  if (part < args.index_parts) prepare_index_heads<kId>(args.p, token, part);
  else rotate_heads(args, token, part - args.index_parts);
}

void prepare_queries(const PrepareQueriesParams& p, gpuStream_t stream) {
  const int half_chunks = p.num_heads > 0 ? p.table.dim() / (2 * kChunk) : 1;
  const int items = static_cast<int>(p.num_heads) * half_chunks;
  const int index_parts = ceil_div(static_cast<int>(p.num_index_heads), kHeadsOfWarp);
  const int parts = index_parts + ceil_div(items, kWarpSize);
  const LaunchConfig config{.grid = ceil_div<int64_t>(p.num_tokens * parts, kQueriesWarps),
                            .block = kQueriesBlock,
                            .stream = stream};
  const PrepareQueriesArgs args{p, index_parts, items, Divider(parts), Divider(half_chunks)};
  if (p.layout == IndexLayoutId::kIndexFp8)
    launch(prepare_queries_kernel<IndexLayoutId::kIndexFp8>, config, args);
  else launch(prepare_queries_kernel<IndexLayoutId::kIndexFp4>, config, args);
}

}  // namespace mla_fp8::gpu
