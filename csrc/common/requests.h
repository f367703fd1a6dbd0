#pragma once
// Queries of several requests, one after another.
#include <cstdint>

#include "common/macros.h"

namespace mla_fp8 {

// The request that holds query `token`, or -1. In a query_start_loc that decreases, some request whose range
// holds the token, or -1: always the same, as the search does not depend on other rows.
MLA_HD int64_t find_request(const int32_t* query_start_loc, int64_t num_requests, int64_t token) {
  const int64_t target = token + query_start_loc[0];
  int64_t low = 0, high = num_requests;  // query_start_loc[low] <= target
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (query_start_loc[middle] <= target ? low : high) = middle;
  }
  return num_requests > 0 && target < query_start_loc[low + 1] ? low : -1;
}

}  // namespace mla_fp8
