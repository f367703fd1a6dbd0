// Registers every op of the package with torch. The CPU library defines the schemas and is always loaded
// first; each library registers the ops that it implements for its device. ROCm tensors use PyTorch's CUDA
// key. A library that tests GPU code without a GPU (MLA_FP8_EMULATED) has schemas and a name of its own, and
// takes CPU tensors.
#include "registration.h"

#include <sstream>

#include "common/index_layout.h"
#include "common/torch.h"

namespace mla_fp8 {

#if !MLA_FP8_WITH_CUDA && !MLA_FP8_WITH_HIP
// The layout table for layout.py: a line of column names, then a line a layout, in KvLayoutId's order.
std::string kv_layout_table() {
  std::ostringstream out;
  out.precision(7);  // 2^-9 needs as many digits
  out << "name nope_dim rope_dim nope_format rope_format scale_format scale_inline tile_dim amax_floor "
         "scale_floor page_align scale_bytes rope_offset token_stride bytes_per_token head_dim_v extra_of";
  for (int i = 0; i < kNumKvLayouts; ++i) {
    const KvLayout l = kv_layout(static_cast<KvLayoutId>(i));
    out << '\n'
        << l.name << ' ' << l.nope_dim << ' ' << l.rope_dim << ' ' << name(l.nope_format) << ' '
        << name(l.rope_format) << ' ' << name(l.scale_format) << ' ' << l.scale_inline() << ' ' << l.tile_dim
        << ' ' << l.amax_floor << ' ' << l.scale_floor << ' ' << l.page_align << ' ' << l.scale_bytes() << ' '
        << l.rope_offset() << ' ' << l.token_stride() << ' ' << l.bytes_per_token() << ' ' << kHeadDimV
        << ' ';
    const char* separator = "";  // layouts of a first cache to which it may be the second; "-": none
    for (const KvPair& pair : kMixedPairs)
      if (pair.extra == static_cast<KvLayoutId>(i))
        out << std::exchange(separator, ",") << kv_layout(pair.first).name;
    if (!*separator) out << '-';
  }
  return out.str();
}

// The table of index caches' layouts for index_layout.py.
std::string index_layout_table() {
  std::ostringstream out;
  out.precision(9);  // enough for every float
  out << "name value_bytes scale_bytes amax_floor index_dim";
  for (int i = 0; i < kNumIndexLayouts; ++i) {
    const IndexLayout l = index_layout(static_cast<IndexLayoutId>(i));
    out << '\n'
        << l.name << ' ' << l.value_bytes << ' ' << l.scale_bytes << ' ' << l.amax_floor << ' ' << kIndexDim;
  }
  return out.str();
}
#endif

namespace {

// Counts a write of a tensor. torch counts writes (`_version`) for autograd, and for whoever keeps what was
// derived from a tensor. Its own ops count before their kernel; the C API has no call for that. A copy of a
// tensor onto itself counts a write and does nothing else: no launch, no byte moved. Both calls take 0.15 us.
// Tensors of inference mode have no version, and torch would refuse to count outside of that mode.
void count_write(const Tensor& t) {
  StableIValue argument_then_result = torch::stable::detail::from(t);
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::is_inference", "", &argument_then_result, TORCH_ABI_VERSION));
  if (!torch::stable::detail::to<bool>(argument_then_result))
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(t.get(), t.get(), 0));
}

template <class Parameter>
void count_write_if_written([[maybe_unused]] const std::remove_cvref_t<Parameter>& argument) {
  if constexpr (std::is_same_v<Parameter, Tensor>) count_write(argument);
  if constexpr (std::is_same_v<Parameter, OptionalTensor>)
    if (argument) count_write(*argument);
  if constexpr (std::is_same_v<Parameter, std::vector<Tensor>>)
    for (const Tensor& t : argument) count_write(t);
}

// Autograd follows nothing while this object lives.
class NoGrad {
 public:
  NoGrad() : was_enabled_(aoti_torch_grad_mode_is_enabled()) { set(false); }
  ~NoGrad() { set(true); }
  NoGrad(const NoGrad&) = delete;

 private:
  void set(bool enabled) const {
    if (was_enabled_) aoti_torch_grad_mode_set_enabled(enabled);
  }
  const bool was_enabled_;
};

// An op as torch calls it. It runs; then what it wrote has a new version. A refused call has written nothing.
template <auto* op>
struct Versioned;
template <class Result, class... Parameters, Result (*op)(Parameters...)>
struct Versioned<op> {
  static constexpr bool kWrites =
      ((std::is_same_v<Parameters, Tensor> || std::is_same_v<Parameters, OptionalTensor> ||
        std::is_same_v<Parameters, std::vector<Tensor>>) ||
       ...);

