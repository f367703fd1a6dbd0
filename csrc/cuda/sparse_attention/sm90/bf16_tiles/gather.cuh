#pragma once
// The warpgroup that fetches Q of each item and the rows of its keys into swizzled panels.
#include "cuda/sparse_attention/sm90/bf16_tiles/smem.cuh"

namespace mla_fp8::gpu {

template <class C>
class TileGather {
 public:
  __device__ TileGather(const TileParams& params, TileSmem<C> smem, int thread)
      : params_(params),
        smem_(smem),
        warp_(thread / kWarpSize),
        lane_(thread % kWarpSize),
        chunk_(thread % 8),
        key_(key_of(warp_, lane_)),
        offset_{offset(row(0)), offset(row(1))} {}

  __device__ void run() {
    TileItems<C> items(params_);
    ItemKeys keys = find_keys(*items);
    Entry ahead = entry(*items, keys, 0);
    int num_first = 0, num_second = 0;  // blocks of either buffer so far
    for (int i = 0; fetch_q(*items, i); ++i) {
      prefetch_q(items.next());
      const int num_blocks = C::num_blocks((*items).length);
      for (int block = 0; block < num_blocks; ++block) {
        const Entry now = ahead;
        if (block + 1 < num_blocks) ahead = entry(*items, keys, block + 1);
        fetch_block(block, now, block % 2 == 0 ? num_first++ : num_second++, keys.repeat);
      }
      items.advance();
      keys = find_keys(*items);  // both buffers are full: there is time
      ahead = entry(*items, keys, 0);
    }
    cp_async_wait_all();
  }

 protected:
  // A warp has eight of a block's first 32 rows, eight of the others, and half of a tail or nothing. A thread
  // has four of these rows, and one of the tail: 16 bytes of each in every panel.
  static constexpr int kRows = 4, kHalf = 2, kAllRows = kRows + (C::kTail > 0);
  __device__ int row(int i) const {
    return i < kRows ? i / 2 * 32 + warp_ * 8 + i % 2 * 4 + lane_ / 8 : 64 + warp_ * 4 + lane_ / 8;
  }
  __device__ uint32_t offset(int row) const { return row * 128 + ((chunk_ ^ row % 8) * 16); }
  // The first 16 lanes find a key of the warp's rows each, eight more lanes those of a tail.
  static constexpr int kNoKey = 1 << 29;  // past every length
  __device__ static int key_of(int warp, int lane) {
    if (lane < 16) return lane / 8 * 32 + warp * 8 + lane % 8;
    return lane < 16 + C::kTail ? 64 + lane - 16 : kNoKey;
  }
  __device__ int lane_of(int i) const {  // the lane that knows row(i)
    return i < kRows ? i * 4 + lane_ / 8 : 16 + (warp_ * 4 + lane_ / 8) % 8;
  }
  __device__ static bool has_tail(int block) { return C::kTail > 0 && block % 2 == 0; }

  // A key as it is listed: the slot in one of the caches, or a page and the key's position in the request.
  struct SlotEntry {
    int value;
  };
  struct AnyEntry {
    int value;
    unsigned position;  // position in the window's request; or kSlotOf + a cache
    static constexpr unsigned kSlotOf = 1u << 31;
    __device__ bool is_page() const { return position < kSlotOf; }
    __device__ int scope() const { return position > kSlotOf; }
  };
  // A page of the window or of the entries, and the row in it.
  struct RowEntry {
    int value;
    unsigned row;  // or kOfEntries + it
    static constexpr unsigned kOfEntries = 1u << 31;
    __device__ int scope() const { return row >= kOfEntries; }
  };
  using Entry =
      std::conditional_t<C::kSelected, SlotEntry, std::conditional_t<C::kEntries, RowEntry, AnyEntry>>;

