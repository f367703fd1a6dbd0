// compress_kv: checks of its arguments.
#include "ops/compress_kv.h"

#include "ops/rope_checks.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

// Checks the state, which the op reads and writes; ratio 1 has none.
void check_state(const Check& check, const OptionalTensor& state, const Tensor& state_slots,
                 const Tensor& like, int64_t num_requests, CompressKvParams& params) {
  const Arg slots = check(state_slots, "state_slots");
  slots.same_device_as(like, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({num_requests})
      .contiguous();
  params.state_slots = state_slots.const_data_ptr();
  params.state_slots_are_int64 = slots.is(ScalarType::Long);
  check.that(state.has_value() == (params.ratio > 1), "state must be ", params.ratio > 1 ? "given" : "None",
             " for ratio ", params.ratio, ", got ", state ? "a tensor" : "None");
  if (!state) return;
  const Arg arg = check(*state, "state");
  arg.same_device_as(like, "kv_cache")
      .dtype({ScalarType::Float})
      .shape({-1, -1, params.state_width()})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  const int64_t least = params.online ? 2 : params.window();
  if (arg.size(1) < least)
    arg.fail("must have at least ", least, " rows per slot for ratio ", params.ratio,
             params.online ? " online" : "", ", got ", arg.size(1));
  params.state = mutable_data<float>(*state);
  params.num_states = arg.size(0);
  params.depth = arg.size(1);
  params.state_stride_slot = arg.stride(0);
  params.state_stride_row = arg.stride(1);
}

void check_ape(const Check& check, const OptionalTensor& ape, const Tensor& like, CompressKvParams& params) {
  if (!ape) return;
  check.that(params.ratio > 2, "ape must be None for ratio ", params.ratio, ", got a tensor");
  check(*ape, "ape")
      .same_device_as(like, "kv_cache")
      .dtype({ScalarType::Float})
      .shape({params.ratio, params.width() / 2})
      .contiguous()
      .aligned(16);
  params.ape = data<float>(*ape);
}

void check_kv_score(const Check& check, const Tensor& kv_score, const Tensor& like,
                    CompressKvParams& params) {
  const Arg arg = check(kv_score, "kv_score");
  arg.same_device_as(like, "kv_cache");
  if (params.ratio == 1) arg.dtype({ScalarType::Float, ScalarType::BFloat16});
  else arg.dtype({ScalarType::Float});
  arg.shape({-1, params.width()}).last_dim_contiguous().aligned(16);
  params.num_tokens = arg.size(0);
  params.kv_score = kv_score.const_data_ptr();
  params.is_bf16 = arg.is(ScalarType::BFloat16);
  params.kv_score_stride_token = arg.stride(0);
}

void check_requests(const Check& check, const Tensor& query_start_loc, const Tensor& start_pos,
                    const Tensor& like, CompressKvParams& params) {
  const Arg starts = check(query_start_loc, "query_start_loc");
  starts.same_device_as(like, "kv_cache").dtype({ScalarType::Int}).shape({-1}).contiguous();
  check.that(starts.size(0) >= 1, "query_start_loc must have at least 1 element, got 0");
  params.num_requests = starts.size(0) - 1;
  check(start_pos, "start_pos")
      .same_device_as(like, "kv_cache")
      .dtype({ScalarType::Int})
      .shape({params.num_requests})
      .contiguous();
  params.query_start_loc = data<int32_t>(query_start_loc);
  params.start_pos = data<int32_t>(start_pos);
}

void check_outputs(const Check& check, const Tensor& slot_mapping, const OptionalTensor& out_latent,
                   const Tensor& like, CompressKvParams& params) {
  const Arg slots = check(slot_mapping, "slot_mapping");
  slots.same_device_as(like, "kv_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({params.num_tokens})
      .contiguous();
  params.slot_mapping = slot_mapping.const_data_ptr();
  params.slots_are_int64 = slots.is(ScalarType::Long);
  if (!out_latent) return;
  const Arg latent = check(*out_latent, "out_latent");
  latent.same_device_as(like, "kv_cache")
      .dtype({ScalarType::BFloat16})
      .shape({params.num_tokens, kHeadDimV})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  params.out_latent = mutable_data<uint16_t>(*out_latent);
  params.out_latent_stride_token = latent.stride(0);
}

}  // namespace

void compress_kv(const Tensor& kv_score, const Tensor& query_start_loc, const Tensor& start_pos,
                 OptionalTensor state, const Tensor& state_slots, const OptionalTensor& ape,
                 const Tensor& norm_weight, const Tensor& cos, const Tensor& sin, const Tensor& slot_mapping,
                 Tensor kv_cache, int64_t ratio, int64_t layout, int64_t page_size, double eps, bool online,
                 bool round_pooled, const OptionalTensor& scale, OptionalTensor out_latent) {
  const Check check("compress_kv");
  check.that(ratio == 1 || ratio == 2 || ratio == 4 || ratio == 128, "ratio must be 1, 2, 4 or 128, got ",
             ratio);
  check.that(!online || ratio == 128, "online must be False for ratio ", ratio, ", got True");
  const KvLayoutId id = check.layout(layout);
  const KvLayout l = kv_layout(id);
  check.that(l.head_dim_qk() == kHeadDimV, "layout must have rows of ", kHeadDimV, " dims, got ", l.name);
  const KvCacheView cache = check.kv_cache(kv_cache, "kv_cache", id, page_size);
  CompressKvParams params{
      .ratio = static_cast<int>(ratio),
      .online = online,
      .round_pooled = round_pooled,
      .table = check_rope_table(check, cos, sin, kv_cache, "kv_cache"),
      .eps = check.finite_float(eps, "eps"),
      .layout = id,
      .num_slots = cache.num_slots,
      .page_size = page_size,
      .scale = check.scale(scale, id, kv_cache),
      .kv_cache = mutable_data<uint8_t>(kv_cache),
      .kv_cache_stride_page = cache.stride_page,
  };
  check.that(params.eps >= 0, "eps must not be negative, got ", eps);
  check_kv_score(check, kv_score, kv_cache, params);
  check_requests(check, query_start_loc, start_pos, kv_cache, params);
  check_state(check, state, state_slots, kv_cache, params.num_requests, params);
  check_ape(check, ape, kv_cache, params);
  const Arg weight = check(norm_weight, "norm_weight");
  weight.same_device_as(kv_cache, "kv_cache")
      .dtype({ScalarType::BFloat16, ScalarType::Float})
      .shape({kHeadDimV})
      .contiguous()
      .aligned(16);
  params.norm_weight = norm_weight.const_data_ptr();
  params.weight_is_float = weight.is(ScalarType::Float);
  check_outputs(check, slot_mapping, out_latent, kv_cache, params);
  if (params.num_tokens > 0 && params.num_requests > 0) MLA_LAUNCH(compress_kv, kv_cache, params);
}

}  // namespace mla_fp8
