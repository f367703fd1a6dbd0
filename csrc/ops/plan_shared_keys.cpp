#include "ops/sparse_arguments.h"
#include "registration.h"

namespace mla_fp8 {
namespace {

// Checks the inputs. The problem has keys only: no queries, no caches.
SparseAttentionParams checked_inputs(const Check& check, MLA_PLAN_SHARED_KEYS_ARGUMENTS) {
  const KvLayoutId id = check.first_layout(layout);
  check(indices, "indices").shape({-1, -1});
  const int64_t num_tokens = indices.size(0);
  check.within(query_groups, "query_groups", 2, kMaxQueryGroup);
  check.within(num_q_heads, "num_q_heads", 1, kMaxQHeads);
  check.that(extra_indices.has_value() == extra_num_slots.has_value(),
             "extra_indices and extra_num_slots must be given together, got ",
             extra_indices ? "indices, no" : "no indices, a", " number of slots");
  check.that(extra_indices || !extra_topk_length,
             "extra_topk_length must be None without extra_indices, got a tensor");
  const auto scope = [&](const Tensor& t, const char* name, const OptionalTensor& length,
                         const char* length_name, int64_t slots, const char* slots_name) {
    check.at_least(slots, slots_name, 0);
    return check_scope(check, {.num_slots = slots}, 1, indices, "indices", t, name, length, length_name,
                       num_tokens);
  };
  SparseAttentionParams params{
      .layout = id,
      .extra_layout = id,
      .num_tokens = num_tokens,
      .num_q_heads = static_cast<int>(num_q_heads),
      .num_scopes = extra_indices ? 2 : 1,
  };
  set_query_groups(check, params, query_groups, query_start_loc, indices, "indices");
  params.scopes[0] = scope(indices, "indices", topk_length, "topk_length", num_slots, "num_slots");
  if (extra_indices)
    params.scopes[1] = scope(*extra_indices, "extra_indices", extra_topk_length, "extra_topk_length",
                             *extra_num_slots, "extra_num_slots");
  return params;
}

void run(SparseAttentionParams params, Tensor lists) {
  if (params.num_tokens == 0) return;
  params.workspace = reinterpret_cast<float*>(mutable_data<int32_t>(lists));
  MLA_LAUNCH(plan_shared_keys, lists, params);
}

}  // namespace

#define MLA_PLAN_SHARED_KEYS_PASS                                                                       \
  indices, query_groups, num_q_heads, layout, num_slots, topk_length, extra_indices, extra_topk_length, \
      extra_num_slots, query_start_loc

Tensor plan_shared_keys(MLA_PLAN_SHARED_KEYS_ARGUMENTS) {
  const SparseAttentionParams params = checked_inputs(Check("plan_shared_keys"), MLA_PLAN_SHARED_KEYS_PASS);
  const SharedKeysShape shape(params);
  Tensor lists = new_empty(indices, {shape.num_tiles, shape.words}, ScalarType::Int);
  torch::stable::zero_(lists);  // also behind the lists: equal inputs give equal tensors
  run(params, lists);
  return lists;
}

void plan_shared_keys_out(MLA_PLAN_SHARED_KEYS_ARGUMENTS, Tensor out) {
  const Check check("plan_shared_keys");
  const SparseAttentionParams params = checked_inputs(check, MLA_PLAN_SHARED_KEYS_PASS);
  const SharedKeysShape shape(params);
  check(out, "out")
      .same_device_as(indices, "indices")
      .dtype({ScalarType::Int})
      .shape({shape.num_tiles, shape.words})
      .contiguous()
      .aligned(16);
  run(params, out);
}

}  // namespace mla_fp8
