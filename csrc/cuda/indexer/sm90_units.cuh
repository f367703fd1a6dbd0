#pragma once
// The units of a CTA's share in index_topk's scan on Hopper. All consumers together find the share and its
// first unit. The last consumer warp finds each later unit while the one before it is scored.
#include "cuda/indexer/sm90_rows.cuh"

namespace mla_fp8::gpu::sm90_index {

class ScanUnits {
 protected:
  __device__ __forceinline__ ScanUnits(const ScanArgs& args, const Memory& memory, bool may_keep)
      : scan_(args), args_(args.topk), p_(args.topk.p), memory_(memory), s_(shared()), may_keep_(may_keep) {}

  // In shared memory, of row r: the list of the best so far, and the order keys of a chunk.
  __device__ __forceinline__ uint64_t* list(int r) const {
    return reinterpret_cast<uint64_t*>(memory_.end()) + r * list_capacity(p_.topk);
  }
  __device__ __forceinline__ int pitch() const { return keys_pitch(scan_.chunk_tiles); }
  __device__ __forceinline__ uint32_t* keys(int r) const {
    return reinterpret_cast<uint32_t*>(list(args_.group_rows)) + r * pitch();
  }

  __device__ __forceinline__ bool are_kept() const { return may_keep_ && s_.share.are_kept; }
  // Whether each unit is answered by the last of the CTAs that scan it.
  __device__ __forceinline__ bool gathers() const { return are_kept() && s_.share.are_gathered; }

  // Whether the keys of long rows are counted.
  __device__ __forceinline__ bool are_binned() const {
    return are_kept() && !gathers() && s_.share.total <= scan_.most_binned;
  }

  // Finds the share and its first unit, and writes for the merge how the scan answers.
  __device__ __forceinline__ void find_work(const ShareTeam& team) const {
    if (!begins_early()) wait_for_previous_grid();
    const ShareQuestion question{p_.problem.rows,
                                 args_.places,
                                 args_.ctas,
                                 args_.taken,
                                 args_.group_rows,
                                 kTileKeys,
                                 cta_of_lane(),
                                 lane_of_cta(),
                                 may_keep_ ? scan_.most_kept : 0,
                                 scan_.most_gathered,
                                 reinterpret_cast<int32_t*>(keys(0)),
                                 args_.group_rows * pitch()};
    if (!may_keep_ || scan_.unit_shares == 0 ||
        !find_uniform_share(team, question, scan_.unit_shares, s_.share, s_.units[0])) {
      find_share(team, question, s_.share, s_.units[0]);
      if (threadIdx.x == 0) s_.share.are_uniform = false;
    }
    team.sync();
    // The shares of a lane, and their steps, are numbered behind those of the lanes before it.
    const int64_t first_share = lane_of_cta() * args_.ctas.divisor(),
                  first_step = first_share * s_.share.per_cta;
    const int cta = static_cast<int>(first_share) + cta_of_lane();
    if (threadIdx.x == kWarpSize) {
      args_.state(cta)->unit = -1;
      args_.state(cta)->per_cta = s_.share.per_cta;
      args_.state(cta)->are_kept = are_kept();
      args_.state(cta)->are_answered = gathers() || (s_.share.are_uniform && !are_kept());
      args_.state(cta)->are_binned = are_binned();
    }
    if (threadIdx.x > 0) return;
    const int64_t begin = cta * s_.share.per_cta,
                  end = min(first_step + s_.share.total, begin + s_.share.per_cta);
    s_.cta = cta;
    s_.begin = begin;
    s_.end = end;
    if (begin < end) {
      set_work(0, s_.units[0], first_step + s_.share.first_step);
      if (s_.share.are_aligned) s_.end = min(end, s_.works[0].unit_end);
    } else {
      s_.units[0] = {};
      ScanWork& work = s_.works[0];
      work = {};
      work.unit_end = end;
      if (!gathers() || s_.share.total == 0 || s_.share.are_others) return;
      find_unit(p_.problem.rows, 0, 1, s_.units[0]);
      work.is_whole = true;
      work.is_rehearsed = s_.units[0].end >= kTileKeys && !takes_all(s_.units[0], args_.taken);
    }
  }

