#include "ops/merge_topk.h"

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

MergeTopkParams checked_inputs(const Check& check, const Tensor& scores, const Tensor& positions,
                               int64_t topk, std::optional<int64_t> rank, std::optional<int64_t> interleave) {
  const Arg s = check(scores, "scores"), p = check(positions, "positions");
  s.dtype({ScalarType::Float}).shape({-1, -1, -1}).last_dim_contiguous();
  const int64_t lists = s.size(0), rows = s.size(1), per_list = s.size(2);
  p.same_device_as(scores, "scores").dtype({ScalarType::Int});
  if (rank) p.shape({rows, per_list});
  else p.shape({lists, rows, per_list});
  p.last_dim_contiguous();
  constexpr int64_t kMaxLists = 256;
  check.that(lists >= 1 && lists <= kMaxLists, "scores must be of 1 to ", kMaxLists, " ranks, got ", lists);
  check.that(per_list <= kMaxIndexTopk, "scores must have at most ", kMaxIndexTopk, " columns, got ",
             per_list);
  check.within(topk, "topk", 1, kMaxIndexTopk);
  if (rank) check.within(*rank, "rank", 0, lists - 1);
  return {
      .num_lists = lists,
      .num_rows = rows,
      .per_list = per_list,
      .topk = static_cast<int>(topk),
      .scores = data<float>(scores),
      .scores_stride_list = s.stride(0),
      .scores_stride_row = s.stride(1),
      .positions = data<int32_t>(positions),
      .positions_stride_list = rank ? 0 : p.stride(0),
      .positions_stride_row = p.stride(rank ? 0 : 1),
      .own = rank.value_or(-1),
      .interleave_bits = check_interleave(check, interleave),
  };
}

void run(MergeTopkParams params, Tensor out_positions, Tensor out_lens) {
  if (params.num_rows == 0) return;
  params.out_positions = mutable_data<int32_t>(out_positions);
  params.out_positions_stride_row = out_positions.stride(0);
  params.out_lens = mutable_data<int32_t>(out_lens);
  MLA_LAUNCH(merge_topk, out_lens, params);
}

}  // namespace

TwoTensors merge_topk(const Tensor& scores, const Tensor& positions, int64_t topk,
                      std::optional<int64_t> rank, std::optional<int64_t> interleave) {
  const MergeTopkParams params =
      checked_inputs(Check("merge_topk"), scores, positions, topk, rank, interleave);
  Tensor out_positions = new_empty(scores, {params.num_rows, topk}, ScalarType::Int);
  Tensor out_lens = new_empty(scores, {params.num_rows}, ScalarType::Int);
  run(params, out_positions, out_lens);
  return {out_positions, out_lens};
}

void merge_topk_out(const Tensor& scores, const Tensor& positions, int64_t topk, std::optional<int64_t> rank,
                    std::optional<int64_t> interleave, Tensor out_positions, Tensor out_lens) {
  const Check check("merge_topk");
  const MergeTopkParams params = checked_inputs(check, scores, positions, topk, rank, interleave);
  check(out_positions, "out_positions")
      .same_device_as(scores, "scores")
      .dtype({ScalarType::Int})
      .shape({params.num_rows, topk})
      .last_dim_contiguous()
      .rows_disjoint();
  check_ints(check, out_lens, "out_lens", params.num_rows, scores, "scores");
  run(params, out_positions, out_lens);
}

}  // namespace mla_fp8
