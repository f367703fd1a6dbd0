#include "ops/index_topk.h"

#include <algorithm>

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

struct Outputs {
  Tensor positions;
  OptionalTensor slots;
  Tensor lens;
  OptionalTensor scores, blocks;
};
// The options of a call that chooses, with what it may choose among; or of a call that publishes blocks.
struct Options {
  int64_t topk, pin_first = 0, pin_last = 0;
  const OptionalTensor& candidates;
  int64_t block_size, num_blocks = 0;
};
const OptionalTensor kNoTensor;

void check_options(const Check& check, const Tensor& q, const Options& o, bool is_paged,
                   IndexTopkParams& params) {
  check.within(o.topk, "topk", 1, kMaxIndexTopk);
  check.at_least(o.pin_first, "pin_first", 0);
  check.at_least(o.pin_last, "pin_last", 0);
  check.that(o.block_size == IndexList::kBlock, "block_size must be ", IndexList::kBlock, ", got ",
             o.block_size);
  params.topk = static_cast<int>(o.topk);
  // If there are more pins than topk, the first ones stay, then the last of the last ones.
  params.pin_first = std::min(o.pin_first, o.topk);
  params.pin_last = std::min(o.pin_last, o.topk - params.pin_first);
  params.num_blocks = static_cast<int>(o.num_blocks);
  if (!o.candidates) return;
  const Arg lists = check(*o.candidates, "candidate_blocks");
  lists.same_device_as(q, "q").dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  const int64_t rows = q.size(0), requests = is_paged ? params.problem.rows.num_requests : rows;
  const int64_t num_lists = lists.size(0), num_candidates = lists.size(1);
  if (num_lists != rows && num_lists != requests)
    lists.fail("must have a list for each of ", rows, " rows",
               requests == rows ? "" : " or " + std::to_string(requests) + " requests", ", got ", num_lists);
  check.that(num_candidates <= kMaxIndexCandidates, "candidate_blocks must have at most ",
             kMaxIndexCandidates, " columns, got ", num_candidates);
  params.has_candidates = true;
  params.candidates = data<int32_t>(*o.candidates);
  params.candidates_stride = lists.stride(0);
  params.num_candidates = num_candidates;
  params.candidates_are_of_rows = num_lists == rows;
}

IndexTopkParams check_paged(const Check& check, const PagedIndexArguments& a, const Options& options,
                            const OptionalTensor& slot_page_table, std::optional<int64_t> slot_page_size) {
  IndexTopkParams params{.problem = check_index_problem(check, a)};
  check_options(check, a.q, options, true, params);
  const IndexKeys& keys = params.problem.keys;
  const int64_t requests = params.problem.rows.num_requests;
  params.slot_page_table = keys.page_table;
  params.slot_page_table_stride_request = keys.page_table_stride_request;
  params.slot_max_pages = params.problem.rows.num_columns / keys.page_size;
  params.slot_page_size = keys.page_size;
  check.that(slot_page_table.has_value() == slot_page_size.has_value(),
             "slot_page_table and slot_page_size must be given together, got ",
             slot_page_table ? "a table, no page size" : "no table, a page size");
  if (slot_page_table) {
    const Arg table = check(*slot_page_table, "slot_page_table");
    table.same_device_as(a.q, "q").dtype({ScalarType::Int}).shape({requests, -1}).last_dim_contiguous();
    check.within(*slot_page_size, "slot_page_size", 1, kMaxPageSize);
    params.slot_page_table = data<int32_t>(*slot_page_table);
    params.slot_page_table_stride_request = table.stride(0);
    params.slot_max_pages = table.size(1);
    params.slot_page_size = *slot_page_size;
  }
  return params;
}

IndexTopkParams check_ragged(const Check& check, const RaggedIndexArguments& a, const Options& options,
                             const OptionalTensor& k_slots) {
  IndexTopkParams params{.problem = check_index_problem(check, a)};
  check_options(check, a.q, options, false, params);
  if (k_slots) {
    const Arg slots = check(*k_slots, "k_slots");
    slots.same_device_as(a.q, "q")
        .dtype({ScalarType::Int, ScalarType::Long})
        .shape({a.k.size(0)})
        .contiguous();
    params.k_slots = k_slots->const_data_ptr();
    params.k_slots_are_int64 = slots.is(ScalarType::Long);
  }
  return params;
}

void check_outputs(const Check& check, const Tensor& q, const IndexTopkParams& params,
                   const Outputs& outputs) {
  const auto rows = [&](const Tensor& t, const char* name, ScalarType dtype, int64_t width) {
    check(t, name)
        .same_device_as(q, "q")
        .dtype({dtype})
        .shape({q.size(0), width})
        .last_dim_contiguous()
        .rows_disjoint();
  };
  rows(outputs.positions, "out_positions", ScalarType::Int, params.topk);
  if (outputs.slots) {
    rows(*outputs.slots, "out_slots", ScalarType::Int, params.topk);
    check.that(q.size(0) == 0 || data<int32_t>(*outputs.slots) != data<int32_t>(outputs.positions),
               "out_slots must lie apart from out_positions, got its address");
  }
  check_ints(check, outputs.lens, "out_lens", q.size(0), q, "q");
  if (outputs.scores) rows(*outputs.scores, "out_scores", ScalarType::Float, params.topk);
  if (outputs.blocks) rows(*outputs.blocks, "out_blocks", ScalarType::Int, params.num_blocks);
}

