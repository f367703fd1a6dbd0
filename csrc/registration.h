#pragma once
// Lists the ops of each library, and declares their C++ entry points (ops/*.cpp) with the schemas' arguments.
// An op writes a tensor that it takes by value, and only reads one that it takes by reference.
#include <string>
#include <tuple>
#include <vector>

#include "common/torch.h"

// One line for each op file. An op that is missing from a list raises NotImplementedError on that device.
// clang-format off
#define MLA_FP8_COMMON_OPS(X)                               \
  X(quantize_kv)                                            \
  X(k_norm_rope_insert)                                     \
  X(qk_norm_rope_insert) X(qk_norm_rope_insert_out)         \
  X(dequantize_kv) X(dequantize_kv_out)                     \
  X(dequantize_kv_paged) X(dequantize_kv_paged_out)         \
  X(combine_topk_swa_indices)                               \
  X(combine_topk_swa_indices_out)                           \
  X(combine_topk_swa_indices_ragged)                        \
  X(combine_topk_swa_indices_ragged_out)                    \
  X(build_swa_token_ids) X(build_swa_token_ids_out)         \
  X(pad_q_heads) X(pad_q_heads_out)                         \
  X(compress_kv)                                            \
  X(inverse_rope) X(inverse_rope_out)                       \
  X(inverse_rope_quantize) X(inverse_rope_quantize_out)     \
  X(merge_attention_states) X(merge_attention_states_out)   \
  X(merge_partial_states) X(merge_partial_states_out)       \
  X(paged_attention_ragged) X(paged_attention_ragged_out)   \
  X(paged_attention_ragged_latent)                          \
  X(paged_attention_ragged_latent_out)                      \
  X(_warmup)

#define MLA_FP8_INDEX_OPS(X)                                \
  X(plan_shared_keys) X(plan_shared_keys_out)               \
  X(quantize_index_k)                                       \
  X(pool_index_k)                                           \
  X(prepare_keys)                                           \
  X(prepare_queries) X(prepare_queries_out)                 \
  X(topk_to_slots) X(topk_to_slots_out)                     \
  X(resolve_hot_rows) X(resolve_hot_rows_out)               \
  X(copy_host_rows) X(store_host_rows) X(forget_rows)       \
  X(_copy_rows_at)                                          \
  X(index_logits) X(index_logits_out)                       \
  X(index_logits_ragged) X(index_logits_ragged_out)         \
  X(index_topk) X(index_topk_out)                           \
  X(index_topk_ragged) X(index_topk_ragged_out)             \
  X(index_topk_blocks) X(index_topk_blocks_out)             \
  X(index_topk_ragged_blocks) X(index_topk_ragged_blocks_out) \
  X(merge_topk) X(merge_topk_out)

#define MLA_FP8_SPARSE_OPS(X)                               \
  X(sparse_prefill) X(sparse_prefill_out)                   \
  X(sparse_prefill_paged) X(sparse_prefill_paged_out)       \
  X(sparse_prefill_window) X(sparse_prefill_window_out)     \
  X(sparse_decode) X(sparse_decode_out)

// On HIP, callers go to the ops above: its library has no room.
#define MLA_FP8_FLASH_MLA_OPS(X) X(_flash_mla_decode) X(_flash_mla_prefill)

#define MLA_FP8_CPU_OPS(X)                                  \
  MLA_FP8_COMMON_OPS(X) MLA_FP8_SPARSE_OPS(X)               \
  MLA_FP8_INDEX_OPS(X) MLA_FP8_FLASH_MLA_OPS(X)
#define MLA_FP8_CUDA_OPS(X)                                 \
  MLA_FP8_COMMON_OPS(X) MLA_FP8_SPARSE_OPS(X)               \
  MLA_FP8_INDEX_OPS(X) MLA_FP8_FLASH_MLA_OPS(X)             \
  X(_sparse_attention) X(_sparse_attention_window)          \
  X(_gather_queries) X(_exchange_states) X(_exchange_scores)
#define MLA_FP8_HIP_OPS(X)                                  \
  MLA_FP8_COMMON_OPS(X) MLA_FP8_SPARSE_OPS(X)               \
  X(_sparse_attention) X(_sparse_attention_window)
// clang-format on