  // The keys of an item, as KeySource gives them.
  class Source {
   public:
    using Key = Entry;
    __device__ Source(const TileGather& gather, const TileSource& item) : gather_(gather), item_(item) {}
    __device__ unsigned length() const { return item_.num_entries; }
    __device__ bool is_window() const { return gather_.is_window(); }
    __device__ int entry(unsigned position) const {
      const int32_t* const list = is_extra(position) ? item_.extra - item_.first_length : item_.entries;
      return position < length() ? __ldg(list + position) : -1;
    }
    __device__ bool is_slot(int entry, unsigned position) const {
      const KvScope(&scopes)[2] = gather_.params_.p.scopes;
      return entry >= 0 && entry < (is_extra(position) ? scopes[1].num_slots : scopes[0].num_slots);
    }
    __device__ Entry at(unsigned position) const {
      if constexpr (C::kSelected) {
        return {entry(position)};
      } else if constexpr (C::kEntries) {
        if (position >= length()) return {-1};
        const bool is_extra = position >= static_cast<unsigned>(item_.first_length);
        const unsigned in_request =
            is_extra ? position - item_.first_length : item_.first_position + position;
        const SparseAttentionParams& p = gather_.params_.p;
        const Divider& page_size = gather_.params_.page_size[is_extra];
        const int64_t page = page_size(in_request);
        const int32_t* const pages = is_extra ? item_.extra : item_.entries;
        const bool is_listed = page < (is_extra ? p.entry_pages.max_pages : p.window.max_pages);
        return {is_listed ? __ldg(pages + page) : -1,
                static_cast<unsigned>(in_request - page * page_size.divisor()) +
                    (is_extra ? Entry::kOfEntries : 0)};
      } else {
        if (!is_window() || is_extra(position)) return {entry(position), Entry::kSlotOf + is_extra(position)};
        if (position >= length()) return {-1};
        const unsigned in_request = item_.first_position + position;
        const int64_t page = gather_.params_.page_size[0](in_request);
        return {page < gather_.params_.p.window.max_pages ? __ldg(item_.entries + page) : -1, in_request};
      }
    }
    __device__ bool is_valid(Entry entry) const { return gather_.is_valid(entry); }

   private:
    __device__ bool is_extra(unsigned position) const {
      return C::kAny && position >= static_cast<unsigned>(item_.first_length);
    }

    const TileGather& gather_;
    const TileSource& item_;
  };

