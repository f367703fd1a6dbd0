#include "cpu/isa.h"

#include <algorithm>
#include <memory>

#include "common/parallel.h"

namespace mla_fp8::cpu {
namespace {

// Whether this machine has all that an instruction set needs beyond the architecture's baseline.
[[maybe_unused]] bool supports_plain() { return true; }
#if defined(__x86_64__)
[[maybe_unused]] bool supports_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
[[maybe_unused]] bool supports_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16");
}
#endif

}  // namespace

std::span<const IsaKernels> isa_table() {
#define MLA_FP8_ROW(isa)        \
  {#isa,                        \
   supports_##isa(),            \
   isa::quantize_kv,            \
   isa::dequantize_kv,          \
   isa::dequantize_kv_paged,    \
   isa::norm_rope_insert,       \
   isa::compress_kv,            \
   isa::inverse_rope,           \
   isa::inverse_rope_quantize,  \
   isa::sparse_attention,       \
   isa::paged_attention_ragged, \
   isa::merge_ragged_splits,    \
   isa::quantize_index_k,       \
   isa::pool_index_k,           \
   isa::prepare_keys,           \
   isa::prepare_queries,        \
   isa::stage_index_query,      \
   isa::stage_index_keys,       \
   isa::index_tile},
#ifdef MLA_ONLY_ISA  // MLA_FP8_CPU_NATIVE: only one instruction set was compiled
#define MLA_FP8_ONLY_ROW(isa) MLA_FP8_ROW(isa)
  static const IsaKernels table[] = {MLA_FP8_ONLY_ROW(MLA_ONLY_ISA)};
#else
  static const IsaKernels table[] = {MLA_FP8_CPU_ISAS(MLA_FP8_ROW)};
#endif
#undef MLA_FP8_ROW
  return table;
}

const IsaKernels& best_isa() {
  static const IsaKernels& best = [&]() -> const IsaKernels& {
    const auto table = isa_table();
    size_t row = table.size() - 1;
    while (!table[row].supported) --row;
    return table[row];
  }();
  return best;
}

