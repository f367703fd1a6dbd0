// resolve_hot_rows on CUDA. A block takes the rows of a request and waits for no other block. The request's
// chosen entries go into a hash table in shared memory, each with its first reference. Then the slots of the
// hot buffer are looked up there, in order of last use. The new order, the victims and the plan follow from
// which slots are hits, and from how many lie before each.
//
// Bound by latency: one pass of dependent loads from the L2, and eight barriers. A request reads k entries a
// row and 6 bytes a slot; it writes k int32 a row and 2 bytes a slot.

#include "ops/resolve_hot_rows.h"

#include <algorithm>

#include "cuda/device/divide.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct ResolveHotRowsArgs {
  ResolveHotRowsParams p;
  Divider host_page_size, hot_page_size, topk;
  int places;  // places of the hash table

  __device__ int64_t host(int64_t n) const { return host_page_size(n); }
  __device__ int64_t hot(int64_t n) const { return hot_page_size(n); }
  __device__ int64_t row(int64_t n) const { return topk(n); }
};

namespace {

constexpr int kHotBlock = 1024;
constexpr int kHotWarps = kHotBlock / kWarpSize;
constexpr int kSlotsAtOnce = 4;  // slots whose loads a lane has in flight
constexpr uint32_t kNoKey = ~0u;
constexpr uint32_t kMissed = 1u << 31;  // of a value; the rest is the first reference, below kMaxHotRows
constexpr uint16_t kNoPlace = 0xffff;

// The block's dynamic shared memory. Once a key's slot is known, its value is (slot << 16 | first reference).
struct HotSmem {
  uint32_t *keys, *values;  // [places]
  uint16_t* place_of;       // [next_n * topk]
  int16_t* order;           // [num_hot]

  __device__ HotSmem(unsigned char* base, const ResolveHotRowsArgs& a)
      : keys(reinterpret_cast<uint32_t*>(base)),
        values(keys + a.places),
        place_of(reinterpret_cast<uint16_t*>(values + a.places)),
        order(reinterpret_cast<int16_t*>(place_of + a.p.next_n * a.p.topk)) {}
};
constexpr int64_t kPlaceBytes = 8, kReferenceBytes = 2, kSlotBytes = 2;

struct HotCounts {
  int used[kHotWarps], missed[kHotWarps], valid[kMaxHotDrafts];
};

__device__ __forceinline__ int first_place(uint32_t key, int places) {
  return static_cast<int>(__umulhi(key * 0x9e3779b1u, static_cast<uint32_t>(places)));
}
__device__ __forceinline__ int next_place(int place, int places) {
  return place + 1 == places ? 0 : place + 1;
}

// There are more places than keys, so insert and find end.
__device__ __forceinline__ int insert(const HotSmem& s, int places, uint32_t key) {
  int place = first_place(key, places);
  for (;;) {
    const uint32_t held = atomicCAS(&s.keys[place], kNoKey, key);
    if (held == kNoKey || held == key) return place;
    place = next_place(place, places);
  }
}
__device__ __forceinline__ int find(const HotSmem& s, int places, uint32_t key) {  // -1: none
  int place = first_place(key, places);
  for (;;) {
    const uint32_t held = s.keys[place];
    if (held == key) return place;
    if (held == kNoKey) return -1;
    place = next_place(place, places);
  }
}

__device__ void mask_rows(const ResolveHotRowsArgs& a, int64_t first, int64_t count) {
  for (int64_t i = threadIdx.x; i < count * a.p.topk; i += kHotBlock) {
    const int64_t row = a.row(i);
    write_hot_row(a.p, a, first + row, i - row * a.p.topk, -1);
  }
  for (int64_t i = threadIdx.x; i < count; i += kHotBlock) {
    if (a.p.lens) a.p.lens[first + i] = 0;
    a.p.miss_counts[first + i] = 0;
  }
}

// A sum over warps: of those before the caller's, and of all.
struct Counted {
  int before, total;
};
__device__ __forceinline__ Counted count_warps(const int (&of_warp)[kHotWarps]) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int sum = warp_inclusive_sum(of_warp[lane]);
  return {warp == 0 ? 0 : broadcast(sum, warp - 1), broadcast(sum, kHotWarps - 1)};
}

