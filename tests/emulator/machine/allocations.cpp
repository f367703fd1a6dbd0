#include "emulator/machine/allocations.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace emulator {
namespace {

std::mutex mutex;
std::map<uintptr_t, size_t> sizes;  // by address

void release(void* data) {
  {
    const std::lock_guard lock(mutex);
    sizes.erase(reinterpret_cast<uintptr_t>(data));
  }
  c10::free_cpu(data);
}

// PyTorch's own memory, whose sizes are kept. Allocations do not touch: malloc's header lies between them.
class Watching final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    const std::lock_guard lock(mutex);
    if (data) sizes[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

void Allocations::watch() {
  static Watching allocator;
  static const bool once = (c10::SetCPUAllocator(&allocator, 1), true);
  (void)once;
}

std::vector<Allocations::Range> Allocations::live() {
  const std::lock_guard lock(mutex);
  std::vector<Range> ranges;
  ranges.reserve(sizes.size() + 3);
  for (const auto& [begin, size] : sizes) ranges.push_back({begin, begin + size});
  return ranges;
}

Allocations::Snapshot::Snapshot(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
}

const Allocations::Range* Allocations::Snapshot::after(uintptr_t address) const {
  const auto found = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                      [](uintptr_t a, const Range& r) { return a < r.end; });
  return found == ranges_.end() ? nullptr : &*found;
}

const Allocations::Range* Allocations::Snapshot::nearest(uintptr_t address) const {
  const Range* next = after(address);
  const Range* previous =
      next ? (next == ranges_.data() ? nullptr : next - 1) : (ranges_.empty() ? nullptr : &ranges_.back());
  if (!next || !previous) return next ? next : previous;
  return address - previous->end < next->begin - address ? previous : next;
}

}  // namespace emulator
