#pragma once
// Ratios 1, 2 and 4. Ratio 1: a warp takes a token. Otherwise a block of threads takes one token of a small
// call, or up to 16. It pools four closings at a time, four dims a thread, and each warp finishes a row.
#include "cuda/compress_kv/pool.cuh"
#include "cuda/device/launch.cuh"
#if MLA_FP8_PTX
#include "cuda/device/roles.cuh"
#endif

namespace mla_fp8::gpu {

inline constexpr int kRowWarps = 4;  // warps of a block of threads
inline constexpr int kRowThreads = kRowWarps * kWarpSize;
static_assert(kRowThreads * kPoolDims == kHeadDimV);
inline constexpr int kMaxRowTokens = 16;
// Registers leave so many: a thread holds four dims of a window of 8 rows, or of two windows of 2.
template <int kRatio>
inline constexpr int kRowBlocksPerSm = kRatio == 4 ? 4 : 8;

// Tokens of a block of threads, so that an H200 runs all blocks at once.
template <int kRatio>
inline int64_t tokens_of_row_block(int64_t num_tokens) {
  const int64_t tokens = ceil_div(num_tokens, int64_t{132} * kRowBlocksPerSm<kRatio>);
  return tokens < kMaxRowTokens ? tokens : kMaxRowTokens;
}

// The tokens of a block of threads, and the blocks of tokens that they close. A request's second closing is
// in the list of the block that has its first, if it reaches into the state too.
template <int kRatio>
struct alignas(16) RowShared {
  CompressRequest request[kMaxRowTokens];
  // Where the rows of a closing's window lie.
  alignas(16) const float* row[2 * kMaxRowTokens][CompressKvParams::window_of(kRatio)];
  int64_t kept_token[kMaxRowTokens], kept_offset[kMaxRowTokens];  // rows that go into the state at once
  Closing closing[2 * kMaxRowTokens];
  int8_t owner[2 * kMaxRowTokens];   // the closing's token, among those here
  bool is_first[2 * kMaxRowTokens];  // the first of its request
  int num_closings, num_kept;
  alignas(16) float pooled[kRowWarps][kHeadDimV];
};

// Lists the closings of the tokens. The first warp does, a lane a token.
template <int kRatio>
__device__ __forceinline__ void list_closings(const CompressKvArgs& args, const TokenRange& tokens,
                                              RowShared<kRatio>& shared) {
  constexpr int kWindow = CompressKvParams::window_of(kRatio), kMost = kWindow > kRatio ? 2 : 1;
  const CompressKvParams& p = args.p;
  const int lane = threadIdx.x;
  int closings = 0;
  bool is_first = false;
  CompressRequest r{};
  int64_t token = tokens.begin + lane, position = 0, slot = -1;
  if (lane < tokens.count) {
    slot = load_index(p.slot_mapping, p.slots_are_int64, token);
    r = request_of(args, token);
    shared.request[lane] = r;
    position = r.start + token - r.first;
    if (r.state >= 0 && CompressRequest::closes(position, kRatio)) {
      is_first = position == r.first_close(kRatio);
      const auto reaches_back = [&](int64_t close) { return close + 1 - kWindow < r.start; };
      if constexpr (kMost == 1) closings = 1;  // the first one alone can reach into the state
      else if (!is_first) closings = !reaches_back(position);
      else closings = position + kRatio < r.end() && reaches_back(position + kRatio) ? 2 : 1;
    }
  }
  const unsigned up_to_here = kFullWarp >> (kWarpSize - 1 - lane);
  int last = __popc(__ballot_sync(kFullWarp, closings > 0) & up_to_here);
  if constexpr (kMost > 1) last += __popc(__ballot_sync(kFullWarp, closings > 1) & up_to_here);
#pragma unroll 1
  for (int i = 0; i < kMost; ++i) {
    if (i >= closings) break;
    const int at = last - closings + i, further = i * kRatio;
    if (i > 0) slot = load_index(p.slot_mapping, p.slots_are_int64, token + further);
    const RowAddresses<kWindow> window(args, r, position + further + 1 - kWindow);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) shared.row[at][j] = window.row[j];
    shared.closing[at] = {token + further, position + further, slot};
    shared.owner[at] = static_cast<int8_t>(lane);
    shared.is_first[at] = is_first && i == 0;
  }
  if (lane == kWarpSize - 1) shared.num_closings = last;
}

// Lists the rows that go into the state at once. Another warp does, at the same time.
template <int kRatio>
__device__ __forceinline__ void list_kept(const CompressKvArgs& args, const TokenRange& tokens,
                                          RowShared<kRatio>& shared) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = tokens.begin + lane;
  CompressRequest r{};
  int64_t kept = -1;
  if (lane < tokens.count) {
    r = request_of(args, token);
    if (r.state >= 0) kept = kept_position(args, r, r.start + token - r.first, r.oldest(kRatio));
  }
  const unsigned keeping = __ballot_sync(kFullWarp, kept >= 0);
  if (kept >= 0) {
    const int at = __popc(keeping & ((1u << lane) - 1));
    shared.kept_token[at] = r.first + kept - r.start;
    shared.kept_offset[at] = state_row(args, r, kept) - args.p.state;
  }
  if (lane == 0) shared.num_kept = __popc(keeping);
}