Outputs new_outputs(const Tensor& q, const IndexTopkParams& params) {
  const auto ints = [&](auto... sizes) { return new_empty(q, {q.size(0), sizes...}, ScalarType::Int); };
  const int64_t topk = params.topk;
  Outputs outputs{ints(topk), ints(topk), ints(), std::nullopt, std::nullopt};
  if (params.num_blocks > 0) outputs.blocks = ints(int64_t{params.num_blocks});
  return outputs;
}

// Bytes of workspace that the kernels of q's device want for these rows, if all its processors work.
int64_t workspace_bytes([[maybe_unused]] const Tensor& q, [[maybe_unused]] const IndexTopkParams& params) {
#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
  const OnDeviceOf device(q);
  return gpu::index_topk_workspace(params, gpu::index_topk_ctas());
#else
  return 0;
#endif
}

int64_t counter_words([[maybe_unused]] const Tensor& q) {
#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
  const OnDeviceOf device(q);
  return index_topk_counters(gpu::index_topk_ctas());
#else
  return 0;
#endif
}

// The memory that kernels work with besides arguments and outputs.
struct Scratch {
  OptionalTensor workspace, counters;
};

void run(IndexTopkParams params, const Outputs& outputs, const Scratch& scratch) {
  if (params.problem.rows.num_rows == 0) return;
  params.positions = mutable_data<int32_t>(outputs.positions);
  params.positions_stride_row = outputs.positions.stride(0);
  if (outputs.slots) {
    params.slots = mutable_data<int32_t>(*outputs.slots);
    params.slots_stride_row = outputs.slots->stride(0);
  }
  params.lens = mutable_data<int32_t>(outputs.lens);
  if (outputs.scores) {
    params.scores = mutable_data<float>(*outputs.scores);
    params.scores_stride_row = outputs.scores->stride(0);
  }
  if (outputs.blocks) {
    params.blocks = mutable_data<int32_t>(*outputs.blocks);
    params.blocks_stride_row = outputs.blocks->stride(0);
  }
  if (scratch.workspace) {
    params.workspace = mutable_data<uint8_t>(*scratch.workspace);
    params.workspace_bytes = scratch.workspace->numel();
  }
  if (scratch.counters) params.counters = mutable_data<uint8_t>(*scratch.counters);
  MLA_LAUNCH(index_topk, outputs.positions, params);
}

void run_with_new_workspace(const Tensor& q, const IndexTopkParams& params, const Outputs& outputs) {
  Scratch scratch;
  if (const int64_t bytes = workspace_bytes(q, params); bytes > 0)
    scratch.workspace = new_empty(q, {bytes}, ScalarType::Byte);
  run(params, outputs, scratch);
}

void run_with_scratch(const Check& check, const Tensor& q, const IndexTopkParams& params,
                      const Outputs& outputs, const Scratch& scratch) {
  const auto& [workspace, counters] = scratch;
  check_outputs(check, q, params, outputs);
  if (workspace)
    check(*workspace, "workspace").same_device_as(q, "q").dtype({ScalarType::Byte}).contiguous().aligned(16);
  const int64_t needed = workspace_bytes(q, params), got = workspace ? workspace->numel() : 0;
  check.that(got >= needed, "workspace must have at least ", needed, " bytes, got ", got);
  if (counters) {
    check(*counters, "counters").same_device_as(q, "q").dtype({ScalarType::Int}).contiguous().aligned(16);
    const int64_t words = counter_words(q);
    check.that(counters->numel() >= words, "counters must have at least ", words, " entries, got ",
               counters->numel());
  }
  run(params, outputs, scratch);
}

}  // namespace

#define MLA_PAGED_INDEX                                                \
  {q,         weights, index_cache, page_table,      seq_lens, layout, \
   page_size, q_scale, row_lens,    query_start_loc, next_n,   compress_ratio}
#define MLA_RAGGED_INDEX {q, weights, k, k_scale, k_start, k_end, q_scale}

int64_t index_topk_workspace(int64_t num_rows, int64_t topk, int64_t num_sms, int64_t num_candidates,
                             int64_t num_positions) {
  const Check check("index_topk_workspace");
  check.at_least(num_rows, "num_rows", 0);
  check.within(topk, "topk", 1, kMaxIndexTopk);
  check.within(num_sms, "num_sms", 1, kMaxProcessors);
  check.within(num_candidates, "num_candidates", 0, kMaxIndexCandidates);
  check.within(num_positions, "num_positions", 0, kMaxIndexEntries);
  IndexTopkParams params{.topk = static_cast<int>(topk)};
  params.problem.rows.num_rows = num_rows;
  params.problem.rows.num_columns = num_positions;
  params.num_candidates = num_candidates;
  params.num_blocks = num_positions > 0 ? 1 : 0;
  return gpu::index_topk_workspace(params, static_cast<int>(num_sms));
}

