#include "ops/dequantize_kv.h"

#include "registration.h"

namespace mla_fp8 {
namespace {

void check_out(const Check& check, const Tensor& out, int64_t num_rows, const KvLayout& l,
               const Tensor& kv_cache) {
  check(out, "out")
      .same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_rows, l.head_dim_qk()})
      .last_dim_contiguous()
      .rows_disjoint()
      .aligned(16);
}

}  // namespace

void dequantize_kv_out(const Tensor& kv_cache, const Tensor& slots, int64_t layout, int64_t page_size,
                       const OptionalTensor& scale, Tensor out) {
  const Check check("dequantize_kv");
  const KvLayoutId id = check.layout(layout);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  const Arg slots_arg = check(slots, "slots");
  slots_arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({-1})
      .contiguous();
  check_out(check, out, slots.size(0), kv_layout(id), kv_cache);
  const float* layer_scale = check.scale(scale, id, kv_cache);
  if (slots.size(0) == 0) return;

  const DequantizeKvParams params{
      .layout = id,
      .num_rows = slots.size(0),
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .kv_cache = cache.data,
      .kv_cache_stride_page = cache.stride_page,
      .slots = slots.const_data_ptr(),
      .slots_are_int64 = slots_arg.is(ScalarType::Long),
      .scale = layer_scale,
      .out = mutable_data<uint16_t>(out),
      .out_stride_row = out.stride(0),
  };
  MLA_LAUNCH(dequantize_kv, kv_cache, params);
}

Tensor dequantize_kv(const Tensor& kv_cache, const Tensor& slots, int64_t layout, int64_t page_size,
                     const OptionalTensor& scale) {
  const Check check("dequantize_kv");
  const KvLayout l = kv_layout(check.layout(layout));
  check(kv_cache, "kv_cache");  // before memory is asked for on its device
  check(slots, "slots").shape({-1});
  Tensor out = new_empty(kv_cache, {slots.size(0), l.head_dim_qk()}, ScalarType::BFloat16);
  dequantize_kv_out(kv_cache, slots, layout, page_size, scale, out);
  return out;
}

void dequantize_kv_paged_out(const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens,
                             const Tensor& gather_lens, const Tensor& row_offsets, int64_t layout,
                             int64_t page_size, const OptionalTensor& scale, Tensor out) {
  const Check check("dequantize_kv_paged");
  const KvLayoutId id = check.layout(layout);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  check(page_table, "page_table")
      .same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::Int})
      .shape({-1, -1})
      .last_dim_contiguous();
  const int64_t num_requests = page_table.size(0);
  const auto per_request = [&](const Tensor& t, const char* name) {
    check(t, name)
        .same_device_as(kv_cache, "kv_cache")
        .dtype({ScalarType::Int})
        .shape({num_requests})
        .contiguous();
    return data<int32_t>(t);
  };
  const int32_t* lens = per_request(seq_lens, "seq_lens");
  const int32_t* gathers = per_request(gather_lens, "gather_lens");
  const int32_t* offsets = per_request(row_offsets, "row_offsets");
  check_out(check, out, -1, kv_layout(id), kv_cache);
  const float* layer_scale = check.scale(scale, id, kv_cache);
  if (num_requests == 0 || out.size(0) == 0) return;

  const DequantizeKvPagedParams params{
      .layout = id,
      .num_rows = out.size(0),
      .num_requests = num_requests,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .kv_cache = cache.data,
      .kv_cache_stride_page = cache.stride_page,
      .page_table = data<int32_t>(page_table),
      .page_table_stride_request = page_table.stride(0),
      .max_pages = page_table.size(1),
      .seq_lens = lens,
      .gather_lens = gathers,
      .row_offsets = offsets,
      .scale = layer_scale,
      .out = mutable_data<uint16_t>(out),
      .out_stride_row = out.stride(0),
  };
  MLA_LAUNCH(dequantize_kv_paged, kv_cache, params);
}

Tensor dequantize_kv_paged(const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens,
                           const Tensor& gather_lens, const Tensor& row_offsets, int64_t layout,
                           int64_t page_size, int64_t num_rows, const OptionalTensor& scale) {
  const Check check("dequantize_kv_paged");
  const KvLayout l = kv_layout(check.layout(layout));
  check(kv_cache, "kv_cache");
  check.at_least(num_rows, "num_rows", 0);
  Tensor out = new_empty(kv_cache, {num_rows, l.head_dim_qk()}, ScalarType::BFloat16);
  torch::stable::zero_(out);  // rows of no request
  dequantize_kv_paged_out(kv_cache, page_table, seq_lens, gather_lens, row_offsets, layout, page_size, scale,
                          out);
  return out;
}

}  // namespace mla_fp8
