#pragma once
// Plans of shapes that this thread has planned lately. To make one takes up to some microseconds, as long as
// the rest of a call on the host.
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {

// All that a plan is made from. What is not here cannot be looked at by one.
struct PlannedShape {
  Op op;
  int major, num_sms;
  KvLayoutId layout, extra_layout;
  int num_q_heads, num_scopes;
  int64_t num_tokens, topk, extra_topk, num_requests, query_groups, workspace_floats;
  bool is_window, has_entry_pages, batch_invariant, has_workspace, has_lists;

  PlannedShape(Op op, const SparseAttentionParams& p, const Gpu& gpu)
      : op(op),
        major(gpu.major),
        num_sms(gpu.num_sms),
        layout(p.layout),
        extra_layout(p.extra_layout),
        num_q_heads(p.num_q_heads),
        num_scopes(p.num_scopes),
        num_tokens(p.num_tokens),
        topk(p.scopes[0].topk),
        extra_topk(p.num_scopes > 1 ? p.scopes[1].topk : 0),
        num_requests(p.window.num_requests),
        query_groups(p.query_groups),
        workspace_floats(p.workspace_floats),
        is_window(p.is_window),
        has_entry_pages(p.has_entry_pages),
        batch_invariant(p.batch_invariant),
        has_workspace(p.workspace != nullptr),
        has_lists(p.shared_keys != nullptr) {}
  bool operator==(const PlannedShape&) const = default;

  // A problem of that shape. Nothing is read through its pointers.
  SparseAttentionParams params() const {
    static float workspace;
    static constexpr int32_t kLists = 0;
    SparseAttentionParams p{};
    p.layout = layout, p.extra_layout = extra_layout;
    p.num_tokens = num_tokens, p.num_q_heads = num_q_heads, p.num_scopes = num_scopes;
    p.scopes[0].topk = topk, p.scopes[1].topk = extra_topk;
    p.is_window = is_window, p.window.num_requests = num_requests;
    p.has_entry_pages = has_entry_pages, p.batch_invariant = batch_invariant;
    p.query_groups = query_groups, p.shared_keys = has_lists ? &kLists : nullptr;
    p.workspace = has_workspace ? &workspace : nullptr, p.workspace_floats = workspace_floats;
    return p;
  }
  Gpu gpu() const { return {major, num_sms}; }
  // Of what differs from call to call of a model.
  size_t place(size_t places) const {
    const int64_t mixed = num_tokens * 31 + topk * 7 + extra_topk * 5 + num_q_heads * 3 + has_workspace +
                          static_cast<int64_t>(layout) * 11;
    return static_cast<size_t>(mixed) % places;
  }
};

// `make(shape)`, or what that gave before, if it is still kept.
template <class Value>
Value planned_once(const PlannedShape& shape, Value make(const PlannedShape&)) {
  constexpr size_t kPlaces = 61;
  struct Kept {
    Value (*make)(const PlannedShape&);
    PlannedShape shape;
    Value value;
  };
  thread_local std::array<std::optional<Kept>, kPlaces> kept;
  std::optional<Kept>& place = kept[shape.place(kPlaces)];
  if (!place || place->make != make || !(place->shape == shape)) place.emplace(make, shape, make(shape));
  return place->value;
}

inline Plan planned(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return planned_once<Plan>({op, p, gpu},
                            [](const PlannedShape& s) { return plan(s.op, s.params(), s.gpu()); });
}
inline std::optional<Sharing> planned_sharing(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  if (p.query_groups < 2) return {};
  return planned_once<std::optional<Sharing>>({op, p, gpu}, [](const PlannedShape& s) {
    return plan_sharing(s.op, s.params(), s.gpu(), s.has_lists);
  });
}
inline int64_t planned_workspace(Op op, const SparseAttentionParams& p, const Gpu& gpu) {
  return planned_once<int64_t>(
      {op, p, gpu}, [](const PlannedShape& s) { return workspace_size(s.op, s.params(), s.gpu()); });
}

}  // namespace mla_fp8::gpu
