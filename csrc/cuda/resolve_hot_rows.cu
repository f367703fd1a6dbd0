// resolve_hot_rows on CUDA. A block takes the rows of a request and waits for no other block. The request's
// chosen entries go into a hash table in shared memory, where those of one hash are a list. What the slots of
// the hot buffer hold is looked up there. The new order, the victims and the plan follow from which slots are
// hits, and from how many lie before each in order of last use.
//
// Bound by what one SM can issue, and by latency: so numbers of a request have 32 bits, and a warp's entries
// are of one row. A request reads k entries a row and 6 bytes a slot, the first of them before the first
// barrier; it writes k int32 a row and 2 bytes a slot. Four barriers without misses. The table is cleared
// while the grid before is still running.

#include "ops/resolve_hot_rows.h"

#include <algorithm>

#include "cuda/device/launch.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/hot_table.cuh"

namespace mla_fp8::gpu {

namespace {

struct HotCounts {
  uint32_t of_warp[kHotWarps];  // slots of its share of the order that are used, and its misses << 16
  int valid[kMaxHotDrafts];
};

__device__ void mask_rows(const ResolveHotRowsArgs& a, int first, int count) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * a.p.topk; i += kHotBlock) {
    const int row = a.row(i);
    write_hot_row(a.p, a, first + row, i - row * a.p.topk, -1, false);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kHotBlock) {
    if (a.p.lens) a.p.lens[first + i] = 0;
    a.p.miss_counts[first + i] = 0;
  }
}

__device__ __forceinline__ int32_t load_entry(const ResolveHotRowsArgs& a, const HotGroup& group,
                                              Reference r) {
  if (r.column >= a.p.topk) return -1;
  return a.p.entries[hot_offset(group.first + r.row, a.p.entries_stride_row) + r.column];
}

// The first of a lane's slots, of its order and of its entries.
struct FirstLoads {
  Quad<int32_t> held;
  Quad<int16_t> order;
  int32_t entry;
};

// Counts entries of a warp, all of one row, that have a hot row.
__device__ __forceinline__ void count_valid(const ResolveHotRowsArgs& a, HotCounts& counts, int row,
                                            bool is_valid) {
  if (!a.p.lens) return;
  const uint32_t lanes = __ballot_sync(kFullWarp, is_valid);
  if (threadIdx.x % kWarpSize == 0 && lanes) atomicAdd(&counts.valid[row], __popc(lanes));
}

// Puts the references whose answer the state has into the table, bit c of the result for chunk c, and writes
// the others' rows.
__device__ __forceinline__ uint32_t insert_references(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                      HotCounts& counts, const HotGroup& group,
                                                      const ReferenceShare& share, int32_t next_entry) {
  uint32_t open = 0;
  Reference next = share.first;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const Reference r = next;
    const int32_t entry = next_entry;
    share.advance(next);
    if (c + 1 < share.chunks) next_entry = load_entry(a, group, next);
    bool is_valid = false;
    if (r.column < a.p.topk) {
      const HotEntry e = hot_entry(a.p, a, group.tables, group.first + r.row, entry);
      if (e.key >= 0) {
        insert(s, a.smem.places, r.node, static_cast<uint32_t>(e.key));
        open |= 1u << c;
      } else {
        write_hot_row(a.p, a, group.first + r.row, r.column, e.row, true);
        is_valid = e.row >= 0;
      }
    }
    count_valid(a, counts, r.row, is_valid);
  }
  return open;
}

// Looks up what the slots hold, and keeps the order for write_order, which overwrites it.
__device__ __forceinline__ void look_up_slots(const ResolveHotRowsArgs& a, const HotSmem& s,
                                              const HotGroup& group, SlotShare share,
                                              const FirstLoads& first) {
  Quad<int32_t> held = first.held;
  Quad<int16_t> order = first.order;
#pragma unroll 1
  for (int c = 0;;) {
    const unsigned at = share.at(c);
    *reinterpret_cast<Quad<int16_t>*>(s.order + at) = order;
    s.used[at / kQuad] = static_cast<uint8_t>(look_up(s, a.smem.places, held.of, at));
    if (++c >= share.chunks) break;
    held = load_quad(a, group.held, share.at(c)), order = load_quad(a, group.order, share.at(c));
  }
}

