// merge_topk on the CPU: for each row, the best topk of its candidates in one array, then sorted.
#include "ops/merge_topk.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "common/parallel.h"

namespace mla_fp8::cpu {

void merge_topk(const MergeTopkParams& p) {
  parallel_for(p.num_rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> orders;
    for (int64_t row = begin; row < end; ++row) {
      orders.clear();
      for (int64_t list = 0, i = 0; list < p.num_lists; ++list)
        for (int64_t place = 0; place < p.per_list; ++place, ++i)
          if (const uint64_t order = p.order(row, i, list, place); order != 0) orders.push_back(order);
      if (static_cast<int64_t>(orders.size()) > p.topk) {
        std::nth_element(orders.begin(), orders.begin() + p.topk - 1, orders.end(), std::greater<>());
        orders.resize(p.topk);
      }
      int32_t *out = p.out_positions + row * p.out_positions_stride_row, *last = out;
      for (const uint64_t order : orders)
        if (const int32_t position = p.answer(row, order); position >= 0) *last++ = position;
      std::sort(out, last);
      std::fill(last, out + p.topk, -1);
      p.out_lens[row] = static_cast<int32_t>(last - out);
    }
  });
}

}  // namespace mla_fp8::cpu
