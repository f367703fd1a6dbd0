// The two levels of index_topk in blocks of eight entries (indexer/blocks.h): lists of candidates, and the
// choice of the blocks that a row publishes.
//
// index_list_kernel: a CTA makes the list of up to four rows. Candidates come in any order, some twice, some
// without entries. Each sets a bit for its block and row in shared memory; then each block with a bit becomes
// an element, ascending. An element says which rows have it, so their keys are read once. Rows of different
// requests, or of gathered keys with different beginnings, have elements of their own, one after another.
// In a whole list (IndexList) blocks without a bit are elements, too, of no row.
//
// index_blocks_kernel: a CTA chooses for a row the blocks with the largest keys, which the scan has found.
// The newest block is always taken, and comes last.

#include "cuda/indexer/blocks.h"

#include <algorithm>

#include "cuda/device/global.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/indexer/emit.cuh"
#include "cuda/indexer/logit_bins.cuh"
#include "cuda/indexer/rows.cuh"

namespace mla_fp8::gpu {
namespace {

constexpr int kThreads = 512, kBlock = IndexList::kBlock;
// Threads of a list's CTA where all lists are whole. With so few registers it runs beside a CTA of the scan.
constexpr int kFewThreads = 128, kFewRegisters = 32;
constexpr int kWindow = 128 * 1024;  // blocks that have bits in shared memory at a time
constexpr int kClearThreads = 256;

struct ListArgs {
  IndexRows rows;
  bool has_candidates;
  const int32_t* candidates;
  int64_t stride, num_candidates;
  bool are_of_rows;
  ListedRows listed;
  int window;  // blocks, a multiple of 128
};
struct ListSmem {
  int64_t request[kIndexGroupRows];
  int32_t origin[kIndexGroupRows], end[kIndexGroupRows];
  int last[kIndexGroupRows];  // the index of the row's last element, or -1
  int32_t written;
};
struct ClearArgs {
  BlockKeys keys;
  int64_t pieces;  // sixteen bytes each
};
struct ChoiceArgs {
  IndexTopkParams p;  // its positions are the blocks
  IndexRows rows;
  BlockKeys keys;
};

// The keys of a row's blocks as candidates. Keys below kLeastBlockKey are not published.
struct RowBlocks {
  const uint32_t* keys;
  int32_t count;

  template <class Team, class Visit>
  __device__ __forceinline__ void visit(const Team& team, const Visit& visit_four) const {
    constexpr int kAtOnce = 4;
    const int step = 4 * team.threads();
#pragma unroll 1
    for (int32_t first = 4 * team.thread(); first < count; first += kAtOnce * step) {
      uint4 found[kAtOnce]{};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (first + j * step < count) found[j] = *reinterpret_cast<const uint4*>(keys + first + j * step);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t four[] = {found[j].x, found[j].y, found[j].z, found[j].w};
        Four orders;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t block = first + j * step + i;
          orders[i] = order_of(block < count && four[i] >= kLeastBlockKey ? four[i] : 0, block);
        }
        visit_four(orders);
      }
    }
  }
};

