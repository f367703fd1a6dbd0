#include "common/torch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <vector>

namespace mla_fp8 {
namespace {

template <class Dims>
std::string shape_string(const Dims& dims) {
  std::ostringstream out;
  const char* separator = "[";
  for (int64_t d : dims) {
    out << std::exchange(separator, ", ");
    d < 0 ? out << '*' : out << d;
  }
  out << (dims.size() ? "]" : "[]");
  return out.str();
}

constexpr size_t kMaxDims = 4;  // the most dimensions that an op allocates

int32_t code_of(ScalarType dtype) {
  // The C API of the oldest torch has no function for these two dtypes: their codes are torch's own numbers.
  if (dtype == ScalarType::Float8_e8m0fnu || dtype == ScalarType::Float4_e2m1fn_x2)
    return static_cast<int32_t>(dtype);
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
}

// scalar_type() throws on dtypes newer than the target torch, so dtypes are compared as raw codes.
int32_t dtype_code(const Tensor& t) {
  int32_t code = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return code;
}

// Returns the name in Python: "torch.int32".
std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Byte: return "torch.uint8";
    case ScalarType::Char: return "torch.int8";
    case ScalarType::Short: return "torch.int16";
    case ScalarType::Int: return "torch.int32";
    case ScalarType::Long: return "torch.int64";
    case ScalarType::Half: return "torch.float16";
    case ScalarType::Float: return "torch.float32";
    case ScalarType::Double: return "torch.float64";
    case ScalarType::ComplexHalf: return "torch.complex32";
    case ScalarType::ComplexFloat: return "torch.complex64";
    case ScalarType::ComplexDouble: return "torch.complex128";
    default: break;  // the rest have one name in both languages, but for capitals
  }
  std::string name = toString(dtype);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return "torch." + name;
}

std::string dtype_string(const Tensor& t) {
  try {
    return dtype_name(t.scalar_type());
  } catch (const std::exception&) { return dtype_name(static_cast<ScalarType>(dtype_code(t))); }
}

std::string device_string(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// Returns why torch failed last in this thread. torch before 2.13 lacks the function, and has printed the
// reason.
std::string torch_error() {
  using What = const char*();
  static What* const what =
      reinterpret_cast<What*>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  return what ? what() : "torch printed the reason to stderr";
}

constexpr Format kFormats[] = {Format::kBf16, Format::kE4m3fn, Format::kE4m3fnuz, Format::kE2m1};

ScalarType dtype_of(Format f) {
  switch (f) {
    case Format::kBf16: return ScalarType::BFloat16;
    case Format::kE4m3fn: return ScalarType::Float8_e4m3fn;
    case Format::kE4m3fnuz: return ScalarType::Float8_e4m3fnuz;
    case Format::kE2m1: return ScalarType::Float4_e2m1fn_x2;
  }
  return ScalarType::Byte;
}

}  // namespace

Tensor new_empty(const Tensor& like, Shape shape, ScalarType dtype) {
  const int64_t* const sizes = shape.begin();
  const size_t dim = shape.size();
  int64_t strides[kMaxDims], elements = 1;
  bool fits = true;  // sizes are data: their product may not be a number
  for (size_t d = dim; d-- > 0;) {
    strides[d] = elements;
    fits = fits && !__builtin_mul_overflow(elements, std::max<int64_t>(sizes[d], 1), &elements);
  }
  int32_t type = -1, index = -1;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle made = nullptr;
  // torch::stable::new_empty would look an op up by its name at every call.
  if (fits && aoti_torch_empty_strided(static_cast<int64_t>(dim), sizes, strides, code_of(dtype), type, index,
                                       &made) == AOTI_TORCH_SUCCESS)
    return Tensor(made);
  std::ostringstream message;
  message << "mla_fp8: cannot allocate a result or workspace of shape " << shape_string(shape)
          << " and dtype " << dtype_name(dtype) << " on " << device_string(like) << ": "
          << (fits ? torch_error() : "more elements than 2^63 - 1");
  throw std::runtime_error(message.str());
}

Arg::Arg(const char* op, const char* name, const Tensor& tensor)
    : op_(op), name_(name), t_(tensor), dtype_(dtype_code(tensor)) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dim_));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes_));
  // torch passes None as an undefined tensor: one dimension, no elements, and no strides to ask for.
  if (dim_ == 1 && sizes_[0] == 0 && !tensor.defined()) fail("must be a tensor, got None");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides_));
}

bool Arg::is(ScalarType want) const { return dtype_ == code_of(want); }

