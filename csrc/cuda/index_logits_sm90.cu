// index_logits on Hopper. A CTA computes the logits of a piece of a unit: some tiles of its columns. Scan and
// index_logits share their arithmetic (indexer/sm90.cuh), so index_topk sees the same logits.

#include <algorithm>
#include <cmath>

#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_math.cuh"
#include "cuda/indexer/sm90_shapes.cuh"

#if MLA_FP8_WITH_SM90A

namespace mla_fp8::gpu {
namespace {

using namespace sm90_index;

constexpr int kMostPieceTiles = 32;  // of a CTA

struct Sm90LogitsArgs {
  KeyBoxes boxes;
  IndexLogitsArgs logits;
  int unit_stride;  // rows between those that may begin a unit
  int piece_columns;
};

}  // namespace

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    index_logits_sm90_kernel(const __grid_constant__ Sm90LogitsArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ Barriers barriers;
  const IndexLogitsParams& p = args.logits.p;
  wait_for_previous_grid();
  const int64_t i = args.logits.pieces(blockIdx.x), row = i * args.unit_stride;
  const int64_t first = (int64_t{blockIdx.x} - i * args.logits.pieces.divisor()) * args.piece_columns;
  IndexUnit unit;
  if (!find_unit(p.problem.rows, row, args.logits.group_rows, unit)) return;
  if (p.problem.keys.list.elements != nullptr) list_row(p.problem.keys, p.width, unit);
  const int64_t last = min(first + args.piece_columns, p.width);
  const auto out = [&](int r, int64_t column) { return p.out + (row + r) * p.out_stride_row + column; };
  if (first >= unit.end || last <= unit.begin) {
    for (int r = 0; r < unit.num_rows; ++r)
      for (int64_t c = first + threadIdx.x; c < last; c += kThreads) *out(r, c) = -INFINITY;
    return;
  }
  barriers.init(threadIdx.x, args.boxes, S::kShares);
  const Memory m = dynamic_memory(kMostStages, S::kQueryLines, num_panels(S::kFp4), S::kFp4);
  if constexpr (S::kFp4)
    if (threadIdx.x < kGroup) barriers.init_magnitudes(threadIdx.x);
  if (threadIdx.x < kConsumers) load_queries<S::kHeads, S::kUnitRows>(p.problem.queries, unit, m);
  __syncthreads();
  const int tiles = static_cast<int>((last - first + kTileKeys - 1) / kTileKeys);
  if (threadIdx.x >= kConsumers) {
    give_up_registers<kProducerRegisters>();
    Fetch fetch(p.problem.keys, args.boxes, args.logits.page_size, m, barriers);
    fetch.fetch(unit, static_cast<int32_t>(first), tiles);
    return;
  }
  take_registers<kConsumerRegisters>();
  using TileMath = Math<S::kHeads, S::kRows, S::kShares, kMostStages, S::kFp4>;
  TileMath math(m, barriers, args.boxes.are_used);
  math.load_weights();
  for (int key = 0; key < tiles * kTileKeys; key += TileMath::kStep * kItemKeys) {
    const int64_t column = first + key + TileMath::first_key() + TileMath::key();
    math.next_item([&](int, int pair, float logit, uint32_t present) {
      const int r = math.row(pair);
      if (!TileMath::is_own() || r >= unit.num_rows || column >= p.width) return;
      const IndexRow& where = unit.rows[r];
      if ((float_bits(logit) & ~kSignMask) > kInfBits) logit = bits_float(kNanBits);
      *out(r, column) = present != 0 && column >= where.begin && column < where.end ? logit : -INFINITY;
    });
  }
#endif
}

bool takes_sm90(const IndexProblem& problem) {
  const IndexKeys& keys = problem.keys;
  const int64_t strides = keys.values_stride_page | keys.values_stride_row;
  return compute_major() == 9 &&
         (reinterpret_cast<uintptr_t>(keys.values) | static_cast<uintptr_t>(strides)) % 16 == 0;
}

void index_logits_sm90(const IndexLogitsParams& p, gpuStream_t stream) {
  const IndexRows& rows = p.problem.rows;
  const bool are_listed = p.problem.keys.list.elements != nullptr;
  const int group_rows = are_listed ? 1 : unit_rows(rows, kIndexGroupRows, p.problem.queries.num_heads);
  const bool are_even = rows.query_start_loc == nullptr && (rows.k_start || rows.next_n % group_rows == 0);
  const int unit_stride = are_even ? group_rows : 1;
  const int64_t units = (rows.num_rows + unit_stride - 1) / unit_stride;
  const int64_t tiles = (p.width + kTileKeys - 1) / kTileKeys;
  const int64_t piece_tiles =  // about four pieces for each multiprocessor
      std::clamp<int64_t>(units * tiles / (4 * num_processors()), 1, kMostPieceTiles);
  const int64_t pieces = (tiles + piece_tiles - 1) / piece_tiles;
  const bool is_fp4 = has_fp4_keys(p.problem);
  with_shape(p.problem.queries.num_heads, group_rows, is_fp4, [&](auto shape) {
    using S = decltype(shape);
    launch(index_logits_sm90_kernel<S>,
           {.grid = units * pieces,
            .block = kThreads,
            .stream = stream,
            .smem = 1024 + Memory::bytes(kMostStages, S::kQueryLines, num_panels(S::kFp4), S::kFp4)},
           Sm90LogitsArgs{key_boxes(p.problem, group_rows),
                          {p, Divider(p.problem.keys.page_size), Divider(pieces), group_rows},
                          unit_stride,
                          static_cast<int>(piece_tiles) * kTileKeys});
  });
}

}  // namespace mla_fp8::gpu

#endif
