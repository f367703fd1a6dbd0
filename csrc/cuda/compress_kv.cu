// compress_kv on CUDA, one launch for any mix of prefill, decode and verify. Ratios 1, 2 and 4: a warp per
// token, which pools the window that the token closes and copies the token's row into the state. Ratio 128: a
// block per 128 rows, see compress_blocks.cuh. HBM-bound: every float of a prefill is read once.

#include "ops/compress_kv.h"

#include "cuda/compress_kv/blocks.cuh"
#include "cuda/compress_kv/pool.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

inline constexpr int kRowWarps = 4;  // of a block
inline constexpr int kRowWindow = 8;
// From here on a warp takes `ratio` tokens, of which one request closes one block.
inline constexpr int64_t kManyTokens = 4096;

// The rows of a window that the token at position `close` closes: up to eight, the first of which may lie
// before the sequence.
struct Window {
  const float* row[kRowWindow];  // where the row's kv begins
  int begin, end;                // which exist
};

__device__ __forceinline__ Window find_window(const CompressKvArgs& args, const CompressRequest& r,
                                              int64_t close) {
  const CompressKvParams& p = args.p;
  const int64_t first = close + 1 - p.window();
  Window w;
  w.begin = first < 0 ? static_cast<int>(-first) : 0;
  w.end = p.window();
#pragma unroll
  for (int j = 0; j < kRowWindow; ++j) {
    const bool exists = j >= w.begin && j < w.end;
    w.row[j] = window_row(args, r, exists ? first + j : close) + (j >= p.ratio ? kHeadDimV : 0);
  }
  return w;
}

// Its dims `d` and `d` + 1: all loads, then the softmax in order.
__device__ __forceinline__ Floats2 pool_rows(const CompressKvParams& p, const Window& w, int d) {
  const int half = p.width() / 2;
  Floats2 kv[kRowWindow], score[kRowWindow];
#pragma unroll
  for (int j = 0; j < kRowWindow; ++j) {
    const bool exists = j >= w.begin && j < w.end;
    kv[j] = load2(w.row[j] + d, exists);
    score[j] = load2(w.row[j] + half + d, exists);
  }
  if (p.ape != nullptr) {  // row j is that of position j % ratio, as the window ends with a block
#pragma unroll
    for (int j = 0; j < kRowWindow; ++j) {
      const int part = j >= p.ratio ? kHeadDimV : 0;
      const Floats2 bias = load2(p.ape + j % 4 * half + part + d, j >= w.begin && j < w.end);
      score[j] = {{__fadd_rn(score[j].x[0], bias.x[0]), __fadd_rn(score[j].x[1], bias.x[1])}};
    }
  }
  Floats2 out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    Pooled all{-INFINITY, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kRowWindow; ++j)
      if (j >= w.begin && j < w.end) all.top = j == w.begin ? score[j].x[i] : larger(score[j].x[i], all.top);
#pragma unroll
    for (int j = 0; j < kRowWindow; ++j)
      if (j >= w.begin && j < w.end) add_row(all, kv[j].x[i], score[j].x[i], j == w.begin);
    out.x[i] = __fdiv_rn(all.value, all.sum);
  }
  return out;
}

// A warp's pooled dims on their way from two to eight per lane.
struct RowShared {
  float pooled[kRowWarps][kHeadDimV];
};

template <KvLayoutId kId>
__device__ __forceinline__ void close_block(const CompressKvArgs& args, const CompressRequest& r,
                                            int64_t token, int64_t close, float* pooled) {
  const CompressKvParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const Window window = find_window(args, r, close);
#pragma unroll 1
  for (int d = 2 * lane; d < kHeadDimV; d += 2 * kWarpSize) {
    const Floats2 x = p.ratio == 1 ? load_row(p, token, d) : pool_rows(p, window, d);
#pragma unroll
    for (int i = 0; i < 2; ++i) pooled[d + i] = x.x[i];
  }
  __syncwarp();
  Floats8 x[kNormPasses];
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[pass].x[i] = pooled[pass * kPassDim + lane * kChunk + i];
  }
  __syncwarp();
  finish_row<kId>(args, x, token, close);
}

// The warp that closes a request's first block closes every block that reaches into the state, and then
// writes the rows of the state that those have read.
template <KvLayoutId kId>
__device__ __forceinline__ void run_token(const CompressKvArgs& args, const CompressRequest& r, int64_t token,
                                          float* pooled) {
  const CompressKvParams& p = args.p;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t position = r.start + token - r.first, oldest = r.oldest(p);
  const bool is_first = position == r.first_close(p.ratio);
  const auto reaches_back = [&](int64_t close) { return close + 1 - p.window() < r.start; };
  if (CompressRequest::closes(position, p.ratio) && (is_first || !reaches_back(position))) {
    int64_t close = position;
    do {
      close_block<kId>(args, r, r.first + close - r.start, close, pooled);
      close += p.ratio;
    } while (is_first && close < r.end() && reaches_back(close));
    for (int64_t q = oldest; is_first && q < r.start; ++q)  // by what they held
      if (const int64_t now = late_position(args, r, q); now >= r.start)
        copy_to_state(args, r, now, lane, kWarpSize);
  }
  if (p.ratio > 1 && r.is_kept(position, p.depth) && !r.is_late(position, p.depth, oldest))
    copy_to_state(args, r, position, lane, kWarpSize);
}

template <KvLayoutId kId>
__global__ void __launch_bounds__(kRowWarps* kWarpSize)
    compress_rows_kernel(const __grid_constant__ CompressKvArgs args) {
  const CompressKvParams& p = args.p;
  MLA_SHARED(RowShared, shared);
  wait_for_previous_grid();
  const int64_t warp = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / kWarpSize;
  const int64_t begin = warp * args.tokens;
  const int64_t end = begin + args.tokens < p.num_tokens ? begin + args.tokens : p.num_tokens;
  for (int64_t token = begin; token < end; ++token) {
    const CompressRequest r = request_of(p, token);
    if (r.state >= 0) run_token<kId>(args, r, token, shared.pooled[threadIdx.x / kWarpSize]);
  }
}

void compress_kv(const CompressKvParams& p, gpuStream_t stream) {
  CompressKvArgs args{p, Divider(p.page_size), Divider(p.depth > 0 ? p.depth : 1), 1};
  if (p.ratio < kBlockRatio) {
    args.tokens = p.num_tokens >= kManyTokens ? p.ratio : 1;
    const int64_t warps = ceil_div(p.num_tokens, args.tokens);
    const LaunchConfig config{
        .grid = ceil_div<int64_t>(warps, kRowWarps), .block = kRowWarps * kWarpSize, .stream = stream};
    with_kv_layout(p.layout, [&](auto id) {
      if constexpr (kv_layout(id).head_dim_qk() == kHeadDimV) launch(compress_rows_kernel<id>, config, args);
    });
    return;
  }
  args.tokens = tokens_of_block(p.num_tokens);
  const LaunchConfig config{.grid = ceil_div(p.num_tokens, args.tokens),
                            .block = p.online ? kFoldThreads : kPoolThreads,
                            .stream = stream};
  with_kv_layout(p.layout, [&](auto id) {
    if constexpr (kv_layout(id).head_dim_qk() == kHeadDimV) {
      if (p.online) launch(fold_blocks_kernel<id>, config, args);
      else launch(pool_blocks_kernel<id>, config, args);
    }
  });
}

}  // namespace mla_fp8::gpu
