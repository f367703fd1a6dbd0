#pragma once
// The memory that kernels may touch: what PyTorch's CPU allocator has handed out, and a launch's own.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

class Allocations {
 public:
  struct Range {
    uintptr_t begin = 0, end = 0;
    bool has(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
  };
  // The ranges of one moment, in order.
  class Snapshot {
   public:
    explicit Snapshot(std::vector<Range> ranges);
    // The range that ends after `address` first: the one that holds it, if any does.
    const Range* after(uintptr_t address) const;
    // How far an address is from the nearest range, for a message.
    const Range* nearest(uintptr_t address) const;

   private:
    std::vector<Range> ranges_;
  };

  // From here on PyTorch allocates CPU memory through this. Tensors that exist already are not known.
  static void watch();
  static std::vector<Range> live();
};

}  // namespace emulator