namespace mla_fp8 {

std::string kv_layout_table();
std::string index_layout_table();
std::string attention_table();
std::string cpu_isa();
void _warmup(const Tensor& device_of);

void quantize_kv(const Tensor& latent, const Tensor& slot_mapping, Tensor kv_cache, int64_t layout,
                 int64_t page_size, const OptionalTensor& scale, const OptionalTensor& rope,
                 std::optional<double> fp8_max, bool zero_rope);

#define MLA_K_NORM_ROPE_INSERT_ARGUMENTS                                                    \
  const Tensor &kv, const OptionalTensor &kv_weight, const Tensor &cos, const Tensor &sin,  \
      const Tensor &positions, const Tensor &slot_mapping, Tensor kv_cache, int64_t layout, \
      int64_t page_size, double eps, const OptionalTensor &k_rope, const OptionalTensor &scale
void k_norm_rope_insert(MLA_K_NORM_ROPE_INSERT_ARGUMENTS);
#define MLA_QK_NORM_ROPE_INSERT_ARGUMENTS                                                                   \
  const Tensor &q, const Tensor &kv, const OptionalTensor &kv_weight, const Tensor &cos, const Tensor &sin, \
      const Tensor &positions, const Tensor &slot_mapping, Tensor kv_cache, int64_t layout,                 \
      int64_t page_size, double eps, bool norm_q, const OptionalTensor &k_rope,                             \
      std::optional<int64_t> num_heads, const OptionalTensor &scale
Tensor qk_norm_rope_insert(MLA_QK_NORM_ROPE_INSERT_ARGUMENTS);
void qk_norm_rope_insert_out(MLA_QK_NORM_ROPE_INSERT_ARGUMENTS, Tensor out_q);

Tensor dequantize_kv(const Tensor& kv_cache, const Tensor& slots, int64_t layout, int64_t page_size,
                     const OptionalTensor& scale);
void dequantize_kv_out(const Tensor& kv_cache, const Tensor& slots, int64_t layout, int64_t page_size,
                       const OptionalTensor& scale, Tensor out);
Tensor dequantize_kv_paged(const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens,
                           const Tensor& gather_lens, const Tensor& row_offsets, int64_t layout,
                           int64_t page_size, int64_t num_rows, const OptionalTensor& scale);
void dequantize_kv_paged_out(const Tensor& kv_cache, const Tensor& page_table, const Tensor& seq_lens,
                             const Tensor& gather_lens, const Tensor& row_offsets, int64_t layout,
                             int64_t page_size, const OptionalTensor& scale, Tensor out);

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void prepare_keys(const Tensor& kv, const OptionalTensor& kv_weight, const Tensor& cos, const Tensor& sin,
                  const Tensor& positions, const Tensor& slot_mapping, Tensor kv_cache,
                  const OptionalTensor& k_rope, const OptionalTensor& q_a, const OptionalTensor& q_a_weight,
                  const OptionalTensor& index_k, const OptionalTensor& index_k_weight,
                  const OptionalTensor& index_k_bias, const OptionalTensor& index_cos,
                  const OptionalTensor& index_sin, const OptionalTensor& index_slot_mapping,
                  OptionalTensor index_cache, int64_t layout, int64_t page_size, double eps,
                  const OptionalTensor& scale, int64_t index_layout, std::optional<int64_t> index_page_size,
                  double index_eps, bool index_neox, bool index_rope_first, bool hadamard,
                  std::string scale_format, std::optional<double> amax_floor, bool reciprocal,
                  OptionalTensor out_q_a, OptionalTensor out_kv, OptionalTensor out_k_rope);

#define MLA_PREPARE_QUERIES_ARGUMENTS                                                                    \
  const OptionalTensor &q_pe, const OptionalTensor &index_q, const OptionalTensor &index_weights,        \
      const Tensor &cos, const Tensor &sin, const Tensor &positions, const OptionalTensor &index_cos,    \
      const OptionalTensor &index_sin, bool neox, bool index_neox, bool index_rope_first, bool hadamard, \
      int64_t layout, std::string scale_format, std::optional<double> amax_floor, bool reciprocal,       \
      double weight_scale, double head_scale
FourTensors prepare_queries(MLA_PREPARE_QUERIES_ARGUMENTS);
void prepare_queries_out(MLA_PREPARE_QUERIES_ARGUMENTS, OptionalTensor out_q_pe, OptionalTensor out_index_q,
                         OptionalTensor out_index_weights, OptionalTensor out_index_scale);

#define MLA_COMBINE_ARGUMENTS                                                                                \
  const Tensor &topk_indices, const Tensor &query_start_loc, const Tensor &seq_lens,                         \
      const Tensor &gather_lens, const Tensor &compressed_base, const Tensor &swa_base, int64_t window_size, \
      int64_t compress_ratio, int64_t topk, const OptionalTensor &query_pos,                                 \
      const OptionalTensor &compressed_lens
TwoTensors combine_topk_swa_indices(MLA_COMBINE_ARGUMENTS);
void combine_topk_swa_indices_out(MLA_COMBINE_ARGUMENTS, Tensor out_indices, Tensor out_lens);
TwoTensors combine_topk_swa_indices_ragged(MLA_COMBINE_ARGUMENTS);
void combine_topk_swa_indices_ragged_out(MLA_COMBINE_ARGUMENTS, Tensor out_indptr, Tensor out_indices);

FourTensors build_swa_token_ids(const Tensor& seq_lens, const Tensor& extend_seq_lens,
                                const Tensor& req_pool_indices, const Tensor& req_to_token,
                                const Tensor& full_to_swa, int64_t window_size, int64_t capacity);
void build_swa_token_ids_out(const Tensor& seq_lens, const Tensor& extend_seq_lens,
                             const Tensor& req_pool_indices, const Tensor& req_to_token,
                             const Tensor& full_to_swa, int64_t window_size, int64_t capacity, Tensor out_ids,
                             Tensor out_first_pos, Tensor out_gather_lens, Tensor out_offsets);

TwoTensors pad_q_heads(const Tensor& q, const OptionalTensor& attn_sink, int64_t num_heads);
void pad_q_heads_out(const Tensor& q, const OptionalTensor& attn_sink, int64_t num_heads, Tensor out_q,
                     Tensor out_attn_sink);

void compress_kv(const Tensor& kv_score, const Tensor& query_start_loc, const Tensor& start_pos,
                 OptionalTensor state, const Tensor& state_slots, const OptionalTensor& ape,
                 const Tensor& norm_weight, const Tensor& cos, const Tensor& sin, const Tensor& slot_mapping,
                 Tensor kv_cache, int64_t ratio, int64_t layout, int64_t page_size, double eps, bool online,
                 bool round_pooled, const OptionalTensor& scale, OptionalTensor out_latent);

Tensor inverse_rope(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions);
void inverse_rope_out(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                      Tensor out);
TwoTensors inverse_rope_quantize(const Tensor& o, const Tensor& cos, const Tensor& sin,
                                 const Tensor& positions, int64_t num_groups, int64_t tile,
                                 bool power_of_two);
void inverse_rope_quantize_out(const Tensor& o, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                               int64_t num_groups, int64_t tile, bool power_of_two, Tensor out,
                               Tensor out_scale);

#define MLA_SPARSE_PREFILL_ARGUMENTS                                         \
  const Tensor &q, const Tensor &kv, const Tensor &indices, double sm_scale, \
      const OptionalTensor &attn_sink, const OptionalTensor &topk_length
ThreeTensors sparse_prefill(MLA_SPARSE_PREFILL_ARGUMENTS);
#define MLA_SPARSE_PREFILL_OUTPUTS                                                                      \
  Tensor out, OptionalTensor max_logits, Tensor lse, OptionalTensor workspace, bool allocate_workspace, \
      bool batch_invariant
void sparse_prefill_out(MLA_SPARSE_PREFILL_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS);

#define MLA_PAGED_SPARSE_ARGUMENTS                                                                   \
  const Tensor &q, const Tensor &kv_cache, const Tensor &indices, int64_t layout, int64_t page_size, \
      double sm_scale, const OptionalTensor &topk_length, const OptionalTensor &attn_sink,           \
      const OptionalTensor &extra_kv_cache, const OptionalTensor &extra_indices,                     \
      const OptionalTensor &extra_topk_length, std::optional<int64_t> extra_page_size,               \
      std::optional<int64_t> extra_layout, const OptionalTensor &scale, int64_t query_groups,        \
      const OptionalTensor &shared_keys, const OptionalTensor &query_start_loc
ThreeTensors sparse_prefill_paged(MLA_PAGED_SPARSE_ARGUMENTS);
void sparse_prefill_paged_out(MLA_PAGED_SPARSE_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS);
#define MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS                                                            \
  const Tensor &q, const Tensor &kv_cache, const Tensor &page_table, const Tensor &query_start_loc,    \
      const Tensor &seq_lens, int64_t layout, int64_t page_size, int64_t window_size, double sm_scale, \
      const OptionalTensor &attn_sink, const OptionalTensor &extra_kv_cache,                           \
      const OptionalTensor &extra_indices, const OptionalTensor &extra_topk_length,                    \
      std::optional<int64_t> extra_page_size, std::optional<int64_t> extra_layout,                     \
      const OptionalTensor &scale, const OptionalTensor &extra_page_table
ThreeTensors sparse_prefill_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS);
void sparse_prefill_window_out(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, MLA_SPARSE_PREFILL_OUTPUTS);
TwoTensors sparse_decode(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant);
void sparse_decode_out(MLA_PAGED_SPARSE_ARGUMENTS, bool batch_invariant, Tensor out, Tensor lse,
                       OptionalTensor workspace, bool allocate_workspace);
