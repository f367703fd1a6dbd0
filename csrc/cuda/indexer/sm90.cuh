#pragma once
// Logits on Hopper, for index_logits and for the scan of index_topk. An item is 64 keys, M of a wgmma, keys
// and queries from swizzled shared memory; N is the heads of the unit's rows, K the 128 elements in four
// steps. So a thread has all heads of two keys modulo its quad, and the sum over heads needs two exchanges. A
// tile is four items.
//
//   warps                  do
//   a producer warpgroup   each warp fetches one item of every tile (sm90_fetch.cuh)
//   four consumers         the products and logits of items (sm90_math.cuh): a warpgroup those of one item of
//                          each tile for all rows, or, where two rows are all that its registers hold (64
//                          heads), of two items for half of the rows
//
//   barrier     arrivals                         a phase is
//   full[s]     one and its bytes; of keys one   an item in stage s, its bytes there
//               by one, or blocks, 32 more
//   empty[s]    four warps of each warpgroup     an item in stage s that nobody needs any more
//               that multiplies it
//
// The ring holds whole tiles, so a stage has the same item of every tile: who waits for one of its phases has
// seen the phase before, or a parity would not tell phases apart. Absent entries have `present` false. What a
// stage holds of them and of columns outside the unit means nothing.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/indexer/rows.cuh"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

// Sixteen bytes `piece` of a row of a swizzled panel.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kIndexDim + ((piece ^ row % 8) << 4);
}

namespace sm90_index {

inline constexpr int kGroup = 128, kGroups = 4, kConsumers = kGroup * kGroups, kThreads = kConsumers + kGroup;
inline constexpr int kItemKeys = 64, kTileKeys = kItemKeys * kGroups;
inline constexpr int kMostStages = 16;
// Of the ring of index_topk for units of so many rows: what more rows need for themselves is missing there.
MLA_HD constexpr int scan_stages(int unit_rows) { return (unit_rows == 1 ? 3 : 2) * kGroups; }
// Where keys of e2m1 are expanded.
MLA_HD constexpr int num_panels(bool is_fp4) { return is_fp4 ? kGroups : 0; }
// Of a thread, by role.
inline constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;
// A block is launched with as many of all as its threads, rounded to eight, can share; more never come, and
// who asks for them waits for ever.
static_assert(kConsumers * kConsumerRegisters + kGroup * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);

// Of the calling thread's warpgroup.
__device__ __forceinline__ void group_sync() { named_barrier(1 + threadIdx.x / kGroup, kGroup); }

// The engine's view of the keys. Where every item lies in one page, its keys one behind the other, the copy
// engine brings it as a box; else warps look up each key.
struct KeyBoxes {
  CUtensorMap map;
  bool are_used;
  bool are_blocks;      // of a list: a box is one of them, and keys' scales come one by one
  bool are_read_again;  // by another unit of the request
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
  // Of each shift that E2m1Scales knows: the eight magnitudes of e2m1 as e4m3.
  static constexpr int kLeastShift = -20, kShifts = 27;
  uint64_t magnitudes[kShifts];

