// index_topk against a sort of index_logits of the same device, for compute-sanitizer: both kernels, few CTAs
// with long shares whose lists shrink, many with parts that are merged, pages of any size, absent pages,
// pins, candidate blocks and published ones.
//   sanitize_index [FIRST STEP]   cases FIRST, FIRST + STEP, ...: several processes share them
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "common/index_layout.h"
#include "ops/index_topk.h"
#include "sanitizers/sanitize.h"

namespace mla_fp8::gpu {
namespace {

constexpr int kPages = 37;  // whose bytes all requests share
constexpr uint8_t kPoison = 0xa5;

struct Case {
  const char* name;
  int heads, requests, next_n, entries, page_size, topk, ctas;
  bool is_fp4 = false, is_equal = false, is_ragged = false;
  int pin_first = 0, pin_last = 0;
  int candidates = 0, blocks = 0;  // of a list of each row; that are published
};
constexpr Case kCases[] = {
    {"one tile", 64, 1, 1, 200, 64, 64, 4},
    {"nothing to choose", 64, 2, 1, 100, 64, 128, 4},
    {"parts of a row", 64, 1, 1, 3000, 64, 512, 12},
    {"parts of drafts", 64, 2, 3, 1500, 64, 300, 5},
    {"six drafts, a list that shrinks", 64, 1, 6, 9000, 64, 128, 2},
    {"a list that shrinks often", 64, 1, 1, 24000, 64, 2048, 1},
    {"equal logits", 64, 2, 2, 9000, 64, 700, 3, false, true},
    {"32 heads", 32, 2, 4, 5000, 64, 256, 3},
    {"9 heads", 9, 3, 2, 900, 64, 100, 5},
    {"pages of 16", 64, 2, 2, 900, 16, 100, 4},
    {"pages of 5", 64, 2, 1, 600, 5, 100, 4},
    {"pages of 128", 40, 2, 2, 900, 128, 100, 4},
    {"pins", 64, 2, 1, 1500, 64, 200, 4, false, false, false, 16, 100},
    {"gathered keys", 64, 1, 5, 1800, 1800, 200, 4, false, false, true},
    {"e2m1", 64, 2, 2, 1500, 64, 200, 4, true},
    {"e2m1, a list that shrinks", 64, 1, 1, 12000, 64, 512, 1, true},
    {"e2m1, six drafts", 64, 1, 6, 3000, 64, 128, 2, true},
    {"e2m1, pages of 16", 64, 1, 1, 900, 16, 100, 2, true},
    {"32 heads, steps of two tiles", 32, 1, 2, 12000, 64, 512, 1},
    {"gathered keys, one row", 64, 1, 1, 1801, 1801, 200, 2, false, false, true},
    {"long rows, whose keys are counted", 64, 2, 1, 66000, 64, 2048, 7},
    {"a rehearsal by who has no share", 64, 1, 1, 700, 64, 200, 6},
    {"kept keys of a cluster", 64, 1, 1, 24000, 64, 2048, 8},
    {"kept keys of a cluster, equal logits", 64, 1, 1, 24000, 64, 700, 8, false, true},
    {"kept keys of many short rows", 16, 1, 280, 700, 64, 100, 67},
    {"kept keys of many rows", 16, 1, 280, 4700, 64, 100, 67},
    {"candidates", 32, 2, 1, 3000, 64, 100, 0, false, false, false, 0, 0, 200},
    {"candidates of drafts", 32, 2, 3, 3000, 64, 100, 0, false, false, false, 3, 9, 150},
    {"candidates of 64 heads", 64, 1, 4, 3000, 64, 100, 0, false, false, false, 0, 0, 150},
    {"candidates, e2m1", 32, 2, 2, 3000, 64, 100, 0, true, false, false, 0, 0, 150},
    {"candidates, pages of 5", 32, 2, 2, 600, 5, 100, 0, false, false, false, 0, 0, 60},
    {"candidates among gathered keys", 32, 1, 9, 2000, 2000, 100, 0, false, false, true, 0, 0, 150},
    {"blocks", 32, 2, 2, 5000, 64, 100, 0, false, false, false, 0, 0, 0, 100},
    {"blocks of gathered keys", 32, 1, 9, 2000, 2000, 100, 0, false, false, true, 0, 0, 0, 60},
};

class Run {
 public:
  explicit Run(const Case& c) : case_(c), rows_(c.requests * c.next_n), random_(c.entries + c.heads) {}

