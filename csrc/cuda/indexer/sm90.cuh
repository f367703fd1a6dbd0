#pragma once
// Logits on Hopper, for index_logits and for the scan of index_topk. Four warpgroups multiply, four warps
// fetch. An item is 64 keys, M of a wgmma, keys and queries from swizzled shared memory; N is the heads of
// the unit's rows, K the 128 elements in four steps. So a thread has all heads of two keys modulo its quad,
// and the sum over heads needs two exchanges. A tile is four items: one for each warpgroup, or, where two rows
// are all that the registers of one hold (64 heads), two for each of those that share the other rows.
//
// Items lie in a ring of stages. Warp w of those that fetch fills the items of warpgroup w by cp.async.
//
//   barrier     arrivals                        a phase is
//   full[s]     32 of copies, 1 of the warp     an item in stage s, its bytes there
//   empty[s]    8 of warps                      an item in stage s that nobody needs any more
//
// Absent entries and columns outside the unit are zeros, with `present` false.
#include "cuda/device/copy.cuh"
#include "cuda/device/mbarrier.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/indexer/rows.cuh"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

// D[64 x N] = or += A[64 x 32] B[32 x N], e4m3, both in swizzled panels of 128 bytes a row along k.
#define MLA_D4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define MLA_D16(d, i) MLA_D4(d, i), MLA_D4(d, i + 1), MLA_D4(d, i + 2), MLA_D4(d, i + 3)
#define MLA_R32                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
__device__ inline void wgmma_e4m3(float (&d)[8][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " MLA_R32
      "}, %32, %33, p, 1, 1; }"
      : MLA_D16(d, 0), MLA_D16(d, 4)
      : "l"(a), "l"(b), "r"(accumulate));
}
__device__ inline void wgmma_e4m3(float (&d)[16][4], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " MLA_R32
      ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
      "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1; }"
      : MLA_D16(d, 0), MLA_D16(d, 4), MLA_D16(d, 8), MLA_D16(d, 12)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef MLA_R32
#undef MLA_D16
#undef MLA_D4

__device__ inline void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
               : "memory");
}
// 0 of what is negative; a NaN stays one.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// Sixteen bytes `piece` of a row of a swizzled panel.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * kIndexDim + ((piece ^ row % 8) << 4);
}

namespace sm90_index {

inline constexpr int kGroup = 128, kGroups = 4, kMathThreads = kGroup * kGroups;
inline constexpr int kProducers = 4, kThreads = kMathThreads + kProducers * kWarpSize;
// Out of what the block is launched with: 96 a thread.
inline constexpr int kMathRegisters = 112, kProducerRegisters = 32;
static_assert(kMathThreads * kMathRegisters + (kThreads - kMathThreads) * kProducerRegisters <=
              65536 / kThreads / 8 * 8 * kThreads);
inline constexpr int kItemKeys = 64, kTileKeys = kItemKeys * kGroups;
inline constexpr int kMostStages = 16;
inline constexpr int kMaxSharedBytes = 227 * 1024;

// The threads that multiply, which are one team or four. Named barriers: 0 is the block's.
struct MathTeam {
  static constexpr int kThreads = kMathThreads;
  using Smem = SelectSmem<11>;

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { named_barrier(1, kThreads); }
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const { return bins; }
};
struct GroupTeam {
  static constexpr int kThreads = kGroup;
  using Smem = SelectSmem<9>;

  __device__ __forceinline__ static int thread() { return threadIdx.x % kGroup; }
  __device__ __forceinline__ static void sync() { named_barrier(2 + threadIdx.x / kGroup, kThreads); }
  __device__ __forceinline__ const uint32_t* total(const uint32_t* bins) const { return bins; }
};

struct Barriers {
  uint64_t full[kMostStages], empty[kMostStages];

