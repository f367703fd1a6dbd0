#pragma once
// Finds the request of a query where the queries of all requests lie one after another.
#include <cstdint>

#include "common/macros.h"

namespace mla_fp8 {

// Narrows [low, high) by bisection to at most `size` elements. The last element that has started stays in it.
template <class Index, class HasStarted>
MLA_HD void bisect(Index& low, Index& high, Index size, const HasStarted& has_started) {
  while (high - low > size) {
    const Index middle = (low + high) / 2;
    (has_started(middle) ? low : high) = middle;
  }
}

// Returns the request that holds query `token`, or -1. If query_start_loc decreases, it is some request whose
// range holds the token, or -1. The search reads nothing else, so the result is always the same.
MLA_HD int64_t find_request(const int32_t* query_start_loc, int64_t num_requests, int64_t token) {
  const int64_t target = token + query_start_loc[0];
  int64_t low = 0, high = num_requests;
  bisect(low, high, int64_t{1}, [&](int64_t r) { return query_start_loc[r] <= target; });
  return num_requests > 0 && target < query_start_loc[low + 1] ? low : -1;
}

}  // namespace mla_fp8
