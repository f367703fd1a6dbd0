// The CPU kernels of the indexer by instruction set: the writer of keys, and the logits of one request.
#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "core/module/core.h"
#include "cpu/isa.h"

namespace mla_fp8::test {
namespace {

using cpu::IsaKernels;

// k as float; entry i goes to slot i of one page.
void quantize_index_k(const IsaKernels& isa, const Array<float>& k, Array<uint8_t>& index_cache, int layout,
                      int scale_format, float amax_floor, bool hadamard) {
  const auto id = static_cast<IndexLayoutId>(layout);
  const int64_t n = k.shape(0);
  if (k.ndim() != 2 || k.shape(1) != kIndexDim || index_cache.size() < index_layout(id).page_bytes(n))
    throw py::value_error("quantize_index_k: shapes");
  Array<int64_t> slots(n);
  for (int64_t i = 0; i < n; ++i) slots.mutable_data()[i] = i;
  const QuantizeIndexKParams params{
      .layout = id,
      .num_tokens = n,
      .num_slots = n,
      .page_size = n,
      .dtype = Dtype::kF32,
      .k = k.data(),
      .k_stride_token = kIndexDim,
      .slot_mapping = slots.data(),
      .slots_are_int64 = true,
      .scaling = {static_cast<IndexScaleFormat>(scale_format), amax_floor},
      .hadamard = hadamard,
      .kv_cache = index_cache.mutable_data(),
  };
  isa.quantize_index_k(params, 0, n);
}

// Keys and scores [n, 128] as bf16 bits, of one request from position `start` on, whose state is [2, depth,
// 128]; pool p goes to entry p of one page.
void pool_index_k(const IsaKernels& isa, const Array<uint16_t>& k, const Array<uint16_t>& score,
                  Array<uint16_t>& state, const Array<float>& ape, Array<uint8_t>& index_cache, int start) {
  const int64_t n = k.shape(0), depth = state.shape(1), entries = (start + n) / kPoolSize;
  if (k.ndim() != 2 || k.shape(1) != kIndexDim || score.size() != k.size() || ape.size() != 4 * kIndexDim ||
      state.size() != 2 * depth * kIndexDim || depth < kPoolSize ||
      index_cache.size() < index_layout(IndexLayoutId::kIndexFp8).page_bytes(entries))
    throw py::value_error("pool_index_k: shapes");
  Array<int64_t> slots(n);
  for (int64_t i = 0; i < n; ++i) slots.mutable_data()[i] = (start + i) / kPoolSize;
  const int32_t starts[] = {0, static_cast<int32_t>(n)}, start_pos = start, state_slot = 0;
  PoolIndexKParams params{
      .num_tokens = n,
      .num_requests = 1,
      .k = k.data(),
      .score = score.data(),
      .k_stride_token = kIndexDim,
      .score_stride_token = kIndexDim,
      .query_start_loc = starts,
      .start_pos = &start_pos,
      .state_k = state.mutable_data(),
      .state_score = state.mutable_data() + depth * kIndexDim,
      .num_states = 1,
      .depth = depth,
      .state_k_stride_row = kIndexDim,
      .state_score_stride_row = kIndexDim,
      .state_slots = &state_slot,
      .ape = ape.data(),
      .slot_mapping = slots.data(),
      .slots_are_int64 = true,
      .num_slots = entries,
      .page_size = entries,
      .scaling = {IndexScaleFormat::kUe8m0, index_layout(IndexLayoutId::kIndexFp8).amax_floor},
      .kv_cache = index_cache.mutable_data(),
  };
  isa.pool_index_k(params, 0, 1 + n);
}

// Attention's q_pe [tokens, heads, 2 * half] and the indexer's q [tokens, heads, 128] as bf16 bits, token t
// at position t. Returns q_pe rotated, the codes, scales of e2m1, and the weights.
py::tuple prepare_queries(const IsaKernels& isa, const Array<uint16_t>& q_pe, const Array<uint16_t>& index_q,
                          const Array<float>& cos, const Array<float>& sin, bool is_neox, bool is_first,
                          bool hadamard, int layout, int scale_format) {
  const auto id = static_cast<IndexLayoutId>(layout);
  const IndexLayout l = index_layout(id);
  const py::ssize_t tokens = index_q.shape(0), heads = index_q.shape(1), half = cos.shape(1);
  if (index_q.ndim() != 3 || q_pe.ndim() != 3 || index_q.shape(2) != kIndexDim || q_pe.shape(2) != 2 * half ||
      cos.shape(0) != tokens || sin.shape(1) != half)
    throw py::value_error("prepare_queries: shapes");
  const py::ssize_t pe_heads = q_pe.shape(1);
  Array<uint16_t> out_pe({tokens, pe_heads, 2 * half});
  Array<uint8_t> codes({tokens, heads, py::ssize_t{l.value_bytes}}), scales({tokens, heads, py::ssize_t{4}});
  Array<float> weights({tokens, heads}), out_weights({tokens, heads});
  std::fill_n(weights.mutable_data(), weights.size(), 0.3f);
  std::fill_n(scales.mutable_data(), scales.size(), uint8_t{0});
  std::vector<int64_t> positions(tokens);
  std::iota(positions.begin(), positions.end(), 0);
  const RopeTable table{cos.data(), sin.data(),       half, 1, half, 1, tokens, static_cast<int>(half),
                        false,      positions.data(), true};
  const PrepareQueriesParams params{
      .num_tokens = tokens,
      .num_heads = pe_heads,
      .table = table,
      .is_neox = is_neox,
      .q_pe = q_pe.data(),
      .q_pe_stride_token = pe_heads * 2 * half,
      .q_pe_stride_head = 2 * half,
      .out_q_pe = out_pe.mutable_data(),
      .out_q_pe_stride_token = pe_heads * 2 * half,
      .out_q_pe_stride_head = 2 * half,
      .num_index_heads = heads,
      .index_table = table,
      .index_is_neox = is_neox,
      .index_first_dim = is_first ? 0 : kIndexDim - 2 * static_cast<int>(half),
      .hadamard = hadamard,
      .layout = id,
      .scaling = {static_cast<IndexScaleFormat>(scale_format), l.amax_floor},
      .index_q = index_q.data(),
      .index_q_stride_token = heads * kIndexDim,
      .index_q_stride_head = kIndexDim,
      .out_index_q = codes.mutable_data(),
      .out_index_scale = scales.mutable_data(),
      .index_weights = weights.data(),
      .weights_are_float = true,
      .index_weights_stride_token = heads,
      .out_index_weights = out_weights.mutable_data(),
      .weight_scale = 0.7f,
      .head_scale = 0.1f,
  };
  isa.prepare_queries(params, 0, tokens);
  return py::make_tuple(out_pe, codes, scales, out_weights);
}

// q [heads, 128 or 64] bytes with weights; entries of one page. Returns their logits.
Array<float> index_logits(const IsaKernels& isa, const Array<uint8_t>& q, const Array<float>& weights,
                          const std::optional<Array<uint8_t>>& q_scale, const Array<uint8_t>& index_cache,
                          int layout, int64_t num_entries) {
  const auto id = static_cast<IndexLayoutId>(layout);
  const IndexLayout l = index_layout(id);
  if (q.ndim() != 2 || weights.size() != q.shape(0) || index_cache.size() < l.page_bytes(num_entries))
    throw py::value_error("index_logits: shapes");
  const IndexQueries queries{
      .num_rows = 1,
      .num_heads = static_cast<int>(q.shape(0)),
      .is_fp4 = q_scale.has_value(),
      .q = q.data(),
      .q_scale = q_scale ? q_scale->data() : nullptr,
      .weights = weights.data(),
  };
  const IndexKeys keys{
      .layout = id,
      .values = index_cache.data(),
      .values_stride_row = l.value_bytes,
      .scales = index_cache.data() + l.scale_offset(0, num_entries),
      .num_pages = 1,
      .page_size = num_entries,
  };
  struct Memory {
    cpu::StagedIndexQuery query;
    cpu::StagedIndexKeys keys;
    float logits[cpu::kIndexTile];
    int32_t columns[cpu::kIndexTile];
  };
  const auto memory = std::make_unique<Memory>();
  Array<float> out(num_entries);
  isa.stage_index_query(queries, 0, memory->query);
  for (int64_t first = 0; first < num_entries; first += cpu::kIndexTile) {
    const int count = static_cast<int>(std::min<int64_t>(cpu::kIndexTile, num_entries - first));
    std::iota(memory->columns, memory->columns + count, static_cast<int32_t>(first));
    isa.stage_index_keys(keys, 0, memory->columns, count, memory->keys);
    isa.index_tile(memory->query, memory->keys, memory->logits);
    std::copy_n(memory->logits, count, out.mutable_data() + first);
  }
  return out;
}

}  // namespace

void bind_index(py::module_& m) {
  m.def("quantize_index_k", &quantize_index_k, py::arg("isa"), py::arg("k").noconvert(),
        py::arg("index_cache").noconvert(), py::kw_only(), py::arg("layout"), py::arg("scale_format"),
        py::arg("amax_floor"), py::arg("hadamard"));
  m.def("pool_index_k", &pool_index_k, py::arg("isa"), py::arg("k").noconvert(), py::arg("score").noconvert(),
        py::arg("state").noconvert(), py::arg("ape").noconvert(), py::arg("index_cache").noconvert(),
        py::arg("start"));
  m.def("prepare_queries", &prepare_queries, py::arg("isa"), py::arg("q_pe").noconvert(),
        py::arg("index_q").noconvert(), py::arg("cos"), py::arg("sin"), py::kw_only(), py::arg("is_neox"),
        py::arg("is_first"), py::arg("hadamard"), py::arg("layout"), py::arg("scale_format"));
  m.def("index_logits", &index_logits, py::arg("isa"), py::arg("q").noconvert(),
        py::arg("weights").noconvert(), py::arg("q_scale"), py::arg("index_cache").noconvert(), py::kw_only(),
        py::arg("layout"), py::arg("num_entries"));
}

}  // namespace mla_fp8::test
