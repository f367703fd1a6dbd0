#pragma once
// The shared memory of a CTA of index_topk's scan on Hopper, besides keys and queries. For each row of
// its unit: the order keys of a chunk, one word a column, and the list of the best of earlier chunks.
#include <algorithm>

#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

// Candidates that a row's list holds: topk, and an eighth more so that not every chunk has to find the k-th.
MLA_HD constexpr int list_capacity(int topk) { return (topk + topk / 8 + 1) / 2 * 2; }
// Words from a row's keys to the next row's. Lanes write 16 keys of two rows together, in different banks.
MLA_HD constexpr int keys_pitch(int chunk_tiles) { return chunk_tiles * kTileKeys + 16; }
MLA_HD constexpr int row_bytes(int topk, int chunk_tiles) {
  return 8 * list_capacity(topk) + 4 * keys_pitch(chunk_tiles);
}

// The order keys of all scored tiles in the workspace, if it has room for them. The keys of a row are
// contiguous; `rows` says where they begin. Lists of candidates use the same memory when keys are not kept.
struct KeptRow {
  int32_t tile, column;  // of the row's first tile
};
// How a scan kernel may treat keys: never keep them; keep them if there is room; also count those of long
// rows, so that the merge reads them once. Code that is not run costs time: prompts have a kernel without it.
enum class Keeping { kNever, kMaybe, kCounted };
struct KeptKeys {
  KeptRow* rows;
  uint32_t* keys;

  __device__ __forceinline__ explicit KeptKeys(const IndexTopkArgs& args) {
    rows = reinterpret_cast<KeptRow*>(args.list(0, 0));
    keys = reinterpret_cast<uint32_t*>(rows + (args.p.problem.rows.num_rows + 1) / 2 * 2);
  }
  __device__ __forceinline__ uint32_t* tile(int32_t i) const { return keys + int64_t{i} * kTileKeys; }
  // Tiles for which the workspace has room, all rows of a unit in each. Its `last_bytes` serve other data.
  static int32_t most_tiles(const IndexTopkArgs& args, int64_t last_bytes) {
    const int64_t rows = args.p.problem.rows.num_rows;
    const int64_t bytes = args.p.workspace_bytes - last_bytes -
                          args.num_ctas * int64_t{sizeof(IndexCtaState)} -
                          (rows + 1) / 2 * 2 * int64_t{sizeof(KeptRow)};
    const int64_t tiles = bytes / (kTileKeys * int64_t{sizeof(uint32_t)}) / args.group_rows;
    return static_cast<int32_t>(std::clamp<int64_t>(tiles, 0, kMostKeptTiles - 1));
  }
};

// The part of a unit that a CTA scans.
struct ScanWork {
  int64_t unit_begin, unit_end;  // the unit's first step, and the one behind its last
  int32_t column;                // the first of this part
  int tiles;                     // 0 if the share has only the end of the unit: its choice
  int unit_tiles;                // of all parts
  int32_t seen_begin, seen_end;  // columns that all rows of the unit see: [seen_begin, seen_end)
  bool is_earlier;               // an earlier CTA began the unit
  bool is_whole;                 // the part is the whole unit; this CTA answers it without others' keys
  bool is_rehearsed;             // there is no unit: see Scan::scan_unit
};

// Says that one of a unit's `shares` has its keys in the workspace: those of the calling thread, and of
// threads that it has met at a barrier. Returns true for the last share; then the keys of all shares can be
// read. No CTA waits, so it does not matter in which order they begin.
__device__ __forceinline__ bool arrives_last(IndexArrivals& arrivals, uint32_t shares) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(&arrivals.shares)
               : "memory");
  if (before + 1 < shares) return false;
  arrivals.shares = 0;
  return true;
}

struct ScanShared {
  static constexpr int kBinsPerThread = 4;
  Barriers ring;
  // A consumer fills the memory of a unit, and each producer warp leaves it.
  uint64_t unit_full[2], unit_left[2];
  IndexShare share;
  alignas(16) int64_t sums[kThreads / kWarpSize];  // of ShareTeam
  IndexUnit units[2];                              // unit i of the share is in units[i % 2]
  ScanWork works[2];                               // the parts of those units
  int64_t begin, end;                              // steps of the CTA's share
  int cta;                                         // the number of its share in all lanes
  bool answers;                                    // this CTA arrived last and answers the unit
  alignas(16) uint32_t bins[kBinsPerThread * kConsumers];
  SelectScalars select[kIndexGroupRows];
  uint32_t low[kIndexGroupRows], high[kIndexGroupRows];  // bounds of all keys of a row's candidates
  uint32_t threshold[kIndexGroupRows];                   // smaller keys are no candidates
  int32_t count[kIndexGroupRows];                        // candidates in the row's list
};

