#pragma once
// The scan of index_topk on Hopper: the shares of scan.cuh. Logits of a chunk of columns lie in shared memory
// as order keys, a word for each column that a row may see; no warp asks whether one is large. Behind a chunk
// the consumers meet, and the best of each row's list and of the chunk become its list. A unit that ends in
// its first chunk has no list: its answer is found in the chunk itself. Producers go on with the next unit
// meanwhile.
//
//   barrier        arrivals                      a phase is
//   unit_full[i]   1, the consumer that found    a unit in its place: those of even numbers in place 0
//                  the unit
//   unit_left[i]   4 producer warps              a unit all of whose items are on their way
#include "cuda/indexer/scan.cuh"
#include "cuda/indexer/sm90_fetch.cuh"
#include "cuda/indexer/sm90_math.cuh"
#include "cuda/indexer/sm90_rows.cuh"

namespace mla_fp8::gpu::sm90_index {

template <int kHeads, int kRows, int kShares>
class Scan {
 public:
  __device__ __forceinline__ explicit Scan(const ScanArgs& args)
      : scan_(args),
        args_(args.topk),
        p_(args.topk.p),
        memory_(dynamic_memory(args.num_stages, args.lines, args.panels,
                               args.topk.p.problem.keys.layout == IndexLayoutId::kIndexFp4)),
        s_(shared()) {}

  __device__ __forceinline__ void run() {
    const int cta = blockIdx.x;
    s_.ring.init(scan_.boxes.are_used, kShares);
    if (threadIdx.x < 2) {
      mbarrier_init(shared_address(&s_.unit_full[threadIdx.x]), 1);
      mbarrier_init(shared_address(&s_.unit_left[threadIdx.x]), kGroup / kWarpSize * kWarpArrivals);
      mbarrier_init_fence();
    }
    if (memory_.is_fp4) s_.ring.init_magnitudes();
    else if (scan_.boxes.are_used && threadIdx.x == 0) prefetch_tensor_map(scan_.boxes.map);
    find_share<kThreads>(p_.problem.rows, p_.topk, args_.group_rows, kTileKeys, cta, args_.num_ctas,
                         reinterpret_cast<int32_t*>(keys(0)), args_.group_rows * pitch(), s_.share,
                         s_.units[0]);
    __syncthreads();
    const int64_t begin = cta * s_.share.per_cta, end = min(s_.share.total, begin + s_.share.per_cta);
    if (threadIdx.x == 0) {
      args_.state(cta)->unit = -1;
      args_.state(cta)->per_cta = s_.share.per_cta;
      s_.begin = begin;
      s_.end = end;
      if (begin < end) set_work(0, s_.share.first_step);  // else there is no unit
      mbarrier_arrive(shared_address(&s_.unit_full[0]));
    }
    if (begin >= end) return;
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      give_up_registers<kProducerRegisters>();
      produce();
    } else {
      take_registers<kConsumerRegisters>();
      consume();
    }
  }

 private:
  __device__ __forceinline__ static ScanShared& shared() {
    __shared__ ScanShared memory;
    return memory;
  }

  // Of row r: its list, and a chunk's keys.
  __device__ __forceinline__ uint64_t* list(int r) const {
    return reinterpret_cast<uint64_t*>(memory_.end()) + r * list_capacity(p_.topk);
  }
  __device__ __forceinline__ int pitch() const { return keys_pitch(scan_.chunk_tiles); }
  __device__ __forceinline__ uint32_t* keys(int r) const {
    return reinterpret_cast<uint32_t*>(list(args_.group_rows)) + r * pitch();
  }

