#pragma once
// The scan of index_topk on Hopper. It turns logits of the share's tiles into order keys, a word for each
// column that a row may see, and compares none while it scores. Keys are (words: rows.cuh)
//
//   kept        the workspace has room for the keys of all tiles; they go there, and the merge chooses
//   gathered    kept, few units, none longer than a chunk: the last CTA of a unit to write its keys reads all
//               keys of the unit and answers. No CTA waits for another.
//   in chunks   otherwise: keys of a chunk lie in shared memory. After each chunk consumers meet and put the
//               best of the row's list and of the chunk into the list. A unit of one chunk needs no list.
//
// Producers go on with the next unit meanwhile.
//
//   barrier        arrivals                      a phase is
//   unit_full[i]   1, the consumer that found    unit n of the share in units[i], i = n % 2
//                  the unit
//   unit_left[i]   4 producer warps              a unit all of whose items have been asked for
#include "cuda/indexer/sm90_candidates.cuh"
#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_math.cuh"
#include "cuda/indexer/sm90_units.cuh"
#include "cuda/indexer/thread_keys.cuh"

namespace mla_fp8::gpu::sm90_index {

template <int kHeads, int kRows, int kShares, bool kFp4, Keeping kKeeping>
class Scan : ScanUnits {
 public:
  static constexpr int kUnitRows = kRows * kShares;
  static constexpr bool kMayKeep = kKeeping != Keeping::kNever, kCounts = kKeeping == Keeping::kCounted;
  // If keys are kept, fewer rounds than this are scored as single items: fetching one code alone is quicker.
  static constexpr int kRoundsOfMany = 16;

  __device__ __forceinline__ explicit Scan(const ScanArgs& args)
      : ScanUnits(args, dynamic_memory(scan_stages(kUnitRows), kHeads * kUnitRows, num_panels(kFp4), kFp4),
                  kMayKeep) {}

  __device__ __forceinline__ void run() {
    // Consumers find the share, in 1.5 us. Producers make the barriers meanwhile.
    if (threadIdx.x < kConsumers) find_work(ShareTeam(s_, kConsumers));
    else init(static_cast<int>(threadIdx.x) - kConsumers);
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      give_up_registers<kProducerRegisters>();
      produce();
    } else {
      if (threadIdx.x == 0) mbarrier_arrive(shared_address(&s_.unit_full[0]));
      take_registers<kConsumerRegisters>();
      consume();
    }
  }

