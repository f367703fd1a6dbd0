// cuda/sparse_attention/plan.h: which kernel runs which shapes.
#include <optional>
#include <vector>

#include "cuda/sparse_attention/plan_sm90.h"

#include "core/module/core.h"

namespace mla_fp8::test {
namespace {

// Nothing is read through the pointers of such a problem.
SparseAttentionParams problem(int layout, int extra_layout, int64_t queries, int heads, int64_t keys,
                              int64_t extra_keys, bool is_window, bool batch_invariant,
                              bool has_entry_pages = false) {
  const KvPair layouts{static_cast<KvLayoutId>(layout),
                       static_cast<KvLayoutId>(extra_layout < 0 ? layout : extra_layout)};
  if (layout < 0 || layout >= kNumKvLayouts || extra_layout >= kNumKvLayouts || !can_attend(layouts) ||
      heads < 1 || heads > kMaxQHeads)
    throw py::value_error("plan: layout, extra_layout or heads");
  SparseAttentionParams p{};
  p.layout = layouts.first, p.extra_layout = layouts.extra;
  p.num_tokens = queries, p.num_q_heads = heads;
  p.num_scopes = extra_keys > 0 ? 2 : 1;
  p.scopes[0].topk = keys, p.scopes[1].topk = extra_keys;
  p.scopes[0].page_size = p.scopes[1].page_size = 64;
  p.is_window = is_window, p.window.window_size = keys;
  if (has_entry_pages && !(is_window && extra_keys > 0)) throw py::value_error("plan: entries of no window");
  p.has_entry_pages = has_entry_pages;
  p.batch_invariant = batch_invariant;
  return p;
}

gpu::Op op_of(const std::string& op) {
  if (op != "decode" && op != "prefill") throw py::value_error("plan: op must be decode or prefill");
  return op == "decode" ? gpu::Op::kDecode : gpu::Op::kPrefill;
}

}  // namespace

void bind_plans(py::module_& m) {
  using namespace py::literals;
  m.def(
      "plan",
      [](const std::string& op, int layout, int64_t queries, int heads, int64_t keys, int64_t extra_keys,
         bool is_window, bool batch_invariant, int compute_major, int num_sms, int extra_layout,
         std::optional<int64_t> workspace, bool has_entry_pages, int64_t requests) {
        auto p = problem(layout, extra_layout, queries, heads, keys, extra_keys, is_window, batch_invariant,
                         has_entry_pages);
        p.window.num_requests = requests;
        p.workspace_floats = workspace.value_or(INT64_MAX);
        const auto plan = gpu::plan(op_of(op), p, {compute_major, num_sms});
        if (!workspace) return gpu::to_string(plan);
        return gpu::to_string(gpu::within_workspace(plan, p));
      },
      "op"_a, py::kw_only(), "layout"_a, "queries"_a, "heads"_a, "keys"_a, "extra_keys"_a = 0,
      "is_window"_a = false, "batch_invariant"_a = false, "compute_major"_a = 9, "num_sms"_a = 132,
      "extra_layout"_a = -1, "workspace"_a = py::none(), "has_entry_pages"_a = false, "requests"_a = 1);
  // (queries of a tile, tiles, those alone, 256ths of the entries that a list may have), or None
  m.def(
      "sharing",
      [](const std::string& op, int layout, int64_t queries, int heads, int64_t keys, int64_t extra_keys,
         int64_t query_groups, bool has_lists, int extra_layout, int64_t requests) -> py::object {
        auto p = problem(layout, extra_layout, queries, heads, keys, extra_keys, false, false);
        const int32_t lists = 0;
        p.query_groups = query_groups, p.shared_keys = has_lists ? &lists : nullptr;
        p.window.num_requests = requests, p.window.query_start_loc = requests > 0 ? &lists : nullptr;
        const auto sharing = gpu::plan_sharing(op_of(op), p, {9, 132});
        if (!sharing) return py::none();
        return py::make_tuple(SharedKeysShape(p).queries.tile, gpu::to_string(sharing->tiles),
                              gpu::to_string(sharing->alone), sharing->most_shared);
      },
      "op"_a, py::kw_only(), "layout"_a, "queries"_a, "heads"_a, "keys"_a, "extra_keys"_a = 0,
      "query_groups"_a, "has_lists"_a = false, "extra_layout"_a = -1, "requests"_a = 0);
  m.def(  // floats that a decode asks for, and the most that any does
      "workspace",
      [](int layout, int64_t queries, int heads, int64_t keys, int64_t extra_keys, bool batch_invariant,
         int compute_major, int num_sms) {
        const auto p = problem(layout, -1, queries, heads, keys, extra_keys, false, batch_invariant);
        return std::pair(gpu::workspace_of_call(gpu::Op::kDecode, p, {compute_major, num_sms}),
                         sparse_attention_floats(queries, heads, num_sms, batch_invariant));
      },
      py::kw_only(), "layout"_a, "queries"_a, "heads"_a, "keys"_a, "extra_keys"_a = 0,
      "batch_invariant"_a = false, "compute_major"_a = 9, "num_sms"_a = 132);
  m.def(
      "forced_plan",
      [](const std::string& kernel, const std::string& schedule, int cta_heads, int splits, int producers,
         int layout, int heads, int compute_major, int extra_layout) {
        const auto p = problem(layout, extra_layout, 1, heads, 2048, 0, false, false);
        return gpu::to_string(
            gpu::forced_plan({kernel, schedule, cta_heads, splits, producers}, p, {compute_major, 132}));
      },
      "kernel"_a, "schedule"_a, "cta_heads"_a, "splits"_a = 1, "producers"_a = 0, py::kw_only(), "layout"_a,
      "heads"_a, "compute_major"_a = 9, "extra_layout"_a = -1);
  // What each price of a forced plan is multiplied by, in the order of Price::Of.
  m.def(
      "work",
      [](const std::string& kernel, const std::string& schedule, int cta_heads, int splits, int layout,
         int64_t queries, int heads, int64_t keys, int64_t extra_keys, int num_sms, int extra_layout) {
        const auto p = problem(layout, extra_layout, queries, heads, keys, extra_keys, false, false);
        const auto plan = gpu::forced_plan({kernel, schedule, cta_heads, splits, 0}, p, {9, num_sms});
        const auto w = gpu::model::work_of(p, plan, num_sms);
        return std::vector{w.waves, w.keys * 1e-3, w.bytes * 1e-6, w.merges, w.runs, w.left};
      },
      "kernel"_a, "schedule"_a, "cta_heads"_a, "splits"_a, py::kw_only(), "layout"_a, "queries"_a, "heads"_a,
      "keys"_a, "extra_keys"_a = 0, "num_sms"_a = 132, "extra_layout"_a = -1);
  py::list variants;  // (kernel, schedule, heads, producers, layouts)
  for (const gpu::Variant& v : gpu::kVariants) {
    py::list layouts;
    for (int i = 0; i < kNumKvLayouts; ++i)
      if (const auto id = static_cast<KvLayoutId>(i); v.reads({id, id})) layouts.append(kv_layout(id).name);
    for (const KvPair& pair : kMixedPairs)
      if (v.reads(pair))
        layouts.append(std::string(kv_layout(pair.first).name) + "+" + kv_layout(pair.extra).name);
    variants.append(
        py::make_tuple(gpu::name(v.kernel), gpu::name(v.schedule), v.heads, v.producers, layouts));
  }
  m.attr("VARIANTS") = variants;
}

}  // namespace mla_fp8::test
