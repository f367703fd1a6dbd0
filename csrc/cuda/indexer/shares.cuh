#pragma once
// How steps are shared among CTAs. The steps of all units lie one behind another, and each CTA takes an equal
// part of them. Their number depends on lengths that only the device knows: each CTA finds its own share.
#include "cuda/device/divide.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/indexer/rows.cuh"

namespace mla_fp8::gpu {

// The share of a CTA: `per_cta` steps of `total`, from cta * per_cta on; scored tiles, if keys are kept.
struct IndexShare {
  int64_t total, per_cta;
  int64_t first_step;  // the step at which the share's first unit begins
  bool are_kept;
  // Only if are_kept. are_gathered: a unit is answered by one of its CTAs; are_others: some need no logits.
  bool are_gathered, are_others;
  // Whether each unit begins with a share, and which size of AlignedShares the shares then have.
  bool are_aligned;
  int size;
  bool are_uniform;  // and all units have equally many shares; one, if keys are not kept
};
// Sizes of shares with which each unit may begin with a share. A CTA that ends one unit and begins another
// takes 3 to 5 us longer, or 12 if keys are counted. So shares of kept keys may be larger than equal shares:
// the smallest of these sizes that suffices is taken. Finding it takes 0.7 us.
struct AlignedShares {
  static constexpr int kSizes = 3, kBits = 10;
  static constexpr int32_t kMostShares = (1 << kBits) / 2 - 1;  // and fewer units: sums fit in kBits
  static constexpr int32_t kSmall = 16, kMostTiles = 2048;      // tiles of a share: small, most

  int32_t equal, wide;  // the first size, and next_size()

  // The second size: for small shares, each unit may leave half a share empty; else, units are equally long.
  __device__ __forceinline__ static int32_t next_size(int32_t equal, int32_t total, int32_t units,
                                                      int32_t num_shares) {
    return equal <= kSmall ? number(total, num_shares - units / 2)
                           : number(number(total, units), num_shares / units);
  }
  // Whether `wide` costs at most the tiles that aligned shares save: what most units save, and `more`.
  __device__ __forceinline__ bool may_pay(int32_t num_shares, int32_t more = 0) const {
    const int32_t most_more = (equal <= kSmall ? 4 : 4 + equal / 32) + more;
    return equal > 0 && equal <= kMostTiles && num_shares <= kMostShares && wide <= equal + most_more;
  }
  __device__ __forceinline__ int32_t operator[](int i) const { return i == 0 ? equal : wide + i - 1; }
  // How many shares of each size a unit with so many tiles needs, kBits bits for each size.
  __device__ __forceinline__ int32_t numbers(int32_t tiles) const {
    int32_t all = 0;
#pragma unroll
    for (int i = 0; i < kSizes; ++i) all |= number(tiles, (*this)[i]) << kBits * i;
    return all;
  }
  __device__ __forceinline__ static int32_t of_size(int32_t numbers, int i) {
    return numbers >> kBits * i & ((1 << kBits) - 1);
  }
  // ceil(tiles / size) without an integer division.
  __device__ __forceinline__ static int32_t number(int32_t tiles, int32_t size) {
    return static_cast<int32_t>(
        __fdividef(static_cast<float>(tiles + size) - 0.5f, static_cast<float>(size)));
  }
};

// The places where units may begin. With query_start_loc these are all rows. Otherwise all requests have the
// same number of rows, and a place is every group_rows-th row of each. Dividers save integer divisions of
// forty instructions: code that runs once waits for its instructions.
//
// If there are lanes, all units of a request are one place, of rows_of_place rows. Each lane of CTAs has one
// unit of each request, and all lanes have equal shares: CTAs read the same keys at a time, from the L2.
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
    uint32_t request, in_request;  // a row, by its request and its number in it
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
  // Whether a unit begins at `row`, without query_start_loc. `place` becomes the row's in either case.
  __device__ __forceinline__ bool begins_at(int64_t row, Place& place) const {
    const auto i = static_cast<uint32_t>(row), request = request_rows.word(i);
    place = {request, i - request * static_cast<uint32_t>(request_rows.divisor())};
    return group_rows.word(place.in_request) * static_cast<uint32_t>(group_rows.divisor()) ==
           place.in_request;
  }
};

// The time to bring a unit together, measured in tiles: in the CTA that answers it, and in the merge.
inline constexpr int32_t kGatherTiles = 4, kMergeTiles = 32;

// Keys are kept of fewer scored tiles than this. A thread's sum stops here, so a block's sums fit in 32 bits.
inline constexpr int32_t kMostKeptTiles = 1 << 20;

// The arguments of find_share.
struct ShareQuestion {
  const IndexRows& rows;
  const UnitPlaces& places;
  const Divider& num_ctas;
  int topk, group_rows, tile_keys;  // topk: a row with at most so many columns is not scored
  int cta, lane;
  int32_t most_kept, most_gathered;  // most tiles: of all units to keep keys, of a unit to gather it
  // Shared memory for the tiles of `room` places, or null.
  int32_t* known;
  int room;
};
// The threads of a block as a team that finds its share. Such a team has
//
//   thread(), threads(), sync()   the caller's number, the number of threads, a barrier
//   inclusive_sum(x)              the sum of x over threads up to and including the caller
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

// Finds the CTA's share, and the unit in which the share begins if it has any steps. The whole team calls it,
// and passes a barrier before it reads `share` or `first_unit`.
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
  // Each thread has `each` neighbouring places.
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
  // The thread in whose places the share begins sets first_unit. Its own places have `mine` steps, which end
  // before step `last` of all.
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

// find_share with uniform shares, at most `unit_shares` of them for each unit: only their size has to be
// found. Returns false, and finds nothing, if
//   - lengths differ so much that uniform shares do not pay,
//   - equal shares would keep keys and uniform ones would not, or
//   - keys are not kept and a unit needs more than one share.
// Places are at most as many as threads, of requests with equally many rows. Thread 0 writes the result.
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
  // The longest unit has no empty share.
  const int32_t each = max(AlignedShares::number(longest, size), 1);
  const int32_t shares = each * static_cast<int32_t>(places.count);
  const AlignedShares sizes{max(equal, 1), size};
  const bool are_kept = shares * size <= question.most_kept, have_room = total <= question.most_kept,
             are_gathered = question.most_gathered > 0 && longest <= question.most_gathered;
  // A CTA with a whole unit of several rows saves the gathering; if keys are not kept, the merge.
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
