#pragma once
// The scan of index_topk on any GPU (words: rows.cuh). A CTA scores the tiles of its share, and has a list of
// candidates for each row of the unit it is in. A list that is nearly full shrinks to the best topk; then
// only larger keys join. A CTA with a whole unit answers it, others leave lists to the merge.
#include "cuda/device/launch.cuh"
#include "cuda/indexer/emit.cuh"
#include "cuda/indexer/shares.cuh"
#include "cuda/indexer/tile.cuh"

namespace mla_fp8::gpu {

struct IndexTopkArgs {
  IndexTopkParams p;
  Divider page_size, slot_page_size, ctas;
  UnitPlaces places;
  int group_rows, list_rows, num_ctas, tile_keys;
  int taken;               // a row with at most so many entries takes all of them, without logits
  IndexCounters counters;  // on Hopper
  // If blocks are published: largest keys of the blocks. Rows lie `block_pitch` words apart.
  uint32_t* block_keys;
  int64_t block_pitch;

  __device__ __forceinline__ IndexCtaState* state(int cta) const {
    return reinterpret_cast<IndexCtaState*>(p.workspace) + cta;
  }
  // A row's list in the CTA's part of the workspace; and its list of a unit that an earlier CTA began.
  __device__ __forceinline__ uint64_t* list(int cta, int row) const {
    uint64_t* lists = reinterpret_cast<uint64_t*>(p.workspace + num_ctas * sizeof(IndexCtaState));
    const int64_t entries = index_list_capacity(p.topk) + index_kept_capacity(p.topk);
    return lists + (int64_t{cta} * list_rows + row) * entries;
  }
  __device__ __forceinline__ uint64_t* earlier(int cta, int row) const {
    return list(cta, row) + index_list_capacity(p.topk);
  }
  __device__ __forceinline__ int32_t slot(const IndexRow& row, int32_t column) const {
    return p.slot(row, column, slot_page_size);
  }
  // Whether the entry of a column that row i sees is in the row's list, if there is one, and in the cache.
  __device__ __forceinline__ bool is_there(int64_t i, const IndexRow& row, int32_t column) const {
    const IndexKeys& keys = p.problem.keys;
    if (keys.list.elements != nullptr) {
      const int64_t list = keys.list.list_of(i);
      const int32_t element = keys.list.element(list, column);
      if ((keys.list.members(element) >> (i - list * keys.list.rows) & 1) == 0) return false;
      column = p.place(i, row, column).column;
    }
    if (keys.page_table == nullptr) return true;
    const int32_t page = keys.page_table[row.request * keys.page_table_stride_request + page_size(column)];
    return page >= 0 && page < keys.num_pages;
  }
  // Answers a unit that takes_all. Most often all entries are present: then a column says where it goes, and
  // rows have equal slots. So the answer is written at once, and again if something turns out to be absent.
  template <class Team>
  __device__ __forceinline__ void answer_all(const IndexUnit& unit, const Team& team) const {
    constexpr int kAtOnce = 4;  // loads in flight
    const int threads = team.threads();
    const int64_t columns = int64_t{unit.end} - unit.begin;
    // Rows are answered one by one if together they see far more than each, or if columns are those of lists.
    const bool are_apart = columns > 4 * int64_t{p.topk} || p.problem.keys.list.elements != nullptr;
    int32_t absent = are_apart;
    for (int32_t first = team.thread(); !are_apart && first < columns; first += kAtOnce * threads) {
      int32_t slots[kAtOnce];
      bool there[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int32_t i = first + k * threads;
        there[k] = i >= columns || is_there(unit.first_row, unit.rows[0], unit.begin + i);
        slots[k] = p.slots && i < columns ? slot(unit.rows[0], unit.begin + i) : 0;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) absent += !there[k];
      for (int r = 0; r < unit.num_rows; ++r) {
        const int64_t row = unit.first_row + r;
        const int32_t before = unit.rows[r].begin - unit.begin, seen = unit.rows[r].end - unit.rows[r].begin;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int32_t i = first + k * threads - before;
          if (i < 0 || i >= seen) continue;
          p.positions[row * p.positions_stride_row + i] = i;
          if (p.slots) p.slots[row * p.slots_stride_row + i] = slots[k];
        }
      }
    }
    absent = team_inclusive_sum(team, absent);
    if (team.thread() == threads - 1) team.scalars().kept = absent;
    team.sync();
    const bool any_absent = team.scalars().kept != 0;
    team.sync();
    for (int r = 0; r < unit.num_rows; ++r) {
      const IndexAnswer answer{p, unit.first_row + r, unit.rows[r]};
      if (any_absent)
        emit_all(
            team, answer, [&](int32_t column) { return is_there(answer.row, answer.where, column); },
            [&](const IndexRow& row, int32_t column) { return slot(row, column); });
      else emit_end(team, p, answer.row, answer.where.end - answer.where.begin);
    }
  }
};

