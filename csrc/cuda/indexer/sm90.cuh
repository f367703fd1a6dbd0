#pragma once
// The engine of scan.cuh on Hopper. A tile is 256 keys, 64 for each of four warpgroups: M of a wgmma, keys
// and queries from swizzled shared memory, N is the heads of the unit's rows, K the 128 elements in four
// steps. So a thread has all heads of two keys modulo its quad, and the sum over heads needs two shuffles.
//
// Each warpgroup fills and drains a ring of its own by cp.async, kStages deep, with a named barrier:
//
//   barrier         who          what it protects
//   1 + warpgroup   128 threads  before stage t is read: its bytes have come, for all four warps; and stage
//                                t - 1 may be filled again, as each warp has waited for its products
//
// Absent entries and columns outside the unit are zeros, with `present` false.
#include "cuda/device/copy.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/roles.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/indexer/scan.cuh"
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
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
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

// kHeads: lines of a row's queries, 16, 32 or 64.
template <int kHeads>
struct Sm90IndexEngine {
  static constexpr int kGroup = 128, kGroups = 4, kStages = 4, kGroupKeys = 64;
  static constexpr int kThreads = kGroup * kGroups, kTileKeys = kGroupKeys * kGroups;
  static constexpr int kLines = kHeads * kIndexGroupRows;
  static constexpr bool kSelectTakesQueries = false;

  struct Stage {
    uint8_t keys[kGroupKeys * kIndexDim];
  };
  struct Memory {
    alignas(1024) Stage stages[kStages][kGroups];
    alignas(1024) uint8_t queries[kLines * kIndexDim];
    float weights[kLines];
    float scales[kStages][kTileKeys];
    bool present[kStages][kTileKeys];
    SelectSmem select;
  };

