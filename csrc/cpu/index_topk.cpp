// index_logits and index_topk on the CPU; index_topk also publishes blocks and chooses among them. Rows of
// one request go over its keys together, which are widened once a tile for all of them. A row has a list of
// at most twice topk entries. When it is full, the best topk stay, and only larger keys join from then on:
// equal ones lose, as columns ascend. Memory grows with rows and topk, and for blocks with what a group of
// rows sees. The order is total, so the result is one, however keys are split among threads.
#include "ops/index_topk.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "common/parallel.h"
#include "cpu/isa.h"

namespace mla_fp8::cpu {
namespace {

constexpr int kGroupRows = 8;

// Neighbouring rows of a request, and columns that any of them sees; or (is_listed) a row with its blocks.
struct Group {
  int64_t first, request;
  int num_rows;
  int32_t begin, end;
  IndexRow rows[kGroupRows];
  bool is_listed = false;
  std::vector<int32_t> blocks;  // if is_listed: the blocks that the row sees, ascending

  int64_t num_columns() const {
    if (!is_listed) return end - begin;
    const auto all = static_cast<int64_t>(blocks.size()) * IndexList::kBlock;
    return blocks.empty() ? 0 : all - std::max((blocks.back() + 1) * IndexList::kBlock - (end - begin), 0);
  }
  int64_t num_tiles() const { return ceil_div<int64_t>(num_columns(), kIndexTile); }
  // Writes the columns of a tile, ascending, and returns their number.
  int columns(int64_t tile, int32_t (&to)[kIndexTile]) const {
    const int64_t first = tile * kIndexTile;
    const int count = static_cast<int>(std::min<int64_t>(kIndexTile, num_columns() - first));
    for (int j = 0; j < count; ++j) {
      const auto i = static_cast<int32_t>(first) + j;
      to[j] =
          begin + (is_listed ? blocks[i / IndexList::kBlock] * IndexList::kBlock + i % IndexList::kBlock : i);
    }
    return count;
  }
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
// The groups of rows that choose among blocks, one row each.
std::vector<Group> listed_rows(const IndexTopkParams& p) {
  const IndexRows& rows = p.problem.rows;
  std::vector<Group> groups(rows.num_rows);
  parallel_for(rows.num_rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const IndexRow row = rows[r];
      Group& group = groups[r] = {r, row.request, 1, row.begin, row.end, {row}, true};
      const int64_t list = p.candidates_are_of_rows ? r : row.request;
      if (list < 0) continue;
      const int32_t* from = p.candidates + list * p.candidates_stride;
      const int32_t seen = ceil_div(row.end - row.begin, IndexList::kBlock);
      std::copy_if(from, from + p.num_candidates, std::back_inserter(group.blocks),
                   [&](int32_t block) { return block >= 0 && block < seen; });
      std::sort(group.blocks.begin(), group.blocks.end());
      group.blocks.erase(std::unique(group.blocks.begin(), group.blocks.end()), group.blocks.end());
    }
  });
  return groups;
}

// Computes logits for a thread.
class Scanner {
 public:
  explicit Scanner(const IndexProblem& problem) : problem_(problem), isa_(best_isa()), memory_(new Memory) {}

  void stage(const Group& group) {
    for (int i = 0; i < group.num_rows; ++i)
      isa_.stage_index_query(problem_.queries, group.first + i, memory_->queries[i]);
  }
  void stage_keys(int64_t request, const int32_t* columns, int count) {
    isa_.stage_index_keys(problem_.keys, request, columns, count, memory_->keys);
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
    int32_t columns[kIndexTile];
    std::iota(columns, columns + count, static_cast<int32_t>(c));
    scanner.stage_keys(group.request, columns, count);
    for (int i = 0; i < group.num_rows; ++i) {
      const IndexRow& row = group.rows[i];
      if (c >= row.end || c + count <= row.begin) continue;
      const float* logits = scanner.logits(i);
      for (int j = 0; j < count; ++j)
        if (c + j >= row.begin && c + j < row.end && scanner.present(j)) out(i)[c + j] = logits[j];
    }
  }
}

// The best of what a row has seen so far, by order_of.
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

// Writes the logits of what was chosen.
void write_scores(const IndexTopkParams& p, int64_t row, Scanner& scanner) {
  const int32_t *positions = p.positions + row * p.positions_stride_row, count = p.lens[row];
  float* scores = p.scores + row * p.scores_stride_row;
  const IndexRow where = p.problem.rows[row];
  scanner.stage({row, where.request, 1, where.begin, where.end, {where}});
  for (int32_t first = 0; first < count; first += kIndexTile) {
    int32_t columns[kIndexTile];
    const int here = std::min(kIndexTile, count - first);
    for (int j = 0; j < here; ++j) columns[j] = where.begin + positions[first + j];
    scanner.stage_keys(where.request, columns, here);
    std::copy_n(scanner.logits(0), here, scores + first);
  }
  std::fill(scores + count, scores + p.topk, -std::numeric_limits<float>::infinity());
}

// The largest keys of a row's blocks, from the first one that a task sees.
class BlockKeys {
 public:
  void reset(const IndexRow& row, int32_t first_column, int32_t last_column) {
    const int32_t first = std::max(first_column - row.begin, 0),
                  last = std::min(last_column, row.end) - row.begin;
    first_ = first / IndexList::kBlock;
    keys_.assign(std::max(ceil_div(last, IndexList::kBlock) - first_, 0), 0);
  }
  void add(uint32_t key, int32_t position) {
    uint32_t& most = keys_[position / IndexList::kBlock - first_];
    most = std::max(most, key);
  }
  // Adds the keys of another part of the row.
  void add_all(const BlockKeys& other) {
    for (size_t i = 0; i < other.keys_.size(); ++i) {
      uint32_t& most = keys_[other.first_ + i - first_];
      most = std::max(most, other.keys_[i]);
    }
  }
  // Publishes the best blocks: always the newest entry's, others only if one of their logits is above -inf.
  void publish(const IndexTopkParams& p, int64_t row, Candidates& candidates) {
    candidates.reset(p.num_blocks);
    for (size_t i = 0; i < keys_.size(); ++i) {
      const bool is_newest = i + 1 == keys_.size();
      if (is_newest || keys_[i] >= kLeastBlockKey)
        candidates.add(is_newest ? kPinnedKey : keys_[i], static_cast<int32_t>(i));
      candidates.shrink_if_full();
    }
    const std::vector<uint64_t>& best = candidates.best();
    int32_t* blocks = p.blocks + row * p.blocks_stride_row;
    std::transform(best.begin(), best.end(), blocks, [](uint64_t order) { return column_of(order); });
    std::sort(blocks, blocks + best.size());
    std::fill(blocks + best.size(), blocks + p.num_blocks, -1);
  }

