#include "ops/build_swa_token_ids.h"

#include <limits>

#include "registration.h"

namespace mla_fp8 {
namespace {

void check_sizes(const Check& check, int64_t window_size, int64_t capacity) {
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  check.within(window_size, "window_size", 1, kMaxInt32);
  check.within(capacity, "capacity", 0, kMaxInt32);
}

}  // namespace

void build_swa_token_ids_out(const Tensor& seq_lens, const Tensor& extend_seq_lens,
                             const Tensor& req_pool_indices, const Tensor& req_to_token,
                             const Tensor& full_to_swa, int64_t window_size, int64_t capacity, Tensor out_ids,
                             Tensor out_first_pos, Tensor out_gather_lens, Tensor out_offsets) {
  const Check check("build_swa_token_ids");
  check_sizes(check, window_size, capacity);
  const auto vector = [&](const Tensor& t, const char* name, std::initializer_list<ScalarType> dtypes,
                          int64_t size) {
    return check(t, name).same_device_as(seq_lens, "seq_lens").dtype(dtypes).shape({size}).contiguous();
  };
  vector(seq_lens, "seq_lens", {ScalarType::Int}, -1);
  const int64_t num_requests = seq_lens.size(0);
  vector(extend_seq_lens, "extend_seq_lens", {ScalarType::Int}, num_requests);
  const Arg pool_indices =
      vector(req_pool_indices, "req_pool_indices", {ScalarType::Long, ScalarType::Int}, num_requests);
  check(req_to_token, "req_to_token")
      .same_device_as(seq_lens, "seq_lens")
      .dtype({ScalarType::Int})
      .shape({-1, -1})
      .last_dim_contiguous();
  vector(full_to_swa, "full_to_swa", {ScalarType::Long}, -1);
  vector(out_ids, "out_ids", {ScalarType::Int}, capacity);
  vector(out_first_pos, "out_first_pos", {ScalarType::Int}, num_requests);
  vector(out_gather_lens, "out_gather_lens", {ScalarType::Int}, num_requests);
  vector(out_offsets, "out_offsets", {ScalarType::Int}, num_requests + 1);

  const BuildSwaTokenIdsParams params{
      .num_requests = num_requests,
      .window_size = window_size,
      .capacity = capacity,
      .seq_lens = data<int32_t>(seq_lens),
      .extend_seq_lens = data<int32_t>(extend_seq_lens),
      .req_pool_indices = req_pool_indices.const_data_ptr(),
      .req_pool_indices_are_int64 = pool_indices.is(ScalarType::Long),
      .req_to_token = data<int32_t>(req_to_token),
      .req_to_token_stride_row = req_to_token.stride(0),
      .num_pool_rows = req_to_token.size(0),
      .max_tokens = req_to_token.size(1),
      .full_to_swa = data<int64_t>(full_to_swa),
      .num_full_slots = full_to_swa.size(0),
      .ids = mutable_data<int32_t>(out_ids),
      .first_pos = mutable_data<int32_t>(out_first_pos),
      .gather_lens = mutable_data<int32_t>(out_gather_lens),
      .offsets = mutable_data<int32_t>(out_offsets),
  };
  MLA_LAUNCH(build_swa_token_ids, seq_lens, params);
}

FourTensors build_swa_token_ids(const Tensor& seq_lens, const Tensor& extend_seq_lens,
                                const Tensor& req_pool_indices, const Tensor& req_to_token,
                                const Tensor& full_to_swa, int64_t window_size, int64_t capacity) {
  const Check check("build_swa_token_ids");
  check(seq_lens, "seq_lens").shape({-1});
  check_sizes(check, window_size, capacity);
  const int64_t num_requests = seq_lens.size(0);
  Tensor ids = new_empty(seq_lens, {capacity}, ScalarType::Int);
  Tensor first_pos = new_empty(seq_lens, {num_requests}, ScalarType::Int);
  Tensor gather_lens = new_empty(seq_lens, {num_requests}, ScalarType::Int);
  Tensor offsets = new_empty(seq_lens, {num_requests + 1}, ScalarType::Int);
  build_swa_token_ids_out(seq_lens, extend_seq_lens, req_pool_indices, req_to_token, full_to_swa, window_size,
                          capacity, ids, first_pos, gather_lens, offsets);
  return {ids, first_pos, gather_lens, offsets};
}

}  // namespace mla_fp8
