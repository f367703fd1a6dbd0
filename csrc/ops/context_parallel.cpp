#include "ops/context_parallel.h"

#include <algorithm>
#include <cmath>

#include "ops/index_arguments.h"
#include "registration.h"

namespace mla_fp8 {

#if MLA_FP8_WITH_CUDA

namespace {

PeerMemory check_memory(const Check& check, const Tensor& like, const char* name,
                        const std::vector<int64_t>& peers, int64_t rank, const Tensor& flags,
                        const Tensor& calls, double time_limit) {
  const auto world_size = static_cast<int64_t>(peers.size());
  check.that(world_size >= 1 && world_size <= PeerMemory::kMaxRanks, "peers must be 1 to ",
             PeerMemory::kMaxRanks, " ranks, got ", world_size);
  check.within(rank, "rank", 0, world_size - 1);
  const Arg f = check(flags, "flags");
  f.same_device_as(like, name).dtype({ScalarType::Int}).shape({world_size, -1}).contiguous();
  check.that(f.size(1) >= 1, "flags must be of at least 1 CTA, got 0");
  check(calls, "calls").same_device_as(like, name).dtype({ScalarType::Int}).shape({2}).contiguous();
  check.that(time_limit > 0 && time_limit < 1e9, "time_limit must be above 0 and below 1e9 s, got ",
             time_limit);
  PeerMemory memory{.world_size = static_cast<int>(world_size),
                    .rank = static_cast<int>(rank),
                    .offsets = {},
                    .flags = reinterpret_cast<uint32_t*>(mutable_data<int32_t>(flags)),
                    .num_ctas = f.size(1),
                    .calls = reinterpret_cast<uint32_t*>(mutable_data<int32_t>(calls)),
                    .time_limit = static_cast<int64_t>(time_limit * 1e9)};
  std::copy(peers.begin(), peers.end(), memory.offsets);
  return memory;
}

constexpr int64_t kVector = 8, kPiece = 4;  // bf16 and floats of 16 bytes

}  // namespace

void _gather_queries(const Tensor& q, const OptionalTensor& q_rope, MLA_PEER_ARGUMENTS, Tensor queries) {
  const Check check("_gather_queries");
  const PeerMemory memory = check_memory(check, q, "q", peers, rank, flags, calls, time_limit);
  const auto part = [&](const Tensor& t, const char* name, Shape shape) {
    const Arg x = check(t, name);
    x.same_device_as(q, "q").dtype({ScalarType::BFloat16}).shape(shape).last_dim_contiguous().aligned(16);
    check.that(x.size(2) % kVector == 0, name, " must have a multiple of ", kVector,
               " as its last dimension, got ", x.size(2));
    return x;
  };
  const Arg a = part(q, "q", {-1, -1, -1}), b = check(queries, "queries");
  const int64_t world_size = memory.world_size, tokens = a.size(0), heads = a.size(1);
  GatherQueriesParams params{
      .memory = memory,
      .num_tokens = tokens,
      .num_heads = heads,
      .head_dim = a.size(2),
      .q = data<uint16_t>(q),
      .q_stride_token = a.stride(0),
      .q_stride_head = a.stride(1),
      .first_rope = a.size(2),
      .q_rope = data<uint16_t>(q_rope),
  };
  if (q_rope) {
    const Arg rope = part(*q_rope, "q_rope", {tokens, heads, -1});
    params.head_dim += rope.size(2);
    params.q_rope_stride_token = rope.stride(0);
    params.q_rope_stride_head = rope.stride(1);
  }
  b.same_device_as(q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({-1, world_size * heads, params.head_dim})
      .contiguous()
      .aligned(16);
  check.that(tokens <= b.size(0), "q must have at most ", b.size(0), " tokens, got ", tokens);
  params.queries = mutable_data<uint16_t>(queries);
  if (tokens == 0 || heads == 0 || params.head_dim == 0) return;
  MLA_LAUNCH(gather_queries, q, params);
}

void _exchange_states(const Tensor& out, const Tensor& lse, const OptionalTensor& attn_sink, double base,
                      MLA_PEER_ARGUMENTS, Tensor outs, Tensor lses, Tensor merged, Tensor merged_lse) {
  const Check check("_exchange_states");
  const PeerMemory memory = check_memory(check, outs, "outs", peers, rank, flags, calls, time_limit);
  const Arg o = check(out, "out"), all = check(outs, "outs"), m = check(merged, "merged");
  const int64_t world_size = memory.world_size;
  all.dtype({ScalarType::BFloat16}).shape({2, world_size, -1, -1, -1}).contiguous().aligned(16);
  const int64_t max_tokens = all.size(2), heads = all.size(3), dim = all.size(4);
  o.same_device_as(outs, "outs")
      .dtype({ScalarType::BFloat16})
      .shape({-1, world_size * heads, dim})
      .last_dim_contiguous()
      .aligned(16);
  const int64_t tokens = o.size(0);
  check.that(dim % kVector == 0, "out must have a multiple of ", kVector, " as its last dimension, got ",
             dim);
  check.that(tokens <= max_tokens, "out must have at most ", max_tokens, " tokens, got ", tokens);
  const auto floats = [&](const Tensor& t, const char* name, Shape shape) {
    check(t, name).same_device_as(outs, "outs").dtype({ScalarType::Float}).shape(shape).contiguous();
  };
  floats(lse, "lse", {tokens, world_size * heads});
  floats(lses, "lses", {2, world_size, max_tokens, heads});
  floats(merged_lse, "merged_lse", {tokens, heads});
  if (attn_sink) floats(*attn_sink, "attn_sink", {heads});
  m.same_device_as(outs, "outs")
      .dtype({ScalarType::BFloat16})
      .shape({tokens, heads, dim})
      .last_dim_contiguous()
      .rows_disjoint()
      .aligned(16);
  check.that(base > 1 && std::isfinite(base), "base must be finite and above 1, got ", base);
  const ExchangeStatesParams params{
      .memory = memory,
      .num_tokens = tokens,
      .num_heads = heads,
      .head_dim = dim,
      .max_tokens = max_tokens,
      .out = data<uint16_t>(out),
      .out_stride_token = o.stride(0),
      .out_stride_head = o.stride(1),
      .lse = data<float>(lse),
      .attn_sink = data<float>(attn_sink),
      .log_base = static_cast<float>(std::log(base)),
      .outs = mutable_data<uint16_t>(outs),
      .lses = mutable_data<float>(lses),
      .merged = mutable_data<uint16_t>(merged),
      .merged_stride_token = m.stride(0),
      .merged_stride_head = m.stride(1),
      .merged_lse = mutable_data<float>(merged_lse),
  };
  if (tokens == 0 || heads == 0 || dim == 0) return;
  MLA_LAUNCH(exchange_states, outs, params);
}

void _exchange_scores(const Tensor& scores, const Tensor& positions, int64_t topk,
                      std::optional<int64_t> interleave, const OptionalTensor& page_table, int64_t page_size,
                      int64_t next_n, MLA_PEER_ARGUMENTS, Tensor candidates, Tensor out_positions,
                      OptionalTensor out_slots, Tensor out_lens) {
  const Check check("_exchange_scores");
  const PeerMemory memory = check_memory(check, scores, "scores", peers, rank, flags, calls, time_limit);
  const Arg s = check(scores, "scores"), p = check(positions, "positions"),
            c = check(candidates, "candidates");
  s.dtype({ScalarType::Float}).shape({-1, -1}).last_dim_contiguous().aligned(16);
  const int64_t rows = s.size(0), per_list = s.size(1), world_size = memory.world_size;
  p.same_device_as(scores, "scores").dtype({ScalarType::Int}).shape({rows, per_list});
  p.last_dim_contiguous().aligned(16);
  c.same_device_as(scores, "scores").dtype({ScalarType::Int}).shape({2, world_size, -1, 2, -1});
  c.contiguous().aligned(16);
  const int64_t max_rows = c.size(2), most = c.size(4);
  check.that(most % kPiece == 0 && most <= kMaxIndexTopk, "candidates must have a multiple of ", kPiece,
             " as their last dimension, at most ", kMaxIndexTopk, ", got ", most);
  check.that(per_list > 0 && per_list % kPiece == 0, "scores must have a multiple of ", kPiece,
             " columns, got ", per_list);
  check.that(rows <= max_rows && per_list <= most, "scores must be at most [", max_rows, ", ", most,
             "], got [", rows, ", ", per_list, "]");
  check.within(topk, "topk", 1, kMaxIndexTopk);
  check.that(page_table.has_value() == out_slots.has_value(), "out_slots and page_table must come together");
  check.that(!page_table || interleave, "interleave must be given with page_table, got None");
  const auto ints = [&](const Tensor& t, const char* name) {
    check(t, name)
        .same_device_as(scores, "scores")
        .dtype({ScalarType::Int})
        .shape({rows, topk})
        .last_dim_contiguous()
        .rows_disjoint();
  };
  ints(out_positions, "out_positions");
  if (out_slots) ints(*out_slots, "out_slots");
  check_ints(check, out_lens, "out_lens", rows, scores, "scores");
  const int32_t* const first = data<int32_t>(candidates);
  ExchangeScoresParams params{
      .memory = memory,
      .scores = data<float>(scores),
      .scores_stride_row = s.stride(0),
      .positions = data<int32_t>(positions),
      .positions_stride_row = p.stride(0),
      .candidates = mutable_data<int32_t>(candidates),
      .merge = {.num_lists = world_size,
                .num_rows = rows,
                .per_list = per_list,
                .topk = static_cast<int>(topk),
                .scores = reinterpret_cast<const float*>(first),
                .scores_stride_list = max_rows * 2 * most,
                .scores_stride_row = 2 * most,
                .positions = first + most,
                .positions_stride_list = max_rows * 2 * most,
                .positions_stride_row = 2 * most,
                .own = -1,
                .interleave_bits = check_interleave(check, interleave),
                .out_positions = mutable_data<int32_t>(out_positions),
                .out_positions_stride_row = out_positions.stride(0),
                .out_lens = mutable_data<int32_t>(out_lens)},
      .slots = {.num_rows = rows,
                .topk = topk,
                .width = topk,
                .page_size = 1,
                .next_n = 1,
                .group_size = 1,
                .world_size = 1,
                .interleave = 1},
  };
  if (page_table) {
    const Arg table = check(*page_table, "page_table");
    table.same_device_as(scores, "scores").dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
    check.within(page_size, "page_size", 1, kMaxPageSize);
    check.at_least(next_n, "next_n", 1);
    TopkToSlotsParams& slots = params.slots;
    slots.num_requests = table.size(0);
    slots.max_pages = table.size(1);
    slots.page_size = page_size;
    slots.next_n = next_n;
    slots.page_table = data<int32_t>(*page_table);
    slots.page_table_stride_request = table.stride(0);
    slots.world_size = world_size;
    slots.rank = rank;
    slots.interleave = interleave.value_or(1);
    slots.out_slots = mutable_data<int32_t>(*out_slots);
    slots.out_slots_stride_row = out_slots->stride(0);
    slots.out_lens = mutable_data<int32_t>(out_lens);
  }
  if (rows == 0) return;
  MLA_LAUNCH(exchange_scores, scores, params);
}

#endif

}  // namespace mla_fp8
