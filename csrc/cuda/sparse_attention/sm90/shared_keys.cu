// The lists of keys that the queries of a tile share (ops/shared_keys.h), for many_heads over them.
//
// A cluster of 1, 2 or 4 CTAs makes the list of a tile: each takes the keys whose hash names it, so that none
// needs to know the others' before the end. A warp takes 32 entries of one query and cache at a time.
//
//   1  every entry into a hash table in shared memory: the key takes a bucket, the query a bit of its mark
//   2  the entry of the lowest query in a bucket's mark owns the key; owners are counted
//   3  a sum over these, and over the CTAs before, says where each owner's key goes
//
// So the order of a list does not depend on who came first. A slot that one query names twice counts twice,
// which one bit cannot say: such a tile has no list, nor has one whose table overflows or whose list is too
// long to pay. Bound: in decode latencies, in prefill instructions.
#include "cuda/device/cluster.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/plan.h"

namespace mla_fp8::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
constexpr int kBuckets = 2 * kListPartEntries, kBucketsLog2 = 14, kMostProbes = 64;
static_assert(kBuckets == 1 << kBucketsLog2);
constexpr uint32_t kFree = ~0u;        // no key: slot 2^31 - 1 of a second cache would be
constexpr uint16_t kNowhere = 0xffff;  // bucket of an entry that is not valid, or another CTA's
// Each scope of a query is padded to whole chunks of 32 entries.
constexpr int kMostChunks = kMaxListedEntries / kWarpSize + 2 * kMaxTileQueries;

struct ListScope {
  const int32_t* indices;
  int64_t stride;
  const int32_t* topk_length;
  unsigned topk, num_slots;
};
struct ListParams {
  ListScope scopes[2];
  QueryTiles queries;
  unsigned chunks[2];        // of a query and scope
  unsigned one_over_chunks;  // of a query, times 2^32: exact below 2^16
  unsigned most_shared;      // 256ths
  int32_t* lists;
  int64_t words;
  unsigned capacity;
};

struct Smem {
  uint32_t keys[kBuckets];
  uint8_t marks[kBuckets];
  uint32_t owners[kMostChunks];  // bits, of a chunk
  uint32_t before[kMostChunks];  // keys of this CTA in front of it
  uint32_t valid[kWarps];
  uint32_t count, failed;  // for the other CTAs
  uint16_t buckets[];      // of each entry
};

// Which query and scope a chunk is of, and where in that it begins.
struct Chunk {
  unsigned query, scope, first;
  __device__ __forceinline__ Chunk(const ListParams& p, unsigned i) {
    query = __umulhi(i, p.one_over_chunks);
    const unsigned in_query = i - query * (p.chunks[0] + p.chunks[1]);
    scope = in_query >= p.chunks[0];
    first = (in_query - (scope ? p.chunks[0] : 0)) * kWarpSize;
  }
};

// The key at this lane's entry of a chunk, or kFree.
__device__ __forceinline__ uint32_t load_key(const ListParams& p, unsigned first_query, const Chunk& c,
                                             int lane) {
  const ListScope& scope = p.scopes[c.scope];
  const int64_t query = first_query + c.query;
  const int most = static_cast<int>(scope.topk), at = static_cast<int>(c.first) + lane;
  const int length = scope.topk_length ? min(__ldg(scope.topk_length + query), most) : most;
  if (at >= length) return kFree;
  const auto slot = static_cast<unsigned>(__ldg(scope.indices + query * scope.stride + at));
  return slot < scope.num_slots ? slot | c.scope << 31 : kFree;
}

__device__ __forceinline__ bool is_of(uint32_t found, uint32_t key) { return found == kFree || found == key; }

// By a warp, each lane with a key or kFree, which has looked at its first bucket and found that key there.
// The bucket of the key, which gets the query's bit there; kNowhere of none. `failed`: it has that bit, or no
// bucket is free.
__device__ __forceinline__ uint16_t insert(Smem& s, uint32_t key, unsigned bucket, uint32_t found,
                                           unsigned query, bool& failed) {
  bool searches = key != kFree && !is_of(found, key);
#pragma unroll 1
  for (int i = 1; __any_sync(kFullWarp, searches) && i < kMostProbes; ++i) {
    if (searches) {
      bucket = (bucket + 1) % kBuckets;
      searches = !is_of(atomicCAS(&s.keys[bucket], kFree, key), key);
    }
  }
  failed |= searches;
  if (key == kFree || searches) return kNowhere;
  const uint32_t bit = 1u << (8 * (bucket % 4) + query);
  failed |= (atomicOr(reinterpret_cast<uint32_t*>(s.marks) + bucket / 4, bit) & bit) != 0;
  return static_cast<uint16_t>(bucket);
}

