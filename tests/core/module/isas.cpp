// Every row of cpu::isa_table(), so that tests can hold the instruction sets against each other.
#include "cpu/isa.h"

#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "core/module/core.h"

namespace mla_fp8::test {
namespace {

using cpu::IsaKernels;

Dtype dtype_of(const py::array& x) {
  if (py::isinstance<py::array_t<uint16_t>>(x)) return Dtype::kBf16;
  if (py::isinstance<py::array_t<float>>(x)) return Dtype::kF32;
  if (x.dtype().kind() == 'f' && x.itemsize() == 2) return Dtype::kF16;
  throw py::type_error("latent must be uint16 (bf16 bits), float16 or float32");
}

void quantize_kv(const IsaKernels& isa, const py::array& latent, const Array<int64_t>& slots,
                 Array<uint8_t>& kv_cache, int layout, int64_t page_size, std::optional<float> scale,
                 std::optional<float> fp8_max) {
  const KvLayout l = kv_layout(static_cast<KvLayoutId>(layout));
  if (latent.ndim() != 2 || latent.shape(1) != l.head_dim_qk() || latent.strides(1) != latent.itemsize() ||
      latent.shape(0) < slots.size() || kv_cache.ndim() != 2 || kv_cache.shape(1) < l.page_bytes(page_size))
    throw py::value_error("quantize_kv: shapes");
  const int64_t stride = latent.strides(0) / latent.itemsize();
  const QuantizeKvParams params{
      .layout = static_cast<KvLayoutId>(layout),
      .num_tokens = slots.size(),
      .num_slots = kv_cache.shape(0) * page_size,
      .page_size = page_size,
      .dtype = dtype_of(latent),
      .nope = latent.data(),
      .nope_stride_token = stride,
      .rope = static_cast<const uint8_t*>(latent.data()) + l.nope_dim * latent.itemsize(),
      .rope_stride_token = stride,
      .slot_mapping = slots.data(),
      .slots_are_int64 = true,
      .scale = scale ? &*scale : nullptr,
      .fp8_max = fp8_max.value_or(format_max(l.nope_format)),
      .kv_cache = kv_cache.mutable_data(),
      .kv_cache_stride_page = kv_cache.shape(1),
  };
  isa.quantize_kv(params, 0, params.num_tokens);
}

Array<uint16_t> dequantize_kv(const IsaKernels& isa, Array<uint8_t>& kv_cache, const Array<int64_t>& slots,
                              int layout, int64_t page_size, std::optional<float> scale) {
  const KvLayout l = kv_layout(static_cast<KvLayoutId>(layout));
  if (kv_cache.ndim() != 2 || kv_cache.shape(1) < l.page_bytes(page_size))
    throw py::value_error("dequantize_kv: shapes");
  Array<uint16_t> out({static_cast<py::ssize_t>(slots.size()), static_cast<py::ssize_t>(l.head_dim_qk())});
  const DequantizeKvParams params{
      .layout = static_cast<KvLayoutId>(layout),
      .num_rows = slots.size(),
      .num_slots = kv_cache.shape(0) * page_size,
      .page_size = page_size,
      .kv_cache = kv_cache.data(),
      .kv_cache_stride_page = kv_cache.shape(1),
      .slots = slots.data(),
      .slots_are_int64 = true,
      .scale = scale ? &*scale : nullptr,
      .out = out.mutable_data(),
      .out_stride_row = l.head_dim_qk(),
  };
  isa.dequantize_kv(params, 0, params.num_rows);
  return out;
}

// An array that begins on a cache line, as streamed results must.
Array<uint16_t> on_a_line(py::ssize_t tokens, py::ssize_t heads, py::ssize_t dim) {
  constexpr py::ssize_t kLine = 64;
  Array<uint16_t> memory({tokens * heads * dim + kLine});
  auto* first = memory.mutable_data();
  first += -reinterpret_cast<intptr_t>(first) % kLine / py::ssize_t{sizeof(uint16_t)} & (kLine / 2 - 1);
  return Array<uint16_t>({tokens, heads, dim}, first, memory);
}

// V4's prologue: returns q [tokens, heads, 512] normed if `norm_q` and rotated, all as bf16 bits.
Array<uint16_t> norm_rope_insert(const IsaKernels& isa, const Array<uint16_t>& q, const Array<uint16_t>& kv,
                                 const Array<uint16_t>& k_rope, const Array<float>& weight,
                                 const Array<float>& cos, const Array<float>& sin,
                                 const Array<int64_t>& slots, Array<uint8_t>& kv_cache, int layout,
                                 int64_t page_size, std::optional<float> scale, bool norm_q, bool streamed) {
  const KvLayout l = kv_layout(static_cast<KvLayoutId>(layout));
  const py::ssize_t tokens = q.shape(0), heads = q.shape(1), half = cos.shape(1);
  if (q.ndim() != 3 || q.shape(2) != kHeadDimV || kv.shape(0) != tokens || kv.shape(1) != kHeadDimV ||
      k_rope.shape(0) != tokens || k_rope.shape(1) != l.head_dim_qk() - kHeadDimV ||
      weight.size() != kHeadDimV || cos.shape(0) != tokens || sin.shape(1) != half ||
      slots.size() != tokens || kv_cache.shape(1) < l.page_bytes(page_size))
    throw py::value_error("norm_rope_insert: shapes");
  Array<uint16_t> out = on_a_line(tokens, heads, kHeadDimV);
  std::vector<int64_t> positions(tokens);
  std::iota(positions.begin(), positions.end(), 0);
  const NormRopeInsertParams params{
      .layout = static_cast<KvLayoutId>(layout),
      .num_tokens = tokens,
      .num_insert = tokens,
      .num_slots = kv_cache.shape(0) * page_size,
      .page_size = page_size,
      .table = {cos.data(), sin.data(), half, 1, half, 1, tokens, static_cast<int>(half), false,
                positions.data(), true},
      .kv = kv.data(),
      .kv_stride_token = kHeadDimV,
      .k_rope = k_rope.size() > 0 ? k_rope.data() : nullptr,
      .k_rope_stride_token = k_rope.shape(1),
      .kv_weight = weight.data(),
      .weight_is_float = true,
      .eps = 1e-6f,
      .slot_mapping = slots.data(),
      .slots_are_int64 = true,
      .scale = scale ? &*scale : nullptr,
      .kv_cache = kv_cache.mutable_data(),
      .kv_cache_stride_page = kv_cache.shape(1),
      .num_q_heads = heads,
      .num_heads = heads,
      .head_dim = kHeadDimV,
      .norm_q = norm_q,
      .q = q.data(),
      .q_stride_token = heads * kHeadDimV,
      .q_stride_head = kHeadDimV,
      .out_q = out.mutable_data(),
      .out_q_stride_token = heads * kHeadDimV,
      .out_q_stride_head = kHeadDimV,
  };
  isa.norm_rope_insert(params, streamed, 0, tokens);
  return out;
}

// o [tokens, heads, dim] as bf16 bits, one position per token. Returns it rotated back, its codes in one
// group and their scales.
py::tuple inverse_rope(const IsaKernels& isa, const Array<uint16_t>& o, const Array<float>& cos,
                       const Array<float>& sin, int tile, bool power_of_two, bool streamed) {
  const py::ssize_t tokens = o.shape(0), heads = o.shape(1), dim = o.shape(2), half = cos.shape(1);
  if (o.ndim() != 3 || cos.shape(0) != tokens || sin.shape(1) != half || dim % tile != 0)
    throw py::value_error("inverse_rope: shapes");
  Array<uint16_t> out = on_a_line(tokens, heads, dim);
  Array<uint8_t> codes({tokens, heads * dim});
  Array<float> scales({tokens, heads * dim / tile});
  std::vector<int64_t> positions(tokens);
  std::iota(positions.begin(), positions.end(), 0);
  const AttendedHeads attended{
      .num_tokens = tokens,
      .num_heads = heads,
      .head_dim = dim,
      .table = {cos.data(), sin.data(), half, 1, half, 1, tokens, static_cast<int>(half), false,
                positions.data(), true},
      .o = o.data(),
      .o_stride_token = heads * dim,
      .o_stride_head = dim,
  };
  isa.inverse_rope({attended, out.mutable_data(), heads * dim, dim}, streamed, 0, tokens);
  std::vector<uint16_t> row(dim);
  isa.inverse_rope_quantize({attended, 1, tile, power_of_two, codes.mutable_data(), heads * dim, 0,
                             scales.mutable_data(), heads * dim / tile, 0, 1, tokens},
                            row.data(), 0, tokens);
  return py::make_tuple(out, codes, scales);
}

// One request whose first token is at `start`; dsv4 rows into slot p / ratio of a cache of one page. Returns
// the latents.
Array<uint16_t> compress_kv(const IsaKernels& isa, const Array<float>& kv_score, Array<float>& state,
                            const Array<float>& ape, const Array<float>& weight, const Array<float>& cos,
                            const Array<float>& sin, Array<uint8_t>& kv_cache, int start, int ratio,
                            bool online, bool round_pooled, const std::vector<int64_t>& cuts) {
  const py::ssize_t tokens = kv_score.shape(0);
  constexpr auto kId = KvLayoutId::kDsv4;
  Array<uint16_t> latent({tokens, py::ssize_t{kHeadDimV}});
  memset(latent.mutable_data(), 0, latent.nbytes());
  const int32_t query_start_loc[] = {0, static_cast<int32_t>(tokens)}, start_pos = start, slot = 0;
  std::vector<int64_t> slots(tokens);
  for (py::ssize_t t = 0; t < tokens; ++t) slots[t] = (start + t) / ratio;
  CompressKvParams params{.ratio = ratio, .online = online, .round_pooled = round_pooled};
  if (kv_score.shape(1) != params.width() || state.shape(2) != params.state_width() ||
      weight.size() != kHeadDimV || kv_cache.size() < kv_layout(kId).page_bytes(tokens + start))
    throw py::value_error("compress_kv: shapes");
  params.num_tokens = tokens;
  params.num_requests = 1;
  params.table = {cos.data(),   sin.data(), cos.shape(1), 1,
                  cos.shape(1), 1,          cos.shape(0), static_cast<int>(cos.shape(1))};
  params.kv_score = kv_score.data();
  params.kv_score_stride_token = kv_score.shape(1);
  params.query_start_loc = query_start_loc;
  params.start_pos = &start_pos;
  params.state = state.mutable_data();
  params.num_states = 1;
  params.depth = state.shape(1);
  params.state_stride_row = state.shape(2);
  params.state_slots = &slot;
  params.ape = ape.size() > 0 ? ape.data() : nullptr;
  params.norm_weight = weight.data();
  params.weight_is_float = true;
  params.eps = 1e-6f;
  params.slot_mapping = slots.data();
  params.slots_are_int64 = true;
  params.layout = kId;
  params.num_slots = params.page_size = tokens + start;
  params.kv_cache = kv_cache.mutable_data();
  params.out_latent = latent.mutable_data();
  params.out_latent_stride_token = kHeadDimV;
  // As if threads had the ranges between the cuts and the last one were the fastest.
  std::vector<int64_t> bounds = {0};
  bounds.insert(bounds.end(), cuts.begin(), cuts.end());
  bounds.push_back(tokens);
  const auto run = [&](cpu::CompressPhase phase) {
    for (size_t i = bounds.size() - 1; i > 0; --i) isa.compress_kv(params, phase, bounds[i - 1], bounds[i]);
  };
  run(online ? cpu::CompressPhase::kFold : cpu::CompressPhase::kClose);
  if (ratio > 1 && !online) run(cpu::CompressPhase::kKeep);
  return latent;
}

// q [tokens, heads, head_dim_qk] as bf16 bits; the second scope, if any, has the first one's indices and page
// size. Returns out (bf16 bits), lse and max_logits.
std::tuple<Array<uint16_t>, Array<float>, Array<float>> sparse_attention(
    const IsaKernels& isa, const Array<uint16_t>& q, const Array<uint8_t>& kv_cache,
    const Array<int32_t>& indices, int layout, int64_t page_size, float sm_scale, std::optional<float> scale,
    const Array<float>& attn_sink, const std::optional<Array<uint8_t>>& extra_kv_cache, int extra_layout) {
  const KvPair layouts{static_cast<KvLayoutId>(layout),
                       static_cast<KvLayoutId>(extra_kv_cache ? extra_layout : layout)};
  const KvLayout l = kv_layout(layouts.first);
  const auto is_cache = [&](const Array<uint8_t>& x, KvLayoutId id) {
    return x.ndim() == 2 && x.shape(1) >= kv_layout(id).page_bytes(page_size);
  };
  if (!can_attend(layouts) || q.ndim() != 3 || q.shape(2) != l.head_dim_qk() || indices.ndim() != 2 ||
      indices.shape(0) != q.shape(0) || !is_cache(kv_cache, layouts.first) ||
      (extra_kv_cache && !is_cache(*extra_kv_cache, layouts.extra)) || attn_sink.size() != q.shape(1))
    throw py::value_error("sparse_attention: layouts or shapes");
  const py::ssize_t tokens = q.shape(0), heads = q.shape(1);
  Array<uint16_t> out({tokens, heads, static_cast<py::ssize_t>(kHeadDimV)});
  Array<float> lse({tokens, heads}), max_logits({tokens, heads});
  SparseAttentionParams params{
      .layout = layouts.first,
      .extra_layout = layouts.extra,
      .num_tokens = tokens,
      .num_q_heads = static_cast<int>(heads),
      .num_scopes = extra_kv_cache ? 2 : 1,
      .q = q.data(),
      .q_stride_token = heads * l.head_dim_qk(),
      .q_stride_head = l.head_dim_qk(),
      .scale = scale ? &*scale : nullptr,
      .attn_sink = attn_sink.data(),
      .sm_scale = sm_scale,
      .out = out.mutable_data(),
      .out_stride_token = heads * kHeadDimV,
      .out_stride_head = kHeadDimV,
      .lse = lse.mutable_data(),
      .max_logits = max_logits.mutable_data(),
  };
  const auto scope = [&](const Array<uint8_t>& cache) {
    return KvScope{
        .kv_cache = cache.data(),
        .kv_cache_stride_page = cache.shape(1),
        .num_slots = cache.shape(0) * page_size,
        .page_size = page_size,
        .indices = indices.data(),
        .indices_stride_token = indices.shape(1),
        .topk = indices.shape(1),
        .topk_length = nullptr,
    };
  };
  params.scopes[0] = scope(kv_cache);
  if (extra_kv_cache) params.scopes[1] = scope(*extra_kv_cache);
  cpu::AttentionScratch scratch;
  const int num_heads = static_cast<int>(heads);
  std::vector<uint8_t> memory(scratch.place(nullptr, num_heads) + 64);
  scratch.place(reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<int64_t>(memory.data()), int64_t{64})),
                num_heads);
  for (int64_t token = 0; token < tokens; ++token) isa.sparse_attention(params, token, 0, num_heads, scratch);
  return {out, lse, max_logits};
}

