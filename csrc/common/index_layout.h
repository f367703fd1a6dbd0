#pragma once
// The byte layout of a cache of index keys. Nothing else in the repository may spell these numbers: Python
// reads them through torch.ops.mla_fp8.index_layout_table, tests/ops/test_index_layout.py freezes them.
//
//   index_fp8   page: | (e4m3fn x128) x page_size | (scale f32) x page_size |
//   index_fp4   page: | (e2m1 x128) x page_size   | (scale ue8m0 x4) x page_size |
//
// Element 2i of e2m1 is the low nibble of byte i; scale i belongs to elements 32 i .. 32 i + 31. Pages have
// no padding, but may lie any number of bytes apart. Readers take any finite scale >= 0, not only powers of
// two.
#include <cstdint>

#include "common/macros.h"

namespace mla_fp8 {

inline constexpr int kIndexDim = 128;  // elements of an index key and of an index query's head
inline constexpr int kIndexScaleBytes = 4;
inline constexpr int kE2m1Tile = 32;  // elements that share a ue8m0

enum class IndexLayoutId : int32_t { kIndexFp8, kIndexFp4 };
inline constexpr int kNumIndexLayouts = 2;

struct IndexLayout {
  const char* name;
  int value_bytes, scale_bytes;  // per entry
  float value_max;               // the largest number that a value holds
  float amax_floor;              // writers raise an amax to this unless told otherwise

  MLA_HD constexpr int bytes_per_entry() const { return value_bytes + scale_bytes; }
  MLA_HD constexpr int64_t page_bytes(int64_t page_size) const { return page_size * bytes_per_entry(); }
  // Offsets in bytes from the start of the page.
  MLA_HD constexpr int64_t value_offset(int64_t row) const { return row * value_bytes; }
  MLA_HD constexpr int64_t scale_offset(int64_t row, int64_t page_size) const {
    return page_size * value_bytes + row * scale_bytes;
  }
};

MLA_HD constexpr IndexLayout index_layout(IndexLayoutId id) {
  if (id == IndexLayoutId::kIndexFp8) return {"index_fp8", kIndexDim, kIndexScaleBytes, 448.0f, 1e-4f};
  return {"index_fp4", kIndexDim / 2, kIndexScaleBytes, 6.0f, 6 * 0x1p-126f};
}

static_assert(index_layout(IndexLayoutId::kIndexFp8).bytes_per_entry() == 132);
static_assert(index_layout(IndexLayoutId::kIndexFp4).bytes_per_entry() == 68);
static_assert(index_layout(IndexLayoutId::kIndexFp4).scale_bytes == kIndexDim / kE2m1Tile);

// How writers scale 128 elements of e4m3. kUe8m0: by a power of two. kF32: they divide by amax / 448.
// kF32Reciprocal: they multiply by its reciprocal. e2m1 always has powers of two.
enum class IndexScaleFormat : int32_t { kUe8m0, kF32, kF32Reciprocal };
struct IndexScaling {
  IndexScaleFormat format;
  float amax_floor;
};

}  // namespace mla_fp8
