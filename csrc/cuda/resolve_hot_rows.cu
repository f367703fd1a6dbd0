// resolve_hot_rows on CUDA. A block takes the rows of a request and waits for no other block. The request's
// chosen entries go into a hash table in shared memory, each with its first reference. Then what the slots of
// the hot buffer hold is looked up there. The new order, the victims and the plan follow from which slots are
// hits, and from how many lie before each in order of last use.
//
// Bound by latency and by the instructions of one SM. A request reads k entries a row and 6 bytes a slot, the
// first slots while its entries go into the table; it writes k int32 a row and 2 bytes a slot. Four barriers
// without misses. The table is cleared while the grid before is still running.

#include "ops/resolve_hot_rows.h"

#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/hot_table.cuh"

namespace mla_fp8::gpu {

namespace {

struct HotCounts {
  int used[kHotWarps], missed[kHotWarps], valid[kMaxHotDrafts];
};

__device__ void mask_rows(const ResolveHotRowsArgs& a, int64_t first, int64_t count) {
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < count * a.p.topk; i += kHotBlock) {
    const int64_t row = a.row(i);
    write_hot_row(a.p, a, first + row, i - row * a.p.topk, -1, false);
  }
#pragma unroll 1
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

// A lane's share of the slots, kQuad a chunk, or of the references. The shares of a warp are one run.
template <int kPerLane>
struct Share {
  int begin, chunks;

  __device__ explicit Share(int64_t size)
      : chunks(static_cast<int>((size + kPerLane * kHotBlock - 1) / (kPerLane * kHotBlock))) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    begin = (warp * chunks * kWarpSize + lane) * kPerLane;
  }
  __device__ int at(int chunk) const { return begin + chunk * kWarpSize * kPerLane; }
};
using SlotShare = Share<kQuad>;
using ReferenceShare = Share<1>;

// Four values from `at` on; -1 behind the last slot.
template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T of[kQuad];
};
template <class T>
__device__ __forceinline__ Quad<T> load_quad(const ResolveHotRowsArgs& a, const T* values, int at) {
  Quad<T> quad;
  if (a.in_quads && at + kQuad <= a.p.num_hot) {
    quad = *reinterpret_cast<const Quad<T>*>(values + at);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) quad.of[i] = at + i < a.p.num_hot ? values[at + i] : T{-1};
  }
  return quad;
}

// A lane's first slots, and the first of its share of the order.
struct FirstSlots {
  Quad<int32_t> held;
  Quad<int16_t> order;
};

// Looks up what the slots hold, and keeps the order for write_order, which overwrites it.
__device__ __forceinline__ void look_up_slots(const ResolveHotRowsArgs& a, const HotSmem& s, int64_t state,
                                              SlotShare share, FirstSlots next) {
  const int16_t* order = a.p.hot_order + state * a.p.hot_order_stride;
  const int32_t* held = a.p.hot_entries + state * a.p.hot_entries_stride;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const int at = share.at(c);
    const FirstSlots slots = next;
    if (c + 1 < share.chunks)
      next = {load_quad(a, held, share.at(c + 1)), load_quad(a, order, share.at(c + 1))};
    *reinterpret_cast<Quad<int16_t>*>(s.order + at) = slots.order;
    int place[kQuad];
    const uint32_t found = find(s, a.places, slots.held.of, place);
#pragma unroll
    for (int i = 0; i < kQuad; ++i)
      if (found >> i & 1) atomicMin(&s.values[place[i]], static_cast<uint32_t>(at + i));
    // Eight lanes have the 32 slots of a word.
    uint32_t word = found << at % 32;
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) word |= __shfl_xor_sync(kFullWarp, word, offset);
    if (at % 32 == 0) s.used[at / 32] = word;
  }
}

// Bit kQuad * c + i of the result: the i-th slot of the lane's chunk c of the order is used.
__device__ __forceinline__ uint32_t used_in_order(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                  SlotShare share) {
  uint32_t hits = 0;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const auto quad = *reinterpret_cast<const Quad<int16_t>*>(s.order + share.at(c));
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const int slot = quad.of[i];
      if (slot >= 0 && slot < a.p.num_hot && s.used[slot / 32] >> slot % 32 & 1)
        hits |= 1u << (kQuad * c + i);
    }
  }
  return hits;
}

