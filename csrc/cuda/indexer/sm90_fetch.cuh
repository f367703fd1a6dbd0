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
  __device__ __forceinline__ Fetch(const IndexKeys& keys, const Divider& page_size, const Memory& memory,
                                   Barriers& barriers)
      : keys_(keys), page_size_(page_size), memory_(memory), barriers_(barriers) {}

  // Of `tiles` tiles from `column` on, the first item of which goes to `place`.
  __device__ __forceinline__ void begin(const IndexUnit& unit, int32_t column, int tiles, Place place) {
    place.advance(group(), memory_.num_stages);
    place_ = place;
    filled_ = 0;
    pages_ahead_ = page_of(unit, own_column(column) + lane() * uint32_t{kTileKeys});
    fill_until(unit, column, min(tiles, depth()), -1);
  }

  // Before tile t: its item is on its way, and those behind it that there is room for.
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

  // Waits for room only for the item of tile t.
  __device__ __forceinline__ void fill_until(const IndexUnit& unit, int32_t column, int end, int t) {
    while (filled_ < end) {
      const uint32_t empty = shared_address(&barriers_.empty[place_.stage()]);
      const int parity = place_.phase() ^ 1;
      if (filled_ == t) mbarrier_wait(empty, parity);
      else if (!__all_sync(kFullWarp, mbarrier_test(empty, parity))) return;  // lanes may differ
      fill(unit, own_column(column));
    }
  }

  // Where an item comes from that is whole in one page, its keys one behind the other; nowhere if the page is
  // absent. Of other items the keys are looked up one by one.
  static constexpr uint64_t kNowhere = 0, kByKey = 1;
  __device__ __forceinline__ void find(const IndexUnit& unit, int32_t page, uint32_t column) {
    const bool is_even = keys_.values_stride_row == kIndexDim &&
                         (keys_.page_table == nullptr || (page_size_.divisor() | column) % kItemKeys == 0);
    values_ = kByKey;
    if (!is_even || column < static_cast<uint32_t>(unit.begin) ||
        column + kItemKeys > static_cast<uint32_t>(unit.end))
      return;
    values_ = kNowhere;
    if (!is_present(page)) return;
    const int64_t row = row_in_page(column);
    values_ = reinterpret_cast<uint64_t>(keys_.value(page, row));
    scales_ = reinterpret_cast<uint64_t>(keys_.scale(page, row));
  }

  __device__ __forceinline__ void fill(const IndexUnit& unit, int32_t column) {
    // A lane finds every 32nd item, all lanes at once, and asks for their pages 32 items before the first.
    const int turn = filled_ % kWarpSize;
    if (turn == 0) {
      find(unit, pages_ahead_, column + lane() * uint32_t{kTileKeys});
      pages_ahead_ = page_of(unit, column + (kWarpSize + lane()) * uint32_t{kTileKeys});
    }
    const uint64_t values = __shfl_sync(kFullWarp, values_, turn);
    const uint64_t scales = __shfl_sync(kFullWarp, scales_, turn);
    if (values == kByKey) Fetch(*this).fill_by_key(unit, column);
    else fill_even(reinterpret_cast<const uint8_t*>(values), reinterpret_cast<const uint8_t*>(scales));
    const uint32_t full = shared_address(&barriers_.full[place_.stage()]);
    mbarrier_arrive_cp_async(full);
    mbarrier_arrive_warp(full, lane());
    place_.advance(kGroups, memory_.num_stages);
    ++filled_;
  }

  // Eight lanes to a key.
  __device__ __forceinline__ void fill_even(const uint8_t* from, const uint8_t* scales) const {
    const bool present = from != nullptr;
    if (!present) {  // an address to read nothing from
      from = keys_.values;
      scales = keys_.scales;
    } else {
      from += first_key() * kIndexDim + lane() * 16;
      scales += 4 * (first_key() + lane());
    }
    const uint32_t to = shared_address(memory_.keys(place_.stage())) + first_key() * kIndexDim;
    const uint32_t even = to + swizzled(lane() / 8, lane() % 8),
                   odd = to + swizzled(4 + lane() / 8, lane() % 8);
#pragma unroll
    for (int i = 0; i < kKeys / 8; ++i) {  // the swizzle repeats with eight keys
      cp_async_16(even + i * 8 * kIndexDim, from + i * 8 * kIndexDim, present);
      cp_async_16(odd + i * 8 * kIndexDim, from + (i * 8 + 4) * kIndexDim, present);
    }
    if (lane() < kKeys) {
      const int key = first_key() + lane();
      cp_async_4(shared_address(memory_.scales(place_) + key), scales, present);
      memory_.present(place_)[key] = present;
    }
  }

  // Of any item. A call, so that it takes no registers of what works around it.
  __device__ __noinline__ void fill_by_key(const IndexUnit& unit, int32_t first_column) const {
    const int32_t column = first_column + first_key() + lane() % kKeys;
    const int32_t page = page_of(unit, column);
    const bool present = is_present(page);
    const int64_t row = row_in_page(column);
    const uint8_t* value = present ? keys_.value(page, row) : nullptr;
    const uint32_t to = shared_address(memory_.keys(place_.stage()));
#pragma unroll 1
    for (int key = lane() / 8; key < kKeys; key += 4) {
      const uint8_t* from = broadcast(value, key);
      cp_async_16(to + swizzled(first_key() + key, lane() % 8),
                  from ? from + 16 * (lane() % 8) : keys_.values, from != nullptr);
    }
    if (lane() < kKeys) {
      const int key = first_key() + lane();
      cp_async_4(shared_address(memory_.scales(place_) + key),
                 present ? keys_.scale(page, row) : keys_.scales, present);
      memory_.present(place_)[key] = present;
    }
  }

  const IndexKeys& keys_;
  const Divider& page_size_;
  const Memory memory_;
  Barriers& barriers_;
  Place place_;                       // of the next item
  int filled_ = 0;                    // items
  uint64_t values_ = 0, scales_ = 0;  // of 32 items, by lanes
  int32_t pages_ahead_ = 0;           // of the 32 items behind them
};

}  // namespace mla_fp8::gpu::sm90_index
