#pragma once
// The merge of index_topk answers rows that several CTAs scanned, from what those left in the workspace.
#include "cuda/indexer/scan.cuh"

namespace mla_fp8::gpu {

// A row of a unit that the CTAs [first_cta, last_cta] scanned. Their lists are parts, in order of columns.
struct MergeJob {
  int first_cta, last_cta, row;
  int64_t out_row;
  IndexRow where;

  __device__ __forceinline__ int num_parts() const { return last_cta - first_cta + 1; }
  // The list of the CTA that began the unit (i = 0), or of a CTA that went on with it.
  __device__ __forceinline__ CandidateList part(const IndexTopkArgs& args, int i) const {
    const int cta = first_cta + i;
    return {i > 0 ? args.earlier(cta, row) : args.list(cta, row), args.state(cta)->counts[i > 0][row]};
  }
  // The first column of part i; for i = num_parts(), the one behind the last.
  __device__ __forceinline__ int64_t part_begin(const IndexTopkArgs& args, int i) const {
    const IndexCtaState& state = *args.state(first_cta + 1);
    if (i == num_parts()) return where.end;
    if (i == 0) return where.begin;
    return state.begin + ((first_cta + i) * state.per_cta - state.first_step) * args.tile_keys;
  }
};

// Parts [first, last) of a job as candidates, where they lie in the workspace.
struct ScatteredParts {
  const IndexTopkArgs& args;
  const MergeJob& job;
  int first, last;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    for (int i = first; i < last; ++i) job.part(args, i).visit(team, visit_four);
  }
};

// The number of jobs. If rows are no more than lists, job i is row i.
MLA_HD int64_t num_merge_jobs(const IndexTopkArgs& args) {
  const int64_t rows = args.p.problem.rows.num_rows, most = int64_t{args.num_ctas} * args.list_rows;
  return rows < most ? rows : most;
}

// Whether there is a job number i; then `job` is that. All threads of the block call it.
template <int kThreads>
__device__ __forceinline__ bool find_merge(const IndexTopkArgs& args, int i, MergeJob& job) {
  MLA_SHARED(int, found);
  int cta = i / args.list_rows;
  if (args.p.problem.rows.num_rows <= num_merge_jobs(args)) {
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (int c = 1 + static_cast<int>(threadIdx.x); c < args.num_ctas; c += kThreads) {
      const IndexCtaState& state = *args.state(c);
      const int64_t first_row = state.unit,
                    last_row = first_row + state.num_rows;  // bitwise &: both loads are in flight together
      const bool is_second = state.first_step >= (c - 1) * state.per_cta;
      if ((first_row >= 0) & (first_row <= i) & (i < last_row) & is_second) found = c;
    }
    __syncthreads();
    cta = found;
  }
  if (cta == 0) return false;
  const IndexCtaState& state = *args.state(cta);  // of the second CTA of the unit
  if (state.unit < 0 || state.first_step < (cta - 1) * state.per_cta) return false;
  const bool is_row = args.p.problem.rows.num_rows <= num_merge_jobs(args);
  job.row = is_row ? static_cast<int>(i - state.unit) : i % args.list_rows;
  if (job.row >= state.num_rows) return false;
  job.first_cta = cta - 1;
  job.last_cta = static_cast<int>((state.first_step + state.num_tiles - 1) / state.per_cta);
  job.out_row = state.unit + job.row;
  job.where = state.rows[job.row];
  return true;
}

}  // namespace mla_fp8::gpu