  // By kMostStages threads and more, each with a number, before a barrier of all. `shares`: warpgroups that
  // multiply the same item.
  __device__ __forceinline__ void init(int thread, const KeyBoxes& boxes, int shares) {
    if (const int s = thread; s < kMostStages) {
      const bool are_copies = boxes.are_used && !boxes.are_blocks;
      mbarrier_init(shared_address(&full[s]), are_copies ? kWarpArrivals : kWarpSize + kWarpArrivals);
      mbarrier_init(shared_address(&empty[s]), shares * kGroup / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
  }
  __device__ __forceinline__ void init_magnitudes(int thread) {  // of kGroup
    for (int i = thread; i < kShifts * 8; i += kGroup)
      reinterpret_cast<uint8_t*>(magnitudes)[i] = e2m1_to_e4m3(i % 8, i / 8 + kLeastShift);
  }
};

// A place in the ring: its stage, and the parity of the phase that fills it.
struct Place {
  int stage;
  uint32_t phase = 0;

  // `items` divide the number of stages.
  __device__ __forceinline__ void advance(int items, int num_stages) {
    stage += items;
    if (stage >= num_stages) {
      stage -= num_stages;
      phase ^= 1;
    }
  }
};

// Shared memory whose size depends on the call, from a multiple of 1024 bytes on.
struct Memory {
  uint8_t* base;
  int num_stages, lines;  // lines of queries
  int panels;             // num_panels
  bool is_fp4;            // the keys

  static constexpr int kPanelBytes = kItemKeys * kIndexDim;  // keys as wgmma takes them
  MLA_HD static constexpr int value_bytes(bool is_fp4) { return is_fp4 ? kPanelBytes / 2 : kPanelBytes; }
  MLA_HD static constexpr int stage_bytes(bool is_fp4) {
    return value_bytes(is_fp4) + 2 * kItemKeys * (4 + 4);
  }
  MLA_HD static constexpr int bytes(int num_stages, int lines, int panels, bool is_fp4) {
    return num_stages * stage_bytes(is_fp4) + panels * kPanelBytes + lines * (kIndexDim + 4);
  }
  __device__ __forceinline__ uint8_t* keys(int stage) const { return base + stage * value_bytes(is_fp4); }
  __device__ __forceinline__ uint8_t* panel(int i) const { return keys(num_stages) + i * kPanelBytes; }
  __device__ __forceinline__ uint8_t* queries() const { return panel(panels); }
  __device__ __forceinline__ float* weights() const {
    return reinterpret_cast<float*>(queries() + lines * kIndexDim);
  }
  // Two places for each stage, for phases of either parity: of each key the scale, then whether it is
  // present: all bits of a word or none; in lists of several rows, a bit for each row. A warp gives up a
  // stage when its products are there, and these may still be on their way to its registers: an arrival can
  // overtake a load.
  static constexpr int kPlaceWords = 2 * kItemKeys;
  __device__ __forceinline__ float* scales(Place place) const {
    return weights() + lines + (place.phase * num_stages + place.stage) * kPlaceWords;
  }
  __device__ __forceinline__ uint32_t* present(Place place) const {
    return reinterpret_cast<uint32_t*>(scales(place) + kItemKeys);
  }
  __device__ __forceinline__ uint8_t* end() const { return base + bytes(num_stages, lines, panels, is_fp4); }
};

__device__ __forceinline__ Memory dynamic_memory(int num_stages, int lines, int panels, bool is_fp4) {
  extern __shared__ uint8_t raw[];
  const uintptr_t address = reinterpret_cast<uintptr_t>(raw);
  return {raw + (1024 - address % 1024) % 1024, num_stages, lines, panels, is_fp4};
}

// By all consumers. Weights are halved for twice_relu, and lie as a thread reads them: of heads 16 i + 2 t
// and the one behind, then of those 8 further on.
template <int kHeads, int kUnitRows>
__device__ __forceinline__ void load_queries(const IndexQueries& queries, const IndexUnit& unit,
                                             const Memory& memory) {
  constexpr int kLines = kHeads * kUnitRows, kPieces = kLines * 8 / kConsumers;
  static_assert(kPieces * kConsumers == kLines * 8 && kLines <= kConsumers);
  // A weight of a line to a thread, which is on its way while queries are.
  const int line = threadIdx.x, row = line / kHeads, head = line % kHeads;
  const bool has_weight = line < kLines && row < unit.num_rows && head < queries.num_heads;
  const float weight = has_weight ? 0.5f * queries.weight(unit.first_row + row, head) : 0.0f;
  uint8_t* to = memory.queries();
  if (!memory.is_fp4 || !queries.is_fp4) {
    Words<4> pieces[kPieces];  // in flight together
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int i = threadIdx.x + k * kConsumers, row = i / 8 / kHeads, head = i / 8 % kHeads;
      const bool exists = row < unit.num_rows && head < queries.num_heads;
      const uint8_t* from = queries.q + (unit.first_row + (exists ? row : 0)) * queries.q_stride_row;
      pieces[k] = load_if<4>(from + (exists ? head : 0) * kIndexDim + 16 * (i % 8), exists);
    }
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int i = threadIdx.x + k * kConsumers;
      store(to + swizzled(i / 8, i % 8), pieces[k]);
    }
  } else {
#pragma unroll 1  // it runs once: what counts is its length
    for (int i = threadIdx.x; i < kLines * 4; i += kConsumers) {
      const int line = i / 4, piece = i % 4, row = line / kHeads, head = line % kHeads;
      const bool exists = row < unit.num_rows && head < queries.num_heads;
      const int64_t from_row = unit.first_row + (exists ? row : 0);
      const int from_head = exists ? head : 0;
      const Words<4> packed = load_if<4>(
          queries.q + from_row * queries.q_stride_row + from_head * (kIndexDim / 2) + 16 * piece, exists);
      const uint8_t* s = static_cast<const uint8_t*>(queries.q_scale) +
                         from_row * queries.q_scale_stride_row + 4 * from_head;
      alignas(16) uint8_t expanded[32];
      expand_e2m1(packed, E2m1Scales{s[0], s[1], s[2], s[3]}.shift(piece), expanded);
      store(to + swizzled(line, 2 * piece), reinterpret_cast<const Words<4>*>(expanded)[0]);
      store(to + swizzled(line, 2 * piece + 1), reinterpret_cast<const Words<4>*>(expanded)[1]);
    }
  }
  if (line < kLines)
    memory.weights()[row * kHeads + head / 16 * 16 + head % 8 / 2 * 4 + head / 8 % 2 * 2 + head % 2] = weight;
  fence_proxy_async();
}
// Of a unit by its first row: to the L2.
template <int kHeads, int kUnitRows>
__device__ __forceinline__ void prefetch_queries(const IndexQueries& queries, int64_t first_row,
                                                 int64_t num_rows) {
  const int line = threadIdx.x, head = line % kHeads;
  const int64_t row = first_row + line / kHeads;
  if (line >= kHeads * kUnitRows || row >= num_rows || head >= queries.num_heads) return;
  prefetch_l2(queries.q + row * queries.q_stride_row + head * (queries.is_fp4 ? kIndexDim / 2 : kIndexDim));
  if (head % 32 == 0) {
    const int64_t weight = row * queries.weights_stride_row + head;
    prefetch_l2(static_cast<const uint8_t*>(queries.weights) + weight * (queries.weights_are_bf16 ? 2 : 4));
  }
}

}  // namespace sm90_index
}  // namespace mla_fp8::gpu
