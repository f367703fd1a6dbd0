// index_topk on CUDA: launches for a call, or for slices of its rows, a scan and a merge. On Hopper these are
// index_sm90.cu's, elsewhere those of indexer/scan.cuh and indexer/merge.cuh, which this file compiles.

#include "ops/index_topk.h"

#include <algorithm>

#include "cuda/indexer/blocks.h"
#include "cuda/indexer/merge.cuh"
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90.h"

namespace mla_fp8::gpu {

__global__ void __launch_bounds__(kIndexThreads)
    index_scan_kernel(const __grid_constant__ IndexTopkArgs args) {
  MLA_SHARED(ScanSmem, smem);
  wait_for_previous_grid();
  scan(args, smem);
}

__global__ void __launch_bounds__(kIndexThreads)
    index_merge_kernel(const __grid_constant__ IndexTopkArgs args) {
  MLA_SHARED(IndexTeam::Smem, select);
  wait_for_previous_grid();
  MergeJob job;
  if (!find_merge<kIndexThreads>(args, static_cast<int>(blockIdx.x), job)) return;
  int32_t total = 0;
  for (int i = 0; i < job.num_parts(); ++i) total += job.part(args, i).count;
  select_and_emit(IndexTeam{select}, IndexAnswer{args.p, job.out_row, job.where},
                  ScatteredParts{args, job, 0, job.num_parts()}, total,
                  [&](const IndexRow& where, int32_t column) { return args.slot(where, column); });
}

int index_topk_ctas() { return num_processors(); }

namespace {

// Answers the rows of a call, whose columns may be those of lists.
void choose(const IndexTopkParams& p, const BlockKeys& block_keys, gpuStream_t stream) {
  const int64_t rows = p.problem.rows.num_rows;
  const int heads = p.problem.queries.num_heads;
  const int64_t room = p.workspace_bytes / index_topk_workspace(rows, p.topk, 1);
  const int num_ctas = static_cast<int>(room < index_topk_ctas() ? room : index_topk_ctas());
  IndexTopkArgs args{.p = p,
                     .page_size = Divider(p.problem.keys.page_size),
                     .slot_page_size = Divider(p.slot_page_size > 0 ? p.slot_page_size : 1),
                     .ctas = Divider(num_ctas),
                     .places = UnitPlaces(p.problem.rows, index_group_rows(heads)),
                     .group_rows = index_group_rows(heads),
                     .list_rows = static_cast<int>(rows < kIndexGroupRows ? rows : kIndexGroupRows),
                     .num_ctas = num_ctas,
                     .tile_keys = kIndexTileKeys,
                     .taken = block_keys.words ? 0 : p.topk,
                     .block_keys = block_keys.words,
                     .block_pitch = block_keys.pitch};
  if (takes_sm90(p.problem)) return index_topk_sm90(args, stream);
  launch(index_scan_kernel, {.grid = args.num_ctas, .block = kIndexThreads, .stream = stream}, args);
  launch(index_merge_kernel, {.grid = num_merge_jobs(args), .block = kIndexThreads, .stream = stream}, args);
}

// The call for rows [first, first + count), but for requests and lengths: the caller sets those.
IndexTopkParams slice(const IndexTopkParams& p, int64_t first, int64_t count) {
  IndexTopkParams own = p;
  IndexQueries& queries = own.problem.queries;
  queries.num_rows = own.problem.rows.num_rows = count;
  queries.q += first * queries.q_stride_row;
  if (queries.q_scale)
    queries.q_scale = static_cast<const uint8_t*>(queries.q_scale) + first * queries.q_scale_stride_row;
  queries.weights = static_cast<const uint8_t*>(queries.weights) +
                    first * queries.weights_stride_row * (queries.weights_are_bf16 ? 2 : 4);
  own.positions += first * p.positions_stride_row;
  if (p.slots) own.slots += first * p.slots_stride_row;
  own.lens += first;
  if (p.blocks) own.blocks += first * p.blocks_stride_row;
  return own;
}

// Memory of a slice, behind the scan's workspace: three numbers a row, then lists or keys of blocks.
struct SliceMemory {
  int32_t *origins, *ends, *columns, *others;