  __device__ __forceinline__ void set_work(int i, int64_t unit_begin) const {
    const IndexUnit& unit = s_.units[i % 2];
    const int64_t unit_tiles = num_tiles(unit, kTileKeys, p_.topk);
    const int64_t first = max(s_.begin - unit_begin, int64_t{0}), last = min(s_.end - unit_begin, unit_tiles);
    ScanWork& work = s_.works[i % 2];
    work.unit_begin = unit_begin;
    work.unit_end = unit_begin + num_steps(unit, kTileKeys, p_.topk);
    work.column = static_cast<int32_t>(unit.begin + first * kTileKeys);
    work.tiles = static_cast<int>(max(last - first, int64_t{0}));
    work.is_earlier = first > 0;
    work.is_whole = first == 0 && last == unit_tiles;
    work.seen_begin = scan_.has_pins ? INT32_MAX : unit.rows[0].begin;
    work.seen_end = unit.rows[0].end;
    for (int r = 1; r < unit.num_rows; ++r) {
      work.seen_begin = max(work.seen_begin, unit.rows[r].begin);
      work.seen_end = min(work.seen_end, unit.rows[r].end);
    }
  }
  __device__ __forceinline__ void wait_for_unit(int i) const {
    mbarrier_wait(shared_address(&s_.unit_full[i % 2]), i / 2 & 1);
  }
  // The unit behind the i-th, in the place of the one before.
  __device__ __forceinline__ void prepare_next(int i) const {
    const ScanWork& work = s_.works[i % 2];
    if (threadIdx.x != kConsumers - 1 || work.unit_end >= s_.end) return;
    if (i > 0) mbarrier_wait(shared_address(&s_.unit_left[(i + 1) % 2]), (i - 1) / 2 & 1);
    next_unit(p_.problem.rows, args_.group_rows, s_.units[i % 2], s_.units[(i + 1) % 2]);
    set_work(i + 1, work.unit_end);
    mbarrier_arrive(shared_address(&s_.unit_full[(i + 1) % 2]));
  }

  __device__ __forceinline__ void produce() const {
    Fetch fetch(p_.problem.keys, scan_.boxes, args_.page_size, memory_, s_.ring);
    for (int i = 0;; ++i) {
      wait_for_unit(i);
      const IndexUnit& unit = s_.units[i % 2];
      const ScanWork& work = s_.works[i % 2];
      const bool is_last = work.unit_end >= s_.end;
      if (!takes_all(unit, p_.topk)) fetch.fetch(unit, work.column, work.tiles);
      mbarrier_arrive_warp(shared_address(&s_.unit_left[i % 2]), threadIdx.x % kWarpSize);
      if (is_last) return;
    }
  }

  __device__ __forceinline__ void consume() const {
    Math<kHeads, kRows, kShares> math(memory_, s_.ring, scan_.boxes.are_used);
    for (int i = 0;; ++i) {
      wait_for_unit(i);
      const IndexUnit& unit = s_.units[i % 2];
      const ScanWork& work = s_.works[i % 2];
      if (work.tiles == 0) {
        prepare_next(i);
      } else if (takes_all(unit, p_.topk)) {
        prepare_next(i);
        args_.answer_all(unit, RowTeam(s_, 1));
      } else {
        load_queries<kHeads>(p_.problem.queries, unit, memory_);
        if (threadIdx.x < kIndexGroupRows) {
          s_.count[threadIdx.x] = 0;
          s_.low[threadIdx.x] = UINT32_MAX;
          s_.high[threadIdx.x] = 0;
          s_.threshold[threadIdx.x] = 1;
        }
        prepare_next(i);
        consumers_sync();
        scan_unit(math, unit, work);
      }
      if (work.unit_end >= s_.end) return;
      consumers_sync();
    }
  }

  template <class TileMath>
  __device__ __forceinline__ void scan_unit(TileMath& math, const IndexUnit& unit,
                                            const ScanWork& work) const {
    constexpr int kStepKeys = TileMath::kStep * kItemKeys;
    const auto first_key = static_cast<int32_t>(__shfl_sync(kFullWarp, TileMath::first_key(), 0));
    // Where the lane's keys of a chunk go, of each pair of rows: 0, of a row that does not exist.
    uint32_t to[TileMath::kPairs];
#pragma unroll
    for (int pair = 0; pair < TileMath::kPairs; ++pair) {
      const int r = math.row(pair);
      to[pair] =
          TileMath::is_own() && r < unit.num_rows ? shared_address(keys(r) + first_key + TileMath::key()) : 0;
    }
    for (int first = 0;;) {
      const int tiles = min(scan_.chunk_tiles, work.tiles - first);
      const int32_t chunk_column = work.column + first * kTileKeys;
      // Items of the chunk from key `seen` on, before `unseen`, lie in all rows.
      const int32_t seen = work.seen_begin - chunk_column - first_key;
      const int32_t unseen = work.seen_end - chunk_column - first_key - kItemKeys;
      math.load_weights();
#pragma unroll 1
      for (int key = 0; key < tiles * kTileKeys; key += kStepKeys) {
        const bool all_see = key >= seen && key <= unseen;
        math.next_item([&](int pair, float logit, bool present) {
          if (to[pair] == 0) return;
          uint32_t found = order_key(logit);
          if (!all_see) {
            const int32_t column = chunk_column + key + first_key + TileMath::key();
            const IndexRow& where = unit.rows[math.row(pair)];
            present &= column >= where.begin && column < where.end;
            if (scan_.has_pins && p_.is_pinned(where, column)) found = kPinnedKey;
          }
          store_shared_4(to[pair] + 4 * key, present ? found : 0);
        });
      }
      const bool is_last = first + tiles == work.tiles;
      consumers_sync();
      RowTeam team(s_, unit.num_rows);
      if (const int r = team.row(); r < unit.num_rows)
        end_chunk(team, r, unit, work, {keys(r), chunk_column, tiles * kTileKeys, s_.threshold[r]},
                  first == 0, is_last);
      consumers_sync();
      if (is_last) break;
      first += tiles;
    }
    if (!work.is_whole && threadIdx.x == 0)
      write_state(*args_.state(blockIdx.x), unit, work.is_earlier, work.unit_begin,
                  num_tiles(unit, kTileKeys, p_.topk), s_.count);
  }

