#pragma once
// Queries of several requests, one after another.
#include <cstdint>

#include "common/macros.h"

namespace mla_fp8 {

// Narrows [low, high) by bisection until it has at most `size` elements, of which the last that has started
// is one.
template <class Index, class HasStarted>
MLA_HD void bisect(Index& low, Index& high, Index size, const HasStarted& has_started) {
  while (high - low > size) {
    const Index middle = (low + high) / 2;
    (has_started(middle) ? low : high) = middle;
  }
}

// The request that holds query `token`, or -1. In a query_start_loc that decreases, some request whose range
// holds the token, or -1: always the same, as the search does not depend on other rows.
MLA_HD int64_t find_request(const int32_t* query_start_loc, int64_t num_requests, int64_t token) {
  const int64_t target = token + query_start_loc[0];
  int64_t low = 0, high = num_requests;
  bisect(low, high, int64_t{1}, [&](int64_t r) { return query_start_loc[r] <= target; });
  return num_requests > 0 && target < query_start_loc[low + 1] ? low : -1;
}

}  // namespace mla_fp8