// The window of a closing, four dims a thread.
template <int kRatio>
struct ClosingRows {
  static constexpr int kWindow = CompressKvParams::window_of(kRatio);
  static constexpr bool kOverlaps = kWindow > kRatio;
  static constexpr int kHalf = kOverlaps ? 2 * kHeadDimV : kHeadDimV;  // where a row's scores begin
  PoolRows<kWindow> rows;
  bool has_previous;

  __device__ __forceinline__ ClosingRows(const RowShared<kRatio>& shared, int closing)
      : has_previous(!kOverlaps || shared.closing[closing].position + 1 >= kWindow) {
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const float* row = shared.row[closing][j] + first_dim(j);
      const bool exists = j >= kWindow - kRatio || has_previous;
      rows.kv[j] = load_if<kPoolDims>(row, exists);
      rows.score[j] = load_if<kPoolDims>(row + kHalf, exists);
    }
  }
  __device__ __forceinline__ void pool(const float* ape, float (&pooled)[kHeadDimV]) {
    if (kOverlaps && ape != nullptr) {  // row j has position j modulo ratio, as the window ends a block
#pragma unroll
      for (int j = 0; j < kWindow; ++j) rows.add_bias(j, ape + j % kRatio * kHalf + first_dim(j));
    }
    *reinterpret_cast<Words<kPoolDims>*>(&pooled[threadIdx.x * kPoolDims]) = rows.pool_dims(has_previous);
  }

 private:
  static __device__ __forceinline__ int first_dim(int j) {
    return (kOverlaps && j >= kRatio ? kHeadDimV : 0) + threadIdx.x * kPoolDims;
  }
};

// Ratio 2 pools two closings at once; then half of the warps finish their rows, and the others pool on. So
// less is left to do when the last rows have come, while memory is idle.
template <int kRatio>
inline constexpr int kTurns = kRatio == 2 ? 2 : 1;
template <int kRatio>
inline constexpr int kTurnWarps = kRowWarps / kTurns<kRatio>;
// Waits until all warps have pooled. Warps whose turn it is not arrive without waiting.
template <int kRatio>
__device__ __forceinline__ void wait_for_pooled([[maybe_unused]] int turn, [[maybe_unused]] bool is_ours) {
#if MLA_FP8_PTX
  if constexpr (kTurns<kRatio> > 1) {
    const auto join = [&](int barrier) {  // a constant: a number in a register takes all 16 barriers
      if (is_ours) named_barrier(barrier, kRowThreads);
      else named_barrier_arrive(barrier, kRowThreads);
    };
    if (turn == 0) join(1);
    else join(2);
    return;
  }
#endif
  __syncthreads();
}

template <int kRatio>
inline constexpr int kRowVectors = kHeadDimV * (kRatio == 4 ? 4 : 2) / 4;

// Copies the rows that go into the state at once.
template <int kRatio>
__device__ __forceinline__ void copy_kept(const CompressKvArgs& args, const RowShared<kRatio>& shared,
                                          int thread, int threads) {
  const CompressKvParams& p = args.p;
  const float* const input = static_cast<const float*>(p.kv_score);
  copy_vectors<8>(shared.num_kept * kRowVectors<kRatio>, thread, threads, [&](int i) -> RowCopy {
    const int row = i / kRowVectors<kRatio>, at = i % kRowVectors<kRatio> * 4;
    return {input + shared.kept_token[row] * p.kv_score_stride_token + at,
            p.state + shared.kept_offset[row] + at};
  });
}

// Copies the rows that replace those that a first closing of this block has read.
template <int kRatio>
__device__ __forceinline__ void copy_late(const CompressKvArgs& args, const RowShared<kRatio>& shared,
                                          int thread, int threads) {
  const CompressKvParams& p = args.p;
  for (int i = 0; i < shared.num_closings; ++i) {
    if (!shared.is_first[i]) continue;
    const CompressRequest r = shared.request[shared.owner[i]];
    const int64_t oldest = r.oldest(kRatio);
    if (r.end() - oldest <= p.depth) continue;  // each row of the state is still that of one token
    copy_vectors<8>(static_cast<int>(r.start - oldest) * kRowVectors<kRatio>, thread, threads,
                    [&](int v) -> RowCopy {
                      const int64_t now = late_position(args, r, oldest + v / kRowVectors<kRatio>);
                      const int at = v % kRowVectors<kRatio> * 4;
                      if (now < r.start) return {nullptr, nullptr};
                      return {input_row(p, r, now) + at, state_row(args, r, now) + at};
                    });
  }
}