// Bit kQuad * c + i of the result: the i-th slot of the lane's chunk c of the order is used.
__device__ __forceinline__ uint32_t used_in_order(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                  SlotShare share) {
  uint32_t hits = 0;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const auto quad = *reinterpret_cast<const Quad<int16_t>*>(s.order + share.at(c));
    uint32_t of_quad = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      // No slot is used behind the last one.
      const unsigned slot = min(unsigned{static_cast<uint16_t>(quad.of[i])}, unsigned(a.p.num_hot));
      of_quad |= (s.used[slot / kQuad] >> slot % kQuad & 1u) << i;
    }
    hits |= of_quad << (kQuad * c);
  }
  return hits;
}

// Writes the hot rows of hits. Returns, a bit a chunk, which references are not hits. Each of these gets the
// first reference to its key in place of a slot.
__device__ __forceinline__ uint32_t write_hits(const ResolveHotRowsArgs& a, const HotSmem& s,
                                               HotCounts& counts, const HotGroup& group,
                                               const ReferenceShare& share, uint32_t open,
                                               uint32_t& first_missed) {
  uint32_t missed = 0;
  Reference r = share.first;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c, share.advance(r)) {
    bool is_valid = false;
    if (open >> c & 1) {
      uint32_t& found = s.nodes[r.node].found;
      if (found == kNoSlot) {
        found = first_node(s, a.smem.places, r.node);
        missed |= 1u << c;
        if (found == static_cast<uint32_t>(r.node)) first_missed |= 1u << c;
      } else {
        const int32_t hot_row = hot_row_of_slot(a.p, a, group.tables, static_cast<int32_t>(found));
        write_hot_row(a.p, a, group.first + r.row, r.column, hot_row, true);
        is_valid = hot_row >= 0;
      }
    }
    count_valid(a, counts, r.row, is_valid);
  }
  return missed;
}

// Counts of a request's slots that were not used, and of those of them that are loaded.
struct Stale {
  int slots, loaded;
};

// Writes the new order: slots that were not used, then loaded ones, then used ones, each in their old order.
// The victims go where the lists were.
__device__ __forceinline__ void write_order(const ResolveHotRowsArgs& a, const HotSmem& s,
                                            const HotGroup& group, SlotShare share, uint32_t hits,
                                            int used_before, Stale stale) {
  int16_t* const order = group.order;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c) {
    const int at = share.at(c);
    const auto quad = *reinterpret_cast<const Quad<int16_t>*>(s.order + at);
    const uint32_t of_quad = hits >> (kQuad * c) & ((1u << kQuad) - 1);
    const int count = __popc(of_quad), sum = used_before + warp_inclusive_sum(count);
    int rank = sum - count;
    used_before = broadcast(sum, kWarpSize - 1);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const bool is_used = of_quad >> i & 1;
      const int stale_rank = at + i - rank;
      const bool is_victim = !is_used && stale_rank < stale.loaded;
      const int to = is_used ? stale.slots + rank : stale_rank + (is_victim ? stale.slots : 0) - stale.loaded;
      rank += is_used;
      if (at + i >= a.p.num_hot) continue;
      order[to] = quad.of[i];
      if (is_victim) s.next[stale_rank] = static_cast<uint16_t>(quad.of[i]);
    }
  }
}

// Gives each key that no slot held the slot that was used longest ago, in order of first reference. `rank` is
// that of the warp's first miss.
__device__ __forceinline__ void place_misses(const ResolveHotRowsArgs& a, const HotSmem& s, HotCounts& counts,
                                             const HotGroup& group, const ReferenceShare& share,
                                             uint32_t first_missed, int rank, int loaded) {
  const ResolveHotRowsParams& p = a.p;
  const uint32_t lanes_below = (1u << (threadIdx.x % kWarpSize)) - 1;
  Reference r = share.first;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c, share.advance(r)) {
    const bool is_missed = first_missed >> c & 1;
    const uint32_t lanes = __ballot_sync(kFullWarp, is_missed);
    const int own = rank + __popc(lanes & lanes_below);
    rank += __popc(lanes);
    int32_t hot_row = -1;
    if (is_missed) {
      const auto key = static_cast<int32_t>(s.nodes[r.node].key);
      // A state that another call has spoilt may have too few slots, or some that do not exist.
      const int victim = own < loaded ? s.next[own] : p.num_hot;
      if (victim < p.num_hot) {
        group.held[victim] = key;
        hot_row = hot_row_of_slot(p, a, group.tables, victim);
      }
      s.nodes[r.node].found = victim < p.num_hot ? static_cast<uint32_t>(victim) : kNoSlot;
      write_miss(p, a, group.first, own, p.by_entry ? host_row_of_entry(p, a, group.tables, key) : key,
                 hot_row);
      write_hot_row(p, a, group.first + r.row, r.column, hot_row, false);
    }
    count_valid(a, counts, r.row, hot_row >= 0);
  }
}

