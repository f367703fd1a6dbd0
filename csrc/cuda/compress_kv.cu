// compress_kv on CUDA, one launch for any mix of prefill, decode and verify, without a plan. HBM-bound: every
// float of a prefill is read once.

#include "ops/compress_kv.h"

#include "cuda/compress_kv/online.cuh"
#include "cuda/compress_kv/raw.cuh"
#include "cuda/compress_kv/rows.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {
namespace {

void compress_rows(const CompressKvParams& p, gpuStream_t stream) {
  const CompressKvArgs args(p, p.ratio == 1 ? kRowWarps : tokens_of_row_block(p.num_tokens, p.ratio));
  const LaunchConfig config{
      .grid = ceil_div(p.num_tokens, args.tokens), .block = kRowThreads, .stream = stream};
  with_kv_layout(p.layout, [&](auto id) {
    if constexpr (kv_layout(id).head_dim_qk() == kHeadDimV) {
      if (p.ratio == 1) launch(compress_tokens_kernel<id>, config, args);
      else if (p.ratio == 2) launch(compress_rows_kernel<id, 2>, config, args);
      else launch(compress_rows_kernel<id, 4>, config, args);
    }
  });
}

template <int kCluster>
void compress_blocks(const CompressKvParams& p, gpuStream_t stream) {
  const CompressKvArgs args(p, tokens_of_cluster(p.num_tokens, p.online));
  const LaunchConfig config{.grid = ceil_div(p.num_tokens, args.tokens) * kCluster,
                            .block = p.online ? kFoldThreads : kPoolThreads,
                            .stream = stream,
                            .cluster = kCluster};
  with_kv_layout(p.layout, [&](auto id) {
    if constexpr (kv_layout(id).head_dim_qk() == kHeadDimV) {
      if (p.online) launch(fold_blocks_kernel<id, kCluster>, config, args);
      else launch(pool_blocks_kernel<id, kCluster>, config, args);
    }
  });
}

}  // namespace

void compress_kv(const CompressKvParams& p, gpuStream_t stream) {
  if (p.ratio < kBlockRatio) return compress_rows(p, stream);
#if MLA_FP8_PTX
  if (compute_major() >= 9) return compress_blocks<kSlices>(p, stream);
#endif
  compress_blocks<1>(p, stream);
}

}  // namespace mla_fp8::gpu
