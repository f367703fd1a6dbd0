// compress_kv on CUDA: one launch for any mix of prefill, decode and verify, without a plan. HBM-bound: each
// float of a prefill is read once.

#include "ops/compress_kv.h"

#include <algorithm>

#include "cuda/compress_kv/online.cuh"
#include "cuda/compress_kv/raw.cuh"
#include "cuda/compress_kv/rows.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {
namespace {

void compress_tokens(const CompressKvParams& p, gpuStream_t stream) {
  const LaunchConfig config{
      .grid = ceil_div<int64_t>(p.num_tokens, kRowWarps), .block = kRowThreads, .stream = stream};
  launch(compress_tokens_kernel, config, CompressKvArgs(p, kRowWarps));
}

template <int kRatio>
void compress_rows(const CompressKvParams& p, gpuStream_t stream) {
  const CompressKvArgs args(p, tokens_of_row_block<kRatio>(p.num_tokens));
  const LaunchConfig config{
      .grid = ceil_div(p.num_tokens, args.tokens), .block = kRowThreads, .stream = stream};
  launch(compress_rows_kernel<kRatio>, config, args);
}

template <int kCluster>
void pool_blocks(const CompressKvParams& p, gpuStream_t stream) {
  const CompressKvArgs args(p, tokens_of_cluster(p.num_tokens, kCluster, kFewTokens));
  const LaunchConfig config{.grid = ceil_div(p.num_tokens, args.tokens) * kCluster,
                            .block = kPoolThreads<kCluster>,
                            .stream = stream,
                            .cluster = kCluster};
  launch(pool_blocks_kernel<kCluster>, config, args);
}

template <int kCluster>
void fold_blocks(const CompressKvParams& p, gpuStream_t stream) {
  const CompressKvArgs args(p, tokens_of_cluster(p.num_tokens, kCluster, kFewFolds));
  const LaunchConfig config{.grid = ceil_div(p.num_tokens, args.tokens) * kCluster,
                            .block = kFoldThreads<kCluster>,
                            .stream = stream,
                            .cluster = kCluster};
  launch(fold_blocks_kernel<kCluster>, config, args);
}

}  // namespace

void compress_kv(const CompressKvParams& p, gpuStream_t stream) {
  if (p.ratio == 1) return compress_tokens(p, stream);
  if (p.ratio == 2) return compress_rows<2>(p, stream);
  if (p.ratio == 4) return compress_rows<4>(p, stream);
#if MLA_FP8_PTX
  if (compute_major() >= 9) {
    // A block of threads folds one token as fast as a cluster does, but not several.
    const int64_t few = p.online ? std::min(kFewFolds, p.num_requests) : kFewTokens;
    if (p.num_tokens > few)
      return p.online ? fold_blocks<kClusterBlocks>(p, stream) : pool_blocks<kClusterBlocks>(p, stream);
  }
#endif
  p.online ? fold_blocks<1>(p, stream) : pool_blocks<1>(p, stream);
}

}  // namespace mla_fp8::gpu
