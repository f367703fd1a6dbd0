// pool_index_k on CUDA, one launch for any mix of prefill, decode and verify. A warp is a unit of work: a
// request's state, or four neighbouring tokens, of which at most one closes a pool of this call's tokens. A
// lane has the same four dims of every row, so what it reads from the state and what it writes there are in
// order. Traffic per token: reads 512 bytes, writes 33 and, of the last tokens, 512. HBM-bound.

#include "ops/pool_index_k.h"

#include "cuda/compress_kv/pool.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/index_row.cuh"

namespace mla_fp8::gpu {

struct PoolIndexKArgs {
  PoolIndexKParams p;
  Divider page_size, depth;
  Divider share;  // tokens of a request if all have as many
};

namespace {

constexpr int kPoolWarps = 2;  // of a block
constexpr int kRowsInFlight = 4;
static_assert(kWarpSize * kPoolDims == kIndexDim);

__device__ __forceinline__ int first_dim() { return threadIdx.x % kWarpSize * kPoolDims; }

// Key and score of one token: a lane's four dims.
struct TokenRow {
  Words<2> k, score;

  __device__ __forceinline__ void load(const uint16_t* keys, const uint16_t* scores, bool wanted) {
    k = load_if<2>(keys + first_dim(), wanted);
    score = load_if<2>(scores + first_dim(), wanted);
  }
};

__device__ __forceinline__ Words<kPoolDims> to_floats(const Words<2>& bf16) {
  Words<kPoolDims> out;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = unpack<Dtype::kBf16>(bf16[i]);
    out[2 * i] = float_bits(pair.x);
    out[2 * i + 1] = float_bits(pair.y);
  }
  return out;
}

// The lane's dims of the pool, bf16.
__device__ __forceinline__ Words<2> pool_dims(const PoolIndexKArgs& args, int64_t state, const PoolEnd& end) {
  const PoolIndexKParams& p = args.p;
  TokenRow tokens[kPoolSize];
#pragma unroll
  for (int j = 0; j < kPoolSize; ++j) {
    const int back = kPoolSize - 1 - j;
    const bool is_kept = j < end.before;
    const int64_t token = end.token - back, row = is_kept ? remainder(end.position - back, args.depth) : 0;
    tokens[j].load(is_kept ? p.kept_key(state, row) : p.key_row(token),
                   is_kept ? p.kept_score(state, row) : p.score_row(token), true);
  }
  PoolRows<kPoolSize> rows;
#pragma unroll
  for (int j = 0; j < kPoolSize; ++j) {
    rows.kv[j] = to_floats(tokens[j].k);
    rows.score[j] = to_floats(tokens[j].score);
    rows.add_bias(j, p.ape + j * kIndexDim + first_dim());
  }
  const Words<kPoolDims> pooled = rows.pool_dims(true);
  Words<2> out;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    out[i] = pack<Dtype::kBf16>({bits_float(pooled[2 * i]), bits_float(pooled[2 * i + 1])});
  return out;
}

// The last rows of a request.
__device__ __forceinline__ void keep_rows(const PoolIndexKArgs& args, const CompressRequest& r) {
  const PoolIndexKParams& p = args.p;
#pragma unroll 1
  for (int64_t first = first_kept(r, p.depth); first < r.end(); first += kRowsInFlight) {
    const int64_t token = r.first + first - r.start, left = r.end() - first;
    TokenRow rows[kRowsInFlight];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j)
      rows[j].load(p.key_row(token + j), p.score_row(token + j), j < left);
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      if (j >= left) break;
      const int64_t row = remainder(first + j, args.depth);
      store(p.kept_key(r.state, row) + first_dim(), rows[j].k);
      store(p.kept_score(r.state, row) + first_dim(), rows[j].score);
    }
  }
}

// Finds which of four tokens from `first` on closes a pool whose tokens are all of the call.
__device__ __forceinline__ PoolEnd find_end(const PoolIndexKArgs& args, int64_t first) {
  const int64_t token = first + threadIdx.x % kPoolSize;
  PoolEnd end{-1, 0, 0};
  if (token < args.p.num_tokens) {
    const CompressRequest r = request_of(args, token);
    end = PoolEnd::at(r, r.start + token - r.first);
  }
  const unsigned found = __ballot_sync(kFullWarp, end.token >= 0 && end.before == 0);
  return {found != 0 ? first + __ffs(found) - 1 : -1, 0, 0};
}

}  // namespace

__global__ void __launch_bounds__(kPoolWarps* kWarpSize)
    pool_index_k_kernel(const __grid_constant__ PoolIndexKArgs args) {
  struct alignas(16) Pooled {
    uint16_t dims[kIndexDim];
  };
  struct Shared {
    Pooled of_warp[kPoolWarps];
  };
  MLA_SHARED(Shared, shared);
  const PoolIndexKParams& p = args.p;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t unit = int64_t{blockIdx.x} * kPoolWarps + warp;
  const bool has_state = unit < p.num_requests;
  wait_for_previous_grid();
  CompressRequest r{0, 0, 0, -1};
  PoolEnd end;
  if (has_state) {
    r = compress_request(p, unit, true);
    end = PoolEnd::at(r, r.first_close(kPoolSize));
    if (end.before == 0) end.token = -1;  // the pool is of four tokens' unit
  } else {
    end = find_end(args, (unit - p.num_requests) * kPoolSize);
  }
  if (end.token >= 0) {
    const int64_t slot = load_index(p.slot_mapping, p.slots_are_int64, end.token);
    uint16_t* const dims = shared.of_warp[warp].dims;
    *reinterpret_cast<Words<2>*>(dims + first_dim()) = pool_dims(args, r.state, end);
    __syncwarp();
    // Each eight lanes have the whole row: they shuffle.
    IndexRow row;
#pragma unroll
    for (int c = 0; c < kIndexChunks; ++c)
      row.x[c] = *reinterpret_cast<const Words<4>*>(dims + IndexRow::element(c));
    hadamard(row);
    CacheRow to = find_row(p, args.page_size, slot);
    to.valid &= threadIdx.x % kWarpSize < kIndexLanes;
    write_index_key<IndexLayoutId::kIndexFp8>(to, p.page_size, encode_index_fp8(p.scaling, row));
  }
  if (has_state && r.state >= 0) keep_rows(args, r);
}

void pool_index_k(const PoolIndexKParams& p, gpuStream_t stream) {
  const int64_t units = p.num_requests + ceil_div<int64_t>(p.num_tokens, kPoolSize);
  launch(pool_index_k_kernel,
         {.grid = ceil_div<int64_t>(units, kPoolWarps), .block = kPoolWarps * kWarpSize, .stream = stream},
         PoolIndexKArgs{p, Divider(p.page_size), Divider(p.depth),
                        Divider(ceil_div(p.num_tokens, p.num_requests))});
}

}  // namespace mla_fp8::gpu
