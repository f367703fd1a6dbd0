#pragma once
// Ratio 128 online. A thread folds a dim token by token, also in a prefill, so that each call continues where
// the last one stopped.
#include "cuda/compress_kv/blocks.cuh"

namespace mla_fp8::gpu {

template <int kCluster>
inline constexpr int kFoldThreads = kSliceDims<kCluster>;  // a dim each
inline constexpr int kFoldTokens = 16;                     // tokens that are loaded while as many are folded

struct alignas(16) FoldShared {
  TokensShared tokens;
  PooledShared pooled;
};

// A dim's softmax so far. While all scores are -inf, sum is 0; mean is 0, or NaN as 0 times a value may be.
struct Running {
  float top, sum, mean;

  // The pooled dim of a block: NaN without a weight, as a softmax is.
  __device__ __forceinline__ float result() const { return sum == 0.0f ? bits_float(0x7fffffff) : mean; }
};

__device__ __forceinline__ Running fold(const Running& before, float kv, float score) {
  const float top = larger(score, before.top);
  const float old = __fmul_rn(before.sum, weight_of(before.top, top)), weight = weight_of(score, top);
  const float sum = __fadd_rn(old, weight);
  const float value = fmaf(kv, weight, __fmul_rn(before.mean, old));
  return {top, sum, __fdiv_rn(value, sum == 0.0f ? 1.0f : sum)};
}

// The tokens whose values go into the state: from position `from` on, but not `skip`.
struct Kept {
  int64_t from, skip;
  float* state;  // of the request and dim
};

// Up to kFoldTokens tokens as they lie in memory. No instruction waits for them before they are folded.
struct FoldTokens {
  float kv[kFoldTokens], raw[kFoldTokens], bias[kFoldTokens];

