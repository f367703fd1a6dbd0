#pragma once
// Ratio 128: a block of threads per closed block of tokens, raw or online. A grid of few blocks looks for
// those among its tokens, as most close nothing.
#include "cuda/compress_kv/pool.cuh"
#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

inline constexpr int kBlockRatio = 128;
inline constexpr int kPoolDims = 2;   // of a thread
inline constexpr int kPoolTeams = 2;  // each pools half of the rows
inline constexpr int kTeamThreads = kHeadDimV / kPoolDims;
inline constexpr int kPoolThreads = kPoolTeams * kTeamThreads;
inline constexpr int kFoldThreads = kHeadDimV;  // a dim each
inline constexpr int kGroupRows = 8;            // pooled in order; groups join in pairs of neighbours
inline constexpr int kTeamGroups = kBlockRatio / kPoolTeams / kGroupRows;
static_assert(kTeamGroups == 8 && kPoolTeams == 2);

inline constexpr int kMaxBlockTokens = 128;
inline constexpr int64_t kGridBlocks = 264;  // two for each multiprocessor of an H200, while that is enough
inline int64_t tokens_of_block(int64_t num_tokens) {
  const int64_t tokens = ceil_div(num_tokens, kGridBlocks);
  return tokens < 1 ? 1 : tokens > kMaxBlockTokens ? kMaxBlockTokens : tokens;
}

// What a block of threads knows of its tokens, and what it pools.
struct alignas(16) PoolShared {
  int64_t
      state_offset[kMaxBlockTokens];  // where the token's row goes in the state; negative: nowhere, or late
  int32_t request[kMaxBlockTokens];   // of a token that has work to do; negative: none
  float pooled[kHeadDimV];
  Pooled part[kHeadDimV];  // of the second team
};
struct alignas(16) FoldShared {
  int32_t request[kMaxBlockTokens];
  float pooled[kHeadDimV];
};

struct TokenRange {
  int64_t begin;
  int count;
};
__device__ __forceinline__ TokenRange tokens_here(const CompressKvArgs& args) {
  const int64_t begin = int64_t{blockIdx.x} * args.tokens, left = args.p.num_tokens - begin;
  return {begin, static_cast<int>(left < args.tokens ? left : args.tokens)};
}

// As finish_row, from shared memory, by the first warp.
template <KvLayoutId kId>
__device__ __forceinline__ void finish_shared(const CompressKvArgs& args, const float* pooled, int64_t token,
                                              int64_t close) {
  if (threadIdx.x >= kWarpSize) return;
  Floats8 x[kNormPasses];
#pragma unroll
  for (int pass = 0; pass < kNormPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[pass].x[i] = pooled[pass * kPassDim + threadIdx.x * kChunk + i];
  }
  finish_row<kId>(args, x, token, close);
}

// ---- raw --------------------------------------------------------------------------------------------------

struct TwoPooled {
  Pooled dim[kPoolDims];
};

__device__ __forceinline__ TwoPooled join(const TwoPooled& a, const TwoPooled& b) {
  return {{join(a.dim[0], b.dim[0]), join(a.dim[1], b.dim[1])}};
}

// Dims d and d + 1 of eight rows from `first` on.
__device__ __forceinline__ TwoPooled pool_group(const CompressKvArgs& args, const CompressRequest& r,
                                                int64_t first, int d) {
  const CompressKvParams& p = args.p;
  Words<2> kv[kGroupRows], score[kGroupRows], bias[kGroupRows];
#pragma unroll
  for (int j = 0; j < kGroupRows; ++j) {
    const float* row = window_row(args, r, first + j) + d;
    kv[j] = load_if<2>(row, true);
    score[j] = load_if<2>(row + kHeadDimV, true);
    bias[j] = load_if<2>(p.ape + (first + j) % kBlockRatio * kHeadDimV + d, p.ape != nullptr);
  }
  TwoPooled out;
#pragma unroll
  for (int i = 0; i < kPoolDims; ++i) {
    float scores[kGroupRows];
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) {
      scores[j] = bits_float(score[j][i]);
      if (p.ape != nullptr) scores[j] = __fadd_rn(scores[j], bits_float(bias[j][i]));
    }
    Pooled& all = out.dim[i];
    all.top = scores[0];
#pragma unroll
    for (int j = 1; j < kGroupRows; ++j) all.top = larger(scores[j], all.top);
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) add_row(all, bits_float(kv[j][i]), scores[j], j == 0);
  }
  return out;
}

