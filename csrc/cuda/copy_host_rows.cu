// copy_host_rows and store_host_rows on CUDA, between the GPU's memory and pinned memory of the host. A warp
// takes two rows at once, 16 bytes a lane and step. Bound by the bus, which few blocks fill: 16 of 512
// threads have 340 KB in flight.

#include "ops/copy_host_rows.h"

#include <algorithm>

#include "cuda/device/divide.cuh"
#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/warp.cuh"

namespace mla_fp8::gpu {

struct CopyRowsArgs {
  CopyRowsParams p;
  Divider from_page_size, to_page_size;
  int quads, halves;  // pieces of a row: 16 bytes of values, 8 bytes of scales (behind the page's rows)
  int64_t row_bytes, scale_bytes;
};

namespace {

constexpr int kCopyBlock = 512;
constexpr int kCopyWarps = kCopyBlock / kWarpSize;
constexpr int kRowsAtOnce = 2;

constexpr int most_quads() {
  int most = 0;
  for (int i = 0; i < kNumKvLayouts; ++i)
    most = std::max(most, kv_layout(static_cast<KvLayoutId>(i)).token_stride() / 16);
  return most;
}
constexpr int kSteps = (most_quads() + kWarpSize - 1) / kWarpSize;
constexpr bool all_in_quads() {
  for (int i = 0; i < kNumKvLayouts; ++i) {
    const KvLayout l = kv_layout(static_cast<KvLayoutId>(i));
    if (l.token_stride() % 16 != 0 || l.scale_bytes() / 8 > kWarpSize) return false;
  }
  return true;
}
static_assert(all_in_quads());

struct RowAddress {
  uint8_t *values, *scales;
};
__device__ __forceinline__ RowAddress address_of(const CopyRowsArgs& a, const RowPages& pages,
                                                 const Divider& page_size, int layer, int64_t row) {
  const int64_t page = page_size(row), in_page = row - page * page_size.divisor();
  uint8_t* const layer_data =
      pages.addresses ? reinterpret_cast<uint8_t*>(pages.addresses[layer]) : pages.data[layer];
  uint8_t* const base = layer_data + page * pages.stride_page;
  return {base + in_page * a.row_bytes, base + page_size.divisor() * a.row_bytes + in_page * a.scale_bytes};
}

// A row that a warp copies. CopyRowsParams says which rows are read, and which are written.
struct CopiedRow {
  RowAddress from, to;
  bool is_read, is_written;
};
__device__ __forceinline__ CopiedRow copied_row(const CopyRowsArgs& a, int layer, int64_t list, int64_t i) {
  const CopyRowsParams& p = a.p;
  const int64_t from = load_index(p.from_rows, p.from_rows_are_int64, list * p.from_rows_stride + i);
  const int64_t to = load_index(p.to_rows, p.to_rows_are_int64, list * p.to_rows_stride + i);
  CopiedRow row{};
  row.is_written = from >= 0 && to >= 0 && to < p.to.num_rows;
  row.is_read = row.is_written && from < p.from.num_rows;
  if (row.is_written) row.to = address_of(a, p.to, a.to_page_size, layer, to);
  if (row.is_read) row.from = address_of(a, p.from, a.from_page_size, layer, from);
  return row;
}

__device__ __forceinline__ void copy_at_once(const CopyRowsArgs& a, const CopiedRow (&rows)[kRowsAtOnce]) {
  const int lane = threadIdx.x % kWarpSize;
  Words<4> values[kRowsAtOnce][kSteps];
  Words<2> scales[kRowsAtOnce];
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int quad = lane + i * kWarpSize;
      values[r][i] = load_if<4>(rows[r].from.values + 16 * quad, rows[r].is_read && quad < a.quads);
    }
    scales[r] = load_if<2>(rows[r].from.scales + 8 * lane, rows[r].is_read && lane < a.halves);
  }
#pragma unroll
  for (int r = 0; r < kRowsAtOnce; ++r) {
    if (!rows[r].is_written) continue;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int quad = lane + i * kWarpSize;
      if (quad < a.quads) store(rows[r].to.values + 16 * quad, values[r][i]);
    }
    if (lane < a.halves) store(rows[r].to.scales + 8 * lane, scales[r]);
  }
}

}  // namespace

__global__ void __launch_bounds__(kCopyBlock) copy_rows_kernel(const __grid_constant__ CopyRowsArgs args) {
  const CopyRowsParams& p = args.p;
  wait_for_previous_grid();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warp = int64_t{blockIdx.x} * kCopyWarps + threadIdx.x / kWarpSize;
  const int64_t warps = int64_t{gridDim.x} * kCopyWarps;
  const int64_t lists = p.num_lists ? min(p.lists, int64_t{*p.num_lists}) : p.lists;
  for (int layer = 0; layer < p.num_layers; ++layer) {
    int64_t next = warp;  // among this layer's rows, the next one of this warp
    int64_t before = 0;   // rows of the lists that the warp has passed
    for (int64_t first = 0; first < lists; first += kWarpSize) {
      int64_t count = 0;
      if (first + lane < lists) {
        count = p.counts ? p.counts[first + lane] : p.width;
        count = count < 0 ? 0 : count < p.width ? count : p.width;
      }
      const int64_t sum = before + warp_inclusive_sum(count);
      before = broadcast(sum, kWarpSize - 1);
      while (next < before) {
        CopiedRow rows[kRowsAtOnce]{};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (next >= before) continue;
          const int list = __popc(__ballot_sync(kFullWarp, sum <= next));
          rows[r] = copied_row(args, layer, first + list, next - broadcast(sum - count, list));
          next += warps;
        }
        copy_at_once(args, rows);
      }
    }
  }
}

void copy_rows(const CopyRowsParams& p, gpuStream_t stream) {
  const KvLayout l = kv_layout(p.layout);
  const int64_t scale_bytes = l.scale_inline() ? 0 : l.scale_bytes();
  const CopyRowsArgs args{p,
                          Divider(p.from.page_size),
                          Divider(p.to.page_size),
                          l.token_stride() / 16,
                          static_cast<int>(scale_bytes / 8),
                          l.token_stride(),
                          scale_bytes};
  const int64_t most = (p.lists * p.width + kCopyWarps - 1) / kCopyWarps;
  launch(copy_rows_kernel, {.grid = std::min(p.max_blocks, most), .block = kCopyBlock, .stream = stream},
         args);
}

void* address_on_gpu(const void* p) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, p), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeUnregistered ? nullptr : attributes.devicePointer;
}

}  // namespace mla_fp8::gpu