void quantize_kv(const QuantizeKvParams& p) {
  constexpr int64_t kGrain = 16;  // tokens a thread takes at least
  const auto kernel = best_isa().quantize_kv;
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void quantize_index_k(const QuantizeIndexKParams& p) {
  constexpr int64_t kGrain = 64;
  const auto kernel = best_isa().quantize_index_k;
  parallel_for(p.num_tokens, kGrain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void dequantize_kv(const DequantizeKvParams& p) {
  constexpr int64_t kGrain = 16;
  const auto kernel = best_isa().dequantize_kv;
  parallel_for(p.num_rows, kGrain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void dequantize_kv_paged(const DequantizeKvPagedParams& p) {
  constexpr int64_t kGrain = 16;
  const auto kernel = best_isa().dequantize_kv_paged;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t first_row = p.row_offsets[r];  // read once, so that what is checked is what is used
    const int64_t first = std::max<int64_t>(0, -first_row);
    const int64_t last = std::min<int64_t>(p.gather_lens[r], p.num_rows - first_row);
    parallel_for(last - first, kGrain,
                 [&](int64_t begin, int64_t end) { kernel(p, r, first_row, first + begin, first + end); });
  }
}

// Rows, of heads or latents, that take some microseconds: fewer are not worth waking a thread.
constexpr int64_t kMinRows = 32;

// Whether heads that are copied to `out` go past the caches (stream() in simd.h): if they are whole lines,
// and more than the caches would keep. (What a machine says of its last level is a sum over many.) Heads that
// are normed or quantised do not: they would take 10 to 15 % longer.
bool is_streamed(const AttendedHeads& h, const uint16_t* out, int64_t stride_token, int64_t stride_head) {
  constexpr int64_t kLine = 64, kItemsize = sizeof(uint16_t), kLeast = 32 << 20;  // bytes
  const int64_t offsets =
      reinterpret_cast<intptr_t>(out) | stride_token * kItemsize | stride_head * kItemsize;
  return out != h.o && (offsets | h.head_dim * kItemsize) % kLine == 0 &&
         h.num_tokens * h.num_heads * h.head_dim * kItemsize >= kLeast;
}

void norm_rope_insert(const NormRopeInsertParams& p) {
  const int64_t tokens = p.num_heads > 0 ? p.num_tokens : p.num_insert;
  const AttendedHeads heads{.num_tokens = tokens, .num_heads = p.num_heads, .head_dim = p.head_dim, .o = p.q};
  const bool streamed = !p.norm_q && is_streamed(heads, p.out_q, p.out_q_stride_token, p.out_q_stride_head);
  const auto kernel = best_isa().norm_rope_insert;
  parallel_for(tokens, ceil_div(kMinRows, 1 + p.num_heads),
               [&](int64_t begin, int64_t end) { kernel(p, streamed, begin, end); });
}

void prepare_keys(const PrepareKeysParams& p) {
  const auto kernel = best_isa().prepare_keys;
  parallel_for(p.latents.num_tokens, kMinRows / 2,
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void prepare_queries(const PrepareQueriesParams& p) {
  const auto kernel = best_isa().prepare_queries;
  parallel_for(p.num_tokens, ceil_div(kMinRows, p.num_heads + p.num_index_heads),
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void compress_kv(const CompressKvParams& p) {
  const auto run = [&](CompressPhase phase, int64_t n, int64_t grain) {
    const auto kernel = best_isa().compress_kv;
    parallel_for(n, grain, [&](int64_t begin, int64_t end) { kernel(p, phase, begin, end); });
  };
  if (p.online) return run(CompressPhase::kFold, p.num_tokens, kMinRows);
  run(CompressPhase::kClose, p.num_tokens, kMinRows);
  if (p.ratio > 1) run(CompressPhase::kKeep, p.num_tokens, kMinRows);
}

void pool_index_k(const PoolIndexKParams& p) {
  const auto kernel = best_isa().pool_index_k;
  parallel_for(p.num_requests + p.num_tokens, kMinRows,
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void inverse_rope(const InverseRopeParams& p) {
  const bool streamed = is_streamed(p.heads, p.out, p.out_stride_token, p.out_stride_head);
  const auto kernel = best_isa().inverse_rope;
  parallel_for(p.heads.num_tokens, ceil_div(kMinRows, p.heads.num_heads),
               [&](int64_t begin, int64_t end) { kernel(p, streamed, begin, end); });
}

void inverse_rope_quantize(const InverseRopeQuantizeParams& p) {
  const auto kernel = best_isa().inverse_rope_quantize;
  parallel_for(p.num_scale_rows, ceil_div(kMinRows, p.heads.num_heads), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<uint16_t[]> row(new uint16_t[p.heads.head_dim]);
    kernel(p, row.get(), begin, end);
  });
}

// Heads are independent: how they are grouped is scheduling, and no result depends on it. If there are fewer
// tokens than threads, a token's heads are split, into groups that still share the staging of keys well.
void sparse_attention(const SparseAttentionParams& p) {
  if (p.num_tokens == 0) return;
  constexpr int64_t kMinHeads = 8;
  // Pairs (head, key) that take some tens of microseconds: fewer are not worth waking a thread.
  constexpr int64_t kMinPairs = 1 << 13;
  int64_t keys = 0;
  for (int i = 0; i < p.num_scopes; ++i) keys += p.scopes[i].topk;
  const int64_t pairs = std::max<int64_t>(1, keys * p.num_q_heads);
  const int64_t threads = std::clamp<int64_t>(p.num_tokens * pairs / kMinPairs, 1, num_threads());
  const int64_t wanted = ceil_div(threads, p.num_tokens), most = ceil_div<int64_t>(p.num_q_heads, kMinHeads);
  const int64_t groups = std::min(wanted, most);
  const int heads = static_cast<int>(ceil_div<int64_t>(p.num_q_heads, groups));
  const auto kernel = best_isa().sparse_attention;

  const int64_t grain = ceil_div(kMinPairs, ceil_div(pairs, groups));
  parallel_for(p.num_tokens * groups, grain, [&](int64_t begin, int64_t end) {
    AttentionScratch scratch;
    constexpr int64_t kAlignment = 64;
    const std::unique_ptr<uint8_t[]> memory(new uint8_t[scratch.place(nullptr, heads) + kAlignment]);
    scratch.place(reinterpret_cast<uint8_t*>(align_up(reinterpret_cast<int64_t>(memory.get()), kAlignment)),
                  heads);
    for (int64_t i = begin; i < end; ++i) {
      const int first = static_cast<int>(i % groups) * heads;
      const int count = std::min(heads, p.num_q_heads - first);
      if (count > 0) kernel(p, i / groups, first, count, scratch);
    }
  });
}

namespace {

int64_t ragged_units(const PagedAttentionRaggedParams& p) {  // of each split
  return p.num_tokens() * p.num_kv_heads * ceil_div(p.num_q_heads / p.num_kv_heads, kRaggedHeadTile);
}

}  // namespace

// The number follows from shapes alone, so no result depends on the number of threads.
int paged_attention_ragged_splits(const PagedAttentionRaggedParams& p) {
  constexpr int64_t kUnits = 32, kMinKeys = 256;  // of a split; no request has more keys than all together
  const int64_t useful = ceil_div(p.num_kv_indices * p.page_size, kMinKeys);
  const int64_t wanted = kUnits / std::max<int64_t>(1, ragged_units(p));
  return static_cast<int>(std::clamp<int64_t>(std::min(useful, wanted), 1, kMaxRaggedSplits));
}

void paged_attention_ragged(const PagedAttentionRaggedParams& p) {
  const IsaKernels& isa = best_isa();
  const int64_t num_units = ragged_units(p) * p.num_splits;
  constexpr int64_t kMinPairs = 1 << 13;  // as above, with a guess of how many keys a request has
  const int64_t keys = p.num_kv_indices * p.page_size * p.q_len;
  const int64_t pairs = std::max<int64_t>(1, keys * p.num_q_heads / num_units);
  parallel_for(num_units, ceil_div(kMinPairs, pairs),
               [&](int64_t begin, int64_t end) { isa.paged_attention_ragged(p, begin, end); });
  constexpr int64_t kMinRows = 8;
  if (p.num_splits > 1)
    parallel_for(p.num_tokens() * p.num_q_heads, kMinRows,
                 [&](int64_t begin, int64_t end) { isa.merge_ragged_splits(p, begin, end); });
}

}  // namespace mla_fp8::cpu