__device__ __forceinline__ uint32_t lanes_below() { return (1u << (threadIdx.x % kWarpSize)) - 1; }

// A lane's share of the slots, or of the references. The shares of a warp are one run.
struct Share {
  int begin, chunks;  // chunks of kWarpSize

  __device__ explicit Share(int64_t size) : chunks(static_cast<int>((size + kHotBlock - 1) / kHotBlock)) {
    begin = static_cast<int>(threadIdx.x / kWarpSize) * chunks * kWarpSize + threadIdx.x % kWarpSize;
  }
  __device__ int at(int chunk) const { return begin + chunk * kWarpSize; }
};

// Looks the slots up in their order. Bit c of the result: the lane's slot in chunk c is a hit.
__device__ __forceinline__ uint32_t look_up_slots(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                  int64_t state, Share share) {
  const ResolveHotRowsParams& p = a.p;
  const int16_t* order = p.hot_order + state * p.hot_order_stride;
  const int32_t* held = p.hot_entries + state * p.hot_entries_stride;
  const int num_hot = static_cast<int>(p.num_hot);
  uint32_t hits = 0;
  for (int first = 0; first < share.chunks; first += kSlotsAtOnce) {
    int slots[kSlotsAtOnce], keys[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      const int at = share.at(first + i);
      slots[i] = first + i < share.chunks && at < num_hot ? order[at] : -1;
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i)
      keys[i] = slots[i] >= 0 && slots[i] < num_hot ? held[slots[i]] : -1;
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      const int at = share.at(first + i);
      if (first + i < share.chunks && at < num_hot) s.order[at] = static_cast<int16_t>(slots[i]);
      const int place = keys[i] >= 0 ? find(s, a.places, static_cast<uint32_t>(keys[i])) : -1;
      if (place < 0) continue;
      hits |= 1u << (first + i);
      atomicMin(&s.values[place], static_cast<uint32_t>(slots[i]) << 16 | (s.values[place] & 0xffff));
    }
  }
  return hits;
}

// Writes the new order: slots that were not used, then loaded ones, then used ones, each in their old order.
__device__ __forceinline__ void write_order(const ResolveHotRowsArgs& a, const HotSmem& s, int64_t state,
                                            Share share, uint32_t hits, Counted used, int loaded) {
  const int num_hot = static_cast<int>(a.p.num_hot), stale = num_hot - used.total;
  int16_t* order = a.p.hot_order + state * a.p.hot_order_stride;
  int used_before = used.before;
  for (int c = 0; c < share.chunks; ++c) {
    const int at = share.at(c);
    const bool is_used = hits >> c & 1;
    const uint32_t warp_used = __ballot_sync(kFullWarp, is_used);
    const int used_rank = used_before + __popc(warp_used & lanes_below());
    const int stale_rank = at - used_rank;
    used_before += __popc(warp_used);
    if (at >= num_hot) continue;
    const int to = is_used               ? stale + used_rank
                   : stale_rank < loaded ? stale - loaded + stale_rank
                                         : stale_rank - loaded;
    order[to] = s.order[at];
  }
}

// The rows of a request, `count` from `first` on.
struct HotGroup {
  int64_t first, count, request, state;
};

// Gives each key that no slot held the slot that was used longest ago, in order of first reference.
struct Loads {
  int rank;           // the rank of the warp's first miss
  int stale, loaded;  // slots that were not used; those of them that are loaded
};
__device__ __forceinline__ void place_misses(const ResolveHotRowsArgs& a, const HotSmem& s,
                                             const HotGroup& group, Share share, uint32_t missed,
                                             Loads loads) {
  const ResolveHotRowsParams& p = a.p;
  const int16_t* victims = p.hot_order + group.state * p.hot_order_stride + (loads.stale - loads.loaded);
  int32_t* held = p.hot_entries + group.state * p.hot_entries_stride;
  int rank = loads.rank;
  for (int c = 0; c < share.chunks; ++c) {
    const bool is_missed = missed >> c & 1;
    const uint32_t warp_missed = __ballot_sync(kFullWarp, is_missed);
    const int own = rank + __popc(warp_missed & lanes_below());
    rank += __popc(warp_missed);
    if (!is_missed) continue;
    const int reference = share.at(c);
    const int place = s.place_of[reference];
    const auto key = static_cast<int32_t>(s.keys[place]);
    // A state that another call has spoilt may have too few slots, or some that do not exist.
    const int victim = own < loads.loaded ? victims[own] : -1;
    int32_t hot_row = -1;
    if (victim >= 0 && victim < p.num_hot) {
      held[victim] = key;
      s.values[place] = static_cast<uint32_t>(victim) << 16 | static_cast<uint32_t>(reference);
      hot_row = hot_row_of_slot(p, a, group.request, group.state, victim);
    }
    write_miss(p, a, group.first, own, p.by_entry ? host_row_of_entry(p, a, group.request, key) : key,
               hot_row);
  }
}