// Writes the new order: slots that were not used, then loaded ones, then used ones, each in their old order.
__device__ __forceinline__ void write_order(const ResolveHotRowsArgs& a, const HotSmem& s, int64_t state,
                                            SlotShare share, uint32_t hits, Counted used, int loaded) {
  const int num_hot = static_cast<int>(a.p.num_hot), stale = num_hot - used.total;
  int16_t* order = a.p.hot_order + state * a.p.hot_order_stride;
  int used_before = used.before;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const int at = share.at(c);
    const auto quad = *reinterpret_cast<const Quad<int16_t>*>(s.order + at);
    int rank = used_before;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const uint32_t lanes = __ballot_sync(kFullWarp, hits >> (kQuad * c + i) & 1);
      rank += __popc(lanes & lanes_below());
      used_before += __popc(lanes);
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const bool is_used = hits >> (kQuad * c + i) & 1;
      const int stale_rank = at + i - rank;
      const int to = is_used               ? stale + rank
                     : stale_rank < loaded ? stale - loaded + stale_rank
                                           : stale_rank - loaded;
      rank += is_used;
      if (at + i < num_hot) order[to] = quad.of[i];
    }
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
                                             const HotGroup& group, ReferenceShare share, uint32_t missed,
                                             Loads loads) {
  const ResolveHotRowsParams& p = a.p;
  const int16_t* victims = p.hot_order + group.state * p.hot_order_stride + (loads.stale - loads.loaded);
  int32_t* held = p.hot_entries + group.state * p.hot_entries_stride;
  int rank = loads.rank;
#pragma unroll 1
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
      s.values[place] = static_cast<uint32_t>(victim);
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

// Writes the hot rows of references whose slots are known. Returns which of the lane's have none.
__device__ __forceinline__ uint32_t write_hot_rows(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                   const HotGroup& group, ReferenceShare share, uint32_t open,
                                                   bool are_hits, int* valid) {
  const ResolveHotRowsParams& p = a.p;
  uint32_t missed = 0;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const int reference = share.at(c);
    int row = static_cast<int>(group.count) - 1;
    bool is_valid = false;
    if (open >> c & 1) {
      row = static_cast<int>(a.row(reference));
      const uint32_t value = s.values[s.place_of[reference]];
      if (are_hits && value & kMissed) {
        missed |= 1u << c;
      } else {
        const int32_t hot_row =
            value & kMissed ? -1 : hot_row_of_slot(p, a, group.request, group.state, value);
        write_hot_row(p, a, group.first + row, reference - row * p.topk, hot_row, are_hits);
        is_valid = hot_row >= 0;
      }
    }
    if (p.lens) count_row(valid, row, is_valid);
  }
  return missed;
}

