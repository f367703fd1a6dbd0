// index_topk on CUDA. The scan (indexer/scan.cuh): each CTA takes an equal share of all tiles of keys, finds
// their logits and keeps, for each row of the unit that it is in, a list of candidates; a list that is nearly
// full shrinks to its best topk, and from then on only larger keys get in. A unit that one CTA sees whole is
// answered by it. What is left of the others goes into the workspace, and the merge answers those.

#include "ops/index_topk.h"

#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90.h"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

__global__ void __launch_bounds__(kIndexThreads)
    index_scan_kernel(const __grid_constant__ IndexTopkArgs args) {
  MLA_SHARED(ScanSmem<PortableIndexEngine>, smem);
  wait_for_previous_grid();
  scan(args, smem);
}

namespace {

// A row's lists in the CTAs [first_cta, last_cta]: the first one's own, and what the others had to begin
// with.
struct ScatteredCandidates {
  const IndexTopkArgs& args;
  int first_cta, last_cta, row;

  __device__ __forceinline__ CandidateList part(int cta) const {
    const bool is_earlier = cta > first_cta;
    return {is_earlier ? args.earlier(cta, row) : args.list(cta, row),
            args.state(cta)->counts[is_earlier][row]};
  }
  template <int kThreads, class Visit>
  __device__ __forceinline__ void visit(const Visit& visit_one) const {
    for (int cta = first_cta; cta <= last_cta; ++cta) part(cta).template visit<kThreads>(visit_one);
  }
};

}  // namespace

// Block cta * list_rows + row: that row of the unit that CTA cta - 1 began and CTA cta went on with.
__global__ void __launch_bounds__(kIndexThreads)
    index_merge_kernel(const __grid_constant__ IndexTopkArgs args) {
  const IndexTopkParams& p = args.p;
  MLA_SHARED(SelectSmem, select);
  wait_for_previous_grid();
  const int cta = static_cast<int>(blockIdx.x) / args.list_rows;
  const int row = static_cast<int>(blockIdx.x) % args.list_rows;
  const IndexCtaState& state = *args.state(cta);
  if (state.unit < 0 || state.first_tile < (cta - 1) * state.per_cta) return;
  IndexUnit unit;
  find_unit(p.problem.rows, state.unit, args.group_rows, unit);
  if (row >= unit.num_rows) return;
  const int last = static_cast<int>((state.first_tile + state.num_tiles - 1) / state.per_cta);
  const ScatteredCandidates candidates{args, cta - 1, last, row};
  int32_t total = 0;
  for (int c = cta - 1; c <= last; ++c) total += candidates.part(c).count;
  select_and_emit<kIndexThreads>(
      p, unit.first_row + row, unit.rows[row], candidates, total,
      [&](const IndexRow& where, int32_t column) { return args.slot(where, column); }, select);
}

int index_topk_ctas() { return num_processors(); }

void index_topk(const IndexTopkParams& p, gpuStream_t stream) {
  const int64_t rows = p.problem.rows.num_rows;
  const int heads = p.problem.queries.num_heads;
  const int64_t room = p.workspace_bytes / index_topk_workspace(rows, p.topk, 1);
  IndexTopkArgs args{.p = p,
                     .page_size = Divider(p.problem.keys.page_size),
                     .slot_page_size = Divider(p.slot_page_size > 0 ? p.slot_page_size : 1),
                     .group_rows = index_group_rows(heads),
                     .list_rows = static_cast<int>(rows < kIndexGroupRows ? rows : kIndexGroupRows),
                     .num_ctas = static_cast<int>(room < index_topk_ctas() ? room : index_topk_ctas())};
  if (takes_sm90(p.problem)) {
    args.group_rows = kIndexGroupRows;
    index_scan_sm90(args, stream);
  } else {
    launch(index_scan_kernel, {.grid = args.num_ctas, .block = kIndexThreads, .stream = stream}, args);
  }
  launch(index_merge_kernel,
         {.grid = int64_t{args.num_ctas} * args.list_rows, .block = kIndexThreads, .stream = stream}, args);
}

}  // namespace mla_fp8::gpu