// The block that ends at `close`, into shared.pooled. No thread reads the state after the last barrier.
__device__ __forceinline__ void pool_block(const CompressKvArgs& args, const CompressRequest& r,
                                           int64_t close, PoolShared& shared) {
  const int team = threadIdx.x / kTeamThreads, d = threadIdx.x % kTeamThreads * kPoolDims;
  const int64_t first = close + 1 - kBlockRatio + team * (kTeamGroups * kGroupRows);
  TwoPooled mine{}, half{}, quarter{};  // parts join as pairs of neighbours
#pragma unroll 1
  for (int i = 0; i < kTeamGroups / 2; ++i) {
    const int64_t row = first + 2 * i * kGroupRows;
    mine = join(pool_group(args, r, row, d), pool_group(args, r, row + kGroupRows, d));
    if (i % 2 == 0) quarter = mine;
    else mine = join(quarter, mine);
    if (i == 1) half = mine;
  }
  mine = join(half, mine);
  if (team > 0) {
#pragma unroll
    for (int i = 0; i < kPoolDims; ++i) shared.part[d + i] = mine.dim[i];
  }
  __syncthreads();
  if (team == 0) {
#pragma unroll
    for (int i = 0; i < kPoolDims; ++i) {
      const Pooled all = join(mine.dim[i], shared.part[d + i]);
      shared.pooled[d + i] = __fdiv_rn(all.value, all.sum);
    }
  }
  __syncthreads();
}

// Who closes a request's first block writes what its window held afterwards.
template <KvLayoutId kId>
__global__ void __launch_bounds__(kPoolThreads)
    pool_blocks_kernel(const __grid_constant__ CompressKvArgs args) {
  const CompressKvParams& p = args.p;
  MLA_SHARED(PoolShared, shared);
  wait_for_previous_grid();
  const TokenRange tokens = tokens_here(args);
  const int thread = threadIdx.x;
  if (thread < tokens.count) {
    const int64_t token = tokens.begin + thread;
    const int64_t request = find_request(p.query_start_loc, p.num_requests, token);
    int64_t offset = -1;
    bool closes = false;
    if (request >= 0) {
      const CompressRequest r = compress_request(p, request);
      const int64_t position = r.start + token - r.first;
      const bool served = r.state >= 0 && token >= r.first && position < r.end();
      closes = served && CompressRequest::closes(position, p.ratio);
      if (served && r.is_kept(position, p.depth) && !r.is_late(position, p.depth, r.oldest(p)))
        offset = state_row(args, r, position) - p.state;
    }
    shared.state_offset[thread] = offset;
    shared.request[thread] = closes ? static_cast<int32_t>(request) : -1;
  }
  __syncthreads();

  constexpr int kRowVectors = 2 * kHeadDimV / 4;
  for (int i = thread; i < tokens.count * kRowVectors; i += kPoolThreads) {
    const int64_t offset = shared.state_offset[i / kRowVectors];
    const float* from = static_cast<const float*>(p.kv_score) +
                        (tokens.begin + i / kRowVectors) * p.kv_score_stride_token + i % kRowVectors * 4;
    const Words<4> words = load_if<4>(from, offset >= 0);
    if (offset >= 0) store(p.state + offset + i % kRowVectors * 4, words);
  }

  for (int j = 0; j < tokens.count; ++j) {
    if (shared.request[j] < 0) continue;
    const CompressRequest r = compress_request(p, shared.request[j]);
    const int64_t token = tokens.begin + j, close = r.start + token - r.first;
    pool_block(args, r, close, shared);
    finish_shared<kId>(args, shared.pooled, token, close);
    if (close == r.first_close(p.ratio)) {
      const int64_t oldest = r.oldest(p);
      const int rows = static_cast<int>(r.start - oldest);
      for (int i = thread; i < rows * kRowVectors; i += kPoolThreads) {
        const int64_t now = late_position(args, r, oldest + i / kRowVectors);
        if (now < r.start) continue;
        const float* from = input_row(p, r, now) + i % kRowVectors * 4;
        store(state_row(args, r, now) + i % kRowVectors * 4, load_if<4>(from, true));
      }
    }
    __syncthreads();  // before shared.pooled is written again
  }
}

// ---- online -----------------------------------------------------------------------------------------------

struct Running {
  float top, sum, mean;
};

