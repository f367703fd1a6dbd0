#include "ops/quantize_index_k.h"

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {

void quantize_index_k(const Tensor& k, const Tensor& slot_mapping, Tensor index_cache, int64_t layout,
                      int64_t page_size, std::string scale_format, std::optional<double> amax_floor,
                      bool hadamard, bool reciprocal) {
  const Check check("quantize_index_k");
  const IndexLayoutId id = check_index_layout(check, layout);
  const IndexCacheView cache = check_index_cache(check, index_cache, id, page_size);
  const Arg key = check(k, "k");
  key.same_device_as(index_cache, "index_cache")
      .dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float})
      .shape({-1, kIndexDim})
      .last_dim_contiguous()
      .aligned(16);
  const Arg slots = check(slot_mapping, "slot_mapping");
  slots.same_device_as(index_cache, "index_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({-1})
      .contiguous();
  const int64_t num_tokens = slot_mapping.size(0);
  check.that(num_tokens <= k.size(0), "slot_mapping must have at most ", k.size(0),
             " entries (the rows of k), got ", num_tokens);

  const IndexScaling scaling = check_index_scaling(check, id, scale_format, amax_floor, reciprocal);
  if (num_tokens == 0 || cache.num_pages == 0) return;

  const QuantizeIndexKParams params{
      .layout = id,
      .num_tokens = num_tokens,
      .num_slots = cache.num_pages * page_size,
      .page_size = page_size,
      .dtype = key.float_dtype(),
      .k = k.const_data_ptr(),
      .k_stride_token = k.stride(0),
      .slot_mapping = slot_mapping.const_data_ptr(),
      .slots_are_int64 = slots.is(ScalarType::Long),
      .scaling = scaling,
      .hadamard = hadamard,
      .kv_cache = mutable_data<uint8_t>(index_cache),
      .kv_cache_stride_page = cache.stride_page,
  };
  MLA_LAUNCH(quantize_index_k, index_cache, params);
}

}  // namespace mla_fp8
