#pragma once
// How tiles of keys are shared among CTAs. All units' tiles lie one after another, and each CTA takes an
// equal share of them: which depends on lengths that the device alone knows, so each finds its own.
#include "cuda/device/divide.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/indexer/rows.cuh"

namespace mla_fp8::gpu {

// The share of a CTA: steps cta * per_cta and on, of `total`. Where the keys of all tiles are kept, for a
// choice behind the scan, steps are scored tiles.
struct IndexShare {
  int64_t total, per_cta;
  int64_t first_step;  // of the unit that the share begins in
  bool are_kept;
  // Then, that each unit is answered by one of the CTAs that scan it, and whether there are units without a
  // scored tile.
  bool are_gathered, are_others;
  // That each unit begins with a share; of which size of AlignedShares.
  bool are_aligned;
  int size;
  bool are_uniform;  // and has as many shares as each other one; where keys are not kept, one
};
// A CTA that ends a unit and begins another takes 3 to 5 us longer than with one alone, or 12 where keys are
// counted. So shares of kept keys may be somewhat larger than equal ones: the least of these sizes with which
// all units have shares of their own. To find it takes 0.7 us.
struct AlignedShares {
  static constexpr int kSizes = 3, kBits = 10;
  static constexpr int32_t kMostShares = (1 << kBits) / 2 - 1;  // of fewer units
  static constexpr int32_t kSmall = 16, kMostTiles = 2048;      // of a share

  int32_t equal, wide;  // sizes: equal shares, and next_size()