Dtype Arg::float_dtype() const {
  return is(ScalarType::BFloat16) ? Dtype::kBf16 : is(ScalarType::Half) ? Dtype::kF16 : Dtype::kF32;
}

const Arg& Arg::same_device_as(const Tensor& other, const char* other_name) const {
  const auto device = [](const Tensor& t) {
    int32_t type = -1, index = -1;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
    return std::pair{type, index};
  };
  if (device(t_) != device(other))
    fail("must be on ", device_string(other), " like ", other_name, ", got ", device_string(t_));
  return *this;
}

const Arg& Arg::dtype(std::initializer_list<ScalarType> any_of) const {
  for (ScalarType want : any_of)
    if (is(want)) return *this;
  fail_dtype({any_of.begin(), any_of.size()}, "");
}

const Arg& Arg::cache_of(const char* layout, std::span<const ScalarType> numbers) const {
  if (is(ScalarType::Byte) || is(ScalarType::Char)) return *this;
  for (ScalarType number : numbers)
    if (is(number)) return *this;
  std::vector<ScalarType> any_of = {ScalarType::Byte, ScalarType::Char};
  any_of.insert(any_of.end(), numbers.begin(), numbers.end());
  fail_dtype(any_of, std::string(" for layout ") + layout);
}

void Arg::fail_dtype(std::span<const ScalarType> any_of, const std::string& where) const {
  std::string wanted;
  for (ScalarType want : any_of) wanted += (wanted.empty() ? "" : " or ") + dtype_name(want);
  fail("must have dtype ", wanted, where, ", got ", dtype_string(t_));
}

const Arg& Arg::shape(Shape want) const {
  bool ok = dim_ == static_cast<int64_t>(want.size());
  for (size_t i = 0; ok && i < want.size(); ++i) ok = want.begin()[i] < 0 || sizes_[i] == want.begin()[i];
  if (!ok) fail("must have shape ", shape_string(want), ", got ", shape_string(t_.sizes()));
  return *this;
}

void Arg::fail_page_shape(int64_t page_elements, int64_t page_size, const char* layout) const {
  fail("must have shape [*, ", page_elements, "], got ", shape_string(t_.sizes()), " (a page is ", page_size,
       " rows of layout ", layout, ")");
}

const Arg& Arg::contiguous() const {
  if (!t_.is_contiguous())
    fail("must be contiguous, got shape ", shape_string(t_.sizes()), " with strides ",
         shape_string(t_.strides()));
  return *this;
}

bool Arg::is_empty() const { return std::find(sizes_, sizes_ + dim_, 0) != sizes_ + dim_; }

const Arg& Arg::last_dim_contiguous() const {
  if (is_empty()) return *this;
  if (sizes_[dim_ - 1] > 1 && strides_[dim_ - 1] != 1)
    fail("must have stride 1 in its last dimension, got ", strides_[dim_ - 1]);
  return *this;
}

const Arg& Arg::aligned(int64_t bytes) const {
  if (is_empty()) return *this;
  const auto address = reinterpret_cast<uintptr_t>(t_.const_data_ptr());
  if (address % bytes != 0)
    fail("must be ", bytes, "-byte aligned, got an address that is ", address % bytes, " past");
  for (int64_t d = 0; d + 1 < dim_; ++d)
    if (sizes_[d] > 1 && strides_[d] * itemsize() % bytes != 0)
      fail("must be ", bytes, "-byte aligned in every row, got a stride of ", strides_[d] * itemsize(),
           " bytes in dimension ", d);
  return *this;
}

const Arg& Arg::rows_disjoint() const {
  if (is_empty()) return *this;
  constexpr int64_t kMostDims = 4;
  int64_t inner_first[kMostDims], count = 0;  // dimensions by stride
  for (int64_t d = dim_ - 2; d >= 0 && count < kMostDims; --d) {
    if (sizes_[d] <= 1) continue;
    int64_t at = count++;
    for (; at > 0 && strides_[inner_first[at - 1]] > strides_[d]; --at) inner_first[at] = inner_first[at - 1];
    inner_first[at] = d;
  }
  int64_t extent = dim_ ? sizes_[dim_ - 1] : 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t d = inner_first[i];
    if (strides_[d] < extent)
      fail("must not overlap itself, got stride ", strides_[d], " in dimension ", d, ", expected at least ",
           extent);
    extent = strides_[d] * sizes_[d];
  }
  return *this;
}

