#pragma once
// What a CTA of index_topk's scan on Hopper has in shared memory beside keys and queries: for each row of its
// unit the order keys of a chunk of columns, one word for each, and the list of the best of earlier chunks.
#include <algorithm>

#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

// Of a list: topk, and a few more, so that not every chunk's end has to find the k-th.
MLA_HD constexpr int list_capacity(int topk) { return (topk + topk / 8 + 1) / 2 * 2; }
// Words from a row's keys to the next one's: lanes write 16 keys of two rows together.
MLA_HD constexpr int keys_pitch(int chunk_tiles) { return chunk_tiles * kTileKeys + 16; }
MLA_HD constexpr int row_bytes(int topk, int chunk_tiles) {
  return 8 * list_capacity(topk) + 4 * keys_pitch(chunk_tiles);
}

// Order keys of all tiles, where the workspace has room for them: those of a row one behind the other, and
// for each row where they are. The lists lie in the same memory.
struct KeptRow {
  int32_t tile, column;  // the first one's
};
// Whether a scan may keep keys, and counts those of long rows: then the merge reads these once. Code that
// lies in a kernel costs where it does not run: prompts of many rows have a kernel without.
enum class Keeping { kNever, kMaybe, kCounted };
struct KeptKeys {
  KeptRow* rows;
  uint32_t* keys;

  __device__ __forceinline__ explicit KeptKeys(const IndexTopkArgs& args) {
    rows = reinterpret_cast<KeptRow*>(args.list(0, 0));
    keys = reinterpret_cast<uint32_t*>(rows + (args.p.problem.rows.num_rows + 1) / 2 * 2);
  }
  __device__ __forceinline__ uint32_t* tile(int32_t i) const { return keys + int64_t{i} * kTileKeys; }
  // That a workspace has room for, each for all rows of a unit, if its last bytes are for others.
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
  int64_t unit_begin, unit_end;  // steps
  int32_t column;                // the first
  int tiles;                     // 0 of a unit of which the share has but the end
  int unit_tiles;                // of all CTAs
  int32_t seen_begin, seen_end;  // columns that all rows of the unit see
  bool is_earlier;               // begun by another CTA
  bool is_whole;                 // it is all of the unit, and answered without others' keys
  bool is_rehearsed;             // there is none: see Scan::scan_unit
};

// Says that the keys of one of a unit's `shares` are in the workspace: the calling thread's, and those of the
// threads that it has met at a barrier. True for the caller that comes last: then the keys of all are there.
// Nobody waits, so it does not matter which CTAs have begun.
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
  // A unit's place is filled by a consumer, and left by each producer.
  uint64_t unit_full[2], unit_left[2];
  IndexShare share;
  alignas(16) int64_t sums[kThreads / kWarpSize];  // of ShareTeam
  IndexUnit units[2];                              // in turns
  ScanWork works[2];                               // of those units
  int64_t begin, end;                              // the CTA's share
  int cta;                                         // its number among all shares
  bool answers;                                    // it has arrived last
  alignas(16) uint32_t bins[kBinsPerThread * kConsumers];
  SelectScalars select[kIndexGroupRows];
  uint32_t low[kIndexGroupRows], high[kIndexGroupRows];  // no candidate's key is below, or above
  uint32_t threshold[kIndexGroupRows];                   // keys from here on are candidates
  int32_t count[kIndexGroupRows];                        // of the list
};

struct ScanArgs {
  KeyBoxes boxes;
  IndexTopkArgs topk;
  int chunk_tiles;
  bool has_pins;
  int32_t most_kept, most_gathered;  // tiles, of all units and of one
  int32_t most_binned;               // of all units, with room for bins
  int32_t near_keys;                 // of a row whose keys are not counted
  int32_t unit_shares;               // of find_uniform_share, or 0: shares are not uniform
};

// All consumers.
__device__ __forceinline__ void consumers_sync() { named_barrier(5, kConsumers); }

// The threads that find the share, from the first one on.
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
    sync();  // the last call's sums have been read
    if (lane == kWarpSize - 1) shared_.sums[warp] = x;
    sync();
    return x + lanes_sum(lane < warp ? static_cast<T>(shared_.sums[lane]) : T{0});
  }
  // Of all threads, none of whose numbers is negative: before any sum.
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

// The consumers that select for a row of a unit: as many warpgroups as each row gets.
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

// Of a chunk of each of so many rows: a thread has a bit of 64 for each key that it visits.
constexpr int most_chunk_tiles(int num_rows) { return 64 * RowTeam::threads_of(num_rows) / kTileKeys; }

}  // namespace mla_fp8::gpu::sm90_index