// Writes for the merge what the CTA did in a unit: the counts of its lists, and the unit if an earlier CTA
// began it. Steps count from the beginning of all.
__device__ __forceinline__ void write_state(IndexCtaState& state, const IndexUnit& unit, bool is_earlier,
                                            int64_t unit_begin, int64_t tiles,
                                            const int32_t (&counts)[kIndexGroupRows]) {
  for (int r = 0; r < kIndexGroupRows; ++r) state.counts[is_earlier][r] = counts[r];
  if (!is_earlier) return;
  state.unit = unit.first_row;
  state.first_step = unit_begin;
  state.num_tiles = tiles;
  state.num_rows = unit.num_rows;
  state.begin = unit.begin;
  for (int r = 0; r < kIndexGroupRows; ++r) state.rows[r] = unit.rows[r];
}

using IndexTeam = BlockTeam<kIndexThreads>;
struct ScanSmem {
  union {
    IndexTileSmem tile;
    IndexTeam::Smem select;  // overwrites keys and queries
  };
  IndexScalarSmem scalars;
  IndexShare share;
  IndexUnit unit, next;
  int64_t begin, end, unit_begin, tiles_end, unit_end;  // steps: of the CTA's share, of the unit
  uint32_t threshold[kIndexGroupRows];
  int32_t count[kIndexGroupRows];
};

// Scores the tile whose first column is `first`. Columns whose keys reach a row's threshold join its list.
__device__ __forceinline__ void scan_tile(const IndexTopkArgs& args, const IndexUnit& unit, int32_t first,
                                          ScanSmem& smem) {
  const IndexTopkParams& p = args.p;
  static_assert(kIndexTileKeys <= kIndexListSlack);
  load_keys(p.problem.keys, args.page_size, unit, first, smem.tile, smem.scalars);
  __syncthreads();
  tile_logits(smem.tile, smem.scalars, unit.num_rows, padded_heads(p.problem.queries.num_heads),
              [&](int r, bool valid, int key, float logit, bool present) {
                const int32_t column = first + key;
                const IndexRow& where = unit.rows[r];
                valid = valid && present && column >= where.begin && column < where.end;
                uint32_t rank = order_key(logit);
                if (valid && args.block_keys != nullptr) {
                  const int64_t row = unit.first_row + r;
                  atomicMax(
                      args.block_keys + row * args.block_pitch + (column - where.begin) / IndexList::kBlock,
                      rank);
                }
                if (valid && p.is_pinned(unit.first_row + r, where, column)) rank = kPinnedKey;
                const bool joins = valid && rank >= smem.threshold[r];
                const uint32_t lanes = __ballot_sync(kFullWarp, joins);
                if (lanes == 0) return;
                const int lane = threadIdx.x % kWarpSize;
                int32_t place = 0;
                if (lane == 0) place = atomicAdd(&smem.count[r], __popc(lanes));
                place = __shfl_sync(kFullWarp, place, 0) + __popc(lanes & ((1u << lane) - 1));
                if (joins) args.list(blockIdx.x, r)[place] = order_of(rank, column);
              });
}

// Shrinks lists to topk: those that the next tile might overfill, or at the end all that are longer. Returns
// whether any was shrunk; then the queries are overwritten.
__device__ __forceinline__ bool shrink_lists(const IndexTopkArgs& args, int num_rows, bool at_end,
                                             ScanSmem& smem) {
  const int32_t topk = args.p.topk;
  const int32_t most = at_end ? topk : index_list_capacity(topk) - kIndexListSlack;
  bool shrunk = false;
  for (int r = 0; r < num_rows; ++r) {
    const int32_t count = smem.count[r];
    if (count <= most) continue;
    shrunk = true;
    uint64_t* list = args.list(blockIdx.x, r);
    const IndexTeam team{smem.select};
    const uint64_t least = kth_order(team, CandidateList{list, count}, topk, kLeastOrder, ~uint64_t{0});
    keep_from(team, least, list, count);
    if (threadIdx.x == 0) {
      smem.count[r] = topk;
      smem.threshold[r] = static_cast<uint32_t>(least >> 32) + 1;
    }
    __syncthreads();
  }
  return shrunk;
}

