// forget_rows on the CPU.
#include "ops/forget_rows.h"

#include <algorithm>

namespace mla_fp8::cpu {

void forget_rows(const ForgetRowsParams& p) {
  for (int64_t i = 0; i < p.num_entries; ++i) {
    const int64_t entry = p.entry(i);
    if (entry < 0) continue;
    const auto forget = [&](int64_t state) {
      int32_t* held = p.hot_entries + state * p.hot_entries_stride;
      std::replace(held, held + p.num_hot, static_cast<int32_t>(entry), -1);
    };
    if (p.row_to_request) {
      if (const int64_t state = p.state(i); state >= 0) forget(state);
    } else {
      for (int64_t state = 0; state < p.num_states; ++state) forget(state);
    }
  }
}

}  // namespace mla_fp8::cpu