// For compat.flash_mla: with FlashMLA's shapes.
#define MLA_FLASH_MLA_DECODE_ARGUMENTS                                                                    \
  const Tensor &q, const Tensor &kv_cache, const Tensor &indices, int64_t layout, double sm_scale,        \
      const OptionalTensor &topk_length, const OptionalTensor &attn_sink,                                 \
      const OptionalTensor &extra_kv_cache, const OptionalTensor &extra_indices,                          \
      const OptionalTensor &extra_topk_length, std::optional<int64_t> extra_layout, int64_t query_groups, \
      const OptionalTensor &shared_keys
TwoTensors _flash_mla_decode(MLA_FLASH_MLA_DECODE_ARGUMENTS);
ThreeTensors _flash_mla_prefill(MLA_SPARSE_PREFILL_ARGUMENTS);
#define MLA_PLAN_SHARED_KEYS_ARGUMENTS                                                                 \
  const Tensor &indices, int64_t query_groups, int64_t num_q_heads, int64_t layout, int64_t num_slots, \
      const OptionalTensor &topk_length, const OptionalTensor &extra_indices,                          \
      const OptionalTensor &extra_topk_length, std::optional<int64_t> extra_num_slots,                 \
      const OptionalTensor &query_start_loc
Tensor plan_shared_keys(MLA_PLAN_SHARED_KEYS_ARGUMENTS);
void plan_shared_keys_out(MLA_PLAN_SHARED_KEYS_ARGUMENTS, Tensor out);
// For tests: sparse attention by a kernel that the caller names, on GPUs.
#define MLA_KERNEL_ARGUMENTS \
  bool max_logits, std::string kernel, std::string schedule, int64_t heads, int64_t splits, int64_t producers
