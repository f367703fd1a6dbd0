#pragma once
// The CPU kernels that exist once for each instruction set. Their files (isa_sources of CMakeLists.txt) are
// compiled for each row of MLA_FP8_CPU_ISAS, into a namespace each. cpu::x() calls the machine's best one.
#include <cstdint>
#include <span>

#include "ops/compress_kv.h"
#include "ops/dequantize_kv.h"
#include "ops/index_logits.h"
#include "ops/inverse_rope.h"
#include "ops/norm_rope_insert.h"
#include "ops/paged_attention_ragged.h"
#include "ops/pool_index_k.h"
#include "ops/prepare_keys.h"
#include "ops/prepare_queries.h"
#include "ops/quantize_index_k.h"
#include "ops/quantize_kv.h"
#include "ops/sparse_attention.h"

#if defined(__x86_64__)
#define MLA_FP8_CPU_ISAS(X) X(plain) X(avx2) X(avx512)
#else
#define MLA_FP8_CPU_ISAS(X) X(plain)
#endif

namespace mla_fp8::cpu {

// The phases of compress_kv: it closes blocks, which reads the state, then writes the state. Online it folds
// blocks, which does both.
enum class CompressPhase { kClose, kKeep, kFold };

// A thread's working set in sparse_attention. Its size does not depend on the number of keys.
struct AttentionScratch {
  static constexpr int kBlock = 64;    // keys staged at a time
  static constexpr int kHeadTile = 4;  // heads that inner loops take together; arrays are padded to it
  static constexpr int kMaxHeadDim = 576;

  uint16_t* latents;           // [kBlock][head_dim_qk] bf16
  uint16_t* v_pairs;           // V of keys 2i and 2i + 1 interleaved, in tiles of 64 columns
  float* logits;               // [heads][kBlock]
  uint16_t* weights;           // [heads][kBlock] bf16
  float* accumulator;          // [heads][kHeadDimV], columns in interleaved order
  float *max, *sum, *rescale;  // [heads]

  // Lays the arrays out from `base` on and returns their bytes; `base` may be null for that.
  int64_t place(uint8_t* base, int num_heads) {
    const int64_t heads = align_up(num_heads, kHeadTile);
    int64_t used = 0;
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + used);
      used += align_up<int64_t>(count * sizeof(*pointer), 64);
    };
    take(latents, kBlock * kMaxHeadDim);
    take(v_pairs, kBlock * kHeadDimV);
    take(logits, heads * kBlock);
    take(weights, heads * kBlock);
    take(accumulator, heads * kHeadDimV);
    take(max, heads);
    take(sum, heads);
    take(rescale, heads);
    return used;
  }
};

// Query heads that paged_attention_ragged works on at a time. They bound its buffers.
inline constexpr int kRaggedHeadTile = 16;

// A row's query and a tile of keys, staged as index_tile of the instruction set reads them.
inline constexpr int kIndexTile = 64;  // keys
struct StagedIndexQuery {
  alignas(64) uint8_t elements[kIndexDim * kMaxIndexHeads * 4];
  float weights[kMaxIndexHeads];
  int num_vectors;  // vectors of sixteen heads
};
struct StagedIndexKeys {
  alignas(64) uint8_t elements[kIndexDim * kIndexTile * 4];
  float scales[kIndexTile];
  bool present[kIndexTile];
};

#define MLA_FP8_DECLARE_ISA(isa)                                                                           \
  namespace isa {                                                                                          \
  void quantize_kv(const QuantizeKvParams& params, int64_t begin, int64_t end);                            \
  void dequantize_kv(const DequantizeKvParams& params, int64_t begin, int64_t end);                        \
  void dequantize_kv_paged(const DequantizeKvPagedParams& params, int64_t request, int64_t first_row,      \
                           int64_t begin, int64_t end);                                                    \
  void norm_rope_insert(const NormRopeInsertParams& params, bool streamed, int64_t begin, int64_t end);    \
  void compress_kv(const CompressKvParams& params, CompressPhase phase, int64_t begin, int64_t end);       \
  void inverse_rope(const InverseRopeParams& params, bool streamed, int64_t begin, int64_t end);           \
  void inverse_rope_quantize(const InverseRopeQuantizeParams& params, uint16_t* row, int64_t begin,        \
                             int64_t end);                                                                 \
  void sparse_attention(const SparseAttentionParams& params, int64_t token, int first_head, int num_heads, \
                        AttentionScratch scratch);                                                         \
  void paged_attention_ragged(const PagedAttentionRaggedParams& params, int64_t begin, int64_t end);       \
  void merge_ragged_splits(const PagedAttentionRaggedParams& params, int64_t begin, int64_t end);          \
  void quantize_index_k(const QuantizeIndexKParams& params, int64_t begin, int64_t end);                   \
  void pool_index_k(const PoolIndexKParams& params, int64_t begin, int64_t end);                           \
  void prepare_keys(const PrepareKeysParams& params, int64_t begin, int64_t end);                          \
  void prepare_queries(const PrepareQueriesParams& params, int64_t begin, int64_t end);                    \
  void stage_index_query(const IndexQueries& queries, int64_t row, StagedIndexQuery& to);                  \
  void stage_index_keys(const IndexKeys& keys, int64_t request, const int32_t* columns, int count,         \
                        StagedIndexKeys& to);                                                              \
  void index_tile(const StagedIndexQuery& query, const StagedIndexKeys& keys, float* logits);              \
  }
MLA_FP8_CPU_ISAS(MLA_FP8_DECLARE_ISA)
#undef MLA_FP8_DECLARE_ISA

// The kernels of an instruction set, one row each in isa_table(), weakest first.
struct IsaKernels {
  const char* name;
  bool supported;  // this machine has the instructions
  decltype(&plain::quantize_kv) quantize_kv;
  decltype(&plain::dequantize_kv) dequantize_kv;
  decltype(&plain::dequantize_kv_paged) dequantize_kv_paged;
  decltype(&plain::norm_rope_insert) norm_rope_insert;
  decltype(&plain::compress_kv) compress_kv;
  decltype(&plain::inverse_rope) inverse_rope;
  decltype(&plain::inverse_rope_quantize) inverse_rope_quantize;
  decltype(&plain::sparse_attention) sparse_attention;
  decltype(&plain::paged_attention_ragged) paged_attention_ragged;
  decltype(&plain::merge_ragged_splits) merge_ragged_splits;
  decltype(&plain::quantize_index_k) quantize_index_k;
  decltype(&plain::pool_index_k) pool_index_k;
  decltype(&plain::prepare_keys) prepare_keys;
  decltype(&plain::prepare_queries) prepare_queries;
  decltype(&plain::stage_index_query) stage_index_query;
  decltype(&plain::stage_index_keys) stage_index_keys;
  decltype(&plain::index_tile) index_tile;
};
std::span<const IsaKernels> isa_table();
const IsaKernels& best_isa();

}  // namespace mla_fp8::cpu
