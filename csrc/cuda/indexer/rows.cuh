#pragma once
// How rows and tiles of keys are shared among CTAs. A unit is up to kIndexGroupRows neighbouring rows of one
// request, which see about the same columns; it is named by its first row. All units' tiles lie one after
// another, and each CTA takes an equal share of them: which depends on lengths that the device alone knows,
// so each finds its own.
#include "cuda/device/divide.cuh"
#include "cuda/device/warp.cuh"
#include "ops/index_topk.h"

namespace mla_fp8::gpu {

struct IndexUnit {
  int64_t first_row, request;
  int num_rows;
  int32_t begin, end;  // columns that any of its rows sees
  IndexRow rows[kIndexGroupRows];
};

// The row: one by one, a division of 64 bits would be a call of a hundred instructions.
__device__ __forceinline__ IndexRow find_row(const IndexRows& rows, int64_t row) {
  if (rows.k_start || rows.query_start_loc) return rows[row];
  const auto index = static_cast<uint32_t>(row), next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t request = index / next_n;
  return {request, 0, rows.visible(row, request, index - request * next_n, next_n)};
}

// find_unit where rows of requests vary in number.
__device__ __forceinline__ bool find_uneven_unit(const IndexRows& rows, int64_t row, int group_rows,
                                                 IndexUnit& unit) {
  const IndexRow first = rows[row];
  // Rows of no request go alone; the others are counted from the first of their request.
  const int64_t origin =
      first.request < 0 ? row : int64_t{rows.query_start_loc[first.request]} - rows.query_start_loc[0];
  const int offset = static_cast<int>((row - origin) % group_rows);
  bool is_alone = first.request < 0;
  if (offset != 0) {  // in the unit before, unless a query_start_loc that decreases tears it apart
    for (int i = 1; i <= offset; ++i) is_alone |= rows[row - i].request != first.request;
    if (!is_alone) return false;
  }
  unit.first_row = row;
  unit.request = first.request;
  unit.num_rows = 1;
  unit.begin = first.begin;
  unit.end = first.end;
  unit.rows[0] = first;
#pragma unroll
  for (int i = 1; i < kIndexGroupRows; ++i) {
    unit.rows[i] = {-1, 0, 0};
    if (is_alone || i >= group_rows || unit.num_rows < i || row + i >= rows.num_rows) continue;
    const IndexRow next = rows[row + i];
    if (next.request != first.request) continue;
    unit.rows[i] = next;
    unit.num_rows = i + 1;
    unit.begin = min(unit.begin, next.begin);
    unit.end = max(unit.end, next.end);
  }
  return true;
}

// The unit that begins with a row of a request, where all requests have as many, or all rows are of one
// request. Rows that do not exist are left as they are.
template <bool kIsRagged>
__device__ __forceinline__ void set_even_unit(const IndexRows& rows, uint32_t request, uint32_t in_request,
                                              int group_rows, IndexUnit& unit) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const int64_t row = int64_t{request} * next_n + in_request;
  const uint32_t left = (kIsRagged ? static_cast<uint32_t>(rows.num_rows) : next_n) - in_request;
  const int num_rows = static_cast<int>(min(left, static_cast<uint32_t>(group_rows)));
  int32_t begin = INT32_MAX, end = 0;
#pragma unroll 1  // what runs once takes as long as its instructions take to arrive
  for (int i = 0; i < num_rows; ++i) {
    IndexRow own{request, 0, 0};
    if (kIsRagged) {
      own.begin = rows.clamp(rows.k_start[row + i]);
      own.end = max(rows.clamp(rows.k_end[row + i]), own.begin);
    } else {
      own.end = rows.visible(row + i, request, in_request + i, next_n);
    }
    begin = min(begin, own.begin);
    end = max(end, own.end);
    unit.rows[i] = own;
  }
  unit.first_row = row;
  unit.request = request;
  unit.num_rows = num_rows;
  unit.begin = begin - begin % 4;  // scales are copied in sixteens of bytes
  unit.end = end;
}
template <bool kIsRagged>
__device__ __forceinline__ bool find_even_unit(const IndexRows& rows, int64_t row, int group_rows,
                                               IndexUnit& unit) {
  const auto index = static_cast<uint32_t>(row), next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t request = kIsRagged ? 0 : index / next_n, in_request = index - request * next_n;
  if (in_request % static_cast<uint32_t>(group_rows) != 0) return false;
  set_even_unit<kIsRagged>(rows, request, in_request, group_rows, unit);
  return true;
}