ThreeTensors _sparse_attention(MLA_PAGED_SPARSE_ARGUMENTS, MLA_KERNEL_ARGUMENTS);
ThreeTensors _sparse_attention_window(MLA_SPARSE_PREFILL_WINDOW_ARGUMENTS, MLA_KERNEL_ARGUMENTS);

#define MLA_PAGED_ATTENTION_RAGGED_ARGUMENTS                                                        \
  const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, const Tensor &kv_indptr,           \
      const Tensor &kv_indices, const Tensor &kv_last_page_len, double sm_scale, int64_t page_size, \
      const OptionalTensor &k_scale, const OptionalTensor &v_scale, double logits_soft_cap,         \
      const OptionalTensor &attn_sink, int64_t q_len, int64_t num_splits
TwoTensors paged_attention_ragged(MLA_PAGED_ATTENTION_RAGGED_ARGUMENTS);
void paged_attention_ragged_out(MLA_PAGED_ATTENTION_RAGGED_ARGUMENTS, Tensor out, Tensor lse,
                                OptionalTensor workspace);

#define MLA_PAGED_ATTENTION_RAGGED_LATENT_ARGUMENTS                                                        \
  const Tensor &q, const Tensor &kv_cache, const Tensor &kv_indptr, const Tensor &kv_indices,              \
      const Tensor &kv_last_page_len, int64_t layout, int64_t page_size, double sm_scale,                  \
      const OptionalTensor &scale, double logits_soft_cap, const OptionalTensor &attn_sink, int64_t q_len, \
      int64_t num_splits
TwoTensors paged_attention_ragged_latent(MLA_PAGED_ATTENTION_RAGGED_LATENT_ARGUMENTS);
void paged_attention_ragged_latent_out(MLA_PAGED_ATTENTION_RAGGED_LATENT_ARGUMENTS, Tensor out, Tensor lse,
                                       OptionalTensor workspace);

