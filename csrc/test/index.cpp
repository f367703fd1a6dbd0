// The CPU kernels of the indexer by instruction set: the writer of keys, and the logits of one request.
#include <algorithm>
#include <memory>
#include <optional>

#include "cpu/isa.h"
#include "test/core.h"

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
      .scale_format = static_cast<IndexScaleFormat>(scale_format),
      .amax_floor = amax_floor,
      .hadamard = hadamard,
      .kv_cache = index_cache.mutable_data(),
  };
  isa.quantize_index_k(params, 0, n);
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
  };
  const auto memory = std::make_unique<Memory>();
  Array<float> out(num_entries);
  isa.stage_index_query(queries, 0, memory->query);
  for (int64_t first = 0; first < num_entries; first += cpu::kIndexTile) {
    const int count = static_cast<int>(std::min<int64_t>(cpu::kIndexTile, num_entries - first));
    isa.stage_index_keys(keys, 0, first, count, memory->keys);
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
  m.def("index_logits", &index_logits, py::arg("isa"), py::arg("q").noconvert(),
        py::arg("weights").noconvert(), py::arg("q_scale"), py::arg("index_cache").noconvert(), py::kw_only(),
        py::arg("layout"), py::arg("num_entries"));
}

}  // namespace mla_fp8::test