// Of at most `group_rows` rows. Whether `row` begins one; then `unit` is that.
__device__ __forceinline__ bool find_unit_here(const IndexRows& rows, int64_t row, int group_rows,
                                               IndexUnit& unit) {
  if (rows.query_start_loc) return find_uneven_unit(rows, row, group_rows, unit);
  if (!rows.k_start) return find_even_unit<false>(rows, row, group_rows, unit);
  return find_even_unit<true>(rows, row, group_rows, unit);
}

// A call: what a kernel runs once waits for its instructions.
__device__ __noinline__ inline bool find_unit(const IndexRows& rows, int64_t row, int group_rows,
                                              IndexUnit& unit) {
  return find_unit_here(rows, row, group_rows, unit);
}

// Whether every row chooses all that it sees: no logit is asked for.
__device__ __forceinline__ bool takes_all(const IndexUnit& unit, int topk) {
#pragma unroll 1
  for (int i = 0; i < unit.num_rows; ++i)
    if (unit.rows[i].end - unit.rows[i].begin > topk) return false;
  return true;
}
// Tiles whose logits are asked for.
__device__ __forceinline__ int64_t scored_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  if (takes_all(unit, topk)) return 0;
  return (int64_t{unit.end} - unit.begin + tile_keys - 1) / tile_keys;
}
// A unit that asks for no logit has a tile too, so that its rows are written.
__device__ __forceinline__ int64_t num_tiles(const IndexUnit& unit, int tile_keys, int topk) {
  return max(scored_tiles(unit, tile_keys, topk), int64_t{1});
}
// The same of a unit that begins with a row of a request, where all have the same number of rows.
__device__ __forceinline__ int32_t scored_tiles_at(const IndexRows& rows, uint32_t request,
                                                   uint32_t in_request, int group_rows, int tile_keys,
                                                   int topk) {
  const auto next_n = static_cast<uint32_t>(rows.next_n);
  const uint32_t last = min(in_request + group_rows, next_n) - 1;
  int32_t end = 0;  // without row_lens, later rows see more
  for (uint32_t i = rows.row_lens ? in_request : last; i <= last; ++i)
    end = max(end, rows.visible(int64_t{request} * next_n + i, request, i, next_n));
  return end <= topk ? 0 : (end - 1) / tile_keys + 1;
}
// Whether some unit of a request asks for no logit.
__device__ __forceinline__ bool has_short_unit(const IndexRows& rows, uint32_t request, int group_rows,
                                               int topk) {
  const auto units = rows.row_lens ? static_cast<uint32_t>(rows.next_n) : 1u;  // else the first sees least
#pragma unroll 1
  for (uint32_t i = 0; i < units; i += group_rows)
    if (scored_tiles_at(rows, request, i, group_rows, 1, topk) == 0) return true;
  return false;
}
// Shares are of steps: a unit's tiles, and behind them what choosing takes, measured in tiles.
inline constexpr int kChoiceSteps = 3;
__device__ __forceinline__ int64_t num_steps(const IndexUnit& unit, int tile_keys, int topk) {
  return num_tiles(unit, tile_keys, topk) + kChoiceSteps;
}

// The share of a CTA: steps cta * per_cta and on, of `total`. Where the keys of all tiles are kept, for a
// choice behind the scan, steps are scored tiles.
struct IndexShare {
  int64_t total, per_cta;
  int64_t first_step;  // of the unit that the share begins in
  int index;           // of the share: the CTA's, or, where shares go from the last one on, another
  bool are_kept;
  // Then, that each unit is answered by the CTA that begins it, and whether there are units without a scored
  // tile.
  bool are_gathered, are_others;
};