  // The valid keys of an item; for windows all keys.
  struct ItemKeys {
    ValidKeys<MapInLanes> valid;  // in lanes: the next item's map may be in shared memory
    bool repeat;                  // this warp has seen a slot twice
    int position;  // if keys have gaps: position of the lane's key of two blocks, an even one and the next
  };
  // The warps survey the item: from then on it has only its valid keys.
  __device__ ItemKeys find_keys(TileSource& item) const {
    if constexpr (!C::kCounted) return {};
    const uint32_t map = smem_.smem + MLA_SMEM(C, map);
    named_barrier(kBarrierGather, kGroupThreads);  // the map of the item before has been read
    const bool repeat = survey_keys<kGroupWarps, 8>(Source(*this, item), warp_, lane_, map, [] {});
    named_barrier(kBarrierGather, kGroupThreads);
    const KeySurvey survey(map, item.num_entries, lane_);
    item.length = survey.num_keys;
    return {{survey, survey.map}, repeat, -1};
  }
  // The entry of this lane's key in a block.
  __device__ Entry entry(const TileSource& item, ItemKeys& keys, int block) const {
    const int key = C::first_key(block) + key_;
    const bool is_key = key < item.length && (C::kTail == 0 || has_tail(block) || lane_ < 16);
    if constexpr (!C::kCounted) return Source(*this, item).at(is_key ? key : item.num_entries);
    const Source source(*this, item);
    if (!keys.valid.has_gaps()) [[likely]]
      return source.at(is_key ? key : -1);  // past every end
    // All warps search at the same time, and nothing is copied meanwhile. So one search serves all lanes,
    // with a key each in an even block and the next. The search for the next two comes behind this load.
    const auto search = [&](int block) {
      const int rank = C::first_key(block) + lane_ / 8 * 32 + warp_ * 8 + lane_ % 8;
      keys.position = keys.valid.search(source, rank < item.length ? rank : -1);
    };
    if (block == 0) search(0);
    const int position = __shfl_sync(kFullWarp, keys.position, block % 2 * 16 + lane_ % 16);
    const Entry found = source.at(is_key ? position : -1);
    if (block % 2 == 1) search(block + 1);
    return found;
  }
  __device__ bool is_valid(Entry entry) const {
    if constexpr (C::kSelected) return entry.value >= 0 && entry.value < params_.p.scopes[0].num_slots;
    else return address(entry) != nullptr;
  }
  // The address of a key's row; null: there is none.
  __device__ const uint8_t* address(const RowEntry& entry) const {
    return row_address(entry.scope(), entry.value, entry.row % RowEntry::kOfEntries);
  }
  __device__ const uint8_t* address(const AnyEntry& entry) const {
    if (!entry.is_page()) return slot_address(entry.scope(), entry.value);
    const Divider& page_size = params_.page_size[0];
    const int64_t position = entry.position;
    return row_address(0, entry.value, position - page_size(position) * page_size.divisor());
  }
  __device__ const uint8_t* slot_address(int scope, int slot) const {
    const Divider& page_size = params_.page_size[scope];
    const int64_t page = page_size(slot);
    return slot < 0 ? nullptr : row_address(scope, page, slot - page * page_size.divisor());
  }
  __device__ const uint8_t* row_address(int scope, int64_t page, int64_t row) const {
    const KvScope& s = params_.p.scopes[scope];
    if (page < 0 || page * s.page_size + row >= s.num_slots) return nullptr;
    return s.kv_cache + page * s.kv_cache_stride_page + row * (C::kDims * 2);
  }
  __device__ bool is_window() const { return C::kNeighbours || (C::kAny && params_.p.is_window); }

  // This thread's chunk of its rows; zeros where there is no row.
  template <int kCount>
  struct Rows {
    const uint8_t* at[kCount];
    bool valid[kCount];
    int count = kCount;
  };
  template <bool kThroughL1 = false, int kCount>
  __device__ void copy_panels(uint32_t dst, int panel_bytes, const Rows<kCount>& rows, int first, int count,
                              int first_row = 0, int last_row = kCount) const {
    for (int panel = first; panel < first + count; ++panel)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i >= first_row && i < last_row && (i < kRows || i < rows.count))
          cp_async_16<kThroughL1>(
              dst + panel * panel_bytes + (i < kRows ? offset_[i % 2] + i / 2 * 32 * 128 : offset(row(i))),
              rows.at[i] + panel * C::kPanelDims * 2, rows.valid[i]);
  }

