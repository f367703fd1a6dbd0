#pragma once
// The only header that includes torch, and only its stable C ABI: argument checks and launches for ops/.
#include <initializer_list>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "common/dtype.h"
#include "common/kv_layout.h"
#include "common/stream.h"

namespace mla_fp8 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::initializer_list<int64_t>;  // -1 = any size

// One checked tensor argument. Every failed check throws "mla_fp8.op: name must ..., got ...".
class Arg {
 public:
  Arg(const char* op, const char* name, const Tensor& tensor);

  const Arg& same_device_as(const Tensor& other, const char* other_name) const;
  const Arg& dtype(std::initializer_list<ScalarType> any_of) const;
  // Checks a cache's dtype: raw bytes fit any layout, a dtype of numbers must occur in the layout's rows.
  const Arg& cache_of(const char* layout, std::span<const ScalarType> numbers) const;
  const Arg& shape(Shape want) const;
  const Arg& contiguous() const;
  const Arg& last_dim_contiguous() const;
  // Checks that every row (all dimensions but the last) begins at a multiple of `bytes`, for vector accesses.
  const Arg& aligned(int64_t bytes) const;
  // Checks that rows to be written do not overlap: a stride of 0 would make the result depend on timing. Any
  // dimension may be the outer one in memory.
  const Arg& rows_disjoint() const;

  bool is(ScalarType want) const;
  Dtype float_dtype() const;  // after dtype({...}) has passed
  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const { return strides_[d]; }
  // An empty tensor's strides mean nothing: torch.from_numpy makes them 0.
  bool is_empty() const;
  int64_t itemsize() const { return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype_)); }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    std::ostringstream message;
    message << "mla_fp8." << op_ << ": " << name_ << ' ';
    ((message << parts), ...);
    throw std::runtime_error(message.str());
  }
  // Fails for a cache whose pages are not `page_size` rows of `layout`.
  [[noreturn]] void fail_page_shape(int64_t page_elements, int64_t page_size, const char* layout) const;

 private:
  [[noreturn]] void fail_dtype(std::span<const ScalarType> any_of, const std::string& where) const;

  const char *op_, *name_;
  const Tensor& t_;
  // These are read once: every question to a tensor is a call into torch, and such calls bound small ops.
  int64_t dim_;
  int64_t *sizes_, *strides_;
  int32_t dtype_;
};

inline constexpr int64_t kMaxPageSize = int64_t{1} << 24;    // keeps every byte count far from overflow
inline constexpr int64_t kMaxProcessors = int64_t{1} << 16;  // SMs of a GPU that a caller describes

// A paged latent cache after its checks: where it lies in memory.
struct KvCacheView {
  const uint8_t* data;
  int64_t stride_page;  // bytes
  int64_t num_slots;
};

// The checks of one op; `check(tensor, "name")` starts the chain for one argument.
class Check {
 public:
  explicit Check(const char* op) : op_(op) {}
  Arg operator()(const Tensor& t, const char* name) const { return {op_, name, t}; }

  template <class... Parts>
  void that(bool condition, const Parts&... parts) const {
    if (condition) return;
    std::ostringstream message;
    message << "mla_fp8." << op_ << ": ";
    ((message << parts), ...);
    throw std::runtime_error(message.str());
  }
  void at_least(int64_t value, const char* name, int64_t minimum) const {
    that(value >= minimum, name, " must be at least ", minimum, ", got ", value);
  }
  void within(int64_t value, const char* name, int64_t least, int64_t most) const {
    that(value >= least && value <= most, name, " must be in [", least, ", ", most, "], got ", value);
  }
  // Kernels compute in float: a value that is finite as a double need not be finite for them.
  float finite_float(double value, const char* name) const;
  KvLayoutId layout(int64_t layout) const;
  // These check the layouts of the first and the second cache of an attention call.
  KvLayoutId first_layout(int64_t layout) const;
  KvLayoutId extra_layout(int64_t layout, KvLayoutId first) const;
  // `t` is [num_pages, page_bytes], or [num_pages, page_size, (1,) bytes_per_token] as FlashMLA passes it.
  // Its dtype is bytes or numbers that the layout has. The page stride may exceed page_bytes.
  KvCacheView kv_cache(const Tensor& t, const char* name, KvLayoutId layout, int64_t page_size,
                       const char* page_size_name = "page_size") const;
  // Returns the per-layer scale, or null. Uniform FP8 layouts require it, the others refuse it.
  const float* scale(const OptionalTensor& scale, KvLayoutId layout, const Tensor& device_of) const;

 private:
  const char* op_;
};

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
const T* data(const OptionalTensor& t) {
  return t ? data<T>(*t) : nullptr;
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Allocates on the device of `like`. An error says what could not be allocated, and why if torch tells.
Tensor new_empty(const Tensor& like, Shape shape, ScalarType dtype);

#if MLA_FP8_EMULATED  // tests: CPU tensors, no streams
inline gpuStream_t current_stream(const Tensor&) { return nullptr; }
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
};
#elif MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
inline gpuStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<gpuStream_t>(stream);
}
// Makes the device of `t` current while it lives. It makes no guard where none is needed, which is usual:
// torch's guard costs as much as all checks of an op.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) {
    using namespace torch::stable::accelerator;
    if (const auto device = t.get_device_index(); device != getCurrentDeviceIndex()) guard_.emplace(device);
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};
#endif

#if MLA_FP8_WITH_CUDA || MLA_FP8_WITH_HIP
// Runs `op` on the device of `tensor` with `params`, on the caller's stream.
#define MLA_LAUNCH(op, tensor, params)       \
  do {                                       \
    const OnDeviceOf device(tensor);         \
    gpu::op(params, current_stream(tensor)); \
  } while (0)
#else
#define MLA_LAUNCH(op, tensor, params) cpu::op(params)
#endif

}  // namespace mla_fp8
