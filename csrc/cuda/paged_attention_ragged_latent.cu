// paged_attention_ragged_latent by the portable kernel: each query token attends to the pages of its request.
#include "cuda/paged_attention_ragged/latent.h"

#include "cuda/device/divide.cuh"
#include "cuda/device/soft_cap.cuh"
#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/portable/kernel.cuh"

namespace mla_fp8::gpu {
namespace {

struct RaggedParams : portable::RowsParams {
  PagedAttentionRaggedParams ragged;
  Divider num_q_heads, num_splits, page_size;
  float ln2_of_cap;
};

// The keys of a CTA. All its queries see the first `length0`, some see the last ones, up to `length`.
struct PageKeys : Keys {
  int first_last;  // number of the first last key, among the keys that the CTA's first query does not see
};

// Positions of a split, in a request's pages: a source of keys for survey_keys and ValidKeys (keys.cuh).
class PageSource {
 public:
  // A key as it was found. is_valid looks at the page later, when the load of its number is over.
  struct Key {
    int page;
    unsigned in_page;
    static constexpr int scope = 0;
  };
  __device__ __forceinline__ PageSource(const RaggedParams& params, const PageKeys& keys)
      : params_(params), keys_(keys) {}
  __device__ __forceinline__ unsigned length() const { return keys_.length0; }
  __device__ __forceinline__ static constexpr bool is_window() { return true; }
  // survey_keys calls these for queries without a window only.
  __device__ __forceinline__ int entry(unsigned) const { return -1; }
  __device__ __forceinline__ bool is_slot(int, unsigned) const { return false; }
  __device__ __forceinline__ bool is_valid(const Key& key) const {
    return key.page >= 0 && key.page < params_.ragged.num_pages;
  }
  __device__ __forceinline__ Key at(unsigned position) const {  // page -1 past the end
    return position < keys_.length0 ? key(position) : Key{-1, 0};
  }
  __device__ __forceinline__ Key last(int i) const { return key(keys_.length0 + i); }

 private:
  __device__ __forceinline__ Key key(unsigned position) const {
    const unsigned in_request = keys_.window_first + position, page = params_.page_size.word(in_request);
    return {__ldg(keys_.first + page), in_request - page * static_cast<unsigned>(params_.ragged.page_size)};
  }

  const RaggedParams& params_;
  const PageKeys& keys_;
};

// An item is a request; its rows are the heads of all its queries. A CTA may have rows of several queries,
// each of which sees a key more than the one before. A split is a range of positions, whatever they hold. Its
// CTA surveys no others, however long the request is.
struct Ragged {
  using Params = RaggedParams;
  using Keys = PageKeys;
  using Key = PageSource::Key;
  static constexpr bool kOfSplit = true, kSeveralQueries = true;
  static constexpr int64_t kMostKeys = (int64_t{1} << 31) - portable::kBlockKeys;  // positions are 32 bits

