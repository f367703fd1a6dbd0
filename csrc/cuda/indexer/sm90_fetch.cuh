#pragma once
// How keys come into shared memory on Hopper.
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

__device__ inline void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
               : "memory");
}
// A warp's part of the items that its warpgroup fetches: sixteen keys of one item of each tile.
class Fetch {
 public:
  __device__ __forceinline__ Fetch(const IndexKeys& keys, const KeyBoxes& boxes, const Divider& page_size,
                                   const Memory& memory, Barriers& barriers)
      : keys_(keys), boxes_(boxes), page_size_(page_size), memory_(memory), barriers_(barriers) {}

  // Of `tiles` tiles from `column` on, the first item of which goes to `place`.
  __device__ __forceinline__ void begin(const IndexUnit& unit, int32_t column, int tiles, Place place) {
    place.advance(group(), memory_.num_stages);
    place_ = place;
    filled_ = 0;
    if (boxes_.are_used && is_fetcher())
      pages_ahead_ = box_page(unit, own_column(column) + lane() * kTileKeys);
    fill_until(unit, column, min(tiles, depth()), -1);
  }

  // Before tile t, the last of a step: its item is on its way, and those behind it that there is room for.
  __device__ __forceinline__ void next_tile(const IndexUnit& unit, int32_t column, int tiles, int t) {
    fill_until(unit, column, min(tiles, t + depth()), t);
  }

 private:
  static constexpr int kKeys = kItemKeys / (kGroup / kWarpSize);  // of a warp

  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ static int group() { return threadIdx.x / kGroup; }
  __device__ __forceinline__ static int first_key() { return threadIdx.x % kGroup / kWarpSize * kKeys; }
  // Of the next item, where `column` is that of the first tile.
  __device__ __forceinline__ int32_t own_column(int32_t column) const {
    return column + filled_ * kTileKeys + group() * kItemKeys;
  }

  // As the table says it: nobody waits for it before it is used.
  __device__ __forceinline__ int32_t page_of(const IndexUnit& unit, uint32_t column) const {
    if (column < static_cast<uint32_t>(unit.begin) || column >= static_cast<uint32_t>(unit.end)) return -1;
    if (keys_.page_table == nullptr) return 0;
    return keys_.page_table[unit.request * keys_.page_table_stride_request + page_size_(column)];
  }
  __device__ __forceinline__ int64_t row_in_page(int32_t column) const {
    return keys_.page_table ? column - page_size_(column) * page_size_.divisor() : column;
  }
  __device__ __forceinline__ bool is_present(int32_t page) const {
    return page >= 0 && page < keys_.num_pages;
  }

  // Items of this warpgroup that the ring holds.
  __device__ __forceinline__ int depth() const { return (memory_.num_stages + kGroups - 1) / kGroups; }

  // Waits for room only for items up to that of tile t.
  __device__ __forceinline__ void fill_until(const IndexUnit& unit, int32_t column, int end, int t) {
    if (boxes_.are_used && !is_fetcher()) return;
    while (filled_ < end) {
      const uint32_t empty = shared_address(&barriers_.empty[place_.stage()]);
      const int parity = place_.phase() ^ 1;
      if (filled_ <= t) mbarrier_wait(empty, parity);
      else if (!__all_sync(kFullWarp, mbarrier_test(empty, parity))) return;  // lanes may differ
      if (boxes_.are_used) fill_box(unit, own_column(column));
      else Fetch(*this).fill_by_key(unit, own_column(column));
      place_.advance(kGroups, memory_.num_stages);
      ++filled_;
    }
  }
  // One warp of a warpgroup, each on a scheduler of its own.
  __device__ __forceinline__ static bool is_fetcher() { return threadIdx.x % kGroup / kWarpSize == group(); }