  static Result call(Parameters... arguments) {
    if constexpr (!kWrites) {
      return op(arguments...);
    } else if constexpr (std::is_void_v<Result>) {
      op(arguments...);
      count(arguments...);
    } else {
      Result result = op(arguments...);
      count(arguments...);
      return result;
    }
  }
  static void count(const std::remove_cvref_t<Parameters>&... arguments) {
    const NoGrad no_grad;
    (count_write_if_written<Parameters>(arguments), ...);
  }
};

}  // namespace
}  // namespace mla_fp8

#define IMPL(op) m.impl(#op, TORCH_BOX(&mla_fp8::Versioned<&mla_fp8::op>::call));

#if MLA_FP8_EMULATED
#define MLA_FP8_LIBRARY mla_fp8_emulated
#else
#define MLA_FP8_LIBRARY mla_fp8
#endif

#if MLA_FP8_WITH_CUDA && !MLA_FP8_EMULATED

STABLE_TORCH_LIBRARY_IMPL(mla_fp8, CUDA, m){MLA_FP8_CUDA_OPS(IMPL)}

#elif MLA_FP8_WITH_HIP && !MLA_FP8_EMULATED

STABLE_TORCH_LIBRARY_IMPL(mla_fp8, CUDA, m){MLA_FP8_HIP_OPS(IMPL)}

#else

