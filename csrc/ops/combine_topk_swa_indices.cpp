#include "ops/combine_topk_swa_indices.h"

#include <limits>

#include "registration.h"

namespace mla_fp8 {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kWidthAlignment = 128;

// Checks everything but the outputs.
CombineTopkSwaIndicesParams checked_inputs(const Check& check, MLA_COMBINE_ARGUMENTS) {
  check.at_least(window_size, "window_size", 0);
  check.at_least(compress_ratio, "compress_ratio", 1);
  check.at_least(topk, "topk", 0);
  check(topk_indices, "topk_indices").dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  check.that(topk <= topk_indices.size(1), "topk_indices must have at least topk = ", topk, " columns, got ",
             topk_indices.size(1));
  check.that(window_size <= kMaxInt32 - kWidthAlignment - topk, "topk + window_size must be at most ",
             kMaxInt32 - kWidthAlignment, ", got ", topk, " + ", window_size);

  const auto ints = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name)
        .same_device_as(topk_indices, "topk_indices")
        .dtype({ScalarType::Int})
        .shape({size})
        .contiguous();
    return data<int32_t>(t);
  };
  ints(seq_lens, "seq_lens", -1);
  const int64_t num_tokens = topk_indices.size(0), num_requests = seq_lens.size(0);
  return {
      .num_tokens = num_tokens,
      .num_requests = num_requests,
      .topk = topk,
      .window_size = window_size,
      .compress_ratio = compress_ratio,
      .width = align_up(topk + window_size, kWidthAlignment),
      .topk_indices = data<int32_t>(topk_indices),
      .topk_indices_stride_token = topk_indices.stride(0),
      .query_start_loc = ints(query_start_loc, "query_start_loc", num_requests + 1),
      .seq_lens = data<int32_t>(seq_lens),
      .gather_lens = ints(gather_lens, "gather_lens", num_requests),
      .compressed_base = ints(compressed_base, "compressed_base", num_requests),
      .swa_base = ints(swa_base, "swa_base", num_requests),
      .compressed_lens = compressed_lens ? ints(*compressed_lens, "compressed_lens", num_requests) : nullptr,
      .query_pos = query_pos ? ints(*query_pos, "query_pos", num_tokens) : nullptr,
  };
}

void launch(CombineTopkSwaIndicesParams params, Tensor indices, Tensor lens) {
  if (params.num_tokens == 0) return;
  params.out_indices = mutable_data<int32_t>(indices);
  params.out_indices_stride_token = indices.stride(0);
  params.out_lens = mutable_data<int32_t>(lens);
  MLA_LAUNCH(combine_topk_swa_indices, indices, params);
}

int64_t ragged_capacity(const Check& check, const CombineTopkSwaIndicesParams& p) {
  const int64_t columns = p.topk + p.window_size;
  check.that(columns == 0 || p.num_tokens <= kMaxInt32 / columns, "topk_indices must have at most ",
             kMaxInt32 / (columns ? columns : 1),
             " rows, as indptr is int32 and a row may have topk + window_size = ", columns, " entries, got ",
             p.num_tokens);
  return p.num_tokens * columns;
}

void launch_ragged(CombineTopkSwaIndicesParams rows, Tensor indptr, Tensor indices) {
  rows.out_indices = mutable_data<int32_t>(indices);
  const CombineTopkSwaIndicesRaggedParams params{rows, indices.size(0), mutable_data<int32_t>(indptr)};
  MLA_LAUNCH(combine_topk_swa_indices_ragged, indptr, params);
}

}  // namespace

#define MLA_COMBINE_NAMES                                                                       \
  topk_indices, query_start_loc, seq_lens, gather_lens, compressed_base, swa_base, window_size, \
      compress_ratio, topk, query_pos, compressed_lens

TwoTensors combine_topk_swa_indices(MLA_COMBINE_ARGUMENTS) {
  const auto params = checked_inputs(Check("combine_topk_swa_indices"), MLA_COMBINE_NAMES);
  Tensor indices = new_empty(topk_indices, {params.num_tokens, params.width}, ScalarType::Int);
  Tensor lens = new_empty(topk_indices, {params.num_tokens}, ScalarType::Int);
  launch(params, indices, lens);
  return {indices, lens};
}

void combine_topk_swa_indices_out(MLA_COMBINE_ARGUMENTS, Tensor out_indices, Tensor out_lens) {
  const Check check("combine_topk_swa_indices");
  const auto params = checked_inputs(check, MLA_COMBINE_NAMES);
  check(out_indices, "out_indices")
      .same_device_as(topk_indices, "topk_indices")
      .dtype({ScalarType::Int})
      .shape({params.num_tokens, params.width})
      .last_dim_contiguous()
      .rows_disjoint();
  check(out_lens, "out_lens")
      .same_device_as(topk_indices, "topk_indices")
      .dtype({ScalarType::Int})
      .shape({params.num_tokens})
      .contiguous();
  launch(params, out_indices, out_lens);
}

TwoTensors combine_topk_swa_indices_ragged(MLA_COMBINE_ARGUMENTS) {
  const Check check("combine_topk_swa_indices_ragged");
  const auto params = checked_inputs(check, MLA_COMBINE_NAMES);
  const int64_t capacity = ragged_capacity(check, params);
  Tensor indptr = new_empty(topk_indices, {params.num_tokens + 1}, ScalarType::Int);
  Tensor indices = new_empty(topk_indices, {capacity}, ScalarType::Int);
  launch_ragged(params, indptr, indices);
  return {indptr, indices};
}

void combine_topk_swa_indices_ragged_out(MLA_COMBINE_ARGUMENTS, Tensor out_indptr, Tensor out_indices) {
  const Check check("combine_topk_swa_indices_ragged");
  const auto params = checked_inputs(check, MLA_COMBINE_NAMES);
  const auto ints = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name)
        .same_device_as(topk_indices, "topk_indices")
        .dtype({ScalarType::Int})
        .shape({size})
        .contiguous();
  };
  ints(out_indptr, "out_indptr", params.num_tokens + 1);
  ints(out_indices, "out_indices", ragged_capacity(check, params));
  launch_ragged(params, out_indptr, out_indices);
}

}  // namespace mla_fp8
