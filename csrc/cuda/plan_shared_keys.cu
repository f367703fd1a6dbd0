// Makes the lists of keys that the queries of a tile share (ops/shared_keys.h), for many_heads over lists.
//
// A cluster of 1, 2 or 4 CTAs makes the list of a tile. Each CTA takes the keys whose hash names it, and
// needs nothing of the others before the end. Entries come in units of 128, each of one query and cache. A
// lane has four entries of a unit, a warp consecutive units: what comes before a unit is the earlier warps'
// and its own.
//
//   1  puts every entry into a hash table in shared memory: the key takes a bucket, the query sets a bit of
//      its mark. An entry without a key goes to a spare bucket of its lane, and leaves no mark
//   2  the entry of the lowest query in a bucket's mark owns the key; each warp counts its owners
//   3  sums over warps and CTAs tell where each owner's key goes; keys that all queries attend to come first
//
// So a list's order does not depend on who came first. One bit cannot say that a query names a slot twice:
// such a tile has no list. Nor has one whose table overflows or whose list would not pay. Bound:
// instructions.
#include <algorithm>

#include "cuda/device/cluster.cuh"
#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/sparse_attention/launch.h"

// Not an anonymous namespace: on other GPUs than Hopper nobody calls most of this.
namespace mla_fp8::gpu::lists {

constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
constexpr int kOfLane = 4, kUnit = kOfLane * kWarpSize;  // entries
// So many that two keys seldom meet in a bucket: a warp waits for the lane that searches longest.
constexpr unsigned kBucketsLog2 = 14, kBuckets = 1 << kBucketsLog2;
static_assert(kBuckets >= 2 * kListPartEntries);
constexpr uint32_t kFree = ~0u;  // no key; it would be slot 2^31 - 1 of a second cache
static_assert(kWarps == kWarpSize, "a lane a warp");
constexpr int kMostOfAnSm = 116 * 1024;  // shared memory with which two CTAs do not fit on an SM

struct ListScope {
  const int32_t* indices;
  int64_t stride;
  const int32_t* topk_length;
  int topk;
  unsigned num_slots;
};
struct ListParams {
  ListScope scopes[2];
  QueryTiles queries;
  Divider of_group;         // tiles of a group
  unsigned units[2];        // units of a query, in each scope
  unsigned one_over_units;  // 2^32 / units of a query: exact below 2^16
  unsigned most_shared;     // 256ths of the valid entries
  int32_t* lists;
  int64_t words;
  unsigned capacity;

  __device__ __forceinline__ unsigned query_of(unsigned unit) const { return __umulhi(unit, one_over_units); }
};

struct Smem {
  uint32_t keys[kBuckets + kWarpSize];
  alignas(16) uint8_t marks[kBuckets + kWarpSize];
  unsigned counts[kWarps], valid[kWarps];
  unsigned count, failed;     // read by the other CTAs
  alignas(8) uint2 places[];  // [unit][lane]: four buckets
};

// The keys of a lane's four entries; kFree for none.
struct Entries {
  uint32_t keys[kOfLane];

