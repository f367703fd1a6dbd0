#pragma once
// What the programs for compute-sanitizer share. They do without torch, whose start alone takes a sanitizer
// 20 seconds.
#include <cuda_runtime.h>

#include <vector>

#include "cuda/device/launch.cuh"

namespace mla_fp8::gpu {

// Every array of a case is an allocation of its own, which memcheck can tell from its neighbours.
class Device {
 public:
  ~Device() {
    for (void* p : allocations_) cudaFree(p);
  }
  template <class T>
  T* upload(const std::vector<T>& values) {
    void* p = nullptr;
    check(cudaMalloc(&p, values.size() * sizeof(T) + (values.empty() ? 1 : 0)), "cudaMalloc");
    allocations_.push_back(p);
    check(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return static_cast<T*>(p);
  }

 private:
  std::vector<void*> allocations_;
};

template <class T>
std::vector<T> download(const T* p, size_t size) {
  std::vector<T> values(size);
  check(cudaMemcpy(values.data(), p, size * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

}  // namespace mla_fp8::gpu