float Check::finite_float(double value, const char* name) const {
  const float as_float = static_cast<float>(value);
  that(std::isfinite(as_float), name, " must be finite", std::isfinite(value) ? " as a float32" : "",
       ", got ", value);
  return as_float;
}

KvLayoutId Check::layout(int64_t layout) const {
  that(layout >= 0 && layout < kNumKvLayouts, "layout must be in [0, ", kNumKvLayouts, "), got ", layout);
  return static_cast<KvLayoutId>(layout);
}

KvLayoutId Check::first_layout(int64_t layout) const {
  const KvLayoutId id = this->layout(layout);
  that(!kv_layout(id).extra_only(), "layout must not be ", kv_layout(id).name,
       ", which is for the second cache of a call only");
  return id;
}

KvLayoutId Check::extra_layout(int64_t layout, KvLayoutId first) const {
  that(layout >= 0 && layout < kNumKvLayouts, "extra_layout must be in [0, ", kNumKvLayouts, "), got ",
       layout);
  const auto id = static_cast<KvLayoutId>(layout);
  if (can_attend({first, id})) return id;
  std::ostringstream names;
  names << kv_layout(first).name;
  for (const KvPair& pair : kMixedPairs)
    if (pair.first == first) names << " or " << kv_layout(pair.extra).name;
  that(false, "extra_layout must be ", names.str(), " with layout ", kv_layout(first).name, ", got ",
       kv_layout(id).name);
  return first;
}

KvCacheView Check::kv_cache(const Tensor& t, const char* name, KvLayoutId layout, int64_t page_size,
                            const char* page_size_name) const {
  const KvLayout l = kv_layout(layout);
  within(page_size, page_size_name, 1, kMaxPageSize);

  const Arg arg = (*this)(t, name);
  ScalarType numbers[std::size(kFormats)];
  size_t count = 0;
  for (Format f : kFormats)
    if (l.holds(f)) numbers[count++] = dtype_of(f);
  arg.cache_of(l.name, {numbers, count});
  const int64_t itemsize = arg.itemsize();
  const int64_t page_bytes = l.page_bytes(page_size), token_bytes = l.bytes_per_token();
  const int64_t dim = arg.dim();
  if (dim == 3 || dim == 4) {
    if (dim == 3) arg.shape({-1, page_size, token_bytes / itemsize});
    if (dim == 4) arg.shape({-1, page_size, 1, token_bytes / itemsize});
    if (page_size > 1 && !arg.is_empty() && arg.stride(1) * itemsize != token_bytes)
      arg.fail("must have a stride of ", token_bytes, " bytes in dimension 1, got ",
               arg.stride(1) * itemsize);
  } else if (dim != 2 || arg.size(1) != page_bytes / itemsize) {
    arg.fail_page_shape(page_bytes / itemsize, page_size, l.name);
  }
  arg.last_dim_contiguous();
  const int64_t num_pages = arg.size(0), stride_page = arg.stride(0) * itemsize;
  if (num_pages > 1 && stride_page < page_bytes)
    arg.fail("must have a page stride of at least ", page_bytes, " bytes, got ", stride_page);
  constexpr int64_t kAlignment = 16;
  const auto past = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % kAlignment;
  if (num_pages > 0 && past != 0)
    arg.fail("must be ", kAlignment, "-byte aligned, got an address that is ", past, " past");
  if (num_pages > 1 && stride_page % kAlignment != 0)
    arg.fail("must be ", kAlignment, "-byte aligned in every page, got a page stride of ", stride_page,
             " bytes");
  return {data<uint8_t>(t), stride_page, num_pages * page_size};
}

const float* Check::scale(const OptionalTensor& scale, KvLayoutId layout, const Tensor& device_of) const {
  const KvLayout l = kv_layout(layout);
  const bool wanted = l.scale_format == ScaleFormat::kPerLayer;
  that(wanted == scale.has_value(), "scale must be ", wanted ? "given" : "None", " for layout ", l.name,
       ", got ", wanted ? "None" : "a tensor");
  if (!wanted) return nullptr;
  (*this)(*scale, "scale").same_device_as(device_of, "the cache").dtype({ScalarType::Float});
  that(scale->numel() == 1, "scale must have 1 element, got ", scale->numel());
  const float* value = data<float>(*scale);
  if (scale->is_cpu())  // on a GPU reading it would be a sync: documented there as a precondition
    that(std::isfinite(*value) && *value > 0, "scale must be finite and positive, got ", *value);
  return value;
}

}  // namespace mla_fp8