 private:
  int32_t first_ = 0;
  std::vector<uint32_t> keys_;
};

// A part of the tiles of a group's keys.
struct Task {
  int64_t group, first_tile, num_tiles;
  bool is_whole;
  std::vector<uint64_t> best[kGroupRows];  // if not is_whole
  BlockKeys block_keys[kGroupRows];
};

void scan(const IndexTopkParams& p, const Group& group, Task& task, Scanner& scanner,
          std::vector<Candidates>& candidates) {
  for (int i = 0; i < group.num_rows; ++i) {
    candidates[i].reset(p.topk);
    if (p.blocks) {
      const auto first = static_cast<int32_t>(group.begin + task.first_tile * kIndexTile);
      task.block_keys[i].reset(group.rows[i], first,
                               first + static_cast<int32_t>(task.num_tiles) * kIndexTile);
    }
  }
  if (task.num_tiles > 0) scanner.stage(group);
  for (int64_t tile = task.first_tile; tile < task.first_tile + task.num_tiles; ++tile) {
    int32_t columns[kIndexTile];
    const int count = group.columns(tile, columns);
    scanner.stage_keys(group.request, columns, count);
    for (int i = 0; i < group.num_rows; ++i) {
      const IndexRow& row = group.rows[i];
      if (columns[0] >= row.end || columns[count - 1] < row.begin) continue;
      const float* logits = scanner.logits(i);
      for (int j = 0; j < count; ++j) {
        const int32_t column = columns[j];
        if (!scanner.present(j) || column < row.begin || column >= row.end) continue;
        const uint32_t key = order_key(logits[j]);
        candidates[i].add(p.is_pinned(group.first + i, row, column) ? kPinnedKey : key, column);
        if (p.blocks) task.block_keys[i].add(key, column - row.begin);
      }
      candidates[i].shrink_if_full();
    }
  }
  for (int i = 0; i < group.num_rows; ++i) {
    if (!task.is_whole) {
      task.best[i] = candidates[i].best();
      continue;
    }
    emit(p, group.first + i, group.rows[i], candidates[i].best());
    if (p.blocks) task.block_keys[i].publish(p, group.first + i, candidates[i]);
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
  const std::vector<Group> groups = p.has_candidates ? listed_rows(p) : group_rows(p.problem.rows);
  int64_t total = 0;
  for (const Group& group : groups) total += group.num_tiles();
  const int64_t share = std::max(kMinTiles, ceil_div<int64_t>(total, kTasksPerThread * num_threads()));
  std::vector<Task> tasks;
  std::vector<size_t> first_task;  // of each group, and the number of tasks
  for (size_t g = 0; g < groups.size(); ++g) {
    first_task.push_back(tasks.size());
    const int64_t tiles = groups[g].num_tiles(), parts = std::max<int64_t>(1, ceil_div(tiles, share));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = tiles * part / parts, last = tiles * (part + 1) / parts;
      tasks.push_back({static_cast<int64_t>(g), first, last - first, parts == 1, {}, {}});
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
        const int64_t row = groups[g].first + i;
        emit(p, row, groups[g].rows[i], candidates.best());
        if (!p.blocks) continue;
        BlockKeys all;
        all.reset(groups[g].rows[i], groups[g].begin, groups[g].end);
        for (size_t t = first_task[g]; t < first_task[g + 1]; ++t) all.add_all(tasks[t].block_keys[i]);
        all.publish(p, row, candidates);
      }
    }
  });
  if (!p.scores) return;
  parallel_for(p.problem.rows.num_rows, 1, [&](int64_t begin, int64_t end) {
    Scanner scanner(p.problem);
    for (int64_t row = begin; row < end; ++row) write_scores(p, row, scanner);
  });
}

}  // namespace mla_fp8::cpu
