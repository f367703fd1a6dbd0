#include "ops/topk_to_slots.h"

#include <limits>

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

TopkToSlotsParams checked_inputs(const Check& check, MLA_TOPK_TO_SLOTS_ARGUMENTS) {
  const Arg p = check(positions, "positions"), table = check(page_table, "page_table");
  p.dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  table.same_device_as(positions, "positions").dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  check.within(page_size, "page_size", 1, kMaxPageSize);
  check.at_least(next_n, "next_n", 1);
  constexpr int64_t kMaxGroup = 64;
  check.within(group_size, "group_size", 1, kMaxGroup);
  // Limits of a Divider, with 31 bits for a local slot.
  constexpr int64_t kMaxWorldSize = 256, kMaxInterleave = 1 << 16;
  check.within(world_size, "world_size", 1, kMaxWorldSize);
  check.within(rank, "rank", 0, world_size - 1);
  check.within(interleave, "interleave", 1, kMaxInterleave);
  const int64_t rows = positions.size(0), topk = positions.size(1);
  check.that(topk <= std::numeric_limits<int32_t>::max() / kMaxGroup - 1, "positions must have at most ",
             std::numeric_limits<int32_t>::max() / kMaxGroup - 1, " columns, got ", topk);
  const auto ints = [&](const OptionalTensor& t, const char* name) {
    return t ? check_ints(check, *t, name, rows, positions, "positions") : nullptr;
  };
  return {
      .num_rows = rows,
      .topk = topk,
      .width = topk * group_size + (token_lens ? group_size - 1 : 0),
      .num_requests = page_table.size(0),
      .max_pages = page_table.size(1),
      .page_size = page_size,
      .next_n = next_n,
      .group_size = group_size,
      .positions = data<int32_t>(positions),
      .positions_stride_row = p.stride(0),
      .page_table = data<int32_t>(page_table),
      .page_table_stride_request = table.stride(0),
      .row_to_request = ints(row_to_request, "row_to_request"),
      .token_lens = ints(token_lens, "token_lens"),
      .lens = ints(lens, "lens"),
      .world_size = world_size,
      .rank = rank,
      .interleave = interleave,
      .by_slot = by_slot,
  };
}

void run(TopkToSlotsParams params, Tensor slots, Tensor lens) {
  if (params.num_rows == 0) return;
  params.out_slots = mutable_data<int32_t>(slots);
  params.out_slots_stride_row = slots.stride(0);
  params.out_lens = mutable_data<int32_t>(lens);
  MLA_LAUNCH(topk_to_slots, slots, params);
}

}  // namespace

#define MLA_TOPK_TO_SLOTS_NAMES                                                                             \
  positions, page_table, page_size, row_to_request, next_n, group_size, token_lens, lens, world_size, rank, \
      interleave, by_slot

TwoTensors topk_to_slots(MLA_TOPK_TO_SLOTS_ARGUMENTS) {
  const TopkToSlotsParams params = checked_inputs(Check("topk_to_slots"), MLA_TOPK_TO_SLOTS_NAMES);
  Tensor out_slots = new_empty(positions, {params.num_rows, params.width}, ScalarType::Int);
  Tensor out_lens = new_empty(positions, {params.num_rows}, ScalarType::Int);
  run(params, out_slots, out_lens);
  return {out_slots, out_lens};
}

void topk_to_slots_out(MLA_TOPK_TO_SLOTS_ARGUMENTS, Tensor out_slots, Tensor out_lens) {
  const Check check("topk_to_slots");
  const TopkToSlotsParams params = checked_inputs(check, MLA_TOPK_TO_SLOTS_NAMES);
  check(out_slots, "out_slots")
      .same_device_as(positions, "positions")
      .dtype({ScalarType::Int})
      .shape({params.num_rows, params.width})
      .last_dim_contiguous()
      .rows_disjoint();
  check_ints(check, out_lens, "out_lens", params.num_rows, positions, "positions");
  run(params, out_slots, out_lens);
}

}  // namespace mla_fp8