__device__ __forceinline__ Running fold(const Running& before, float kv, float score, bool begins) {
  if (begins) return {score, 1.0f, kv};
  const float top = larger(score, before.top);
  const float old = __fmul_rn(before.sum, weight_of(before.top, top)), weight = weight_of(score, top);
  const float sum = __fadd_rn(old, weight);
  return {top, sum, __fdiv_rn(fmaf(kv, weight, __fmul_rn(before.mean, old)), sum)};
}

__device__ __forceinline__ void keep(const CompressKvArgs& args, const CompressRequest& r, int64_t position,
                                     const Running& x) {
  float* row = state_row(args, r, position) + threadIdx.x;
  row[0] = x.top;
  row[kHeadDimV] = x.sum;
  row[2 * kHeadDimV] = x.mean;
}

// A thread's dim, tokens at `from` to `to` - 1, one after another; is_kept(q): which go into the state.
template <class IsKept>
__device__ __forceinline__ Running fold_tokens(const CompressKvArgs& args, const CompressRequest& r,
                                               Running x, int64_t from, int64_t to, const IsKept& is_kept) {
  const CompressKvParams& p = args.p;
  constexpr int kInFlight = 8;
  for (int64_t first = from; first < to; first += kInFlight) {
    float kv[kInFlight], score[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t q = first + j < to ? first + j : first;
      const float* row = input_row(p, r, q) + threadIdx.x;
      kv[j] = row[0];
      score[j] = row[kHeadDimV];
      if (p.ape != nullptr) score[j] = __fadd_rn(score[j], p.ape[q % kBlockRatio * kHeadDimV + threadIdx.x]);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j >= to) continue;
      x = fold(x, kv[j], score[j], (first + j) % kBlockRatio == 0);
      if (is_kept(first + j)) keep(args, r, first + j, x);
    }
  }
  return x;
}

// Blocks of tokens are folded by who has their first token of the call. The request's first block goes on
// from the state; who has it also writes, from another block, the one row that takes the place of that.
template <KvLayoutId kId>
__global__ void __launch_bounds__(kFoldThreads)
    fold_blocks_kernel(const __grid_constant__ CompressKvArgs args) {
  const CompressKvParams& p = args.p;
  MLA_SHARED(FoldShared, shared);
  wait_for_previous_grid();
  const TokenRange tokens = tokens_here(args);
  if (static_cast<int>(threadIdx.x) < tokens.count) {
    const int64_t token = tokens.begin + threadIdx.x;
    const int64_t request = find_request(p.query_start_loc, p.num_requests, token);
    bool begins = false;
    if (request >= 0) {
      const CompressRequest r = compress_request(p, request);
      const int64_t position = r.start + token - r.first;
      begins = r.state >= 0 && token >= r.first && position < r.end() &&
               (position == r.start || position % kBlockRatio == 0);
    }
    shared.request[threadIdx.x] = begins ? static_cast<int32_t>(request) : -1;
  }
  __syncthreads();
  for (int j = 0; j < tokens.count; ++j) {
    if (shared.request[j] < 0) continue;
    const CompressRequest r = compress_request(p, shared.request[j]);
    const int64_t from = r.start + tokens.begin + j - r.first;
    const auto block_end = [&](int64_t q) {
      const int64_t end = q - q % kBlockRatio + kBlockRatio;
      return end < r.end() ? end : r.end();
    };
    const int64_t to = block_end(from), first_end = block_end(r.start);
    const bool goes_on = r.start % kBlockRatio != 0;
    // The token whose row takes the place of position start - 1, if it lies in another block.
    const int64_t late = goes_on ? late_position(args, r, r.start - 1) : -1;
    const bool has_late = late >= first_end;
    Running x{};
    if (from == r.start && goes_on) {
      const float* row = state_row(args, r, from - 1) + threadIdx.x;
      x = {row[0], row[kHeadDimV], row[2 * kHeadDimV]};
    }
#pragma unroll 1
    for (bool is_late = false;; is_late = true) {
      const int64_t begin = is_late ? late - late % kBlockRatio : from, end = is_late ? late + 1 : to;
      x = fold_tokens(args, r, x, begin, end, [&](int64_t q) {
        return is_late ? q == late : r.is_kept(q, p.depth) && !(has_late && q == late);
      });
      if (!is_late) shared.pooled[threadIdx.x] = x.mean;
      if (is_late || from != r.start || !has_late) break;
    }
    __syncthreads();
    if (CompressRequest::closes(to - 1, p.ratio))
      finish_shared<kId>(args, shared.pooled, r.first + to - 1 - r.start, to - 1);
    __syncthreads();
  }
}

}  // namespace mla_fp8::gpu