  __device__ __forceinline__ void init() {
    for (int s = 0; s < kMostStages; ++s) {
      mbarrier_init(shared_address(&full[s]), kWarpSize + kWarpArrivals);
      mbarrier_init(shared_address(&empty[s]), 2 * kGroup / kWarpSize * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
};

// Where a warpgroup, or the warp that fetches for it, is in the ring.
struct Place {
  int num_stages, stage;
  int phase = 0;

  __device__ __forceinline__ void advance(int items) {
    stage += items;
    if (stage < num_stages) return;
    stage -= num_stages;
    phase ^= 1;
  }
};

// Shared memory whose size depends on the call, from a multiple of 1024 bytes on.
struct Memory {
  uint8_t* base;
  int num_stages, lines;  // lines of queries

  static constexpr int kStageBytes = kItemKeys * (kIndexDim + 4 + 1);
  MLA_HD static constexpr int bytes(int num_stages, int lines) {
    return num_stages * kStageBytes + lines * (kIndexDim + 4);
  }
  __device__ __forceinline__ uint8_t* keys(int stage) const { return base + stage * kItemKeys * kIndexDim; }
  __device__ __forceinline__ uint8_t* queries() const { return keys(num_stages); }
  __device__ __forceinline__ float* weights() const {
    return reinterpret_cast<float*>(queries() + lines * kIndexDim);
  }
  __device__ __forceinline__ float* scales(int stage) const { return weights() + lines + stage * kItemKeys; }
  __device__ __forceinline__ bool* present(int stage) const {
    return reinterpret_cast<bool*>(scales(num_stages)) + stage * kItemKeys;
  }
  __device__ __forceinline__ uint8_t* end() const { return reinterpret_cast<uint8_t*>(present(num_stages)); }
};

// By all threads that multiply. Weights lie as a thread reads them: of heads 16 i + 2 t and the one behind,
// then of those 8 further on.
template <int kHeads>
__device__ __forceinline__ void load_queries(const IndexQueries& queries, const IndexUnit& unit,
                                             const Memory& memory) {
  for (int i = threadIdx.x; i < memory.lines * 8; i += kMathThreads) {
    const int line = i / 8, piece = i % 8;
    const int row = line / kHeads, head = line % kHeads;
    const bool exists = row < unit.num_rows && head < queries.num_heads;
    const int64_t from_row = unit.first_row + (exists ? row : 0);
    const int from_head = exists ? head : 0;
    const uint8_t* from = queries.q + from_row * queries.q_stride_row;
    uint8_t* to = memory.queries();
    if (!queries.is_fp4) {
      store(to + swizzled(line, piece), load_if<4>(from + from_head * kIndexDim + 16 * piece, exists));
    } else if (piece % 2 == 0) {
      const Words<4> packed = load_if<4>(from + from_head * (kIndexDim / 2) + 8 * piece, exists);
      const uint8_t* s = static_cast<const uint8_t*>(queries.q_scale) +
                         from_row * queries.q_scale_stride_row + 4 * from_head;
      alignas(16) uint8_t expanded[32];
      expand_e2m1(packed, E2m1Scales{s[0], s[1], s[2], s[3]}.shift(piece / 2), expanded);
      store(to + swizzled(line, piece), reinterpret_cast<const Words<4>*>(expanded)[0]);
      store(to + swizzled(line, piece + 1), reinterpret_cast<const Words<4>*>(expanded)[1]);
    }
  }
  for (int line = threadIdx.x; line < memory.lines; line += kMathThreads) {
    const int row = line / kHeads, head = line % kHeads;
    const bool exists = row < unit.num_rows && head < queries.num_heads;
    const int at = head / 16 * 16 + head % 8 / 2 * 4 + head / 8 % 2 * 2 + head % 2;
    memory.weights()[row * kHeads + at] = exists ? queries.weight(unit.first_row + row, head) : 0.0f;
  }
  fence_proxy_async();
}

// Fills the items of one warpgroup.
class Producer {
 public:
  __device__ __forceinline__ Producer(const IndexKeys& keys, const Divider& page_size, const Memory& memory,
                                      Barriers& barriers)
      : keys_(keys),
        page_size_(page_size),
        memory_(memory),
        barriers_(barriers),
        warp_(threadIdx.x / kWarpSize - kMathThreads / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        place_{memory.num_stages, warp_} {}

  // The warp's items of tiles from `column` on.
  __device__ __forceinline__ void run(const IndexUnit& unit, int32_t column, int tiles) {
    column += warp_ * kItemKeys;
    const int32_t* table =
        keys_.page_table ? keys_.page_table + unit.request * keys_.page_table_stride_request : nullptr;
    // Items of one page, whose keys lie one behind the other.
    const bool is_even = keys_.values_stride_row == kIndexDim &&
                         (table == nullptr || (page_size_.divisor() | column) % kItemKeys == 0);
    Entry next = find(table, unit, column);
    for (int t = 0; t < tiles; ++t, column += kTileKeys) {
      const Entry now = next;
      if (t + 1 < tiles) next = find(table, unit, column + kTileKeys);
      mbarrier_wait(shared_address(&barriers_.empty[place_.stage]), place_.phase ^ 1);
      if (is_even && column >= unit.begin && column + kItemKeys <= unit.end) fill(now);
      else fill_by_key(table, unit, column);
      const uint32_t full = shared_address(&barriers_.full[place_.stage]);
      mbarrier_arrive_cp_async(full);
      mbarrier_arrive_warp(full, lane_);
      place_.advance(kGroups);
    }
  }

 private:
  struct Entry {
    int32_t page, row;  // as the table says it: nobody waits for it before it is used
  };

  __device__ __forceinline__ Entry find(const int32_t* table, const IndexUnit& unit, int32_t column) const {
    if (column < unit.begin || column >= unit.end) return {-1, 0};
    if (table == nullptr) return {0, column};
    const int32_t page_index = static_cast<int32_t>(page_size_(column));
    return {table[page_index], column - page_index * static_cast<int32_t>(page_size_.divisor())};
  }
  __device__ __forceinline__ bool is_present(const Entry& entry) const {
    return entry.page >= 0 && entry.page < keys_.num_pages;
  }

  // Of an item whose first key `entry` is. Eight lanes to a key.
  __device__ __forceinline__ void fill(const Entry& entry) const {
    const bool present = is_present(entry);
    const uint8_t* from = keys_.values;
    const uint8_t* scales = keys_.scales;
    if (present) {
      from = keys_.value(entry.page, entry.row);
      scales = keys_.scale(entry.page, entry.row);
    }
    from += lane_ * 16;
    const uint32_t to = shared_address(memory_.keys(place_.stage));
    const uint32_t even = to + swizzled(lane_ / 8, lane_ % 8), odd = to + swizzled(4 + lane_ / 8, lane_ % 8);
#pragma unroll
    for (int i = 0; i < kItemKeys / 8; ++i) {  // the swizzle repeats with eight keys
      cp_async_16(even + i * 8 * kIndexDim, from + i * 8 * kIndexDim, present);
      cp_async_16(odd + i * 8 * kIndexDim, from + (i * 8 + 4) * kIndexDim, present);
    }
    const uint32_t scales_to = shared_address(memory_.scales(place_.stage) + lane_);
    cp_async_4(scales_to, scales + 4 * lane_, present);
    cp_async_4(scales_to + 4 * kWarpSize, scales + 4 * (kWarpSize + lane_), present);
    memory_.present(place_.stage)[lane_] = present;
    memory_.present(place_.stage)[kWarpSize + lane_] = present;
  }

  // Of any item.
  __device__ __forceinline__ void fill_by_key(const int32_t* table, const IndexUnit& unit,
                                              int32_t column) const {
    const uint32_t to = shared_address(memory_.keys(place_.stage));
#pragma unroll 1
    for (int first = 0; first < kItemKeys; first += kWarpSize) {
      const Entry entry = find(table, unit, column + first + lane_);
      const bool present = is_present(entry);
      const uint8_t* value = present ? keys_.value(entry.page, entry.row) : nullptr;
#pragma unroll 1
      for (int key = lane_ / 8; key < kWarpSize; key += 4) {
        const uint8_t* from = broadcast(value, key);
        cp_async_16(to + swizzled(first + key, lane_ % 8), from ? from + 16 * (lane_ % 8) : keys_.values,
                    from != nullptr);
      }
      cp_async_4(shared_address(memory_.scales(place_.stage) + first + lane_),
                 present ? keys_.scale(entry.page, entry.row) : keys_.scales, present);
      memory_.present(place_.stage)[first + lane_] = present;
    }
  }

  const IndexKeys& keys_;
  const Divider& page_size_;
  const Memory& memory_;
  Barriers& barriers_;
  const int warp_, lane_;
  Place place_;
};

// The math of a warpgroup. kHeads: lines of a row's queries, 16, 32 or 64.
template <int kHeads>
class Math {
 public:
  __device__ __forceinline__ Math(const Memory& memory, Barriers& barriers)
      : memory_(memory), barriers_(barriers), base_{memory.num_stages, 0} {}

  // When the queries of a unit have been loaded.
  __device__ __forceinline__ void begin(int num_rows) {
    constexpr int kShares = kHeads == 64 ? 2 : 1;  // of the rows, at most
    shares_ = num_rows > kRows ? kShares : 1;
    const int groups = kGroups / shares_;  // with the same rows
    row_ = group() / groups * kRows;
    item_ = group() % groups;
    num_rows_ = num_rows;
    place_ = base_;
    place_.advance(item_);
    const float4* weights = reinterpret_cast<const float4*>(memory_.weights()) + threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        const int line = (row_ + r) * kHeads;
        weights_[r][i] = line < memory_.lines ? weights[line / 4 + 4 * i] : float4{};
      }
  }

  // Of a tile: sink(row, valid, key, logit, present, is_pair), the lanes of a warp together; a lane with
  // `valid` has the logit of a key of the tile of its own. With `is_pair` the upper lanes of each quad have the
  // row behind that of the lower ones.
  template <class Sink>
  __device__ __forceinline__ void next_tile(const Sink& sink) {
    for (int i = 0; i < shares_; ++i) {
      const int stage = place_.stage;
      mbarrier_wait(shared_address(&barriers_.full[stage]), place_.phase);
      fence_proxy_async();
      const int key = (i * (kGroups / shares_) + item_) * kItemKeys;
      const int rows = num_rows_ - row_;
      if (rows > kRows / 2) rows_logits<kRows * kHeads>(stage, key, sink);
      else if constexpr (kRows * kHeads > 64) rows_logits<kRows * kHeads / 2>(stage, key, sink);
      else rows_logits<kRows * kHeads>(stage, key, sink);
      for (int j = shares_; j <= 2; ++j)
        mbarrier_arrive_warp(shared_address(&barriers_.empty[stage]), threadIdx.x % kWarpSize);
      place_.advance(kGroups / shares_);
    }
  }

  // When the unit's tiles are done.
  __device__ __forceinline__ void end(int tiles) {
    const int last = base_.stage + tiles * kGroups;
    base_.phase ^= last / base_.num_stages & 1;
    base_.stage = last % base_.num_stages;
  }

 private:
  static constexpr int kRows = kHeads == 64 ? 2 : 4;  // of a warpgroup, at most

  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }

  // The products of kN / kHeads rows with the item whose first key of the tile is `first`.
  template <int kN, class Sink>
  __device__ __forceinline__ void rows_logits(int stage, int first, const Sink& sink) const {
    constexpr int kColumns = kN / 8, kUsed = kN / kHeads;
    uint32_t queries = shared_address(memory_.queries()) + row_ * kHeads * kIndexDim;
    asm volatile("" : "+r"(queries));  // or its descriptors wait in registers, which are short
    const uint64_t a = wgmma_panel_descriptor(shared_address(memory_.keys(stage)));
    const uint64_t b = wgmma_panel_descriptor(queries);
    float acc[kColumns][4];
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(acc, wgmma_advance(a, 32 * step), wgmma_advance(b, 32 * step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(acc);

    // The lane's logits will be those of key `key`: of eight keys, or the eight behind them.
    const int lane = threadIdx.x % kWarpSize, t = lane % 4;
    const int key = threadIdx.x % kGroup / kWarpSize * 16 + lane / 4 + 8 * (t & 1);
    const float scale = memory_.scales(stage)[key];
    const bool present = memory_.present(stage)[key];
    float sums[kUsed];
#pragma unroll
    for (int r = 0; r < kUsed; ++r) {
      float s[2][2] = {};  // keys, heads modulo two
#pragma unroll
      for (int i = 0; i < kHeads / 16; ++i) {
        const float4 w = weights_[r][i];
        const float (&c)[4] = acc[r * (kHeads / 8) + 2 * i];
        const float (&d)[4] = acc[r * (kHeads / 8) + 2 * i + 1];
        s[0][0] = fmaf(relu(c[0]), w.x, s[0][0]);
        s[0][1] = fmaf(relu(c[1]), w.y, s[0][1]);
        s[1][0] = fmaf(relu(c[2]), w.x, s[1][0]);
        s[1][1] = fmaf(relu(c[3]), w.y, s[1][1]);
        s[0][0] = fmaf(relu(d[0]), w.z, s[0][0]);
        s[0][1] = fmaf(relu(d[1]), w.w, s[0][1]);
        s[1][0] = fmaf(relu(d[2]), w.z, s[1][0]);
        s[1][1] = fmaf(relu(d[3]), w.w, s[1][1]);
      }
      const float low = round_add(s[0][0], s[0][1]), high = round_add(s[1][0], s[1][1]);
      sums[r] = exchange(low, high, 1);
    }
    // The scale comes behind the sum of all heads: parts times infinity would cancel.
    const auto logit = [&](float sum) { return round_add(round_mul(sum, scale), 0.0f); };
    if constexpr (kUsed == 1) {
      const float sum = round_add(sums[0], __shfl_xor_sync(kFullWarp, sums[0], 2));
      sink(row_, t < 2, first + key, logit(sum), present, std::false_type{});
    } else {
#pragma unroll
      for (int r = 0; r < kUsed; r += 2) {
        const int own = row_ + r + t / 2;
        sink(own, own < num_rows_, first + key, logit(exchange(sums[r], sums[r + 1], 2)), present,
             std::true_type{});
      }
    }
  }

  // A lane without bit `lanes` keeps x and gives y to the lane with it, which gives x; the sums of both.
  __device__ __forceinline__ static float exchange(float x, float y, int lanes) {
    const bool upper = threadIdx.x & lanes;
    const float kept = upper ? y : x;
    return round_add(kept, __shfl_xor_sync(kFullWarp, upper ? x : y, lanes));
  }

  const Memory& memory_;
  Barriers& barriers_;
  Place base_, place_{};                 // of the unit's first item, of the next one
  int shares_ = 1, row_ = 0, item_ = 0;  // of the tile's; the first row of the warpgroup, its item
  int num_rows_ = 0;
  float4 weights_[kRows][kHeads / 16];
};

}  // namespace sm90_index
}  // namespace mla_fp8::gpu