  // Whether the share follows from what was there before lists were made, as all lists are whole. The
  // previous grid, which makes them, has waited for what came before. Producers wait for it before a key is
  // fetched. Counters in the workspace are cleared by a kernel between that grid and this one.
  __device__ __forceinline__ bool begins_early() const {
    const IndexRows& rows = p_.problem.rows;
    return rows.are_listed && !rows.origins && p_.counters;
  }

  __device__ __forceinline__ void set_work(int i, const IndexUnit& unit, int64_t unit_begin) const {
    const bool are_kept = this->are_kept();
    const int64_t scored = scored_tiles(unit, kTileKeys, args_.taken),
                  unit_tiles = are_kept ? scored : max(scored, int64_t{1}),
                  place_tiles = lanes() > 1 ? max(tiles_of_request(unit.request), unit_tiles) : unit_tiles;
    const int64_t first = max(s_.begin - unit_begin, int64_t{0}), last = min(s_.end - unit_begin, unit_tiles);
    ScanWork& work = s_.works[i % 2];
    work.unit_begin = unit_begin;
    work.unit_end = unit_begin + place_tiles + (are_kept ? 0 : kChoiceSteps);
    work.column = static_cast<int32_t>(unit.begin + first * kTileKeys);
    work.tiles = static_cast<int>(max(last - first, int64_t{0}));
    work.unit_tiles = static_cast<int>(unit_tiles);
    work.is_earlier = first > 0;
    work.is_whole = first == 0 && last == unit_tiles && (!are_kept || gathers());
    work.is_rehearsed = false;
    // If shares are uniform, the first CTA of a unit without scored tiles answers it.
    if (s_.share.are_uniform && gathers() && unit_tiles == 0 && s_.begin == unit_begin) work.tiles = 1;
    work.seen_begin = unit.rows[0].begin;
    work.seen_end = unit.rows[0].end;
#pragma unroll
    for (int r = 1; r < kIndexGroupRows; ++r) {
      if (r >= unit.num_rows) break;
      work.seen_begin = max(work.seen_begin, unit.rows[r].begin);
      work.seen_end = min(work.seen_end, unit.rows[r].end);
    }
    if (scan_.has_pins || p_.problem.keys.list.rows > 1) work.seen_end = work.seen_begin;
    if (!are_kept || gathers() || work.is_earlier) return;
    for (int r = 0; r < unit.num_rows; ++r)
      KeptKeys(args_).rows[unit.first_row + r] = {kept_tile(work, r), unit.begin};
  }
  // The first kept tile of row r of a unit.
  __device__ __forceinline__ int32_t kept_tile(const ScanWork& work, int r) const {
    return static_cast<int32_t>(work.unit_begin * args_.group_rows + r * (work.unit_end - work.unit_begin));
  }
  __device__ __forceinline__ void wait_for_unit(int i) const {
    mbarrier_wait(shared_address(&s_.unit_full[i % 2]), i / 2 & 1);
  }
  // Finds the unit behind the i-th, in the memory of the one before it. The last consumer warp does, 32 rows
  // at a time, once the producers have left that memory.
  __device__ __forceinline__ void prepare_next(int i) const {
    const IndexRows& rows = p_.problem.rows;
    const int64_t unit_end = s_.works[i % 2].unit_end;
    if (threadIdx.x < kConsumers - kWarpSize || unit_end >= s_.end) return;
    const int lane = threadIdx.x % kWarpSize;
    if (i > 0) mbarrier_wait(shared_address(&s_.unit_left[(i + 1) % 2]), (i - 1) / 2 & 1);
    IndexUnit& next = s_.units[(i + 1) % 2];
    const int64_t step = lanes() > 1 ? rows.next_n : 1;  // from a row to the next that may begin a unit
    for (int64_t row = row_behind(s_.units[i % 2]);; row += kWarpSize * step) {
      const int64_t own = row + lane * step;
      const uint32_t found = __ballot_sync(kFullWarp, own < rows.num_rows && is_next(own));
      if (found == 0) continue;
      if (lane == 0) {
        const int64_t first = row + (__ffs(static_cast<int>(found)) - 1) * step;
        if (rows.k_start || rows.query_start_loc) {
          find_unit_here(rows, first, args_.group_rows, next);
        } else {
          UnitPlaces::Place at;
          args_.places.begins_at(first, at);
          set_even_unit<false>(rows, at.request, at.in_request, args_.group_rows, next);
        }
        set_work(i + 1, next, unit_end);
        mbarrier_arrive(shared_address(&s_.unit_full[(i + 1) % 2]));
      }
      return;
    }
  }
  // The row that most often begins the next unit.
  __device__ __forceinline__ int64_t row_behind(const IndexUnit& unit) const {
    return unit.first_row + (lanes() > 1 ? p_.problem.rows.next_n : unit.num_rows);
  }
  // Whether a unit that has steps begins at `row`.
  __device__ __forceinline__ bool is_next(int64_t row) const {
    const IndexRows& rows = p_.problem.rows;
    if (rows.k_start || rows.query_start_loc) {
      IndexUnit unit;
      return find_unit_here(rows, row, args_.group_rows, unit) &&
             !(are_kept() && takes_all(unit, args_.taken));
    }
    UnitPlaces::Place at;
    if (!args_.places.begins_at(row, at)) return false;
    if (!are_kept()) return true;
    if (lanes() > 1) return tiles_of_request(at.request) > 0;
    return scored_tiles_at(rows, at.request, at.in_request, args_.group_rows, kTileKeys, args_.taken) > 0;
  }
  // Scored tiles of the request's longest unit.
  __device__ __forceinline__ int64_t tiles_of_request(int64_t request) const {
    const IndexRows& rows = p_.problem.rows;
    return scored_tiles_at(rows, static_cast<uint32_t>(request), 0, static_cast<int>(rows.next_n), kTileKeys,
                           args_.taken);
  }

