// The kernels of the indexer on Hopper: index_topk's scan and merge, and index_logits, whose logits are the
// same (indexer/sm90.cuh).

#include <algorithm>
#include <cmath>

#include "cuda/indexer/sm90.h"
#include "cuda/indexer/sm90_merge.cuh"
#include "cuda/indexer/sm90_scan.cuh"

#if MLA_FP8_WITH_SM90A

namespace mla_fp8::gpu {
namespace {

using namespace sm90_index;

constexpr int kMostPieceTiles = 32;  // of a CTA of index_logits

struct Sm90LogitsArgs {
  KeyBoxes boxes;
  IndexLogitsArgs logits;
  int num_stages, lines, panels;
  int unit_stride;  // rows from one that may begin a unit to the next
  int piece_columns;
};

// Runs fn(constant<lines of a row's queries>{}).
template <class Fn>
void with_lines(int num_heads, const Fn& fn) {
  if (num_heads <= 16) return fn(constant<16>{});
  if (num_heads <= 32) return fn(constant<32>{});
  return fn(constant<64>{});
}

// Rows of a unit, at most `most`; those of a request are divided evenly.
int unit_rows(const IndexRows& rows, int64_t most) {
  most = std::min(most, rows.num_rows);
  if (rows.k_start || rows.query_start_loc) return static_cast<int>(most);
  const int64_t units = (rows.next_n + most - 1) / most;
  return static_cast<int>((rows.next_n + units - 1) / units);
}
// Lines of queries in shared memory for a unit of that many rows: a product takes 64 or 128.
int query_lines(int rows, int row_lines) {
  const int lines = rows * row_lines;
  return lines <= 64 ? 64 : row_lines == 64 ? lines : (lines + 127) / 128 * 128;
}
// Stages that fit beside `other` bytes: whole tiles (sm90.cuh).
int stages(int lines, int panels, bool is_fp4, int other) {
  const int room = kMaxSharedBytes - 1024 - other - Memory::bytes(0, lines, panels, is_fp4);
  return std::min(room / Memory::stage_bytes(is_fp4), kMostStages) / kGroups * kGroups;
}
bool has_fp4_keys(const IndexProblem& problem) { return problem.keys.layout == IndexLayoutId::kIndexFp4; }

KeyBoxes key_boxes(const IndexProblem& problem) {
  const IndexKeys& keys = problem.keys;
  KeyBoxes boxes{};
  const bool is_paged = keys.page_table != nullptr;
  const int64_t rows = is_paged ? keys.page_size : problem.rows.num_columns;
  const uintptr_t scales = reinterpret_cast<uintptr_t>(keys.scales) | keys.scales_stride_page;
  const int row_bytes = has_fp4_keys(problem) ? kIndexDim / 2 : kIndexDim;
  if ((is_paged && keys.page_size % kItemKeys != 0) || keys.values_stride_row != row_bytes ||
      scales % 16 != 0 || keys.num_pages > INT32_MAX || keys.num_pages < 1 || rows < 1)
    return boxes;
  if (has_fp4_keys(problem)) {  // one piece of memory: no swizzle, no map
    boxes.are_used = true;
    return boxes;
  }
  const int64_t page_stride = keys.num_pages > 1 ? keys.values_stride_page : rows * kIndexDim;
  boxes.are_used = make_tensor_map(boxes.map, keys.values, kIndexDim, rows, keys.num_pages, kIndexDim,
                                   page_stride, kItemKeys);
  return boxes;
}

}  // namespace

template <int kHeads>
__global__ void __launch_bounds__(kThreads, 1) index_scan_sm90_kernel(const __grid_constant__ ScanArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_grid();
  Scan<kHeads>(args).run();
#endif
}

__global__ void __launch_bounds__(kMergeThreads, 1)
    index_merge_sm90_kernel(const __grid_constant__ IndexTopkArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ MergeShared shared;
  extern __shared__ uint8_t raw[];
  wait_for_previous_grid();
  merge(args, shared, reinterpret_cast<uint64_t*>(raw + (16 - reinterpret_cast<uintptr_t>(raw) % 16) % 16));
#endif
}

template <int kHeads>
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
  const int64_t last = min(first + args.piece_columns, p.width);
  const auto out = [&](int r, int64_t column) { return p.out + (row + r) * p.out_stride_row + column; };
  if (first >= unit.end || last <= unit.begin) {
    for (int r = 0; r < unit.num_rows; ++r)
      for (int64_t c = first + threadIdx.x; c < last; c += kThreads) *out(r, c) = -INFINITY;
    return;
  }
  barriers.init(args.boxes.are_used);
  __syncthreads();
  const Memory m = dynamic_memory(args.num_stages, args.lines, args.panels,
                                  p.problem.keys.layout == IndexLayoutId::kIndexFp4);
  if (m.is_fp4) barriers.init_magnitudes();
  const int tiles = static_cast<int>((last - first + kTileKeys - 1) / kTileKeys);
  Math<kHeads> math(m, barriers, args.boxes.are_used, false);
  Fetch fetch(p.problem.keys, args.boxes, args.logits.page_size, m, barriers);
  fetch.begin(unit, static_cast<int32_t>(first), tiles, math.place());
  load_queries<kHeads>(p.problem.queries, unit, m);
  __syncthreads();
  math.begin(unit.num_rows);
  math.load_weights();
  for (int t = 0; t < tiles; ++t) {
    fetch.next_tile(unit, static_cast<int32_t>(first), tiles, t);
    math.next_tile([&](int pair, int key, float logit, bool present) {
      const int64_t column = first + int64_t{t} * kTileKeys + key;
      if (!math.has_row(pair) || column >= p.width) return;
      const int r = math.row(pair);
      const IndexRow& where = unit.rows[r];
      if ((float_bits(logit) & ~kSignMask) > kInfBits) logit = bits_float(kNanBits);
      *out(r, column) = present && column >= where.begin && column < where.end ? logit : -INFINITY;
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

void index_topk_sm90(const IndexTopkArgs& args, gpuStream_t stream) {
  IndexTopkArgs own = args;
  const IndexRows& rows = args.p.problem.rows;
  own.group_rows = unit_rows(rows, args.p.topk > 2048 ? 2 : kIndexGroupRows);
  const int capacity = list_capacity(args.p.topk, own.group_rows);
  own.list_rows = own.group_rows;
  own.tile_keys = kTileKeys;
  with_lines(args.p.problem.queries.num_heads, [&](auto row_lines) {
    const int lines = query_lines(own.group_rows, row_lines);
    const int lists = own.group_rows * capacity * 8;
    const bool is_fp4 = has_fp4_keys(args.p.problem);
    const int panels = !is_fp4 ? 0 : own.group_rows > 2 ? kGroups : 2 * kGroups;
    const int num_stages = stages(lines, panels, is_fp4, lists + static_cast<int>(sizeof(ScanShared)) + 1024);
    const bool has_pins = own.p.pin_first > 0 || own.p.pin_last > 0;
    const bool may_take_two = own.group_rows <= 2 && num_stages >= 2 * kGroups;
    launch(index_scan_sm90_kernel<row_lines>,
           {.grid = own.num_ctas,
            .block = kThreads,
            .stream = stream,
            .smem = 1024 + Memory::bytes(num_stages, lines, panels, is_fp4) + lists},
           ScanArgs{key_boxes(args.p.problem), own, num_stages, lines, panels, capacity, has_pins,
                    may_take_two});
  });
  const int64_t jobs = num_merge_jobs(own);
  const int cluster = jobs <= 15   ? 8
                      : jobs <= 30 ? 4
                      : jobs <= 66 ? 2
                                   : 1;  // as many as an H200 holds at once
  launch(index_merge_sm90_kernel,
         {.grid = jobs * cluster,
          .block = kMergeThreads,
          .stream = stream,
          .smem = kMergeSharedBytes + 16,
          .cluster = cluster},
         own);
}

void index_logits_sm90(const IndexLogitsParams& p, gpuStream_t stream) {
  const IndexRows& rows = p.problem.rows;
  const int group_rows = unit_rows(rows, kIndexGroupRows);
  const bool are_even = rows.query_start_loc == nullptr && (rows.k_start || rows.next_n % group_rows == 0);
  const int unit_stride = are_even ? group_rows : 1;
  const int64_t units = (rows.num_rows + unit_stride - 1) / unit_stride;
  const int64_t tiles = (p.width + kTileKeys - 1) / kTileKeys;
  const int64_t piece_tiles =  // a few pieces to a multiprocessor
      std::clamp<int64_t>(units * tiles / (4 * num_processors()), 1, kMostPieceTiles);
  const int64_t pieces = (tiles + piece_tiles - 1) / piece_tiles;
  with_lines(p.problem.queries.num_heads, [&](auto row_lines) {
    const int lines = query_lines(group_rows, row_lines);
    const bool is_fp4 = has_fp4_keys(p.problem);
    const int panels = is_fp4 ? kGroups : 0;
    const int num_stages = stages(lines, panels, is_fp4, static_cast<int>(sizeof(Barriers)) + 1024);
    launch(index_logits_sm90_kernel<row_lines>,
           {.grid = units * pieces,
            .block = kThreads,
            .stream = stream,
            .smem = 1024 + Memory::bytes(num_stages, lines, panels, is_fp4)},
           Sm90LogitsArgs{key_boxes(p.problem),
                          {p, Divider(p.problem.keys.page_size), Divider(pieces), group_rows},
                          num_stages,
                          lines,
                          panels,
                          unit_stride,
                          static_cast<int>(piece_tiles) * kTileKeys});
  });
}

}  // namespace mla_fp8::gpu

#endif
