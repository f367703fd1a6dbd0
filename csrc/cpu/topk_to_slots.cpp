// topk_to_slots on the CPU: one pass over a row's positions.
#include "ops/topk_to_slots.h"

#include <algorithm>
#include <bit>

#include "common/parallel.h"

namespace mla_fp8::cpu {

namespace {

template <class FindPage>
void convert_rows(const TopkToSlotsParams& p, int64_t begin, int64_t end, const FindPage& find_page) {
  for (int64_t r = begin; r < end; ++r) {
    const int32_t* positions = p.positions + r * p.positions_stride_row;
    const TopkToSlotsRow row = topk_to_slots_row(p, r, [&] {
      int64_t count = p.topk;
      while (count > 0 && positions[count - 1] < 0) --count;
      return count;
    });
    int32_t* out = p.out_slots + r * p.out_slots_stride_row;
    const auto find_turn = [&](int64_t number) { return number / p.turn(); };
    const auto put = [&](int64_t token) {
      const int32_t slot = token_slot(p, row.request, token, find_page, find_turn);
      if (!p.is_packed() || slot >= 0) *out++ = slot;
    };
    if (p.group_size == 1) {
      for (int64_t g = 0; g < row.num_groups; ++g) put(positions[g]);
    } else {
      for (int64_t g = 0; g < row.num_groups; ++g)
        for (int64_t i = 0; i < p.group_size; ++i)
          put(positions[g] < 0 ? -1 : positions[g] * p.group_size + i);
    }
    for (int64_t i = 0; i < row.num_tail; ++i) put(row.tail + i);
    int32_t* first = p.out_slots + r * p.out_slots_stride_row;
    p.out_lens[r] = static_cast<int32_t>(out - first);
    std::fill(out, first + p.width, -1);
  }
}

}  // namespace

void topk_to_slots(const TopkToSlotsParams& p) {
  constexpr int64_t kGrain = 16;  // rows a thread takes at least
  parallel_for(p.num_rows, kGrain, [&](int64_t begin, int64_t end) {
    const auto page_size = static_cast<uint64_t>(p.page_size);
    if (std::has_single_bit(page_size)) {  // the division is half of the time
      const int bits = std::countr_zero(page_size);
      convert_rows(p, begin, end, [&](int64_t token) { return token >> bits; });
    } else {
      convert_rows(p, begin, end, [&](int64_t token) { return token / p.page_size; });
    }
  });
}

}  // namespace mla_fp8::cpu
