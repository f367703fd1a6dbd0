#pragma once
// The warps that fetch keys on Hopper.
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

__device__ inline void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
               : "memory");
}
// Fills the items of one warpgroup.
class Producer {
 public:
  __device__ __forceinline__ Producer(const IndexKeys& keys, const Divider& page_size, const Memory& memory,
                                      Barriers& barriers)
      : keys_(keys),
        page_size_(page_size),
        memory_(memory),
        barriers_(barriers),
        warp_(threadIdx.x / kWarpSize - kMathThreads / kWarpSize),
        lane_(threadIdx.x % kWarpSize),
        place_{memory.num_stages, warp_} {}

  // The warp's items of tiles from `column` on.
  __device__ __forceinline__ void run(const IndexUnit& unit, int32_t column, int tiles) {
    column += warp_ * kItemKeys;
    const int32_t* table =
        keys_.page_table ? keys_.page_table + unit.request * keys_.page_table_stride_request : nullptr;
    // Items of one page, whose keys lie one behind the other.
    const bool is_even = keys_.values_stride_row == kIndexDim &&
                         (table == nullptr || (page_size_.divisor() | column) % kItemKeys == 0);
    Entry next = find(table, unit, column);
    for (int t = 0; t < tiles; ++t, column += kTileKeys) {
      const Entry now = next;
      if (t + 1 < tiles) next = find(table, unit, column + kTileKeys);
      mbarrier_wait(shared_address(&barriers_.empty[place_.stage]), place_.phase ^ 1);
      if (is_even && column >= unit.begin && column + kItemKeys <= unit.end) fill(now);
      else fill_by_key(table, unit, column);
      const uint32_t full = shared_address(&barriers_.full[place_.stage]);
      mbarrier_arrive_cp_async(full);
      mbarrier_arrive_warp(full, lane_);
      place_.advance(kGroups);
    }
  }

 private:
  struct Entry {
    int32_t page, row;  // as the table says it: nobody waits for it before it is used
  };

  __device__ __forceinline__ Entry find(const int32_t* table, const IndexUnit& unit, int32_t column) const {
    if (column < unit.begin || column >= unit.end) return {-1, 0};
    if (table == nullptr) return {0, column};
    const int32_t page_index = static_cast<int32_t>(page_size_(column));
    return {table[page_index], column - page_index * static_cast<int32_t>(page_size_.divisor())};
  }
  __device__ __forceinline__ bool is_present(const Entry& entry) const {
    return entry.page >= 0 && entry.page < keys_.num_pages;
  }

  // Of an item whose first key `entry` is. Eight lanes to a key.
  __device__ __forceinline__ void fill(const Entry& entry) const {
    const bool present = is_present(entry);
    const uint8_t* from = keys_.values;
    const uint8_t* scales = keys_.scales;
    if (present) {
      from = keys_.value(entry.page, entry.row);
      scales = keys_.scale(entry.page, entry.row);
    }
    from += lane_ * 16;
    const uint32_t to = shared_address(memory_.keys(place_.stage));
    const uint32_t even = to + swizzled(lane_ / 8, lane_ % 8), odd = to + swizzled(4 + lane_ / 8, lane_ % 8);
#pragma unroll
    for (int i = 0; i < kItemKeys / 8; ++i) {  // the swizzle repeats with eight keys
      cp_async_16(even + i * 8 * kIndexDim, from + i * 8 * kIndexDim, present);
      cp_async_16(odd + i * 8 * kIndexDim, from + (i * 8 + 4) * kIndexDim, present);
    }
    const uint32_t scales_to = shared_address(memory_.scales(place_.stage) + lane_);
    cp_async_4(scales_to, scales + 4 * lane_, present);
    cp_async_4(scales_to + 4 * kWarpSize, scales + 4 * (kWarpSize + lane_), present);
    memory_.present(place_.stage)[lane_] = present;
    memory_.present(place_.stage)[kWarpSize + lane_] = present;
  }

  // Of any item.
  __device__ __forceinline__ void fill_by_key(const int32_t* table, const IndexUnit& unit,
                                              int32_t column) const {
    const uint32_t to = shared_address(memory_.keys(place_.stage));
#pragma unroll 1
    for (int first = 0; first < kItemKeys; first += kWarpSize) {
      const Entry entry = find(table, unit, column + first + lane_);
      const bool present = is_present(entry);
      const uint8_t* value = present ? keys_.value(entry.page, entry.row) : nullptr;
#pragma unroll 1
      for (int key = lane_ / 8; key < kWarpSize; key += 4) {
        const uint8_t* from = broadcast(value, key);
        cp_async_16(to + swizzled(first + key, lane_ % 8), from ? from + 16 * (lane_ % 8) : keys_.values,
                    from != nullptr);
      }
      cp_async_4(shared_address(memory_.scales(place_.stage) + first + lane_),
                 present ? keys_.scale(entry.page, entry.row) : keys_.scales, present);
      memory_.present(place_.stage)[first + lane_] = present;
    }
  }

  const IndexKeys& keys_;
  const Divider& page_size_;
  const Memory& memory_;
  Barriers& barriers_;
  const int warp_, lane_;
  Place place_;
};

}  // namespace mla_fp8::gpu::sm90_index
