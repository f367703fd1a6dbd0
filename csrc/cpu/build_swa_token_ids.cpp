// build_swa_token_ids on the CPU: two dependent loads an id; bound by their latency.
#include "ops/build_swa_token_ids.h"

#include <algorithm>

#include "common/parallel.h"

namespace mla_fp8::cpu {

void build_swa_token_ids(const BuildSwaTokenIdsParams& p) {
  constexpr int64_t kGrain = 512;  // ids a thread takes at least
  int64_t offset = 0;              // exact where p.offsets saturates
  p.offsets[0] = 0;
  for (int64_t r = 0; r < p.num_requests; ++r) {
    const int64_t gather_len = swa_gather_len(p, r), first_pos = p.seq_lens[r] - gather_len;
    const int64_t pool_row = p.req_pool_indices_are_int64
                                 ? static_cast<const int64_t*>(p.req_pool_indices)[r]
                                 : static_cast<const int32_t*>(p.req_pool_indices)[r];
    parallel_for(std::min(gather_len, p.capacity - offset), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) p.ids[offset + j] = swa_token_id(p, pool_row, first_pos + j);
    });
    offset += gather_len;
    p.first_pos[r] = static_cast<int32_t>(first_pos);
    p.gather_lens[r] = static_cast<int32_t>(gather_len);
    p.offsets[r + 1] = static_cast<int32_t>(std::min<int64_t>(offset, INT32_MAX));
  }
  std::fill(p.ids + std::min(offset, p.capacity), p.ids + p.capacity, -1);
}

}  // namespace mla_fp8::cpu