int64_t index_topk_counters(int64_t num_sms) {
  Check("index_topk_counters").within(num_sms, "num_sms", 1, kMaxProcessors);
  return gpu::index_topk_counters(static_cast<int>(num_sms)) / static_cast<int64_t>(sizeof(int32_t));
}

#define MLA_TOPK_OPTIONS {topk, pin_first, pin_last, candidate_blocks, block_size}
#define MLA_PUBLISH_OPTIONS \
  {.topk = topk, .candidates = kNoTensor, .block_size = block_size, .num_blocks = num_blocks}

ThreeTensors index_topk(MLA_PAGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS) {
  const IndexTopkParams params =
      check_paged(Check("index_topk"), MLA_PAGED_INDEX, MLA_TOPK_OPTIONS, slot_page_table, slot_page_size);
  const Outputs outputs = new_outputs(q, params);
  run_with_new_workspace(q, params, outputs);
  return {outputs.positions, *outputs.slots, outputs.lens};
}

void index_topk_out(MLA_PAGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS,
                    MLA_TOPK_OUTPUTS, MLA_TOPK_SCRATCH) {
  const Check check("index_topk");
  const IndexTopkParams params =
      check_paged(check, MLA_PAGED_INDEX, MLA_TOPK_OPTIONS, slot_page_table, slot_page_size);
  run_with_scratch(check, q, params, {out_positions, out_slots, out_lens, out_scores, std::nullopt},
                   {workspace, counters});
}

ThreeTensors index_topk_ragged(MLA_RAGGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS,
                               const OptionalTensor& k_slots) {
  const IndexTopkParams params =
      check_ragged(Check("index_topk_ragged"), MLA_RAGGED_INDEX, MLA_TOPK_OPTIONS, k_slots);
  const Outputs outputs = new_outputs(q, params);
  run_with_new_workspace(q, params, outputs);
  return {outputs.positions, *outputs.slots, outputs.lens};
}

void index_topk_ragged_out(MLA_RAGGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, const OptionalTensor& k_slots,
                           MLA_TOPK_OUTPUTS, MLA_TOPK_SCRATCH) {
  const Check check("index_topk_ragged");
  const IndexTopkParams params = check_ragged(check, MLA_RAGGED_INDEX, MLA_TOPK_OPTIONS, k_slots);
  run_with_scratch(check, q, params, {out_positions, out_slots, out_lens, out_scores, std::nullopt},
                   {workspace, counters});
}

FourTensors index_topk_blocks(MLA_PAGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS) {
  const Check check("index_topk_blocks");
  check.within(num_blocks, "num_blocks", 1, kMaxIndexBlocks);
  const IndexTopkParams params =
      check_paged(check, MLA_PAGED_INDEX, MLA_PUBLISH_OPTIONS, slot_page_table, slot_page_size);
  const Outputs outputs = new_outputs(q, params);
  run_with_new_workspace(q, params, outputs);
  return {outputs.positions, *outputs.slots, outputs.lens, *outputs.blocks};
}

void index_topk_blocks_out(MLA_PAGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS,
                           MLA_TOPK_OUTPUTS, Tensor out_blocks, MLA_TOPK_SCRATCH) {
  const Check check("index_topk_blocks");
  check.within(num_blocks, "num_blocks", 1, kMaxIndexBlocks);
  const IndexTopkParams params =
      check_paged(check, MLA_PAGED_INDEX, MLA_PUBLISH_OPTIONS, slot_page_table, slot_page_size);
  run_with_scratch(check, q, params, {out_positions, out_slots, out_lens, out_scores, out_blocks},
                   {workspace, counters});
}

FourTensors index_topk_ragged_blocks(MLA_RAGGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS,
                                     const OptionalTensor& k_slots) {
  const Check check("index_topk_ragged_blocks");
  check.within(num_blocks, "num_blocks", 1, kMaxIndexBlocks);
  const IndexTopkParams params = check_ragged(check, MLA_RAGGED_INDEX, MLA_PUBLISH_OPTIONS, k_slots);
  const Outputs outputs = new_outputs(q, params);
  run_with_new_workspace(q, params, outputs);
  return {outputs.positions, *outputs.slots, outputs.lens, *outputs.blocks};
}

void index_topk_ragged_blocks_out(MLA_RAGGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS,
                                  const OptionalTensor& k_slots, MLA_TOPK_OUTPUTS, Tensor out_blocks,
                                  MLA_TOPK_SCRATCH) {
  const Check check("index_topk_ragged_blocks");
  check.within(num_blocks, "num_blocks", 1, kMaxIndexBlocks);
  const IndexTopkParams params = check_ragged(check, MLA_RAGGED_INDEX, MLA_PUBLISH_OPTIONS, k_slots);
  run_with_scratch(check, q, params, {out_positions, out_slots, out_lens, out_scores, out_blocks},
                   {workspace, counters});
}

}  // namespace mla_fp8