// Writes the hot rows of references to keys that others missed first.
__device__ __forceinline__ void write_repeated(const ResolveHotRowsArgs& a, const HotSmem& s,
                                               HotCounts& counts, const HotGroup& group,
                                               const ReferenceShare& share, uint32_t open) {
  Reference r = share.first;
#pragma unroll 1
  for (int c = 0; c < share.chunks; ++c, share.advance(r)) {
    int32_t hot_row = -1;
    if (open >> c & 1) {
      const uint32_t slot = s.nodes[s.nodes[r.node].found].found;
      if (slot != kNoSlot) hot_row = hot_row_of_slot(a.p, a, group.tables, static_cast<int32_t>(slot));
      write_hot_row(a.p, a, group.first + r.row, r.column, hot_row, false);
    }
    count_valid(a, counts, r.row, hot_row >= 0);
  }
}

__device__ __forceinline__ void resolve_request(const ResolveHotRowsArgs& a, const HotSmem& s,
                                                HotCounts& counts, const HotGroup& group,
                                                const SlotShare& slots, const ReferenceShare& references,
                                                const FirstLoads& loads) {
  const ResolveHotRowsParams& p = a.p;
  const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  uint32_t open = insert_references(a, s, counts, group, references, loads.entry);
  __syncthreads();

  if (slots.chunks > 0) look_up_slots(a, s, group, slots, loads);
  __syncthreads();

  const uint32_t hits = used_in_order(a, s, slots);
  uint32_t first_missed = 0;  // bit c: the lane's reference in chunk c is the first of a miss
  open = write_hits(a, s, counts, group, references, open, first_missed);
  const uint32_t of_warp = lanes_sum(static_cast<uint32_t>(__popc(hits) | __popc(first_missed) << 16));
  if (lane == 0) counts.of_warp[warp] = of_warp;
  __syncthreads();

  const uint32_t of_other = counts.of_warp[lane];
  const uint32_t before = lanes_sum(lane < warp ? of_other : 0u), all = lanes_sum(of_other);
  const int used = static_cast<int>(all & 0xffff), misses = static_cast<int>(all >> 16);
  const int loaded = min(misses, p.num_hot - used);
  if (used + loaded > 0)
    write_order(a, s, group, slots, hits, static_cast<int>(before & 0xffff), {p.num_hot - used, loaded});
  if (misses > 0) {
    __syncthreads();
    place_misses(a, s, counts, group, references, first_missed, static_cast<int>(before >> 16), loaded);
    open &= ~first_missed;
    if (__syncthreads_count(open != 0) > 0) {
      write_repeated(a, s, counts, group, references, open);
      if (p.lens) __syncthreads();
    }
  }
  if (threadIdx.x < group.count) {
    const int left = misses - static_cast<int>(threadIdx.x) * p.topk;
    p.miss_counts[group.first + threadIdx.x] = max(0, min(left, p.topk));
    if (p.lens) p.lens[group.first + threadIdx.x] = counts.valid[threadIdx.x];
  }
  if (p.counters && threadIdx.x == 0) {
    auto* const counters = reinterpret_cast<unsigned long long*>(p.counters);
    atomicAdd(&counters[0], static_cast<unsigned long long>(used));
    atomicAdd(&counters[1], static_cast<unsigned long long>(misses));
  }
}

}  // namespace