// Where units may begin: all rows, or, where requests have the same number of them, every group_rows-th of
// each. What a kernel runs once waits for its instructions, and a division is forty.
//
// In lanes the units of a request are one place: there are as many teams of CTAs, each with a unit of each
// request, which have equal shares. So one CTA of each team reads the same keys at the same time, and these
// come from memory once.
struct UnitPlaces {
  Divider request_rows, group_rows, per_request;
  int64_t count;
  int lanes, rows_of_place;

  UnitPlaces(const IndexRows& rows, int group_rows, int lanes = 1)
      : UnitPlaces(rows.num_rows,
                   rows.query_start_loc ? 1
                   : rows.k_start       ? rows.num_rows
                                        : rows.next_n,
                   group_rows, lanes) {}
  UnitPlaces(int64_t num_rows, int64_t request_rows, int64_t group_rows, int lanes)
      : request_rows(request_rows),
        group_rows(group_rows),
        per_request((request_rows + group_rows - 1) / group_rows / lanes),
        count(num_rows / request_rows * ((request_rows + group_rows - 1) / group_rows / lanes)),
        lanes(lanes),
        rows_of_place(static_cast<int>(lanes > 1 ? request_rows : group_rows)) {}

  struct Place {
    uint32_t request, in_request;  // a row
  };
  __device__ __forceinline__ Place operator()(int64_t place) const {
    const auto i = static_cast<uint32_t>(place), request = per_request.word(i);
    const auto in_request = (i - request * static_cast<uint32_t>(per_request.divisor())) *
                            static_cast<uint32_t>(group_rows.divisor());
    return {request, in_request};
  }
  __device__ __forceinline__ int64_t row(int64_t place) const {
    const Place at = (*this)(place);
    return at.request * request_rows.divisor() + at.in_request;
  }
  // Whether a unit begins at a row, where that is known.
  __device__ __forceinline__ bool begins_at(int64_t row, Place& place) const {
    const auto i = static_cast<uint32_t>(row), request = request_rows.word(i);
    place = {request, i - request * static_cast<uint32_t>(request_rows.divisor())};
    return group_rows.word(place.in_request) * static_cast<uint32_t>(group_rows.divisor()) ==
           place.in_request;
  }
};

// Scored tiles of all units of a call whose keys are kept: fewer than this, so that 32 bits count them in a
// block.
inline constexpr int32_t kMostKeptTiles = 1 << 20;

// What a CTA asks for its share. Keys are kept if there are at most `most_kept` scored tiles. `known` is room
// for the tiles of `room` units.
struct ShareQuestion {
  const IndexRows& rows;
  const UnitPlaces& places;
  const Divider& num_ctas;
  int topk, group_rows, tile_keys;
  int cta, lane;
  bool are_descending;               // the first CTA has the last share that is not empty
  int32_t most_kept, most_gathered;  // no unit is gathered if one has more tiles
  int32_t* known;
  int room;
};
// The threads of a block. Those that find a share together have
//
//   thread(), threads(), sync()   of their own
//   inclusive_sum(x)              of those up to and including the calling one
template <int kN>
struct ShareBlock {
  __device__ __forceinline__ static int thread() { return threadIdx.x; }
  __device__ __forceinline__ static constexpr int threads() { return kN; }
  __device__ __forceinline__ static void sync() { __syncthreads(); }
  template <class T>
  __device__ __forceinline__ static T inclusive_sum(T x) {
    return block_inclusive_sum<kN / kWarpSize>(x);
  }
};