  bool run() {
    const IndexProblem problem = make_problem();
    std::vector<float> poison_floats(size_t(rows_) * case_.entries, NAN);
    float* logits = device_.upload(poison_floats);
    index_logits({problem, case_.entries, logits, case_.entries}, nullptr);
    const size_t places = size_t(rows_) * case_.topk;
    IndexTopkParams p{.problem = problem, .topk = case_.topk};
    p.pin_first = case_.pin_first, p.pin_last = case_.pin_last;
    p.slot_page_table = problem.keys.page_table;
    p.slot_page_table_stride_request = problem.keys.page_table_stride_request;
    p.slot_max_pages = pages_of_request(), p.slot_page_size = case_.page_size;
    p.positions = device_.upload(std::vector<int32_t>(places, -7));
    p.slots = device_.upload(std::vector<int32_t>(places, -7));
    p.positions_stride_row = p.slots_stride_row = case_.topk;
    p.lens = device_.upload(std::vector<int32_t>(rows_, -7));
    for (int i = 0; i < rows_ * case_.candidates; ++i)
      candidates_.push_back(static_cast<int32_t>(random_() % (case_.entries / 4)) - 3);
    p.has_candidates = p.candidates_are_of_rows = case_.candidates > 0;
    p.candidates = device_.upload(candidates_);
    p.candidates_stride = p.num_candidates = case_.candidates;
    p.num_blocks = case_.blocks;
    if (case_.blocks > 0) p.blocks = device_.upload(std::vector<int32_t>(size_t(rows_) * case_.blocks, -7));
    p.blocks_stride_row = case_.blocks;
    const int64_t bytes = case_.ctas > 0 ? index_topk_workspace(rows_, case_.topk, case_.ctas)
                                         : index_topk_workspace(p, index_topk_ctas());
    p.workspace = device_.upload(std::vector<uint8_t>(bytes, kPoison));
    p.workspace_bytes = bytes;
    index_topk(p, nullptr);
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const std::vector<float> scores = download(logits, size_t(rows_) * case_.entries);
    const bool right =
        is_right(scores, download(p.positions, places), download(p.slots, places), download(p.lens, rows_)) &&
        (p.blocks == nullptr || are_published(scores, download(p.blocks, size_t(rows_) * case_.blocks)));
    std::printf("%s %s\n", right ? "ok   " : "WRONG", case_.name);
    std::fflush(stdout);
    return right;
  }

 private:
  int pages_of_request() const { return (case_.entries + case_.page_size - 1) / case_.page_size; }

  std::vector<uint8_t> random_bytes(size_t size, uint8_t mask) {
    std::vector<uint8_t> bytes(size);
    for (uint8_t& x : bytes) x = static_cast<uint8_t>(random_()) & mask;
    return bytes;
  }

  IndexProblem make_problem() {
    const IndexLayout layout =
        index_layout(case_.is_fp4 ? IndexLayoutId::kIndexFp4 : IndexLayoutId::kIndexFp8);
    const int pages = case_.is_ragged ? 1 : kPages;
    const int64_t page_bytes = layout.page_bytes(case_.page_size), stride = (page_bytes + 15) / 16 * 16;
    std::vector<uint8_t> pool = random_bytes(pages * stride, case_.is_fp4 ? 0xff : 0xbf);  // no NaN
    for (int i = 0; i < pages; ++i)
      for (int row = 0; row < case_.page_size; ++row) {
        uint8_t* scale = &pool[i * stride + layout.scale_offset(row, case_.page_size)];
        const float value = case_.is_equal ? 1.0f : 0.5f + float(random_() % 1000) / 1000;
        if (case_.is_fp4) std::memset(scale, 127, 4);
        else std::memcpy(scale, &value, 4);
        if (case_.is_equal)
          std::memset(&pool[i * stride + layout.value_offset(row)], 0x38, layout.value_bytes);
      }
    for (int r = 0; r < case_.requests; ++r)
      for (int i = 0; i < pages_of_request(); ++i) {
        constexpr int32_t kAbsent[] = {-1, INT_MIN, INT_MAX, kPages};
        table_.push_back(random_() % 9 ? static_cast<int32_t>(random_() % kPages) : kAbsent[random_() % 4]);
      }
    for (int row = 0; row < rows_; ++row) begins_.push_back(case_.is_ragged ? 3 * row : 0);
    for (int row = 0; row < rows_; ++row)
      ends_.push_back(case_.entries - (case_.is_ragged ? row : case_.next_n - 1 - row % case_.next_n));

    IndexProblem problem{};
    problem.queries = {.num_rows = rows_,
                       .num_heads = case_.heads,
                       .q = device_.upload(random_bytes(size_t(rows_) * case_.heads * kIndexDim, 0xbf)),
                       .q_stride_row = int64_t{case_.heads} * kIndexDim};
    std::vector<float> weights(size_t(rows_) * case_.heads);
    for (float& x : weights) x = float(random_() % 2000) / 1000 - (case_.is_equal ? 0 : 1);
    problem.queries.weights = device_.upload(weights);
    problem.queries.weights_stride_row = case_.heads;
    uint8_t* values = device_.upload(pool);
    problem.keys = {.layout = case_.is_fp4 ? IndexLayoutId::kIndexFp4 : IndexLayoutId::kIndexFp8,
                    .values = values,
                    .values_stride_page = stride,
                    .values_stride_row = layout.value_bytes,
                    .scales = values + layout.scale_offset(0, case_.page_size),
                    .scales_stride_page = stride,
                    .num_pages = pages,
                    .page_size = case_.page_size};
    problem.rows = {.num_rows = rows_,
                    .num_requests = case_.requests,
                    .next_n = case_.next_n,
                    .compress_ratio = 1,
                    .num_columns = case_.entries};
    if (case_.is_ragged) {
      problem.rows.k_start = device_.upload(begins_);
      problem.rows.k_end = device_.upload(ends_);
    } else {
      problem.keys.page_table = device_.upload(table_);
      problem.keys.page_table_stride_request = pages_of_request();
      problem.rows.num_columns = int64_t{pages_of_request()} * case_.page_size;
      problem.rows.seq_lens = device_.upload(std::vector<int32_t>(case_.requests, case_.entries));
    }
    return problem;
  }