__global__ void __launch_bounds__(kHotBlock, 1)
    resolve_hot_rows_kernel(const __grid_constant__ ResolveHotRowsArgs args) {
  const ResolveHotRowsParams& p = args.p;
  extern __shared__ __align__(16) unsigned char smem[];
  MLA_SHARED(HotCounts, counts);
  // Hidden, or each access would find the base anew.
  uint32_t base = shared_address(smem);
  asm volatile("" : "+r"(base));
  const HotSmem s(static_cast<unsigned char*>(__cvta_shared_to_generic(base)), args.smem);
  clear(s, args);
  if (threadIdx.x < kMaxHotDrafts) counts.valid[threadIdx.x] = 0;
  wait_for_previous_grid();
  const int row = p.row_to_request ? blockIdx.x : blockIdx.x * p.next_n;
  const int request = hot_request(p, args, row), state = hot_state(p, request);
  int size = 0;  // rows of the request, if it is this block's
  int masked = p.row_to_request ? 1 : min(p.next_n, p.num_rows - row);
  if (state >= 0) {
    int before = 0;  // rows of the same request right before this one, at most next_n
    if (p.row_to_request)
      while (before < p.next_n && before < row && hot_request(p, args, row - before - 1) == request) ++before;
    if (before > 0 && before < p.next_n) return;
    if (before == 0) size = hot_group_size(p, args, row, request);
    masked = max(masked - size, 0);
  }
  // The offset comes from a lane, or each access would find it anew.
  const HotGroup group{row, size, hot_tables(p, request, state),
                       p.hot_entries + hot_offset(state, p.hot_entries_stride),
                       p.hot_order + broadcast(hot_offset(state, p.hot_order_stride), 0)};
  const SlotShare slots(args);
  const ReferenceShare references(args, size);
  FirstLoads loads{};
  bool is_taken = false;  // rows before these have the state, too: then it is theirs
  if (size > 0) {
    loads = {load_quad(args, group.held, slots.begin), load_quad(args, group.order, slots.begin),
             references.chunks > 0 ? load_entry(args, group, references.first) : -1};
    if (p.row_to_request || p.state_rows)
#pragma unroll 1
      for (int r = threadIdx.x; r < row; r += kHotBlock)
        is_taken |= hot_state(p, hot_request(p, args, r)) == state;
  }
  if (__syncthreads_count(is_taken) > 0) masked += size, size = 0;
  mask_rows(args, row + size, masked);
  if (size > 0) resolve_request(args, s, counts, group, slots, references, loads);
}

void resolve_hot_rows(const ResolveHotRowsParams& p, gpuStream_t stream) {
  const int64_t columns = (p.topk + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int64_t nodes = kFirstNodes + p.next_n * columns;
  const int64_t slots = (p.num_hot + kSlotsAtOnce - 1) / kSlotsAtOnce * kSlotsAtOnce;
  const int64_t fixed = (sizeof(HotNode) + 2) * nodes + 2 * slots + slots / kQuad + 1;
  const int64_t available =
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - int64_t{sizeof(HotCounts)};
  const int64_t fewest = nodes / 32 * 4 + 4;
  const int64_t places = std::min(4 * nodes, (available - fixed) / 16 * 4);
  if (places < fewest)
    throw std::runtime_error(
        "mla_fp8.resolve_hot_rows: hot_entries must have fewer columns, or a request fewer "
        "entries: " +
        std::to_string(fixed + 4 * fewest) + " bytes of shared memory are needed, this GPU has " +
        std::to_string(available));
  HotLayout at{.heads = static_cast<int>(sizeof(HotNode) * nodes),
               .places = static_cast<int>(places),
               .slots = static_cast<int>(slots)};
  at.order = at.heads + 4 * at.places;
  at.next = at.order + 2 * at.slots;
  at.used = at.next + static_cast<int>(2 * nodes);
  const auto in_quads = [](const void* data, int64_t stride, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % (kQuad * size) == 0 && stride % kQuad == 0;
  };
  const ResolveHotRowsArgs args{
      p,
      IntDivider(p.host_page_size),
      IntDivider(p.hot_page_size),
      IntDivider(std::max(p.topk, 1)),
      IntDivider(p.next_n),
      IntDivider(static_cast<int32_t>(std::max<int64_t>(columns, 1))),
      static_cast<int>(columns),
      at,
      in_quads(p.hot_entries, p.hot_entries_stride, 4) && in_quads(p.hot_order, p.hot_order_stride, 2)};
  launch(resolve_hot_rows_kernel,
         {.grid = p.row_to_request ? p.num_rows : (p.num_rows + p.next_n - 1) / p.next_n,
          .block = kHotBlock,
          .stream = stream,
          .smem = static_cast<int>(4 * places + fixed)},
         args);
}

}  // namespace mla_fp8::gpu
