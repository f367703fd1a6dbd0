// Sparse attention by the portable kernel.
#include "cuda/sparse_attention/launch.h"
#include "cuda/sparse_attention/portable/kernel.cuh"

namespace mla_fp8::gpu {
namespace {

// The selected keys of a query. Its valid keys are known after the survey, and dealt to the splits then.
struct Selected {
  using Params = portable::RowsParams;
  using Keys = gpu::Keys;
  using Key = KeySource::Key;
  static constexpr bool kOfSplit = false, kSeveralQueries = false;
  __host__ __device__ __forceinline__ static int rows(const Params& params) { return params.p.num_q_heads; }
  __device__ __forceinline__ static portable::QueryHead query_head(const Params& params, int64_t token,
                                                                   int head) {
    return {token, head, head < params.p.num_q_heads};
  }
  template <int kHeads>
  __device__ __forceinline__ static Keys keys(const Params& params, int64_t token, int, int) {
    return Keys(params.p, token);
  }
  __device__ __forceinline__ static constexpr int num_last(const Keys&) { return 0; }
  __device__ __forceinline__ static KeySource source(const Params& params, const Keys& keys) {
    return KeySource(params.p, keys);
  }
  __device__ __forceinline__ static portable::Place place(const Key& key, const portable::Pages& pages,
                                                          const KvScope& scope) {
    const unsigned slot = static_cast<unsigned>(key.slot), page = pages.of(slot);
    return {page, static_cast<int>(slot - page * static_cast<unsigned>(scope.page_size))};
  }
  template <int kCount>
  __device__ __forceinline__ static void cap(const Params&, float (&)[kCount]) {}
};

}  // namespace

void launch_portable(const SparseAttentionParams& p, const Plan& plan, gpuStream_t stream) {
  const portable::RowsParams params = portable::rows_params(p, plan.splits);
  with_variant<Kernel::kPortable>(p, plan, [&](auto variant, auto id, auto extra) {
    constexpr portable::RowKind kKind = portable::kind_of({id(), extra()});
    constexpr int kDims = kv_layout(id()).head_dim_qk(), kHeads = kVariants[variant()].heads;
    portable::launch_heads<Selected, kKind, kDims, kHeads>(params, stream);
  });
  if (plan.splits > 1) launch_merge(params, stream);
}

}  // namespace mla_fp8::gpu
