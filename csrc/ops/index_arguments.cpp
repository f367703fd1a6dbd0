#include "ops/index_arguments.h"

#include <limits>

namespace mla_fp8 {
namespace {

// Whether values are pairs of e2m1 and not e4m3fn, by the dtypes that engines give those bytes.
bool are_e2m1(const Arg& values) {
  return !values
              .dtype({ScalarType::Float8_e4m3fn, ScalarType::Byte, ScalarType::Char,
                      ScalarType::Float4_e2m1fn_x2})
              .is(ScalarType::Float8_e4m3fn);
}

// Whether the ue8m0 scales of a head or key come as one int32, not as bytes.
bool are_ints(const Arg& scales) {
  return scales.dtype({ScalarType::Byte, ScalarType::Int, ScalarType::Char, ScalarType::Float8_e8m0fnu})
      .is(ScalarType::Int);
}

IndexQueries check_queries(const Check& check, const Tensor& q, const Tensor& weights,
                           const OptionalTensor& q_scale, IndexLayoutId keys) {
  const Arg arg = check(q, "q");
  const bool is_fp4 = are_e2m1(arg);
  if (is_fp4 && keys == IndexLayoutId::kIndexFp8)
    arg.fail("must be e4m3 (torch.float8_e4m3fn) over keys in e4m3 (index_fp8), got e2m1");
  const int64_t head_bytes = is_fp4 ? kIndexDim / 2 : kIndexDim;
  arg.shape({-1, -1, head_bytes}).last_dim_contiguous();
  const int64_t rows = q.size(0), heads = q.size(1);
  check.that(heads >= 1 && heads <= kMaxIndexHeads, "q must have 1 to ", kMaxIndexHeads, " heads, got ",
             heads);
  if (heads > 1 && !arg.is_empty() && arg.stride(1) != head_bytes)
    arg.fail("must have its heads one after another, got a stride of ", arg.stride(1), " bytes, expected ",
             head_bytes);
  arg.aligned(16);

  const Arg w = check(weights, "weights");
  w.same_device_as(q, "q")
      .dtype({ScalarType::Float, ScalarType::BFloat16})
      .shape({rows, heads})
      .last_dim_contiguous();
  check.that(!is_fp4 || q_scale, "q_scale must be given for q in e2m1, got None");
  int64_t scale_stride = 0;
  if (q_scale) {
    const Arg scale = check(*q_scale, "q_scale");
    scale.same_device_as(q, "q");
    if (!is_fp4) scale.dtype({ScalarType::Float}).shape({rows, heads}).last_dim_contiguous();
    else if (are_ints(scale)) scale.shape({rows, heads}).last_dim_contiguous();
    else if (scale.shape({rows, heads, kIndexScaleBytes}).last_dim_contiguous();
             heads > 1 && !scale.is_empty() && scale.stride(1) != kIndexScaleBytes)
      scale.fail("must have its heads one after another, got a stride of ", scale.stride(1), ", expected ",
                 kIndexScaleBytes);
    scale_stride = scale.stride(0) * scale.itemsize();
  }
  return {
      .num_rows = rows,
      .num_heads = static_cast<int>(heads),
      .is_fp4 = is_fp4,
      .q = data<uint8_t>(q),
      .q_stride_row = arg.stride(0),
      .q_scale = q_scale ? q_scale->const_data_ptr() : nullptr,
      .q_scale_stride_row = scale_stride,
      .weights = weights.const_data_ptr(),
      .weights_stride_row = w.stride(0),
      .weights_are_bf16 = w.is(ScalarType::BFloat16),
  };
}

}  // namespace

IndexLayoutId check_index_layout(const Check& check, int64_t layout) {
  check.that(layout >= 0 && layout < kNumIndexLayouts, "layout must be in [0, ", kNumIndexLayouts, "), got ",
             layout);
  return static_cast<IndexLayoutId>(layout);
}

IndexScaling check_index_scaling(const Check& check, IndexLayoutId layout, const std::string& scale_format,
                                 std::optional<double> amax_floor, bool reciprocal) {
  const IndexLayout l = index_layout(layout);
  const bool is_f32 = scale_format == "f32";
  check.that(is_f32 || scale_format == "ue8m0", "scale_format must be ue8m0 or f32, got ", scale_format);
  check.that(!is_f32 || layout == IndexLayoutId::kIndexFp8, "scale_format must be ue8m0 for layout ", l.name,
             ", got f32");
  check.that(!reciprocal || is_f32, "reciprocal must be False unless scale_format is f32, got True");
  // Within these bounds the scale and its reciprocal are normal floats.
  const double least = l.value_max * 0x1p-126, most = l.value_max;
  const double floor = amax_floor.value_or(l.amax_floor);
  check.that(floor >= least && floor <= most, "amax_floor must be in [", least, ", ", most, "], got ", floor);
  const auto format = !is_f32      ? IndexScaleFormat::kUe8m0
                      : reciprocal ? IndexScaleFormat::kF32Reciprocal
                                   : IndexScaleFormat::kF32;
  return {format, static_cast<float>(floor)};
}

void check_index_rope(const Check& check, const char* name, const RopeTable& table, bool is_neox,
                      const char* of) {
  const int64_t half = table.half;
  check.that(2 * half <= kIndexDim, name, " must have at most ", kIndexDim / 2, " columns for ", of, ", got ",
             half);
  check.that(!is_neox || half == kIndexRopeHalf || half == 0, name, " must have ", kIndexRopeHalf,
             " columns or none for ", of, " by halves, got ", half);
}

IndexCacheView check_index_cache(const Check& check, const Tensor& t, IndexLayoutId layout,
                                 int64_t page_size) {
  const IndexLayout l = index_layout(layout);
  check.within(page_size, "page_size", 1, kMaxPageSize);
  const Arg arg = check(t, "index_cache");
  const ScalarType values =
      layout == IndexLayoutId::kIndexFp8 ? ScalarType::Float8_e4m3fn : ScalarType::Float4_e2m1fn_x2;
  arg.cache_of(l.name, {&values, 1});
  const int64_t page_bytes = l.page_bytes(page_size), entry_bytes = l.bytes_per_entry();
  if (arg.dim() == 4) {
    arg.shape({-1, page_size, 1, entry_bytes});
    if (page_size > 1 && !arg.is_empty() && arg.stride(1) != entry_bytes)
      arg.fail("must have a stride of ", entry_bytes, " bytes in dimension 1, got ", arg.stride(1));
  } else if (arg.dim() != 2 || arg.size(1) != page_bytes) {
    arg.fail_page_shape(page_bytes, page_size, l.name);
  }
  arg.last_dim_contiguous();
  const int64_t num_pages = arg.size(0), stride_page = arg.stride(0);
  if (num_pages > 1 && stride_page < page_bytes)
    arg.fail("must have a page stride of at least ", page_bytes, " bytes, got ", stride_page);
  const auto past = num_pages > 0 ? reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 4 : 0;
  if (past != 0) arg.fail("must be 4-byte aligned, got an address that is ", past, " past");
  if (num_pages > 1 && stride_page % 4 != 0)
    arg.fail("must be 4-byte aligned in every page, got a page stride of ", stride_page, " bytes");
  check.that(num_pages <= std::numeric_limits<int32_t>::max() / page_size, "index_cache must have at most ",
             std::numeric_limits<int32_t>::max(), " slots, as slots are int32, got ", num_pages, " pages of ",
             page_size);
  return {data<uint8_t>(t), stride_page, num_pages, page_size};
}

const int32_t* check_ints(const Check& check, const Tensor& t, const char* name, int64_t size,
                          const Tensor& like, const char* like_name) {
  check(t, name).same_device_as(like, like_name).dtype({ScalarType::Int}).shape({size}).contiguous();
  return data<int32_t>(t);
}

int check_interleave(const Check& check, std::optional<int64_t> interleave) {
  if (!interleave) return -1;
  constexpr int kMaxBits = 16;
  int bits = 0;
  while (bits < kMaxBits && int64_t{1} << bits < *interleave) ++bits;
  check.that(*interleave == int64_t{1} << bits, "interleave must be a power of two of at most 65536, got ",
             *interleave);
  return bits;
}

IndexProblem check_index_problem(const Check& check, const PagedIndexArguments& a) {
  const IndexLayoutId layout = check_index_layout(check, a.layout);
  const IndexLayout l = index_layout(layout);
  const IndexQueries queries = check_queries(check, a.q, a.weights, a.q_scale, layout);
  const IndexCacheView cache = check_index_cache(check, a.index_cache, layout, a.page_size);
  check(a.index_cache, "index_cache").same_device_as(a.q, "q");
  const Arg table = check(a.page_table, "page_table");
  table.same_device_as(a.q, "q").dtype({ScalarType::Int}).shape({-1, -1}).last_dim_contiguous();
  const int64_t requests = table.size(0), max_pages = table.size(1), rows = queries.num_rows;
  check.that(max_pages <= kMaxIndexEntries / a.page_size, "page_table must have at most ",
             kMaxIndexEntries / a.page_size, " columns, as a row may see ", kMaxIndexEntries,
             " entries, got ", max_pages);
  check.at_least(a.next_n, "next_n", 1);
  check.at_least(a.compress_ratio, "compress_ratio", 1);
  check.that(a.seq_lens || a.row_lens, "seq_lens must be given without row_lens, got None");
  check.that(!a.row_lens || a.compress_ratio == 1,
             "compress_ratio must be 1 with row_lens, which counts entries, got ", a.compress_ratio);
  check.that(!a.query_start_loc || a.next_n == 1, "next_n must be 1 with query_start_loc, got ", a.next_n);
  check.that(a.query_start_loc || (rows % a.next_n == 0 && rows / a.next_n == requests), "q must have ",
             requests, " x ", a.next_n, " rows (requests of page_table x next_n), got ", rows);
  const auto ints = [&](const OptionalTensor& t, const char* name, int64_t size) {
    return t ? check_ints(check, *t, name, size, a.q, "q") : nullptr;
  };
  return {
      .queries = queries,
      .keys =
          {
              .layout = layout,
              .values = cache.data,
              .values_stride_page = cache.stride_page,
              .values_stride_row = l.value_bytes,
              .scales = cache.data + l.scale_offset(0, a.page_size),
              .scales_stride_page = cache.stride_page,
              .num_pages = cache.num_pages,
              .page_size = a.page_size,
              .page_table = data<int32_t>(a.page_table),
              .page_table_stride_request = table.stride(0),
          },
      .rows =
          {
              .num_rows = rows,
              .num_requests = requests,
              .next_n = a.next_n,
              .compress_ratio = a.compress_ratio,
              .num_columns = max_pages * a.page_size,
              .seq_lens = ints(a.seq_lens, "seq_lens", requests),
              .row_lens = ints(a.row_lens, "row_lens", rows),
              .query_start_loc = ints(a.query_start_loc, "query_start_loc", requests + 1),
          },
  };
}

IndexProblem check_index_problem(const Check& check, const RaggedIndexArguments& a) {
  const Arg k = check(a.k, "k");
  const IndexLayoutId layout = are_e2m1(k) ? IndexLayoutId::kIndexFp4 : IndexLayoutId::kIndexFp8;
  const IndexQueries queries = check_queries(check, a.q, a.weights, a.q_scale, layout);
  k.same_device_as(a.q, "q");
  k.shape({-1, index_layout(layout).value_bytes}).last_dim_contiguous().aligned(16);
  const int64_t num_keys = k.size(0), rows = queries.num_rows;
  check.that(num_keys <= kMaxIndexEntries, "k must have at most ", kMaxIndexEntries, " rows, got ", num_keys);
  const Arg scale = check(a.k_scale, "k_scale");
  scale.same_device_as(a.q, "q");
  if (layout == IndexLayoutId::kIndexFp8) scale.dtype({ScalarType::Float}).shape({num_keys});
  else if (are_ints(scale)) scale.shape({num_keys});
  else scale.shape({num_keys, kIndexScaleBytes});
  scale.contiguous();
  return {
      .queries = queries,
      .keys =
          {
              .layout = layout,
              .values = data<uint8_t>(a.k),
              .values_stride_row = k.stride(0),
              .scales = data<uint8_t>(a.k_scale),
              .num_pages = 1,
              .page_size = num_keys > 0 ? num_keys : 1,
          },
      .rows =
          {
              .num_rows = rows,
              .num_requests = 1,
              .next_n = 1,
              .compress_ratio = 1,
              .num_columns = num_keys,
              .k_start = check_ints(check, a.k_start, "k_start", rows, a.q, "q"),
              .k_end = check_ints(check, a.k_end, "k_end", rows, a.q, "q"),
          },
  };
}

}  // namespace mla_fp8
