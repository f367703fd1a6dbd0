#include "ops/copy_host_rows.h"

#include <limits>
#include <string>

#include "registration.h"

namespace mla_fp8 {
namespace {

constexpr int64_t kMaxCopyBlocks = 1 << 16;

// The address by which a kernel reaches a cache. The host's memory has to be pinned.
uint8_t* reachable(const Arg& cache, const Tensor& t, const Tensor& rows, const char* rows_name,
                   [[maybe_unused]] bool is_host) {
#if MLA_FP8_WITH_CUDA && !MLA_FP8_EMULATED
  if (is_host && t.is_cpu()) {
    if (cache.is_empty()) return nullptr;
    void* const address = gpu::address_on_gpu(t.const_data_ptr());
    if (!address) cache.fail("must be in pinned memory, got memory that the GPU cannot read");
    return static_cast<uint8_t*>(address);
  }
#endif
  cache.same_device_as(rows, rows_name);
  return const_cast<uint8_t*>(data<uint8_t>(t));
}

struct Side {
  const std::vector<Tensor>& caches;
  const char* name;
  int64_t page_size;
  const char* page_size_name;
  bool is_host;
};

RowPages check_caches(const Check& check, const Side& side, KvLayoutId layout, const Tensor& rows,
                      const char* rows_name) {
  RowPages pages{.page_size = side.page_size};
  for (size_t i = 0; i < side.caches.size(); ++i) {
    const std::string name = std::string(side.name) + "[" + std::to_string(i) + "]";
    const Tensor& t = side.caches[i];
    const KvCacheView view = check.kv_cache(t, name.c_str(), layout, side.page_size, side.page_size_name);
    const Arg arg = check(t, name.c_str());
    pages.data[i] = reachable(arg, t, rows, rows_name, side.is_host);
    if (i == 0) {
      pages.stride_page = view.stride_page;
      pages.num_rows = view.num_slots;
    } else if (view.num_slots != pages.num_rows || view.stride_page != pages.stride_page) {
      arg.fail("must have the pages and the page stride of the first, ", pages.num_rows / side.page_size,
               " * ", pages.stride_page, " bytes, got ", view.num_slots / side.page_size, " * ",
               view.stride_page);
    }
  }
  return pages;
}

struct RowLists {
  const Tensor& rows;
  const char* name;
};

struct ListEnds {
  const OptionalTensor &counts, &num_valid_rows;
};

// Checks and copies: `from` is read, `to` is written.
void copy(const Check& check, const Side& from, const Side& to, const RowLists& from_rows,
          const RowLists& to_rows, const ListEnds& ends, int64_t layout, int64_t max_blocks) {
  const KvLayoutId id = check.layout(layout);
  const auto layers = static_cast<int64_t>(from.caches.size());
  check.that(layers >= 1 && layers <= kMaxCopyLayers, from.name, " must hold 1 to ", kMaxCopyLayers,
             " caches, got ", layers);
  check.that(static_cast<int64_t>(to.caches.size()) == layers, to.name, " must hold ", layers,
             " caches like ", from.name, ", got ", to.caches.size());
  check.within(max_blocks, "max_blocks", 1, kMaxCopyBlocks);
  const Arg first = check(from_rows.rows, from_rows.name), second = check(to_rows.rows, to_rows.name);
  first.dtype({ScalarType::Int, ScalarType::Long});
  check.that(first.dim() == 1 || first.dim() == 2, from_rows.name, " must have 1 or 2 dimensions, got ",
             first.dim());
  second.same_device_as(from_rows.rows, from_rows.name).dtype({ScalarType::Int, ScalarType::Long});
  const bool is_list = first.dim() == 1;
  if (is_list) second.shape({first.size(0)});
  else second.shape({first.size(0), first.size(1)});
  first.last_dim_contiguous(), second.last_dim_contiguous();
  CopyRowsParams params{
      .layout = id,
      .num_layers = layers,
      .from = check_caches(check, from, id, from_rows.rows, from_rows.name),
      .to = check_caches(check, to, id, from_rows.rows, from_rows.name),
      .lists = is_list ? 1 : first.size(0),
      .width = first.size(is_list ? 0 : 1),
      .from_rows = from_rows.rows.const_data_ptr(),
      .from_rows_are_int64 = first.is(ScalarType::Long),
      .from_rows_stride = is_list ? 0 : first.stride(0),
      .to_rows = to_rows.rows.const_data_ptr(),
      .to_rows_are_int64 = second.is(ScalarType::Long),
      .to_rows_stride = is_list ? 0 : second.stride(0),
      .max_blocks = max_blocks,
  };
  const auto ints = [&](const OptionalTensor& t, const char* name, int64_t size) {
    if (t)
      check(*t, name)
          .same_device_as(from_rows.rows, from_rows.name)
          .dtype({ScalarType::Int})
          .shape({size})
          .contiguous();
    return data<int32_t>(t);
  };
  params.counts = ints(ends.counts, "counts", params.lists);
  params.num_lists = ints(ends.num_valid_rows, "num_valid_rows", 1);
  if (params.lists == 0 || params.width == 0 || params.to.num_rows == 0) return;
  MLA_LAUNCH(copy_rows, from_rows.rows, params);
}

}  // namespace

void copy_host_rows(const std::vector<Tensor>& host_caches, std::vector<Tensor> hot_caches,
                    const Tensor& host_rows, const Tensor& hot_rows, const OptionalTensor& counts,
                    const OptionalTensor& num_valid_rows, int64_t layout, int64_t host_page_size,
                    int64_t hot_page_size, int64_t max_blocks) {
  copy(Check("copy_host_rows"), {host_caches, "host_caches", host_page_size, "host_page_size", true},
       {hot_caches, "hot_caches", hot_page_size, "hot_page_size", false}, {host_rows, "host_rows"},
       {hot_rows, "hot_rows"}, {counts, num_valid_rows}, layout, max_blocks);
}

void store_host_rows(const std::vector<Tensor>& hot_caches, std::vector<Tensor> host_caches,
                     const Tensor& hot_rows, const Tensor& host_rows, int64_t layout, int64_t host_page_size,
                     int64_t hot_page_size, int64_t max_blocks) {
  const OptionalTensor none;
  copy(Check("store_host_rows"), {hot_caches, "hot_caches", hot_page_size, "hot_page_size", false},
       {host_caches, "host_caches", host_page_size, "host_page_size", true}, {hot_rows, "hot_rows"},
       {host_rows, "host_rows"}, {none, none}, layout, max_blocks);
}

// Copies rows between addresses. Neither addresses nor rows are checked.
void _copy_rows_at(const Tensor& from_addresses, const Tensor& to_addresses, const Tensor& from_rows,
                   const Tensor& to_rows, int64_t layout, int64_t from_page_size, int64_t to_page_size) {
  const Check check("_copy_rows_at");
  const KvLayoutId id = check.layout(layout);
  const auto longs = [&](const Tensor& t, const char* name, int64_t size) {
    check(t, name)
        .same_device_as(from_rows, "from_rows")
        .dtype({ScalarType::Long, ScalarType::UInt64})
        .shape({size})
        .contiguous();
    return t.const_data_ptr();
  };
  const auto pages = [&](const Tensor& addresses, const char* name, int64_t size, const char* size_name) {
    check.within(size, size_name, 1, kMaxPageSize);
    return RowPages{.addresses = static_cast<const uint64_t*>(longs(addresses, name, -1)),
                    .stride_page = kv_layout(id).page_bytes(size),
                    .page_size = size,
                    .num_rows = std::numeric_limits<int64_t>::max()};
  };
  CopyRowsParams params{
      .layout = id,
      .num_layers = check(from_addresses, "from_addresses").shape({-1}).size(0),
      .from = pages(from_addresses, "from_addresses", from_page_size, "from_page_size"),
      .to = pages(to_addresses, "to_addresses", to_page_size, "to_page_size"),
      .lists = 1,
      .width = check(from_rows, "from_rows").shape({-1}).size(0),
      .from_rows = longs(from_rows, "from_rows", -1),
      .from_rows_are_int64 = true,
      .to_rows_are_int64 = true,
      .max_blocks = 16,
  };
  longs(to_addresses, "to_addresses", params.num_layers);
  params.to_rows = longs(to_rows, "to_rows", params.width);
  if (params.num_layers == 0 || params.width == 0) return;
  MLA_LAUNCH(copy_rows, from_rows, params);
}

}  // namespace mla_fp8
