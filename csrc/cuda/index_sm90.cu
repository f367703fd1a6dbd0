// index_topk on Hopper: decides how a call is scanned and merged (words: indexer/rows.cuh), and launches a
// kernel that clears counters, the scan (index_scan_sm90.cu) and the merge. Times and limits are of an H200.

#include <algorithm>
#include <cmath>

#include "cuda/indexer/sm90.h"
#include "cuda/indexer/sm90_merge.cuh"
#include "cuda/indexer/sm90_scan.cuh"
#include "cuda/indexer/sm90_shapes.cuh"

#if MLA_FP8_WITH_SM90A

namespace mla_fp8::gpu {
namespace {

using namespace sm90_index;

constexpr int kClearThreads = 256;
constexpr int kFewRows = 4, kNearKeysOfFew = 64 * 1024;
constexpr int kTilesOfShortPrompts = 24;  // their keys may have room, as those of 4096 rows of 4 K have

struct ClearArgs {
  uint8_t* begin;
  int64_t pieces;  // sixteen bytes each
};
// Whether each draft is a unit of one row: all consumers of a CTA then choose for it, not half of them, but
// keys are read again, from the L2. It pays for short contexts (by width of tables), and up to six rows.
bool are_rows_alone(const IndexRows& rows, int num_heads, bool is_fp4) {
  constexpr int64_t kMostRows = 6, kMostTiles = 80, kMostRowTiles = 2304;
  if (rows.k_start || rows.query_start_loc || num_heads <= 32 || is_fp4) return false;
  const int64_t tiles = (rows.num_columns + kTileKeys - 1) / kTileKeys;
  return rows.num_rows <= kMostRows || (tiles <= kMostTiles && rows.num_rows * tiles <= kMostRowTiles);
}
// Lanes of CTAs: two to four units of a request read the same keys, so their CTAs do that side by side.
int unit_lanes(const IndexRows& rows, int group_rows, int num_ctas) {
  if (rows.k_start || rows.query_start_loc) return 1;
  const int64_t units = (rows.next_n + group_rows - 1) / group_rows;
  return units >= 2 && units <= 4 && num_ctas % units == 0 ? static_cast<int>(units) : 1;
}

}  // namespace

// Clears counters of the scan and of the merge behind it.
__global__ void __launch_bounds__(kClearThreads)
    index_clear_sm90_kernel(const __grid_constant__ ClearArgs args) {
  let_next_grid_come();
  wait_for_previous_grid();
  const int64_t i = int64_t{blockIdx.x} * kClearThreads + threadIdx.x;
  if (i < args.pieces) store(args.begin + 16 * i, Words<4>{});
}

template <bool kAlone>
__global__ void __launch_bounds__(kMergeThreads, kAlone ? 2 : 1)
    index_merge_sm90_kernel(const __grid_constant__ MergeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ MergeShared shared;
  extern __shared__ uint8_t raw[];
  auto* held = reinterpret_cast<uint64_t*>(raw + (16 - reinterpret_cast<uintptr_t>(raw) % 16) % 16);
  merge<kAlone>(args, shared, held);
#endif
}

void index_topk_sm90(const IndexTopkArgs& args, gpuStream_t stream) {
  IndexTopkArgs own = args;
  const IndexRows& rows = args.p.problem.rows;
  const int topk = args.p.topk, num_heads = args.p.problem.queries.num_heads;
  const bool is_fp4 = has_fp4_keys(args.p.problem),
             are_many = rows.k_start || rows.next_n > 2 * kIndexGroupRows;
  own.group_rows =
      are_rows_alone(rows, num_heads, is_fp4)
          ? 1
          : unit_rows(rows, topk > 2048 || (are_many && num_heads > 16) ? 2 : kIndexGroupRows, num_heads);
  const int lanes = unit_lanes(rows, own.group_rows, own.num_ctas);
  own.places = UnitPlaces(rows, own.group_rows, lanes);
  own.ctas = Divider(own.num_ctas / lanes);
  const int64_t lane_ctas = own.num_ctas / lanes, units = own.places.count;
  const bool may_be_uniform =
      !rows.k_start && !rows.query_start_loc && units <= std::min<int64_t>(lane_ctas, kGroup);
  const bool publishes = own.block_keys != nullptr;  // all keys then pass through shared memory, in chunks
  const auto unit_shares = static_cast<int32_t>(may_be_uniform ? lane_ctas / units : 0);
  own.list_rows = own.group_rows;  // a list for each row of a unit
  own.tile_keys = kTileKeys;
  const int64_t jobs = num_merge_jobs(own);
  // How many clusters of a size run at once on an H200, with one block on a multiprocessor. More jobs than
  // 132 are blocks alone.
  constexpr struct {
    int size, at_once;
  } kClusters[] = {{8, 15}, {4, 30}, {3, 39}, {2, 66}, {1, 132}};
  const auto& cluster = *std::find_if(std::begin(kClusters), std::end(kClusters) - 1,
                                      [&](const auto& c) { return jobs <= c.at_once; });
  const bool are_alone = jobs > cluster.at_once;
  const int entries = merge_entries(are_alone);
  // Columns of a row that have room in shared memory. Few rows count their keys earlier: that is faster.
  const int room = cluster.size * std::min(2 * entries, ThreadKeys::most(kMergeThreads));
  const bool are_few = own.group_rows == 1 && num_heads > 32 && !is_fp4 && rows.num_rows <= kFewRows;
  const int near_keys = are_few ? std::min(room, kNearKeysOfFew) : room;
  // Counters lie in the caller's memory, or at the end of the workspace.
  const int64_t arrival_bytes = own.num_ctas * int64_t{sizeof(IndexArrivals)},
                all_bin_bytes = rows.num_rows * int64_t{sizeof(IndexRowBins)};
  const bool counts_keys = !publishes && own.group_rows == 1 && num_heads > 32 && !is_fp4 &&
                           rows.num_columns > near_keys && rows.num_rows <= IndexCounters::kMostRows &&
                           (own.p.counters || all_bin_bytes < own.p.workspace_bytes / 2);
  const int64_t bin_bytes = counts_keys ? all_bin_bytes : 0;
  uint8_t *arrivals = own.p.counters, *bins = nullptr;
  if (arrivals != nullptr) {
    bins = arrivals + arrival_bytes;
  } else {
    own.p.workspace_bytes = own.p.workspace_bytes / 16 * 16 - arrival_bytes;
    arrivals = own.p.workspace + own.p.workspace_bytes;
    bins = arrivals - bin_bytes;
  }
  own.counters = {reinterpret_cast<IndexArrivals*>(arrivals), reinterpret_cast<IndexRowBins*>(bins)};
  bool is_answered = false;  // the scan answers all rows, whatever their lengths are
  int gathered_tiles = 0;    // the scan answers all rows if no unit has more tiles
  with_shape(num_heads, own.group_rows, is_fp4, [&](auto shape) {
    using S = decltype(shape);
    constexpr int kBytes =
        Memory::bytes(scan_stages(S::kUnitRows), S::kQueryLines, num_panels(S::kFp4), S::kFp4);
    const int room = kMaxSharedBytes - 2 * 1024 - static_cast<int>(sizeof(ScanShared)) - kBytes;
    int chunk_tiles = 1;
    while (chunk_tiles < most_chunk_tiles(own.group_rows) &&
           own.group_rows * row_bytes(topk, chunk_tiles + 1) <= room)
      ++chunk_tiles;
    const bool has_pins = own.p.pin_first > 0 || own.p.pin_last > 0;
    int32_t most_kept = publishes ? 0 : KeptKeys::most_tiles(own, 0);
    if (lanes > 1)
      most_kept = std::max(most_kept / lanes - own.num_ctas / lanes, 0);  // each lane rounds its shares up
    const int64_t most_tiles = (rows.num_columns + 3) / kTileKeys + 1;
    // Many rows are left to the merge, which has more of them under way at a time.
    const int most_gathered = !publishes && rows.num_rows <= 4 * own.num_ctas ? chunk_tiles : 0;
    is_answered = most_tiles <= most_gathered && own.places.count * most_tiles <= most_kept;
    if (!rows.k_start && !rows.query_start_loc && own.places.count * most_gathered <= most_kept)
      gathered_tiles = most_gathered;
    if (own.p.counters == nullptr && (counts_keys || (most_gathered > 0 && most_kept > 0))) {
      const int64_t pieces = (bin_bytes + arrival_bytes) / 16;
      launch(index_clear_sm90_kernel,
             {.grid = (pieces + kClearThreads - 1) / kClearThreads, .block = kClearThreads, .stream = stream},
             ClearArgs{bins, pieces});
    }
    const auto scan = [&](auto shape, int32_t most_binned) {
      launch_scan<decltype(shape)>(
          {.grid = own.num_ctas,
           .block = kThreads,
           .stream = stream,
           .smem = 1024 + kBytes + own.group_rows * row_bytes(topk, chunk_tiles)},
          ScanArgs{key_boxes(args.p.problem, own.group_rows), own, chunk_tiles, has_pins, most_kept,
                   most_gathered, most_binned, near_keys, unit_shares});
    };
    // If units have one row of many heads, consumers wait for the memory: they have time to count.
    if constexpr (S::kUnitRows == 1 && !S::kFp4)
      if (counts_keys)
        return scan(typename S::template With<Keeping::kCounted>{},
                    KeptKeys::most_tiles(own, own.p.counters ? 0 : bin_bytes));
    if constexpr (S::kUnitRows == 2 && !S::kFp4)
      if (are_many && most_gathered == 0 && most_tiles > kTilesOfShortPrompts)
        return scan(typename S::template With<Keeping::kNever>{}, 0);
    scan(shape, 0);
  });
  if (is_answered) return;
  launch(are_alone ? index_merge_sm90_kernel<true> : index_merge_sm90_kernel<false>,
         {.grid = jobs * cluster.size,
          .block = kMergeThreads,
          .stream = stream,
          .smem = entries * 8 + 16,
          .cluster = cluster.size},
         MergeArgs{own, near_keys, gathered_tiles, rows.num_columns <= kGroupColumns});
}

}  // namespace mla_fp8::gpu

#endif