  // The candidates of a row.
  struct RowCandidates {
    CandidateList list;
    CandidateKeys chunk;

    template <class Team, class Visit>
    __device__ __forceinline__ void visit(const Team& team, const Visit& visit_one) const {
      list.visit(team, visit_one);
      chunk.visit(team, visit_one);
    }
    template <class Team>
    __device__ __forceinline__ void mark(const Team& team, uint64_t least, int64_t first, uint32_t* words,
                                         int num_words) const {
      list.mark(team, least, first, words, num_words);
      chunk.mark(team, least, first, words, num_words);
    }
  };

  // The best of a row's list and of a chunk: to the list, and at the end to the answer or to the merge. A
  // first chunk that is the last one needs no list.
  __device__ __forceinline__ void end_chunk(RowTeam& team, int r, const IndexUnit& unit, const ScanWork& work,
                                            CandidateKeys chunk, bool is_first, bool is_last) const {
    const int32_t topk = p_.topk;
    const Survey found = survey(team, chunk);
    const int32_t listed = s_.count[r], total = listed + found.count;
    const bool shrinks = total > (is_last ? topk : list_capacity(topk));
    const uint32_t low = min(s_.low[r], found.low), high = max(s_.high[r], found.high);
    uint64_t least = kLeastOrder;
    if (shrinks)
      least = kth_surveyed(team, RowCandidates{{list(r), listed}, chunk}, topk, {total, low, high});
    int32_t count = min(total, topk);
    if (!is_first || !is_last) {
      if (shrinks) {
        keep_from(team, least, list(r), listed);
      } else {
        team.sync();
        if (team.thread() == 0) team.scalars().kept = listed;
        team.sync();
      }
      append_from(team, least, chunk, list(r));
      count = team.scalars().kept;
      team.sync();
      if (team.thread() == 0) {
        s_.count[r] = count;
        s_.low[r] = shrinks ? static_cast<uint32_t>(least >> 32) : low;
        s_.high[r] = high;
        // A later key that is equal to the k-th is behind topk others.
        if (shrinks) s_.threshold[r] = static_cast<uint32_t>(least >> 32) + 1;
      }
      if (!is_last) return;
      chunk.count = 0;
    }
    const int32_t in_list = is_first ? 0 : count;
    if (work.is_whole) {
      // Columns are put in order where no candidates lie.
      team.stage_in(is_first ? static_cast<void*>(list(r)) : keys(r));
      const IndexAnswer answer{p_, unit.first_row + r, unit.rows[r]};
      emit_from(team, answer, RowCandidates{{list(r), in_list}, chunk}, least,
                {0, count, unit.begin, answer.where.end},
                [&](const IndexRow& where, int32_t c) { return args_.slot(where, c); });
      emit_end(team, p_, answer.row, count);
      return;
    }
    uint64_t* left = work.is_earlier ? args_.earlier(blockIdx.x, r) : args_.list(blockIdx.x, r);
    team.sync();
    if (team.thread() == 0) {
      team.scalars().kept = in_list;
      s_.count[r] = count;
    }
    for (int32_t j = team.thread(); j < in_list; j += team.threads()) left[j] = list(r)[j];
    team.sync();
    append_from(team, least, chunk, left);
  }

  const ScanArgs& scan_;
  const IndexTopkArgs& args_;
  const IndexTopkParams& p_;
  const Memory memory_;
  ScanShared& s_;
};

}  // namespace mla_fp8::gpu::sm90_index