// Leaves the lists of a unit that this CTA saw in part to the merge.
__device__ __forceinline__ void leave_for_merge(const IndexTopkArgs& args, ScanSmem& smem) {
  const IndexUnit& unit = smem.unit;
  const int cta = blockIdx.x;
  const bool is_earlier = smem.begin > smem.unit_begin;
  shrink_lists(args, unit.num_rows, true, smem);
  if (is_earlier)
    for (int r = 0; r < unit.num_rows; ++r)
      for (int i = threadIdx.x; i < smem.count[r]; i += kIndexThreads)
        args.earlier(cta, r)[i] = args.list(cta, r)[i];
  if (threadIdx.x == 0)
    write_state(*args.state(cta), unit, is_earlier, smem.unit_begin, smem.tiles_end - smem.unit_begin,
                smem.count);
}

// Scans the share's tiles of a unit, and answers it if they are all of its tiles.
__device__ __forceinline__ void scan_unit(const IndexTopkArgs& args, const IndexUnit& unit, ScanSmem& smem) {
  const IndexQueries& queries = args.p.problem.queries;
  const int64_t first = max(smem.begin, smem.unit_begin), last = min(smem.end, smem.tiles_end);
  const auto first_column = static_cast<int32_t>(unit.begin + (first - smem.unit_begin) * kIndexTileKeys);
  const int tiles = static_cast<int>(last - first), cta = blockIdx.x;
  load_queries(queries, unit, smem.tile, smem.scalars);
  for (int t = 0; t < tiles; ++t) {
    scan_tile(args, unit, first_column + t * kIndexTileKeys, smem);
    __syncthreads();
    if (shrink_lists(args, unit.num_rows, false, smem)) load_queries(queries, unit, smem.tile, smem.scalars);
  }
  if (smem.begin > smem.unit_begin || smem.tiles_end > smem.end) return leave_for_merge(args, smem);
  for (int r = 0; r < unit.num_rows; ++r) {
    const IndexAnswer answer{args.p, unit.first_row + r, unit.rows[r]};
    select_and_emit(IndexTeam{smem.select}, answer, CandidateList{args.list(cta, r), smem.count[r]},
                    smem.count[r], [&](const IndexRow& where, int32_t c) { return args.slot(where, c); });
  }
}

__device__ __forceinline__ void scan(const IndexTopkArgs& args, ScanSmem& smem) {
  const IndexRows& rows = args.p.problem.rows;
  const int cta = blockIdx.x;
  find_share(
      ShareBlock<kIndexThreads>{},
      {rows, args.places, args.ctas, args.taken, args.group_rows, kIndexTileKeys, cta, 0, 0, 0, nullptr, 0},
      smem.share, smem.unit);
  __syncthreads();
  const IndexShare& share = smem.share;
  const IndexUnit& unit = smem.unit;
  const int64_t begin = cta * share.per_cta, end = min(share.total, begin + share.per_cta);
  if (threadIdx.x == 0) {
    IndexCtaState* state = args.state(cta);
    state->unit = -1;
    state->per_cta = share.per_cta;
    smem.begin = begin;
    smem.end = end;
    smem.unit_begin = share.first_step;
  }
  if (begin >= end) return;

  while (true) {
    __syncthreads();
    if (threadIdx.x == 0) {
      smem.tiles_end = smem.unit_begin + num_tiles(unit, kIndexTileKeys, args.taken);
      smem.unit_end = smem.unit_begin + num_steps(unit, kIndexTileKeys, args.taken);
    }
    if (threadIdx.x < kIndexGroupRows) {
      smem.count[threadIdx.x] = 0;
      smem.threshold[threadIdx.x] = 0;
    }
    __syncthreads();
    if (smem.begin < smem.tiles_end) {  // else the share has but the choice of the unit
      if (takes_all(unit, args.taken)) args.answer_all(unit, IndexTeam{smem.select});
      else scan_unit(args, unit, smem);
    }
    if (smem.unit_end >= smem.end) return;
    __syncthreads();
    if (threadIdx.x == 0) {  // steps are left, so there is another unit
      smem.unit_begin = smem.unit_end;
      next_unit(rows, args.group_rows, unit, smem.next);
      smem.unit = smem.next;
    }
  }
}

}  // namespace mla_fp8::gpu
