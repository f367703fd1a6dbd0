#pragma once
// Writes a row's answer in index_topk: the chosen positions, ascending, their slots, and how many they are.
#include "cuda/indexer/select.cuh"

namespace mla_fp8::gpu {

// The row whose answer is written.
struct IndexAnswer {
  const IndexTopkParams& p;
  int64_t row;
  const IndexRow& where;
  bool is_rehearsed = false;  // all is done but writing
};
// The calling team's part of what is chosen, in columns [begin, end). Its answers begin at index `place`.
struct AnswerPart {
  int32_t place, count;
  int64_t begin, end;
};

// Writes the first `count` staged columns and their slots, from index `place` of the answer on.
template <class Team, class Slot>
__device__ __forceinline__ void write_columns(const Team& team, const IndexAnswer& answer, int32_t place,
                                              int32_t count, const Slot& slot) {
  constexpr int kAtOnce = 4;
  const IndexTopkParams& p = answer.p;
  const int threads = team.threads();
  const int32_t written = answer.is_rehearsed ? 0 : count;
  const int32_t* staged = team.staged();
  int32_t* positions = p.positions + answer.row * p.positions_stride_row + place;
  int32_t* slots = p.slots ? p.slots + answer.row * p.slots_stride_row + place : nullptr;
  for (int32_t first = team.thread(); first < count; first += kAtOnce * threads) {
    IndexTopkParams::Place places[kAtOnce];
    int32_t found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      places[j] = p.place(answer.row, answer.where,
                          staged[first + j * threads < count ? first + j * threads : first]);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) found[j] = slots ? slot(answer.where, places[j].column) : 0;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * threads >= written) break;
      positions[first + j * threads] = places[j].position;
      if (slots) slots[first + j * threads] = found[j];
    }
  }
}

// Writes the candidates that are not below `least`, ascending by column: a bitmap of columns sorts them.
template <class Team, class Candidates, class Slot>
__device__ __forceinline__ void emit_from(const Team& team, const IndexAnswer& answer,
                                          const Candidates& candidates, uint64_t least,
                                          const AnswerPart& part, const Slot& slot) {
  constexpr int kWordsPerThread = Team::kBinsPerThread;
  const int threads = team.threads();
  const int64_t window = 32 * int64_t{kWordsPerThread} * threads;
  uint32_t* words = team.bins();
  int32_t* staged = team.staged();
  int32_t written = 0;
  for (int64_t first = part.begin; first < part.end && written < part.count; first += window) {
    const int num_words = static_cast<int>((min(part.end - first, window) + 31) / 32);
    team.sync();
    for (int i = team.thread(); i < num_words; i += threads) words[i] = 0;
    team.sync();
    mark_each(team, candidates, least, first, words, num_words);
    team.sync();
    const int own_words = (num_words + threads - 1) / threads, word = team.thread() * own_words;
    uint32_t bits[kWordsPerThread];
    int32_t own = 0;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i) {
      bits[i] = i < own_words && word + i < num_words ? words[word + i] : 0;
      own += __popc(bits[i]);
    }
    const int32_t last = team_inclusive_sum(team, own);
    int32_t to = written + last - own;
#pragma unroll
    for (int i = 0; i < kWordsPerThread; ++i)
      for (; bits[i]; bits[i] &= bits[i] - 1)
        staged[to++] = static_cast<int32_t>(first) + (word + i) * 32 + 31 - __clz(bits[i] & (0u - bits[i]));
    if (team.thread() == threads - 1) team.scalars().kept = last;
    team.sync();
    written += team.scalars().kept;
  }
  write_columns(team, answer, part.place, part.count, slot);
}

// Fills the answer behind its `count` entries with -1, and writes the count.
template <class Team>
__device__ __forceinline__ void emit_end(const Team& team, const IndexTopkParams& p, int64_t row,
                                         int32_t count) {
  for (int i = count + team.thread(); i < p.topk; i += team.threads()) {
    p.positions[row * p.positions_stride_row + i] = -1;
    if (p.slots) p.slots[row * p.slots_stride_row + i] = -1;
  }
  if (team.thread() == 0) p.lens[row] = count;
}

// Answers a row that sees at most topk entries: all those for which is_there(column).
template <class Team, class IsThere, class Slot>
__device__ __forceinline__ void emit_all(const Team& team, const IndexAnswer& answer, const IsThere& is_there,
                                         const Slot& slot) {
  const IndexTopkParams& p = answer.p;
  const IndexRow& where = answer.where;
  int32_t written = 0;
  for (int32_t first = where.begin; first < where.end; first += team.threads()) {
    const int32_t column = first + team.thread();
    const bool there = column < where.end && is_there(column);
    const int32_t last = team_inclusive_sum(team, there);
    if (there) {
      const int32_t to = written + last - 1;
      const IndexTopkParams::Place place = p.place(answer.row, where, column);
      p.positions[answer.row * p.positions_stride_row + to] = place.position;
      if (p.slots) p.slots[answer.row * p.slots_stride_row + to] = slot(where, place.column);
    }
    if (team.thread() == team.threads() - 1) team.scalars().kept = last;
    team.sync();
    written += team.scalars().kept;
  }
  emit_end(team, p, answer.row, written);
  team.sync();
}

// Answers a row from all of its candidates, `total` of them.
template <class Team, class Candidates, class Slot>
__device__ __forceinline__ void select_and_emit(const Team& team, const IndexAnswer& answer,
                                                const Candidates& candidates, int32_t total,
                                                const Slot& slot) {
  const int32_t topk = answer.p.topk, count = min(total, topk);
  const uint64_t least =
      total > topk ? kth_order(team, candidates, topk, kLeastOrder, ~uint64_t{0}) : kLeastOrder;
  emit_from(team, answer, candidates, least, {0, count, answer.where.begin, answer.where.end}, slot);
  emit_end(team, answer.p, answer.row, count);
}

}  // namespace mla_fp8::gpu
