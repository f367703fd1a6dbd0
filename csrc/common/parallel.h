#pragma once
// Splits [0, n) over the caller's CPU threads. The libraries use torch's pool (parallel.cpp), the test module
// runs serially; kernels know neither.
#include <cstdint>

namespace mla_fp8 {

using RangeFn = void (*)(const void* context, int64_t begin, int64_t end);
void parallel_for_impl(int64_t n, int64_t grain, RangeFn fn, const void* context);
int num_threads();

// Calls fn(begin, end) on disjoint ranges of at least `grain` items. fn must not throw.
template <class Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  if (n <= grain) return n > 0 ? fn(int64_t{0}, n) : void();
  const auto call = [](const void* context, int64_t begin, int64_t end) {
    (*static_cast<const Fn*>(context))(begin, end);
  };
  parallel_for_impl(n, grain, call, &fn);
}

}  // namespace mla_fp8
