#pragma once
// Remembers the plans of shapes that this thread planned lately. Making one takes tens of microseconds,
// more than the rest of a call on the host.
#include <array>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

// Returns kMake(op, p, gpu), or its earlier result for the same shape if that is still kept. The shape is all
// that plans look at.
template <auto kMake>
auto planned(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  const auto number = [](auto x) { return static_cast<int64_t>(x); };
  const std::array shape{number(op),
                         number(gpu.major),
                         number(gpu.num_sms),
                         number(p.layout),
                         number(p.extra_layout),
                         number(p.num_tokens),
                         number(p.num_q_heads),
                         number(p.num_scopes),
                         number(p.scopes[0].topk),
                         number(p.num_scopes > 1 ? p.scopes[1].topk : 0),
                         number(p.window.num_requests),
                         number(p.query_groups),
                         number(p.workspace_floats),
                         number(p.is_window),
                         number(p.has_entry_pages),
                         number(p.batch_invariant),
                         number(p.workspace != nullptr),
                         number(p.shared_keys != nullptr)};
  struct Kept {
    std::remove_const_t<decltype(shape)> of;
    decltype(kMake(op, p, gpu)) value;
  };
  constexpr size_t kPlaces = 31;
  thread_local std::array<std::optional<Kept>, kPlaces> kept;  // results of this kMake
  // The place follows from what differs between a model's calls.
  const int64_t mixed = p.num_tokens * 31 + num_keys(p) * 7 + p.num_q_heads * 3 + static_cast<int>(p.layout);
  std::optional<Kept>& place = kept[static_cast<size_t>(mixed) % kPlaces];
  if (!place || place->of != shape) place.emplace(Kept{shape, kMake(op, p, gpu)});
  return place->value;
}

}  // namespace mla_fp8::gpu
