#include "ops/index_logits.h"

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

int64_t check_width(const Check& check, int64_t width) {
  check.within(width, "width", 0, kMaxIndexEntries);
  return width;
}

void run(const IndexProblem& problem, int64_t width, Tensor logits) {
  if (problem.rows.num_rows == 0 || width == 0) return;
  const IndexLogitsParams params{problem, width, mutable_data<float>(logits), logits.stride(0)};
  MLA_LAUNCH(index_logits, logits, params);
}

void check_logits(const Check& check, const Tensor& logits, const Tensor& q, int64_t width) {
  check(logits, "out")
      .same_device_as(q, "q")
      .dtype({ScalarType::Float})
      .shape({q.size(0), width})
      .last_dim_contiguous()
      .rows_disjoint();
}

}  // namespace

#define MLA_PAGED_INDEX                                                \
  {q,         weights, index_cache, page_table,      seq_lens, layout, \
   page_size, q_scale, row_lens,    query_start_loc, next_n,   compress_ratio}
#define MLA_RAGGED_INDEX {q, weights, k, k_scale, k_start, k_end, q_scale}

Tensor index_logits(MLA_PAGED_INDEX_ARGUMENTS, int64_t width) {
  const Check check("index_logits");
  const IndexProblem problem = check_index_problem(check, PagedIndexArguments MLA_PAGED_INDEX);
  Tensor logits = new_empty(q, {q.size(0), check_width(check, width)}, ScalarType::Float);
  run(problem, width, logits);
  return logits;
}

void index_logits_out(MLA_PAGED_INDEX_ARGUMENTS, int64_t width, Tensor out) {
  const Check check("index_logits");
  const IndexProblem problem = check_index_problem(check, PagedIndexArguments MLA_PAGED_INDEX);
  check_logits(check, out, q, check_width(check, width));
  run(problem, width, out);
}

Tensor index_logits_ragged(MLA_RAGGED_INDEX_ARGUMENTS) {
  const Check check("index_logits_ragged");
  const IndexProblem problem = check_index_problem(check, RaggedIndexArguments MLA_RAGGED_INDEX);
  Tensor logits = new_empty(q, {q.size(0), k.size(0)}, ScalarType::Float);
  run(problem, k.size(0), logits);
  return logits;
}

void index_logits_ragged_out(MLA_RAGGED_INDEX_ARGUMENTS, Tensor out) {
  const Check check("index_logits_ragged");
  const IndexProblem problem = check_index_problem(check, RaggedIndexArguments MLA_RAGGED_INDEX);
  check_logits(check, out, q, k.size(0));
  run(problem, k.size(0), out);
}

}  // namespace mla_fp8
