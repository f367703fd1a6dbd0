#pragma once
// The warpgroup that fetches: Q of each item and the rows of its keys, into swizzled tiles.
#include "cuda/sparse_prefill/warpgroups_bf16_config.cuh"
#include "cuda/warp.cuh"

namespace mla_fp8::gpu {

template <class C>
class RowsGather {
 public:
  __device__ RowsGather(const RowsParams& params, RowsSmem<C> smem, int thread)
      : params_(params),
        smem_(smem),
        lane_(thread % kWarpSize),
        row_(thread / 8),
        chunk_(thread % 8),
        offset_(row_ * 128 + ((chunk_ ^ (row_ % 8)) * 16)) {}

  __device__ void run() {
    RowsItems<C> items(params_);
    Entries ahead = entries(*items, 0);
    int num_items = 0, num_first = 0, num_second = 0;  // so far: items, blocks of either buffer
    for (; fetch_q(*items, num_items++); items.advance()) {
      const RowsSource& item = *items;
      prefetch_q(items.next());
      const int num_blocks = C::num_blocks(item.length);
      for (int block = 0; block < num_blocks; ++block) {
        const Entries now = ahead;
        ahead = block + 1 < num_blocks ? entries(item, block + 1) : entries(items.next(), 0);
        fetch_block(item, block, now, block % 2 == 0 ? num_first++ : num_second++);
      }
      if (num_blocks == 0) ahead = entries(items.next(), 0);
    }
    cp_async_wait_all();
  }

 protected:
  // Rows of one thread; half of them; those of a tail, too.
  static constexpr int kRows = 4, kHalf = 2, kAllRows = kRows + (C::kTail > 0), kRowStep = 16;

  // Of a block's keys `lane`, `lane` + 32 and, in the tail, `lane` + 64: their slots, or pages of a window.
  // -1 past the end.
  struct Entries {
    int low, high, tail;
  };
  __device__ Entries entries(const RowsSource& item, int block) const {
    const int key = C::first_key(block) + lane_;
    return {entry(item, key), entry(item, key + kWarpSize), C::kTail ? entry(item, key + 2 * kWarpSize) : -1};
  }
  __device__ int entry(const RowsSource& item, int key) const {
    if (key >= item.length) return -1;
    if constexpr (!C::kWindow) return __ldg(item.entries + key);
    const unsigned page = (item.first_position + key) / page_size();
    return page < params_.p.window.max_pages ? __ldg(item.entries + page) : -1;
  }
  // Where a key of a window lies; null: nowhere.
  __device__ const uint8_t* address(const RowsSource& item, int key, int page) const {
    return address(page, (item.first_position + key) % page_size());
  }
  __device__ const uint8_t* address(int page, unsigned row) const {
    const KvScope& s = params_.p.scopes[0];
    if (page < 0 || int64_t{page} * page_size() + row >= s.num_slots) return nullptr;
    return s.kv_cache + page * s.kv_cache_stride_page + int64_t{row} * (C::kDims * 2);
  }
  __device__ unsigned page_size() const { return static_cast<unsigned>(params_.p.scopes[0].page_size); }

  // This thread's chunk of its rows; zeros where there is none.
  template <int kCount>
  struct Rows {
    const uint8_t* at[kCount];
    bool valid[kCount];
    int count = kCount;
  };
  template <int kCount>
  __device__ void copy_tiles(uint32_t dst, int tile_bytes, const Rows<kCount>& rows, int first, int count,
                             int first_row = 0, int last_row = kCount) const {
    for (int tile = first; tile < first + count; ++tile)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i >= first_row && i < last_row && (i < kRows || i < rows.count))
          cp_async_16(dst + tile * tile_bytes + offset_ + i * kRowStep * 128,
                      rows.at[i] + tile * C::kTileDims * 2, rows.valid[i]);
  }

