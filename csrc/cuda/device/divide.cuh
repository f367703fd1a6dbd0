#pragma once
// Division by a number known at launch: a multiplication in place of an instruction sequence.
#include <cstdint>

#include "cuda/device/platform.cuh"

namespace mla_fp8::gpu {

// n / divisor for n >= 0, exact while n * divisor < 2^64. The quotient is n * magic / 2^64 with magic =
// ceil(2^64 / divisor), which exceeds 2^64 / divisor by less than 1.
class Divider {
 public:
  explicit Divider(int64_t divisor)
      : divisor_(divisor), magic_(divisor == 1 ? 0 : ~uint64_t{0} / divisor + 1) {}
  __device__ int64_t divisor() const { return divisor_; }
  __device__ __forceinline__ int64_t operator()(int64_t n) const {
    return magic_ == 0 ? n : static_cast<int64_t>(__umul64hi(n, magic_));  // 2^64 / 1 does not fit
  }
  __device__ __forceinline__ uint32_t word(uint32_t n) const {
    return magic_ == 0 ? n : static_cast<uint32_t>(__umul64hi(n, magic_));
  }

 private:
  int64_t divisor_;
  uint64_t magic_;
};

}  // namespace mla_fp8::gpu