// One KV head and contiguous caches of `dtype`, as bytes; q and out are bf16.
py::tuple paged_attention_ragged(const IsaKernels& isa, const Array<uint16_t>& q,
                                 const Array<uint8_t>& k_cache, const Array<uint8_t>& v_cache,
                                 const Array<int32_t>& kv_indptr, const Array<int32_t>& kv_indices,
                                 const Array<int32_t>& kv_last_page_len, CacheDtype dtype, float scale,
                                 float logits_soft_cap, int num_splits) {
  const int itemsize = dtype == CacheDtype::kBf16 || dtype == CacheDtype::kF16 ? 2 : 1;
  if (q.ndim() != 3 || k_cache.ndim() != 3 || v_cache.ndim() != 3 ||
      k_cache.shape(2) != q.shape(2) * itemsize || v_cache.shape(0) != k_cache.shape(0) ||
      v_cache.shape(1) != k_cache.shape(1) || kv_indptr.size() != q.shape(0) + 1 ||
      kv_last_page_len.size() != q.shape(0))
    throw py::value_error("paged_attention_ragged: shapes");
  const py::ssize_t num_heads = q.shape(1), head_dim_v = v_cache.shape(2) / itemsize;
  Array<uint16_t> out({q.shape(0), num_heads, head_dim_v});
  Array<float> lse({q.shape(0), num_heads});
  const bool scaled = itemsize == 1;
  PagedAttentionRaggedParams params{
      .num_requests = q.shape(0),
      .q_len = 1,
      .num_q_heads = static_cast<int>(num_heads),
      .num_kv_heads = 1,
      .head_dim = static_cast<int>(q.shape(2)),
      .head_dim_v = static_cast<int>(head_dim_v),
      .dtype = Dtype::kBf16,
      .cache_dtype = dtype,
      .q = q.data(),
      .q_stride_token = num_heads * q.shape(2),
      .q_stride_head = q.shape(2),
      .k_cache = k_cache.data(),
      .v_cache = v_cache.data(),
      .k_cache_stride_page = k_cache.shape(1) * k_cache.shape(2),
      .k_cache_stride_row = k_cache.shape(2),
      .v_cache_stride_page = v_cache.shape(1) * v_cache.shape(2),
      .v_cache_stride_row = v_cache.shape(2),
      .num_pages = k_cache.shape(0),
      .page_size = k_cache.shape(1),
      .kv_indptr = kv_indptr.data(),
      .kv_indices = kv_indices.data(),
      .num_kv_indices = kv_indices.size(),
      .kv_last_page_len = kv_last_page_len.data(),
      .k_scale = scaled ? &scale : nullptr,
      .v_scale = scaled ? &scale : nullptr,
      .sm_scale = 0.125f,
      .logits_soft_cap = logits_soft_cap,
      .out = out.mutable_data(),
      .out_stride_token = num_heads * head_dim_v,
      .out_stride_head = head_dim_v,
      .lse = lse.mutable_data(),
      .num_splits = num_splits,
  };
  std::vector<float> workspace(num_splits > 1 ? ragged_workspace_size(params) : 0, NAN);
  params.workspace = workspace.data();
  const int64_t units = q.shape(0) * ceil_div<int64_t>(num_heads, cpu::kRaggedHeadTile) * num_splits;
  isa.paged_attention_ragged(params, 0, units);
  if (num_splits > 1) isa.merge_ragged_splits(params, 0, q.shape(0) * num_heads);
  return py::make_tuple(out, lse);
}

}  // namespace