  __device__ const uint8_t* q_row(const RowTile& item, QueryHead place) const {
    const SparseAttentionParams& p = params_.p;
    return reinterpret_cast<const uint8_t*>(p.q + (item.query + place.query) * p.q_stride_token +
                                            (item.first_head + place.head) * p.q_stride_head);
  }
  // Fetches Q, and tells the other warpgroups what comes next. Returns whether something does.
  __device__ bool fetch_q(const RowTile& item, int count) const {
    Rows<kRows> rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const QueryHead place = query_head<C>(params_, row(i));
      rows.valid[i] = item.has(place, params_.p.num_q_heads);
      rows.at[i] = q_row(item, rows.valid[i] ? place : QueryHead{0, 0}) + chunk_ * 16;
    }
    wait_until_free<1>(smem_.q_empty(), count);
    if (warp_ == 0 && lane_ == 0) {
      smem_.set_item(item);
      mbarrier_arrive(smem_.q_full());
    }
    if (item.length > 0) copy_panels(smem_.q_panel(0), C::kPanelBytes, rows, 0, C::kPanels);
    mbarrier_arrive_cp_async(smem_.q_full());
    return item.num_queries > 0;
  }
  // Brings Q to L2.
  __device__ void prefetch_q(const RowTile& item) const {
    if (chunk_ >= 4 || item.length == 0) return;
    const QueryHead place = query_head<C>(params_, (warp_ * 4 + lane_ / 8) * 4 + chunk_);
    if (item.has(place, params_.p.num_q_heads)) bulk_prefetch_l2(q_row(item, place), C::kDims * 2);
  }

  using BlockRows = Rows<kAllRows>;
  // Finds this thread's rows. Returns the lanes whose keys are there, as take_rows does.
  __device__ uint32_t find(int block, const Entry& entry, BlockRows& rows) const {
    if constexpr (!C::kSelected) {
      rows.count = has_tail(block) && warp_ < 2 ? kAllRows : kRows;
      return take_rows(address(entry), rows);
    } else {
      const uint8_t* const kv = params_.p.scopes[0].kv_cache;
      const uint32_t found = __ballot_sync(kFullWarp, is_valid(entry));
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int64_t slot = __shfl_sync(kFullWarp, entry.value, lane_of(i));
        rows.valid[i] = found >> lane_of(i) & 1;
        rows.at[i] = kv + (rows.valid[i] ? slot * params_.row_stride + chunk_ * 16 : 0);
      }
      return found;
    }
  }
  // Takes them from the addresses of the lanes' keys.
  template <int kCount>
  __device__ uint32_t take_rows(const uint8_t* at, Rows<kCount>& rows) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint64_t row = __shfl_sync(kFullWarp, reinterpret_cast<uint64_t>(at), lane_of(i));
      rows.valid[i] = row != 0;
      rows.at[i] =
          row != 0 ? reinterpret_cast<const uint8_t*>(row) + chunk_ * 16 : params_.p.scopes[0].kv_cache;
    }
    return __ballot_sync(kFullWarp, at != nullptr);
  }

  // Stores the warp's part of a block's mask.
  __device__ void publish_mask(int buffer, uint32_t found) const {
    if (lane_ != 0) return;
    smem_.set_mask(buffer, warp_, found);
    mbarrier_arrive(smem_.full(buffer, 0));
  }

  // Fetches a block; through the L1 if keys repeat, where other rows take longer. Thousands of copies of one
  // row would queue at its few lines of the L2.
  __device__ void fetch_block(int block, const Entry& entry, int count, bool through_l1) const {
    BlockRows rows;
    const uint32_t found = find(block, entry, rows);
    if (C::kCounted && through_l1) [[unlikely]]
      copy_block<true>(block, rows, found, count);
    else copy_block<false>(block, rows, found, count);
  }
  template <bool kThroughL1>
  __device__ __forceinline__ void copy_block(int block, const BlockRows& rows, uint32_t found,
                                             int count) const {
    const int buffer = block % 2;
    const auto copy = [&](int piece, int first_row, int last_row) {
      copy_panels<kThroughL1>(smem_.panel(buffer, 0), C::key_panel_bytes(buffer), rows, C::first_panel(piece),
                              C::num_panels(piece), first_row, last_row);
    };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      wait_until_free<1>(smem_.half_empty(buffer, part), count);
      copy(2 * part, 0, kHalf);
      copy(2 * part + 1, 0, kHalf);
      wait_until_free<1>(smem_.empty(buffer, part), count);
#pragma unroll
      for (int piece = 2 * part; piece < 2 * part + 2; ++piece) {
        copy(piece, kHalf, kAllRows);
        mbarrier_arrive_cp_async(smem_.full(buffer, piece));
      }
      if (part == 0) publish_mask(buffer, found);
    }
    if constexpr (C::kHasRope) {
      wait_until_free<1>(smem_.empty(buffer, C::kRopePart), count);
      copy(C::kRopePiece, 0, kRows);
      mbarrier_arrive_cp_async(smem_.full(buffer, C::kRopePiece));
    }
  }

  const TileParams& params_;
  const TileSmem<C> smem_;
  const int warp_, lane_, chunk_, key_;
  const uint32_t offset_[2];  // for row(0), row(1)
};

}  // namespace mla_fp8::gpu