 private:
  // Called by the producers.
  __device__ __forceinline__ void init(int thread) const {
    s_.ring.init(thread, scan_.boxes, kShares);
    if (thread < 2) {
      mbarrier_init(shared_address(&s_.unit_full[thread]), 1);
      mbarrier_init(shared_address(&s_.unit_left[thread]), kGroup / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
    if constexpr (kFp4) s_.ring.init_magnitudes(thread);
    else if (scan_.boxes.are_used && thread == kWarpSize)
      prefetch_tensor_map(scan_.boxes.are_blocks ? scan_.boxes.block_map : scan_.boxes.map);
    wait_for_previous_grid();
  }

  __device__ __forceinline__ void produce() const {
    Fetch fetch(p_.problem.keys, scan_.boxes, args_.page_size, memory_, s_.ring);
    for (int i = 0;; ++i) {
      wait_for_unit(i);
      const IndexUnit& unit = s_.units[i % 2];
      const ScanWork& work = s_.works[i % 2];
      const bool is_last = work.unit_end >= s_.end;
      if (!takes_all(unit, args_.taken)) fetch.fetch(unit, work.column, work.tiles);
      mbarrier_arrive_warp(shared_address(&s_.unit_left[i % 2]), threadIdx.x % kWarpSize);
      if (is_last) return;
    }
  }

  __device__ __forceinline__ void consume() const {
    Math<kHeads, kRows, kShares, scan_stages(kUnitRows), kFp4> math(memory_, s_.ring, scan_.boxes.are_used);
    int i = 0;
    int64_t counted = -1;  // the row whose keys are counted, or -1
    for (;; ++i) {
      wait_for_unit(i);
      const IndexUnit& unit = s_.units[i & 1];
      const ScanWork& work = s_.works[i & 1];
      const bool has_work = work.tiles > 0 || is_rehearsed(work), is_short = takes_all(unit, args_.taken);
      if (has_work && !is_short) {
        if constexpr (kCounts) turn_bins(counted, is_counted(work) ? unit.first_row : -1);
        load_queries<kHeads, kUnitRows>(p_.problem.queries, unit, memory_);
        if constexpr (!kMayKeep || kShares > 1 || kRows * kHeads > 64)
          prefetch_queries<kHeads, kUnitRows>(p_.problem.queries, row_behind(unit), p_.problem.rows.num_rows);
        if (threadIdx.x < kIndexGroupRows) {
          s_.count[threadIdx.x] = 0;
          s_.low[threadIdx.x] = UINT32_MAX;
          s_.high[threadIdx.x] = 0;
          s_.threshold[threadIdx.x] = 1;
        }
      }
      prepare_next(i);  // after the loads of queries, which are needed first
      if (has_work && is_short) args_.answer_all(unit, RowTeam(s_, 1));
      if (has_work && !is_short) {
        consumers_sync();
        bool answers = true;
        if (is_shared(work)) {
          keep_unit(math, unit, work, counted >= 0);
          answers = gathers() && answers_last(work);
        }
        if (answers) scan_unit(math, unit, work);
      }
      if (work.unit_end >= s_.end) break;
      consumers_sync();
    }
    if constexpr (kCounts) {
      consumers_sync();
      if (counted >= 0) add_bins(counted);
    }
    if (gathers() && s_.share.are_others) answer_others(i);
  }

  // Scores `tiles` tiles from `column` on: put(pair, key, more, order key), where key + more is the number of
  // the key from the warpgroup's first one. Rounds (next_round) are code of their own, which has to be
  // fetched: they are used if at least `least_rounds` follow each other.
  template <bool kHasRounds, class TileMath, class Put>
  __device__ __forceinline__ void score(TileMath& math, const IndexUnit& unit, const ScanWork& work,
                                        int32_t column, int tiles, int least_rounds, const Put& put) const {
    constexpr int32_t kStep = TileMath::kStep * kItemKeys;
    const auto first_key = static_cast<int32_t>(__shfl_sync(kFullWarp, TileMath::first_key(), 0));
    const auto items = [](int32_t keys) { return keys / kStep * kStep; };  // the keys of whole items
    const int32_t first = column + first_key, end = tiles * kTileKeys;
    // All rows see the items in [seen, unseen). Others need a mask for each row.
    const int32_t seen = min(items(max(work.seen_begin - first, 0) + kStep - 1), end);
    const int32_t unseen = max(min(items(work.seen_end - first + kStep - kItemKeys), end), seen);
    math.load_weights();
    constexpr int32_t kRound = TileMath::kOwnStages * kStep;
    int32_t key = 0;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const bool all_see = part == 1;
      const int32_t part_end = part == 0 ? seen : all_see ? unseen : end;
      while (key < part_end) {
        if constexpr (kHasRounds)
          if (all_see && math.begins_round() && part_end - key >= least_rounds * kRound) {
#pragma unroll 1
            for (; part_end - key >= kRound; key += kRound)
              math.next_round([&](int i, int pair, float logit, uint32_t present) {
                put(pair, key, i * kStep, order_key_unless_minus_zero(logit) & present);
              });
            continue;
          }
        math.next_item([&](int, int pair, float logit, uint32_t present) {
          uint32_t found = order_key_unless_minus_zero(logit);
          if (!all_see) {
            const int32_t own = first + key + TileMath::key();
            const int r = math.row(pair);
            const IndexRow& where = unit.rows[r];
            present = own < where.begin || own >= where.end ? 0 : 0 - (present >> r & 1);
            if (scan_.has_pins && present != 0 && p_.is_pinned(unit.first_row + r, where, own))
              found = kPinnedKey;
          }
          put(pair, key, 0, found & present);
        });
        key += kStep;
      }
    }
  }

  // Whether the row is long enough for its keys to be counted. Consumers count in shared memory, where other
  // scans have lists. When they turn to another row, they add the counts to the row's bins in global memory.
  __device__ __forceinline__ bool is_counted(const ScanWork& work) const {
    return are_binned() && work.unit_tiles * kTileKeys > scan_.near_keys;
  }
  __device__ __forceinline__ uint32_t* own_bins() const { return reinterpret_cast<uint32_t*>(list(0)); }
  __device__ __forceinline__ void turn_bins(int64_t& counted, int64_t row) const {
    if (counted >= 0) add_bins(counted);
    else if (row >= 0)
      for (int i = threadIdx.x; i < IndexRowBins::kBins / 4; i += kConsumers)
        store(own_bins() + 4 * i, Words<4>{});
    counted = row;
  }
  __device__ __forceinline__ void add_bins(int64_t row) const {
    uint32_t* to = args_.counters.bins[row].bins;
#pragma unroll 4
    for (int i = threadIdx.x; i < IndexRowBins::kBins; i += kConsumers) {
      if (const uint32_t own = own_bins()[i]; own > 0) atomicAdd(to + i, own);
      own_bins()[i] = 0;
    }
  }

  // Scores the share's tiles of a unit and writes their keys to the workspace.
  template <class TileMath>
  __device__ __forceinline__ void keep_unit(TileMath& math, const IndexUnit& unit, const ScanWork& work,
                                            bool is_counted) const {
    const uint32_t bins = shared_address(own_bins());
    const int first_tile = (work.column - unit.begin) / kTileKeys;
    uint32_t* to[TileMath::kPairs];  // null for a row that does not exist
#pragma unroll
    for (int pair = 0; pair < TileMath::kPairs; ++pair) {
      const int r = math.row(pair);
      to[pair] =
          KeptKeys(args_).tile(kept_tile(work, r) + first_tile) + TileMath::first_key() + TileMath::key();
      if (!TileMath::is_own() || r >= unit.num_rows) to[pair] = nullptr;
    }
    // FP8 keys have no rounds here: their bytes take longer to come than instructions.
    score<kFp4>(math, unit, work, work.column, work.tiles, kRoundsOfMany,
                [&](int pair, int key, int more, uint32_t found) {
                  if (to[pair] == nullptr) return;
                  to[pair][key + more] = found;
                  if constexpr (kCounts)
                    if (is_counted) add_shared_1(bins + (found >> IndexRowBins::kShift) * 4);
                });
  }

  __device__ __forceinline__ static bool is_rehearsed(const ScanWork& work) {
    return kMayKeep && work.is_rehearsed;
  }
  // Whether the unit's keys go to the workspace, for whoever answers it.
  __device__ __forceinline__ bool is_shared(const ScanWork& work) const {
    return are_kept() && !work.is_whole;
  }
  // Whether this CTA is the unit's last to have its keys in the workspace. The last one answers.
  __device__ __forceinline__ bool answers_last(const ScanWork& work) const {
    const auto each = static_cast<int32_t>(s_.share.per_cta),
               begin = static_cast<int32_t>(s_.begin - work.unit_begin);  // of the share in the unit
    const int32_t before = AlignedShares::number(max(begin, 0), each),
                  from_here = AlignedShares::number(work.unit_tiles - begin, each);
    consumers_sync();
    if (threadIdx.x == 0)
      s_.answers = arrives_last(args_.counters.arrivals[s_.cta - before], before + from_here);
    consumers_sync();
    return s_.answers;
  }
  // Chooses from the share's part of a unit, chunk by chunk, or from all of the unit's keys, read from the
  // workspace. A CTA without a share rehearses: it answers for no row, from made-up keys, while others score.
  // Thus instructions of the answer are in the L2, and not in memory, when another CTA needs them.
  template <class TileMath>
  __device__ __forceinline__ void scan_unit(TileMath& math, const IndexUnit& unit,
                                            const ScanWork& work) const {
    uint32_t to[TileMath::kPairs]{};  // 0 for a row that does not exist
#pragma unroll
    for (int pair = 0; pair < TileMath::kPairs; ++pair)
      if (const int r = math.row(pair); TileMath::is_own() && r < unit.num_rows)
        to[pair] = shared_address(keys(r) + TileMath::first_key() + TileMath::key());
    const int least_rounds = are_kept() ? kRoundsOfMany : 1;
    for (int first = 0;;) {
      int tiles = min(scan_.chunk_tiles, work.tiles - first);
      int32_t column = work.column + first * kTileKeys;
      if (is_shared(work)) {
        tiles = work.unit_tiles;
        column = unit.begin;
        gather(unit, work);
      } else if (is_rehearsed(work)) {
        tiles = 1;
        if (threadIdx.x < kTileKeys) keys(0)[threadIdx.x] = order_key(static_cast<float>(threadIdx.x));
      } else {
        score<(kRows * kHeads > 64)>(math, unit, work, column, tiles, least_rounds,
                                     [&](int pair, int key, int more, uint32_t found) {
                                       store_shared_4_if(to[pair] != 0, to[pair] + 4 * key + 4 * more, found);
                                     });
      }
      const bool is_last = are_kept() || first + tiles == work.tiles;
      consumers_sync();
      if (args_.block_keys != nullptr) find_block_keys(unit, column, tiles * kTileKeys);
      RowTeam team(s_, unit.num_rows);
      if (const int r = team.row(); r < unit.num_rows)
        end_chunk(team, r, unit, work, {keys(r), column, tiles * kTileKeys, s_.threshold[r]}, first == 0,
                  is_last);
      consumers_sync();
      if (is_last) break;
      first += tiles;
    }
    if (!are_kept() && !work.is_whole && threadIdx.x == 0)
      write_state(*args_.state(s_.cta), unit, work.is_earlier, work.unit_begin,
                  num_tiles(unit, kTileKeys, args_.taken), s_.count);
  }

  // Finds the largest key of each block of a chunk. A block that lies in two chunks is found in two parts.
  __device__ __forceinline__ void find_block_keys(const IndexUnit& unit, int32_t column,
                                                  int32_t count) const {
    constexpr int kBlock = IndexList::kBlock;
    for (int r = 0; r < unit.num_rows; ++r) {
      const int32_t first = column - unit.rows[r].begin, seen = unit.rows[r].end - unit.rows[r].begin;
      uint32_t* to = args_.block_keys + (unit.first_row + r) * args_.block_pitch;
      const int32_t end = (min(first + count, seen) + kBlock - 1) / kBlock;
#pragma unroll 1
      for (int32_t block = max(first, 0) / kBlock + static_cast<int32_t>(threadIdx.x); block < end;
           block += kConsumers) {
        const int32_t begin = max(block * kBlock - first, 0),
                      last = min(block * kBlock - first + kBlock, count);
        uint32_t most = 0;
        for (int32_t i = begin; i < last; ++i) most = max(most, keys(r)[i]);
        if (last - begin == kBlock) to[block] = most;
        else atomicMax(to + block, most);
      }
    }
  }

  // Copies all keys of a unit from the workspace to shared memory.
  __device__ __forceinline__ void gather(const IndexUnit& unit, const ScanWork& work) const {
    const int pieces = work.unit_tiles * kTileKeys / 4;  // of sixteen bytes
    for (int r = 0; r < unit.num_rows; ++r) {
      const uint32_t* from = KeptKeys(args_).tile(kept_tile(work, r));
      uint32_t* to = keys(r);
#pragma unroll 4
      for (int i = threadIdx.x; i < pieces; i += kConsumers)
        store(to + 4 * i, load_if<4>(from + 4 * i, true));
    }
  }

  // Puts the best of a row's list and of a chunk into the list. After the last chunk the row is answered, or
  // its list is left for the merge. A first chunk that is also the last needs no list.
  __device__ __forceinline__ void end_chunk(RowTeam& team, int r, const IndexUnit& unit, const ScanWork& work,
                                            const CandidateKeys& chunk, bool is_first, bool is_last) const {
    const int32_t topk = is_rehearsed(work) ? min(p_.topk, kTileKeys / 2) : p_.topk;
    const auto slot = [&](const IndexRow& where, int32_t c) { return args_.slot(where, c); };
    const IndexAnswer answer{p_, unit.first_row + r, unit.rows[r], is_rehearsed(work)};
    uint64_t least = kLeastOrder;
    if (is_first && is_last && (are_kept() || work.is_whole)) {
      const ThreadKeys own(team, chunk);
      const Survey found = own.survey(team);
      team.stage_in(list(r));
      const uint64_t chosen = own.chosen(team, topk, found, least);
      write_chosen(team, answer, own, chosen, slot, [](int32_t) { return 0; });
      if (!is_rehearsed(work)) emit_end(team, p_, answer.row, min(found.count, topk));
      return;
    }
    // The list that the merge reads.
    uint64_t* left = work.is_earlier ? args_.earlier(s_.cta, r) : args_.list(s_.cta, r);
    if (is_first) {
      const ThreadKeys own(team, chunk);
      const Survey found = own.survey(team);
      const bool shrinks = found.count > (is_last ? topk : list_capacity(topk));
      const uint64_t chosen = own.chosen(team, shrinks ? topk : INT32_MAX, found, least);
      start_list(team, 0);
      own.append(team, chosen, is_last ? left : list(r));
      end_list(team, r, shrinks, least, found.low, found.high);
      return;
    }
    const int32_t listed = s_.count[r];
    RowCandidates candidates(team, {list(r), listed}, chunk);
    const Survey found = candidates.survey(team);
    const int32_t total = listed + found.count;
    const bool shrinks = total > (is_last ? topk : list_capacity(topk));
    const uint32_t low = min(s_.low[r], found.low), high = max(s_.high[r], found.high);
    if (shrinks) {
      least = kth_surveyed(team, candidates, topk, {total, low, high});
      keep_from(team, least, list(r), listed);
    } else {
      start_list(team, listed);
    }
    candidates.append(team, least, list(r));
    const int32_t count = end_list(team, r, shrinks, least, low, high);
    if (!is_last) return;
    if (work.is_whole) {
      team.stage_in(keys(r));  // columns are put in order where no candidates lie
      const AnswerPart part{0, count, unit.begin, answer.where.end};
      emit_from(team, answer, CandidateList{list(r), count}, least, part, slot);
      emit_end(team, p_, answer.row, count);
      return;
    }
    for (int32_t j = team.thread(); j < count; j += team.threads()) left[j] = list(r)[j];
  }

  // Sets the length of the list to `kept`.
  __device__ __forceinline__ void start_list(const RowTeam& team, int32_t kept) const {
    team.sync();
    if (team.thread() == 0) team.scalars().kept = kept;
    team.sync();
  }
  // Returns the list's length, and sets the bounds of its keys for the next chunk: at most `high`, and at
  // least `low`, or `least` if the list was cut to topk.
  __device__ __forceinline__ int32_t end_list(const RowTeam& team, int r, bool shrinks, uint64_t least,
                                              uint32_t low, uint32_t high) const {
    const int32_t count = team.scalars().kept;
    team.sync();
    if (team.thread() == 0) {
      s_.count[r] = count;
      s_.low[r] = shrinks ? static_cast<uint32_t>(least >> 32) : low;
      s_.high[r] = high;
      // A later key equal to the k-th comes after topk others, as its column is larger.
      if (shrinks) s_.threshold[r] = static_cast<uint32_t>(least >> 32) + 1;
    }
    return count;
  }
};

}  // namespace mla_fp8::gpu::sm90_index