  SliceMemory(const IndexTopkParams& p, const IndexSlices& slices)
      : origins(reinterpret_cast<int32_t*>(p.workspace + slices.scan_bytes)),
        ends(origins + slices.padded_rows()),
        columns(ends + slices.padded_rows()),
        others(columns + slices.padded_rows()) {}
};

// How many neighbouring rows share a list, so that their keys are read once.
int list_rows(const IndexTopkParams& p) {
  const IndexRows& rows = p.problem.rows;
  const int most = p.problem.queries.num_heads > 32 ? kIndexGroupRows / 2 : kIndexGroupRows;
  if (rows.k_start || rows.query_start_loc) return most;
  for (int i = most; i > 1; --i)
    if (rows.next_n % i == 0) return i;
  return rows.next_n == 1 ? 1 : most;
}

void choose_among_candidates(const IndexTopkParams& p, gpuStream_t stream) {
  const IndexRows& rows = p.problem.rows;
  const IndexSlices slices(p, index_topk_ctas());
  const SliceMemory memory(p, slices);
  const int group = list_rows(p);
  const int64_t stride = group * p.num_candidates;
  // On Hopper the list of a short request is whole: its keys come as those of a plain call. If all requests
  // of the table are short, the scan begins before the lists are there.
  const bool may_be_whole = takes_sm90(p.problem) && !rows.k_start && !rows.query_start_loc &&
                            rows.next_n == group && rows.num_rows <= slices.rows;
  const int64_t most_whole =
      may_be_whole ? std::min(p.num_candidates * IndexList::kBlock, rows.num_columns) : 0;
  for (int64_t first = 0; first < rows.num_rows; first += slices.rows) {
    const int64_t count = std::min(slices.rows, rows.num_rows - first);
    make_lists(
        p,
        {first, count, group, memory.origins, memory.ends, memory.columns, memory.others, stride, most_whole},
        stream);
    IndexTopkParams own = slice(p, first, count);
    own.workspace_bytes = slices.scan_bytes;
    own.problem.rows = {.num_rows = count,
                        .num_requests = ceil_div<int64_t>(count, group),
                        .next_n = group,
                        .compress_ratio = 1,
                        .num_columns = stride * IndexList::kBlock,
                        .row_lens = memory.columns,
                        .origins = memory.origins,
                        .are_listed = true};
    if (most_whole > 0 && rows.num_columns <= most_whole) {  // all lists are whole
      own.problem.rows = rows;
      own.problem.rows.are_listed = true;
    }
    own.problem.keys.list = {memory.others,    stride,     IndexList::kBlockShift, group,
                             rows.num_columns, most_whole, memory.origins,         memory.ends};
    choose(own, {}, stream);
  }
}

void choose_and_publish(const IndexTopkParams& p, gpuStream_t stream) {
  const IndexRows& rows = p.problem.rows;
  const IndexSlices slices(p, index_topk_ctas());
  const SliceMemory memory(p, slices);
  const BlockKeys block_keys{reinterpret_cast<uint32_t*>(memory.others),
                             IndexSlices::block_pitch(rows.num_columns)};
  for (int64_t first = 0; first < rows.num_rows; first += slices.rows) {
    const int64_t count = std::min(slices.rows, rows.num_rows - first);
    IndexTopkParams own = slice(p, first, count);
    own.workspace_bytes = slices.scan_bytes;
    if (rows.k_start) {
      own.problem.rows.k_start += first;
      own.problem.rows.k_end += first;
    } else if (count < rows.num_rows) {  // the slice may split requests: each row goes alone
      make_lists(p, {first, count, 1, memory.origins, memory.ends, memory.columns}, stream);
      own.problem.rows = {.num_rows = count,
                          .num_requests = count,
                          .next_n = 1,
                          .compress_ratio = 1,
                          .num_columns = rows.num_columns,
                          .row_lens = memory.ends,
                          .origins = memory.origins};
    }
    // A block may come from two chunks, in parts, unless all chunks begin with a block.
    if (rows.k_start || !takes_sm90(p.problem)) clear_block_keys(block_keys, count, stream);
    choose(own, block_keys, stream);
    choose_blocks(own, block_keys, stream);
  }
}

}  // namespace

void index_topk(const IndexTopkParams& p, gpuStream_t stream) {
  if (p.num_candidates > 0) {
    choose_among_candidates(p, stream);
  } else if (p.blocks) {
    choose_and_publish(p, stream);
  } else {
    IndexTopkParams own = p;
    if (p.has_candidates) own.problem.rows.num_columns = 0;  // nothing to choose among
    choose(own, {}, stream);
  }
  if (p.scores) index_scores(p, stream);
}

}  // namespace mla_fp8::gpu