  const IndexProblem& problem;
  const Divider& page_size;
  Memory& memory;
  int64_t request;
  int32_t first_column, begin_column, end_column;  // below 2^24 and a tile
  int num_rows, num_tiles;

  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }
  __device__ __forceinline__ static int group_thread() { return threadIdx.x % kGroup; }

  __device__ __forceinline__ void load_queries(const IndexUnit& unit) {
    const IndexQueries& queries = problem.queries;
    for (int i = threadIdx.x; i < kLines * 8; i += kThreads) {
      const int line = i / 8, piece = i % 8;
      const int row = line / kHeads, head = line % kHeads;
      const bool exists = row < unit.num_rows && head < queries.num_heads;
      const uint8_t* from = queries.q + (unit.first_row + (exists ? row : 0)) * queries.q_stride_row;
      const int from_head = exists ? head : 0;
      if (!queries.is_fp4) {
        store(memory.queries + swizzled(line, piece),
              load_if<4>(from + from_head * kIndexDim + 16 * piece, exists));
      } else if (piece % 2 == 0) {
        const Words<4> packed = load_if<4>(from + from_head * (kIndexDim / 2) + 8 * piece, exists);
        const uint8_t* s = static_cast<const uint8_t*>(queries.q_scale) +
                           (unit.first_row + (exists ? row : 0)) * queries.q_scale_stride_row + 4 * from_head;
        alignas(16) uint8_t expanded[32];
        expand_e2m1(packed, E2m1Scales{s[0], s[1], s[2], s[3]}.shift(piece / 2), expanded);
        store(memory.queries + swizzled(line, piece), reinterpret_cast<const Words<4>*>(expanded)[0]);
        store(memory.queries + swizzled(line, piece + 1), reinterpret_cast<const Words<4>*>(expanded)[1]);
      }
    }
    for (int line = threadIdx.x; line < kLines; line += kThreads) {
      const int row = line / kHeads, head = line % kHeads;
      const bool exists = row < unit.num_rows && head < queries.num_heads;
      memory.weights[line] = exists ? queries.weight(unit.first_row + row, head) : 0.0f;
    }
    fence_proxy_async();
  }

  // The warpgroup's keys of tile t, or nothing behind the last; one group of copies either way.
  __device__ __forceinline__ void fill(int t) {
    if (t < num_tiles) {
      const IndexKeys& keys = problem.keys;
      const int stage = t % kStages, thread = group_thread(), first_key = group() * kGroupKeys;
      const int32_t first = first_column + t * kTileKeys + first_key;
      const uint32_t to = shared_address(memory.stages[stage][group()].keys);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = i * 16 + thread / 8, piece = thread % 8;
        const int32_t column = first + key;
        const bool wanted = column >= begin_column && column < end_column;
        const int64_t page_index = wanted ? page_size(column) : 0;
        const int64_t page = wanted ? keys.page(request, page_index) : -1;
        const int64_t row = column - page_index * page_size.divisor();
        const bool present = page >= 0;
        const uint8_t* from = present ? keys.value(page, row) + 16 * piece : keys.values;
        cp_async_16(to + swizzled(key, piece), from, present);
        if (piece == 0) {
          cp_async_4(shared_address(&memory.scales[stage][first_key + key]),
                     present ? keys.scale(page, row) : keys.scales, present);
          memory.present[stage][first_key + key] = present;
        }
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void begin(const IndexUnit& unit, int64_t column, int tiles) {
    request = unit.request;
    first_column = static_cast<int32_t>(column);
    begin_column = unit.begin;
    end_column = unit.end;
    num_rows = unit.num_rows;
    num_tiles = tiles;
    __syncthreads();  // the queries are there, for all; nobody reads what is filled now
    for (int t = 0; t < kStages - 1; ++t) fill(t);
  }

  // The products of kN / kHeads rows, from `row` on.
  template <int kN, class Sink>
  __device__ __forceinline__ void rows_logits(int stage, int row, const Sink& sink) {
    constexpr int kColumns = kN / 8, kRows = kN / kHeads;
    const uint64_t a = wgmma_panel_descriptor(shared_address(memory.stages[stage][group()].keys));
    const uint64_t b = wgmma_panel_descriptor(shared_address(memory.queries) + row * kHeads * kIndexDim);
    float acc[kColumns][4];
    pin_registers(acc);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step)
      wgmma_e4m3(acc, wgmma_advance(a, 32 * step), wgmma_advance(b, 32 * step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(acc);

    const int lane = threadIdx.x % kWarpSize, t = lane % 4;
    const int key = group() * kGroupKeys + group_thread() / kWarpSize * 16 + lane / 4;
    const float scales[2] = {memory.scales[stage][key], memory.scales[stage][key + 8]};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sums[2][2] = {};
#pragma unroll
      for (int i = 0; i < kHeads / 8; ++i) {
        const float2 w =
            *reinterpret_cast<const float2*>(&memory.weights[(row + r) * kHeads + 8 * i + 2 * t]);
        const float (&d)[4] = acc[r * (kHeads / 8) + i];
        sums[0][0] = fmaf(relu(d[0]), w.x, sums[0][0]);
        sums[0][1] = fmaf(relu(d[1]), w.y, sums[0][1]);
        sums[1][0] = fmaf(relu(d[2]), w.x, sums[1][0]);
        sums[1][1] = fmaf(relu(d[3]), w.y, sums[1][1]);
      }
      float totals[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float total = round_add(sums[half][0], sums[half][1]);
        total = round_add(total, __shfl_xor_sync(kFullWarp, total, 1));
        total = round_add(total, __shfl_xor_sync(kFullWarp, total, 2));
        totals[half] = round_mul(total, scales[half]);  // of all heads: parts times infinity would cancel
      }
      const int own = key + 8 * (t & 1);
      if (row + r < num_rows)
        sink(row + r, t < 2, own, round_add(totals[t & 1], 0.0f), memory.present[stage][own]);
    }
  }

  template <class Sink>
  __device__ __forceinline__ void logits(int t, const Sink& sink) {
    const int stage = t % kStages;
    cp_async_wait<kStages - 2>();
    fence_proxy_async();
    named_barrier(1 + group(), kGroup);
    fill(t + kStages - 1);
    if constexpr (kHeads == 16) {
      rows_logits<64>(stage, 0, sink);
    } else if constexpr (kHeads == 32) {
      if (num_rows <= 2) rows_logits<64>(stage, 0, sink);
      else rows_logits<128>(stage, 0, sink);
    } else {
      if (num_rows == 1) {
        rows_logits<64>(stage, 0, sink);
      } else {
        rows_logits<128>(stage, 0, sink);
        if (num_rows == 3) rows_logits<64>(stage, 2, sink);
        else if (num_rows == 4) rows_logits<128>(stage, 2, sink);
      }
    }
  }
};

}  // namespace mla_fp8::gpu