  __device__ const uint8_t* q_row(const RowsItem& item, RowPlace place) const {
    const SparseAttentionParams& p = params_.p;
    return reinterpret_cast<const uint8_t*>(p.q + (item.token + place.token) * p.q_stride_token +
                                            (item.first_head + place.head) * p.q_stride_head);
  }
  // Tells the other warpgroups what comes next, too. Whether something does.
  __device__ bool fetch_q(const RowsItem& item, int count) const {
    Rows<kRows> rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const RowPlace place = row_place<C>(params_, row_ + i * kRowStep);
      rows.valid[i] = item.has(place, params_.p.num_q_heads);
      rows.at[i] = q_row(item, rows.valid[i] ? place : RowPlace{0, 0}) + chunk_ * 16;
    }
    mbarrier_wait(smem_.q_empty(), (count & 1) ^ 1);
    if (row_ == 0 && chunk_ == 0) {
      smem_.set_item(item);
      mbarrier_arrive(smem_.q_full());
    }
    if (item.length > 0) copy_tiles(smem_.q_tile(0), C::kTileBytes, rows, 0, C::kTiles);
    mbarrier_arrive_cp_async(smem_.q_full());
    return item.num_tokens > 0;
  }
  __device__ void prefetch_q(const RowsItem& item) const {
    if (chunk_ >= 4 || item.length == 0) return;
    const RowPlace place = row_place<C>(params_, row_ * 4 + chunk_);
    if (item.has(place, params_.p.num_q_heads)) bulk_prefetch_l2(q_row(item, place), C::kDims * 2);
  }

  using BlockRows = Rows<kAllRows>;
  __device__ RowsMask find_selected(Entries slots, BlockRows& rows) const {
    const KvScope& s = params_.p.scopes[0];
    const bool low = slots.low >= 0 && slots.low < s.num_slots;
    const bool high = slots.high >= 0 && slots.high < s.num_slots;
    const uint64_t mask = __ballot_sync(kFullWarp, low) | uint64_t{__ballot_sync(kFullWarp, high)} << 32;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row_ + i * kRowStep;
      const int64_t slot = __shfl_sync(kFullWarp, i < 2 ? slots.low : slots.high, row % kWarpSize);
      rows.valid[i] = mask >> row & 1;
      rows.at[i] = s.kv_cache + (rows.valid[i] ? slot * params_.row_stride + chunk_ * 16 : 0);
    }
    return {mask, 0xff};
  }
  // A lane knows the addresses of keys `lane`, `lane` + 32 and so on.
  template <int kCount>
  __device__ void take_rows(const uint8_t* const* at, Rows<kCount>& rows) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto mine = reinterpret_cast<uint64_t>(at[i / 2]);
      const uint64_t row = __shfl_sync(kFullWarp, mine, (row_ + i * kRowStep) % kWarpSize);
      rows.valid[i] = row != 0;
      rows.at[i] =
          row != 0 ? reinterpret_cast<const uint8_t*>(row) + chunk_ * 16 : params_.p.scopes[0].kv_cache;
    }
  }
  __device__ RowsMask find_window(const RowsSource& item, int block, Entries pages, BlockRows& rows) const {
    const int key = C::first_key(block) + lane_;
    const bool has_tail = C::kTail > 0 && block % 2 == 0;
    const uint8_t* const at[3] = {
        address(item, key, pages.low), address(item, key + kWarpSize, pages.high),
        has_tail && lane_ < C::kTail ? address(item, key + 2 * kWarpSize, pages.tail) : nullptr};
    rows.count = has_tail && row_ < C::kTail ? kRows + 1 : kRows;
    take_rows(at, rows);
    const uint32_t tail = __ballot_sync(kFullWarp, at[2] != nullptr);
    return {__ballot_sync(kFullWarp, at[0] != nullptr) | uint64_t{__ballot_sync(kFullWarp, at[1] != nullptr)}
                                                             << 32,
            has_tail ? tail : 0xff};
  }

  __device__ void fetch_block(const RowsSource& item, int block, Entries entries, int count) const {
    const int buffer = block % 2;
    BlockRows rows;
    RowsMask mask;
    if constexpr (C::kWindow) mask = find_window(item, block, entries, rows);
    else mask = find_selected(entries, rows);
    const int parity = (count & 1) ^ 1;
    const auto copy = [&](int piece, int first_row, int last_row) {
      copy_tiles(smem_.tile(buffer, 0), C::key_tile_bytes(buffer), rows, C::first_tile(piece),
                 C::num_tiles(piece), first_row, last_row);
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      mbarrier_wait(smem_.half_empty(buffer, part), parity);
      copy(2 * part, 0, kHalf);
      copy(2 * part + 1, 0, kHalf);
      mbarrier_wait(smem_.empty(buffer, part), parity);
      if (part == 0 && row_ == 0 && chunk_ == 0) {
        smem_.set_mask(buffer, mask);
        mbarrier_arrive(smem_.full(buffer, 0));
      }
#pragma unroll
      for (int piece = 2 * part; piece < 2 * part + 2; ++piece) {
        copy(piece, kHalf, kAllRows);
        mbarrier_arrive_cp_async(smem_.full(buffer, piece));
      }
    }
    if constexpr (C::kHasRope) {
      mbarrier_wait(smem_.empty(buffer, C::kRopePart), parity);
      copy(C::kRopePiece, 0, kRows);
      mbarrier_arrive_cp_async(smem_.full(buffer, C::kRopePiece));
    }
  }

  const RowsParams& params_;
  const RowsSmem<C> smem_;
  const int lane_, row_, chunk_;
  const uint32_t offset_;
};

}  // namespace mla_fp8::gpu