  // For units that leave half a share empty each, or, of large shares, for units of one length.
  __device__ __forceinline__ static int32_t next_size(int32_t equal, int32_t total, int32_t units,
                                                      int32_t num_shares) {
    return equal <= kSmall ? number(total, num_shares - units / 2)
                           : number(number(total, units), num_shares / units);
  }
  // For what it saves, which is `more` tiles more than of most units.
  __device__ __forceinline__ bool may_pay(int32_t num_shares, int32_t more = 0) const {
    const int32_t most_more = (equal <= kSmall ? 4 : 4 + equal / 32) + more;
    return equal > 0 && equal <= kMostTiles && num_shares <= kMostShares && wide <= equal + most_more;
  }
  __device__ __forceinline__ int32_t operator[](int i) const { return i == 0 ? equal : wide + i - 1; }
  // Of a unit's shares, by size.
  __device__ __forceinline__ int32_t numbers(int32_t tiles) const {
    int32_t all = 0;
#pragma unroll
    for (int i = 0; i < kSizes; ++i) all |= number(tiles, (*this)[i]) << kBits * i;
    return all;
  }
  __device__ __forceinline__ static int32_t of_size(int32_t numbers, int i) {
    return numbers >> kBits * i & ((1 << kBits) - 1);
  }
  // ceil(tiles / size), without a division of whole numbers.
  __device__ __forceinline__ static int32_t number(int32_t tiles, int32_t size) {
    return static_cast<int32_t>(
        __fdividef(static_cast<float>(tiles + size) - 0.5f, static_cast<float>(size)));
  }
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
      : UnitPlaces(rows.origins ? rows.num_requests * rows.next_n : rows.num_rows,
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

// What takes as long as so many tiles: to bring a unit together in the CTA that answers it, in the merge.
inline constexpr int32_t kGatherTiles = 4, kMergeTiles = 32;

// Scored tiles of all units of a call whose keys are kept: fewer than this, so that 32 bits count them in a
// block.
inline constexpr int32_t kMostKeptTiles = 1 << 20;

// What a CTA asks for its share. Keys are kept if there are at most `most_kept` scored tiles. `known` is room
// for the tiles of `room` units.
struct ShareQuestion {
  const IndexRows& rows;
  const UnitPlaces& places;
  const Divider& num_ctas;
  int topk, group_rows, tile_keys;  // topk: up to so many entries are not scored
  int cta, lane;
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
  const auto& [rows, places, num_ctas, topk, group_rows, tile_keys, cta, lane, most_kept, most_gathered,
               known, room] = question;
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
  const auto set_total = [&](int64_t total) {
    share.total = total;
    share.per_cta = num_ctas(total + num_ctas.divisor() - 1);
  };
  // Where the share begins: the calling thread has `mine` steps of all, to `last`.
  const auto find_first = [&](int64_t mine, int64_t last, const auto& steps_of) {
    const int64_t begin = cta * share.per_cta;
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
      share.are_aligned = false;
      set_total(last);
    }
    team.sync();
    const auto most_shares = static_cast<int32_t>(num_ctas.divisor());
    const auto equal = static_cast<int32_t>(share.per_cta), units = static_cast<int32_t>(places.count);
    AlignedShares sizes{equal, INT32_MAX};
    if (share.are_kept && places.count > 1 && places.count < most_shares)
      sizes.wide = AlignedShares::next_size(equal, static_cast<int32_t>(share.total), units, most_shares);
    if (sizes.may_pay(most_shares)) {
      int32_t own = 0;
      for (int64_t i = first; i < end; ++i) own += sizes.numbers(kept_of(tiles_of(i)));
      const int32_t upto = team.inclusive_sum(own);
      if (team.thread() == threads - 1) {
#pragma unroll
        for (int i = AlignedShares::kSizes - 1; i >= 0; --i) {
          const int32_t size = sizes[i], shares = AlignedShares::of_size(upto, i);
          if (shares > most_shares || size * most_shares > most_kept) continue;
          share.are_aligned = true;
          share.size = i;
          share.per_cta = size;
          share.total = shares * size;
        }
      }
      team.sync();
      if (share.are_aligned) {
        const auto size = static_cast<int32_t>(share.per_cta);
        return find_first(AlignedShares::of_size(own, share.size) * size,
                          AlignedShares::of_size(upto, share.size) * size,
                          [&](int32_t tiles) { return AlignedShares::number(kept_of(tiles), size) * size; });
      }
    }
    if (share.are_kept) return find_first(mine, last, kept_of);
  }
  const auto chosen_of = [](int32_t tiles) { return tiles == kNone ? 0 : max(tiles, 1) + kChoiceSteps; };
  int64_t mine = 0;
  for (int64_t i = first; i < end; ++i) mine += chosen_of(tiles_of(i));
  const int64_t last = team.inclusive_sum(mine);
  if (team.thread() == threads - 1) {
    share.are_kept = share.are_aligned = false;
    set_total(last);
  }
  team.sync();
  find_first(mine, last, chosen_of);
}

// The same where each unit gets as many shares as each other one, at most `unit_shares`: what is left to find
// is their size. Whether that is done: not where lengths differ so much that it does not pay, or keys that
// have room in equal shares would have none, or have none and a unit needs more than one share. There are at
// most as many places as threads, all of requests that have as many rows. The calling threads' first one
// writes what it finds.
template <class Team>
__device__ __forceinline__ bool find_uniform_share(const Team& team, const ShareQuestion& question,
                                                   int32_t unit_shares, IndexShare& share,
                                                   IndexUnit& first_unit) {
  const UnitPlaces& places = question.places;
  int32_t own = 0;
  if (team.thread() < places.count) {
    const auto [request, in_request] = places(team.thread());
    own = scored_tiles_at(question.rows, request, in_request, places.rows_of_place, question.tile_keys,
                          question.topk);
  }
  const auto [total, longest] = team.sum_and_most(own);
  const auto num_ctas = static_cast<int32_t>(question.num_ctas.divisor());
  const auto equal =
      static_cast<int32_t>(question.num_ctas.word(static_cast<uint32_t>(total + num_ctas - 1)));
  const int32_t size = max(AlignedShares::number(longest, unit_shares), 1);
  // None that is empty for all.
  const int32_t each = max(AlignedShares::number(longest, size), 1);
  const int32_t shares = each * static_cast<int32_t>(places.count);
  const AlignedShares sizes{max(equal, 1), size};
  const bool are_kept = shares * size <= question.most_kept, have_room = total <= question.most_kept,
             are_gathered = question.most_gathered > 0 && longest <= question.most_gathered;
  // A CTA that has all of a unit of several rows gathers no keys, or leaves nothing to the merge.
  int32_t more = 0;
  if (each == 1 && question.group_rows > 1) more = !are_kept ? kMergeTiles : are_gathered ? kGatherTiles : 0;
  if (!sizes.may_pay(num_ctas, more) || (!are_kept && (have_room || each > 1))) return false;
  if (team.thread() > 0) return true;
  share.per_cta = are_kept ? size : size + kChoiceSteps;
  share.total = shares * share.per_cta;
  share.are_kept = are_kept;
  share.are_aligned = share.are_uniform = true;
  share.are_gathered = are_gathered;
  share.are_others = false;
  if (question.cta >= shares) return true;
  const int32_t place = AlignedShares::number(question.cta + 1, each) - 1;
  share.first_step = place * each * share.per_cta;
  const auto [request, in_request] = places(place);
  set_even_unit<false>(question.rows, request, in_request + question.lane * question.group_rows,
                       question.group_rows, first_unit);
  return true;
}

}  // namespace mla_fp8::gpu
