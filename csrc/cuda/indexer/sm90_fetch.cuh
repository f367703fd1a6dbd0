#pragma once
// How producer warps bring keys into the ring in shared memory on Hopper.
#include "cuda/indexer/sm90.cuh"

namespace mla_fp8::gpu::sm90_index {

__device__ inline void cp_async_4(uint32_t dst, const void* src, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(valid ? 4 : 0)
               : "memory");
}

// A producer warp. It fetches one item of each tile: as a box, as blocks of a list, or key by key.
class Fetch {
 public:
  __device__ __forceinline__ Fetch(const IndexKeys& keys, const KeyBoxes& boxes, const Divider& page_size,
                                   const Memory& memory, Barriers& barriers)
      : keys_(keys),
        boxes_(boxes),
        page_size_(page_size),
        memory_(memory),
        barriers_(barriers),
        place_{item()} {}

  // Fetches the warp's items of `tiles` tiles from `column` on, as stages of the ring become free.
  __device__ __forceinline__ void fetch(const IndexUnit& unit, int32_t column, int tiles) {
    column += item() * kItemKeys;
    if (boxes_.are_blocks) {
      is_whole_ = boxes_.are_whole && is_whole(unit);
      element_ahead_ = block_element(unit, column);
      find_block_ahead(unit);
      element_ahead_ = block_element(unit, column + kBlockTiles * kTileKeys);
    } else if (boxes_.are_used) {
      pages_ahead_ = box_page(unit, column + lane() * kTileKeys);
    }
#pragma unroll 1
    for (int t = 0; t < tiles; ++t, column += kTileKeys) {
      mbarrier_wait(shared_address(&barriers_.empty[place_.stage]), place_.phase ^ 1);
      if (boxes_.are_blocks) fill_blocks(unit, column, t % kBlockTiles);
      else if (boxes_.are_used) fill_box(unit, column, t % kWarpSize);
      else fill_by_key(unit, column);
      place_.advance(kGroups, memory_.num_stages);
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ static int item() { return threadIdx.x % kGroup / kWarpSize; }

  __device__ __forceinline__ int64_t row_in_page(int32_t column) const {
    return keys_.page_table ? column - page_size_(column) * page_size_.divisor() : column;
  }
  __device__ __forceinline__ bool is_present(int32_t page) const {
    return page >= 0 && page < keys_.num_pages;
  }
  // The page in the table, unchecked, so that no instruction waits for the load before it is used.
  __device__ __forceinline__ int32_t table_page(const IndexUnit& unit, int32_t column) const {
    if (keys_.page_table == nullptr) return 0;
    return keys_.page_table[unit.request * keys_.page_table_stride_request + page_size_(column)];
  }

  // Fetches an item as a box. Columns outside the unit are read if their page exists, and not used. Lane i
  // finds the pages of items i, i + 32 ... of the warp; it loads a page 32 items before it is needed.
  __device__ __forceinline__ void fill_box(const IndexUnit& unit, int32_t column, int turn) {
    if (turn == 0) {
      page_ = is_present(pages_ahead_) ? pages_ahead_ : -1;
      row_ = static_cast<int>(row_in_page(column + lane() * kTileKeys));
      pages_ahead_ = box_page(unit, column + (kWarpSize + lane()) * kTileKeys);
    }
    const int page = __shfl_sync(kFullWarp, page_, turn), row = __shfl_sync(kFullWarp, row_, turn);
    const bool present = page >= 0;
    const uint32_t mask = present ? ~0u : 0;
    reinterpret_cast<uint2*>(memory_.present(place_))[lane()] = {mask, mask};
    int entries = present ? kItemKeys : 0;
    if (present && keys_.page_table == nullptr && row > keys_.page_size - kItemKeys) {
      entries = static_cast<int>(keys_.page_size) - row;
      const int last = entries / 4 * 4 + lane();  // the scales behind the last whole sixteen bytes
      if (last < entries)
        memory_.scales(place_)[last] = reinterpret_cast<const float*>(keys_.scale(page, row))[last];
    }
    const int value_bytes = memory_.is_fp4 ? entries * (kIndexDim / 2) : Memory::kPanelBytes;
    const int scale_bytes = entries / 4 * 16;
    const uint32_t full = shared_address(&barriers_.full[place_.stage]);
    mbarrier_arrive_expect_warp(full, value_bytes + scale_bytes, lane());
    if (lane() > 0) return;
    const uint32_t to = shared_address(memory_.keys(place_.stage));
    if (!memory_.is_fp4)  // the copy writes zeros outside the tensor
      tensor_copy(to, boxes_.map, 0, row, present ? page : static_cast<int>(keys_.num_pages), full,
                  boxes_.are_read_again);
    else if (present) bulk_copy(to, keys_.value(page, row), value_bytes, full);
    if (scale_bytes > 0)
      bulk_copy(shared_address(memory_.scales(place_)), keys_.scale(page, row), scale_bytes, full);
  }
  __device__ __forceinline__ int32_t box_page(const IndexUnit& unit, int32_t column) const {
    return column < unit.end && column + kItemKeys > unit.begin ? table_page(unit, column) : -1;
  }

  // Fetches an item as eight blocks of a list, or as a box if the list is whole. Lanes find the blocks of
  // four of the warp's items at a time. A block's page follows from its element, so lanes load elements
  // eight tiles ahead, and pages four.
  static constexpr int kBlock = IndexList::kBlock, kItemBlocks = kItemKeys / kBlock,
                       kBlockTiles = kWarpSize / kItemBlocks;
  __device__ __forceinline__ int32_t block_element(const IndexUnit& unit, int32_t column) const {
    const int32_t own = column + lane() / kItemBlocks * kTileKeys + lane() % kItemBlocks * kBlock;
    return own < unit.end ? keys_.list.element(unit.request, own) : -1;
  }
  __device__ __forceinline__ void find_block_ahead(const IndexUnit& unit) {
    const uint32_t members = unit_members(keys_.list, unit, element_ahead_);
    pages_ahead_ = -1;
    if (is_whole_ ? element_ahead_ < 0 : members == 0) return;
    const int member = is_whole_ ? 0 : __ffs(static_cast<int>(members)) - 1;  // a whole list has one origin
    const auto origin = static_cast<int32_t>(unit.rows[member].request);
    const int32_t position = keys_.list.position(element_ahead_, 0);
    pages_ahead_ = 0;
    row_ahead_ = position + origin;
    if (keys_.page_table != nullptr) {
      const int64_t page = page_size_(position);
      pages_ahead_ = keys_.page_table[origin * keys_.page_table_stride_request + page];
      row_ahead_ = position - static_cast<int32_t>(page * page_size_.divisor());
    }
    row_ahead_ |= static_cast<int32_t>(members << IndexList::kNumberBits);
  }
  __device__ __forceinline__ void fill_blocks(const IndexUnit& unit, int32_t column, int turn) {
    if (turn == 0) {
      page_ = is_present(pages_ahead_) ? pages_ahead_ : -1;
      row_ = row_ahead_;
      find_block_ahead(unit);
      element_ahead_ = block_element(unit, column + 2 * kBlockTiles * kTileKeys);
    }
    constexpr uint32_t kRowBits = (1u << IndexList::kNumberBits) - 1;
    const auto rows = static_cast<int32_t>(keys_.page_size);  // of a page
    {                                                         // each lane takes the scales of two keys
      const int from = turn * kItemBlocks + lane() / (kWarpSize / kItemBlocks);
      const int page = __shfl_sync(kFullWarp, page_, from), row = __shfl_sync(kFullWarp, row_, from);
      uint32_t members = page < 0 ? 0 : static_cast<uint32_t>(row) >> IndexList::kNumberBits;
      if (keys_.list.rows == 1) members = 0 - members;
      reinterpret_cast<uint2*>(memory_.present(place_))[lane()] = {members, members};
#pragma unroll
      for (int i = 0; i < 2 && !is_whole_; ++i) {
        const int key = 2 * lane() + i, own = static_cast<int>(row & kRowBits) + key % kBlock;
        const bool is_there = page >= 0 && own < rows;
        cp_async_4(shared_address(memory_.scales(place_) + key),
                   is_there ? keys_.scale(page, own) : keys_.scales, is_there);
      }
    }
    const int from = turn * kItemBlocks + lane() % kItemBlocks;
    const int page = __shfl_sync(kFullWarp, page_, from),
              row = static_cast<int>(__shfl_sync(kFullWarp, row_, from) & kRowBits);
    const bool copies = lane() < (is_whole_ ? 1 : kItemBlocks) && page >= 0;
    const int key_bytes = memory_.is_fp4 ? kIndexDim / 2 : kIndexDim;
    const int bytes = key_bytes * (is_whole_ ? kItemKeys : memory_.is_fp4 ? min(rows - row, kBlock) : kBlock);
    const int scale_bytes = is_whole_ ? 4 * kItemKeys : 0;
    const uint32_t full = shared_address(&barriers_.full[place_.stage]);
    mbarrier_arrive_cp_async(full);
    mbarrier_arrive_expect_warp(full, lanes_sum(copies ? bytes + scale_bytes : 0), lane());
    if (!copies) return;
    const uint32_t to = shared_address(memory_.keys(place_.stage)) + lane() * kBlock * key_bytes;
    if (is_whole_)
      bulk_copy(shared_address(memory_.scales(place_)), keys_.scale(page, row), scale_bytes, full);
    if (memory_.is_fp4) bulk_copy(to, keys_.value(page, row), bytes, full);
    else if (is_whole_) tensor_copy(to, boxes_.map, 0, row, page, full, boxes_.are_read_again);
    else tensor_copy(to, boxes_.block_map, 0, row, page, full, true);  // zeros outside the tensor
  }
  // Whether the unit's list is whole.
  __device__ __forceinline__ bool is_whole(const IndexUnit& unit) const {
    const IndexList& list = keys_.list;
    return !__any_sync(kFullWarp,
                       lane() < list.rows && list.ends[unit.request * list.rows + lane()] > list.most_whole);
  }

  // Fetches an item key by key, 32 at a time: for pages and lists that have no boxes.
  __device__ __forceinline__ void fill_by_key(const IndexUnit& unit, int32_t first_column) const {
    const uint32_t to = shared_address(memory_.keys(place_.stage));
    const int pieces = memory_.is_fp4 ? 4 : 8, piece = lane() % pieces;
#pragma unroll 1
    for (int first_key = 0; first_key < kItemKeys; first_key += kWarpSize) {
      const int32_t column = first_column + first_key + lane();
      const bool is_seen = column >= unit.begin && column < unit.end;
      const auto [page, row, members] =
          is_seen ? key_place(keys_, page_size_, unit, column) : KeyPlace{-1, 0, 0};
      const bool present = page >= 0;
      const uint8_t* value = present ? keys_.value(page, row) : nullptr;
#pragma unroll 1
      for (int i = lane() / pieces; i < kWarpSize; i += kWarpSize / pieces) {
        const uint8_t* from = broadcast(value, i);
        const int key = first_key + i;
        cp_async_16(to + (memory_.is_fp4 ? key * (kIndexDim / 2) + 16 * piece : swizzled(key, piece)),
                    from ? from + 16 * piece : keys_.values, from != nullptr);
      }
      const int key = first_key + lane();
      cp_async_4(shared_address(memory_.scales(place_) + key),
                 present ? keys_.scale(page, row) : keys_.scales, present);
      memory_.present(place_)[key] = !present ? 0 : keys_.list.rows == 1 ? ~0u : members;
    }
    const uint32_t full = shared_address(&barriers_.full[place_.stage]);
    mbarrier_arrive_cp_async(full);
    mbarrier_arrive_warp(full, lane());
  }

  const IndexKeys& keys_;
  const KeyBoxes& boxes_;
  const Divider& page_size_;
  const Memory memory_;
  Barriers& barriers_;
  Place place_;                                   // of the next item
  int32_t page_ = 0, row_ = 0, pages_ahead_ = 0;  // of 32 items, one a lane; of the 32 behind them
  int32_t row_ahead_ = 0, element_ahead_ = -1;    // of blocks: the row, members above it; the element
  bool is_whole_ = false;                         // the list
};

}  // namespace mla_fp8::gpu::sm90_index