template <int kRatio>
__global__ void __launch_bounds__(kRowThreads, kRowBlocksPerSm<kRatio>)
    compress_rows_kernel(const __grid_constant__ CompressKvArgs args) {
  constexpr int kVectors = kRowVectors<kRatio> / kRowThreads;
  const CompressKvParams& p = args.p;
  MLA_SHARED(RowShared<kRatio>, shared);
  const TokenRange tokens = token_range(args, blockIdx.x);
  const int thread = threadIdx.x, warp = thread / kWarpSize;
  // The row of a single token is loaded while its request is found.
  const bool is_single = args.tokens == 1;
  Words<4> single[kVectors];
  const float* const input = static_cast<const float*>(p.kv_score) + tokens.begin * p.kv_score_stride_token;
  wait_for_previous_grid();
  if (is_single)
#pragma unroll
    for (int k = 0; k < kVectors; ++k) single[k] = load_if<4>(input + 4 * (thread + k * kRowThreads), true);
  if (warp == 0) list_closings<kRatio>(args, tokens, shared);
  if (warp == 1) list_kept<kRatio>(args, tokens, shared);
  __syncthreads();

  if (is_single) {
    if (shared.num_kept > 0)
#pragma unroll
      for (int k = 0; k < kVectors; ++k)
        store(p.state + shared.kept_offset[0] + 4 * (thread + k * kRowThreads), single[k]);
  }

  const int num_closings = shared.num_closings;
  for (int first = 0; first < num_closings; first += kRowWarps) {
    const int left = num_closings - first, count = left < kRowWarps ? left : kRowWarps;
#pragma unroll 1
    for (int turn = 0; turn * kTurnWarps<kRatio> < count; ++turn) {
      const int end = (turn + 1) * kTurnWarps<kRatio>;
#pragma unroll 1
      for (int i = turn * kTurnWarps<kRatio>; i < end && i < count; ++i) {
        if (kTurns<kRatio> > 1 && i + 1 < count) {
          static_assert(kTurns<kRatio> == 1 || kTurnWarps<kRatio> == 2);
          ClosingRows<kRatio> one(shared, first + i), other(shared, first + i + 1);
          one.pool(p.ape, shared.pooled[i]);
          other.pool(p.ape, shared.pooled[++i]);
          continue;
        }
        ClosingRows<kRatio>(shared, first + i).pool(p.ape, shared.pooled[i]);
      }
      const bool is_ours = warp / kTurnWarps<kRatio> == turn, finishes = is_ours && warp < count;
      RowFinish row;
      const Closing& closing = shared.closing[first + warp];
      if (finishes) row.load_weights(p), row.find(args, closing);
      wait_for_pooled<kRatio>(turn, is_ours);
      if (finishes) row.finish(p, closing, PooledRow{shared.pooled[warp]});
    }
    __syncthreads();  // before `pooled`, and rows of the state that were read, are written again
  }

  if (!is_single) copy_kept<kRatio>(args, shared, thread, kRowThreads);
  copy_late<kRatio>(args, shared, thread, kRowThreads);
}

// A lane's part of a token's row: eight floats a pass, or eight bf16 in the first words.
struct TokenRow {
  Words<4> words[kNormPasses][2];
  bool is_bf16;

  __device__ __forceinline__ TokenRow(const CompressKvParams& p, int64_t token) : is_bf16(p.is_bf16) {
    const int itemsize = p.is_bf16 ? 2 : 4;
    const auto* from = static_cast<const uint8_t*>(p.kv_score) +
                       (token * p.kv_score_stride_token + threadIdx.x % kWarpSize * kChunk) * itemsize;
#pragma unroll
    for (int pass = 0; pass < kNormPasses; ++pass, from += kPassDim * itemsize) {
      words[pass][0] = *reinterpret_cast<const Words<4>*>(from);  // the L1 keeps a sector for its other half
      words[pass][1] = p.is_bf16 ? Words<4>{} : *reinterpret_cast<const Words<4>*>(from + 16);
    }
  }
  __device__ __forceinline__ Floats8 operator()(int pass) const {
    if (is_bf16) return unpack8(words[pass][0]);
    Floats8 out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out.x[i] = bits_float(words[pass][i / 4][i % 4]);
    return out;
  }
};

// Ratio 1: each token is a row.
__global__ void __launch_bounds__(kRowThreads, 8)
    compress_tokens_kernel(const __grid_constant__ CompressKvArgs args) {
  const CompressKvParams& p = args.p;
  wait_for_previous_grid();
  const int64_t token = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / kWarpSize;
  if (token >= p.num_tokens) return;
  const TokenRow pooled(p, token);
  RowFinish row;
  row.load_weights(p);
  const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, token);
  const CompressRequest r = request_of(args, token, false);
  if (r.state < 0) return;
  const Closing closing{token, r.start + token - r.first, slot};
  row.find(args, closing);
  row.finish(p, closing, pooled);
}

}  // namespace mla_fp8::gpu