  __host__ __device__ __forceinline__ static int rows(const Params& params) {
    return params.ragged.q_len * params.ragged.num_q_heads;
  }
  __device__ __forceinline__ static int query_of(const Params& params, int row) {  // in its request
    return static_cast<int>(params.num_q_heads.word(static_cast<uint32_t>(row)));
  }
  __device__ __forceinline__ static portable::QueryHead query_head(const Params& params, int64_t request,
                                                                   int row) {
    const int query = query_of(params, row);
    return {request * params.ragged.q_len + query, row - query * params.ragged.num_q_heads,
            row < rows(params)};
  }
  template <int kHeads>
  __device__ __forceinline__ static Keys keys(const Params& params, int64_t request, int split,
                                              int first_row) {
    const PagedAttentionRaggedParams& p = params.ragged;
    const RequestPages pages = find_pages(p, request);
    const auto seen_by = [&](int row) {  // negative: the request has fewer keys than queries
      return pages.num_keys - (p.q_len - 1 - query_of(params, row));
    };
    const int64_t seen_by_all = seen_by(first_row), seen = seen_by(min(first_row + kHeads, rows(params)) - 1);
    const int64_t each =
        align_up(params.num_splits(pages.num_keys + p.num_splits - 1), int64_t{portable::kBlockKeys});
    const int64_t begin = split * each, first_page = params.page_size(begin);
    const auto in_split = [&](int64_t end) {
      return static_cast<unsigned>(max(min(min(end - begin, each), kMostKeys), int64_t{0}));
    };
    Keys keys{};
    keys.first = p.kv_indices + pages.first + first_page;
    keys.window_first = static_cast<unsigned>(begin - first_page * p.page_size);
    keys.length0 = in_split(seen_by_all);
    keys.length = in_split(seen);
    keys.first_last = static_cast<int>(begin + keys.length0 - seen_by_all);
    return keys;
  }
  // Each of the last keys has a block of its own, which masks it for the rows that do not see it.
  __device__ __forceinline__ static int num_last(const Keys& keys) { return keys.length - keys.length0; }
  __device__ __forceinline__ static bool sees(const Params& params, const Keys& keys, int first_row, int row,
                                              int last) {
    return keys.first_last + last < query_of(params, row) - query_of(params, first_row) &&
           source(params, keys).is_valid(source(params, keys).last(last));
  }
  __device__ __forceinline__ static PageSource source(const Params& params, const Keys& keys) {
    return {params, keys};
  }
  __device__ __forceinline__ static portable::Place place(const Key& key, const portable::Pages&,
                                                          const KvScope&) {
    return {static_cast<unsigned>(key.page), static_cast<int>(key.in_page)};
  }
  template <int kCount>
  __device__ __forceinline__ static void cap(const Params& params, float (&logits)[kCount]) {
    if (const float cap = params.ragged.logits_soft_cap; cap > 0.0f)
#pragma unroll
      for (float& x : logits) x = soft_cap(x * params.ln2_of_cap, cap);
  }
};

Gpu this_gpu() { return {compute_major(), num_processors()}; }

// The problem as one of sparse attention, without keys.
SparseAttentionParams without_keys(const PagedAttentionRaggedParams& p) {
  SparseAttentionParams out{};
  out.layout = out.extra_layout = p.layout;
  out.num_tokens = p.num_tokens();
  out.num_q_heads = p.num_q_heads;
  out.num_scopes = 1;
  out.scopes[0].kv_cache = p.k_cache;
  out.scopes[0].kv_cache_stride_page = p.k_cache_stride_page;
  out.scopes[0].num_slots = p.num_pages * p.page_size;
  out.scopes[0].page_size = p.page_size;
  out.q = static_cast<const uint16_t*>(p.q);
  out.q_stride_token = p.q_stride_token;
  out.q_stride_head = p.q_stride_head;
  out.scale = p.k_scale;
  out.attn_sink = p.attn_sink;
  out.sm_scale = p.sm_scale;
  out.out = static_cast<uint16_t*>(p.out);
  out.out_stride_token = p.out_stride_token;
  out.out_stride_head = p.out_stride_head;
  out.lse = p.lse;
  out.workspace = p.workspace;
  return out;
}

}  // namespace

int ragged_latent_splits(const PagedAttentionRaggedParams& p) {
  return plan_ragged(without_keys(p), p.q_len, p.num_kv_indices * p.page_size, this_gpu()).splits;
}

void ragged_latent(const PagedAttentionRaggedParams& p, gpuStream_t stream) {
  const RaggedParams params{portable::rows_params(without_keys(p), p.num_splits),
                            p,
                            Divider(p.num_q_heads),
                            Divider(p.num_splits),
                            Divider(p.page_size),
                            kLn2 / p.logits_soft_cap};
  const Plan plan = plan_ragged(params.p, p.q_len, 0, this_gpu());
  with_variant<Kernel::kPortable>(params.p, plan, [&](auto variant, auto id, auto extra) {
    if constexpr (id() == extra()) {
      constexpr portable::RowKind kKind = portable::kind_of({id(), id()});
      constexpr int kDims = kv_layout(id()).head_dim_qk(), kHeads = kVariants[variant()].heads;
      portable::launch_heads<Ragged, kKind, kDims, kHeads>(params, stream);
    }
  });
  if (p.num_splits > 1) launch_merge(params, stream);
}

}  // namespace mla_fp8::gpu
