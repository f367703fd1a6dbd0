// pool_index_k: the checks.
#include "ops/pool_index_k.h"

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

// Checks rows of the call's tokens; returns their stride.
int64_t check_rows(const Check& check, const Tensor& t, const char* name, int64_t num_tokens,
                   const Tensor& like) {
  const Arg arg = check(t, name);
  arg.same_device_as(like, "index_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_tokens, kIndexDim})
      .last_dim_contiguous()
      .aligned(16);
  return arg.stride(0);
}

Arg check_state(const Check& check, const Tensor& t, const char* name, int64_t num_states, int64_t depth,
                const Tensor& like) {
  Arg arg = check(t, name);
  arg.same_device_as(like, "index_cache")
      .dtype({ScalarType::BFloat16})
      .shape({num_states, depth, kIndexDim})
      .last_dim_contiguous()
      .aligned(16)
      .rows_disjoint();
  return arg;
}

// Checks a number of each request, or of each token.
Arg check_integers(const Check& check, const Tensor& t, const char* name, int64_t size, const Tensor& like) {
  Arg arg = check(t, name);
  arg.same_device_as(like, "index_cache")
      .dtype({ScalarType::Long, ScalarType::Int})
      .shape({size})
      .contiguous();
  return arg;
}

}  // namespace

void pool_index_k(const Tensor& k, const Tensor& score, const Tensor& query_start_loc,
                  const Tensor& start_pos, Tensor state_k, Tensor state_score, const Tensor& state_slots,
                  const Tensor& ape, const Tensor& slot_mapping, Tensor index_cache, int64_t page_size) {
  const Check check("pool_index_k");
  constexpr IndexLayoutId kLayout = IndexLayoutId::kIndexFp8;
  const IndexCacheView cache = check_index_cache(check, index_cache, kLayout, page_size);
  PoolIndexKParams p{
      .k_stride_token = check_rows(check, k, "k", -1, index_cache),
      .num_slots = cache.num_pages * page_size,
      .page_size = page_size,
      .scaling = check_index_scaling(check, kLayout, "ue8m0", std::nullopt, false),
      .kv_cache = mutable_data<uint8_t>(index_cache),
      .kv_cache_stride_page = cache.stride_page,
  };
  p.num_tokens = k.size(0);
  p.score_stride_token = check_rows(check, score, "score", p.num_tokens, index_cache);
  const Arg starts = check(query_start_loc, "query_start_loc");
  starts.same_device_as(index_cache, "index_cache").dtype({ScalarType::Int}).shape({-1}).contiguous();
  check.that(starts.size(0) >= 1, "query_start_loc must have at least 1 element, got 0");
  p.num_requests = starts.size(0) - 1;
  p.start_pos = check_ints(check, start_pos, "start_pos", p.num_requests, index_cache, "index_cache");
  const Arg keys = check_state(check, state_k, "state_k", -1, -1, index_cache);
  p.num_states = keys.size(0);
  p.depth = keys.size(1);
  if (p.depth < kPoolSize) keys.fail("must have at least ", kPoolSize, " rows per slot, got ", p.depth);
  const Arg scores = check_state(check, state_score, "state_score", p.num_states, p.depth, index_cache);
  const Arg states = check_integers(check, state_slots, "state_slots", p.num_requests, index_cache);
  check(ape, "ape")
      .same_device_as(index_cache, "index_cache")
      .dtype({ScalarType::Float})
      .shape({kPoolSize, kIndexDim})
      .contiguous()
      .aligned(16);
  const Arg slots = check_integers(check, slot_mapping, "slot_mapping", p.num_tokens, index_cache);
  p.k = data<uint16_t>(k);
  p.score = data<uint16_t>(score);
  p.query_start_loc = data<int32_t>(query_start_loc);
  p.state_k = mutable_data<uint16_t>(state_k);
  p.state_score = mutable_data<uint16_t>(state_score);
  p.state_k_stride_slot = keys.stride(0), p.state_k_stride_row = keys.stride(1);
  p.state_score_stride_slot = scores.stride(0), p.state_score_stride_row = scores.stride(1);
  p.state_slots = state_slots.const_data_ptr();
  p.state_slots_are_int64 = states.is(ScalarType::Long);
  p.ape = data<float>(ape);
  p.slot_mapping = slot_mapping.const_data_ptr();
  p.slots_are_int64 = slots.is(ScalarType::Long);
  if (p.num_tokens > 0 && p.num_requests > 0) MLA_LAUNCH(pool_index_k, index_cache, p);
}

}  // namespace mla_fp8
