#include "ops/resolve_hot_rows.h"

#include <algorithm>
#include <limits>

#include "registration.h"

namespace mla_fp8 {
namespace {

constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();

// Checks a table of pages for each request, or for each state: [as many or more, pages].
Arg check_pages(const Check& check, const Tensor& t, const char* name, const Tensor& entries, int64_t rows,
                const char* of, std::initializer_list<ScalarType> dtypes) {
  Arg arg = check(t, name);
  arg.same_device_as(entries, "entries").dtype(dtypes).shape({-1, -1}).last_dim_contiguous();
  check.that(arg.size(0) >= rows, name, " must have a row for each of ", rows, of, ", got ", arg.size(0));
  return arg;
}

ResolveHotRowsParams checked_inputs(const Check& check, MLA_RESOLVE_HOT_ROWS_ARGUMENTS) {
  const Arg chosen = check(entries, "entries");
  chosen.dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  const int64_t rows = entries.size(0), topk = entries.size(1);
  const Arg held = check(hot_entries, "hot_entries"), order = check(hot_order, "hot_order");
  held.same_device_as(entries, "entries")
      .dtype({ScalarType::Int})
      .shape({-1, -1})
      .last_dim_contiguous()
      .rows_disjoint();
  const int64_t states = held.size(0), num_hot = held.size(1);
  order.same_device_as(entries, "entries")
      .dtype({ScalarType::Short})
      .shape({states, num_hot})
      .last_dim_contiguous()
      .rows_disjoint();
  check.that(rows <= kIntMax, "entries must have at most ", kIntMax, " rows, got ", rows);
  check.within(next_n, "next_n", 1, kMaxHotDrafts);
  check.that(num_hot <= kMaxHotRows, "hot_entries must have at most ", kMaxHotRows, " columns, got ",
             num_hot);
  check.that(topk <= num_hot / next_n, "hot_entries must have a column for each of the ", next_n, " * ", topk,
             " entries that a request may choose, got ", num_hot);
  check.within(num_host_rows, "num_host_rows", 0, kIntMax);
  check.within(host_page_size, "host_page_size", 1, kMaxPageSize);
  check.within(hot_page_size, "hot_page_size", 1, kMaxPageSize);
  check.within(first_page, "first_page", 0, kIntMax);

  const auto small = [](int64_t n) { return static_cast<int32_t>(std::min(n, kIntMax)); };
  ResolveHotRowsParams params{
      .num_rows = small(rows),
      .topk = small(topk),
      .num_requests = small(states),
      .num_states = small(states),
      .num_hot = small(num_hot),
      .next_n = small(next_n),
      .entries = data<int32_t>(entries),
      .entries_stride_row = chosen.stride(0),
      .host_page_size = small(host_page_size),
      .num_host_rows = small(num_host_rows),
      .first_page = small(first_page),
      .by_entry = by_entry,
      .hot_page_size = small(hot_page_size),
      .hot_entries = mutable_data<int32_t>(hot_entries),
      .hot_entries_stride = held.stride(0),
      .hot_order = mutable_data<int16_t>(hot_order),
      .hot_order_stride = order.stride(0),
  };
  const auto ints = [&](const OptionalTensor& t, const char* name, int64_t size, bool* are_int64) {
    if (!t) return static_cast<const void*>(nullptr);
    const Arg arg = check(*t, name);
    arg.same_device_as(entries, "entries");
    if (are_int64) arg.dtype({ScalarType::Int, ScalarType::Long});
    else arg.dtype({ScalarType::Int});
    arg.shape({size}).contiguous();
    if (are_int64) *are_int64 = arg.is(ScalarType::Long);
    return static_cast<const void*>(t->const_data_ptr());
  };
  params.row_to_request = ints(row_to_request, "row_to_request", rows, &params.requests_are_int64);
  params.state_rows = static_cast<const int32_t*>(ints(state_rows, "state_rows", -1, nullptr));
  if (state_rows) params.num_requests = small(state_rows->size(0));
  params.num_valid_rows = static_cast<const int32_t*>(ints(num_valid_rows, "num_valid_rows", 1, nullptr));
  params.entry_lens = ints(entry_lens, "entry_lens", rows, &params.lens_are_int64);
  check.that(!entry_lens || (next_n == 1 && hot_page_table), "entry_lens must be None ",
             next_n == 1 ? "without hot_page_table" : "with next_n above 1", ", got a tensor");
  if (host_page_table) {
    const Arg t = check_pages(check, *host_page_table, "host_page_table", entries, params.num_requests,
                              " requests", {ScalarType::Int, ScalarType::Long});
    params.host_pages = host_page_table->const_data_ptr();
    params.host_pages_are_int64 = t.is(ScalarType::Long);
    params.host_pages_stride = t.stride(0);
    params.num_host_pages = small(t.size(1));
  }
  if (hot_page_table) {
    const Arg t = check_pages(check, *hot_page_table, "hot_page_table", entries, params.num_requests,
                              " requests", {ScalarType::Int});
    params.hot_pages = data<int32_t>(*hot_page_table);
    params.hot_pages_stride = t.stride(0);
    params.num_hot_pages = small(t.size(1));
  }
  if (resident_page_table) {
    const Arg t = check_pages(check, *resident_page_table, "resident_page_table", entries, states, " states",
                              {ScalarType::Int});
    params.resident_pages = data<int32_t>(*resident_page_table);
    params.resident_pages_stride = t.stride(0);
    params.num_resident_pages = small(t.size(1));
  }
  if (counters) {
    check(*counters, "counters")
        .same_device_as(entries, "entries")
        .dtype({ScalarType::Long, ScalarType::UInt64})
        .shape({2})
        .contiguous();
    params.counters = mutable_data<int64_t>(*counters);
  }
  return params;
}

struct HotRowsOutputs {
  const Tensor &hot_rows, &miss_host_rows, &miss_hot_rows, &miss_counts;
  const OptionalTensor &attention_rows, &lens, &hit_rows;
};

void run(ResolveHotRowsParams params, const HotRowsOutputs& out, int64_t attention_page_stride) {
  if (params.num_rows == 0) return;
  params.hot_rows = mutable_data<int32_t>(out.hot_rows);
  params.hot_rows_stride = out.hot_rows.stride(0);
  params.miss_host_rows = out.miss_host_rows.mutable_data_ptr();
  params.miss_host_rows_stride = out.miss_host_rows.stride(0);
  params.miss_hot_rows = mutable_data<int32_t>(out.miss_hot_rows);
  params.miss_hot_rows_stride = out.miss_hot_rows.stride(0);
  params.miss_counts = mutable_data<int32_t>(out.miss_counts);
  if (out.attention_rows) {
    params.attention_rows = mutable_data<int32_t>(*out.attention_rows);
    params.attention_rows_stride = out.attention_rows->stride(0);
    params.attention_page_stride = attention_page_stride;
  }
  if (out.lens) params.lens = mutable_data<int32_t>(*out.lens);
  if (out.hit_rows) {
    params.hit_rows = mutable_data<int32_t>(*out.hit_rows);
    params.hit_rows_stride = out.hit_rows->stride(0);
  }
  MLA_LAUNCH(resolve_hot_rows, out.hot_rows, params);
}

}  // namespace

#define MLA_RESOLVE_HOT_ROWS_NAMES                                                                         \
  entries, hot_entries, hot_order, host_page_table, hot_page_table, resident_page_table, num_host_rows,    \
      host_page_size, hot_page_size, first_page, by_entry, row_to_request, next_n, state_rows, entry_lens, \
      num_valid_rows, counters

FourTensors resolve_hot_rows(MLA_RESOLVE_HOT_ROWS_ARGUMENTS) {
  const ResolveHotRowsParams params = checked_inputs(Check("resolve_hot_rows"), MLA_RESOLVE_HOT_ROWS_NAMES);
  const auto rows = [&] { return new_empty(entries, {params.num_rows, params.topk}, ScalarType::Int); };
  Tensor hot_rows = rows(), miss_host_rows = rows(), miss_hot_rows = rows();
  // Also behind the counts, so that equal inputs give equal tensors.
  torch::stable::fill_(miss_host_rows, -1);
  torch::stable::fill_(miss_hot_rows, -1);
  Tensor miss_counts = new_empty(entries, {params.num_rows}, ScalarType::Int);
  const OptionalTensor none;
  run(params, {hot_rows, miss_host_rows, miss_hot_rows, miss_counts, none, none, none}, 0);
  return {hot_rows, miss_host_rows, miss_hot_rows, miss_counts};
}

void resolve_hot_rows_out(MLA_RESOLVE_HOT_ROWS_ARGUMENTS, Tensor out_hot_rows, Tensor out_miss_host_rows,
                          Tensor out_miss_hot_rows, Tensor out_miss_counts, OptionalTensor out_attention_rows,
                          int64_t attention_page_stride, OptionalTensor out_lens,
                          OptionalTensor out_hit_rows) {
  const Check check("resolve_hot_rows");
  ResolveHotRowsParams params = checked_inputs(check, MLA_RESOLVE_HOT_ROWS_NAMES);
  const auto rows = [&](const Tensor& t, const char* name, std::initializer_list<ScalarType> dtypes) {
    const Arg arg = check(t, name);
    arg.same_device_as(entries, "entries")
        .dtype(dtypes)
        .shape({params.num_rows, params.topk})
        .last_dim_contiguous()
        .rows_disjoint();
    return arg;
  };
  const auto counts = [&](const Tensor& t, const char* name) {
    check(t, name)
        .same_device_as(entries, "entries")
        .dtype({ScalarType::Int})
        .shape({params.num_rows})
        .contiguous();
  };
  rows(out_hot_rows, "out_hot_rows", {ScalarType::Int});
  params.miss_host_rows_are_int64 =
      rows(out_miss_host_rows, "out_miss_host_rows", {ScalarType::Int, ScalarType::Long})
          .is(ScalarType::Long);
  rows(out_miss_hot_rows, "out_miss_hot_rows", {ScalarType::Int});
  counts(out_miss_counts, "out_miss_counts");
  if (out_attention_rows) {
    rows(*out_attention_rows, "out_attention_rows", {ScalarType::Int});
    check.within(attention_page_stride, "attention_page_stride", hot_page_size, kIntMax);
  }
  if (out_lens) counts(*out_lens, "out_lens");
  if (out_hit_rows) rows(*out_hit_rows, "out_hit_rows", {ScalarType::Int});
  run(params,
      {out_hot_rows, out_miss_host_rows, out_miss_hot_rows, out_miss_counts, out_attention_rows, out_lens,
       out_hit_rows},
      attention_page_stride);
}

}  // namespace mla_fp8