// Sets a bit for each candidate in [first, end).
template <int kThreads>
__device__ __forceinline__ void mark_blocks(const int32_t* candidates, int64_t count, int32_t first,
                                            int32_t end, uint32_t* bits) {
  constexpr int kAtOnce = 4;  // loads in flight
#pragma unroll 1
  for (int64_t at = threadIdx.x; at < count && end > 0; at += kAtOnce * kThreads) {
    int32_t blocks[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      blocks[j] = at + j * kThreads < count ? candidates[at + j * kThreads] : -1;
#pragma unroll
    for (const int32_t block : blocks)
      if (block >= first && block < end) atomicOr(bits + (block - first) / 32, 1u << (block - first) % 32);
  }
}

template <int kThreads>
__device__ __forceinline__ void make_list(const ListArgs& args) {
  MLA_SHARED(ListSmem, s);
  extern __shared__ __align__(16) uint32_t bits[];  // [listed.rows][window / 32]
  wait_for_previous_grid();  // the scan may begin before the lists are there, but not before this
  const ListedRows& listed = args.listed;
  const int num_rows = listed.rows, window_words = args.window / 32;
  const int64_t list = blockIdx.x, first_row = list * num_rows;
  if (threadIdx.x < num_rows) {
    const int64_t i = first_row + threadIdx.x;
    IndexRow row{-1, 0, 0};
    if (i < listed.count) row = find_row(args.rows, listed.first + i);
    s.request[threadIdx.x] = row.request;
    s.origin[threadIdx.x] = args.rows.k_start ? row.begin : static_cast<int32_t>(row.request);
    s.end[threadIdx.x] = row.request < 0 ? 0 : row.end - row.begin;
    s.last[threadIdx.x] = -1;
    listed.origins[i] = s.origin[threadIdx.x];
    listed.ends[i] = s.end[threadIdx.x];
  }
  if (!args.has_candidates) return;
  __syncthreads();
  int32_t* elements = listed.elements + list * listed.stride;
  int32_t written = 0;
  bool is_whole = false;
#pragma unroll 1
  for (int leader = 0; leader < num_rows; ++leader) {
    // The rows with the leader's origin, if it is the first of them.
    uint32_t group = 0;
#pragma unroll 1
    for (int r = 0; r < num_rows; ++r) group |= static_cast<uint32_t>(s.origin[r] == s.origin[leader]) << r;
    if (__ffs(static_cast<int>(group)) - 1 != leader) continue;
    int32_t longest = 0;
#pragma unroll 1
    for (int r = 0; r < num_rows; ++r)
      if (group >> r & 1) longest = max(longest, s.end[r]);
    is_whole = listed.most_whole > 0 && longest <= listed.most_whole;
    const int32_t num_blocks = (longest + kBlock - 1) / kBlock;
#pragma unroll 1
    for (int32_t first = 0; first < num_blocks; first += args.window) {
      const int num_words = (min(num_blocks - first, args.window) + 31) / 32;
#pragma unroll 1
      for (int r = 0; r < num_rows; ++r)
#pragma unroll 1
        for (int i = threadIdx.x; i < (num_words + 3) / 4; i += kThreads)
          store(reinterpret_cast<uint8_t*>(bits + r * window_words + 4 * i), Words<4>{});
      __syncthreads();
#pragma unroll 1
      for (int r = 0; r < num_rows; ++r) {
        if ((group >> r & 1) == 0) continue;
        const int64_t own = args.are_of_rows ? listed.first + first_row + r : s.request[r];
        const int32_t end = min((s.end[r] + kBlock - 1) / kBlock, first + num_words * 32);
        mark_blocks<kThreads>(args.candidates + own * args.stride, args.num_candidates, first, end,
                              bits + r * window_words);
      }
      __syncthreads();
      const auto members = [&](int32_t i) {
        uint32_t all = 0;
#pragma unroll 1
        for (int r = 0; r < num_rows; ++r) all |= (bits[r * window_words + i / 32] >> i % 32 & 1) << r;
        return static_cast<int32_t>(all << IndexList::kNumberBits) | (first + i);
      };
      if (is_whole) {
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < min(num_blocks - first, args.window); i += kThreads)
          elements[first + i] = members(i);
        __syncthreads();
        continue;
      }
      const int each = (num_words + kThreads - 1) / kThreads;
      const int begin = min(static_cast<int>(threadIdx.x) * each, num_words),
                end = min(begin + each, num_words);
      const auto any = [&](int word) {
        uint32_t all = 0;
#pragma unroll 1
        for (int r = 0; r < num_rows; ++r) all |= bits[r * window_words + word];
        return all;
      };
      int32_t own = 0;
#pragma unroll 1
      for (int i = begin; i < end; ++i) own += __popc(any(i));
      const int32_t last = block_inclusive_sum<kThreads / kWarpSize>(own);
      int32_t to = written + last - own;
      int32_t places[kIndexGroupRows] = {-1, -1, -1, -1};
#pragma unroll 1
      for (int i = begin; i < end; ++i)
#pragma unroll 1
        for (uint32_t left = any(i); left != 0; left &= left - 1, ++to) {
          const int32_t element = members(32 * i + __ffs(static_cast<int>(left)) - 1);
#pragma unroll
          for (int r = 0; r < kIndexGroupRows; ++r)
            if (element >> (IndexList::kNumberBits + r) & 1) places[r] = to;
          elements[to] = element;
        }
#pragma unroll
      for (int r = 0; r < kIndexGroupRows; ++r)
        if (places[r] >= 0) atomicMax(&s.last[r], places[r]);
      if (threadIdx.x == kThreads - 1) s.written = written + last;
      __syncthreads();
      written = s.written;
    }
  }
  __syncthreads();
  if (threadIdx.x < num_rows) {
    const int last = s.last[threadIdx.x];
    int32_t columns = is_whole ? s.end[threadIdx.x] : 0;
    if (last >= 0) {
      const int32_t block = elements[last] & ((1 << IndexList::kNumberBits) - 1);
      columns = last * kBlock + min(s.end[threadIdx.x] - block * kBlock, kBlock);
    }
    listed.columns[first_row + threadIdx.x] = columns;
  }
}

}  // namespace

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads == kFewThreads ? 65536 / kFewThreads / kFewRegisters : 1)
    index_list_kernel(const __grid_constant__ ListArgs args) {
  make_list<kThreads>(args);
}