// Counts, for each row, entries that have a hot row. If a warp's are all of one row, it counts them together.
__device__ __forceinline__ void count_row(int* counts, int row, bool counted) {
  const int first = broadcast(row, 0);
  if (__all_sync(kFullWarp, row == first)) {
    const uint32_t lanes = __ballot_sync(kFullWarp, counted);
    if (threadIdx.x % kWarpSize == 0 && lanes) atomicAdd(&counts[first], __popc(lanes));
  } else if (counted) {
    atomicAdd(&counts[row], 1);
  }
}

__device__ __forceinline__ void resolve_request(const ResolveHotRowsArgs& a, const HotGroup& group) {
  const auto [first, count, request, state] = group;
  extern __shared__ __align__(16) unsigned char smem[];
  MLA_SHARED(HotCounts, counts);
  const ResolveHotRowsParams& p = a.p;
  const HotSmem s(smem, a);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int i = threadIdx.x; i < a.places; i += kHotBlock) s.keys[i] = kNoKey, s.values[i] = ~0u;
  if (threadIdx.x < kMaxHotDrafts) counts.valid[threadIdx.x] = 0;
  __syncthreads();

  const int references = static_cast<int>(count * p.topk);
  const int rounds = (references + kHotBlock - 1) / kHotBlock;
  for (int i = 0; i < rounds; ++i) {
    const int reference = i * kHotBlock + threadIdx.x;
    int row = static_cast<int>(count) - 1;
    bool is_known = false;
    if (reference < references) {
      row = static_cast<int>(a.row(reference));
      const int64_t column = reference - row * p.topk;
      const int32_t entry = p.entries[(first + row) * p.entries_stride_row + column];
      const HotEntry e = hot_entry(p, a, first + row, request, state, entry);
      uint16_t place = kNoPlace;
      if (e.key >= 0) {
        place = static_cast<uint16_t>(insert(s, a.places, static_cast<uint32_t>(e.key)));
        atomicMin(&s.values[place], kMissed | static_cast<uint32_t>(reference));
      } else {
        write_hot_row(p, a, first + row, column, e.row);
        is_known = e.row >= 0;
      }
      s.place_of[reference] = place;
    }
    if (p.lens) count_row(counts.valid, row, is_known);
  }
  __syncthreads();

  const Share slots(p.num_hot), shared_references(references);
  const uint32_t hits = look_up_slots(a, s, state, slots);
  const auto warp_hits = lanes_sum(static_cast<uint32_t>(__popc(hits)));
  if (lane == 0) counts.used[warp] = static_cast<int>(warp_hits);
  __syncthreads();

  uint32_t missed = 0;
  for (int c = 0; c < shared_references.chunks; ++c) {
    const int reference = shared_references.at(c);
    if (reference >= references) break;
    const uint16_t place = s.place_of[reference];
    if (place != kNoPlace && s.values[place] == (kMissed | static_cast<uint32_t>(reference)))
      missed |= 1u << c;
  }
  const auto warp_missed = lanes_sum(static_cast<uint32_t>(__popc(missed)));
  if (lane == 0) counts.missed[warp] = static_cast<int>(warp_missed);
  __syncthreads();

  const Counted used = count_warps(counts.used), misses = count_warps(counts.missed);
  const int stale = static_cast<int>(p.num_hot) - used.total, loaded = min(misses.total, stale);
  if (used.total + loaded > 0) write_order(a, s, state, slots, hits, used, loaded);
  if (misses.total > 0) {
    __syncthreads();
    place_misses(a, s, group, shared_references, missed, {misses.before, stale, loaded});
    __syncthreads();
  }

  for (int i = 0; i < rounds; ++i) {
    const int reference = i * kHotBlock + threadIdx.x;
    int row = static_cast<int>(count) - 1;
    bool is_valid = false;
    if (reference < references) {
      row = static_cast<int>(a.row(reference));
      if (const uint16_t place = s.place_of[reference]; place != kNoPlace) {
        const uint32_t value = s.values[place];
        const int32_t hot_row = value & kMissed ? -1 : hot_row_of_slot(p, a, request, state, value >> 16);
        write_hot_row(p, a, first + row, reference - row * p.topk, hot_row);
        is_valid = hot_row >= 0;
      }
    }
    if (p.lens) count_row(counts.valid, row, is_valid);
  }
  if (p.lens) __syncthreads();
  if (threadIdx.x < count) {
    const int64_t left = misses.total - threadIdx.x * p.topk;
    p.miss_counts[first + threadIdx.x] = static_cast<int32_t>(left < 0 ? 0 : left < p.topk ? left : p.topk);
    if (p.lens) p.lens[first + threadIdx.x] = counts.valid[threadIdx.x];
  }
  if (p.counters && threadIdx.x == 0) {
    auto* const counters = reinterpret_cast<unsigned long long*>(p.counters);
    atomicAdd(&counters[0], static_cast<unsigned long long>(used.total));
    atomicAdd(&counters[1], static_cast<unsigned long long>(misses.total));
  }
}

}  // namespace