  // It may read behind the length.
  __device__ __forceinline__ void load(const ListParams& p, unsigned first_query, unsigned unit, int lane) {
    const unsigned in_tile = p.query_of(unit), in_query = unit - in_tile * (p.units[0] + p.units[1]);
    const bool second = in_query >= p.units[0];
    const ListScope& scope = p.scopes[second];
    const int64_t query = first_query + in_tile;
    const int at = static_cast<int>((in_query - (second ? p.units[0] : 0)) * kUnit) + lane * kOfLane;
    const int length = scope.topk_length ? __ldg(scope.topk_length + query) : scope.topk;
    const int32_t* const from = scope.indices + query * scope.stride + at;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) keys[i] = at + i < scope.topk ? __ldg(from + i) : kFree;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool is_slot = keys[i] < scope.num_slots && at + i < length;
      keys[i] = is_slot ? keys[i] | static_cast<uint32_t>(second) << 31 : kFree;
    }
  }
  __device__ __forceinline__ unsigned count() const {
    unsigned n = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) n += keys[i] != kFree;
    return n;
  }

  // Finds the keys' buckets, and sets the query's bit there. `failed`: a bit was set, or no bucket is free.
  __device__ __forceinline__ uint2 insert(Smem& s, unsigned query, int lane, bool& failed) {
    const unsigned others = cluster_size() - 1, part = cluster_rank();
    unsigned bucket[kOfLane];
    uint32_t found[kOfLane], bits[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const uint32_t hash = keys[i] * 0x9e3779b1u;
      if ((hash >> 16 & others) != part) keys[i] = kFree;
      bucket[i] = keys[i] != kFree ? hash >> (32 - kBucketsLog2) : kBuckets + lane;
      found[i] = atomicCAS(s.keys + bucket[i], kFree, keys[i]);
    }
    const auto searches = [&](int i) { return found[i] != kFree && found[i] != keys[i]; };
#pragma unroll 1
    for (unsigned n = 0; searches(0) || searches(1) || searches(2) || searches(3); ++n) {
      if (n == kBuckets) {
        failed = true;
        break;
      }
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        if (searches(i)) {
          bucket[i] = (bucket[i] + 1) % kBuckets;
          found[i] = atomicCAS(s.keys + bucket[i], kFree, keys[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      bits[i] = keys[i] != kFree ? 1u << (8 * (bucket[i] % 4) + query) : 0;
      found[i] = atomicOr(reinterpret_cast<uint32_t*>(s.marks) + bucket[i] / 4, bits[i]);
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) failed |= (found[i] & bits[i]) != 0;
    return {bucket[0] | bucket[1] << 16, bucket[2] | bucket[3] << 16};
  }
};

// A lane's four entries: their buckets and marks, and which of them own their keys.
struct Owners {
  unsigned bucket[kOfLane];
  uint32_t mark[kOfLane];
  bool owns[kOfLane];

  __device__ __forceinline__ Owners(const Smem& s, unsigned unit, unsigned query, int lane) {
    const uint32_t bit = 1u << query;
    const uint2 x = s.places[unit * kWarpSize + lane];
    bucket[0] = x.x & 0xffff, bucket[1] = x.x >> 16, bucket[2] = x.y & 0xffff, bucket[3] = x.y >> 16;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      mark[i] = s.marks[bucket[i]];
      owns[i] = (mark[i] & (2 * bit - 1)) == bit;
    }
  }
  // Counts in 16 bits each: owned keys that all queries attend to, and others.
  __device__ __forceinline__ unsigned count(int i, uint32_t of_all) const {
    return owns[i] ? mark[i] == of_all ? 1 : 1 << 16 : 0;
  }
  __device__ __forceinline__ unsigned counts(uint32_t of_all) const {
    unsigned n = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) n += count(i, of_all);
    return n;
  }
};

__global__ void __launch_bounds__(kThreads, 2) shared_keys_kernel(const __grid_constant__ ListParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) uint8_t smem[];
  Smem& s = *reinterpret_cast<Smem*>(smem);
  const int thread = threadIdx.x, lane = thread % kWarpSize;
  const int warp = __shfl_sync(kFullWarp, thread / kWarpSize, 0);  // known to be uniform
  const unsigned parts = cluster_size(), part = cluster_rank(), tile = blockIdx.x / parts;
#pragma unroll
  for (unsigned i = 0; i < kBuckets / 4; i += kThreads)
    reinterpret_cast<uint4*>(s.keys)[i + thread] = {kFree, kFree, kFree, kFree};
  static_assert(kBuckets == 16 * kThreads);
  reinterpret_cast<uint4*>(s.marks)[thread] = {};
  if (warp == 0) s.keys[kBuckets + lane] = kFree, s.marks[kBuckets + lane] = 0;
  wait_for_previous_grid();
  const unsigned group = p.of_group.word(tile);
  const auto [first_query, num_queries] = p.queries.tile_at(group, tile - group * p.queries.of_group);
  const unsigned num_units = num_queries * (p.units[0] + p.units[1]);
  const unsigned of_warp = ceil_div(num_units, unsigned{kWarps});
  const unsigned begin = min(warp * of_warp, num_units), end = min(begin + of_warp, num_units);

  bool failed = false;
  unsigned valid = 0;
  Entries entries;
  if (begin < end) entries.load(p, first_query, begin, lane);
  __syncthreads();  // the table is empty
#pragma unroll 1
  for (unsigned unit = begin; unit < end;) {
    valid += entries.count();
    s.places[unit * kWarpSize + lane] = entries.insert(s, p.query_of(unit), lane, failed);
    if (++unit < end) entries.load(p, first_query, unit, lane);
  }
  valid = __reduce_add_sync(kFullWarp, valid);
  if (lane == 0) s.valid[warp] = valid;
  failed = named_barrier_any(0, kThreads, failed);

  const uint32_t of_all = (1u << num_queries) - 1;
  unsigned counted = 0;
