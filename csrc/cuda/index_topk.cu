// index_topk on CUDA. The scan (indexer/scan.cuh): each CTA takes an equal share of all tiles of keys, finds
// their logits and keeps, for each row of the unit that it is in, a list of candidates; a list that is nearly
// full shrinks to its best topk, and from then on only larger keys get in. A unit that one CTA sees whole is
// answered by it. What is left of the others goes into the workspace, and the merge answers those.

#include "ops/index_topk.h"

#include "cuda/indexer/merge.cuh"
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

// The parts of a job one after the other.
struct ScatteredCandidates {
  const IndexTopkArgs& args;
  const MergeJob& job;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    for (int i = 0; i < job.num_parts(); ++i) job.part(args, i).visit(team, visit_four);
  }
};

}  // namespace

__global__ void __launch_bounds__(kIndexThreads)
    index_merge_kernel(const __grid_constant__ IndexTopkArgs args) {
  using Team = BlockTeam<kIndexThreads>;
  MLA_SHARED(Team::Smem, select);
  wait_for_previous_grid();
  MergeJob job;
  if (!find_merge<kIndexThreads>(args, static_cast<int>(blockIdx.x), job)) return;
  int32_t total = 0;
  for (int i = 0; i < job.num_parts(); ++i) total += job.part(args, i).count;
  select_and_emit(Team{select}, IndexAnswer{args.p, job.out_row, job.where}, ScatteredCandidates{args, job},
                  total, [&](const IndexRow& where, int32_t column) { return args.slot(where, column); });
}

int index_topk_ctas() { return num_processors(); }

void index_topk(const IndexTopkParams& p, gpuStream_t stream) {
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
                     .tile_keys = kIndexTileKeys};
  if (takes_sm90(p.problem)) return index_topk_sm90(args, stream);
  launch(index_scan_kernel, {.grid = args.num_ctas, .block = kIndexThreads, .stream = stream}, args);
  launch(index_merge_kernel, {.grid = num_merge_jobs(args), .block = kIndexThreads, .stream = stream}, args);
}

}  // namespace mla_fp8::gpu