// Defines a functional op and its _out twin, whose mutable arguments are the outputs. The twin returns
// nothing: an op that returns an alias cannot go through torch.compile.
#define DEF(op, arguments, returns) m.def(#op "(" arguments ") -> " returns);
#define DEF_WITH_OUT(op, arguments, returns, outputs) \
  DEF(op, arguments, returns)                         \
  m.def(#op "_out(" arguments ", " outputs ") -> ()");

#define NORM_ROPE_INSERT_ARGUMENTS                                                     \
  "Tensor? kv_weight, Tensor cos, Tensor sin, Tensor positions, Tensor slot_mapping, " \
  "Tensor(a!) kv_cache, *, int layout, int page_size, float eps, "

#define COMBINE_ARGUMENTS                                                                                \
  "Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor gather_lens, Tensor "            \
  "compressed_base, "                                                                                    \
  "Tensor swa_base, *, SymInt window_size, SymInt compress_ratio, SymInt topk, Tensor? query_pos=None, " \
  "Tensor? compressed_lens=None"

#define PAGED_SPARSE_ARGUMENTS                                                                \
  "Tensor q, Tensor kv_cache, Tensor indices, *, int layout, int page_size, float sm_scale, " \
  "Tensor? topk_length=None, Tensor? attn_sink=None, Tensor? extra_kv_cache=None, Tensor? "   \
  "extra_indices=None, "                                                                      \
  "Tensor? extra_topk_length=None, int? extra_page_size=None, int? extra_layout=None, "       \
  "Tensor? scale=None, int query_groups=1, Tensor? shared_keys=None, Tensor? query_start_loc=None"

#define WINDOW_ARGUMENTS                                                                       \
  "Tensor q, Tensor kv_cache, Tensor page_table, Tensor query_start_loc, Tensor seq_lens, *, " \
  "int layout, int page_size, int window_size, float sm_scale, Tensor? attn_sink=None, "       \
  "Tensor? extra_kv_cache=None, Tensor? extra_indices=None, Tensor? extra_topk_length=None, "  \
  "int? extra_page_size=None, int? extra_layout=None, Tensor? scale=None, Tensor? extra_page_table=None"
// batch_invariant computes no largest logits, which the functional ops return.
#define SPARSE_PREFILL_OUTPUTS                                                           \
  "Tensor(a!) out, Tensor(b!)? max_logits, Tensor(c!) lse, Tensor(d!)? workspace=None, " \
  "bool allocate_workspace=False, bool batch_invariant=False"
#define KERNEL_ARGUMENTS                                                                                \
  "bool max_logits=True, str kernel=\"portable\", str schedule=\"split\", int heads=16, int splits=1, " \
  "int producers=0"

#define RAGGED_OPTIONS "float logits_soft_cap=0.0, Tensor? attn_sink=None, int q_len=1, int num_splits=0"
#define RAGGED_OUTPUTS "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace=None"

#define PAGED_INDEX_ARGUMENTS                                                              \
  "Tensor q, Tensor weights, Tensor index_cache, Tensor page_table, Tensor? seq_lens, *, " \
  "int layout, int page_size, Tensor? q_scale=None, Tensor? row_lens=None, "               \
  "Tensor? query_start_loc=None, int next_n=1, int compress_ratio=1"
#define RAGGED_INDEX_ARGUMENTS                                                            \
  "Tensor q, Tensor weights, Tensor k, Tensor k_scale, Tensor k_start, Tensor k_end, *, " \
  "Tensor? q_scale=None"
#define TOPK_ARGUMENTS \
  ", SymInt topk, int pin_first=0, int pin_last=0, Tensor? candidate_blocks=None, int block_size=8, "
#define PUBLISH_ARGUMENTS ", SymInt topk, SymInt num_blocks, int block_size=8, "
#define PAGED_SLOTS_ARGUMENTS "Tensor? slot_page_table=None, int? slot_page_size=None"
#define RAGGED_SLOTS_ARGUMENTS "Tensor? k_slots=None"
#define TOPK_RESULTS "Tensor positions, Tensor slots, Tensor lens"
#define TOPK_OUTPUTS "Tensor(a!) out_positions, Tensor(b!)? out_slots, Tensor(c!) out_lens, "
#define TOPK_SCRATCH "Tensor(d!)? workspace=None, Tensor(e!)? counters=None, Tensor(f!)? out_scores=None"
#define DEF_TOPK(op, index_arguments, slots_arguments)                                   \
  DEF_WITH_OUT(op, index_arguments TOPK_ARGUMENTS slots_arguments, "(" TOPK_RESULTS ")", \
               TOPK_OUTPUTS TOPK_SCRATCH)                                                \
  DEF_WITH_OUT(op##_blocks, index_arguments PUBLISH_ARGUMENTS slots_arguments,           \
               "(" TOPK_RESULTS ", Tensor blocks)", TOPK_OUTPUTS "Tensor(g!) out_blocks, " TOPK_SCRATCH)

STABLE_TORCH_LIBRARY(MLA_FP8_LIBRARY, m) {
  m.def("kv_layout_table() -> str");
  m.def("index_layout_table() -> str");
  m.def("attention_table() -> str");
  m.def(
      "index_topk_workspace(int num_rows, int topk, int num_sms, int num_candidates=0, int num_positions=0) "
      "-> int");
  m.def("index_topk_counters(int num_sms) -> int");
  m.def(
      "sparse_attention_workspace(int num_tokens, int num_q_heads, int num_sms, bool batch_invariant=False) "
      "-> int");
  m.def("cpu_isa() -> str");

  DEF(quantize_kv,
      "Tensor latent, Tensor slot_mapping, Tensor(a!) kv_cache, *, int layout, int page_size, "
      "Tensor? scale=None, Tensor? rope=None, float? fp8_max=None, bool zero_rope=False",
      "()")
  DEF(k_norm_rope_insert, "Tensor kv, " NORM_ROPE_INSERT_ARGUMENTS "Tensor? k_rope=None, Tensor? scale=None",
      "()")
  DEF_WITH_OUT(qk_norm_rope_insert,
               "Tensor q, Tensor kv, " NORM_ROPE_INSERT_ARGUMENTS
               "bool norm_q, Tensor? k_rope=None, SymInt? num_heads=None, Tensor? scale=None",
               "Tensor", "Tensor(b!) out_q")
  DEF(prepare_keys,
      "Tensor kv, Tensor? kv_weight, Tensor cos, Tensor sin, Tensor positions, Tensor slot_mapping, "
      "Tensor(a!) kv_cache, Tensor? k_rope=None, Tensor? q_a=None, Tensor? q_a_weight=None, "
      "Tensor? index_k=None, Tensor? index_k_weight=None, Tensor? index_k_bias=None, "
      "Tensor? index_cos=None, Tensor? index_sin=None, Tensor? index_slot_mapping=None, "
      "Tensor(b!)? index_cache=None, *, int layout, int page_size, float eps, Tensor? scale=None, "
      "int index_layout=0, int? index_page_size=None, float index_eps=1e-06, bool index_neox=False, "
      "bool index_rope_first=False, bool hadamard=False, str scale_format=\"ue8m0\", "
      "float? amax_floor=None, bool reciprocal=False, Tensor(c!)? out_q_a=None, Tensor(d!)? out_kv=None, "
      "Tensor(e!)? out_k_rope=None",
      "()")
  DEF_WITH_OUT(
      prepare_queries,
      "Tensor? q_pe, Tensor? index_q, Tensor? index_weights, Tensor cos, Tensor sin, Tensor positions, "
      "Tensor? index_cos=None, Tensor? index_sin=None, *, "
      "bool neox=False, bool index_neox=False, bool index_rope_first=False, bool hadamard=False, "
      "int layout=0, str scale_format=\"ue8m0\", float? amax_floor=None, bool reciprocal=False, "
      "float weight_scale=1.0, float head_scale=1.0",
      "(Tensor q_pe, Tensor index_q, Tensor index_weights, Tensor index_scale)",
      "Tensor(a!)? out_q_pe, Tensor(b!)? out_index_q, Tensor(c!)? out_index_weights, "
      "Tensor(d!)? out_index_scale")
  DEF_WITH_OUT(dequantize_kv,
               "Tensor kv_cache, Tensor slots, *, int layout, int page_size, Tensor? scale=None", "Tensor",
               "Tensor(a!) out")
  DEF(dequantize_kv_paged,
      "Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor gather_lens, Tensor row_offsets, *, "
      "int layout, int page_size, SymInt num_rows, Tensor? scale=None",
      "Tensor")
  DEF(dequantize_kv_paged_out,
      "Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor gather_lens, Tensor row_offsets, *, "
      "int layout, int page_size, Tensor? scale=None, Tensor(a!) out",
      "()")
  DEF_WITH_OUT(combine_topk_swa_indices, COMBINE_ARGUMENTS, "(Tensor indices, Tensor lens)",
               "Tensor(a!) out_indices, Tensor(b!) out_lens")
  DEF_WITH_OUT(combine_topk_swa_indices_ragged, COMBINE_ARGUMENTS, "(Tensor indptr, Tensor indices)",
               "Tensor(a!) out_indptr, Tensor(b!) out_indices")
  DEF_WITH_OUT(
      build_swa_token_ids,
      "Tensor seq_lens, Tensor extend_seq_lens, Tensor req_pool_indices, Tensor req_to_token, "
      "Tensor full_to_swa, *, SymInt window_size, SymInt capacity",
      "(Tensor ids, Tensor first_pos, Tensor gather_lens, Tensor offsets)",
      "Tensor(a!) out_ids, Tensor(b!) out_first_pos, Tensor(c!) out_gather_lens, Tensor(d!) out_offsets")
  DEF_WITH_OUT(pad_q_heads, "Tensor q, Tensor? attn_sink, *, SymInt num_heads",
               "(Tensor q, Tensor attn_sink)", "Tensor(a!) out_q, Tensor(b!) out_attn_sink")
  DEF(compress_kv,
      "Tensor kv_score, Tensor query_start_loc, Tensor start_pos, Tensor(a!)? state, Tensor state_slots, "
      "Tensor? ape, Tensor norm_weight, Tensor cos, Tensor sin, Tensor slot_mapping, Tensor(b!) kv_cache, *, "
      "int ratio, int layout, int page_size, float eps, bool online=False, bool round_pooled=True, "
      "Tensor? scale=None, Tensor(c!)? out_latent=None",
      "()")
  DEF_WITH_OUT(inverse_rope, "Tensor o, Tensor cos, Tensor sin, Tensor positions", "Tensor", "Tensor(a!) out")
  DEF_WITH_OUT(inverse_rope_quantize,
               "Tensor o, Tensor cos, Tensor sin, Tensor positions, *, SymInt num_groups, int tile=128, "
               "bool power_of_two=True",
               "(Tensor out, Tensor out_scale)", "Tensor(a!) out, Tensor(b!) out_scale")
  DEF_WITH_OUT(sparse_prefill,
               "Tensor q, Tensor kv, Tensor indices, *, float sm_scale, Tensor? attn_sink=None, "
               "Tensor? topk_length=None",
               "(Tensor out, Tensor max_logits, Tensor lse)", SPARSE_PREFILL_OUTPUTS)
  DEF_WITH_OUT(sparse_prefill_paged, PAGED_SPARSE_ARGUMENTS, "(Tensor out, Tensor max_logits, Tensor lse)",
               SPARSE_PREFILL_OUTPUTS)
  DEF_WITH_OUT(sparse_prefill_window, WINDOW_ARGUMENTS, "(Tensor out, Tensor max_logits, Tensor lse)",
               SPARSE_PREFILL_OUTPUTS)
  DEF_WITH_OUT(sparse_decode, PAGED_SPARSE_ARGUMENTS ", bool batch_invariant=False",
               "(Tensor out, Tensor lse)",
               "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? workspace=None, bool allocate_workspace=False")
  // For compat.flash_mla: with FlashMLA's shapes.
  DEF(_flash_mla_decode,
      "Tensor q, Tensor kv_cache, Tensor indices, int layout, float sm_scale, Tensor? topk_length=None, "
      "Tensor? attn_sink=None, Tensor? extra_kv_cache=None, Tensor? extra_indices=None, "
      "Tensor? extra_topk_length=None, int? extra_layout=None, int query_groups=1, Tensor? shared_keys=None",
      "(Tensor out, Tensor lse)")
  DEF(_flash_mla_prefill,
      "Tensor q, Tensor kv, Tensor indices, float sm_scale, Tensor? attn_sink=None, Tensor? topk_length=None",
      "(Tensor out, Tensor max_logits, Tensor lse)")
  DEF_WITH_OUT(plan_shared_keys,
               "Tensor indices, *, int query_groups, int num_q_heads, int layout, int num_slots, "
               "Tensor? topk_length=None, Tensor? extra_indices=None, Tensor? extra_topk_length=None, "
               "int? extra_num_slots=None, Tensor? query_start_loc=None",
               "Tensor", "Tensor(a!) out")
  // For tests on CUDA: a kernel that the caller names (csrc/cuda/sparse_attention/plan.h). Without max_logits
  // that output has no elements.
  DEF(_sparse_attention, PAGED_SPARSE_ARGUMENTS ", " KERNEL_ARGUMENTS,
      "(Tensor out, Tensor max_logits, Tensor lse)")
  DEF(_sparse_attention_window, WINDOW_ARGUMENTS ", " KERNEL_ARGUMENTS,
      "(Tensor out, Tensor max_logits, Tensor lse)")
  DEF_WITH_OUT(paged_attention_ragged,
               "Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_indptr, Tensor kv_indices, "
               "Tensor kv_last_page_len, *, float sm_scale, int page_size, Tensor? k_scale=None, "
               "Tensor? v_scale=None, " RAGGED_OPTIONS,
               "(Tensor out, Tensor lse)", RAGGED_OUTPUTS)
  DEF_WITH_OUT(paged_attention_ragged_latent,
               "Tensor q, Tensor kv_cache, Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, *, "
               "int layout, int page_size, float sm_scale, Tensor? scale=None, " RAGGED_OPTIONS,
               "(Tensor out, Tensor lse)", RAGGED_OUTPUTS)
  DEF(quantize_index_k,
      "Tensor k, Tensor slot_mapping, Tensor(a!) index_cache, *, int layout, int page_size, "
      "str scale_format=\"ue8m0\", float? amax_floor=None, bool hadamard=False, bool reciprocal=False",
      "()")
  DEF(pool_index_k,
      "Tensor k, Tensor score, Tensor query_start_loc, Tensor start_pos, Tensor(a!) state_k, "
      "Tensor(b!) state_score, Tensor state_slots, Tensor ape, Tensor slot_mapping, Tensor(c!) index_cache, "
      "*, "
      "int page_size",
      "()")
  DEF_WITH_OUT(topk_to_slots,
               "Tensor positions, Tensor page_table, *, int page_size, Tensor? row_to_request=None, "
               "int next_n=1, int group_size=1, Tensor? token_lens=None, Tensor? lens=None, "
               "int world_size=1, int rank=0, int interleave=1, bool by_slot=False",
               "(Tensor slots, Tensor lens)", "Tensor(a!) out_slots, Tensor(b!) out_lens")
  DEF_WITH_OUT(resolve_hot_rows,
               "Tensor entries, Tensor(a!) hot_entries, Tensor(b!) hot_order, Tensor? host_page_table=None, "
               "Tensor? hot_page_table=None, Tensor? resident_page_table=None, *, int num_host_rows, "
               "int host_page_size=1, int hot_page_size=1, int first_page=0, bool by_entry=False, "
               "Tensor? row_to_request=None, int next_n=1, Tensor? state_rows=None, Tensor? entry_lens=None, "
               "Tensor? num_valid_rows=None, Tensor(c!)? counters=None",
               "(Tensor hot_rows, Tensor miss_host_rows, Tensor miss_hot_rows, Tensor miss_counts)",
               "Tensor(d!) out_hot_rows, Tensor(e!) out_miss_host_rows, Tensor(f!) out_miss_hot_rows, "
               "Tensor(g!) out_miss_counts, Tensor(h!)? out_attention_rows=None, "
               "int attention_page_stride=0, Tensor(i!)? out_lens=None, Tensor(j!)? out_hit_rows=None")
#define COPY_OPTIONS "*, int layout, int host_page_size, int hot_page_size, int max_blocks=16"
  DEF(copy_host_rows,
      "Tensor[] host_caches, Tensor(a!)[] hot_caches, Tensor host_rows, Tensor hot_rows, "
      "Tensor? counts=None, Tensor? num_valid_rows=None, " COPY_OPTIONS,
      "()")
  DEF(store_host_rows,
      "Tensor[] hot_caches, Tensor(a!)[] host_caches, Tensor hot_rows, Tensor host_rows, " COPY_OPTIONS, "()")
  // For callers that have addresses alone (compat): it writes no tensor.
  DEF(_copy_rows_at,
      "Tensor from_addresses, Tensor to_addresses, Tensor from_rows, Tensor to_rows, *, int layout, "
      "int from_page_size, int to_page_size",
      "()")
  DEF(forget_rows,
      "Tensor entries, Tensor(a!) hot_entries, Tensor? row_to_request=None, Tensor? state_rows=None", "()")
  DEF_WITH_OUT(index_logits, PAGED_INDEX_ARGUMENTS ", SymInt width", "Tensor", "Tensor(a!) out")
  DEF_WITH_OUT(index_logits_ragged, RAGGED_INDEX_ARGUMENTS, "Tensor", "Tensor(a!) out")
  DEF_TOPK(index_topk, PAGED_INDEX_ARGUMENTS, PAGED_SLOTS_ARGUMENTS)
  DEF_TOPK(index_topk_ragged, RAGGED_INDEX_ARGUMENTS, RAGGED_SLOTS_ARGUMENTS)
  DEF(_warmup, "Tensor device_of", "()")
  DEF_WITH_OUT(merge_attention_states, "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b",
               "(Tensor out, Tensor lse)", "Tensor(a!) out, Tensor(b!) lse")
  DEF_WITH_OUT(merge_partial_states,
               "Tensor outs, Tensor lses, *, Tensor? attn_sink=None, float base=2.7182818284590451",
               "(Tensor out, Tensor lse)", "Tensor(a!) out, Tensor(b!) lse")
  // CUDA only, for mla_fp8.context_parallel.
#define PEERS ", int[] peers, int rank, float time_limit, Tensor(a!) flags, Tensor(b!) calls, "
#define DEF_EXCHANGE(op, arguments, written) DEF(op, arguments PEERS written, "()")
  DEF_EXCHANGE(_gather_queries, "Tensor q, Tensor? q_rope=None, *", "Tensor(c!) queries")
  DEF_EXCHANGE(_exchange_states,
               "Tensor out, Tensor lse, *, Tensor? attn_sink=None, float base=2.7182818284590451",
               "Tensor(c!) outs, Tensor(d!) lses, Tensor(e!) merged, Tensor(f!) merged_lse")
  DEF_EXCHANGE(_exchange_scores,
               "Tensor scores, Tensor positions, *, SymInt topk, int? interleave=None, "
               "Tensor? page_table=None, int page_size=1, int next_n=1",
               "Tensor(c!) candidates, Tensor(d!) out_positions, Tensor(e!)? out_slots, Tensor(f!) out_lens")
  DEF_WITH_OUT(merge_topk,
               "Tensor scores, Tensor positions, *, SymInt topk, int? rank=None, int? interleave=None",
               "(Tensor positions, Tensor lens)", "Tensor(a!) out_positions, Tensor(b!) out_lens")
}

#if MLA_FP8_EMULATED

#if MLA_FP8_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mla_fp8_emulated, CPU, m){MLA_FP8_CUDA_OPS(IMPL)}
#else
STABLE_TORCH_LIBRARY_IMPL(mla_fp8_emulated, CPU, m){MLA_FP8_HIP_OPS(IMPL)}
#endif

#else
STABLE_TORCH_LIBRARY_IMPL(mla_fp8, CompositeExplicitAutograd, m){
    IMPL(kv_layout_table) IMPL(index_layout_table) IMPL(attention_table) IMPL(index_topk_workspace)
        IMPL(index_topk_counters) IMPL(sparse_attention_workspace) IMPL(cpu_isa)}

STABLE_TORCH_LIBRARY_IMPL(mla_fp8, CPU, m) {
  MLA_FP8_CPU_OPS(IMPL)
}

#endif
#endif