  __device__ __forceinline__ FoldTokens(const float* row, const float* biases, int64_t stride, int count) {
#pragma unroll
    for (int j = 0; j < kFoldTokens; ++j) {
      kv[j] = bits_float(load_if<1>(row + j * stride, j < count)[0]);
      raw[j] = bits_float(load_if<1>(row + j * stride + kHeadDimV, j < count)[0]);
      bias[j] = bits_float(load_if<1>(biases + j * kHeadDimV, biases != nullptr && j < count)[0]);
    }
  }
  // The raw score if there is no bias: a sum with 0 would lose the sign of a zero.
  __device__ __forceinline__ float score(int j, bool has_bias) const {
    return has_bias ? __fadd_rn(raw[j], bias[j]) : raw[j];
  }
};

// Folds kFoldTokens tokens; returns false, with nothing done, if a number is extreme. The larger score has
// weight 1: one exp2 a token is left, which waits for no other fold. `begins`: the first begins a block.
__device__ __forceinline__ bool fold_plain(Running& before, const FoldTokens& t, bool has_bias, bool begins) {
  float weight[kFoldTokens];  // the smaller of the two
  bool is_larger[kFoldTokens];
  float top = begins ? t.score(0, has_bias) : before.top;
  bool is_plain = (top > -INFINITY) & (begins | ((before.sum >= 1.0f) & (before.sum <= kPlainSum)));
#pragma unroll
  for (int j = 0; j < kFoldTokens; ++j) {
    const float score = t.score(j, has_bias);
    is_larger[j] = score > top;
    weight[j] = exp2_nonpositive(
        __fmul_rn(__fsub_rn(is_larger[j] ? top : score, is_larger[j] ? score : top), kLog2E));
    top = larger(score, top);
    is_plain = is_plain & (score <= top);
  }
  Running x{top, before.sum, before.mean};
  float least = 1.0f, most = 1.0f;  // of the dividends
#pragma unroll
  for (int j = 0; j < kFoldTokens; ++j) {
    const float old = is_larger[j] ? __fmul_rn(x.sum, weight[j]) : x.sum,
                own = is_larger[j] ? 1.0f : weight[j];
    const float sum = __fadd_rn(old, own), value = fmaf(t.kv[j], own, __fmul_rn(x.mean, old));
    const float mean = Reciprocal(sum).of(value);
    const bool is_first = j == 0 && begins;
    const float size = is_first ? 1.0f : fabsf(value);
    least = size < least ? size : least;
    most = size > most ? size : most;
    x.sum = is_first ? 1.0f : sum;
    x.mean = is_first ? t.kv[j] : mean;
  }
  is_plain = is_plain & (top < INFINITY) & (least >= kLeastPlain) & (most <= kMostPlain);
  if (is_plain) before = x;
  return is_plain;
}

// Folds positions `from` to `to` - 1 of one block, one after another.
__device__ __forceinline__ Running fold_tokens(const CompressKvArgs& args, const CompressRequest& r,
                                               Running x, int64_t from, int64_t to, int dim,
                                               const Kept& kept) {
  const CompressKvParams& p = args.p;
  const int64_t stride = p.kv_score_stride_token;
  const float* row = input_row(p, r, from) + dim;
  const float* bias = p.ape == nullptr ? nullptr : p.ape + from % kBlockRatio * kHeadDimV + dim;
  int count = static_cast<int>(to - from);
  bool begins = from % kBlockRatio == 0;
  const auto keep = [&](int64_t q) {
    if (q < kept.from || q == kept.skip) return;
    float* to_row = kept.state + remainder(q, args.depth) * p.state_stride_row;
    to_row[0] = x.top;
    to_row[kHeadDimV] = x.sum;
    to_row[2 * kHeadDimV] = x.mean;
  };
  const auto fold_one = [&](float kv, float score, bool is_first) {
    x = is_first ? Running{score, 1.0f, kv} : fold(x, kv, score);
  };
  if (count == 1) {
    const float score = bias == nullptr ? row[kHeadDimV] : __fadd_rn(row[kHeadDimV], *bias);
    fold_one(row[0], score, begins);
    keep(from);
    return x;
  }
  FoldTokens next(row, bias, stride, count);
#pragma unroll 1
  for (int64_t at = from; count > 0; at += kFoldTokens, count -= kFoldTokens) {
    const FoldTokens t = next;
    row += kFoldTokens * stride;
    if (bias != nullptr) bias += kFoldTokens * kHeadDimV;
    next = FoldTokens(row, bias, stride, count - kFoldTokens);
    const bool is_whole = count >= kFoldTokens && at + kFoldTokens <= kept.from;  // and nothing is kept
    if (!is_whole || !fold_plain(x, t, bias != nullptr, begins)) {
#pragma unroll
      for (int j = 0; j < kFoldTokens; ++j) {
        if (j >= count) continue;
        fold_one(t.kv[j], t.score(j, bias != nullptr), j == 0 && begins);
        keep(at + j);
      }
    }
    begins = false;
  }
  return x;
}

// Lists the tokens whose blocks are folded here: those that are the first of a block in this call.
__device__ __forceinline__ void list_folds(const CompressKvArgs& args, const TokenRange& tokens,
                                           TokensShared& shared) {
  const CompressKvParams& p = args.p;
  const int thread = threadIdx.x;
  bool begins = false;
  if (thread < tokens.count) {
    const int64_t token = tokens.begin + thread;
    const CompressRequest r = request_of(args, token);
    const int64_t position = r.start + token - r.first;
    begins = r.state >= 0 && (position == r.start || position % kBlockRatio == 0);
    shared.request[thread] = r;
    if (begins) {
      const int64_t last = block_end(r, position) - 1, closing = token + last - position;
      shared.closing[thread] = {closing, last, load_index(p.slot_mapping, p.slots_are_int64, closing)};
    }
  }
  put_bits(shared.work, begins);
}

// Folds a dim of a block, from `from`, its first position in the call, to `to` - 1. The request's first block
// continues from the state. Whoever has that also writes the one row, from another block of tokens, that
// replaces the state's row.
__device__ __forceinline__ float fold_block(const CompressKvArgs& args, const CompressRequest& r,
                                            int64_t from, int64_t to, int dim) {
  const CompressKvParams& p = args.p;
  const bool goes_on = r.start % kBlockRatio != 0;
  const int64_t late = goes_on ? late_position(args, r, r.start - 1) : -1;
  const bool has_late = late >= block_end(r, r.start);
  Kept kept{r.end() - p.depth, has_late ? late : -1, p.state + r.state * p.state_stride_slot + dim};
  Running x{};
  if (from == r.start && goes_on) {
    const float* row = state_row(args, r, from - 1) + dim;
    x = {row[0], row[kHeadDimV], row[2 * kHeadDimV]};
  }
  float mean = 0;
#pragma unroll 1
  for (bool is_late = false;; is_late = true) {
    x = fold_tokens(args, r, x, from, to, dim, kept);
    if (is_late) break;
    mean = x.result();
    if (from != r.start || !has_late) break;
    from = late - late % kBlockRatio;
    to = late + 1;
    kept.from = late;
    kept.skip = -1;
  }
  return mean;
}

// Folds the only token of a request in this call, four dims a thread: from the state and into it.
__device__ __forceinline__ Words<kPoolDims> fold_single(const CompressKvArgs& args,
                                                        const CompressRequest& r) {
  const CompressKvParams& p = args.p;
  const int d = static_cast<int>(threadIdx.x) * kPoolDims;
  const bool begins = r.start % kBlockRatio == 0;
  const float* const row = input_row(p, r, r.start) + d;
  const float* const before = state_row(args, r, begins ? r.start : r.start - 1) + d;
  const float* const bias = p.ape + r.start % kBlockRatio * kHeadDimV + d;
  const auto kv = load_if<kPoolDims>(row, true), raw = load_if<kPoolDims>(row + kHeadDimV, true);
  const auto biases = load_if<kPoolDims>(bias, p.ape != nullptr);
  Words<kPoolDims> top = load_if<kPoolDims>(before, !begins),
                   sum = load_if<kPoolDims>(before + kHeadDimV, !begins),
                   mean = load_if<kPoolDims>(before + 2 * kHeadDimV, !begins), result;
#pragma unroll
  for (int i = 0; i < kPoolDims; ++i) {
    const float score =
        p.ape != nullptr ? __fadd_rn(bits_float(raw[i]), bits_float(biases[i])) : bits_float(raw[i]);
    Running x{score, 1.0f, bits_float(kv[i])};
    if (!begins)
      x = fold({bits_float(top[i]), bits_float(sum[i]), bits_float(mean[i])}, bits_float(kv[i]), score);
    top[i] = float_bits(x.top);
    sum[i] = float_bits(x.sum);
    mean[i] = float_bits(x.mean);
    result[i] = float_bits(x.result());
  }
  float* const to = state_row(args, r, r.start) + d;
  store(to, top);
  store(to + kHeadDimV, sum);
  store(to + 2 * kHeadDimV, mean);
  return result;
}

template <int kCluster>
__global__ void __launch_bounds__(kFoldThreads<kCluster>, kCluster > 1 ? 1 : 3)
    fold_blocks_kernel(const __grid_constant__ CompressKvArgs args) {
  MLA_SHARED(FoldShared, shared);
  wait_for_previous_grid();
  const TokenRange tokens = token_range(args, Cluster<kCluster>::index());
  const int rank = Cluster<kCluster>::rank();
  const TokensShared& list = shared.tokens;
  list_folds(args, tokens, shared.tokens);
  __syncthreads();
  for_bits(list.work, [&](int token) {
    const CompressRequest r = list.request[token];
    const Closing closing = list.closing[token];
    const int64_t from = r.start + tokens.begin + token - r.first;
    const bool closes = CompressRequest::closes(closing.position, kBlockRatio);
    const auto finish = [&] {
      Cluster<kCluster>::sync();
      if (rank == 0 && threadIdx.x < kWarpSize) finish_row(args, closing, shared.pooled.dims);
    };
    if (kCluster == 1 && r.count == 1) {
      static_assert(kCluster > 1 || kFoldThreads<kCluster> * kPoolDims == kHeadDimV);
      const auto result = fold_single(args, r);
      if (!closes) return;
      *reinterpret_cast<Words<kPoolDims>*>(&shared.pooled.dims[threadIdx.x * kPoolDims]) = result;
      finish();
      __syncthreads();  // before `pooled` is written again
      return;
    }
    if (closes) Cluster<kCluster>::sync();  // all blocks run, and the first has read `pooled`
#pragma unroll 1
    for (int slice = rank; slice < kSlices<kCluster>; slice += kCluster) {
      const int dim = slice * kSliceDims<kCluster> + static_cast<int>(threadIdx.x);
      const float mean = fold_block(args, r, from, closing.position + 1, dim);
      if (closes) Cluster<kCluster>::put(shared.pooled, dim, mean);
    }
    if (closes) finish();
  });
}

}  // namespace mla_fp8::gpu