struct ScanArgs {
  KeyBoxes boxes;
  IndexTopkArgs topk;
  int chunk_tiles;
  bool has_pins;
  int32_t most_kept, most_gathered;  // most tiles: of all units to keep keys, of a unit to gather it
  int32_t most_binned;               // tiles of all units, with which there is room for bins as well
  int32_t near_keys;                 // a row with more columns has its keys counted
  int32_t unit_shares;               // for find_uniform_share; 0: shares are not uniform
};

// A barrier of all consumers.
__device__ __forceinline__ void consumers_sync() { named_barrier(5, kConsumers); }

// The first `threads` threads, which find the share.
class ShareTeam {
 public:
  __device__ __forceinline__ ShareTeam(ScanShared& shared, int threads)
      : shared_(shared), threads_(threads) {}

  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ int threads() const { return threads_; }
  __device__ __forceinline__ void sync() const { named_barrier(11, threads_); }
  template <class T>
  __device__ __forceinline__ T inclusive_sum(T x) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    x = warp_inclusive_sum(x);
    sync();  // the sums of the last call have been read
    if (lane == kWarpSize - 1) shared_.sums[warp] = x;
    sync();
    return x + lanes_sum(lane < warp ? static_cast<T>(shared_.sums[lane]) : T{0});
  }
  // Sum and largest of all threads' x, none of which is negative. Call it before any inclusive_sum.
  struct SumAndMost {
    int32_t sum, most;
  };
  __device__ __forceinline__ SumAndMost sum_and_most(int32_t x) const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int64_t of_warp = int64_t{lanes_sum(x)} << 32 | lanes_max(static_cast<uint32_t>(x));
    if (lane == 0) shared_.sums[warp] = of_warp;
    sync();
    const int64_t other = lane < threads_ / kWarpSize ? shared_.sums[lane] : 0;
    return {lanes_sum(static_cast<int32_t>(other >> 32)),
            static_cast<int32_t>(lanes_max(static_cast<uint32_t>(other)))};
  }

 private:
  ScanShared& shared_;
  const int threads_;
};

// The consumers that select for one row of a unit: 512 threads if it has one row, 256 of two, else 128.
class RowTeam {
 public:
  static constexpr int kBinsPerThread = ScanShared::kBinsPerThread;

  MLA_HD static constexpr int threads_of(int num_rows) {
    return num_rows == 1 ? kConsumers : num_rows == 2 ? kConsumers / 2 : kGroup;
  }
  __device__ __forceinline__ RowTeam(ScanShared& shared, int num_rows, int32_t* staged = nullptr)
      : shared_(shared), threads_(threads_of(num_rows)), staged_(staged) {}

  __device__ __forceinline__ int thread() const { return threadIdx.x & (threads_ - 1); }
  __device__ __forceinline__ int threads() const { return threads_; }
  __device__ __forceinline__ int row() const { return threadIdx.x / static_cast<unsigned>(threads_); }
  __device__ __forceinline__ void sync() const { named_barrier(1 + row(), threads_); }
  __device__ __forceinline__ uint32_t* bins() const {
    return shared_.bins + row() * threads_ * kBinsPerThread;
  }
  __device__ __forceinline__ SelectScalars& scalars() const { return shared_.select[row()]; }
  __device__ __forceinline__ int32_t* staged() const { return staged_; }
  __device__ __forceinline__ void put_few(uint64_t order) const { put_where_bins_were(*this, order); }
  __device__ __forceinline__ const uint64_t* all_few() const { return few_where_bins_were(*this); }

 private:
  ScanShared& shared_;
  const int threads_;
  int32_t* staged_;

 public:
  __device__ __forceinline__ void stage_in(void* memory) { staged_ = static_cast<int32_t*>(memory); }
};

// Most tiles in a chunk of a unit's rows: a thread has 64 bits, one for each key that it visits.
constexpr int most_chunk_tiles(int num_rows) { return 64 * RowTeam::threads_of(num_rows) / kTileKeys; }

}  // namespace mla_fp8::gpu::sm90_index
