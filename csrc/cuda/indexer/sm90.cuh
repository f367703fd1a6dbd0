#pragma once
// Logits of tiles of keys on Hopper, for index_logits and for the scan of index_topk (words: rows.cuh).
//
// wgmma multiplies an item: M is its 64 keys, N the heads of the unit's rows, K the 128 elements in four
// steps. Keys and queries come from swizzled shared memory. A quad of threads has all heads of two keys, so
// the sum over heads needs two exchanges between lanes. A tile is four items.
//
//   warps                  do
//   a producer warpgroup   each warp fetches one item of every tile (sm90_fetch.cuh)
//   four consumer groups   products and logits of items (sm90_math.cuh). Each takes one item of each tile for
//                          all rows. With 64 heads its registers hold two rows: then, of a unit of four rows,
//                          it takes two items of each tile for half of the rows.
//
//   barrier     arrivals                         a phase is
//   full[s]     one, with its bytes; 32 more if  an item in stage s, all its bytes there
//               keys come one by one or in blocks
//   empty[s]    four warps of each warpgroup     an item in stage s that nobody needs any more
//               that multiplies it
//
// The ring holds whole tiles, so a stage has the same item of every tile. Thus whoever waits for a phase has
// seen the one before it; otherwise a parity could not tell phases apart. Absent entries have `present` 0; a
// stage's bytes for them, and for columns outside the unit, mean nothing.
//
// Bound: the memory for one row; for two rows of 64 heads 179 instructions of a warp an item, 128 for sums.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tensor_map.cuh"
#include "cuda/indexer/rows.cuh"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

// The byte of a swizzled panel at which sixteen-byte piece `piece` of row `row` begins.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kIndexDim + ((piece ^ row % 8) << 4);
}

namespace sm90_index {

inline constexpr int kGroup = 128, kGroups = 4, kConsumers = kGroup * kGroups, kThreads = kConsumers + kGroup;
inline constexpr int kItemKeys = 64, kTileKeys = kItemKeys * kGroups;
inline constexpr int kMostStages = 16;
// Stages of the ring in index_topk. The rows of larger units need memory themselves, so those have fewer.
MLA_HD constexpr int scan_stages(int unit_rows) { return (unit_rows == 1 ? 3 : 2) * kGroups; }
// Panels in which FP4 keys are expanded to e4m3.
MLA_HD constexpr int num_panels(bool is_fp4) { return is_fp4 ? kGroups : 0; }
// Registers of a thread, by role.
inline constexpr int kConsumerRegisters = 112, kProducerRegisters = 32;
// A block is launched with as many registers as its threads can share evenly, in multiples of eight a thread.
// No more can be had: a warp that asks for more waits for ever.
static_assert(kConsumers * kConsumerRegisters + kGroup * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);

// A barrier of the calling thread's warpgroup.
__device__ __forceinline__ void group_sync() { named_barrier(1 + threadIdx.x / kGroup, kGroup); }

// How the copy engine sees the keys. If the keys of an item are contiguous in one page, one copy, a box,
// brings them. Otherwise warps look up each key.
struct KeyBoxes {
  CUtensorMap map, block_map;
  bool are_used;
  bool are_blocks;      // a box is a block of a list, and scales come one by one
  bool are_whole;       // of a whole list a box is an item nevertheless
  bool are_read_again;  // by another unit of the request, so the L2 keeps them
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];
  // For each shift of E2m1Scales, the eight magnitudes of e2m1 as e4m3.
  static constexpr int kLeastShift = -20, kShifts = 27;
  uint64_t magnitudes[kShifts];

  // Initialises the barriers. At least kMostStages threads call it, with numbers from 0, and the block meets
  // after it. `shares` warpgroups multiply the same item.
  __device__ __forceinline__ void init(int thread, const KeyBoxes& boxes, int shares) {
    if (const int s = thread; s < kMostStages) {
      const bool are_copies = boxes.are_used && !boxes.are_blocks;
      mbarrier_init(shared_address(&full[s]), are_copies ? kWarpArrivals : kWarpSize + kWarpArrivals);
      mbarrier_init(shared_address(&empty[s]), shares * kGroup / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
  }
  __device__ __forceinline__ void init_magnitudes(int thread) {  // called by kGroup threads
    for (int i = thread; i < kShifts * 8; i += kGroup)
      reinterpret_cast<uint8_t*>(magnitudes)[i] = e2m1_to_e4m3(i % 8, i / 8 + kLeastShift);
  }
};

// A place in the ring: a stage, and the parity of the phase that fills it next.
struct Place {
  int stage;
  uint32_t phase = 0;

  // `items` must divide num_stages.
  __device__ __forceinline__ void advance(int items, int num_stages) {
    stage += items;
    if (stage >= num_stages) {
      stage -= num_stages;
      phase ^= 1;
    }
  }
};

// Dynamic shared memory, from a multiple of 1024 bytes on: the ring, panels, queries, weights, scales.
struct Memory {
  uint8_t* base;
  int num_stages, lines;  // lines: a head of a row of queries each
  int panels;             // num_panels
  bool is_fp4;            // whether keys are FP4

  static constexpr int kPanelBytes = kItemKeys * kIndexDim;  // 64 keys in the form that wgmma takes
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
  // Scales and presence of a stage's keys lie twice, by the parity of the phase. A warp gives up a stage when
  // its products are done; its loads of scales may still be on their way, and the next phase must not
  // overwrite them. present: all bits or none for a key; in lists of several rows, bit i for row i.
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

// Copies a unit's queries and weights to shared memory; all consumers call it. Weights are halved, for
// twice_relu. Thread t of a quad reads four at once: those of heads 16 i + 2 t + {0, 1, 8, 9}.
template <int kHeads, int kUnitRows>
__device__ __forceinline__ void load_queries(const IndexQueries& queries, const IndexUnit& unit,
                                             const Memory& memory) {
  constexpr int kLines = kHeads * kUnitRows, kPieces = kLines * 8 / kConsumers;
  static_assert(kPieces * kConsumers == kLines * 8 && kLines <= kConsumers);
  // Each thread loads one weight, which is in flight while queries are copied.
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
#pragma unroll 1  // it runs once: short code arrives sooner
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
// Prefetches to the L2 the queries and weights of the unit that begins at first_row.
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