  // An item that is a box. Its columns outside the unit are read where their page exists; nobody asks for
  // them. A lane finds every 32nd item, all lanes at once; their pages are asked for 32 items before the
  // first.
  __device__ __forceinline__ void fill_box(const IndexUnit& unit, int32_t column) {
    const int turn = filled_ & (kWarpSize - 1);
    if (turn == 0) {
      page_ = is_present(pages_ahead_) ? pages_ahead_ : -1;
      row_ = static_cast<int>(row_in_page(column + lane() * kTileKeys));
      pages_ahead_ = box_page(unit, column + (kWarpSize + lane()) * kTileKeys);
    }
    const int page = __shfl_sync(kFullWarp, page_, turn), row = __shfl_sync(kFullWarp, row_, turn);
    const bool present = page >= 0;
    reinterpret_cast<uint16_t*>(memory_.present(place_))[lane()] = present ? 0x0101 : 0;
    int entries = present ? kItemKeys : 0;
    if (present && keys_.page_table == nullptr && row > keys_.page_size - kItemKeys) {
      entries = static_cast<int>(keys_.page_size) - row;
      const int last = entries / 4 * 4 + lane();  // no sixteen bytes
      if (last < entries)
        memory_.scales(place_)[last] = reinterpret_cast<const float*>(keys_.scale(page, row))[last];
    }
    const int value_bytes = memory_.is_fp4 ? entries * (kIndexDim / 2) : Memory::kPanelBytes;
    const int scale_bytes = entries / 4 * 16;
    const uint32_t full = shared_address(&barriers_.full[place_.stage()]);
    mbarrier_arrive_expect_warp(full, value_bytes + scale_bytes, lane());
    if (lane() > 0) return;
    const uint32_t to = shared_address(memory_.keys(place_.stage()));
    if (!memory_.is_fp4)  // outside the tensor there are zeros
      tensor_copy(to, boxes_.map, 0, row, present ? page : static_cast<int>(keys_.num_pages), full);
    else if (present) bulk_copy(to, keys_.value(page, row), value_bytes, full);
    if (scale_bytes > 0)
      bulk_copy(shared_address(memory_.scales(place_)), keys_.scale(page, row), scale_bytes, full);
  }
  __device__ __forceinline__ int32_t box_page(const IndexUnit& unit, int32_t column) const {
    if (column >= unit.end || column + kItemKeys <= unit.begin) return -1;
    if (keys_.page_table == nullptr) return 0;
    return keys_.page_table[unit.request * keys_.page_table_stride_request + page_size_(column)];
  }

  // Of any item. A call, so that it takes no registers of what works around it.
  __device__ __noinline__ void fill_by_key(const IndexUnit& unit, int32_t first_column) const {
    const int32_t column = first_column + first_key() + lane() % kKeys;
    const int32_t page = page_of(unit, column);
    const bool present = is_present(page);
    const int64_t row = row_in_page(column);
    const uint8_t* value = present ? keys_.value(page, row) : nullptr;
    const uint32_t to = shared_address(memory_.keys(place_.stage()));
    const int pieces = memory_.is_fp4 ? 4 : 8, piece = lane() % pieces;
#pragma unroll 1
    for (int i = lane() / pieces; i < kKeys; i += kWarpSize / pieces) {
      const uint8_t* from = broadcast(value, i);
      const int key = first_key() + i;
      cp_async_16(to + (memory_.is_fp4 ? key * (kIndexDim / 2) + 16 * piece : swizzled(key, piece)),
                  from ? from + 16 * piece : keys_.values, from != nullptr);
    }
    if (lane() < kKeys) {
      const int key = first_key() + lane();
      cp_async_4(shared_address(memory_.scales(place_) + key),
                 present ? keys_.scale(page, row) : keys_.scales, present);
      memory_.present(place_)[key] = present;
    }
    const uint32_t full = shared_address(&barriers_.full[place_.stage()]);
    mbarrier_arrive_cp_async(full);
    mbarrier_arrive_warp(full, lane());
  }

  const IndexKeys& keys_;
  const KeyBoxes& boxes_;
  const Divider& page_size_;
  const Memory memory_;
  Barriers& barriers_;
  Place place_;                                   // of the next item
  int filled_ = 0;                                // items
  int32_t page_ = 0, row_ = 0, pages_ahead_ = 0;  // of 32 items, by lanes, and of the 32 behind them
};

}  // namespace mla_fp8::gpu::sm90_index