// A barrier must come before `share` is read, or `first_unit`, that it begins in if it has any steps.
template <class Team>
__device__ __forceinline__ void find_share(const Team& team, const ShareQuestion& question, IndexShare& share,
                                           IndexUnit& first_unit) {
  const auto& [rows, places, num_ctas, topk, group_rows, tile_keys, cta, lane, are_descending, most_kept,
               most_gathered, known, room] = question;
  constexpr int32_t kNone = -1;  // tiles of a place where no unit begins
  const int threads = team.threads();
  const auto tiles_at = [&](int64_t place) {
    if (!rows.k_start && !rows.query_start_loc) {
      const auto [request, in_request] = places(place);
      return scored_tiles_at(rows, request, in_request, places.rows_of_place, tile_keys, topk);
    }
    IndexUnit unit;
    if (!find_unit(rows, places.row(place), group_rows, unit)) return kNone;
    return static_cast<int32_t>(scored_tiles(unit, tile_keys, topk));
  };
  // Neighbouring places to a thread.
  const int64_t each = places.count <= threads ? 1 : (places.count + threads - 1) / threads;
  const int64_t first = team.thread() * each, end = min(first + each, places.count);
  const int32_t only = each == 1 && first < end ? tiles_at(first) : kNone;
  const bool are_known = known != nullptr && each > 1 && places.count <= room;
  if (are_known) {
    for (int64_t i = team.thread(); i < places.count; i += threads) known[i] = tiles_at(i);
    team.sync();
  }
  const auto tiles_of = [&](int64_t place) {
    if (each == 1) return only;
    return are_known ? known[place] : tiles_at(place);
  };
  // The share of `last` steps in all, and where it begins: the calling thread has `mine` of them, to `last`.
  const auto set_total = [&](int64_t total) {
    share.total = total;
    share.per_cta = num_ctas(total + num_ctas.divisor() - 1);
    share.index = cta;
    if (!are_descending || total == 0) return;
    const int64_t last = total - 1;  // a division of 64 bits is a call
    const int64_t shares =
        1 + (last <= UINT32_MAX ? static_cast<uint32_t>(last) / static_cast<uint32_t>(share.per_cta)
                                : last / share.per_cta);
    if (cta < shares) share.index = static_cast<int>(shares) - 1 - cta;
  };
  const auto find_first = [&](int64_t mine, int64_t last, const auto& steps_of) {
    const int64_t begin = share.index * share.per_cta;
    if (begin < last - mine || begin >= last) return;
    last -= mine;
    for (int64_t i = first; i < end; ++i) {
      const int64_t steps = steps_of(tiles_of(i));
      last += steps;
      if (begin >= last) continue;
      share.first_step = last - steps;
      if (rows.k_start || rows.query_start_loc) {
        find_unit(rows, places.row(i), group_rows, first_unit);
      } else {
        const auto [request, in_request] = places(i);
        set_even_unit<false>(rows, request, in_request + lane * group_rows, group_rows, first_unit);
      }
      return;
    }
  };
  const auto kept_of = [](int32_t tiles) { return min(max(tiles, 0), kMostKeptTiles); };
  if (most_kept > 0) {
    int32_t mine = 0;
    if (team.thread() == 0) {
      share.are_gathered = most_gathered > 0;
      share.are_others = false;
    }
    team.sync();
    for (int64_t i = first; i < end; ++i) {
      const int32_t tiles = tiles_of(i);
      mine = min(mine + kept_of(tiles), kMostKeptTiles);
      if (tiles == 0 || (places.lanes > 1 && has_short_unit(rows, places(i).request, group_rows, topk)))
        share.are_others = true;
      if (tiles > most_gathered) share.are_gathered = false;
    }
    const int32_t last = team.inclusive_sum(mine);
    if (team.thread() == threads - 1) {
      share.are_kept = last <= most_kept;
      set_total(last);
    }
    team.sync();
    if (share.are_kept) return find_first(mine, last, kept_of);
  }
  const auto chosen_of = [](int32_t tiles) { return tiles == kNone ? 0 : max(tiles, 1) + kChoiceSteps; };
  int64_t mine = 0;
  for (int64_t i = first; i < end; ++i) mine += chosen_of(tiles_of(i));
  const int64_t last = team.inclusive_sum(mine);
  if (team.thread() == threads - 1) {
    share.are_kept = false;
    set_total(last);
  }
  team.sync();
  find_first(mine, last, chosen_of);
}

// The unit behind one that is not the last.
__device__ __forceinline__ void next_unit(const IndexRows& rows, int group_rows, const IndexUnit& unit,
                                          IndexUnit& next) {
  int64_t row = unit.first_row + unit.num_rows;
  while (!find_unit_here(rows, row, group_rows, next)) ++row;
}

}  // namespace mla_fp8::gpu