  // Answers the units without a scored tile, in turns with the lane's other CTAs. Unit i is the last of the
  // share. s_.units[0] is used, once the producers have left it.
  __device__ __forceinline__ void answer_others(int i) const {
    mbarrier_wait(shared_address(&s_.unit_left[0]), i / 2 & 1);
    const UnitPlaces& places = args_.places;
#pragma unroll 1
    for (int64_t place = cta_of_lane(); place < places.count; place += args_.ctas.divisor()) {
      consumers_sync();
      IndexUnit& unit = s_.units[0];
      const int64_t row = places.row(place) + lane_of_cta() * args_.group_rows;
      if (threadIdx.x == 0 && !find_unit(p_.problem.rows, row, args_.group_rows, unit)) unit.num_rows = 0;
      consumers_sync();
      if (unit.num_rows > 0 && takes_all(unit, args_.taken)) args_.answer_all(unit, RowTeam(s_, 1));
    }
  }

  __device__ __forceinline__ int lanes() const { return may_keep_ ? args_.places.lanes : 1; }
  // CTAs of different lanes with the same share are neighbours.
  __device__ __forceinline__ int lane_of_cta() const { return blockIdx.x % lanes(); }
  __device__ __forceinline__ int cta_of_lane() const { return blockIdx.x / lanes(); }

  const ScanArgs& scan_;
  const IndexTopkArgs& args_;
  const IndexTopkParams& p_;
  const Memory memory_;
  ScanShared& s_;
  const bool may_keep_;  // whether the kernel can keep keys

 private:
  __device__ __forceinline__ static ScanShared& shared() {
    __shared__ ScanShared memory;
    return memory;
  }
};

}  // namespace mla_fp8::gpu::sm90_index
