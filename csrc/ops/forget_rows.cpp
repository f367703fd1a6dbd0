#include "ops/forget_rows.h"

#include "registration.h"

namespace mla_fp8 {

void forget_rows(const Tensor& entries, Tensor hot_entries, const OptionalTensor& row_to_request,
                 const OptionalTensor& state_rows) {
  const Check check("forget_rows");
  const Arg written = check(entries, "entries"), held = check(hot_entries, "hot_entries");
  written.dtype({ScalarType::Int, ScalarType::Long}).shape({-1}).contiguous();
  held.same_device_as(entries, "entries")
      .dtype({ScalarType::Int})
      .shape({-1, -1})
      .last_dim_contiguous()
      .rows_disjoint();
  check.that(row_to_request || !state_rows, "state_rows must be None without row_to_request, got a tensor");
  ForgetRowsParams params{
      .num_entries = entries.size(0),
      .num_states = held.size(0),
      .num_hot = held.size(1),
      .num_requests = held.size(0),
      .entries = entries.const_data_ptr(),
      .entries_are_int64 = written.is(ScalarType::Long),
      .row_to_request = data<int32_t>(row_to_request),
      .state_rows = data<int32_t>(state_rows),
      .hot_entries = mutable_data<int32_t>(hot_entries),
      .hot_entries_stride = held.stride(0),
  };
  if (row_to_request)
    check(*row_to_request, "row_to_request")
        .same_device_as(entries, "entries")
        .dtype({ScalarType::Int})
        .shape({params.num_entries})
        .contiguous();
  if (state_rows) {
    check(*state_rows, "state_rows")
        .same_device_as(entries, "entries")
        .dtype({ScalarType::Int})
        .shape({-1})
        .contiguous();
    params.num_requests = state_rows->size(0);
  }
  if (params.num_entries == 0 || params.num_states == 0 || params.num_hot == 0) return;
  MLA_LAUNCH(forget_rows, hot_entries, params);
}

}  // namespace mla_fp8
