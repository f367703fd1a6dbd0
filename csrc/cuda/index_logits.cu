// index_logits on CUDA. A CTA computes the logits of a unit (rows of a request, indexer/rows.cuh) for
// kPieceColumns columns.

#include "ops/index_logits.h"

#include <cmath>

#include "cuda/indexer/sm90.h"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

namespace {

constexpr int kPieceColumns = 8 * kIndexTileKeys;

}  // namespace

__global__ void __launch_bounds__(kIndexThreads, 2)
    index_logits_kernel(const __grid_constant__ IndexLogitsArgs args) {
  const IndexLogitsParams& p = args.p;
  const IndexProblem& problem = p.problem;
  MLA_SHARED(IndexTileSmem, tile);
  MLA_SHARED(IndexScalarSmem, scalars);
  wait_for_previous_grid();
  const int64_t row = args.pieces(blockIdx.x);
  const int64_t piece = (int64_t{blockIdx.x} - row * args.pieces.divisor()) * kPieceColumns;
  IndexUnit unit;
  if (!find_unit(problem.rows, row, args.group_rows, unit)) return;
  if (problem.keys.list.elements != nullptr) list_row(problem.keys, p.width, unit);
  load_queries(problem.queries, unit, tile, scalars);

  for (int64_t first = piece; first < piece + kPieceColumns && first < p.width; first += kIndexTileKeys) {
    if (first >= unit.end || first + kIndexTileKeys <= unit.begin) {
      for (int i = threadIdx.x; i < unit.num_rows * kIndexTileKeys; i += kIndexThreads) {
        const int64_t column = first + i % kIndexTileKeys;
        if (column < p.width) p.out[(row + i / kIndexTileKeys) * p.out_stride_row + column] = -INFINITY;
      }
      continue;
    }
    __syncthreads();
    load_keys(problem.keys, args.page_size, unit, first, tile, scalars);
    __syncthreads();
    tile_logits(tile, scalars, unit.num_rows, padded_heads(problem.queries.num_heads),
                [&](int r, bool valid, int key, float logit, bool present) {
                  const int64_t column = first + key;
                  if (!valid || column >= p.width) return;
                  const IndexRow& where = unit.rows[r];
                  const bool seen = column >= where.begin && column < where.end && present;
                  if ((float_bits(logit) & ~kSignMask) > kInfBits) logit = bits_float(kNanBits);
                  p.out[(row + r) * p.out_stride_row + column] = seen ? logit : -INFINITY;
                });
  }
}

void index_logits(const IndexLogitsParams& p, gpuStream_t stream) {
  if (takes_sm90(p.problem)) return index_logits_sm90(p, stream);
  const int64_t pieces = (p.width + kPieceColumns - 1) / kPieceColumns;
  launch(index_logits_kernel,
         {.grid = p.problem.rows.num_rows * pieces, .block = kIndexThreads, .stream = stream},
         IndexLogitsArgs{p, Divider(p.problem.keys.page_size), Divider(pieces),
                         p.problem.keys.list.elements ? 1 : index_group_rows(p.problem.queries.num_heads)});
}

// Writes the logits of the positions that index_topk chose: each row's positions are its list of entries.
void index_scores(const IndexTopkParams& p, gpuStream_t stream) {
  IndexLogitsParams logits{p.problem, p.topk, p.scores, p.scores_stride_row};
  logits.problem.keys.list = {.elements = p.positions,
                              .stride = p.positions_stride_row,
                              .shift = 0,
                              .rows = 1,
                              .num_positions = p.problem.rows.num_columns};
  index_logits(logits, stream);
}

}  // namespace mla_fp8::gpu