__global__ void __launch_bounds__(kHotBlock, 1)
    resolve_hot_rows_kernel(const __grid_constant__ ResolveHotRowsArgs args) {
  const ResolveHotRowsParams& p = args.p;
  wait_for_previous_grid();
  const int64_t row = p.row_to_request ? int64_t{blockIdx.x} : int64_t{blockIdx.x} * p.next_n;
  const int64_t request = hot_request(p, row), state = hot_state(p, request);
  const int64_t own = p.row_to_request ? 1 : min(p.next_n, p.num_rows - row);  // rows of this block alone
  if (state < 0) return mask_rows(args, row, own);
  if (p.row_to_request) {
    // Counts rows of the same request right before this one, at most next_n.
    int64_t before = 0;
    while (before < p.next_n && before < row && hot_request(p, row - before - 1) == request) ++before;
    if (before == p.next_n) return mask_rows(args, row, 1);
    if (before > 0) return;
  }
  const int64_t size = hot_group_size(p, row, request);
  bool is_taken = false;  // rows before these have the state, too: then it is theirs
  if (p.row_to_request || p.state_rows)
    for (int64_t r = threadIdx.x; r < row; r += kHotBlock)
      is_taken |= hot_state(p, hot_request(p, r)) == state;
  if (size < own) mask_rows(args, row + size, own - size);
  if (__syncthreads_count(is_taken) > 0) return mask_rows(args, row, size);
  resolve_request(args, {row, size, request, state});
}

void resolve_hot_rows(const ResolveHotRowsParams& p, gpuStream_t stream) {
  const int64_t references = p.next_n * p.topk;
  const int64_t fixed = kReferenceBytes * references + kSlotBytes * p.num_hot;
  const int64_t available =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int64_t{sizeof(HotCounts)};
  const int64_t places = std::min(2 * references + 1, (available - fixed) / kPlaceBytes);
  if (places < references + references / 8 + 1)
    throw std::runtime_error(
        "mla_fp8.resolve_hot_rows: hot_entries must have fewer columns, or a request fewer "
        "entries: " +
        std::to_string(fixed + kPlaceBytes * (references * 9 / 8 + 1)) +
        " bytes of shared memory are needed, this GPU has " + std::to_string(available));
  const ResolveHotRowsArgs args{p, Divider(p.host_page_size), Divider(p.hot_page_size),
                                Divider(std::max<int64_t>(p.topk, 1)), static_cast<int>(places)};
  launch(resolve_hot_rows_kernel,
         {.grid = p.row_to_request ? p.num_rows : (p.num_rows + p.next_n - 1) / p.next_n,
          .block = kHotBlock,
          .stream = stream,
          .smem = static_cast<int>(kPlaceBytes * places + (fixed + 15) / 16 * 16)},
         args);
}

}  // namespace mla_fp8::gpu