__global__ void __launch_bounds__(kThreads) shared_keys_kernel(const __grid_constant__ ListParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) uint8_t smem[];
  Smem& s = *reinterpret_cast<Smem*>(smem);
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  const int parts = cluster_size(), part = cluster_rank();
  const unsigned tile = blockIdx.x / parts;
  for (int i = thread; i < kBuckets / 4; i += kThreads)
    reinterpret_cast<uint4*>(s.keys)[i] = {kFree, kFree, kFree, kFree};
  for (int i = thread; i < kBuckets / 16; i += kThreads) reinterpret_cast<uint4*>(s.marks)[i] = {};
  wait_for_previous_grid();
  __syncthreads();

  const unsigned first = p.queries.first(tile);
  const unsigned num_chunks = p.queries.size(tile) * (p.chunks[0] + p.chunks[1]);
  bool failed = false;
  unsigned valid = 0;
  constexpr int kAtOnce = 4;
  for (unsigned chunk = warp; chunk < num_chunks; chunk += kAtOnce * kWarps) {
    uint32_t keys[kAtOnce], found[kAtOnce] = {};
    unsigned bucket[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      keys[i] =
          chunk + i * kWarps < num_chunks ? load_key(p, first, Chunk(p, chunk + i * kWarps), lane) : kFree;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {  // first probes: all in flight
      valid += keys[i] != kFree;
      const uint32_t hash = keys[i] * 0x9e3779b1u;
      if (parts > 1 && static_cast<int>(hash >> 16 & (parts - 1)) != part) keys[i] = kFree;
      bucket[i] = hash >> (32 - kBucketsLog2);
      if (keys[i] != kFree) found[i] = atomicCAS(&s.keys[bucket[i]], kFree, keys[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned here = chunk + i * kWarps;
      if (here < num_chunks)
        s.buckets[here * kWarpSize + lane] =
            insert(s, keys[i], bucket[i], found[i], Chunk(p, here).query, failed);
    }
  }
  valid = __reduce_add_sync(kFullWarp, valid);
  if (lane == 0) s.valid[warp] = valid;
  failed = named_barrier_any(0, kThreads, failed);

  for (unsigned chunk = warp; chunk < num_chunks; chunk += kWarps) {
    const uint16_t bucket = s.buckets[chunk * kWarpSize + lane];
    const unsigned lower = (1u << Chunk(p, chunk).query) - 1;
    const uint32_t owners = __ballot_sync(kFullWarp, bucket != kNowhere && !(s.marks[bucket] & lower));
    if (lane == 0) s.owners[chunk] = owners;
  }
  __syncthreads();
  static_assert(kMostChunks <= 2 * kThreads);
  const auto count_of = [&](int chunk) {
    return chunk < static_cast<int>(num_chunks) ? __popc(s.owners[chunk]) : 0;
  };
  const unsigned even = count_of(2 * thread), both = even + count_of(2 * thread + 1);
  const unsigned up_to_here = block_inclusive_sum<kWarps>(both);
  if (2 * thread < static_cast<int>(num_chunks)) {
    s.before[2 * thread] = up_to_here - both;
    s.before[2 * thread + 1] = up_to_here - both + even;
  }
  if (thread == kThreads - 1) s.count = up_to_here, s.failed = failed;
  valid = lanes_sum(s.valid[lane]);

  unsigned before = 0, count = 0, failures = 0;
  if (parts > 1) {
    cluster_sync();
    for (int other = 0; other < parts; ++other) {
      const unsigned n = load_cluster_4(cluster_address(shared_address(&s.count), other));
      failures |= load_cluster_4(cluster_address(shared_address(&s.failed), other));
      before += other < part ? n : 0;
      count += n;
    }
  } else {
    __syncthreads();
    count = s.count, failures = s.failed;
  }
  const bool has_list =
      failures == 0 && count <= p.capacity && uint64_t{count} * 256 <= uint64_t{valid} * p.most_shared;
  int32_t* const list = p.lists + tile * p.words;
  if (part == 0 && thread == 0) list[0] = has_list ? static_cast<int>(count) : -1;
  if (has_list) {
    auto* const marks = reinterpret_cast<uint8_t*>(list + kListHead + p.capacity);
    for (unsigned chunk = warp; chunk < num_chunks; chunk += kWarps) {
      const uint32_t owners = s.owners[chunk];
      if (!(owners >> lane & 1)) continue;
      const uint16_t bucket = s.buckets[chunk * kWarpSize + lane];
      const unsigned at = before + s.before[chunk] + __popc(owners & ((1u << lane) - 1));
      list[kListHead + at] = static_cast<int>(s.keys[bucket]);
      marks[at] = s.marks[bucket];
    }
  }
  if (parts > 1) cluster_sync();  // counts have been read: shared memory may go
#endif
}

}  // namespace

void launch_shared_keys(const SparseAttentionParams& p, int most_shared, int32_t* lists, gpuStream_t stream) {
  const SharedKeysShape shape(p);
  const auto scope = [&](const KvScope& s) {
    return ListScope{s.indices, s.indices_stride_token, s.topk_length, static_cast<unsigned>(s.topk),
                     static_cast<unsigned>(std::min(s.num_slots, int64_t{INT32_MAX}))};
  };
  const KvScope& last = p.scopes[p.num_scopes - 1];
  int64_t chunks[2] = {ceil_div(p.scopes[0].topk, int64_t{kWarpSize}),
                       p.num_scopes > 1 ? ceil_div(last.topk, int64_t{kWarpSize}) : 0};
  if (chunks[0] + chunks[1] == 1) ++chunks[0];  // an empty one: 2^32 / 1 would not fit
  int parts = 1;
  while (parts * kListPartEntries < shape.entries) parts *= 2;
  const int64_t places = shape.queries.tile * (chunks[0] + chunks[1]) * kWarpSize;
  launch(
      shared_keys_kernel,
      {.grid = shape.num_tiles * parts,
       .block = kThreads,
       .stream = stream,
       .smem = static_cast<int>(sizeof(Smem) + places * sizeof(uint16_t)),
       .cluster = parts},
      ListParams{.scopes = {scope(p.scopes[0]), scope(last)},
                 .queries = shape.queries,
                 .chunks = {static_cast<unsigned>(chunks[0]), static_cast<unsigned>(chunks[1])},
                 .one_over_chunks = static_cast<unsigned>(ceil_div(int64_t{1} << 32, chunks[0] + chunks[1])),
                 .most_shared = static_cast<unsigned>(most_shared),
                 .lists = lists,
                 .words = shape.words,
                 .capacity = static_cast<unsigned>(shape.capacity)});
}

}  // namespace mla_fp8::gpu