TwoTensors merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                  const Tensor& lse_b);
void merge_attention_states_out(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                const Tensor& lse_b, Tensor out, Tensor lse);
TwoTensors merge_partial_states(const Tensor& outs, const Tensor& lses, const OptionalTensor& attn_sink,
                                double base);
void merge_partial_states_out(const Tensor& outs, const Tensor& lses, const OptionalTensor& attn_sink,
                              double base, Tensor out, Tensor lse);

// Exchange between ranks, on CUDA (mla_fp8.context_parallel).
#define MLA_PEER_ARGUMENTS \
  std::vector<int64_t> peers, int64_t rank, double time_limit, Tensor flags, Tensor calls
void _gather_queries(const Tensor& q, const OptionalTensor& q_rope, MLA_PEER_ARGUMENTS, Tensor queries);
void _exchange_states(const Tensor& out, const Tensor& lse, const OptionalTensor& attn_sink, double base,
                      MLA_PEER_ARGUMENTS, Tensor outs, Tensor lses, Tensor merged, Tensor merged_lse);
void _exchange_scores(const Tensor& scores, const Tensor& positions, int64_t topk,
                      std::optional<int64_t> interleave, const OptionalTensor& page_table, int64_t page_size,
                      int64_t next_n, MLA_PEER_ARGUMENTS, Tensor candidates, Tensor out_positions,
                      OptionalTensor out_slots, Tensor out_lens);

void quantize_index_k(const Tensor& k, const Tensor& slot_mapping, Tensor index_cache, int64_t layout,
                      int64_t page_size, std::string scale_format, std::optional<double> amax_floor,
                      bool hadamard, bool reciprocal);
void pool_index_k(const Tensor& k, const Tensor& score, const Tensor& query_start_loc,
                  const Tensor& start_pos, Tensor state_k, Tensor state_score, const Tensor& state_slots,
                  const Tensor& ape, const Tensor& slot_mapping, Tensor index_cache, int64_t page_size);

#define MLA_TOPK_TO_SLOTS_ARGUMENTS                                                                   \
  const Tensor &positions, const Tensor &page_table, int64_t page_size,                               \
      const OptionalTensor &row_to_request, int64_t next_n, int64_t group_size,                       \
      const OptionalTensor &token_lens, const OptionalTensor &lens, int64_t world_size, int64_t rank, \
      int64_t interleave, bool by_slot
TwoTensors topk_to_slots(MLA_TOPK_TO_SLOTS_ARGUMENTS);
void topk_to_slots_out(MLA_TOPK_TO_SLOTS_ARGUMENTS, Tensor out_slots, Tensor out_lens);

TwoTensors merge_topk(const Tensor& scores, const Tensor& positions, int64_t topk,
                      std::optional<int64_t> rank, std::optional<int64_t> interleave);
void merge_topk_out(const Tensor& scores, const Tensor& positions, int64_t topk, std::optional<int64_t> rank,
                    std::optional<int64_t> interleave, Tensor out_positions, Tensor out_lens);

#define MLA_RESOLVE_HOT_ROWS_ARGUMENTS                                                                       \
  const Tensor &entries, Tensor hot_entries, Tensor hot_order, const OptionalTensor &host_page_table,        \
      const OptionalTensor &hot_page_table, const OptionalTensor &resident_page_table,                       \
      int64_t num_host_rows, int64_t host_page_size, int64_t hot_page_size, int64_t first_page,              \
      bool by_entry, const OptionalTensor &row_to_request, int64_t next_n, const OptionalTensor &state_rows, \
      const OptionalTensor &entry_lens, const OptionalTensor &num_valid_rows, OptionalTensor counters
FourTensors resolve_hot_rows(MLA_RESOLVE_HOT_ROWS_ARGUMENTS);
void resolve_hot_rows_out(MLA_RESOLVE_HOT_ROWS_ARGUMENTS, Tensor out_hot_rows, Tensor out_miss_host_rows,
                          Tensor out_miss_hot_rows, Tensor out_miss_counts, OptionalTensor out_attention_rows,
                          int64_t attention_page_stride, OptionalTensor out_lens,
                          OptionalTensor out_hit_rows);
