// copy_host_rows and store_host_rows on the CPU.
#include "ops/copy_host_rows.h"

#include <algorithm>
#include <cstring>

namespace mla_fp8::cpu {

namespace {

int64_t row_at(const void* rows, bool are_int64, int64_t i) {
  return are_int64 ? static_cast<const int64_t*>(rows)[i] : static_cast<const int32_t*>(rows)[i];
}

struct RowParts {
  uint8_t *values, *scales;
};
RowParts parts_of(const RowPages& pages, const KvLayout& l, int64_t layer, int64_t row) {
  const int64_t in_page = row % pages.page_size;
  uint8_t* const base =
      pages.addresses ? reinterpret_cast<uint8_t*>(pages.addresses[layer]) : pages.data[layer];
  uint8_t* page = base + row / pages.page_size * pages.stride_page;
  return {page + l.token_offset(in_page), page + l.scale_offset(in_page, pages.page_size)};
}

}  // namespace

void copy_rows(const CopyRowsParams& p) {
  const KvLayout l = kv_layout(p.layout);
  const size_t value_bytes = l.token_stride(), scale_bytes = l.scale_inline() ? 0 : l.scale_bytes();
  // One thread copies all, so that lists which name the same row are written in their order.
  const int64_t lists = p.num_lists ? std::min<int64_t>(p.lists, *p.num_lists) : p.lists;
  for (int64_t layer = 0; layer < p.num_layers; ++layer)
    for (int64_t list = 0; list < lists; ++list) {
      const int64_t count = p.counts ? std::clamp<int64_t>(p.counts[list], 0, p.width) : p.width;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t from = row_at(p.from_rows, p.from_rows_are_int64, list * p.from_rows_stride + i);
        const int64_t to = row_at(p.to_rows, p.to_rows_are_int64, list * p.to_rows_stride + i);
        if (from < 0 || to < 0 || to >= p.to.num_rows) continue;
        const RowParts dst = parts_of(p.to, l, layer, to);
        if (from >= p.from.num_rows) {
          std::memset(dst.values, 0, value_bytes), std::memset(dst.scales, 0, scale_bytes);
          continue;
        }
        const RowParts src = parts_of(p.from, l, layer, from);
        std::memcpy(dst.values, src.values, value_bytes);
        std::memcpy(dst.scales, src.scales, scale_bytes);
      }
    }
}

}  // namespace mla_fp8::cpu