  // The slot of a row's column; -1: absent.
  int32_t slot(int row, int column) const {
    if (case_.is_ragged) return column;
    const int32_t page = table_[row / case_.next_n * pages_of_request() + column / case_.page_size];
    return page < 0 || page >= kPages ? -1 : page * case_.page_size + column % case_.page_size;
  }

  bool is_right(const std::vector<float>& logits, const std::vector<int32_t>& positions,
                const std::vector<int32_t>& slots, const std::vector<int32_t>& lens) const {
    bool right = true;
    for (int row = 0; row < rows_; ++row) {
      const float* own = &logits[size_t(row) * case_.entries];
      const int begin = begins_[row], end = ends_[row];
      std::vector<int32_t> columns;
      for (int c = 0; c < case_.entries; ++c) {
        const bool present = c >= begin && c < end && slot(row, c) >= 0;
        right = right && !std::isnan(own[c]) && (present || own[c] == -INFINITY);
        if (present && is_candidate(row, (c - begin) / IndexList::kBlock)) columns.push_back(c);
      }
      const auto rank = [&](int c) {
        const bool is_pinned = c - begin < case_.pin_first || end - c <= case_.pin_last;
        return is_pinned ? INFINITY : own[c];
      };
      std::stable_sort(columns.begin(), columns.end(), [&](int a, int b) { return rank(a) > rank(b); });
      columns.resize(std::min<size_t>(columns.size(), case_.topk));
      std::sort(columns.begin(), columns.end());
      right = right && lens[row] == static_cast<int32_t>(columns.size());
      for (int i = 0; i < case_.topk; ++i) {
        const size_t at = size_t(row) * case_.topk + i;
        const bool chosen = i < static_cast<int>(columns.size());
        right = right && positions[at] == (chosen ? columns[i] - begin : -1) &&
                slots[at] == (chosen ? slot(row, columns[i]) : -1);
      }
    }
    return right;
  }

  bool is_candidate(int row, int block) const {
    const auto first = candidates_.begin() + row * case_.candidates;
    return case_.candidates == 0 ||
           std::find(first, first + case_.candidates, block) != first + case_.candidates;
  }

  bool are_published(const std::vector<float>& logits, const std::vector<int32_t>& blocks) const {
    bool right = true;
    for (int row = 0; row < rows_; ++row) {
      const int newest = (ends_[row] - begins_[row] - 1) / IndexList::kBlock;
      std::vector<float> best(newest + 1, -INFINITY);
      for (int c = begins_[row]; c < ends_[row]; ++c) {
        float& most = best[(c - begins_[row]) / IndexList::kBlock];
        most = std::max(most, logits[size_t(row) * case_.entries + c]);
      }
      best[newest] = INFINITY;
      std::vector<int32_t> order(newest + 1);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return best[a] > best[b]; });
      order.resize(std::min<size_t>(order.size(), case_.blocks));
      std::erase_if(order, [&](int block) { return best[block] == -INFINITY; });
      std::sort(order.begin(), order.end());
      order.resize(case_.blocks, -1);
      right = right && std::equal(order.begin(), order.end(), blocks.begin() + size_t(row) * case_.blocks);
    }
    return right;
  }

  const Case& case_;
  const int rows_;
  std::mt19937 random_;
  Device device_;
  std::vector<int32_t> table_, begins_, ends_, candidates_;
};

}  // namespace
}  // namespace mla_fp8::gpu

int main(int argc, char** argv) {
  const int first = argc > 1 ? std::atoi(argv[1]) : 0, step = argc > 2 ? std::atoi(argv[2]) : 1;
  bool right = true;
  for (size_t i = first; i < std::size(mla_fp8::gpu::kCases); i += step)
    right = mla_fp8::gpu::Run(mla_fp8::gpu::kCases[i]).run() && right;
  return right ? 0 : 1;
}