void copy_host_rows(const std::vector<Tensor>& host_caches, std::vector<Tensor> hot_caches,
                    const Tensor& host_rows, const Tensor& hot_rows, const OptionalTensor& counts,
                    const OptionalTensor& num_valid_rows, int64_t layout, int64_t host_page_size,
                    int64_t hot_page_size, int64_t max_blocks);
void store_host_rows(const std::vector<Tensor>& hot_caches, std::vector<Tensor> host_caches,
                     const Tensor& hot_rows, const Tensor& host_rows, int64_t layout, int64_t host_page_size,
                     int64_t hot_page_size, int64_t max_blocks);
void _copy_rows_at(const Tensor& from_addresses, const Tensor& to_addresses, const Tensor& from_rows,
                   const Tensor& to_rows, int64_t layout, int64_t from_page_size, int64_t to_page_size);
void forget_rows(const Tensor& entries, Tensor hot_entries, const OptionalTensor& row_to_request,
                 const OptionalTensor& state_rows);

#define MLA_PAGED_INDEX_ARGUMENTS                                                                       \
  const Tensor &q, const Tensor &weights, const Tensor &index_cache, const Tensor &page_table,          \
      const OptionalTensor &seq_lens, int64_t layout, int64_t page_size, const OptionalTensor &q_scale, \
      const OptionalTensor &row_lens, const OptionalTensor &query_start_loc, int64_t next_n,            \
      int64_t compress_ratio
#define MLA_RAGGED_INDEX_ARGUMENTS                                                                       \
  const Tensor &q, const Tensor &weights, const Tensor &k, const Tensor &k_scale, const Tensor &k_start, \
      const Tensor &k_end, const OptionalTensor &q_scale
Tensor index_logits(MLA_PAGED_INDEX_ARGUMENTS, int64_t width);
void index_logits_out(MLA_PAGED_INDEX_ARGUMENTS, int64_t width, Tensor out);
Tensor index_logits_ragged(MLA_RAGGED_INDEX_ARGUMENTS);
void index_logits_ragged_out(MLA_RAGGED_INDEX_ARGUMENTS, Tensor out);

#define MLA_TOPK_ARGUMENTS                                                                   \
  int64_t topk, int64_t pin_first, int64_t pin_last, const OptionalTensor &candidate_blocks, \
      int64_t block_size
#define MLA_PUBLISH_ARGUMENTS int64_t topk, int64_t num_blocks, int64_t block_size
#define MLA_PAGED_SLOTS_ARGUMENTS const OptionalTensor &slot_page_table, std::optional<int64_t> slot_page_size
#define MLA_TOPK_OUTPUTS Tensor out_positions, OptionalTensor out_slots, Tensor out_lens
#define MLA_TOPK_SCRATCH OptionalTensor workspace, OptionalTensor counters, OptionalTensor out_scores
ThreeTensors index_topk(MLA_PAGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS);
void index_topk_out(MLA_PAGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS,
                    MLA_TOPK_OUTPUTS, MLA_TOPK_SCRATCH);
ThreeTensors index_topk_ragged(MLA_RAGGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, const OptionalTensor& k_slots);
void index_topk_ragged_out(MLA_RAGGED_INDEX_ARGUMENTS, MLA_TOPK_ARGUMENTS, const OptionalTensor& k_slots,
                           MLA_TOPK_OUTPUTS, MLA_TOPK_SCRATCH);
FourTensors index_topk_blocks(MLA_PAGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS);
void index_topk_blocks_out(MLA_PAGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS, MLA_PAGED_SLOTS_ARGUMENTS,
                           MLA_TOPK_OUTPUTS, Tensor out_blocks, MLA_TOPK_SCRATCH);
FourTensors index_topk_ragged_blocks(MLA_RAGGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS,
                                     const OptionalTensor& k_slots);
void index_topk_ragged_blocks_out(MLA_RAGGED_INDEX_ARGUMENTS, MLA_PUBLISH_ARGUMENTS,
                                  const OptionalTensor& k_slots, MLA_TOPK_OUTPUTS, Tensor out_blocks,
                                  MLA_TOPK_SCRATCH);
int64_t index_topk_workspace(int64_t num_rows, int64_t topk, int64_t num_sms, int64_t num_candidates,
                             int64_t num_positions);
int64_t index_topk_counters(int64_t num_sms);
int64_t sparse_attention_workspace(int64_t num_tokens, int64_t num_q_heads, int64_t num_sms,
                                   bool batch_invariant);

}  // namespace mla_fp8
