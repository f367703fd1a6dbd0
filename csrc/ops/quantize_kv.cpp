#include "ops/quantize_kv.h"

#include "registration.h"

namespace mla_fp8 {

void quantize_kv(const Tensor& latent, const Tensor& slot_mapping, Tensor kv_cache, int64_t layout,
                 int64_t page_size, const OptionalTensor& scale, const OptionalTensor& rope,
                 std::optional<double> fp8_max, bool zero_rope) {
  const Check check("quantize_kv");
  const KvLayoutId id = check.layout(layout);
  const KvLayout l = kv_layout(id);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);

  // `latent` is nope then rope; or it is nope alone, and rope is a tensor of its own, or zeros.
  check.that(!zero_rope || (l.scale_inline() && l.rope_dim > 0), "zero_rope must be False for layout ",
             l.name, ", got True");
  check.that(!zero_rope || !rope, "rope must be None with zero_rope, got a tensor");
  const Arg latent_arg = check(latent, "latent");
  latent_arg.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float})
      .shape({-1, rope || zero_rope ? l.nope_dim : l.head_dim_qk()})
      .last_dim_contiguous()
      .aligned(16);
  if (rope)
    check(*rope, "rope")
        .same_device_as(kv_cache, "kv_cache")
        .dtype({latent.scalar_type()})
        .shape({latent.size(0), l.rope_dim})
        .last_dim_contiguous()
        .aligned(16);

  const Arg slots = check(slot_mapping, "slot_mapping");
  slots.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({-1})
      .contiguous();
  const int64_t num_tokens = slot_mapping.size(0);
  check.that(num_tokens <= latent.size(0), "slot_mapping must have at most ", latent.size(0),
             " entries (the rows of latent), got ", num_tokens);

  const float limit = format_max(l.nope_format);
  if (fp8_max) {
    check.that(is_e4m3(l.nope_format), "fp8_max must be None for layout ", l.name, ", got ", *fp8_max);
    const float value = static_cast<float>(*fp8_max);
    const bool representable =
        l.nope_format == Format::kE4m3fnuz
            ? e4m3_to_float<Format::kE4m3fnuz>(float_to_e4m3<Format::kE4m3fnuz>(value)) == value
            : e4m3_to_float<Format::kE4m3fn>(float_to_e4m3<Format::kE4m3fn>(value)) == value;
    // If fp8_max were below 4, the reciprocal of the largest bf16's scale would be subnormal.
    check.that(value >= 4.0f && representable, "fp8_max must be a value of the cache's FP8 format in [4, ",
               limit, "], got ", *fp8_max);
  }

  const float* layer_scale = check.scale(scale, id, kv_cache);
  if (num_tokens == 0 || cache.num_slots == 0) return;

  const int64_t itemsize = static_cast<int64_t>(latent.element_size());
  const Tensor& rope_source = rope ? *rope : latent;
  const QuantizeKvParams params{
      .layout = id,
      .num_tokens = num_tokens,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .dtype = latent_arg.float_dtype(),
      .nope = latent.const_data_ptr(),
      .nope_stride_token = latent.stride(0),
      .rope = zero_rope ? nullptr : data<uint8_t>(rope_source) + (rope ? 0 : l.nope_dim * itemsize),
      .rope_stride_token = rope_source.stride(0),
      .slot_mapping = slot_mapping.const_data_ptr(),
      .slots_are_int64 = slots.is(ScalarType::Long),
      .scale = layer_scale,
      .fp8_max = fp8_max ? static_cast<float>(*fp8_max) : limit,
      .kv_cache = mutable_data<uint8_t>(kv_cache),
      .kv_cache_stride_page = cache.stride_page,
  };
  MLA_LAUNCH(quantize_kv, kv_cache, params);
}

}  // namespace mla_fp8