#pragma unroll 1
  for (unsigned unit = begin; unit < end; ++unit)
    counted += Owners(s, unit, p.query_of(unit), lane).counts(of_all);
  counted = __reduce_add_sync(kFullWarp, counted);
  if (lane == 0) s.counts[warp] = counted;
  __syncthreads();
  const unsigned of_warps = s.counts[lane];
  unsigned before = __reduce_add_sync(kFullWarp, lane < warp ? of_warps : 0);
  unsigned total = __reduce_add_sync(kFullWarp, of_warps);
  valid = __reduce_add_sync(kFullWarp, s.valid[lane]);
  if (parts > 1) {
    if (thread == 0) s.count = total, s.failed = failed;
    cluster_sync();
    total = 0;
    for (unsigned other = 0; other < parts; ++other) {
      const unsigned n = load_cluster_4(cluster_address(shared_address(&s.count), other));
      failed |= load_cluster_4(cluster_address(shared_address(&s.failed), other)) != 0;
      before += other < part ? n : 0;
      total += n;
    }
  }
  const unsigned all = total & 0xffff, count = all + (total >> 16);
  // A short tile is measured as a full one: a few queries alone cost a launch, more than their list.
  const bool has_list =
      !failed && count <= p.capacity &&
      uint64_t{count} * num_queries * 256 <= uint64_t{valid} * p.most_shared * p.queries.tile;
  int32_t* const list = p.lists + tile * p.words;
  if (part == 0 && thread == 0) list[0] = has_list ? static_cast<int>(count) : -1;
  if (has_list) {
    int32_t* const slots = list + kListHead;
    auto* const list_marks = reinterpret_cast<uint8_t*>(slots + p.capacity);
    before += all << 16;  // others follow those of all
#pragma unroll 1
    for (unsigned unit = begin; unit < end; ++unit) {
      const Owners owners(s, unit, p.query_of(unit), lane);
      const unsigned own = owners.counts(of_all), up_to_here = warp_inclusive_sum(own);
      unsigned next = before + up_to_here - own;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        if (owners.owns[i]) {
          const unsigned at = owners.mark[i] == of_all ? next & 0xffff : next >> 16;
          slots[at] = static_cast<int>(s.keys[owners.bucket[i]]);
          list_marks[at] = static_cast<uint8_t>(owners.mark[i]);
        }
        next += owners.count(i, of_all);
      }
      before += __shfl_sync(kFullWarp, up_to_here, kWarpSize - 1);
    }
  }
  if (parts > 1) cluster_sync();  // counts have been read: shared memory may go
#endif
}

// Where no kernel would use a list.
struct NoLists {
  int32_t* lists;
  int64_t num_tiles, words;
};
__global__ void no_lists_kernel(const __grid_constant__ NoLists x) {
  wait_for_previous_grid();
  const int64_t tile = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (tile < x.num_tiles) x.lists[tile * x.words] = -1;
}

}  // namespace mla_fp8::gpu::lists

namespace mla_fp8::gpu {

void launch_shared_keys(const SparseAttentionParams& p, int most_shared, int32_t* lists, gpuStream_t stream) {
  using namespace lists;
  const SharedKeysShape shape(p);
  const auto scope = [&](const KvScope& s) {
    return ListScope{s.indices, s.indices_stride_token, s.topk_length, static_cast<int>(s.topk),
                     static_cast<unsigned>(std::min(s.num_slots, int64_t{INT32_MAX}))};
  };
  const KvScope& last = p.scopes[p.num_scopes - 1];
  int64_t units[2] = {ceil_div(p.scopes[0].topk, int64_t{kUnit}),
                      p.num_scopes > 1 ? ceil_div(last.topk, int64_t{kUnit}) : 0};
  if (units[0] + units[1] == 1) ++units[0];  // an empty one: 2^32 / 1 would not fit
  int parts = 1;
  while (parts * kListPartEntries < shape.entries) parts *= 2;
  const int64_t places = shape.queries.tile * (units[0] + units[1]) * kUnit;
  // If there are enough SMs each CTA has one: else two would come to SMs that the call before leaves first.
  const bool lonely = shape.num_tiles * parts <= num_processors();
  const auto bytes = static_cast<int>(sizeof(Smem) + places * sizeof(uint16_t));
  launch(shared_keys_kernel,
         {.grid = shape.num_tiles * parts,
          .block = kThreads,
          .stream = stream,
          .smem = lonely ? std::max(bytes, kMostOfAnSm) : bytes,
          .cluster = parts},
         ListParams{.scopes = {scope(p.scopes[0]), scope(last)},
                    .queries = shape.queries,
                    .of_group = Divider(shape.queries.of_group),
                    .units = {static_cast<unsigned>(units[0]), static_cast<unsigned>(units[1])},
                    .one_over_units = static_cast<unsigned>(ceil_div(int64_t{1} << 32, units[0] + units[1])),
                    .most_shared = static_cast<unsigned>(most_shared),
                    .lists = lists,
                    .words = shape.words,
                    .capacity = static_cast<unsigned>(shape.capacity)});
}

void plan_shared_keys(const SparseAttentionParams& p, gpuStream_t stream) {
  auto* const to = reinterpret_cast<int32_t*>(p.workspace);
  SparseAttentionParams with_lists = p;
  with_lists.shared_keys = to;
  if (const auto sharing = plan_sharing(Op::kDecode, with_lists, {compute_major(), num_processors()}))
    return launch_shared_keys(p, sharing->most_shared, to, stream);
  constexpr int kBlock = 256;
  const SharedKeysShape shape(p);
  launch(lists::no_lists_kernel,
         {.grid = ceil_div(shape.num_tiles, int64_t{kBlock}), .block = kBlock, .stream = stream},
         lists::NoLists{to, shape.num_tiles, shape.words});
}

}  // namespace mla_fp8::gpu
