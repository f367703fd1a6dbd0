// topk_to_slots on the CPU: one pass over a row's positions.
#include "ops/topk_to_slots.h"

#include <algorithm>

#include "common/parallel.h"

namespace mla_fp8::cpu {

void topk_to_slots(const TopkToSlotsParams& p) {
  constexpr int64_t kGrain = 16;  // rows a thread takes at least
  const auto find_page = [&](int64_t token) { return token / p.page_size; };
  parallel_for(p.num_rows, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int32_t* positions = p.positions + r * p.positions_stride_row;
      const TopkToSlotsRow row = topk_to_slots_row(p, r, [&] {
        int64_t count = p.topk;
        while (count > 0 && positions[count - 1] < 0) --count;
        return count;
      });
      int32_t* out = p.out_slots + r * p.out_slots_stride_row;
      for (int64_t g = 0; g < row.num_groups; ++g)
        for (int64_t i = 0; i < p.group_size; ++i)
          *out++ =
              positions[g] < 0 ? -1 : token_slot(p, row.request, positions[g] * p.group_size + i, find_page);
      for (int64_t i = 0; i < row.num_tail; ++i) *out++ = token_slot(p, row.request, row.tail + i, find_page);
      std::fill(out, p.out_slots + r * p.out_slots_stride_row + p.width, -1);
      p.out_lens[r] = static_cast<int32_t>(row.length(p.group_size));
    }
  });
}

}  // namespace mla_fp8::cpu
