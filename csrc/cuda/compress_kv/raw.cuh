#pragma once
// Ratio 128 from raw rows. The 128 rows of a block are 16 groups of eight, which the warps share, four dims a
// lane. Results of groups join as pairs of neighbours.
#include "cuda/compress_kv/blocks.cuh"

namespace mla_fp8::gpu {

inline constexpr int kGroupRows = 8;
inline constexpr int kWarpDims = kWarpSize * kPoolDims;
inline constexpr int kRowShares = 8;  // warps that share a block's rows, for the same dims
template <int kCluster>
inline constexpr int kPoolThreads = kRowShares * kSliceDims<kCluster> / kWarpDims * kWarpSize;
inline constexpr int kWarpGroups = kBlockRatio / kGroupRows / kRowShares;
static_assert(kWarpGroups == 2);

template <int kCluster>
struct alignas(16) PoolShared {
  TokensShared tokens;
  uint32_t kept[kMaskWords];  // bits of tokens that copy a row into the state at once
  int64_t kept_token[kMaxTokens], kept_offset[kMaxTokens];  // at place_of: from where, and to where
  PooledShared pooled;
  float part[3][kRowShares][kSliceDims<kCluster>];  // top, sum and value of each warp's rows
};

// Loads the rows of eight positions from `first` on.
__device__ __forceinline__ PoolRows<kGroupRows> load_group(const CompressKvArgs& args,
                                                           const CompressRequest& r, int64_t first, int d) {
  const CompressKvParams& p = args.p;
  PoolRows<kGroupRows> rows;
  const RowAddresses<kGroupRows> addresses(args, r, first);
#pragma unroll
  for (int j = 0; j < kGroupRows; ++j) {
    rows.kv[j] = load_if<kPoolDims>(addresses.row[j] + d, true);
    rows.score[j] = load_if<kPoolDims>(addresses.row[j] + kHeadDimV + d, true);
  }
  if (p.ape != nullptr) {
    const float* bias = p.ape + first % kBlockRatio * kHeadDimV + d;
#pragma unroll
    for (int j = 0; j < kGroupRows; ++j) rows.add_bias(j, bias + j * kHeadDimV);
  }
  return rows;
}

struct PooledDims {
  Pooled dim[kPoolDims];
};

__device__ __forceinline__ PooledDims pool_group(const PoolRows<kGroupRows>& rows) {
  PooledDims out;
#pragma unroll
  for (int i = 0; i < kPoolDims; ++i) out.dim[i] = rows.pool(i, true);
  return out;
}

// Pools a slice of the block that ends at `close`, and puts its dims into the first block of threads.
template <int kCluster>
__device__ __forceinline__ void pool_slice(const CompressKvArgs& args, const CompressRequest& r,
                                           int64_t close, int slice, PoolShared<kCluster>& shared) {
  const int warp = threadIdx.x / kWarpSize, share = warp % kRowShares;
  const int dim = warp / kRowShares * kWarpDims + threadIdx.x % kWarpSize * kPoolDims;
  const int d = slice * kSliceDims<kCluster> + dim;
  const int64_t first = close + 1 - kBlockRatio + share * kWarpGroups * kGroupRows;
  PooledDims half{}, mine{};
#pragma unroll 1
  for (int g = 0; g < kWarpGroups; ++g) {
    half = mine;
    mine = pool_group(load_group(args, r, first + g * kGroupRows, d));
  }
#pragma unroll
  for (int i = 0; i < kPoolDims; ++i) mine.dim[i] = join(half.dim[i], mine.dim[i]);
  const auto put = [&](int part, const Words<kPoolDims>& words) {
    *reinterpret_cast<Words<kPoolDims>*>(&shared.part[part][share][dim]) = words;
  };
  Words<kPoolDims> top, sum, value;
#pragma unroll
  for (int i = 0; i < kPoolDims; ++i) {
    top[i] = float_bits(mine.dim[i].top);
    sum[i] = float_bits(mine.dim[i].sum);
    value[i] = float_bits(mine.dim[i].value);
  }
  put(0, top);
  put(1, sum);
  put(2, value);
  __syncthreads();
  if (const int t = threadIdx.x; t < kSliceDims<kCluster>) {
    Pooled part[kRowShares];
#pragma unroll
    for (int w = 0; w < kRowShares; ++w)
      part[w] = {shared.part[0][w][t], shared.part[1][w][t], shared.part[2][w][t]};
#pragma unroll
    for (int apart = 1; apart < kRowShares; apart *= 2)
#pragma unroll
      for (int w = 0; w < kRowShares; w += 2 * apart) part[w] = join(part[w], part[w + apart]);
    Cluster<kCluster>::put(shared.pooled, slice * kSliceDims<kCluster> + t,
                           __fdiv_rn(part[0].value, part[0].sum));
  }
  __syncthreads();  // before `part` is written again
}

// Lists whose the tokens are, what they close, and which rows they leave in the state.
template <int kCluster>
__device__ __forceinline__ void list_pools(const CompressKvArgs& args, const TokenRange& tokens,
                                           PoolShared<kCluster>& shared) {
  const CompressKvParams& p = args.p;
  TokensShared& list = shared.tokens;
  const int thread = threadIdx.x;
  CompressRequest r{};
  int64_t kept = -1;
  bool closes = false;
  if (thread < tokens.count) {
    const int64_t token = tokens.begin + thread, slot = load_index(p.slot_mapping, p.slots_are_int64, token);
    r = request_of(args, token);
    const int64_t position = r.start + token - r.first;
    if (r.state >= 0) {
      closes = CompressRequest::closes(position, kBlockRatio);
      kept = kept_position(args, r, position, r.oldest(kBlockRatio));
    }
    list.request[thread] = r;
    list.closing[thread] = {token, position, slot};
  }
  if (thread >= kMaxTokens) return;
  put_bits(list.work, closes);
  put_bits(shared.kept, kept >= 0);
  const uint32_t keeping = __ballot_sync(kFullWarp, kept >= 0), before = (1u << thread % kWarpSize) - 1;
  if (kept < 0) return;
  const int at = thread / kWarpSize * kWarpSize + __popc(keeping & before);
  shared.kept_token[at] = r.first + kept - r.start;
  shared.kept_offset[at] = state_row(args, r, kept) - p.state;
}

// Where vector i of a slice of rows lies: its row, and where in that.
template <int kCluster>
struct SliceVector {
  static constexpr int kVectors = kSliceVectors<kCluster>;
  int row, at;
  __device__ __forceinline__ SliceVector(int i, int slice)
      : row(i / kVectors),
        at(i % kVectors / (kVectors / 2) * kHeadDimV + slice * kSliceDims<kCluster> +
           i % (kVectors / 2) * 4) {}
};
template <int kCluster, class Copy>
__device__ __forceinline__ void copy_slice(int slice, int num_rows, const Copy& copy) {
  copy_vectors<4>(num_rows * kSliceVectors<kCluster>, threadIdx.x, kPoolThreads<kCluster>,
                  [&](int i) -> RowCopy { return copy(SliceVector<kCluster>(i, slice)); });
}

template <int kCluster>
__global__ void __launch_bounds__(kPoolThreads<kCluster>, kCluster > 1 ? 1 : 2)
    pool_blocks_kernel(const __grid_constant__ CompressKvArgs args) {
  const CompressKvParams& p = args.p;
  MLA_SHARED(PoolShared<kCluster>, shared);
  wait_for_previous_grid();
  const TokenRange tokens = token_range(args, Cluster<kCluster>::index());
  const int rank = Cluster<kCluster>::rank();
  TokensShared& list = shared.tokens;
  const float* const input = static_cast<const float*>(p.kv_score) + tokens.begin * p.kv_score_stride_token;
  // The row of a single token is loaded while its request is found.
  const bool is_single = args.tokens == 1;
  const int thread = threadIdx.x;
  constexpr int kVectors = kSliceVectors<kCluster>;
  const SliceVector<kCluster> own(thread % kVectors, kCluster > 1 ? rank : thread / kVectors);
  const bool has_own = is_single && (kCluster == 1 || thread < kVectors);
  const Words<4> single = load_if<4>(input + own.at, has_own);
  list_pools(args, tokens, shared);
  __syncthreads();
  const auto for_slices = [&](const auto& work) {
    if constexpr (kCluster > 1) work(rank);
    else
#pragma unroll 1
      for (int slice = 0; slice < kSlices<kCluster>; ++slice) work(slice);
  };

  if (is_single) {
    if (has_own && shared.kept[0] != 0) store(p.state + shared.kept_offset[0] + own.at, single);
  } else if (const int num_kept = count_bits(shared.kept); num_kept > 0) {
    const auto* const call = static_cast<const float*>(p.kv_score);
    for_slices([&](int slice) {
      copy_slice<kCluster>(slice, num_kept, [&](const SliceVector<kCluster>& v) -> RowCopy {
        const int place = place_of(shared.kept, v.row);
        return {call + shared.kept_token[place] * p.kv_score_stride_token + v.at,
                p.state + shared.kept_offset[place] + v.at};
      });
    });
  }

  for_bits(list.work, [&](int token) {
    const CompressRequest r = list.request[token];
    const Closing closing = list.closing[token];
    if (kCluster == 1 && thread < kBlockRatio)
      prefetch_row(p, RowAddresses<1>(args, r, closing.position + 1 - kBlockRatio + thread).row[0]);
    Cluster<kCluster>::sync();  // all blocks run, and the first has read `pooled`
    for_slices([&](int slice) { pool_slice<kCluster>(args, r, closing.position, slice, shared); });
    Cluster<kCluster>::sync();
    if (rank == 0 && thread < kWarpSize) finish_row(args, closing, shared.pooled.dims);
    const int64_t oldest = r.oldest(kBlockRatio);
    if (closing.position != r.first_close(kBlockRatio) || r.end() - oldest <= p.depth) return;
    for_slices([&](int slice) {  // rows that replace those that this closing has read
      copy_slice<kCluster>(slice, static_cast<int>(r.start - oldest),
                           [&](const SliceVector<kCluster>& v) -> RowCopy {
                             const int64_t now = late_position(args, r, oldest + v.row);
                             if (now < r.start) return {nullptr, nullptr};
                             return {input_row(p, r, now) + v.at, state_row(args, r, now) + v.at};
                           });
    });
  });
}

}  // namespace mla_fp8::gpu