__global__ void __launch_bounds__(kClearThreads) index_clear_kernel(const __grid_constant__ ClearArgs args) {
  let_next_grid_come();
  wait_for_previous_grid();
  const int64_t i = int64_t{blockIdx.x} * kClearThreads + threadIdx.x;
  if (i < args.pieces) store(reinterpret_cast<uint8_t*>(args.keys.words + 4 * i), Words<4>{});
}

__global__ void __launch_bounds__(kThreads) index_blocks_kernel(const __grid_constant__ ChoiceArgs args) {
  using Team = BlockTeam<kThreads>;
  MLA_SHARED(Team::Smem, smem);
  wait_for_previous_grid();
  const Team team{smem};
  const int64_t i = blockIdx.x;
  const IndexRow row = find_row(args.rows, i);
  const int32_t blocks = (row.end - row.begin + kBlock - 1) / kBlock, newest = blocks - 1;
  // All blocks but the newest.
  const IndexRow where{0, 0, max(newest, 0)};
  const IndexAnswer answer{args.p, i, where};
  const RowBlocks others{args.keys.words + i * args.keys.pitch, where.end};
  const Survey found = survey(team, others);
  const int32_t k = args.p.topk - 1, count = min(found.count, k);
  uint64_t least = kLeastOrder;
  if (k > 0 && found.count > k) least = kth_surveyed(team, others, k, found);
  emit_from(team, answer, others, least, {0, count, 0, where.end},
            [](const IndexRow&, int32_t) { return 0; });
  int32_t* to = args.p.positions + i * args.p.positions_stride_row;
  for (int place = count + threadIdx.x; place < args.p.topk; place += kThreads)
    to[place] = place == count ? newest : -1;
}

void make_lists(const IndexTopkParams& p, const ListedRows& listed, gpuStream_t stream) {
  const int64_t blocks = align_up<int64_t>(ceil_div<int64_t>(p.problem.rows.num_columns, kBlock), 128);
  const int window = p.num_candidates > 0 ? static_cast<int>(std::min<int64_t>(blocks, kWindow)) : 0;
  const bool are_whole = p.problem.rows.num_columns <= listed.most_whole;
  launch(are_whole ? index_list_kernel<kFewThreads> : index_list_kernel<kThreads>,
         {.grid = ceil_div<int64_t>(listed.count, listed.rows),
          .block = are_whole ? kFewThreads : kThreads,
          .stream = stream,
          .smem = listed.rows * window / 8},
         ListArgs{p.problem.rows, p.num_candidates > 0, p.candidates, p.candidates_stride, p.num_candidates,
                  p.candidates_are_of_rows, listed, window});
}

void clear_block_keys(const BlockKeys& keys, int64_t num_rows, gpuStream_t stream) {
  const int64_t pieces = num_rows * keys.pitch / 4;
  if (pieces == 0) return;
  launch(index_clear_kernel,
         {.grid = ceil_div<int64_t>(pieces, kClearThreads), .block = kClearThreads, .stream = stream},
         ClearArgs{keys, pieces});
}

void choose_blocks(const IndexTopkParams& p, const BlockKeys& keys, gpuStream_t stream) {
  IndexTopkParams own{
      .topk = p.num_blocks, .positions = p.blocks, .positions_stride_row = p.blocks_stride_row};
  launch(index_blocks_kernel, {.grid = p.problem.rows.num_rows, .block = kThreads, .stream = stream},
         ChoiceArgs{own, p.problem.rows, keys});
}

}  // namespace mla_fp8::gpu