__device__ __forceinline__ void resolve_request(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                HotCounts& counts, const HotGroup& group) {
  const auto [first, count, request, state] = group;
  const ResolveHotRowsParams& p = a.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int references = static_cast<int>(count * p.topk);
  const SlotShare slots(p.num_hot);
  const ReferenceShare shared_references(references);
  const FirstSlots first_slots{
      load_quad(a, p.hot_entries + state * p.hot_entries_stride, slots.begin),
      load_quad(a, p.hot_order + state * p.hot_order_stride, slots.begin),
  };
  const auto entry_at = [&](int c) {
    const int reference = shared_references.at(c);
    if (c == shared_references.chunks || reference >= references) return -1;
    const int64_t row = a.row(reference);
    return p.entries[(first + row) * p.entries_stride_row + reference - row * p.topk];
  };
  uint32_t open = 0;  // bit c: the state has the answer to the lane's reference in chunk c
  int32_t next_entry = entry_at(0);
#pragma unroll 1
  for (int c = 0; c < shared_references.chunks; ++c) {
    const int reference = shared_references.at(c);
    const int32_t entry = next_entry;
    next_entry = entry_at(c + 1);
    int row = static_cast<int>(count) - 1;
    bool is_known = false;
    if (reference < references) {
      row = static_cast<int>(a.row(reference));
      const HotEntry e = hot_entry(p, a, first + row, request, state, entry);
      if (e.key >= 0) {
        const int place = insert(s, a.places, static_cast<uint32_t>(e.key));
        atomicMin(&s.values[place], kMissed | static_cast<uint32_t>(reference));
        s.place_of[reference] = static_cast<uint16_t>(place);
        open |= 1u << c;
      } else {
        write_hot_row(p, a, first + row, reference - row * p.topk, e.row, true);
        is_known = e.row >= 0;
      }
    }
    if (p.lens) count_row(counts.valid, row, is_known);
  }
  __syncthreads();

  look_up_slots(a, s, state, slots, first_slots);
  __syncthreads();

  const uint32_t hits = used_in_order(a, s, slots);
  open = write_hot_rows(a, s, group, shared_references, open, true, counts.valid);
  uint32_t missed = 0;  // bit c: the lane's reference in chunk c is the first of a miss
#pragma unroll 1
  for (int c = 0; c < shared_references.chunks; ++c) {
    const int reference = shared_references.at(c);
    if (open >> c & 1 && s.values[s.place_of[reference]] == (kMissed | static_cast<uint32_t>(reference)))
      missed |= 1u << c;
  }
  const uint32_t warp_hits = lanes_sum(static_cast<uint32_t>(__popc(hits)));
  const uint32_t warp_missed = lanes_sum(static_cast<uint32_t>(__popc(missed)));
  if (lane == 0)
    counts.used[warp] = static_cast<int>(warp_hits), counts.missed[warp] = static_cast<int>(warp_missed);
  __syncthreads();

  const Counted used = count_warps(counts.used), misses = count_warps(counts.missed);
  const int stale = static_cast<int>(p.num_hot) - used.total, loaded = min(misses.total, stale);
  if (used.total + loaded > 0) write_order(a, s, state, slots, hits, used, loaded);
  if (misses.total > 0) {
    __syncthreads();
    place_misses(a, s, group, shared_references, missed, {misses.before, stale, loaded});
    __syncthreads();
    write_hot_rows(a, s, group, shared_references, open, false, counts.valid);
    if (p.lens) __syncthreads();
  }
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
  extern __shared__ __align__(16) unsigned char smem[];
  MLA_SHARED(HotCounts, counts);
#pragma unroll 1
  for (int i = threadIdx.x; i < args.places / 2; i += kHotBlock)  // the keys and the values
    reinterpret_cast<uint4*>(smem)[i] = {kNoKey, kNoKey, kNoKey, kNoKey};
  if (threadIdx.x < kMaxHotDrafts) counts.valid[threadIdx.x] = 0;
  wait_for_previous_grid();
  const int64_t row = p.row_to_request ? int64_t{blockIdx.x} : int64_t{blockIdx.x} * p.next_n;
  const int64_t request = hot_request(p, args, row), state = hot_state(p, request);
  int64_t size = 0;  // rows of the request, if it is this block's
  int64_t masked = p.row_to_request ? 1 : min(p.next_n, p.num_rows - row);
  if (state >= 0) {
    int64_t before = 0;  // rows of the same request right before this one, at most next_n
    if (p.row_to_request)
      while (before < p.next_n && before < row && hot_request(p, args, row - before - 1) == request) ++before;
    if (before > 0 && before < p.next_n) return;
    if (before == 0) size = hot_group_size(p, args, row, request);
    masked = max(masked - size, int64_t{0});
  }
  bool is_taken = false;  // rows before these have the state, too: then it is theirs
  if (size > 0 && (p.row_to_request || p.state_rows))
#pragma unroll 1
    for (int64_t r = threadIdx.x; r < row; r += kHotBlock)
      is_taken |= hot_state(p, hot_request(p, args, r)) == state;
  if (__syncthreads_count(is_taken) > 0) masked += size, size = 0;
  mask_rows(args, row + size, masked);
  if (size > 0) resolve_request(args, HotSmem(smem, args), counts, {row, size, request, state});
}

void resolve_hot_rows(const ResolveHotRowsParams& p, gpuStream_t stream) {
  const int64_t references = p.next_n * p.topk;
  const int64_t slots = (p.num_hot + kSlotsAtOnce - 1) / kSlotsAtOnce * kSlotsAtOnce;
  const int64_t fixed = kReferenceBytes * references + slot_bytes(slots);
  const int64_t available =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int64_t{sizeof(HotCounts)};
  const int64_t fewest = (references + references / 8 + 4) / 4 * 4;
  const int64_t places =
      std::min({4 * references + 4, (available - fixed) / kPlaceBytes / 4 * 4, kMostPlaces});
  if (places < fewest)
    throw std::runtime_error(
        "mla_fp8.resolve_hot_rows: hot_entries must have fewer columns, or a request fewer "
        "entries: " +
        std::to_string(fixed + kPlaceBytes * fewest) + " bytes of shared memory are needed, this GPU has " +
        std::to_string(available));
  const auto in_quads = [](const void* data, int64_t stride, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % (kQuad * size) == 0 && stride % kQuad == 0;
  };
  const ResolveHotRowsArgs args{
      p,
      Divider(p.host_page_size),
      Divider(p.hot_page_size),
      Divider(std::max<int64_t>(p.topk, 1)),
      Divider(p.next_n),
      static_cast<int>(places),
      static_cast<int>(slots),
      in_quads(p.hot_entries, p.hot_entries_stride, 4) && in_quads(p.hot_order, p.hot_order_stride, 2)};
  launch(resolve_hot_rows_kernel,
         {.grid = p.row_to_request ? p.num_rows : (p.num_rows + p.next_n - 1) / p.next_n,
          .block = kHotBlock,
          .stream = stream,
          .smem = static_cast<int>(kPlaceBytes * places + fixed)},
         args);
}

}  // namespace mla_fp8::gpu
