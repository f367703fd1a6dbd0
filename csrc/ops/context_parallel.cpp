#include "ops/context_parallel.h"

#include <algorithm>
#include <cmath>

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

constexpr int64_t kVector = 8;  // bf16 of 16 bytes

}  // namespace

void _gather_queries(const Tensor& q, std::vector<int64_t> peers, int64_t rank, double time_limit,
                     Tensor queries, Tensor flags, Tensor calls) {
  const Check check("_gather_queries");
  const PeerMemory memory = check_memory(check, q, "q", peers, rank, flags, calls, time_limit);
  const Arg a = check(q, "q"), b = check(queries, "queries");
  a.dtype({ScalarType::BFloat16}).shape({-1, -1, -1}).last_dim_contiguous().aligned(16);
  const int64_t world_size = memory.world_size, tokens = a.size(0), heads = a.size(1);
  b.same_device_as(q, "q")
      .dtype({ScalarType::BFloat16})
      .shape({-1, world_size * heads, a.size(2)})
      .contiguous()
      .aligned(16);
  check.that(a.size(2) % kVector == 0, "q must have a multiple of ", kVector, " as its last dimension, got ",
             a.size(2));
  check.that(tokens <= b.size(0), "q must have at most ", b.size(0), " tokens, got ", tokens);
  const GatherQueriesParams params{
      .memory = memory,
      .num_tokens = tokens,
      .num_heads = heads,
      .head_dim = a.size(2),
      .q = data<uint16_t>(q),
      .q_stride_token = a.stride(0),
      .q_stride_head = a.stride(1),
      .queries = mutable_data<uint16_t>(queries),
  };
  if (tokens == 0 || heads == 0 || a.size(2) == 0) return;
  MLA_LAUNCH(gather_queries, q, params);
}

void _exchange_states(const Tensor& out, const Tensor& lse, const OptionalTensor& attn_sink, double base,
                      std::vector<int64_t> peers, int64_t rank, double time_limit, Tensor outs, Tensor lses,
                      Tensor flags, Tensor calls, Tensor merged, Tensor merged_lse) {
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

#endif

}  // namespace mla_fp8
