// index_logits and index_topk on the CPU. Rows of one request go together over its keys, which are widened
// once per tile for all of them. A row keeps a list of at most twice topk entries; when it is full, the best
// topk stay, and from then on only larger keys get in: equal ones lose, as columns ascend. Memory is in
// proportion to rows and topk, never to the context. The total order leaves one result, so how the keys are
// split among threads does not matter.
#include "ops/index_topk.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "common/parallel.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu {
namespace {

constexpr int kGroupRows = 8;

// Neighbouring rows of a request, and the columns that any of them sees.
struct Group {
  int64_t first, request;
  int num_rows;
  int32_t begin, end;
  IndexRow rows[kGroupRows];

  int64_t num_tiles() const { return ceil_div<int64_t>(end - begin, kIndexTile); }
};

std::vector<Group> group_rows(const IndexRows& rows) {
  std::vector<Group> groups;
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    const IndexRow row = rows[r];
    const Group* last = groups.empty() ? nullptr : &groups.back();
    const bool joins = last && last->request == row.request && last->num_rows < kGroupRows &&
                       row.begin <= last->end && row.end >= last->begin;
    if (!joins) groups.push_back({r, row.request, 0, row.begin, row.end, {}});
    Group& group = groups.back();
    group.begin = std::min(group.begin, row.begin);
    group.end = std::max(group.end, row.end);
    group.rows[group.num_rows++] = row;
  }
  return groups;
}

// What a thread computes logits with.
class Scanner {
 public:
  explicit Scanner(const IndexProblem& problem) : problem_(problem), isa_(best_isa()), memory_(new Memory) {}

  void stage(const Group& group) {
    for (int i = 0; i < group.num_rows; ++i)
      isa_.stage_index_query(problem_.queries, group.first + i, memory_->queries[i]);
  }
  void stage_keys(int64_t request, int64_t first, int count) {
    isa_.stage_index_keys(problem_.keys, request, first, count, memory_->keys);
  }
  const float* logits(int row) {
    isa_.index_tile(memory_->queries[row], memory_->keys, memory_->logits);
    return memory_->logits;
  }
  bool present(int j) const { return memory_->keys.present[j]; }

 private:
  struct Memory {
    StagedIndexQuery queries[kGroupRows];
    StagedIndexKeys keys;
    float logits[kIndexTile];
  };
  const IndexProblem& problem_;
  const IsaKernels& isa_;
  std::unique_ptr<Memory> memory_;
};

void write_logits(const IndexLogitsParams& p, const Group& group, int64_t first, int64_t last,
                  Scanner& scanner) {
  constexpr float kAbsent = -std::numeric_limits<float>::infinity();
  const auto out = [&](int i) { return p.out + (group.first + i) * p.out_stride_row; };
  for (int i = 0; i < group.num_rows; ++i) std::fill(out(i) + first, out(i) + last, kAbsent);
  const int64_t end = std::min<int64_t>(last, group.end);
  if (group.request < 0 || std::max<int64_t>(first, group.begin) >= end) return;
  scanner.stage(group);
  for (int64_t c = std::max<int64_t>(first, group.begin); c < end; c += kIndexTile) {
    const int count = static_cast<int>(std::min<int64_t>(kIndexTile, end - c));
    scanner.stage_keys(group.request, c, count);
    for (int i = 0; i < group.num_rows; ++i) {
      const IndexRow& row = group.rows[i];
      if (c >= row.end || c + count <= row.begin) continue;
      const float* logits = scanner.logits(i);
      for (int j = 0; j < count; ++j)
        if (c + j >= row.begin && c + j < row.end && scanner.present(j)) out(i)[c + j] = logits[j];
    }
  }
}

// The best of what a row has seen, as order_of.
class Candidates {
 public:
  void reset(int topk) {
    topk_ = topk;
    threshold_ = 0;
    entries_.clear();
    entries_.reserve(2 * topk + kIndexTile);
  }
  void add(uint32_t key, int32_t column) {
    if (key >= threshold_) entries_.push_back(order_of(key, column));
  }
  void shrink_if_full() {
    if (static_cast<int64_t>(entries_.size()) < 2 * topk_) return;
    shrink();
    threshold_ = static_cast<uint32_t>(entries_[topk_ - 1] >> 32) + 1;  // kPinnedKey + 1 still fits
  }
  void add_all(const std::vector<uint64_t>& orders) {
    entries_.insert(entries_.end(), orders.begin(), orders.end());
  }
  std::vector<uint64_t>& best() {
    if (static_cast<int64_t>(entries_.size()) > topk_) shrink();
    return entries_;
  }

 private:
  void shrink() {
    std::nth_element(entries_.begin(), entries_.begin() + topk_ - 1, entries_.end(), std::greater<>());
    entries_.resize(topk_);
  }
  int64_t topk_ = 0;
  uint32_t threshold_ = 0;
  std::vector<uint64_t> entries_;
};

