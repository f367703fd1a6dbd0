#pragma once
#include <cstdint>

#include "common/macros.h"
#include "common/stream.h"

namespace mla_fp8 {

// Slots of a hot buffer that hold one of these entries hold none afterwards.
struct ForgetRowsParams {
  int64_t num_entries, num_states, num_hot, num_requests;
  const void* entries;  // [num_entries]
  bool entries_are_int64;
  const int32_t* row_to_request;  // [num_entries] or null: entries are forgotten in every state
  const int32_t* state_rows;      // [num_requests] or null: a request's number is its state's
  int32_t* hot_entries;           // [num_states, num_hot]
  int64_t hot_entries_stride;

  // Entry i, or -1 if it is none.
  MLA_HD int64_t entry(int64_t i) const {
    const int64_t e = entries_are_int64 ? static_cast<const int64_t*>(entries)[i]
                                        : int64_t{static_cast<const int32_t*>(entries)[i]};
    return e < 0 || e > INT32_MAX ? -1 : e;
  }
  // The state of entry i's request, or -1.
  MLA_HD int64_t state(int64_t i) const {
    const int64_t request = row_to_request[i];
    if (request < 0 || request >= num_requests) return -1;
    const int64_t state = state_rows ? int64_t{state_rows[request]} : request;
    return state < 0 || state >= num_states ? -1 : state;
  }
};

namespace cpu {
void forget_rows(const ForgetRowsParams& params);
}
namespace gpu {
void forget_rows(const ForgetRowsParams& params, gpuStream_t stream);
}

}  // namespace mla_fp8