// A kernel that joins isa_table() gets a function above and a .def() here.
void bind_isas(py::module_& m) {
  py::enum_<CacheDtype>(m, "CacheDtype")
      .value("bf16", CacheDtype::kBf16)
      .value("fp16", CacheDtype::kF16)
      .value("e4m3fn", CacheDtype::kE4m3fn)
      .value("e4m3fnuz", CacheDtype::kE4m3fnuz);
  py::class_<IsaKernels>(m, "Isa")
      .def_readonly("name", &IsaKernels::name)
      .def_readonly("supported", &IsaKernels::supported)
      .def("quantize_kv", &quantize_kv, py::arg("latent"), py::arg("slots").noconvert(),
           py::arg("kv_cache").noconvert(), py::kw_only(), py::arg("layout"), py::arg("page_size"),
           py::arg("scale") = py::none(), py::arg("fp8_max") = py::none())
      .def("dequantize_kv", &dequantize_kv, py::arg("kv_cache").noconvert(), py::arg("slots").noconvert(),
           py::kw_only(), py::arg("layout"), py::arg("page_size"), py::arg("scale") = py::none())
      .def("norm_rope_insert", &norm_rope_insert, py::arg("q").noconvert(), py::arg("kv").noconvert(),
           py::arg("k_rope").noconvert(), py::arg("weight").noconvert(), py::arg("cos").noconvert(),
           py::arg("sin").noconvert(), py::arg("slots").noconvert(), py::arg("kv_cache").noconvert(),
           py::kw_only(), py::arg("layout"), py::arg("page_size"), py::arg("scale") = py::none(),
           py::arg("norm_q") = true, py::arg("streamed") = false)
      .def("inverse_rope", &inverse_rope, py::arg("o").noconvert(), py::arg("cos").noconvert(),
           py::arg("sin").noconvert(), py::kw_only(), py::arg("tile"), py::arg("power_of_two"),
           py::arg("streamed") = false)
      .def("compress_kv", &compress_kv, py::arg("kv_score").noconvert(), py::arg("state").noconvert(),
           py::arg("ape").noconvert(), py::arg("weight").noconvert(), py::arg("cos").noconvert(),
           py::arg("sin").noconvert(), py::arg("kv_cache").noconvert(), py::kw_only(), py::arg("start"),
           py::arg("ratio"), py::arg("online"), py::arg("round_pooled"),
           py::arg("cuts") = std::vector<int64_t>{})
      .def("sparse_attention", &sparse_attention, py::arg("q").noconvert(), py::arg("kv_cache").noconvert(),
           py::arg("indices").noconvert(), py::kw_only(), py::arg("layout"), py::arg("page_size"),
           py::arg("sm_scale"), py::arg("scale"), py::arg("attn_sink").noconvert(),
           py::arg("extra_kv_cache") = py::none(), py::arg("extra_layout") = -1)
      .def("paged_attention_ragged", &paged_attention_ragged, py::arg("q").noconvert(),
           py::arg("k_cache").noconvert(), py::arg("v_cache").noconvert(), py::arg("kv_indptr").noconvert(),
           py::arg("kv_indices").noconvert(), py::arg("kv_last_page_len").noconvert(), py::kw_only(),
           py::arg("dtype"), py::arg("scale"), py::arg("logits_soft_cap"), py::arg("num_splits") = 1);

  py::list isas;
  for (const IsaKernels& isa : cpu::isa_table())
    isas.append(py::cast(&isa, py::return_value_policy::reference));
  m.attr("ISAS") = isas;
  m.attr("best_isa") = cpu::best_isa().name;
}

}  // namespace mla_fp8::test