void emit(const IndexTopkParams& p, int64_t row, const IndexRow& where, std::vector<uint64_t>& best) {
  int32_t* positions = p.positions + row * p.positions_stride_row;
  const int64_t count = static_cast<int64_t>(best.size());
  for (int64_t i = 0; i < count; ++i) positions[i] = column_of(best[i]);
  std::sort(positions, positions + count);
  if (p.slots) {
    const auto find_page = [&](int64_t column) { return column / p.slot_page_size; };
    int32_t* slots = p.slots + row * p.slots_stride_row;
    for (int64_t i = 0; i < count; ++i) slots[i] = p.slot(where, positions[i], find_page);
    std::fill(slots + count, slots + p.topk, -1);
  }
  for (int64_t i = 0; i < count; ++i) positions[i] -= where.begin;
  std::fill(positions + count, positions + p.topk, -1);
  p.lens[row] = static_cast<int32_t>(count);
}

// Some tiles of a group's keys.
struct Task {
  int64_t group, first_tile, num_tiles;
  bool is_whole;
  std::vector<uint64_t> best[kGroupRows];  // unless is_whole
};

void scan(const IndexTopkParams& p, const Group& group, Task& task, Scanner& scanner,
          std::vector<Candidates>& candidates) {
  for (int i = 0; i < group.num_rows; ++i) candidates[i].reset(p.topk);
  if (task.num_tiles > 0) scanner.stage(group);
  for (int64_t tile = task.first_tile; tile < task.first_tile + task.num_tiles; ++tile) {
    const int32_t first = static_cast<int32_t>(group.begin + tile * kIndexTile);
    const int count = std::min(kIndexTile, group.end - first);
    scanner.stage_keys(group.request, first, count);
    for (int i = 0; i < group.num_rows; ++i) {
      const IndexRow& row = group.rows[i];
      if (first >= row.end || first + count <= row.begin) continue;
      const float* logits = scanner.logits(i);
      for (int j = std::max(0, row.begin - first); j < std::min(count, row.end - first); ++j)
        if (scanner.present(j))
          candidates[i].add(p.is_pinned(row, first + j) ? kPinnedKey : order_key(logits[j]), first + j);
      candidates[i].shrink_if_full();
    }
  }
  for (int i = 0; i < group.num_rows; ++i) {
    if (task.is_whole) emit(p, group.first + i, group.rows[i], candidates[i].best());
    else task.best[i] = candidates[i].best();
  }
}

}  // namespace

void index_logits(const IndexLogitsParams& p) {
  constexpr int64_t kColumns = 1024;  // of a task
  const std::vector<Group> groups = group_rows(p.problem.rows);
  const int64_t pieces = ceil_div(p.width, kColumns);
  parallel_for(static_cast<int64_t>(groups.size()) * pieces, 1, [&](int64_t begin, int64_t end) {
    Scanner scanner(p.problem);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pieces * kColumns;
      write_logits(p, groups[i / pieces], first, std::min(p.width, first + kColumns), scanner);
    }
  });
}

void index_topk(const IndexTopkParams& p) {
  constexpr int64_t kMinTiles = 16, kTasksPerThread = 4;
  const std::vector<Group> groups = group_rows(p.problem.rows);
  int64_t total = 0;
  for (const Group& group : groups) total += group.num_tiles();
  const int64_t share = std::max(kMinTiles, ceil_div<int64_t>(total, kTasksPerThread * num_threads()));
  std::vector<Task> tasks;
  std::vector<size_t> first_task;  // of each group, and the end
  for (size_t g = 0; g < groups.size(); ++g) {
    first_task.push_back(tasks.size());
    const int64_t tiles = groups[g].num_tiles(), parts = std::max<int64_t>(1, ceil_div(tiles, share));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = tiles * part / parts, last = tiles * (part + 1) / parts;
      tasks.push_back({static_cast<int64_t>(g), first, last - first, parts == 1, {}});
    }
  }
  first_task.push_back(tasks.size());
  parallel_for(static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    Scanner scanner(p.problem);
    std::vector<Candidates> candidates(kGroupRows);
    for (int64_t i = begin; i < end; ++i) scan(p, groups[tasks[i].group], tasks[i], scanner, candidates);
  });
  parallel_for(static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end) {
    Candidates candidates;
    for (int64_t g = begin; g < end; ++g) {
      if (tasks[first_task[g]].is_whole) continue;
      for (int i = 0; i < groups[g].num_rows; ++i) {
        candidates.reset(p.topk);
        for (size_t t = first_task[g]; t < first_task[g + 1]; ++t) candidates.add_all(tasks[t].best[i]);
        emit(p, groups[g].first + i, groups[g].rows[i], candidates.best());
      }
    }
  });
}

}  // namespace mla_fp8::cpu
